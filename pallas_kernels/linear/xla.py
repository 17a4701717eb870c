"""The gated delta rule in plain JAX, chunk by chunk: for any device, dtype, head dim and length.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   o_t = scale S_t^T q_t

Within a chunk, with D the decays from token to token, ``X = (I + A)^-1`` and
``A_ri = b_r D_ri k_r k_i`` below the diagonal:

    R = V - into (K S),  U = X (b R),  O = scale (into (Q S) + (D Q K^T) U),
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
from pallas_kernels.linear.chunks import CHUNK, LEAST_LOG_DECAY, Tokens


class _Chunks(NamedTuple):
    """Of every chunk, the chunks in front: ``[chunks, B, N, ...]``.

    Attributes:
      q: ``[64, H]``.
      k: the same.
      v: ``[64, Hv]``.
      x: X beta, ``[64, 64]``.
      p: D Q K^T, the same shape.
      into: ``[64]``, the decay from the chunk's start; 0 where a document begins in between.
      out: ``[64]``, the decay to the chunk's end, the same.
    """

    q: Any
    k: Any
    v: Any
    x: Any
    p: Any
    into: Any
    out: Any


class _Prepared(NamedTuple):
    """What the passes share.

    Attributes:
      chunks: of the inputs.
      pull: from the chunks' gradients to those of q, k, v, log_decay and beta; None in the forward
        pass.
    """

    chunks: _Chunks
    pull: Any = None


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    start: jax.Array,
    scale: float,
    tokens: Tokens | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output ``[B, T, N, Hv]`` and the state after the last token, of :class:`Inputs`.

    Args:
      q: ``[B, T, K, H]``.
      k: the same.
      v: ``[B, T, N, Hv]``.
      log_decay: ``[B, T, N]``.
      beta: ``[B, T, N]``.
      start: state before the first token, ``[B, N, H, Hv]``.
      scale: of q k.
      tokens: documents and padding; None without them.
    """
    inputs = Inputs(q, k, v, log_decay, beta, tokens)
    return _forward(inputs, _prepare(inputs), start, scale)


def _prepare(inputs: Inputs) -> _Prepared:
    return _Prepared(_chunks(*inputs))


def _restore(inputs: Inputs, kept: None) -> _Prepared:
    """The chunks would be many times the inputs' memory, so that they are computed again."""
    del kept
    return _Prepared(*jax.vjp(lambda *arrays: _chunks(*arrays, inputs.tokens), *inputs[:5]))


