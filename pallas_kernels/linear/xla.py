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
from pallas_kernels.linear.chunks import CHUNK, LEAST_LOG_DECAY, Tokens


class _Chunks(NamedTuple):
    """Of every chunk, the chunks in front: ``[chunks, B, N, ...]``.

    Attributes:
      q: ``[64, H]``.
      k: the same.
      v: ``[64, Hv]``.
      x: X beta, ``[64, 64]``.
      p: scale D Q K^T, the same shape.
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
    """The output ``[B, T, N, Hv]`` and the state after the last token.

    Args:
      q: ``[B, T, K, H]``.
      k: the same; rows have norm 1.
      v: ``[B, T, N, Hv]``; N is a multiple of K.
      log_decay: ``[B, T, N]``, at most 0.
      beta: ``[B, T, N]``.
      start: state before the first token, ``[B, N, H, Hv]``.
      scale: of q k.
      tokens: documents and padding; None without them.
    """
    chunks = _chunks(q, k, v, log_decay, beta, scale, tokens)
    wide = _wide(v.dtype)
    product = functools.partial(_product, dtype=v.dtype)

    @jax.checkpoint
    def step(state, chunk):
        read = product("bnrk,bnkv->bnrv", chunk.k, state)
        u = product("bnri,bniv->bnrv", chunk.x, chunk.v - chunk.into[..., None] * read)
        o = product("bnrk,bnkv->bnrv", chunk.q, state) * (scale * chunk.into[..., None])
        o = o + product("bnri,bniv->bnrv", chunk.p, u)
        state = chunk.into[..., -1, None, None] * state
        state = state + product("bnrk,bnrv->bnkv", chunk.k * chunk.out[..., None], u)
        return state, o

    last, o = lax.scan(step, start.astype(wide), chunks)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [B, chunks, 64, N, Hv]
    o = o.reshape(v.shape[0], -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype)
    if tokens is not None:
        o = jnp.where(tokens.valid[..., None, None], o, 0)
    return o, last


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
    scale: float,
    tokens: Tokens | None,
) -> _Chunks:
    wide = _wide(v.dtype)
    length = -(-v.shape[1] // CHUNK) * CHUNK

    def cut(x: jax.Array) -> jax.Array:
        """``[chunks, B, N, 64, ...]`` of ``[B, T, N, ...]``."""
        x = pad_axis(x, 1, length)
        x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

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
        document = jnp.cumsum(cut(tokens.begins[..., None].astype(jnp.int32)), -1)
        connected = connected & (document[..., :, None] == document[..., None, :])
        continues, is_last = document == 0, document == document[..., -1:]
    q, k, v, log_decay, beta = map(cut, (q, k, v, log_decay, beta))
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
        scale * decay * qk,
        jnp.where(continues, jnp.exp(total), 0),
        jnp.where(is_last, jnp.exp(total[..., -1:] - total), 0),
    )
