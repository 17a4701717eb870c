"""Copies without a producer warpgroup: consumers start them while their products run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.tile_scheduler import WorkTile


class Copies(NamedTuple):
    """The copies of one operand, one per loop step.

    Attributes:
      start: ``(step, masked)``: starts the copy of a step, when its memory is free; ``masked``:
        whether the step may be one that needs a mask.
      ahead: by how many steps a consumer may start a copy before its own step. It must have
        finished reading the stage's previous contents itself.
      warpgroup: the consumer that starts them.
    """

    start: Callable[[Any, bool], None]
    ahead: int
    warpgroup: int


class Producer(NamedTuple):
    """A consumer warpgroup's share in the copies of a work tile.

    Attributes:
      work: the work tile.
      warpgroup: index of the warpgroup. The first one also fetches the next work tile.
      operands: what every step copies.
      start_once: starts the work tile's other copies.
    """

    work: WorkTile
    warpgroup: Any
    operands: tuple[Copies, ...]
    start_once: Callable[[], None]

    def start(self) -> None:
        """Starts the first copies, before the first step."""
        for copies in self.operands:

            @pl.when(self.warpgroup == copies.warpgroup)
            def _(copies=copies):
                for step in range(copies.ahead):
                    self._start(copies, i32(step), masked=True)

        self.start_once()

    def advance(self, operand: int, step: Any, masked: bool) -> None:
        """Starts an operand's copy of a later step while the products of a step run."""
        copies = self.operands[operand]

        @pl.when(self.warpgroup == copies.warpgroup)
        def _():
            self._start(copies, step + copies.ahead, masked)
            if copies.warpgroup == 0:
                pl.when(step == self.work.steps - 1)(self.work.fetch_next)

    def _start(self, copies: Copies, step: Any, masked: bool) -> None:
        pl.when(step < self.work.steps)(lambda: copies.start(step, masked))
