"""What the backward kernel writes to device memory: parts of dQ, and dK and dV at an item's end.

A part goes through shared memory, from which the copy engine writes it or adds it to what is there.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import DS_BUFFERS, WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item, Place
from pallas_kernels.pallas_mosaic.operands import BackwardRefs
from pallas_kernels.pallas_mosaic.static import BackwardStatic
from pallas_kernels.pallas_mosaic.tiles import TILE, computed_here, constant, i32


def add_dq(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    place: Place,
    lanes: Any,
    dq: jax.Array,
    predicate: Any = None,
) -> None:
    """Adds half the lanes of a query tile's dQ to device memory.

    Args:
      static: what is static about the call.
      refs: the kernel's references.
      warpgroup: number of the warpgroup.
      place: of the query tile.
      lanes: slice of the head dim.
      dq: float32 ``[block_q, H / 2]``.
      predicate: whether to add at all; None is yes.
    """
    batch_row, head, q_tile = place
    outgoing, block_q = refs.memory.outgoing, static.config.block_q
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    outgoing[warpgroup] = dq if static.scale_in_ds else dq * static.spec.score.scale
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        outgoing.at[warpgroup],
        refs.results.dq.at[batch_row, pl.ds(q_tile * block_q, block_q), head, lanes],
        predicate=predicate,
        reduction_op="add",
    )


def ds_buffer(step: Any) -> Any:
    """Which of the buffers holds dS of a step, counted over all items of the program."""
    return lax.rem(step + DS_BUFFERS, i32(DS_BUFFERS))


def write_dkv(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    place: Place,
    buffer: Any,
    dk: jax.Array,
    dv: jax.Array,
) -> None:
    """Writes dK and dV of a warpgroup's keys, or adds them to what is there.

    Args:
      static: what is static about the call.
      refs: the kernel's references.
      warpgroup: number of the warpgroup.
      place: of the key tile.
      buffer: a buffer of dS that no product reads any more.
      dk: float32 ``[64, H]``, still to be scaled unless :attr:`BackwardStatic.scale_in_ds`.
      dv: float32 ``[64, Hv]``.
    """
    width = static.dkv_lanes
    dk = dk if static.scale_in_ds else dk * static.spec.score.scale
    for target, gradient in ((refs.results.dk, dk), (refs.results.dv, dv)):
        for first in range(0, gradient.shape[1], width):
            part = gradient[:, first : first + width]
            _write_part(static, refs, warpgroup, place, buffer, target, first, part)


def write_zeros(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, item: Item) -> None:
    """Writes dK and dV of an item whose keys no query sees."""
    place, width = Place(item.batch_row, item.head, item.tile), static.dkv_lanes
    buffer = ds_buffer(item.steps_before)
    for target, dim in ((refs.results.dk, static.dim), (refs.results.dv, static.value_dim)):
        for first in range(0, dim, width):
            zeros = constant((WARPGROUP_ROWS, width), 0, TILE)
            _write_part(static, refs, warpgroup, place, buffer, target, first, zeros)


def _write_part(
    static: BackwardStatic,
    refs: BackwardRefs,
    warpgroup: Any,
    place: Place,
    buffer: Any,
    target: Any,
    first: int,
    part: jax.Array,
) -> None:
    """Writes or adds ``part``: some lanes of dK or dV (``target``), from ``first`` on.

    A rounded part waits for its copy in the warpgroup's rows of a buffer of dS, where such numbers
    fit. For an array of their own there is no room beside the widest heads.
    """
    batch_row, head, kv_tile = place
    start = kv_tile * static.config.block_kv + computed_here(warpgroup) * WARPGROUP_ROWS
    keys = pl.ds(start, WARPGROUP_ROWS)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if static.rounds_dkv:
        rows = pl.ds(computed_here(warpgroup) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        part_memory = refs.memory.ds.at[buffer, rows]
    else:
        part_memory = refs.memory.outgoing.at[warpgroup, :WARPGROUP_ROWS]
    part_memory[...] = part.astype(static.dkv_dtype)
    plgpu.commit_smem()
    lanes = pl.ds(first, static.dkv_lanes)
    plgpu.copy_smem_to_gmem(
        part_memory,
        target.at[batch_row, keys, head, lanes],
        reduction_op="add" if static.adds_dkv else None,
    )