def _forward(
    inputs: Inputs, prepared: _Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    v, tokens = inputs.v, inputs.tokens
    o, last = _scan(prepared.chunks, start, scale, v.dtype)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [B, chunks, 64, N, Hv]
    o = o.reshape(v.shape[0], -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype)
    if tokens is not None:
        o = jnp.where(tokens.valid[..., None, None], o, 0)
    return o, last


def _scan(
    chunks: _Chunks, start: jax.Array, scale: float, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The output ``[chunks, B, N, 64, Hv]`` and the last state."""
    product = functools.partial(_product, dtype=dtype)

    @jax.checkpoint
    def step(state, chunk):
        state, u = _next_state(chunk, state, product)
        return state[1], _read(chunk, state[0], u, scale, product)

    last, o = lax.scan(step, start.astype(_wide(dtype)), chunks)
    return o, last


def _next_state(chunk: _Chunks, state: jax.Array, product: Any) -> Any:
    """The states before and after a chunk, and U."""
    read = product("bnrk,bnkv->bnrv", chunk.k, state)
    u = product("bnri,bniv->bnrv", chunk.x, chunk.v - chunk.into[..., None] * read)
    after = chunk.into[..., -1, None, None] * state
    after = after + product("bnrk,bnrv->bnkv", chunk.k * chunk.out[..., None], u)
    return (state, after), u


def _read(chunk: _Chunks, state: jax.Array, u: jax.Array, scale: float, product: Any) -> jax.Array:
    o = product("bnrk,bnkv->bnrv", chunk.q, state) * chunk.into[..., None]
    return scale * (o + product("bnri,bniv->bnrv", chunk.p, u))


def _affine(inputs: Inputs, prepared: _Prepared, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """M's columns are states that start as the identity, of tokens without values."""
    dtype, (*_, keys, values) = inputs.v.dtype, start.shape
    product = functools.partial(_product, dtype=dtype)
    identity = jnp.broadcast_to(jnp.eye(keys, dtype=_wide(dtype)), (*start.shape[:2], keys, keys))

    def step(state, chunk):
        chunk = chunk._replace(v=pad_axis(chunk.v, -1, values + keys))
        return _next_state(chunk, state, product)[0][1], None

    both = jnp.concatenate([start.astype(_wide(dtype)), identity], axis=-1)
    last, _ = lax.scan(step, both, prepared.chunks)
    return last[..., values:], last[..., :values]


def _first_gradient(
    inputs: Inputs, prepared: _Prepared, do: jax.Array, last: jax.Array, scale: float
) -> jax.Array:
    """The transpose of the scan, from the last chunk to the first."""
    product = functools.partial(_product, dtype=inputs.v.dtype)

    def step(state, given):
        chunk, do = given
        du = scale * product("bnri,bnrv->bniv", chunk.p, do)
        du = du + product("bnrk,bnkv->bnrv", chunk.k * chunk.out[..., None], state)
        dr = product("bnri,bnrv->bniv", chunk.x, du) * chunk.into[..., None]
        state = chunk.into[..., -1, None, None] * state
        state = state + product("bnrk,bnrv->bnkv", chunk.q, do * (scale * chunk.into[..., None]))
        return state - product("bnrk,bnrv->bnkv", chunk.k, dr), None

    wide = _wide(inputs.v.dtype)
    given = prepared.chunks, _cut(do.astype(wide))
    return lax.scan(step, last.astype(wide), given, reverse=True)[0]


def _backward(
    inputs: Inputs,
    prepared: _Prepared,
    start: jax.Array,
    do: jax.Array,
    last: jax.Array,
    scale: float,
) -> Gradients:
    dtype, wide = inputs.v.dtype, _wide(inputs.v.dtype)

    def run(chunks, start):
        return _scan(chunks, start, scale, dtype)

    _, vjp = jax.vjp(run, prepared.chunks, start.astype(wide))
    chunks, first = vjp((_cut(do.astype(wide)), last.astype(wide)))
    q, k, v, log_decay, beta = prepared.pull(chunks)
    return Gradients(q, k, v, log_decay.astype(wide), beta.astype(wide), first)


XLA = Implementation(
    name="xla",
    prepare=_prepare,
    forward=_forward,
    affine=_affine,
    keep=lambda prepared: None,
    restore=_restore,
    first_gradient=_first_gradient,
    backward=_backward,
)


def _cut(x: jax.Array) -> jax.Array:
    """``[chunks, B, N, 64, ...]`` of ``[B, T, N, ...]``, padded with zeros."""
    x = pad_axis(x, 1, -(-x.shape[1] // CHUNK) * CHUNK)
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _wide(dtype: Any) -> Any:
    """The dtype of states and sums, float32 or wider."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _product(spec: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """A product of rounded operands, accumulated in float32 or wider."""
    wide = _wide(dtype)
    return jnp.einsum(
        spec,
        x.astype(dtype),
        y.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )


def _chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    tokens: Tokens | None,
) -> _Chunks:
    wide = _wide(v.dtype)
    groups = v.shape[2] // k.shape[2]
    # The forward pass is the same for less than the least log decay; so is the gradient.
    log_decay = jnp.maximum(log_decay.astype(wide), LEAST_LOG_DECAY)
    beta = beta.astype(wide)
    index = jnp.arange(CHUNK, dtype=jnp.int32)
    connected = jnp.broadcast_to(index[:, None] >= index, (1, 1, 1, CHUNK, CHUNK))
    continues: Any = True
    is_last: Any = True
    if tokens is not None:
        valid = tokens.valid[..., None]
        q, k, v = (jnp.where(valid[..., None], x, 0) for x in (q, k, v))
        log_decay, beta = jnp.where(valid, log_decay, 0), jnp.where(valid, beta, 0)
        document = jnp.cumsum(_cut(tokens.begins[..., None].astype(jnp.int32)), -1)
        connected = connected & (document[..., :, None] == document[..., None, :])
        continues, is_last = document == 0, document == document[..., -1:]
    q, k, v, log_decay, beta = map(_cut, (q, k, v, log_decay, beta))
    product = functools.partial(_product, dtype=v.dtype)
    kk, qk = (jnp.repeat(product("cbnrk,cbnik->cbnri", x, k), groups, axis=2) for x in (k, q))
    q, k = (jnp.repeat(x.astype(wide), groups, axis=2) for x in (q, k))
    total = jnp.cumsum(log_decay, -1)
    difference = jnp.where(connected, total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(connected, jnp.exp(difference), 0)
    below = index[:, None] > index
    a = jnp.where(below, beta[..., None] * decay * kk, 0)
    identity = jnp.eye(CHUNK, dtype=wide)
    x = lax.linalg.triangular_solve(
        a + identity, jnp.broadcast_to(identity, a.shape),
        left_side=True, lower=True, unit_diagonal=True,
    )  # fmt: skip
    return _Chunks(
        q,
        k,
        v.astype(wide),
        x * beta[..., None, :],
        decay * qk,
        jnp.where(continues, jnp.exp(total), 0),
        jnp.where(is_last, jnp.exp(total[..., -1:] - total), 0),
    )
