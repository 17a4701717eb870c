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
    window: int | tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    segments: bool = False
    ranges: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As burst_attention's arguments."""
        return {
            "is_causal": self.is_causal,
            "local_window_size": self.window,
            "logits_soft_cap": self.soft_cap,
        }

    def dense(self, q_segment_ids, kv_segment_ids, q_length, kv_length, **arrays):
        """bool ``[B or 1, T, S]``; ``arrays`` are burst_attention's, in natural order.

        With a table of blocks for each head ``[B or 1, N, T, S]``.
        """
        q, kv = places(q_length, kv_length, **arrays)
        q, kv = q[:, :, None], kv[None, None, :]
        keep = np.ones((1, q_length, kv_length), bool)
        left, right = self.window if isinstance(self.window, tuple) else (self.window,) * 2
        if left is not None:
            keep = keep & (kv >= q - left)
        if self.is_causal:
            prefix = np.asarray(arrays.get("prefix_lengths", [0]))
            keep = keep & ((q >= kv) | (kv < prefix[:, None, None]))
        elif right is not None:
            keep = keep & (kv <= q + right)
        if "key_starts" in arrays:
            keep = keep & (kv >= np.atleast_2d(arrays["key_starts"])[:, :, None])
        if "key_ends" in arrays:
            keep = keep & (kv < np.atleast_2d(arrays["key_ends"])[:, :, None])
        if "query_seq_lengths" in arrays:
            keep = keep & (q < np.asarray(arrays["query_seq_lengths"])[:, None, None])
        if "key_value_seq_lengths" in arrays:
            keep = keep & (kv < np.asarray(arrays["key_value_seq_lengths"])[:, None, None])
        if q_segment_ids is not None:
            same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
            keep = keep & same & (q_segment_ids != 0)[:, :, None]
        if "block_mask" in arrays:
            table = np.asarray(arrays["block_mask"])
            rows, columns = q_length // table.shape[-2], kv_length // table.shape[-1]
            table = table.repeat(rows, -2).repeat(columns, -1)
            keep = keep & table if table.ndim == 2 else keep[:, None] & table
        return keep


def sees(keep):
    """Whether each query sees a key, bool ``[B or 1, T, N or 1]``, by a dense mask."""
    keep = keep[:, None] if keep.ndim == 3 else keep
    return keep.any(3).swapaxes(1, 2)


def is_seen(keep, kv_heads):
    """Whether each key is seen by a query, bool ``[B or 1, S, K or 1]``, by a dense mask."""
    keep = keep[:, None] if keep.ndim == 3 else keep
    keep = keep.any(2).swapaxes(1, 2)
    return keep if keep.shape[2] == 1 else keep.reshape(*keep.shape[:2], kv_heads, -1).any(3)


def _einsum(subscripts, a, b):
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=wide)


def _divisor(query, scale):
    """What logits are the products of queries and keys divided by."""
    return np.sqrt(query.shape[-1]) if scale is None else 1 / scale


def _capped(products, divisor, soft_cap):
    logits = products / np.asarray(divisor, products.dtype)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _modified(products, divisor, soft_cap, score):
    logits = _capped(products, divisor, soft_cap)
    return logits if score is None else score(logits)


def places(
    q_length, kv_length, query_offset=0, query_positions=None, key_value_positions=None, **_
):
    """Positions ``[B or 1, T]`` of the queries and ``[S]`` of the keys, by the arguments."""
    q, kv = np.arange(q_length) + np.asarray(query_offset)[..., None], np.arange(kv_length)
    q = q if query_positions is None else np.asarray(query_positions)
    kv = kv if key_value_positions is None else np.asarray(key_value_positions)
    # No sum of a position and a side of a window overflows.
    return np.atleast_2d(q).astype(np.int64), kv.astype(np.int64)


def distances(q_length, kv_length, **arrays):
    """``|p_q - p_k|``, ``[T, S]``, of tokens whose positions are alike in all rows."""
    q, kv = places(q_length, kv_length, **arrays)
    return np.abs(q[0][:, None] - kv[None, :])


