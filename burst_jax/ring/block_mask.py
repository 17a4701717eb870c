"""What is static of a mask by blocks, and what a ring knows of it before a program runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Tokens at equal distance from each other on every shard, each run in one block.

    Attributes:
      starts: int64 ``[n, runs]``, the position of the first token of each run.
      counts: int64 ``[n, runs]``, how many tokens it has; 0 where a shard has fewer runs.
      blocks: int64 ``[n, runs]``, the block that it is in.
    """

    starts: np.ndarray
    counts: np.ndarray
    blocks: np.ndarray


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What is static of a call's ``block_mask``. Hashable, so that it can key a jit cache.

    Attributes:
      q_block: queries that a row of the table stands for.
      kv_block: keys that a column stands for.
      shape: rows and columns of the table.
      bits: which blocks some head sees, packed, where that is known before a program runs.
    """

    q_block: int
    kv_block: int
    shape: tuple[int, int]
    bits: bytes | None = None

    @functools.cached_property
    def table(self) -> np.ndarray | None:
        """bool ``[rows, columns]``: the blocks that some head sees; None if that is not known."""
        if self.bits is None:
            return None
        count = self.shape[0] * self.shape[1]
        packed = np.frombuffer(self.bits, np.uint8)
        return np.unpackbits(packed, count=count).astype(bool).reshape(self.shape)

    @property
    def seen(self) -> float:
        """The share of blocks that some head sees; 1 if that is not known."""
        return 1.0 if self.table is None else float(self.table.mean())

    def sees(self, q: Runs, kv: Runs) -> np.ndarray:
        """Whether the table lets queries of a run see keys of a run, bool ``[n, runs, runs]``.

        ``q`` and ``kv`` are of the shards that meet on each of n devices.
        """
        assert self.table is not None
        # A run without tokens may be said to be in a block behind the last one.
        rows, columns = (
            np.minimum(runs.blocks, size - 1)
            for runs, size in zip((q, kv), self.shape, strict=True)
        )
        some = (q.counts > 0)[:, :, None] & (kv.counts > 0)[:, None, :]
        return self.table[rows[:, :, None], columns[:, None, :]] & some


def cut_runs(starts: np.ndarray, stride: int, count: int, block: int | None) -> Runs:
    """Cuts the runs of all shards (:func:`burst_jax.layouts.permutation.shard_runs`) at blocks.

    Args:
      starts: int64 ``[n, runs]``.
      stride: the distance of neighbours.
      count: how many tokens every run has.
      block: positions of a block; None cuts nothing.
    """
    if block is None:
        return Runs(starts, np.full_like(starts, count), np.zeros_like(starts))
    first = starts // block
    last = (starts + stride * (count - 1)) // block
    parts = np.arange(int((last - first).max()) + 1)
    blocks = first[..., None] + parts
    # Of a run the tokens i with block b <= (start + stride i) < block (b + 1).
    begins, ends = (
        np.clip(-((starts[..., None] - edge * block) // stride), 0, count)
        for edge in (blocks, blocks + 1)
    )
    at = starts[..., None] + stride * begins
    return Runs(*(x.reshape(len(starts), -1) for x in (at, ends - begins, blocks)))
