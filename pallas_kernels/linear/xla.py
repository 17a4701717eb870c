"""The gated delta rule in plain JAX, chunk by chunk: for any device, dtype, head dim and length.

    S_t = (I - b_t k_t k_t^T) a_t S_{t-1} + b_t k_t v_t^T,   o_t = scale S_t^T q_t

The decay a_t is a number per head, or a diagonal matrix, with a number per key channel. Within a
chunk, with k_r D_ri k_i the products weighted by the decays from token to token
(:mod:`pallas_kernels.linear.scores`), P the same of queries and keys, ``X = (I + A)^-1`` and
``A_ri = b_r k_r D_ri k_i`` below the diagonal:

    R = V - (into K) S,  U = X (b R),  O = scale ((into Q) S + P U),
    S' = through S + (out K)^T U
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import pad_axis
from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import CHUNK, Tokens, chunk_decays
from pallas_kernels.linear.scores import scores


class _Chunks(NamedTuple):
    """Of every chunk, the chunks in front: ``[chunks, B, N, ...]``.

    Attributes:
      q: ``[64, H]``.
      k: the same.
      v: ``[64, Hv]``.
      x: X beta, ``[64, 64]``.
      p: P, the same shape.
      into: ``[64, C]``, the decay from the chunk's start; 0 where a document begins in between. C
        is 1 for a decay per head, H for one per key channel.
      out: ``[64, C]``, the decay to the chunk's end, the same.
    """

    q: Any
    k: Any
    v: Any
    x: Any
    p: Any
    into: Any
    out: Any

    @property
    def through(self) -> Any:
        """The decay of a state from the chunk's start to its end, ``[C, 1]``."""
        return self.into[..., -1, :, None]


class _Prepared(NamedTuple):
    """What the passes share.

    Attributes:
      chunks: of the inputs.
      pull: from the chunks' gradients to those of q, k, v, log_decay and beta; None in the forward
        pass.
    """

    chunks: _Chunks
    pull: Any = None


def _prepare(inputs: Inputs) -> _Prepared:
    return _Prepared(_chunks(*inputs))


def _restore(inputs: Inputs, kept: None) -> _Prepared:
    """The chunks would be many times the inputs' memory, so that they are computed again."""
    del kept

    def chunks(*arrays: Any) -> _Chunks:
        return _chunks(*arrays, tokens=inputs.tokens)

    return _Prepared(*jax.vjp(chunks, *inputs[:5]))


def _forward(
    inputs: Inputs, prepared: _Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, None]:
    v, tokens = inputs.v, inputs.tokens
    o, last = _scan(prepared.chunks, start, scale, v.dtype)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [B, chunks, 64, N, Hv]
    o = o.reshape(v.shape[0], -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype)
    if tokens is not None:
        o = jnp.where(tokens.valid[..., None, None], o, 0)
    return o, last, None