def per_head(kind, heads, seed=0):
    """The numbers of each head that a test's case names: "none", "sinks", "slopes" or "both"."""
    rng = np.random.default_rng(seed + 77)
    sinks = rng.normal(size=heads).astype(np.float32)
    # Slopes of both signs: small ones, so that many keys count, and some that are large.
    slopes = (rng.normal(size=heads) * np.where(np.arange(heads) % 4, 0.01, 0.05)).astype(
        np.float32
    )
    given = {"sinks": {"sink_logits": sinks}, "slopes": {"alibi_slopes": slopes}}
    return {"none": {}, "both": given["sinks"] | given["slopes"], **given}[kind]


def dropout_factors(seeds, rate, q_positions, kv_positions):
    """What dropout multiplies each weight with, 0 or ``1 / (1 - rate)``: ``[B, N, T, S]``.

    ``seeds`` are int32 ``[B, N]``.
    """

    def scrambled(x):
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    seeds, q, kv = (np.asarray(x).astype(np.uint32) for x in (seeds, q_positions, kv_positions))
    rows = scrambled(seeds[:, :, None] ^ scrambled(q)) | np.uint32(1)
    columns = scrambled(kv ^ np.uint32(0x3C6EF372)) | np.uint32(1)
    kept = (rows[..., None] * columns).view(np.int32) >= round(rate * 2**32) - 2**31
    return np.where(kept, 1 / (1 - rate), 0)


def attention(
    query, key, value, keep, soft_cap=None, numbers=None, distance=None, factors=None, score=None,
    scale=None,
):  # fmt: skip
    """``(out, lse, p)``; logits, softmax and sums in float32 or wider; key heads repeated.

    ``score``: a function of all logits, behind the soft cap. ``scale``: None is ``1 / sqrt(H)``.
    """
    numbers = numbers or {}
    keep = jnp.asarray(keep)
    keep = keep[:, None] if keep.ndim == 3 else keep
    some = keep.any(-1, keepdims=True)
    products = _einsum("btnh,bsnh->bnts", query, key)
    logits = _modified(products, _divisor(query, scale), soft_cap, score)
    if "alibi_slopes" in numbers:
        slopes = numbers["alibi_slopes"].astype(logits.dtype)[None, :, None, None]
        logits -= slopes * jnp.asarray(distance, logits.dtype)[None, None]
    logits = jnp.where(keep, logits, jnp.where(some, -jnp.inf, 0).astype(logits.dtype))
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if "sink_logits" in numbers:
        sinks = numbers["sink_logits"].astype(logits.dtype)[None, :, None, None]
        lse = jnp.where(some, jnp.logaddexp(lse, sinks), sinks)
    p = jnp.where(some, jnp.exp(logits - lse), 0)
    used = p if factors is None else p * factors.astype(p.dtype)
    out = _einsum("bnts,bsnh->btnh", used.astype(value.dtype), value).astype(query.dtype)
    if "sink_logits" not in numbers:
        lse = jnp.where(some, lse, -jnp.inf)
    return out, lse[..., 0].swapaxes(1, 2), p


def repeat_heads(key, heads):
    """One key head per query head."""
    return jnp.repeat(key, heads // key.shape[2], axis=2)


def truth(
    query, key, value, keep, do, dlse, soft_cap=None, numbers=None, distance=None, factors=None,
    score=None, scale=None,
):  # fmt: skip
    """``(out, lse, dq, dk, dv)`` in float64, gradients by autodiff, as NumPy arrays.

    Behind them the gradients of the numbers of each head, in the order of their names. Rows that
    see nothing have lse -inf; its cotangent is dropped there, as it carries nothing.
    """
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (query, key, value, do, dlse)]
        numbers = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), numbers or {})
        of_scores = numbers, distance, factors, soft_cap, score, scale
        results = _truth(*arrays, jnp.asarray(keep), *of_scores)
        return [np.asarray(x) for x in results]


