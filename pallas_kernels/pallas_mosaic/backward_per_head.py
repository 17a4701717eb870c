"""The gradients of per-head arrays in the backward kernel: what a step adds to their sums."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.backward_rows import KeyRows
from pallas_kernels.pallas_mosaic.backward_scores import tile_positions
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.memory import ScratchLayout


def add_per_head_sums(rows: KeyRows, warpgroup: Any, q_tile: Any, head: Any, ds: jax.Array) -> None:
    """Adds a step's part, summed over its queries, to one sum for every key in device memory.

    All steps of a key are in one program, which adds them in the same order in every run.

    Args:
      rows: the keys.
      warpgroup: the number of the warpgroup, computed anew in this step.
      q_tile: which queries.
      head: which query head.
      ds: float32 ``[64, block_q]``, gradients with respect to the logits.
    """
    static, refs, item = rows.static, rows.refs, rows.item
    parts = static.spec.score.per_head_gradients(
        ds, *tile_positions(rows, warpgroup, q_tile, ds.shape)
    )
    first = item.tile * static.config.block_kv + warpgroup * WARPGROUP_ROWS
    keys = pl.ds(first, WARPGROUP_ROWS)
    outgoing = refs.memory.scratch.at[ScratchLayout.of(static.config).per_head_sums(warpgroup)]
    for name, part in parts.items():
        # Waits until what was written before has left the memory that this part comes to.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        outgoing[...] = part.sum(axis=1)
        plgpu.commit_smem()
        target = refs.results.per_head_sums[name].at[item.batch_row, head, keys]
        plgpu.copy_smem_to_gmem(outgoing, target, reduction_op="add")
