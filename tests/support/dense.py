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


def attention(q, k, v, keep):
    """``(out, lse)`` of softmax attention in JAX; key heads repeated, every query sees a key."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / np.sqrt(q.shape[-1])
    logits = jnp.where(keep[:, None], logits.astype(q.dtype), -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(logits - lse), v, precision="highest")
    return out, lse[..., 0].swapaxes(1, 2)


def repeat_heads(key, heads):
    """One key head per query head."""
    return jnp.repeat(key, heads // key.shape[2], axis=2)


def truth(query, key, value, keep, do, dlse, *args, **options):
    """``(out, lse, dq, dk, dv)`` in float64, then the gradients of per-head parameters by name.

    The optional arguments are those of :func:`fused`. Queries that attend to nothing have lse -inf
    (or their sink), and its cotangent is dropped there.
    """
    arrays = (np.asarray(x, np.float64) for x in (query, key, value))
    cotangents = (np.asarray(x, np.float64) for x in (do, dlse))
    return fused(*arrays, keep, *cotangents, *args, **options)


def one_device(query, key, value, keep, do, dlse, *args, **options):
    """The same as a fused kernel on one device computes it in the query's dtype, as float64."""
    results = fused(*map(np.asarray, (query, key, value, keep, do, dlse)), *args, **options)
    return [x.astype(np.float64) for x in results]


@functools.partial(quick_jit, static_argnums=0)
def _score_and_derivative(score, logits):
    return jax.jvp(score, (logits,), (jnp.ones_like(logits),))


def fused(
    query, key, value, keep, do, dlse, soft_cap=None, numbers=None, distance=None, factors=None,
    score=None, scale=None,
):  # fmt: skip
    """``[out, lse, dq, dk, dv]`` and per-head gradients, by algorithm 2 of FlashAttention-2.

    Operands of matrix products are rounded to the query's dtype; everything else is float32, or
    float64 if the query is. ``score``: a function of all logits, applied after the soft cap.
    ``scale``: None is ``1 / sqrt(H)``.
    """
    dtype, numbers = query.dtype, numbers or {}
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    batch, _, heads, _ = query.shape
    kv_heads = key.shape[2]

    def by_head(x):
        """``[B, N, tokens, H]``, one key head per query head, rounded to the dtype."""
        return np.repeat(x.astype(dtype).astype(wide), heads // x.shape[2], 2).swapaxes(1, 2)

    def product(weights, x):
        return weights.astype(dtype).astype(wide) @ x

    keep = np.asarray(keep)
    keep = keep[:, None] if keep.ndim == 3 else keep
    some = keep.any(-1, keepdims=True)
    q, k, v, g = map(by_head, (query, key, value, do))
    divisor = wide.type(np.sqrt(query.shape[-1]) if scale is None else 1 / scale)
    logits = (q @ k.swapaxes(2, 3)) / divisor
    derivative = 1 / divisor
    if soft_cap is not None:
        tanh = np.tanh(logits / wide.type(soft_cap))
        logits, derivative = wide.type(soft_cap) * tanh, derivative * (1 - tanh * tanh)
    if score is not None:
        with jax.enable_x64(wide == np.float64):
            logits, of_score = map(np.asarray, _score_and_derivative(score, jnp.asarray(logits)))
        derivative = derivative * of_score
    if "alibi_slopes" in numbers:
        distance = np.asarray(distance, wide)
        logits = logits - numbers["alibi_slopes"].astype(wide)[:, None, None] * distance
    logits = np.where(keep, logits, np.where(some, wide.type(-np.inf), wide.type(0)))
    most = logits.max(-1, keepdims=True)
    lse = most + np.log(np.exp(logits - most).sum(-1, keepdims=True))
    if "sink_logits" in numbers:
        sinks = numbers["sink_logits"].astype(wide)[None, :, None, None]
        lse = np.where(some, np.logaddexp(lse, sinks), sinks)
    p = np.where(some, np.exp(logits - lse), wide.type(0))
    factors = wide.type(1) if factors is None else np.asarray(factors, wide)
    out = product(p * factors, v).astype(dtype)
    dlse = np.asarray(dlse, wide).swapaxes(1, 2)[..., None]
    delta = (g * out.astype(wide)).sum(-1, keepdims=True) - dlse
    dlogits = p * ((g @ v.swapaxes(2, 3)) * factors - delta)
    # A fused kernel applies the scale after the matrix product.
    ds = dlogits * (derivative * divisor)

    def of_keys(x):
        """``[B, N, S, H]`` summed over the query heads of each key head, ``[B, S, K, H]``."""
        return x.reshape(batch, kv_heads, -1, *x.shape[2:]).sum(2).swapaxes(1, 2)

    dq = (product(ds, k) / divisor).swapaxes(1, 2)
    dk = of_keys(product(ds.swapaxes(2, 3), q) / divisor)
    dv = of_keys(product((p * factors).swapaxes(2, 3), g))
    of_numbers = []
    if "alibi_slopes" in numbers:
        of_numbers.append(-(dlogits * distance).sum((0, 2, 3)))
    if "sink_logits" in numbers:
        of_numbers.append(-(np.exp(sinks - lse) * delta).sum((0, 2, 3)))
    if "sink_logits" not in numbers:
        lse = np.where(some, lse, wide.type(-np.inf))
    lse = lse[..., 0].swapaxes(1, 2)
    return [out.swapaxes(1, 2), lse, *(x.astype(dtype) for x in (dq, dk, dv)), *of_numbers]


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
