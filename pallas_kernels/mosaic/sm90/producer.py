"""Copies without a producer warpgroup: consumers start them while their products run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.tile_scheduler import WorkTile


class Copies(NamedTuple):
    """The copies of one operand, one per loop step.

    Attributes:
      start_first: ``(step)``: starts the copy of one of the first ``ahead`` steps.
      start: ``(step, masked)``: starts that of a later step, when its memory is free; ``masked``:
        whether the step may be one that needs a mask.
      ahead: by how many steps a consumer may start a copy before its own step. It must have
        finished reading the stage's previous contents itself.
      warpgroup: the consumer that starts them.
    """

    start_first: Callable[[Any], None]
    start: Callable[[Any, bool], None]
    ahead: int
    warpgroup: int

    @classmethod
    def of(
        cls,
        start: Callable[[WorkTile, Any, bool], None],
        work: WorkTile,
        ahead: int,
        warpgroup: int,
    ) -> Copies:
        """From ``start(work, step, masked)``."""

        def recomputed(step, masked):
            # Kept from step to step, what follows from the bounds would take registers.
            start(work._replace(iterator=work.iterator.recompute()), step, masked)

        return cls(functools.partial(recomputed, masked=True), recomputed, ahead, warpgroup)


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
                for step in map(i32, range(copies.ahead)):
                    pl.when(step < self.work.steps)(functools.partial(copies.start_first, step))

        self.start_once()

    def advance(self, operand: int, step: Any, masked: bool) -> None:
        """Starts an operand's copy of a later step while the products of a step run."""
        copies = self.operands[operand]

        @pl.when(self.warpgroup == copies.warpgroup)
        def _():
            later = step + copies.ahead
            pl.when(later < self.work.steps)(lambda: copies.start(later, masked))
            if copies.warpgroup == 0:
                pl.when(step == self.work.steps - 1)(self.work.fetch_next)
