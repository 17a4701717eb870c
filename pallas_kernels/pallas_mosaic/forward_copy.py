"""The copying warpgroup of the forward kernel: queries and key tiles come to shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import CLUSTER_AXIS, WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import ForwardRefs
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import i32


def copy_items(static: ForwardStatic, refs: ForwardRefs, run: Callable[..., Any]) -> None:
    """The copies of all items; ``run`` is ``each_item`` for this kernel's items."""
    steps = run(functools.partial(_copy_item, static, refs), draws=True)
    if static.config.cluster > 1:
        _await_last_reads(static, refs, steps)


def _await_last_reads(static: ForwardStatic, refs: ForwardRefs, steps: Any) -> None:
    """Waits until all stages are free, after a program's last step.

    The other program of the cluster says so at barriers in this one's memory, which is gone when
    this one has ended.
    """
    memory = refs.memory
    for stage in range(static.config.stages):

        @pl.when(steps > stage)
        def _(stage=stage):
            plgpu.barrier_wait(memory.k_free.at[stage])
            plgpu.barrier_wait(memory.v_free.at[stage])


def _copy_item(static: ForwardStatic, refs: ForwardRefs, item: Item) -> None:
    """Starts the copies of an item's queries, keys and values, each when there is room.

    A program uses the stages in turn over all of its items: ``program_step`` counts on from item to
    item.
    """
    operands, memory, block_kv = refs.operands, refs.memory, static.config.block_kv
    kv_head = lax.div(item.head, i32(static.groups))

    @pl.loop(i32(0), item.steps)
    def _(step):
        program_step = item.steps_before + step
        stage = lax.rem(program_step, i32(static.config.stages))
        tokens = pl.ds(item.walk.tile(step) * block_kv, block_kv)
        keys = operands.k.at[item.batch_row, tokens, kv_head]
        values = operands.v.at[item.batch_row, tokens, kv_head]
        was_used = program_step >= static.config.stages
        tile = static, stage, was_used
        _copy_tile(*tile, keys, memory.k, memory.k_arrived, memory.k_free)
        if static.bias_in_products:
            # The stage is free for the positions when it is for the keys.
            positions = operands.k_positions.at[tokens]
            target, arrived = memory.k_positions.at[stage], memory.k_arrived.at[stage]
            plgpu.copy_gmem_to_smem(positions, target, arrived)
        # The queries are copied after the first keys, which have room earlier: the item before
        # frees its queries only with its last scores.
        pl.when(step == 0)(functools.partial(_copy_queries, static, refs, item))
        _copy_tile(*tile, values, memory.v, memory.v_arrived, memory.v_free)


def _copy_tile(
    static: ForwardStatic, stage: Any, was_used: Any,
    source: Any, target: Any, arrived: Any, free: Any,
) -> None:  # fmt: skip
    """Starts the copy of a tile of keys or values, when the stage's tile before has been read.

    Each program of a cluster starts the copy of its part, into the memory of all. ``arrived`` waits
    for the whole tile.
    """

    @pl.when(was_used)
    def _():
        plgpu.barrier_wait(free.at[stage])

    axes = None if static.config.cluster == 1 else CLUSTER_AXIS
    plgpu.copy_gmem_to_smem(source, target.at[stage], arrived.at[stage], collective_axes=axes)


def _copy_queries(static: ForwardStatic, refs: ForwardRefs, item: Item) -> None:
    """Starts the copies of the item's queries, 64 for every computing warpgroup."""
    memory = refs.memory
    for warpgroup in range(static.warpgroups):

        @pl.when(item.steps_before > 0)
        def _(warpgroup=warpgroup):
            plgpu.barrier_wait(memory.q_free.at[warpgroup])

        first = item.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
        queries = pl.ds(first, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(
            refs.operands.q.at[item.batch_row, queries, item.head],
            memory.q.at[warpgroup],
            memory.q_arrived.at[warpgroup],
        )