def _scan(
    chunks: _Chunks, start: jax.Array, scale: float, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The output ``[chunks, B, N, 64, Hv]`` and the last state."""
    product = functools.partial(_product, dtype=dtype)

    @jax.checkpoint
    def step(state, chunk):
        state, u = _next_state(chunk, state, product)
        return state[1], _output(chunk, state[0], u, scale, product)

    last, o = lax.scan(step, start.astype(jnp.float32), chunks)
    return o, last


def _next_state(chunk: _Chunks, state: jax.Array, product: Any) -> Any:
    """The states before and after a chunk, and U."""
    u = product("bnri,bniv->bnrv", chunk.x, chunk.v - _read(chunk.k, chunk.into, state, product))
    after = chunk.through * state + _written(chunk.k, chunk.out, u, product)
    return (state, after), u


def _output(
    chunk: _Chunks, state: jax.Array, u: jax.Array, scale: float, product: Any
) -> jax.Array:
    o = _read(chunk.q, chunk.into, state, product)
    return scale * (o + product("bnri,bniv->bnrv", chunk.p, u))


# A decay per head scales the side of the values, which rounds less than scaling queries and keys.
def _read(rows: jax.Array, decay: jax.Array, state: jax.Array, product: Any) -> jax.Array:
    """``(decay rows) S``."""
    if decay.shape[-1] == 1:
        return decay * product("bnrk,bnkv->bnrv", rows, state)
    return product("bnrk,bnkv->bnrv", decay * rows, state)


def _written(rows: jax.Array, decay: jax.Array, values: jax.Array, product: Any) -> jax.Array:
    """``(decay rows)^T values``."""
    if decay.shape[-1] == 1:
        return product("bnrk,bnrv->bnkv", rows, decay * values)
    return product("bnrk,bnrv->bnkv", decay * rows, values)


def _mapped(inputs: Inputs, start: jax.Array) -> tuple[_Prepared, jax.Array]:
    """M's columns are states that start as the identity, of tokens without values."""
    prepared = _prepare(inputs)
    dtype, (*_, keys, values) = inputs.v.dtype, start.shape
    product = functools.partial(_product, dtype=dtype)
    identity = jnp.broadcast_to(jnp.eye(keys, dtype=jnp.float32), (*start.shape[:2], keys, keys))

    def step(state, chunk):
        chunk = chunk._replace(v=pad_axis(chunk.v, -1, values + keys))
        return _next_state(chunk, state, product)[0][1], None

    both = jnp.concatenate([start.astype(jnp.float32), identity], axis=-1)
    last, _ = lax.scan(step, both, prepared.chunks)
    return prepared, last.mT


def _first_gradient(
    inputs: Inputs, prepared: _Prepared, do: jax.Array, last: jax.Array, scale: float
) -> jax.Array:
    """The transpose of the scan, from the last chunk to the first."""
    product = functools.partial(_product, dtype=inputs.v.dtype)

    def step(state, given):
        chunk, do = given
        du = scale * product("bnri,bnrv->bniv", chunk.p, do)
        du = du + _read(chunk.k, chunk.out, state, product)
        dr = product("bnri,bnrv->bniv", chunk.x, du)
        state = chunk.through * state + _written(chunk.q, scale * chunk.into, do, product)
        return state - _written(chunk.k, chunk.into, dr, product), None

    given = prepared.chunks, _cut(do.astype(jnp.float32))
    return lax.scan(step, last.astype(jnp.float32), given, reverse=True)[0]


def _backward(
    inputs: Inputs,
    prepared: _Prepared,
    start: jax.Array,
    do: jax.Array,
    last: jax.Array,
    scale: float,
) -> Gradients:
    dtype = inputs.v.dtype

    def run(chunks, start):
        return _scan(chunks, start, scale, dtype)

    _, vjp = jax.vjp(run, prepared.chunks, start.astype(jnp.float32))
    chunks, first = vjp((_cut(do.astype(jnp.float32)), last.astype(jnp.float32)))
    q, k, v, log_decay, beta = prepared.pull(chunks)
    return Gradients(q, k, v, log_decay.astype(jnp.float32), beta.astype(jnp.float32), first)


XLA = Implementation(
    name="xla",
    prepare=_prepare,
    forward=_forward,
    mapped=_mapped,
    restore=_restore,
    first_gradient=_first_gradient,
    backward=_backward,
)


def _cut(x: jax.Array) -> jax.Array:
    """``[chunks, B, N, 64, ...]`` of ``[B, T, N, ...]``, padded with zeros."""
    x = pad_axis(x, 1, -(-x.shape[1] // CHUNK) * CHUNK)
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _product(spec: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """A product of rounded operands, accumulated in float32."""
    return jnp.einsum(
        spec,
        x.astype(dtype),
        y.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    tokens: Tokens | None,
) -> _Chunks:
    groups = v.shape[2] // k.shape[2]
    begins = None if tokens is None else _cut(tokens.begins[..., None])
    q, k, v, log_decay, beta = map(_cut, (q, k, v, log_decay, beta))
    product = functools.partial(_product, dtype=v.dtype)
    # One decay per key channel, or a last axis of one per head.
    log_decay = log_decay.reshape(*beta.shape, -1)
    decays = chunk_decays(log_decay, begins)
    p, kk = scores((q, k), k, decays.logs, product)
    q, k = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (q, k))
    if decays.document is not None:
        document = decays.document
        same = document[..., :, None] == document[..., None, :]
        p, kk = (jnp.where(same, x, 0) for x in (p, kk))
    index = jnp.arange(CHUNK, dtype=jnp.int32)
    beta = beta.astype(jnp.float32)
    a = jnp.where(index[:, None] > index, beta[..., None] * kk, 0)
    identity = jnp.eye(CHUNK, dtype=jnp.float32)
    x = lax.linalg.triangular_solve(
        a + identity, jnp.broadcast_to(identity, a.shape),
        left_side=True, lower=True, unit_diagonal=True,
    )  # fmt: skip
    x = x * beta[..., None, :]
    return _Chunks(q, k, v.astype(jnp.float32), x, p, decays.into, decays.out)
