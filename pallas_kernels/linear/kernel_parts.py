"""What the kernels of all families share: which part of a head a CTA has, and what they return."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM
from pallas_kernels.mosaic.fragments import i32

# CTAs for a head's values in a scan: each has 64 of their columns.
PARTS = HEAD_DIM // CHUNK


class Mode(enum.Enum):
    """What a scan returns next to the last state."""

    OUTPUT = "output"
    STATES = "states"
    LAST = "last"


class Form(enum.Enum):
    """How the forward pass computes X and P.

    APART: before the scan's launch, or P in it, on the SM of its scan.
    AHEAD: in the scan's launch, on SMs that have no scan.
    """

    APART = "apart"
    AHEAD = "ahead"


class Place(NamedTuple):
    """Which part of which head a CTA of a scan has.

    Attributes:
      batch: batch index.
      head: value head.
      key_head: its key head.
      part: index of the 64 columns; past the head's values they are those of the matrix M.
    """

    batch: Any
    head: Any
    key_head: Any
    part: Any

    @classmethod
    def of(cls, index: Any, parts: int, groups: int, batch: Any = None) -> Place:
        """Of a CTA, from its index among those of a batch index; None is the grid's."""
        batch = lax.axis_index("batch") if batch is None else batch
        head = lax.div(index, i32(parts))
        part = lax.rem(index, i32(parts))
        return cls(batch, head, lax.div(head, i32(groups)), part)

    @property
    def columns(self) -> Any:
        """The CTA's rows of a transposed state."""
        return pl.ds(self.part * CHUNK, CHUNK)

    @property
    def values(self) -> Any:
        """The CTA's columns of values."""
        return pl.ds(lax.rem(self.part, i32(PARTS)) * CHUNK, CHUNK)

    def saved(self, index: Any) -> Any:
        """The CTA's rows of a saved state, from that state's index."""
        return pl.ds(index * HEAD_DIM + self.part * CHUNK, CHUNK)


class Share(NamedTuple):
    """Which chunks of all heads a warpgroup has: every ``stride``-th, in the order of the chunks.

    Attributes:
      first: index of its first one.
      stride: the number of warpgroups.
      batch: B.
      heads: N.
      chunks: of a head.
    """

    first: Any
    stride: int
    batch: int
    heads: int
    chunks: int

    @property
    def steps(self) -> Any:
        """Number of its chunks."""
        count = self.chunks * self.batch * self.heads
        return lax.div(count - self.first + (self.stride - 1), i32(self.stride))

    def place(self, step: Any) -> tuple[Any, Any, Any]:
        """Batch index, head and chunk of a step."""
        index = self.first + step * self.stride
        head = lax.rem(index, i32(self.batch * self.heads))
        chunk = lax.div(index, i32(self.batch * self.heads))
        return lax.div(head, i32(self.heads)), lax.rem(head, i32(self.heads)), chunk


class GradientInputs(NamedTuple):
    """What the kernel of dQ and dK reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      do: bfloat16 ``[B, T, N, 128]``, gradient of o.
      dv: the same.
      u: the same.
      states: bfloat16 ``[B, N, saved * 128 columns, 128]``, before the chunks, or pairs of them,
        whose states are saved.
      dstates: the same, after them.
      vectors: of the chunks.
    """

    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any
    states: Any
    dstates: Any
    vectors: Any


class GradientResults(NamedTuple):
    """What it writes.

    Attributes:
      dq: bfloat16 ``[B, T, N, 128]``, of every value head.
      dk: the same.
      sums: float32 ``[B, N, chunks, SUMS, 64]``.
    """

    dq: Any
    dk: Any
    sums: Any