@functools.partial(quick_jit, static_argnames=("soft_cap", "score", "scale"))
def _truth(query, key, value, do, dlse, keep, numbers, distance, factors, soft_cap, score, scale):
    def run(query, key, value, numbers):
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
        of_scores = soft_cap, numbers, distance, factors, score, scale
        out, lse, _ = attention(query, key, value, keep, *of_scores)
        seen = sees(keep)
        if "sink_logits" in numbers:
            seen = True
        return (out, jnp.where(seen, lse, jnp.zeros_like(lse))), lse

    (out, _), vjp, lse = jax.vjp(run, query, key, value, numbers, has_aux=True)
    *gradients, of_numbers = vjp((do, dlse))
    return out, lse, *gradients, *(of_numbers[name] for name in sorted(numbers))


def one_device(
    query, key, value, keep, do, dlse, soft_cap=None, numbers=None, distance=None, factors=None,
    score=None, scale=None,
):  # fmt: skip
    """``(out, lse, dq, dk, dv)`` in the query's dtype, as NumPy float64.

    Behind them the gradients of the numbers of each head, as :func:`truth` has them.
    """
    arrays = [jnp.asarray(x) for x in (query, key, value, do, dlse, keep)]
    results = _one_device(*arrays, numbers or {}, distance, factors, soft_cap, score, scale)
    return [np.asarray(x, np.float64) for x in results]


def by_row_and_key_head(results, query, key, value, keep, do, dlse):
    """``results``, which is :func:`truth` or :func:`one_device`, in the memory of one key head.

    Rows and key heads do not see each other, so each is computed alone, with its query heads.
    """
    group = query.shape[2] // key.shape[2]
    rows = []
    for row in range(query.shape[0]):
        heads = []
        for head in range(key.shape[2]):
            q, do_, dlse_ = (
                x[row : row + 1, :, head * group : (head + 1) * group] for x in (query, do, dlse)
            )
            k, v = (x[row : row + 1, :, head : head + 1] for x in (key, value))
            of_row = keep if keep.shape[0] == 1 else keep[row : row + 1]
            heads.append(results(q, k, v, of_row, do_, dlse_))
        rows.append([np.concatenate(parts, 2) for parts in zip(*heads, strict=True)])
    return [np.concatenate(parts, 0) for parts in zip(*rows, strict=True)]


@functools.partial(quick_jit, static_argnames=("soft_cap", "score", "scale"))
def _one_device(
    query, key, value, do, dlse, keep, numbers, distance, factors, soft_cap, score, scale
):
    kv_heads, dtype, divisor = key.shape[2], query.dtype, _divisor(query, scale)
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    factors = jnp.asarray(1 if factors is None else factors, jnp.float32)
    of_scores = soft_cap, numbers, distance, factors, score, scale
    out, lse, p = attention(query, key, value, keep, *of_scores)
    delta = (do.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    dp = _einsum("btnh,bsnh->bnts", do, value) * factors
    dlogits = p * (dp - delta.swapaxes(1, 2)[..., None])
    products = _einsum("btnh,bsnh->bnts", query, key)
    cap = jax.vjp(lambda x: _modified(x, divisor, soft_cap, score), products)[1]
    # The scale goes in after the matmul, where a fused kernel puts it.
    ds = (cap(dlogits)[0] * np.float32(divisor)).astype(dtype)
    factor = np.float32(1 / divisor)
    dq = _einsum("bnts,bsnh->btnh", ds, key) * factor
    dk = _einsum("bnts,btnh->bsnh", ds, query) * factor
    dv = _einsum("bnts,btnh->bsnh", (p * factors).astype(dtype), do)
    dk, dv = (x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).sum(3) for x in (dk, dv))
    of_numbers = []
    if "alibi_slopes" in numbers:
        of_numbers.append(-(dlogits * jnp.asarray(distance, jnp.float32)).sum((0, 2, 3)))
    if "sink_logits" in numbers:
        weight = jnp.exp(numbers["sink_logits"] - lse)
        of_numbers.append(-(weight * delta).sum((0, 1)))
    return out, lse, *(x.astype(dtype) for x in (dq, dk, dv)), *of_numbers
