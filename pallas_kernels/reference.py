"""Local attention written down plainly: dense, float32 or float64. Every other one is held to it.

Takes and returns what the fast implementations do; memory is O(T S).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import Pair, half_shape, halves
from pallas_kernels.merge import merge
from pallas_kernels.scores import allowed, products_gradient, scaled_logits
from pallas_kernels.spec import AttentionSpec, Tokens


def forward(
    q: jax.Array,
    kv: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: None = None,
    carry: tuple[jax.Array, jax.Array] | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Forward`; ``bounds`` are not needed."""
    del bounds
    k, v = (_wide(x) for x in halves(kv))
    logits = _masked_logits(spec, q, k, q_tokens, kv_tokens)
    m = logits.max(-1, keepdims=True)
    p = jnp.exp(logits - jnp.where(m == -jnp.inf, 0, m))
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log(jnp.where(total == 0, 1, total)))
    o = _einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)
    lse = lse.reshape(q.shape[0], q.shape[2], q.shape[1])
    if carry is not None:
        o, lse_rows = merge(carry[0], carry[1].swapaxes(1, 2), o, lse.swapaxes(1, 2))
        lse = lse_rows.swapaxes(1, 2)
    return o if out_dtype is None else o.astype(out_dtype), lse


def backward(
    qdo: Pair,
    kv: Pair,
    stats: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: None = None,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Implementation`; ``bounds`` are not needed."""
    del bounds
    (q, do), (k, v), (lse, delta) = halves(qdo), halves(kv), halves(stats)
    k, v = _wide(k), _wide(v)
    groups = half_shape(qdo)[2] // half_shape(kv)[2]
    logits = _masked_logits(spec, q, k, q_tokens, kv_tokens)
    lse, delta = (_by_group(x, groups)[..., None] for x in (lse, delta))
    p = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse))
    q5, do5 = (_wide(x).reshape(*x.shape[:2], -1, groups, x.shape[-1]) for x in (q, do))
    dv = _einsum("bkgts,btkgh->bskh", p, do5)
    dp = _einsum("btkgh,bskh->bkgts", do5, v)
    ds = jnp.where(p == 0, 0, products_gradient(spec, logits, p * (dp - delta))) * spec.scale
    new_dq = _einsum("bkgts,bskh->btkgh", ds, k).reshape(q.shape)
    new_dkv = jnp.stack([_einsum("bkgts,btkgh->bskh", ds, q5), dv])
    return new_dq if dq is None else dq + new_dq, new_dkv if dkv is None else dkv + new_dkv


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """``[B, N, T]`` to ``[B, K, G, T]``."""
    return x.reshape(x.shape[0], -1, groups, x.shape[-1])


def _masked_logits(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, q_tokens: Tokens, kv_tokens: Tokens
) -> jax.Array:
    """``[B, K, G, T, S]``, -inf where the mask forbids."""
    groups = q.shape[2] // k.shape[2]
    q = _wide(q).reshape(*q.shape[:2], -1, groups, q.shape[-1])
    logits = scaled_logits(spec, _einsum("btkgh,bskh->bkgts", q, k))
    seg_q, seg_kv = q_tokens.segment_ids, kv_tokens.segment_ids
    mask = allowed(
        spec,
        q_tokens.positions[:, None],
        kv_tokens.positions[None, :],
        None if seg_q is None else seg_q[:, None, None, :, None],
        None if seg_kv is None else seg_kv[:, None, None, None, :],
    )
    return logits if mask is None else jnp.where(mask, logits, -jnp.inf)
