"""Dense softmax attention in NumPy, the reference: no code shared with the library.

``truth`` is float64; tests/attention/test_fuzz.py compares its gradients with autodiff.
``one_device`` is a fused attention on one device in the inputs' dtype: the operands of every matrix
product are rounded to it, and delta is ``rowsum(dO * out)`` of the rounded out (FlashAttention-2,
Dao 2023, algorithm 2). NumPy, because XLA would compile it again for every shape.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import functions
import jax
import jax.numpy as jnp
import numpy as np
import rounding
from implementations import quick_jit


class Reference(NamedTuple):
    """What dense attention makes of a call.

    Attributes:
      truth: ``[out, lse, dq, dk, dv]`` in float64, then the gradients of per-head parameters by
        name.
      one_device: the same as a fused kernel on one device computes it in the query's dtype.
      keep: which scores count, bool ``[B or 1, N or 1, T, S]``.
      largest_bias: of ALiBi.
    """

    truth: list[np.ndarray]
    one_device: list[np.ndarray]
    keep: np.ndarray
    largest_bias: float


def reference(do, dlse, *, scale=None, **call):
    """:class:`Reference` of a call of ``burst_attention`` with these arguments, in natural order.

    ``dropout_seeds`` int32 ``[B, N]``, where they are not made of a key. Queries that attend to
    nothing have lse -inf (or their sink), and its cotangent is dropped there.
    """
    args, largest = arguments(do, dlse, **call)
    return Reference(truth(*args, scale), one_device(*args, scale), args[3], largest)


def largest_errors(do, dlse, *, scale=None, dq_in_fixed_point=False, **call):
    """Bounds of the errors that rounding can make, in the order of :attr:`Reference.truth`.

    The arguments are those of :func:`reference`. Every element has its own bound, which holds for
    few tokens, too, where the error of one device may be 0 by chance. See
    :func:`rounding.largest_errors`, and :func:`rounding.fixed_point_error` for
    ``dq_in_fixed_point``.
    """
    args, _ = arguments(do, dlse, **call)
    *arrays, keep, do, dlse, soft_cap, numbers, distance, factors, score = args
    query, key, value, do = (np.asarray(x, np.float64) for x in (*arrays, do))
    run = passes(
        query, key, value, keep, do, dlse, soft_cap, numbers, distance, factors, score, scale
    )
    bounds = rounding.largest_errors(run, arrays[0].dtype)
    if dq_in_fixed_point:
        bounds[2] = bounds[2] + rounding.fixed_point_error(run)
    return bounds


def arguments(
    do, dlse, *, query, key, value, logits_soft_cap=None, sink_logits=None, alibi_slopes=None,
    score_mod=None, dropout_rate=0.0, dropout_key: Any = None, dropout_seeds=None, **masks,
) -> tuple[tuple[Any, ...], float]:  # fmt: skip
    """The arguments of :func:`fused`, but the scale, and the largest ALiBi bias."""
    (batch, t, heads, _), s = query.shape, key.shape[1]
    keep = kept(t, s, batch=batch, heads=heads, **masks)
    q, kv = places(t, s, **masks)
    distance = np.abs(q[0][:, None] - kv[None, :])
    given = {"alibi_slopes": alibi_slopes, "sink_logits": sink_logits}
    numbers = {name: np.asarray(x) for name, x in given.items() if x is not None}
    score, factors = None, None
    if score_mod is not None:
        score = functions.OfAll(score_mod, batch, heads, tuple(q[0].tolist()), tuple(kv.tolist()))
    if dropout_rate:
        if dropout_seeds is None:
            dropout_seeds = jax.random.bits(dropout_key, (batch, heads))
        factors = dropout_factors(dropout_seeds, dropout_rate, q[0], kv)
    args = query, key, value, keep, do, dlse, logits_soft_cap, numbers, distance, factors, score
    largest = 0.0 if alibi_slopes is None else np.abs(alibi_slopes).max() * distance.max()
    return args, float(largest)


def kept(
    q_length, kv_length, *, batch=1, heads=1, is_causal=False, local_window_size=None,
    attention_chunk_size=None, query_segment_ids=None, key_value_segment_ids=None,
    query_seq_lengths=None, key_value_seq_lengths=None, prefix_lengths=None, key_starts=None,
    key_ends=None, block_mask=None, mask_mod=None, **positions,
):  # fmt: skip
    """Which scores count by these arguments of ``burst_attention``, in natural order.

    bool ``[B or 1, N or 1, T, S]``; ``batch`` and ``heads`` are the B and N that a ``mask_mod``
    reads.
    """
    q_at, kv_at = places(q_length, kv_length, **positions)
    q, kv = q_at[:, None, :, None], kv_at
    by_row = lambda x: np.asarray(x).reshape(-1, 1, 1, 1)  # noqa: E731
    by_query = lambda x: np.atleast_2d(x)[:, None, :, None]  # noqa: E731
    tests: list[Any] = [np.ones((1, 1, q_length, kv_length), bool)]
    if attention_chunk_size is not None:
        tests.append(q // attention_chunk_size == kv // attention_chunk_size)
    pair = isinstance(local_window_size, tuple)
    left, right = local_window_size if pair else (local_window_size,) * 2
    if left is not None:
        tests.append(kv >= q - int(left))
    if is_causal:
        tests.append((q >= kv) | (kv < by_row(0 if prefix_lengths is None else prefix_lengths)))
    elif right is not None:
        tests.append(kv <= q + int(right))
    if key_starts is not None:
        tests.append(kv >= by_query(key_starts))
    if key_ends is not None:
        tests.append(kv < by_query(key_ends))
    if query_seq_lengths is not None:
        tests.append(q < by_row(query_seq_lengths))
    if key_value_seq_lengths is not None:
        tests.append(kv < by_row(key_value_seq_lengths))
    if query_segment_ids is not None:
        ids = by_query(query_segment_ids)
        tests += [ids == np.asarray(key_value_segment_ids)[:, None, None, :], ids != 0]
    if block_mask is not None:
        table = np.asarray(block_mask)
        rows, columns = q_length // table.shape[-2], kv_length // table.shape[-1]
        tests.append(table.repeat(rows, -2).repeat(columns, -1))
    if mask_mod is not None:
        tests.append(mask_mod(*functions.grid(batch, heads, q_at[0], kv_at)))
    return functools.reduce(np.logical_and, tests)


def sees(keep):
    """Whether each query attends to a key, bool ``[B or 1, T, N or 1]``, by :func:`kept`."""
    return keep.any(3).swapaxes(1, 2)


def is_seen(keep, kv_heads):
    """Whether a query attends to each key, bool ``[B or 1, S, K or 1]``, by :func:`kept`."""
    keep = keep.any(2).swapaxes(1, 2)
    return keep if keep.shape[2] == 1 else keep.reshape(*keep.shape[:2], kv_heads, -1).any(3)


def places(
    q_length, kv_length, query_offset=0, query_positions=None, key_value_positions=None, **_
):
    """Positions of the queries ``[B or 1, T]`` and of the keys ``[S]`` of a call."""
    q, kv = np.arange(q_length) + np.asarray(query_offset)[..., None], np.arange(kv_length)
    q = q if query_positions is None else np.asarray(query_positions)
    kv = kv if key_value_positions is None else np.asarray(key_value_positions)
    # The sum of a position and a window side does not overflow.
    return np.atleast_2d(q).astype(np.int64), kv.astype(np.int64)


def per_head(kind, heads, seed=0):
    """The per-head parameters that a case names: "none", "sinks", "slopes" or "both"."""
    rng = np.random.default_rng(seed + 77)
    sinks = rng.normal(size=heads).astype(np.float32)
    # Slopes of both signs: small ones, for which many keys matter, and some large ones.
    slopes = (rng.normal(size=heads) * np.where(np.arange(heads) % 4, 0.01, 0.05)).astype(
        np.float32
    )
    given = {"sinks": {"sink_logits": sinks}, "slopes": {"alibi_slopes": slopes}}
    return {"none": {}, "both": given["sinks"] | given["slopes"], **given}[kind]


def dropout_factors(seeds, rate, q_positions, kv_positions):
    """Dropout's factor on each weight, 0 or ``1 / (1 - rate)``: ``[B, N, T, S]``.

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
    logits = jnp.where(keep, logits.astype(q.dtype), -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(logits - lse), v, precision="highest")
    return out, lse[..., 0].swapaxes(1, 2)


