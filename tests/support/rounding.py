"""Bounds of what rounding can change in attention's results, for every element of them.

A forward error analysis in float64. Kernels round the operands of matrix products, P and dS, and
their results to the inputs' dtype, and compute delta from the rounded out. All else is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Relative error of float32 sums and exponentials, for each unit of a logit's magnitude.
_FLOAT32 = 2.0**-20
# For errors of second order.
_MARGIN = 1.25


class Passes(NamedTuple):
    """Both passes of attention in float64; arrays by head are ``[B, N, tokens, H]``.

    Attributes:
      results: ``[out, lse, dq, dk, dv]``, then per-head gradients by name.
      q: queries by head.
      k: keys by head, one per query head.
      v: values by head, one per query head.
      do: cotangents of out by head.
      p: softmax weights ``[B, N, T, S]``.
      factors: of dropout, which broadcast against p.
      logits: -inf where masked.
      dlogits: their gradients.
      derivative: of the logits with respect to ``q k^T``.
      divisor: 1 over the scale.
      of_keys: sums ``[B, N, S, H]`` over the query heads of each key head, ``[B, S, K, H]``.
      distance: of positions, for ALiBi; None without.
      sinks: sink logits ``[1, N, 1, 1]``; None without.
      delta: ``[B, N, T, 1]``.
    """

    results: list[np.ndarray]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    p: np.ndarray
    factors: Any
    logits: np.ndarray
    dlogits: np.ndarray
    derivative: Any
    divisor: Any
    of_keys: Callable[[np.ndarray], np.ndarray]
    distance: Any
    sinks: Any
    delta: np.ndarray


def largest_errors(run: Passes, dtype: Any) -> list[np.ndarray]:
    """A bound of every element's error, in the order of ``run.results``.

    Args:
      run: in float64, from inputs that are rounded already.
      dtype: bfloat16 or float16, in which kernels compute.
    """
    info = jnp.finfo(dtype)
    unit = float(info.eps) / 2
    # Numbers below the smallest normal one lose relative accuracy: half of the smallest step in
    # float16. GPUs flush those of float32, whose range bfloat16 has, to 0.
    tiny = float(jnp.finfo(jnp.float32).tiny)
    floor = float(info.smallest_subnormal) / 2 if dtype == jnp.float16 else tiny
    q, k, v, do = (np.abs(x) for x in (run.q, run.k, run.v, run.do))
    out, lse, dq, dk, dv, *numbers = map(np.abs, run.results)
    # Of the logits before and after what is added to them or bends them.
    products = (q @ k.swapaxes(2, 3)) / run.divisor
    size = np.maximum(products, np.where(np.isfinite(run.logits), np.abs(run.logits), 0))
    of_lse = np.where(np.isfinite(lse), lse, 0).swapaxes(1, 2)[..., None]
    of_weight = _FLOAT32 * (1 + size.max(-1, keepdims=True) + of_lse)
    used = run.p * run.factors

    by_row = out.swapaxes(1, 2)
    # Weights are at most 1 before they are normalized, and their sum is at least 1.
    out_error = ((unit + of_weight) * used + floor * (run.p > 0)) @ v + unit * by_row + floor
    delta_error = (do * out_error).sum(-1, keepdims=True) + _FLOAT32 * (
        np.abs(run.delta) + (do * by_row).sum(-1, keepdims=True)
    )
    dp_error = _FLOAT32 * (do @ v.swapaxes(2, 3)) * run.factors
    slope = np.abs(run.derivative * run.divisor)
    dlogits = np.abs(run.dlogits)
    dlogits_error = run.p * (delta_error + dp_error) + of_weight * dlogits
    # With a score that bends, the weights are rounded before the derivative multiplies them.
    ds_error = slope * (dlogits_error + 2 * unit * dlogits) + floor
    dv_error = (unit + of_weight) * used + floor * (run.p > 0)
    bounds = [
        out_error.swapaxes(1, 2),
        (of_weight * (1 + of_lse))[..., 0].swapaxes(1, 2),
        (ds_error @ k / run.divisor).swapaxes(1, 2) + unit * dq + floor,
        run.of_keys(ds_error.swapaxes(2, 3) @ q / run.divisor) + unit * dk + floor,
        run.of_keys(dv_error.swapaxes(2, 3) @ do) + unit * dv + floor,
    ]
    if len(numbers) > (run.sinks is not None):
        error = dlogits_error + unit * dlogits + tiny
        bounds.append((error * np.abs(run.distance)).sum((0, 2, 3)))
    if run.sinks is not None:
        # Every query has a finite lse then.
        weight = np.exp(run.sinks - run.results[1].swapaxes(1, 2)[..., None])
        error = delta_error + of_weight * np.abs(run.delta)
        flushed = tiny * (1 + np.abs(run.delta))
        bounds.append((weight * error + flushed).sum((0, 2, 3)))
    return [_MARGIN * bound for bound in bounds]


def fixed_point_error(run: Passes) -> np.ndarray:
    """``[B, T, N, 1]``: what the rounding of dQ's parts to integers can change, on top.

    dQ is a multiple of 2^-30 times the largest dQ that the norms of dO, K and V allow a query, of
    all keys. Each tile of keys adds a part that is rounded; the smallest tiles have 32 keys.
    """
    of_keys = np.abs(run.k).max(-1)
    of_pairs = (of_keys * np.linalg.norm(run.v, axis=-1)).max(-1)[:, :, None, None]
    largest = np.linalg.norm(run.do, axis=-1, keepdims=True) * of_pairs * np.max(run.factors)
    largest = largest + np.abs(run.delta) * of_keys.max(-1)[:, :, None, None]
    parts = -(-run.k.shape[2] // 32)
    step = largest / abs(run.divisor) * 2.0**-30
    return _MARGIN * (parts / 2 * step).swapaxes(1, 2)
