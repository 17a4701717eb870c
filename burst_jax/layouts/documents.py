"""The documents of a packed sequence, by segment ids: lengths, order, balanced placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from burst_jax.layouts.balanced import (
    Placement,
    placements,
    runs_of_placement,
    search_batch,
)
from burst_jax.layouts.document_search import Found


class Runs(NamedTuple):
    """Adjacent tokens of one document each, sorted by document and position.

    A document is the tokens of one segment id other than 0. It has several runs if padding or other
    documents are between its tokens.

    Attributes:
      start: int64 ``[R]``, index of the first token.
      size: int64 ``[R]``, number of tokens, at least 1.
      document: int64 ``[R]``, index of the document, in the order of segment ids.
    """

    start: np.ndarray
    size: np.ndarray
    document: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64: the number of tokens of every document."""
        return np.bincount(self.document, self.size).astype(np.int64)

    @property
    def first(self) -> np.ndarray:
        """int64 ``[R]``: the index of the first run of each run's document."""
        return np.searchsorted(self.document, self.document)

    def before(self, x: np.ndarray) -> np.ndarray:
        """The sums of ``x`` ``[R, ...]`` over the runs before each one in its document."""
        sums = np.cumsum(x, 0) - x
        return sums - sums[self.first]

    def indices(self) -> np.ndarray:
        """The index of every token, one document after the other."""
        ends = np.cumsum(self.size)
        return np.repeat(self.start - ends + self.size, self.size) + np.arange(ends[-1:].sum())


def runs_of(segment_ids: np.ndarray, positions: np.ndarray | None = None, shards: int = 1) -> Runs:
    """The runs of a sequence.

    Args:
      segment_ids: integers ``[T]``, 0 for padding.
      positions: the position of each token, if the tokens are not in natural order; runs then have
        adjacent positions, and are sorted by them.
      shards: number of equal shards; a run ends with its shard.
    """
    length = len(segment_ids)
    is_start = np.zeros(length, bool)
    is_start[:: max(1, length // shards)] = True
    is_start[1:] |= segment_ids[1:] != segment_ids[:-1]
    if positions is not None:
        is_start[1:] |= positions[1:] != positions[:-1] + 1
    start = np.flatnonzero(is_start)
    size, ids = np.diff(start, append=length), segment_ids[start]
    if positions is None:
        ranked = np.argsort(ids, kind="stable")
    else:
        ranked = np.lexsort((positions[start], ids))
    ranked = ranked[ids[ranked] != 0]
    start, size, ids = (x[ranked] for x in (start, size, ids))
    document = np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)
    return Runs(start, size, document)


def packed_runs(lengths: Sequence[int]) -> Runs:
    """The runs of documents of these lengths, one after the other: :func:`runs_of` without ids."""
    size = np.asarray(lengths, np.int64)
    return Runs(np.cumsum(size) - size, size, np.arange(len(size)))


def placed_runs(lengths: list[int], found: Found, n: int, c: int) -> Runs:
    """The runs of a placement: :func:`runs_of` its arrays, without them.

    ``n`` and ``c`` are the number of shards and of tokens per shard.
    """
    segment, start, size = runs_of_placement(lengths, found, n, c)
    index = np.cumsum(size) - size
    used = segment > 0
    segment, start, size, index = (x[used] for x in (segment, start, size, index))
    # The low and the high chunk of a piece may be adjacent; a run ends with its shard.
    joins = segment[1:] == segment[:-1]
    joins &= (start[1:] == start[:-1] + size[:-1]) & (index[1:] % c != 0)
    first = np.flatnonzero(np.append(True, ~joins)) if len(size) else np.zeros(0, np.int64)
    size = np.add.reduceat(size, first) if len(size) else size
    segment, start, index = (x[first] for x in (segment, start, index))
    ranked = np.lexsort((start, segment))
    return Runs(index[ranked], size[ranked], segment[ranked] - 1)


def place_documents(
    segment_ids: np.ndarray,
    num_shards: int,
    zone: int | None = None,
    agree: Callable[[int], int] = int,
) -> tuple[np.ndarray, list[Placement]]:
    """Places the documents of every sequence of a batch, see :func:`balance_batch`.

    Args:
      segment_ids: integers ``[B, T]`` in natural order, 0 for padding, which is left out; T is a
        multiple of ``num_shards``.
      num_shards: number of shards on the ring.
      zone: tokens of the gathered zone; None chooses it.
      agree: the zone that is chosen, of the largest that a sequence needs; it may be larger.

    Returns:
      ``(order, placed)``: order is int64 ``[B, T]``, the index of the token at each place, -1 for
      padding.

    Raises:
      ValueError: documents that do not fit in ``zone``.
    """
    sizes = {
        "num_shards": num_shards,
        "tokens_per_shard": segment_ids.shape[1] // num_shards,
    }
    runs = [runs_of(ids) for ids in segment_ids]
    found = search_batch([each.lengths for each in runs], **sizes, zone=zone, agree=agree)
    placed = placements(found, **sizes)
    order = np.full(segment_ids.shape, -1)
    for row, each, one in zip(order, runs, placed, strict=True):
        full = one.order >= 0
        row[full] = each.indices()[one.order[full]]
    return order, placed
