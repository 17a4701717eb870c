"""The static part of a block-sparse mask, and what a ring knows of it before a program runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Runs of equally spaced tokens on every shard, each within one block.

    Attributes:
      starts: int64 ``[n, runs]``, the position of the first token of each run.
      counts: int64 ``[n, runs]``, number of tokens; 0 where a shard has fewer runs.
      blocks: int64 ``[n, runs]``, index of its block.
    """

    starts: np.ndarray
    counts: np.ndarray
    blocks: np.ndarray


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

    def allows(self, q: Runs, kv: Runs) -> np.ndarray:
        """Whether queries of a run may attend to keys of a run, bool ``[n, runs, runs]``.

        ``q`` and ``kv`` are the runs of the two shards on each of n devices.
        """
        assert self.table is not None
        # A run without tokens may have a block index beyond the last block.
        rows, columns = (
            np.minimum(runs.blocks, size - 1)
            for runs, size in zip((q, kv), self.shape, strict=True)
        )
        some = (q.counts > 0)[:, :, None] & (kv.counts > 0)[:, None, :]
        return self.table[rows[:, :, None], columns[:, None, :]] & some


@dataclasses.dataclass(frozen=True)
class AttentionChunks:
    """Chunked attention: queries attend to keys of their own chunk.

    Attributes:
      q_block: positions per chunk.
      kv_block: the same number.
    """

    q_block: int
    kv_block: int

    def allows(self, q: Runs, kv: Runs) -> np.ndarray:
        """As :meth:`Blocks.allows`: runs of the same chunk."""
        some = (q.counts > 0)[:, :, None] & (kv.counts > 0)[:, None, :]
        return (q.blocks[:, :, None] == kv.blocks[:, None, :]) & some


def cut_runs(starts: np.ndarray, stride: int, count: int, block: int | None) -> Runs:
    """Splits the runs of all shards at blocks of ``block`` positions; None splits nothing.

    The runs are those of :func:`burst_jax.layouts.permutation.shard_runs`.
    """
    if block is None:
        return Runs(starts, np.full_like(starts, count), np.zeros_like(starts))
    first = starts // block
    last = (starts + stride * (count - 1)) // block
    parts = np.arange(int((last - first).max()) + 1)
    blocks = first[..., None] + parts
    # The part of a run in block b: tokens i with block b <= start + stride i < block (b + 1).
    begins, ends = (
        np.clip(-((starts[..., None] - edge * block) // stride), 0, count)
        for edge in (blocks, blocks + 1)
    )
    at = starts[..., None] + stride * begins
    return Runs(*(x.reshape(len(starts), -1) for x in (at, ends - begins, blocks)))
