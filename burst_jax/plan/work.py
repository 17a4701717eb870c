"""How many scores each step of a ring computes, from positions and masks alone."""

from __future__ import annotations

import numpy as np

from burst_jax.layout import shard_runs
from burst_jax.route import Route, Stop, score_offsets
from pallas_kernels import AttentionSpec


def scores_by_stop(
    route: Route,
    layout: str,
    q_length: int,
    kv_length: int,
    spec: AttentionSpec,
    queries_travel: bool = False,
) -> dict[Stop, tuple[float, float]]:
    """Scores that count at each stop, per batch row and head: ``(most, mean)`` over the devices.

    A step lasts as long as its busiest device works: the others wait for what it sends.

    Args:
      route: whose stops.
      layout: the layout's name.
      q_length: query tokens of one shard.
      kv_length: key tokens of one shard.
      spec: the masks; segment ids are not known to a plan.
      queries_travel: whether blocks of queries go around and keys stay.
    """
    _, _, q_count = shard_runs(layout, q_length, route.size)
    _, _, kv_count = shard_runs(layout, kv_length, route.size)
    offsets = score_offsets(route.sizes, layout, q_length, kv_length, spec, queries_travel)
    counts = {}
    for stop in route.stops:
        low, high = offsets(stop)
        pairs = _pairs_up_to(high, q_count, kv_count) - _pairs_up_to(low - 1, q_count, kv_count)
        by_device = np.where(low <= high, pairs, 0).sum((1, 2), dtype=np.float64)
        counts[stop] = float(by_device.max()), float(by_device.mean())
    return counts


def _pairs_up_to(offset: np.ndarray, q_count: int, kv_count: int) -> np.ndarray:
    """Pairs (i, j) of ``i < q_count`` and ``j < kv_count`` with ``i - j <= offset``."""

    def rows_up_to(x: np.ndarray) -> np.ndarray:
        """The sum of ``clip(u, 0, q_count)`` over all u up to x."""
        inside = np.clip(x, 0, q_count)
        return inside * (inside + 1) // 2 + np.maximum(x - q_count, 0) * q_count

    # For every j the rows up to offset + j: clip(offset + j + 1, 0, q_count) of them.
    return rows_up_to(offset + kv_count) - rows_up_to(offset)
