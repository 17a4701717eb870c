"""The static part of a block-sparse mask, and what a ring knows of it before a program runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from pallas_kernels.mask import Mask

# Entries of a table that are looked at together, which bounds the memory that it takes.
_ENTRIES = 1 << 20


class Runs(NamedTuple):
    """Runs of equally spaced tokens of all shards, each within one block, by shard and block.

    Attributes:
      shards: int64 ``[runs]``, the shard that has the run; ascending.
      blocks: int64 ``[runs]``, index of its block, from 0; ascending within a shard.
      starts: int64 ``[runs]``, the position of its first token.
      counts: int64 ``[runs]``, number of tokens, at least 1.
    """

    shards: np.ndarray
    blocks: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def tokens(self, shape: tuple[int, int]) -> np.ndarray:
        """Number of tokens of each shard in each block, float64 of this shape."""
        index = np.ravel_multi_index((self.shards, self.blocks), shape)
        return np.bincount(index, self.counts, shape[0] * shape[1]).reshape(shape)


class BlockPairs(NamedTuple):
    """The blocks of keys that the queries of each block may attend to.

    Attributes:
      starts: int64 ``[rows + 1]``: row i has the columns ``columns[starts[i] : starts[i + 1]]``. In
        these blocks the mask by positions may mask some of the scores.
      columns: int64 ``[pairs]``.
      full: float64 ``[n, blocks of keys]``: how many queries of each shard attend to all keys of
        a block; None if none are known to.
    """

    starts: np.ndarray
    columns: np.ndarray
    full: np.ndarray | None = None


# Without blocks the sequence is one.
ONE_BLOCK = BlockPairs(np.arange(2), np.zeros(1, np.int64))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The static part of a call's ``block_mask``. Hashable, so that it can key a jit cache.

    Attributes:
      q_block: queries per row of the table.
      kv_block: keys per column.
      shape: rows and columns of the table.
      bits: the blocks that any head attends to, packed; None if the table is traced.
    """

    q_block: int
    kv_block: int
    shape: tuple[int, int]
    bits: bytes | None = None

    @functools.cached_property
    def table(self) -> np.ndarray | None:
        """bool ``[rows, columns]``: the blocks that any head attends to; None if traced."""
        if self.bits is None:
            return None
        count = self.shape[0] * self.shape[1]
        packed = np.frombuffer(self.bits, np.uint8)
        return np.unpackbits(packed, count=count).astype(bool).reshape(self.shape)

    @property
    def seen(self) -> float:
        """The fraction of blocks that any head attends to; 1 if the table is traced."""
        return 1.0 if self.table is None else float(self.table.mean())

    def pairs(self, mask: Mask, queries: Runs, shards: int) -> BlockPairs:
        """The pairs of blocks with allowed scores.

        Few of them are partly masked by positions. Of the others only sums are kept.

        Args:
          mask: the mask by positions.
          queries: the runs of ``shards`` shards.
          shards: n.
        """
        assert self.table is not None
        rows, columns = self.shape
        by_row = queries.tokens((shards, rows))
        full = np.zeros((shards, columns))
        kept = [(np.zeros(0, np.int64),) * 2]
        step = max(1, _ENTRIES // columns)
        for first in range(0, rows, step):
            table = self.table[first : first + step]
            row, column = np.nonzero(table)
            base = (first + row) * self.q_block - column * self.kv_block
            least, most = (np.full_like(base, i) for i in (1 - self.kv_block, self.q_block - 1))
            low, high = mask.shards(base, 1, least, most)
            whole = (low == least) & (high == most)
            unmasked = np.zeros(table.shape)
            unmasked[row[whole], column[whole]] = 1
            full += by_row[:, first : first + len(table)] @ unmasked
            partly = (low <= high) & ~whole
            kept.append((first + row[partly], column[partly]))
        row, column = (np.concatenate(each) for each in zip(*kept, strict=True))
        return BlockPairs(np.searchsorted(row, np.arange(rows + 1)), column, full)


@dataclasses.dataclass(frozen=True)
class AttentionChunks:
    """Chunked attention: queries attend to keys of their own chunk.

    Attributes:
      q_block: positions per chunk.
      kv_block: the same number.
    """

    q_block: int
    kv_block: int

    def pairs(self, mask: Mask, queries: Runs, shards: int) -> BlockPairs:
        """As :meth:`Blocks.pairs`: each chunk with itself."""
        del mask, shards
        chunks = np.arange(int(queries.blocks.max(initial=0)) + 2)
        return BlockPairs(chunks, chunks[:-1])


def cut_runs(starts: np.ndarray, stride: int, count: int, block: int | None) -> Runs:
    """Splits the runs of all shards at blocks of ``block`` positions; None is one block of all.

    Tokens before position 0 are left out of blocks, in which they attend to nothing. The runs are
    those of :meth:`burst_jax.layouts.Layout.progressions`.
    """
    if block is None:
        shards = np.repeat(np.arange(len(starts)), starts.shape[1])
        return Runs(shards, 0 * shards, starts.reshape(-1), np.full_like(shards, count))
    first = starts // block
    last = (starts + stride * (count - 1)) // block
    blocks = first[..., None] + np.arange(int((last - first).max()) + 1)
    # The part of a run in block b: tokens i with block b <= start + stride i < block (b + 1).
    begins, ends = (
        np.clip(-((starts[..., None] - edge * block) // stride), 0, count)
        for edge in (blocks, blocks + 1)
    )
    kept = np.nonzero((ends > begins) & (blocks >= 0))
    at = starts[kept[:2]] + stride * begins[kept]
    runs = Runs(kept[0], blocks[kept], at, (ends - begins)[kept])
    order = np.lexsort((runs.blocks, runs.shards))
    return Runs(*(x[order] for x in runs))
