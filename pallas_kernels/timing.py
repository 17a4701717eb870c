"""Timing of device computations, and the relative error of results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def median_time(call: Callable[[], Any], rounds: int = 5, seconds: float = 0.05) -> float:
    """Seconds per call: the median over rounds of back-to-back calls, host launches included.

    Args:
      call: starts the work and returns its results.
      rounds: number of rounds.
      seconds: minimum duration of a round, so that launches overlap with running kernels.
    """
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, math.ceil(seconds / (time.perf_counter() - start)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()  # Results of one stream finish in order, so the last one is waited for.
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def relative_error(got: Any, want: Any) -> float:
    """``|got - want| / |want|``, Euclidean over all leaves of two pytrees; inf if not finite."""
    gap = norm = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        squares = _squares(a, b)
        gap, norm = gap + float(squares[0]), norm + float(squares[1])
    error = math.sqrt(gap / norm) if norm > 0 else math.inf
    return error if math.isfinite(error) else math.inf


@jax.jit
def _squares(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``|got - want|^2`` and ``|want|^2``, in float32 or wider."""
    wide = want.dtype if want.dtype.itemsize >= 4 else jnp.float32
    got, want = got.astype(wide), want.astype(wide)
    return jnp.sum((got - want) ** 2), jnp.sum(want**2)
