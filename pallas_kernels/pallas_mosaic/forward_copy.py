"""The copying warpgroup of the forward kernel: queries and key tiles come to shared memory."""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import ForwardRefs
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import i32


def copy_item(static: ForwardStatic, refs: ForwardRefs, item: Item) -> None:
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
        _copy_tile(keys, stage, was_used, memory.k, memory.k_arrived, memory.k_free)
        if static.bias_in_products:
            # The stage is free for the positions when it is for the keys.
            positions = operands.k_positions.at[tokens]
            target, arrived = memory.k_positions.at[stage], memory.k_arrived.at[stage]
            plgpu.copy_gmem_to_smem(positions, target, arrived)
        # The queries are copied after the first keys, which have room earlier: the item before
        # frees its queries only with its last scores.
        pl.when(step == 0)(functools.partial(_copy_queries, static, refs, item))
        _copy_tile(values, stage, was_used, memory.v, memory.v_arrived, memory.v_free)


def _copy_tile(
    source: Any, stage: Any, was_used: Any, target: Any, arrived: Any, free: Any
) -> None:
    """Starts the copy of a tile of keys or values, when the stage's tile before has been read."""

    @pl.when(was_used)
    def _():
        plgpu.barrier_wait(free.at[stage])

    plgpu.copy_gmem_to_smem(source, target.at[stage], arrived.at[stage])


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
