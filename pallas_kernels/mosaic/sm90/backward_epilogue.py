"""What the backward kernel writes to global memory: dQ per step, dK and dV per work tile.

Everything goes through shared memory, from which TMA stores it, or adds it to global memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import (
    along_rows,
    constant,
    i32,
    optimization_barrier,
    rounded_to_int32,
)
from pallas_kernels.mosaic.sm90 import instructions
from pallas_kernels.mosaic.sm90.backward_scores import Consumer, StepTile
from pallas_kernels.mosaic.sm90.configs import BACKWARD_WARPGROUPS, WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import BackwardRefs
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE
from pallas_kernels.mosaic.sm90.shared_memory import ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile
from pallas_kernels.mosaic.work_tiles import TileCoordinates


def add_dq(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    at: TileCoordinates,
    dq: jax.Array,
    factors: jax.Array | None,
    predicate: Any = None,
    first: int = 0,
    staging_is_free: bool = False,
    running: int = 0,
) -> None:
    """Adds a warpgroup's part of a query tile's dQ to global memory.

    Args:
      static: static parameters of the call.
      refs: the kernel's references.
      warpgroup: index of the warpgroup.
      at: coordinates of the query tile; -1 is no tile.
      dq: float32, of the shape :attr:`BackwardStatic.dq_part`, or some of its lanes.
      factors: of :func:`load_dq_factors`.
      predicate: whether there is a tile; None: there is.
      first: the first of the warpgroup's lanes that ``dq`` has.
      staging_is_free: whether earlier copies have left the staging buffer, as all threads know.
      running: number of copies before this one that leave other buffers.
    """
    staging, total = refs.memory.staging.at[warpgroup], refs.results.dq
    by_rows, block_q = static.config.dq_by_rows, static.config.block_q
    if not by_rows and not staging_is_free:
        plgpu.wait_smem_to_gmem(running, wait_read_only=True)
    if factors is not None:
        dq = rounded_to_int32(dq * along_rows(factors, dq.shape), TILE)
    if by_rows:
        target = total.at[at.batch, at.head, at.tile, warpgroup]
        instructions.add_in_register_order(target, staging, dq, at.tile)
        return
    queries = pl.ds(at.tile * block_q, block_q)
    width = min(static.staging_lanes, dq.shape[1])
    for part in range(0, dq.shape[1], width):
        if part:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        here = staging.at[:, :width]
        here[...] = dq[:, part : part + width]
        plgpu.commit_smem()
        lanes = pl.ds(static.first_lane(warpgroup) + first + part, width)
        target = total.at[at.batch, queries, at.head, lanes]
        plgpu.copy_smem_to_gmem(here, target, predicate=predicate, reduction_op="add")


def load_dq_factors(
    static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, at: TileCoordinates
) -> jax.Array | None:
    """Factors of a warpgroup's part of dQ, per query; None unless it is in fixed point."""
    if not static.deterministic:
        return None
    count, _ = static.dq_part
    first = at.tile * static.config.block_q
    first = first + warpgroup * count if static.config.dq_by_rows else first
    queries = pl.ds(first, count)
    return plgpu.load(
        refs.inputs.dq_factors.at[at.batch, at.head, queries], layout=ROWS, optimized=False
    )


def add_per_head_sums(consumer: Consumer, at: StepTile, ds: jax.Array) -> None:
    """Adds a step's part of the per-head gradients, summed over its queries, to one sum per key.

    All steps of a key are in one CTA, which issues the additions in the same order in every run.

    Args:
      consumer: the keys.
      at: the step's tile.
      ds: float32 ``[64, block_q]``, gradients of the logits.
    """
    static, refs, work = consumer.static, consumer.refs, consumer.work
    parts = consumer.tile(at).per_head_gradients(ds)
    first = work.tile * (BACKWARD_WARPGROUPS * WARPGROUP_ROWS) + at.warpgroup * WARPGROUP_ROWS
    keys = pl.ds(first, WARPGROUP_ROWS)
    layout = ScratchLayout.of(static.config)
    staging = refs.memory.scratch.at[layout.per_head_sums(at.warpgroup)]
    for name, part in parts.items():
        # Waits until the previous part has left the staging buffer. Only those that have been added
        # are sure to be added before this one.
        plgpu.wait_smem_to_gmem(0, wait_read_only=not static.deterministic)
        staging[...] = part.sum(axis=1)
        plgpu.commit_smem()
        target = refs.results.per_head_sums[name].at[work.batch, at.head, keys]
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def ds_buffer(static: BackwardStatic, step: Any) -> Any:
    """The index of the dS buffer of a step, counted over all work tiles of the CTA."""
    buffers = static.config.ds_buffers
    return lax.rem(step + buffers, i32(buffers))


