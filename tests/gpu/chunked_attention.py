"""Attention of long sequences in float32, head by head in chunks, and what 16 bits make of it.

The reference of the rings: it shares no code with the library. Masks are computed from positions,
ids and lengths, scores are whole rows, and all matrix products are float32's.

Fused attention rounds to the query's dtype the operands of matrix products that it computes
itself, P and dS, and every result. Each rounding error is independent of the others, so variances
add; they are carried through the formulas of every result, for each token:

    Var(out_i)   = sum_j Var(P_ij) |v_j|^2
    Var(delta_i) = sum_j Var(P_ij) (do_i v_j)^2 + r sum_d (do_id out_id)^2
    Var(dq_i)    = sum_j Var(dS_ij) |k_j|^2 + Var(delta_i) |sum_j P_ij k_j|^2
    Var(dk_j)    = sum_i Var(dS_ij) |q_i|^2 + sum_i Var(delta_i) P_ij^2 |q_i|^2
    Var(dv_j)    = sum_i Var(P_ij) |do_i|^2

where Var(x) = r x^2 (+ a, below the least normal number). So a token whose few large logits leave
their rounding errors no others to cancel may be as far off as it must be, and only that token.

Programs depend on lengths and head dims alone, of which there are few: lengths are padded to
powers of two, head dims to multiples of 128, and masks are arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Scores of a chunk: 128 MiB in float32.
_CHUNK = 2**25
# Bits of the mantissa, and the exponent of the least subnormal number.
_BITS = {"bfloat16": (7, -133), "float16": (10, -24), "float32": (23, -149)}
_EVERYTHING = 2**30
# Choosing among kernels for each of ten matrix products takes longer than all of them.
_OPTIONS: Any = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# Standard deviations by which a token may be off: 2e-9 of normal errors are, 5e-4 of calls with
# 262,144 tokens of a head.
FACTOR = 6.0
# Of the root mean square over all tokens, which chance changes little.
RMS_FACTOR = 1.5


class Masks(NamedTuple):
    """Which scores of a sequence count.

    Attributes:
      segment_ids: int32 ``[T]``, ``[S]``, of queries and keys; 0 is padding.
      lengths: int32 ``[2]``, of queries and keys.
      window: int32 ``[2]``: keys from ``p - window[0]`` to ``p + window[1]`` count.
      chunk: int32: queries attend to keys of their own chunk of so many positions.
    """

    segment_ids: tuple[np.ndarray, np.ndarray]
    lengths: np.ndarray
    window: np.ndarray
    chunk: np.ndarray | np.int32

    @classmethod
    def of(
        cls, t, s, *, segment_ids=None, lengths=None, is_causal=False,
        local_window_size=(None, None), attention_chunk_size=None,
    ):  # fmt: skip
        """From arguments of ``burst_attention``; ``segment_ids`` and ``lengths`` of both sides."""
        if segment_ids is None:
            segment_ids = np.ones(t, np.int32), np.ones(s, np.int32)
        left, right = (_EVERYTHING if side is None else side for side in local_window_size)
        return cls(
            segment_ids, np.array((t, s) if lengths is None else lengths, np.int32),
            np.array([left, 0 if is_causal else right], np.int32),
            np.int32(attention_chunk_size or _EVERYTHING),
        )  # fmt: skip


class Results(NamedTuple):
    """``out``, ``dq`` ``[T, .]``, ``dk``, ``dv`` ``[S, .]``, ``dsink``, of a query head."""

    out: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dsink: jax.Array


class Reference(NamedTuple):
    """What a query head must give.

    Attributes:
      truth: float32.
      variance: of each token, by the rounding of what the results are computed from.
      lse: float32 ``[T]``.
      blind: bool ``[T]``: queries that attend to nothing.
      unseen: bool ``[S]``: keys that no query attends to.
    """

    truth: Results
    variance: Results
    lse: jax.Array
    blind: jax.Array
    unseen: jax.Array


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def reference(q, k, v, do, dlse, sink, masks: Masks, scale, cap, rounding) -> Reference:
    """:class:`Reference` of one query head in natural order.

    Args:
      q, k, v, do: ``[T or S, H or Hv]``.
      dlse: float32 ``[T]``; ignored where lse is -inf.
      sink: float32, a sink in every softmax; -inf: none.
      masks: which scores count.
      scale: of the logits.
      cap: ``logits_soft_cap``, or 0.
      rounding: :func:`variances_of` the dtype.
    """
    with jax.default_matmul_precision("highest"):
        return _in_chunks(q, k, v, do, dlse, sink, masks, scale, cap, rounding)


def _in_chunks(q, k, v, do, dlse, sink, masks: Masks, scale, cap, rounding) -> Reference:
    q, k, v, do = (x.astype(jnp.float32) for x in (q, k, v, do))
    (length, s), (relative, absolute) = (len(q), len(k)), rounding
    rows = min(length, _CHUNK // s)
    if length % rows:
        raise ValueError(f"q has {length} tokens: it must have a multiple of {rows}")
    at_k = jnp.arange(s, dtype=jnp.int32)

    def squared(x):
        return (x**2).sum(-1)

    def chunk(sums, start):
        def cut(x):
            return lax.dynamic_slice_in_dim(x, start, rows)

        q_here, do_here = cut(q), cut(do)
        at_q = start + jnp.arange(rows, dtype=jnp.int32)
        keep = _kept(at_q, at_k, cut(masks.segment_ids[0]), masks)
        logits = scale * (q_here @ k.T)
        tanh = jnp.tanh(logits / jnp.where(cap > 0, cap, 1))
        slope = jnp.where(cap > 0, 1 - tanh**2, 1)
        logits = jnp.where(keep, jnp.where(cap > 0, cap * tanh, logits), -jnp.inf)
        top = jnp.maximum(logits.max(1, keepdims=True), sink)
        top = jnp.where(jnp.isfinite(top), top, 0)
        p = jnp.exp(logits - top)
        total = p.sum(1, keepdims=True) + jnp.exp(sink - top)
        lse = (top + jnp.log(total))[:, 0]
        some = jnp.where(total > 0, total, 1)
        p, p_sink = p / some, (jnp.exp(sink - top) / some)[:, 0]
        out, dp = p @ v, do_here @ v.T
        dlse_here = jnp.where(jnp.isfinite(lse), cut(dlse), 0)
        delta = (do_here * out).sum(1) - dlse_here
        slopes = p * slope
        ds = scale * slopes * (dp - delta[:, None])
        dq = ds @ k
        # The forward pass rounds P before it divides by the sum.
        of_p, of_ds = (jnp.where(keep, relative * x**2 + absolute, 0) for x in (p, ds))
        forward = jnp.where(keep, relative * p**2 + absolute / some**2, 0)
        of_delta = (forward * dp**2).sum(1) + relative * squared(do_here * out)
        variance = (
            forward @ squared(v),
            of_ds @ squared(k) + of_delta * squared(scale * slopes @ k),
        )
        size = squared(q_here)
        new = (
            ds.T @ q_here, p.T @ do_here, -(p_sink * delta).sum(),
            of_ds.T @ size + (scale * slopes).T ** 2 @ (size * of_delta),
            of_p.T @ squared(do_here), (p_sink**2 * of_delta).sum(), keep.any(0),
        )  # fmt: skip
        sums = jax.tree.map(lambda x, y: x | y if x.dtype == bool else x + y, sums, new)
        return sums, (out, dq, *variance, lse, ~keep.any(1))

    zero = jnp.float32(0)
    sums = (jnp.zeros_like(k), jnp.zeros_like(v), zero)
    sums += (jnp.zeros(s), jnp.zeros(s), zero, jnp.zeros(s, bool))
    starts = rows * jnp.arange(length // rows, dtype=jnp.int32)
    sums, results = lax.scan(chunk, sums, starts)
    out, dq, of_out, of_dq, lse, blind = (x.reshape(length, *x.shape[2:]) for x in results)
    dk, dv, dsink, of_dk, of_dv, of_dsink, seen = sums
    return Reference(
        Results(out, dq, dk, dv, dsink), Results(of_out, of_dq, of_dk, of_dv, of_dsink), lse,
        blind, ~seen,
    )  # fmt: skip


def _kept(at_q, at_k, ids_q, masks: Masks):
    """Which scores of these queries count, bool ``[rows, S]``."""
    (_, ids_k), (q_length, k_length) = masks.segment_ids, masks.lengths
    left, right = masks.window
    q, k = at_q[:, None], at_k[None]
    keep = (k >= q - left) & (k <= q + right) & (q < q_length) & (k < k_length)
    keep &= q // masks.chunk == k // masks.chunk
    return keep & (ids_q[:, None] == ids_k[None]) & (ids_q[:, None] != 0)


def variances_of(dtype: str) -> np.ndarray:
    """Variance of a rounding error, relative to the square of the number, and at least.

    The error is uniform over the distance d of two numbers: its variance is d^2 / 12. That of
    numbers from 1 to 2 is eps, and the mean of 1 / x^2 over them is 0.54 where all orders of
    magnitude are equally likely.
    """
    bits, least = _BITS[dtype]
    return np.array([0.54 * 2.0 ** (-2 * bits) / 12, 2.0 ** max(2 * least, -126) / 12], np.float32)


# --- comparison ----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Errors of a call, each relative to what is allowed: at most 1 is right, and NaN is wrong.

    Attributes:
      rms: of all tokens, for out, dq, dk and dv.
      token: of the worst token of a head.
      lse: of the worst log-sum-exp.
      dsinks: of the gradients of the sinks.
      nonzero: number of nonzero elements where the truth is exactly zero.
    """

    rms: np.ndarray
    token: np.ndarray
    lse: float
    dsinks: float
    nonzero: int

    def largest(self) -> float:
        """The largest of them, infinite if something is not zero that must be, or NaN."""
        parts = np.hstack([self.rms, self.token, self.lse, self.dsinks])
        return float("inf") if self.nonzero or np.isnan(parts).any() else float(parts.max())


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def _errors(x, truth, variance, zeros, relative):
    """Sums of squares of the error and of what is expected; the worst token; what is not zero."""
    x = x.astype(jnp.float32)
    error, size = ((y**2).sum(-1) for y in (x - truth, truth))
    # The result itself is rounded.
    expected = variance + relative * size
    # Sums in float32 are rounded, too.
    limit = FACTOR * jnp.sqrt(expected + relative * 1e-4 * size.mean())
    error = jnp.where(jnp.isnan(error), jnp.inf, error)
    worst = jnp.max(jnp.where(error == 0, 0, jnp.sqrt(error) / limit))
    nonzero = jnp.sum((x != 0) & zeros[:, None], dtype=jnp.int32)
    return jnp.stack([error.sum(), expected.sum(), worst]), nonzero


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def _lse_error(lse, want):
    # Kernels sum thousands of float32 terms one after the other, and exponentials are approximate.
    gap = jnp.where(lse == want, 0, jnp.abs(lse - want) / (5e-5 + 5e-6 * jnp.abs(want)))
    return jnp.where(jnp.isnan(gap), jnp.inf, gap).max()


