"""The copying warpgroup of the backward kernel: an item's keys and its steps' queries and dO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.memory import ScratchLayout
from pallas_kernels.pallas_mosaic.operands import BackwardRefs
from pallas_kernels.pallas_mosaic.static import BackwardStatic
from pallas_kernels.pallas_mosaic.tiles import i32


def copy_item(static: BackwardStatic, refs: BackwardRefs, item: Item) -> None:
    """Starts the copies of an item's keys and values, then of every step's queries and dO."""
    operands, memory, barriers = refs.operands, refs.memory, refs.barriers
    keys = pl.ds(item.tile * static.config.block_kv, static.config.block_kv)

    @pl.when(item.steps_before > 0)
    def _():
        plgpu.barrier_wait(barriers.kv_free)

    k = operands.k.at[item.batch_row, keys, item.head]
    plgpu.copy_gmem_to_smem(k, memory.k, barriers.kv_arrived)
    v = operands.v.at[item.batch_row, keys, item.head]
    plgpu.copy_gmem_to_smem(v, memory.v, barriers.kv_arrived)

    @pl.loop(i32(0), item.steps)
    def _(step):
        _copy_step(static, refs, item, step)


def _copy_step(static: BackwardStatic, refs: BackwardRefs, item: Item, step: Any) -> None:
    """Starts the copies of a step: queries with their lse, and dO with delta."""
    operands, memory, barriers = refs.operands, refs.memory, refs.barriers
    where, block_q = ScratchLayout.of(static.config), static.config.block_q
    q_tile, head = _tile_and_head(static, item, step)
    queries = pl.ds(q_tile * block_q, block_q)
    q = operands.q.at[item.batch_row, queries, head]
    do = operands.do.at[item.batch_row, queries, head]
    lse = _lse(static, operands.lse, item, step).at[item.batch_row, head, queries]
    delta = operands.delta.at[item.batch_row, head, queries]
    program_step = item.steps_before + step

    stage = lax.rem(program_step, i32(static.stages))
    _wait_for_room(program_step, static.stages, barriers.q_free, stage)
    # The computing warpgroups wait for these queries, and then read in scratch memory which they
    # are.
    for index, value in zip(where.tile_and_head(stage), (q_tile, head), strict=True):
        memory.scratch[index] = value.astype(jnp.float32)
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(q, memory.q.at[stage], barriers.q_arrived.at[stage])
    _copy_stats(lse, memory.scratch.at[where.lse(stage)], barriers.q_arrived.at[stage])

    do_stage = lax.rem(program_step, i32(static.do_stages))
    _wait_for_room(program_step, static.do_stages, barriers.do_free, do_stage)
    plgpu.copy_gmem_to_smem(do, memory.do.at[do_stage], barriers.do_arrived.at[do_stage])
    _copy_stats(delta, memory.scratch.at[where.delta(do_stage)], barriers.do_arrived.at[do_stage])


def _lse(static: BackwardStatic, lse: Any, item: Item, step: Any) -> Any:
    """The lse that the scores of a step are computed with: without a mask it may be another one."""
    if not static.bias_is_line:
        return lse
    return lse.at[(step >= item.walk.masked * static.groups).astype(jnp.int32)]


def _tile_and_head(static: BackwardStatic, item: Item, step: Any) -> tuple[Any, Any]:
    """The query tile and the query head of an item's step.

    Tiles that need a mask come first, for all heads, then the others. Of both, heads vary slowest:
    then programs that run at the same time mostly read one head's queries, and the L2 cache has
    room for these.
    """
    walk, groups = item.walk, static.groups
    if groups == 1:
        return walk.tile(step), item.head
    masked_steps = walk.masked * groups
    in_masked = step < masked_steps
    tiles_there = jnp.where(in_masked, walk.masked, walk.total - walk.masked)
    tiles_there = jnp.maximum(tiles_there, 1)
    step = jnp.where(in_masked, step, step - masked_steps)
    group = lax.div(step, tiles_there)
    step = lax.rem(step, tiles_there) + jnp.where(in_masked, 0, walk.masked)
    return walk.tile(step), item.head * groups + group


def _wait_for_room(program_step: Any, stages: int, free: Any, stage: Any) -> None:
    """Waits until both warpgroups have read what a stage held before, if it held anything."""

    @pl.when(program_step >= stages)
    def _():
        plgpu.barrier_wait(free.at[stage])


def _copy_stats(source: Any, target: Any, arrived: Any) -> None:
    """Starts the copy of lse or delta of a tile of queries.

    Beyond the last query the copy writes zeros, and not the stats of the next head, which lie there
    in device memory: the zeros of dO times 2^-lse must stay 0.
    """
    plgpu.copy_gmem_to_smem(source, target, arrived, oob_mode=plgpu.OOBFillMode.ZEROS)
