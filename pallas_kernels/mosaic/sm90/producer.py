"""A producer without a warpgroup of its own: a consumer starts copies while its products run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.tile_scheduler import WorkTile


class Copies(NamedTuple):
    """The copies of one operand, one per loop step.

    Attributes:
      start: starts the copy of a step, when its memory is free.
      ahead: by how many steps a consumer may start a copy before its own step. It must have
        finished reading the stage's previous contents itself.
    """

    start: Callable[[Any], None]
    ahead: int


class Producer(NamedTuple):
    """Starts the copies of a work tile as a part of a consumer warpgroup.

    Attributes:
      work: the work tile.
      operands: what every step copies.
      start_once: starts the work tile's other copies.
    """

    work: WorkTile
    operands: tuple[Copies, ...]
    start_once: Callable[[], None]

    def start(self) -> None:
        """Starts the first copies, before the consumer's first step."""
        for copies in self.operands:
            for step in range(copies.ahead):
                self._start(copies, i32(step))
        self.start_once()

    def advance(self, step: Any) -> None:
        """Starts later steps' copies while the products of a step run."""
        for copies in self.operands:
            self._start(copies, step + copies.ahead)
        pl.when(step == self.work.steps - 1)(self.work.fetch_next)

    def _start(self, copies: Copies, step: Any) -> None:
        pl.when(step < self.work.steps)(lambda: copies.start(step))
