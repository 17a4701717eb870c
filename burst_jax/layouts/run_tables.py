"""``RunTables``: what linear attention needs to know about a balanced batch's split documents.

A document that is split over the shards has a few runs of adjacent tokens on each of them, all in
their gathered zones. Linear attention exchanges a map of the state for each run, and composes those
of a document in the document's order (:mod:`burst_jax.linear.split_documents`). This module finds
the runs and their order on the host, once per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from burst_jax.layouts.checksums import checksums

# The number of runs of a shard is padded to a power of two, at least this one, so that few programs
# are compiled. It has room for one split document.
FEWEST_RUNS = 2


class RunTables(NamedTuple):
    """The tables of all devices, or of one inside a ``shard_map``.

    B sequences, n shards, R runs of a shard, some of which may be empty.

    Attributes:
      run_checksums: uint32 ``[B, n]``, of the segment ids of every shard.
      runs: int32 ``[B, 3, n R]``: of the runs of each shard, in the order of its tokens, the index
        of the first token in the shard's gathered zone, the number of tokens, and the place of the
        run in ``run_order``. Empty runs are the last ones of a shard; they have no tokens, and the
        zone's size as the index. None without a gathered zone.
      run_order: int32 ``[B, 3, n R]``: of all runs of a sequence, one document after the other, in
        the order of a document's tokens, the index in ``[n, R]``, the number of tokens up to the
        run's end, and the number of tokens before its document. Empty runs come last. None with
        ``runs``.
    """

    run_checksums: Any
    runs: Any
    run_order: Any


# The mesh dimensions of each table: T is sharded like tokens.
RUN_DIMENSIONS = {"run_checksums": "B T", "runs": "B e T", "run_order": "B e o"}


def run_tables(
    ids: np.ndarray,
    keys: np.ndarray,
    num_shards: int,
    zone: int,
    agree: Callable[[int], int],
) -> RunTables:
    """The tables of a batch, in NumPy.

    Args:
      ids: int32 ``[B, T]`` in the layout's order, 0 for padding.
      keys: int64 ``[B, T]``, ascending by document and position.
      num_shards: number of shards, n.
      zone: number of tokens of the gathered zone, z, that has all tokens of split documents.
      agree: as of :meth:`burst_jax.layouts.Layout.order_of`, for the number of runs of a shard.
    """
    batch, n = len(ids), num_shards
    by_shard = ids.reshape(batch, n, -1)
    sums = checksums(by_shard, np.zeros_like(by_shard), np)
    if n == 1 or not zone:
        return RunTables(sums, None, None)
    found = [_runs_of_row(row, key, n) for row, key in zip(ids, keys, strict=True)]
    most = max((int(np.bincount(runs.shard).max(initial=0)) for runs in found), default=0)
    count = FEWEST_RUNS
    while count < most:
        count *= 2
    count = agree(count)
    outside = ids.shape[1] // n - zone
    rows = [_tables_of_row(runs, n, count, outside, zone) for runs in found]
    runs, order = (np.stack(tables).astype(np.int32) for tables in zip(*rows, strict=True))
    return RunTables(sums, runs, order)


class _Runs(NamedTuple):
    """The runs of a sequence's split documents, int64 ``[runs]``, in the order of the layout.

    Attributes:
      shard: of each run.
      start: index of its first token in the shard.
      size: number of tokens.
      rank: index of its first token among the sorted tokens.
      document: its segment id.
    """

    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray
    rank: np.ndarray
    document: np.ndarray


def is_on_several_shards(ids: np.ndarray, n: int) -> np.ndarray:
    """Bool ``[T]``, whether a token's document has tokens on several shards."""
    order = np.argsort(ids, kind="stable")
    shard, own = order // (len(ids) // n), ids[order]
    first = np.flatnonzero(np.diff(own, prepend=own[:1] - 1))
    size = np.diff(first, append=len(ids))
    several = shard[first] != shard[first + size - 1]
    result = np.empty(len(ids), bool)
    result[order] = np.repeat(several, size)
    return result & (ids != 0)


def _runs_of_row(ids: np.ndarray, keys: np.ndarray, n: int) -> _Runs:
    """The runs of one sequence."""
    length = len(ids) // n
    rank = np.empty(len(ids), np.int64)
    rank[np.argsort(keys, kind="stable")] = np.arange(len(ids))
    is_split = is_on_several_shards(ids, n)
    begins = np.ones(len(ids), bool)
    # Tokens are adjacent in a document whatever positions padding took between them.
    begins[1:] = (np.diff(rank) != 1) | (np.diff(ids) != 0)
    begins[::length] = True
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(ids))
    used = is_split[first]
    first, size = first[used], size[used]
    return _Runs(first // length, first % length, size, rank[first], ids[first])


def _tables_of_row(
    runs: _Runs, n: int, count: int, outside: int, zone: int
) -> tuple[np.ndarray, np.ndarray]:
    """:attr:`RunTables.runs` and :attr:`RunTables.run_order` of one sequence."""
    slot = np.arange(len(runs.shard)) - np.searchsorted(runs.shard, runs.shard)
    index = runs.shard * count + slot
    ranked = np.argsort(runs.rank, kind="stable")
    empty = np.setdiff1d(np.arange(n * count), index)
    order = np.concatenate([index[ranked], empty])
    size, start = np.zeros(n * count, np.int64), np.full(n * count, zone)
    size[index], start[index] = runs.size, runs.start - outside
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ends = np.cumsum(size[order])
    starts = ends - size[order]
    # For each run, the tokens before the first run of its document.
    document = runs.document[ranked]
    before = np.concatenate([starts[np.searchsorted(document, document)], starts[len(document) :]])
    return np.stack([start, size, place]), np.stack([order, ends, before])
