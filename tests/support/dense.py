"""Dense softmax attention, the oracle: plain operations, no code shared with the library.

``truth`` is float64 with gradients by autodiff. ``one_device`` is what a fused attention on one
device makes of the same inputs in their own dtype: every matmul's operands are rounded to it, and
the softmax's gradient takes ``rowsum(dO * out)`` from the rounded out (FlashAttention-2, Dao 2023,
algorithm 2).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from implementations import quick_jit


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask by its definition, from natural positions."""

    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    soft_cap: float | None = None
    segments: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As burst_attention's arguments."""
        return {
            "is_causal": self.is_causal,
            "local_window_size": self.window,
            "logits_soft_cap": self.soft_cap,
        }

    def dense(self, q_segment_ids, kv_segment_ids, q_length, kv_length):
        """bool ``[B or 1, T, S]``."""
        q, kv = np.arange(q_length)[:, None], np.arange(kv_length)[None, :]
        keep = np.ones((1, q_length, kv_length), bool)
        if self.is_causal:
            keep &= q >= kv
        if self.window is not None:
            left, right = self.window if isinstance(self.window, tuple) else (self.window,) * 2
            keep &= (kv >= q - left) & (kv <= q + right)
        if q_segment_ids is not None:
            same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
            keep = keep & same & (q_segment_ids != 0)[:, :, None]
        return keep


def _einsum(subscripts, a, b):
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=wide)


def _capped(products, dim, soft_cap):
    logits = products / np.asarray(np.sqrt(dim), products.dtype)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def attention(query, key, value, keep, soft_cap=None):
    """``(out, lse, p)``; logits, softmax and sums in float32 or wider; key heads repeated."""
    keep = jnp.asarray(keep)[:, None]
    some = keep.any(-1, keepdims=True)
    logits = _capped(_einsum("btnh,bsnh->bnts", query, key), query.shape[-1], soft_cap)
    logits = jnp.where(keep, logits, jnp.where(some, -jnp.inf, 0).astype(logits.dtype))
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.where(some, jnp.exp(logits - lse), 0)
    out = _einsum("bnts,bsnh->btnh", p.astype(value.dtype), value).astype(query.dtype)
    lse = jnp.where(some, lse, -jnp.inf)[..., 0]
    return out, lse.swapaxes(1, 2), p


def repeat_heads(key, heads):
    """One key head per query head."""
    return jnp.repeat(key, heads // key.shape[2], axis=2)


def truth(query, key, value, keep, do, dlse, soft_cap=None):
    """``(out, lse, dq, dk, dv)`` in float64, gradients by autodiff, as NumPy arrays.

    Rows that see nothing have lse -inf; its cotangent is dropped there, as it carries nothing.
    """
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (query, key, value, do, dlse)]
        return [np.asarray(x) for x in _truth(*arrays, jnp.asarray(keep), soft_cap)]


@functools.partial(quick_jit, static_argnames="soft_cap")
def _truth(query, key, value, do, dlse, keep, soft_cap):
    def run(query, key, value):
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
        out, lse, _ = attention(query, key, value, keep, soft_cap)
        seen = keep.any(-1)[..., None]
        return (out, jnp.where(seen, lse, jnp.zeros_like(lse))), lse

    (out, _), vjp, lse = jax.vjp(run, query, key, value, has_aux=True)
    return out, lse, *vjp((do, dlse))


def one_device(query, key, value, keep, do, dlse, soft_cap=None):
    """``(out, lse, dq, dk, dv)`` in the query's dtype, as NumPy float64."""
    arrays = [jnp.asarray(x) for x in (query, key, value, do, dlse, keep)]
    return [np.asarray(x, np.float64) for x in _one_device(*arrays, soft_cap)]


@functools.partial(quick_jit, static_argnames="soft_cap")
def _one_device(query, key, value, do, dlse, keep, soft_cap):
    kv_heads, dtype, dim = key.shape[2], query.dtype, query.shape[-1]
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    out, lse, p = attention(query, key, value, keep, soft_cap)
    delta = (do.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    dp = _einsum("btnh,bsnh->bnts", do, value)
    dlogits = p * (dp - delta.swapaxes(1, 2)[..., None])
    cap = jax.vjp(lambda x: _capped(x, dim, soft_cap), _einsum("btnh,bsnh->bnts", query, key))[1]
    # The scale goes in after the matmul, where a fused kernel puts it.
    ds = (cap(dlogits)[0] * np.float32(np.sqrt(dim))).astype(dtype)
    scale = np.float32(1 / np.sqrt(dim))
    dq = _einsum("bnts,bsnh->btnh", ds, key) * scale
    dk = _einsum("bnts,btnh->bsnh", ds, query) * scale
    dv = _einsum("bnts,btnh->bsnh", p.astype(dtype), do)
    dk, dv = (x.reshape(*x.shape[:2], kv_heads, -1, dim).sum(3) for x in (dk, dv))
    return out, lse, *(x.astype(dtype) for x in (dq, dk, dv))