def compare(given, got, masks: list[Masks], *, dtype: str, cap: float | None = None) -> Comparison:
    """Compares a call's results with the reference, token by token.

    Args:
      given: ``query``, ``key``, ``value``, ``do``, ``dlse`` and maybe ``sink_logits`` by name, in
        natural order, ``[B, T or S, N or K, .]``.
      got: ``out``, ``lse``, ``dq``, ``dk``, ``dv`` and maybe ``dsinks``.
      masks: of each sequence.
      dtype: name of the query's.
      cap: ``logits_soft_cap``.
    """
    (_, t, heads, dim), (_, s, kv_heads, _) = given["query"].shape, given["key"].shape
    rounding, groups = variances_of(dtype), heads // kv_heads
    has_sinks = "sink_logits" in given
    sinks = given["sink_logits"] if has_sinks else np.full(heads, -np.inf, np.float32)
    errors: dict[str, list[np.ndarray]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    lse, nonzero = 0.0, 0
    dsinks, of_dsinks = np.zeros(heads), np.zeros(heads)

    def add(name, x, truth, variance, zeros):
        nonlocal nonzero
        found, count = _errors(x, truth, variance, zeros, rounding[0])
        errors[name].append(np.asarray(found))
        nonzero += int(count)

    for row, mask in enumerate(masks):
        ids_q, ids_k = (_padded(x, len(x)) for x in mask.segment_ids)
        mask = mask._replace(segment_ids=(ids_q, ids_k))
        for kv_head in range(kv_heads):
            keys = []
            k, v, dk, dv = (
                _padded(x[row, :, kv_head], s)
                for x in (given["key"], given["value"], got["dk"], got["dv"])
            )
            for n in range(kv_head * groups, (kv_head + 1) * groups):
                q, do, dlse, out, dq, of_lse = (
                    _padded(x[row, :, n], t)
                    for x in (
                        given["query"], given["do"], given["dlse"], got["out"], got["dq"],
                        got["lse"],
                    )
                )  # fmt: skip
                want = reference(
                    q, k, v, do, dlse, sinks[n], mask, np.float32(dim**-0.5),
                    np.float32(cap or 0), rounding,
                )  # fmt: skip
                truth, variance = want.truth, want.variance
                add("out", out, truth.out, variance.out, want.blind)
                add("dq", dq, truth.dq, variance.dq, want.blind)
                # What was padded is right.
                padded = np.arange(len(of_lse)) >= t
                lse = max(lse, float(_lse_error(jnp.where(padded, want.lse, of_lse), want.lse)))
                dsinks[n] += float(truth.dsink)
                of_dsinks[n] += float(variance.dsink)
                keys.append((truth.dk, truth.dv, variance.dk, variance.dv, want.unseen))
            *sums, unseen = functools.reduce(_add, keys)
            add("dk", dk, sums[0], sums[2], unseen)
            add("dv", dv, sums[1], sums[3], unseen)
    rms, token = [], []
    for found in map(np.stack, errors.values()):
        rms.append(np.sqrt(found[:, 0].sum() / found[:, 1].sum()) / RMS_FACTOR)
        token.append(found[:, 2].max())
    worst = 0.0
    if has_sinks:
        limit = FACTOR * np.sqrt(of_dsinks) + 2.0 ** -_BITS[dtype][0] * np.abs(dsinks).max()
        worst = float((np.abs(got["dsinks"] - dsinks) / limit).max())
    return Comparison(np.array(rms), np.array(token), lse, worst, nonzero)


@jax.jit
def _add(x, y):
    """Sums over the query heads of a key head."""
    return tuple(a & b if a.dtype == bool else a + b for a, b in zip(x, y, strict=True))


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    """``[length, ...]`` with zeros, up to the next power of two and a multiple of 128 features."""
    sizes = [(0, (1 << (length - 1).bit_length()) - length)]
    return np.pad(x, sizes + [(0, -size % 128) for size in x.shape[1:]])
