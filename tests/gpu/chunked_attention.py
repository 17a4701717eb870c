"""Attention of long sequences in float32, in chunks of queries, and what 16 bits make of it.

The reference of the rings: it shares no code with the library. Masks are computed from positions,
ids and lengths, scores are whole rows, and all matrix products are float32's.

It is computed twice. ``truth`` is float32. ``rounded`` is what fused attention on one device
computes in the query's dtype: the operands of every matrix product are rounded to it, and so are
the results. An answer may be a few times as far from the truth as that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Scores of a chunk: 128 MiB in float32.
_CHUNK = 2**25
# Bits of exponent and of mantissa. XLA may leave out a conversion to 16 bits and back.
_BITS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}
_EVERYTHING = 2**30


class Masks(NamedTuple):
    """Which scores count, by arrays alone, so that few programs are compiled.

    Attributes:
      segment_ids: int32 ``[B, T]``, ``[B, S]``, of queries and keys; 0 is padding.
      lengths: int32 ``[B]``, ``[B]``, of queries and keys.
      window: int32 ``[2]``: keys from ``p - window[0]`` to ``p + window[1]`` count.
      chunk: int32: queries attend to keys of their own chunk of so many positions.
    """

    segment_ids: tuple[jax.Array, jax.Array]
    lengths: tuple[jax.Array, jax.Array]
    window: jax.Array
    chunk: jax.Array

    @classmethod
    def of(
        cls, batch, t, s, *, segment_ids=None, lengths=None, is_causal=False,
        local_window_size=(None, None), attention_chunk_size=None,
    ):  # fmt: skip
        """From arguments of ``burst_attention``; ``segment_ids`` and ``lengths`` of both sides."""
        if segment_ids is None:
            segment_ids = jnp.ones((batch, t), jnp.int32), jnp.ones((batch, s), jnp.int32)
        if lengths is None:
            lengths = jnp.full(batch, t, jnp.int32), jnp.full(batch, s, jnp.int32)
        left, right = (_EVERYTHING if side is None else side for side in local_window_size)
        return cls(
            tuple(map(jnp.asarray, segment_ids)), tuple(map(jnp.asarray, lengths)),
            jnp.array([left, 0 if is_causal else right], jnp.int32),
            jnp.int32(attention_chunk_size or _EVERYTHING),
        )  # fmt: skip


class Results(NamedTuple):
    """``out``, ``dq`` ``[B, T, N, .]``, ``dk``, ``dv`` ``[B, S, K, .]``, ``dsinks`` ``[N]``."""

    out: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dsinks: jax.Array


class Reference(NamedTuple):
    """What a call must give.

    Attributes:
      truth: float32.
      rounded: with the operands of matrix products in the query's dtype.
      lse: float32 ``[B, T, N]``.
      unseen: bool ``[B, S]``: keys that no query attends to.
    """

    truth: Results
    rounded: Results
    lse: jax.Array
    unseen: jax.Array


@functools.partial(jax.jit, static_argnames=("dtype", "cap", "has_sinks"))
def reference(q, k, v, do, dlse, sinks, masks: Masks, *, dtype, cap=None, has_sinks=False):
    """:class:`Reference` of arrays in natural order, scale 1 / sqrt(H).

    Args:
      q, k, v, do: values of ``dtype``, in it or in float32, ``[B, T or S, N or K, H or Hv]``.
      dlse: float32 ``[B, T, N]``; ignored where lse is -inf.
      sinks: float32 ``[N]``, read if ``has_sinks``.
      masks: which scores count.
      dtype: name of the dtype that ``rounded`` rounds to.
      cap: ``logits_soft_cap``.
      has_sinks: whether a sink is part of every softmax.
    """
    kv_heads = k.shape[2]
    groups = q.shape[2] // kv_heads
    one = functools.partial(_one_head, dtype=dtype, cap=cap, has_sinks=has_sinks)

    def by_head(x, heads):
        """``[B, L, heads * g, ...]`` as ``[B * heads, L, g, ...]``."""
        x = x.reshape(*x.shape[:2], heads, -1, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:]).astype(jnp.float32)

    def back(x):
        """The inverse."""
        x = jnp.moveaxis(x.reshape(-1, kv_heads, *x.shape[1:]), 1, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    batch = q.shape[0]
    rows = jnp.repeat(jnp.arange(batch), kv_heads)
    per_head = jnp.tile(sinks.reshape(kv_heads, groups), (batch, 1))
    of_row = jax.tree.map(lambda x: x[rows], (masks.segment_ids, masks.lengths))
    arrays = tuple(by_head(x, kv_heads) for x in (q, k, v, do, dlse[..., None]))
    with jax.default_matmul_precision("highest"):
        found = lax.map(
            lambda x: one(*x[0], x[1], Masks(*x[2], masks.window, masks.chunk)),
            (arrays, per_head, of_row),
        )
    (truth, rounded), lse, seen = found

    def finish(results):
        out, dq, dk, dv, dsinks = results
        dsinks = dsinks.reshape(batch, -1).sum(0)
        return Results(back(out), back(dq), back(dk), back(dv), dsinks)

    unseen = ~seen.reshape(batch, kv_heads, -1).any(1)
    return Reference(finish(truth), finish(rounded), back(lse[..., None])[..., 0], unseen)


def _one_head(q, k, v, do, dlse, sinks, masks: Masks, *, dtype, cap, has_sinks):
    """One key head of one sequence: q ``[T, g, H]``, k ``[S, 1, H]``, sinks ``[g]``."""
    length, groups, dim = q.shape
    k, v, s = k[:, 0], v[:, 0], k.shape[0]
    scale = dim**-0.5
    rows = max(16, min(1 << max(0, (_CHUNK // (groups * s)).bit_length() - 1), length))
    count = -(-length // rows)

    def padded(x):
        return jnp.pad(x, [(0, count * rows - length)] + [(0, 0)] * (x.ndim - 1))

    def low(x):
        return lax.reduce_precision(x, *_BITS[dtype])

    ids_q = padded(masks.segment_ids[0])  # Rows after the last are padding.
    q, do, dlse = padded(q), padded(do), padded(dlse)
    at_k = jnp.arange(s, dtype=jnp.int32)

    def chunk(sums, start):
        def cut(x):
            return lax.dynamic_slice_in_dim(x, start, rows)

        at = start + jnp.arange(rows, dtype=jnp.int32)
        keep = _kept(at, at_k, cut(ids_q), masks)
        seen = keep.any(0)
        # [rows * g, ...]
        keep = jnp.repeat(keep, groups, 0)
        q_here, do_here = (cut(x).reshape(rows * groups, -1) for x in (q, do))
        dlse_here = cut(dlse).reshape(-1, 1)
        sink = jnp.tile(sinks, rows)[:, None] if has_sinks else jnp.full((1, 1), -jnp.inf)
        logits = scale * (q_here @ k.T)
        slope = 1.0
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
            slope = 1 - (logits / cap) ** 2
        logits = jnp.where(keep, logits, -jnp.inf)
        top = jnp.maximum(logits.max(1, keepdims=True), sink)
        top = jnp.where(jnp.isfinite(top), top, 0)
        p = jnp.exp(logits - top)
        total = p.sum(1, keepdims=True) + jnp.exp(sink - top)
        lse = top + jnp.log(total)
        some = jnp.where(total > 0, total, 1)
        dlse_here = jnp.where(jnp.isfinite(lse), dlse_here, 0)
        dp, weights = do_here @ v.T, p / some

        def both(of):
            """Truth and rounded: ``of`` rounds operands by the function that it is given."""
            return tuple(of(rounding) for rounding in (lambda x: x, low))

        outs = both(lambda r: r(r(p) @ v / some))
        results, new_sums = [], []
        for r, out, (dk, dv, dsinks) in zip((lambda x: x, low), outs, sums, strict=True):
            delta = (do_here * out).sum(1, keepdims=True) - dlse_here
            ds = r(weights * (dp - delta) * slope)
            dq = r(scale * (ds @ k))
            of_sinks = jnp.zeros(groups)
            if has_sinks:
                of_sinks = (-jnp.exp(sink - lse) * delta).reshape(rows, -1).sum(0)
            new = scale * (ds.T @ q_here), r(weights).T @ do_here, of_sinks
            new_sums.append(tuple(x + y for x, y in zip((dk, dv, dsinks), new, strict=True)))
            results.append((out.reshape(rows, groups, -1), dq.reshape(rows, groups, -1)))
        return tuple(new_sums), (tuple(results), lse.reshape(rows, groups), seen)

    zeros = jnp.zeros_like(k), jnp.zeros_like(v), jnp.zeros(groups)
    starts = rows * jnp.arange(count, dtype=jnp.int32)
    sums, (results, lse, seen) = lax.scan(chunk, (zeros, zeros), starts)

    def whole(x):
        return x.reshape(count * rows, *x.shape[2:])[:length]

    found = []
    for r, (dk, dv, dsinks), (out, dq) in zip((lambda x: x, low), sums, results, strict=True):
        found.append((whole(out), whole(dq), r(dk)[:, None], r(dv)[:, None], dsinks))
    return tuple(found), whole(lse), seen.any(0)


def _kept(at_q, at_k, ids_q, masks: Masks):
    """Which scores of these queries count, bool ``[rows, S]``."""
    (_, ids_k), (q_length, k_length) = masks.segment_ids, masks.lengths
    left, right = masks.window
    q, k = at_q[:, None], at_k[None]
    keep = (k >= q - left) & (k <= q + right) & (q < q_length) & (k < k_length)
    keep &= q // masks.chunk == k // masks.chunk
    return keep & (ids_q[:, None] == ids_k[None]) & (ids_q[:, None] != 0)


# --- comparison ----------------------------------------------------------------------------------

# Tokens in a row, of one head, whose largest error in 16 bits each of them may have, times FACTOR.
NEIGHBORS = 32
FACTOR = 4.0
# The same of the root mean square over all tokens.
RMS_FACTOR = 1.5


class Comparison(NamedTuple):
    """Errors of a call, each relative to what is allowed: at most 1 is right, and NaN is wrong.

    Attributes:
      rms: of all tokens, for out, dq, dk and dv.
      token: of the worst token of a head.
      lse: of the worst log-sum-exp.
      dsinks: of the gradients of the sinks.
      nonzero: number of nonzero elements where the truth is exactly zero.
    """

    rms: jax.Array
    token: jax.Array
    lse: jax.Array
    dsinks: jax.Array
    nonzero: jax.Array

    def largest(self) -> float:
        """The largest of them, infinite if something is not zero that must be, or NaN."""
        if int(self.nonzero):
            return float("inf")
        parts = (self.rms, self.token, self.lse, self.dsinks)
        return max(float(jnp.where(jnp.isnan(x), jnp.inf, x).max()) for x in parts)


@functools.partial(jax.jit, static_argnames=("dtype", "has_sinks"))
def compare(got: Results, lse, want: Reference, *, dtype, has_sinks=False) -> Comparison:
    """Compares a call's results with the reference, token by token."""
    eps = 2.0 ** -_BITS[dtype][1]
    blind = jnp.isneginf(want.lse)
    rms, token = [], []
    nonzero = jnp.int32(0)
    per_key = want.unseen[..., None]
    for name, zeros in (("out", blind), ("dq", blind), ("dk", per_key), ("dv", per_key)):
        x, truth, rounded = (getattr(r, name) for r in (got, want.truth, want.rounded))
        x = x.astype(jnp.float32)
        error, allowed, size = (
            jnp.sqrt((y**2).sum(-1)) for y in (x - truth, rounded - truth, truth)
        )
        nonzero += jnp.sum((x != 0) & zeros[..., None], dtype=jnp.int32)
        # The result itself is rounded.
        rms.append(_rms(error) / (RMS_FACTOR * _rms(allowed) + 0.1 * eps * _rms(size)))
        near = _largest_near(allowed)
        limit = FACTOR * near + 2 * eps * size + 1e-2 * eps * _rms(size)
        token.append(jnp.max(jnp.where(error == 0, 0, error / limit)))
    # Kernels sum thousands of float32 terms one after the other, and exponentials are approximate.
    gap = jnp.where(lse == want.lse, 0, jnp.abs(lse - want.lse) / (5e-5 + 5e-6 * jnp.abs(want.lse)))
    dsinks = jnp.float32(0)
    if has_sinks:
        truth, rounded = want.truth.dsinks, want.rounded.dsinks
        limit = FACTOR * jnp.abs(rounded - truth).max() + 2 * eps * jnp.abs(truth).max()
        dsinks = jnp.abs(got.dsinks - truth).max() / limit
    return Comparison(jnp.stack(rms), jnp.stack(token), gap.max(), dsinks, nonzero)


def _rms(x):
    return jnp.sqrt(jnp.mean(x**2))


def _largest_near(x):
    """The largest of each token's neighbors, ``[B, L, heads]``."""
    length = x.shape[1]
    blocks = -(-length // NEIGHBORS)
    padded = jnp.pad(x, ((0, 0), (0, blocks * NEIGHBORS - length), (0, 0)))
    most = padded.reshape(x.shape[0], blocks, NEIGHBORS, -1).max(2)
    return jnp.repeat(most, NEIGHBORS, 1)[:, :length]