def write_dkv(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    at: TileCoordinates,
    buffer: Any,
    dk: jax.Array,
    dv: jax.Array,
) -> None:
    """Writes dK and dV of a warpgroup's keys, or adds them to global memory.

    Not dV if :func:`write_dv` has written it: then this frees the values' memory when dV has left.

    Args:
      static: static parameters of the call.
      refs: the kernel's references.
      warpgroup: index of the warpgroup.
      at: coordinates of the KV tile.
      buffer: index of a dS buffer that no product reads any more.
      dk: float32, ``dk`` of the loop's state, not yet scaled unless
        :attr:`BackwardStatic.scale_in_ds`.
      dv: float32, ``dv`` of the loop's state, times the scale if
        :attr:`BackwardStatic.dropout_has_scale`.
    """
    width = static.dkv_lanes
    if static.dropout_has_scale:
        dv = dv * (1 / static.spec.score.scale)
    dk = dk if static.scale_in_ds else dk * static.spec.score.scale
    # The copy of dV then leaves another buffer.
    dv_is_written = static.stages_dv_in_values
    of_values = () if dv_is_written else ((refs.results.dv, dv),)
    for target, gradient in ((refs.results.dk, dk), *of_values):
        for first in range(0, gradient.shape[1], width):
            part = gradient[:, first : first + width]
            running = int(dv_is_written and not first)
            _write_lanes(static, refs, warpgroup, at, buffer, target, first, part, running)
            if running:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                plgpu.barrier_arrive(refs.barriers.v_free.at[0])
    _release_staging(static)


def write_dv(
    static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, at: TileCoordinates, dv: jax.Array
) -> None:
    """Writes dV of a warpgroup's keys through the memory of their values.

    No other warpgroup reads these, so it need not wait for one before it starts.
    """
    first = optimization_barrier(warpgroup) * WARPGROUP_ROWS
    keys = pl.ds(at.tile * static.config.block_kv + first, WARPGROUP_ROWS)
    staging = refs.memory.v.at[pl.ds(first, WARPGROUP_ROWS)]
    staging[...] = dv.astype(static.dkv_dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, refs.results.dv.at[at.batch, keys, at.head])


def write_zeros(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """Writes dK and dV of a work tile whose keys no query attends to.

    Not those that stay unset, nor those that are set and only added to.
    """
    if not (static.writes_half or static.stores_half):
        _write_zeros(static, refs, warpgroup, work)
        return
    is_first = work.tile < static.first_half_end
    write = functools.partial(_write_zeros, static, refs, warpgroup, work)
    pl.when(is_first if static.writes_half else ~is_first)(write)


def _write_zeros(
    static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile
) -> None:
    at, width = TileCoordinates(work.batch, work.head, work.tile), static.dkv_lanes
    buffer = ds_buffer(static, work.steps_before)
    for target, dim in zip((refs.results.dk, refs.results.dv), static.dkv_dims, strict=True):
        for first in range(0, dim, width):
            zeros = constant((WARPGROUP_ROWS, width), 0, TILE)
            _write_lanes(static, refs, warpgroup, at, buffer, target, first, zeros)
    _release_staging(static)


def _release_staging(static: BackwardStatic) -> None:
    """Waits for dK and dV to leave dQ's staging buffer, if a warp then waits for its own dQ only.

    One thread of the warpgroup has started their copies, and others would not wait for them.
    """
    if static.config.dq_by_rows and not static.rounds_dkv:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write_lanes(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    at: TileCoordinates,
    buffer: Any,
    target: Any,
    first: int,
    part: jax.Array,
    running: int = 0,
) -> None:
    """Writes or adds ``part``: lanes of dK or dV (``target``) from ``first`` on.

    A rounded part is staged in the warpgroup's rows of a dS buffer, which has the same dtype. The
    shipped tiles leave no shared memory for a buffer of its own. ``running``: number of copies
    before this one that leave other buffers.
    """
    start = at.tile * static.config.block_kv + static.first_key(optimization_barrier(warpgroup))
    keys, width = pl.ds(start, WARPGROUP_ROWS), static.dkv_lanes
    plgpu.wait_smem_to_gmem(running, wait_read_only=True)
    if static.rounds_dkv:
        rows = pl.ds(optimization_barrier(warpgroup) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        staging = refs.memory.ds.at[buffer, 0, rows]
    else:
        staging = refs.memory.staging.at[warpgroup, :WARPGROUP_ROWS, :width]
    part = part.astype(static.dkv_dtype)
    if static.written_dkv_dtype != static.dkv_dtype:
        part = lax.bitcast_convert_type(part, static.written_dkv_dtype)
    staging[...] = part
    plgpu.commit_smem()
    if static.form.dkv_parts > 1:
        first = optimization_barrier(warpgroup) * (target.shape[3] // static.form.dkv_parts) + first
    target = target.at[at.batch, keys, at.head, pl.ds(first, width)]
    if not static.stores_half:
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add" if static.adds_dkv else None)
        return
    is_set = at.tile < static.first_half_end
    plgpu.copy_smem_to_gmem(staging, target, predicate=is_set, reduction_op="add")
    plgpu.copy_smem_to_gmem(staging, target, predicate=~is_set)
