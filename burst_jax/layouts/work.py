"""The work of a ring on packed documents: pairs of each device and step, and what they cost.

The causal pairs (query, key) of each device and each ring step are exact, for any layout. They are
computed from the documents' ends: some milliseconds for a million tokens.

A fixed layout splits the sequence into blocks of k tokens (``Layout.block_shards``), here called
units, of which U make a period: half-blocks (zigzag, U = 2n), blocks (contiguous, U = n) or stripes
(striped:k, U = n, many periods). Below a position ``p = m U k + r``, unit v has ::

    C_v(p) = m k + clip(r - v k, 0, k)

tokens. The pairs of a document's run ``[a, b)`` with queries in unit u and keys in unit v are, with
``G_uv(p)`` the sum of ``C_v(q + 1)`` over the queries ``q < p`` of unit u ::

    G_uv(b) - G_uv(a) - (C_u(b) - C_u(a)) C_v(a)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from burst_jax.errors import check_integer
from burst_jax.layouts.balanced_layout import Balanced
from burst_jax.layouts.documents import Runs, runs_of
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.ring_costs import RingCosts

# Tokens of a shard from which a share means something. In the model, with an H100's fixed costs,
# one document on smaller shards reaches little more than half of ideal in any layout: a share would
# only show that the sequences are short for a ring.
MIN_SHARD = 2048


@dataclasses.dataclass(frozen=True, eq=False)
class WorkReport:
    """What a ring does on a batch of packed documents: see :func:`work_report`.

    Attributes:
      pairs: int64 ``[n, n]``, causal pairs of each device with the keys of each device.
      balance: the slowest device's pairs over the mean device's; 1 is ideal.
      empty_steps: share of the ring steps, after each device's first, that have no pair.
      bytes_sent: bytes that a device sends, relative to those of zigzag.
      share_of_ideal: the mean device's pairs over the modelled time of the slowest device, as in
        :class:`burst_jax.layouts.Placement`.
    """

    pairs: np.ndarray
    balance: float
    empty_steps: float
    bytes_sent: float
    share_of_ideal: float


def work_report(
    segment_ids: np.ndarray,
    layout: LayoutLike,
    num_shards: int,
    *,
    positions: np.ndarray | None = None,
    costs: RingCosts | None = None,
) -> WorkReport:
    """How much of ideal a ring reaches on packed documents with causal attention.

    It runs on the host, in some milliseconds.

    Args:
      segment_ids: integers ``[B, T]`` in natural order, 0 for padding: the sequences of one ring.
      layout: the layout, whose divisor T must be a multiple of. "balanced" has the gathered zone
        that the documents need.
      num_shards: number of shards on the ring, n.
      positions: integers ``[B, T]``: ``segment_ids`` and they are a batch in the order of a
        balanced layout, as the attention gets them. None is natural order; a balanced layout is
        then computed.
      costs: the cost model; default ``RingCosts()``.

    Returns:
      The :class:`WorkReport`.

    Raises:
      ValueError: arrays of another shape, a layout that is unknown or cannot split T, documents
        that do not fit in the layout's gathered zone, or positions with another layout.
    """
    n, segment_ids = check_integer("num_shards", num_shards, 1), np.asarray(segment_ids)
    if segment_ids.ndim != 2 or segment_ids.dtype.kind not in "iu":
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape} and dtype {segment_ids.dtype}: it needs "
            "integers [B, T]"
        )
    length = segment_ids.shape[1]
    layout, costs = parse_layout(layout), RingCosts() if costs is None else costs
    if layout.is_fixed:
        layout.check_length(length, n, "the length of segment_ids")
        if positions is not None:
            raise ValueError(
                f"positions are given with layout {layout!r}, which defines them: pass "
                "segment_ids in natural order, and positions in a balanced layout alone"
            )
        runs = map(runs_of, segment_ids)
    else:
        if positions is None and length % n == 0:
            layout, order, segment_ids = layout.order_of(segment_ids, n)
            positions = np.maximum(order, 0)
        layout.check_length(length, n, "the length of segment_ids")
        positions = np.asarray(positions)
        if positions.shape != segment_ids.shape:
            raise ValueError(
                f"positions has shape {positions.shape}, segment_ids {segment_ids.shape}: they "
                "must be equal"
            )
        rows = zip(segment_ids, positions, strict=True)
        runs = (runs_of(ids, own, n) for ids, own in rows)
    return report_of_runs(runs, layout, n, length=length, costs=costs)


def report_of_runs(
    sequences: Iterable[Runs], layout: Layout, n: int, *, length: int, costs: RingCosts
) -> WorkReport:
    """:func:`work_report` of sequences by the runs of their documents, read one by one.

    The runs are those of a layout's natural order, in a balanced layout those of its own order.
    """
    zone, count = layout.known_zone if isinstance(layout, Balanced) else None, 0
    pairs, wasted = np.zeros((n, n), np.int64), np.zeros(n)
    for runs in sequences:
        if zone is None:
            more = _fixed_work(runs, length, layout, n, costs.tile)
        else:
            more = _placed_work(runs, length, n, costs.tile)
        pairs, wasted, count = pairs + more[0], wasted + more[1], count + 1
    sent = length // n if zone is None else zone
    total, by_device = int(pairs.sum()), pairs.sum(1)
    of_others, done = ~np.eye(n, dtype=bool), (by_device + wasted).tolist()
    tokens = sent * count
    if zone is None:
        busy = ((pairs > 0) & of_others).sum(1).tolist()
        steps = zip(done, busy, strict=True)
        times = [costs.ring_time(work, tokens, n, count) for work, count in steps]
    else:
        times = [costs.time(work, tokens, n) for work in done]
    slowest = max(times)
    return WorkReport(
        pairs=pairs,
        balance=int(by_device.max()) * n / total if total else 1.0,
        empty_steps=float((pairs[of_others] == 0).mean()) if n > 1 and sent else 0.0,
        bytes_sent=sent * n / length,
        share_of_ideal=total / (n * slowest) if total else 1.0,
    )


def _fixed_work(
    runs: Runs, length: int, layout: Layout, n: int, tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs int64 ``[n, n]`` and wasted pairs ``[n]`` of a sequence in a fixed layout."""
    size, shards = layout.block_shards(length // n, n)
    units = len(shards)
    starts, ends = (_Below(p, size, units) for p in (runs.start, runs.start + runs.size))
    own = ends.counts - starts.counts
    within = ends.pairs() - starts.pairs() - _product(own, starts.counts)
    pairs = within + _product(own, runs.before(own))

    before = runs.before(runs.size)[:, None]
    first, last = np.zeros_like(own), np.broadcast_to(runs.size[:, None], own.shape)
    if size * units == length:  # One period: each unit is one range of positions.
        edges = size * np.arange(units + 1) - runs.start[:, None]
        edges = np.clip(edges, 0, runs.size[:, None])
        first, last = edges[:, :-1], edges[:, 1:]
    wasted = _wasted(runs, own, before + first, before + last, tile)

    of_shard = np.eye(n, dtype=np.int64)[shards]
    return of_shard.T @ pairs @ of_shard, wasted @ of_shard


def _placed_work(runs: Runs, length: int, n: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs int64 ``[n, n]`` and wasted pairs ``[n]`` of a sequence in a balanced layout."""
    shard = runs.start // (length // n)
    own = np.eye(n, dtype=np.int64)[shard] * runs.size[:, None]
    within = np.bincount(shard, runs.size * (runs.size + 1) // 2, n).astype(np.int64)
    before = runs.before(runs.size)[:, None]
    wasted = _wasted(runs, own, before, before + runs.size[:, None], tile)
    return np.diag(within) + _product(own, runs.before(own)), wasted


def _wasted(
    runs: Runs, own: np.ndarray, first: np.ndarray, last: np.ndarray, tile: int
) -> np.ndarray:
    """Pairs that tiles compute in vain: about one tile of queries for each part of a document.

    ``own`` is the number of each run's tokens by part ``[R, U]``; ``first`` and ``last`` are the
    positions in the document where its part starts and ends. Whole documents waste nothing that one
    device would not.
    """
    whole = runs.lengths[runs.document][:, None]
    is_part = (own > 0) & (own < whole)
    return tile * ((first + last) * is_part).sum(0) / 2


class _Below:
    """Tokens of each unit below some positions.

    Attributes:
      counts: int64 ``[R, U]``: ``C_v(p)``.
    """

    def __init__(self, positions: np.ndarray, size: int, units: int) -> None:
        self._size = size
        self._periods, rest = np.divmod(positions, units * size)
        self._counts = np.clip(rest[:, None] - size * np.arange(units), 0, size)
        self.counts = self._periods[:, None] * size + self._counts

    def pairs(self) -> np.ndarray:
        """``G_uv(p)``, summed over the positions: int64 ``[U, U]``."""
        k, m, counts = self._size, self._periods, self._counts
        everywhere = k * k * (m * (m - 1) // 2).sum() + k * (m[:, None] * counts).sum(0)
        lower = k * self.counts.sum(0)
        diagonal = (m * (k * (k + 1) // 2)).sum() + (counts * (counts + 1) // 2).sum(0)
        units = counts.shape[1]
        found = np.tril(np.broadcast_to(lower[:, None], (units, units)), -1)
        return found + np.diag(diagonal) + everywhere[:, None]


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``x.T @ y`` of integers, by the fast product of float64: sums are below 2**53."""
    return np.rint(x.T.astype(np.float64) @ y.astype(np.float64)).astype(np.int64)
