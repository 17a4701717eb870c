"""Register layouts of wgmma, and warp specialization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.launch import WARPGROUP_AXIS
from pallas_kernels.mosaic.sm90.configs import REGISTERS

# A tile of scores in a warpgroup's registers, and vectors along its rows and its columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class _Layouts(NamedTuple):
    """The three as :class:`pallas_kernels.mosaic.scores.ScoreTile` needs them."""

    tile: Any = TILE
    rows: Any = ROWS
    columns: Any = COLUMNS


LAYOUTS = _Layouts()


def specialize_warpgroups(
    consumers: int, consume: Callable[[Any], None], produce: Callable[[], None] | None
) -> None:
    """Runs ``consume(warpgroup)`` on the first ``consumers`` warpgroups, ``produce()`` on the last.

    Registers move from the producer warpgroup to the consumers (``setmaxnreg``). With ``produce``
    None, all warpgroups are consumers.
    """
    warpgroup = lax.axis_index(WARPGROUP_AXIS)
    if produce is None:
        consume(warpgroup)
        return
    consumer_registers, producer_registers = REGISTERS[consumers]

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(producer_registers, action="decrease")
        produce()

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(consumer_registers, action="increase")
        consume(warpgroup)