def repeat_heads(key, heads):
    """One key head per query head."""
    return jnp.repeat(key, heads // key.shape[2], axis=2)


def truth(query, key, value, keep, do, dlse, *args, **options):
    """``(out, lse, dq, dk, dv)`` in float64, then the gradients of per-head parameters by name.

    The optional arguments are those of :func:`fused`.
    """
    query, key, value, do = (np.asarray(x, np.float64) for x in (query, key, value, do))
    return fused(query, key, value, keep, do, dlse, *args, **options)


def one_device(query, key, value, keep, do, dlse, *args, **options):
    """The same as a fused kernel on one device computes it in the query's dtype, as float64."""
    query, key, value, do = map(np.asarray, (query, key, value, do))
    results = fused(query, key, value, keep, do, dlse, *args, **options)
    return [x.astype(np.float64) for x in results]


@functools.partial(quick_jit, static_argnums=0)
def _score_and_derivative(score, logits):
    return jax.jvp(score, (logits,), (jnp.ones_like(logits),))


def fused(*args, **options):
    """The results of :func:`passes`."""
    return passes(*args, **options).results


def passes(
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
    sinks = None
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
    if sinks is not None:
        of_numbers.append(-(np.exp(sinks - lse) * delta).sum((0, 2, 3)))
    else:
        lse = np.where(some, lse, wide.type(-np.inf))
    lse = lse[..., 0].swapaxes(1, 2)
    results = [out.swapaxes(1, 2), lse, *(x.astype(dtype) for x in (dq, dk, dv)), *of_numbers]
    return rounding.Passes(
        results, q, k, v, g, p, factors, logits, dlogits, derivative, divisor, of_keys, distance,
        sinks, delta,
    )  # fmt: skip


def by_row_and_key_head(results, query, key, value, keep, do, dlse):
    """``results`` (:func:`truth` or :func:`one_device`) one sequence and key head at a time.

    They are independent, and one of them fits in memory.
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
