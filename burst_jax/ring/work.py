"""How many scores each step of a ring computes, from positions and masks alone."""

from __future__ import annotations

import numpy as np

from burst_jax.ring.route import RingMask, Route, Stop


def scores_by_stop(route: Route, mask: RingMask) -> dict[Stop, tuple[float, float]]:
    """Scores that count at each stop, per batch row and head: ``(most, mean)`` over the devices.

    A step lasts as long as its busiest device works: the others wait for what it sends.

    Args:
      route: the route of the side that travels.
      mask: of the same side. Segment ids exclude nothing here.
    """
    by_stop = {}
    for stop in route.stops:
        low, high, *counts = mask.kept(stop)
        pairs = _pairs_up_to(high, *counts) - _pairs_up_to(low - 1, *counts)
        by_device = np.where(low <= high, pairs, 0).sum((1, 2), dtype=np.float64)
        by_stop[stop] = float(by_device.max()), float(by_device.mean())
    return by_stop


def _pairs_up_to(offset: np.ndarray, q_count: np.ndarray, kv_count: np.ndarray) -> np.ndarray:
    """Pairs (i, j) of ``i < q_count`` and ``j < kv_count`` with ``i - j <= offset``."""

    def rows_up_to(x: np.ndarray) -> np.ndarray:
        """The sum of ``clip(u, 0, q_count)`` over all u up to x."""
        inside = np.clip(x, 0, q_count)
        return inside * (inside + 1) // 2 + np.maximum(x - q_count, 0) * q_count

    # For every j the rows up to offset + j: clip(offset + j + 1, 0, q_count) of them.
    return rows_up_to(offset + kv_count) - rows_up_to(offset)
