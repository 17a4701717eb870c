"""An item in a computing warpgroup of the forward kernel: 64 queries and all their key tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.forward_finish import fetch_carry, finish
from pallas_kernels.pallas_mosaic.forward_rows import QueryRows
from pallas_kernels.pallas_mosaic.forward_step import (
    ForwardSums,
    accumulators,
    visit_first_keys,
    visit_keys,
)
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import ForwardRefs
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import i32


def compute_items(
    static: ForwardStatic, refs: ForwardRefs, run: Callable[..., None], warpgroup: Any
) -> None:
    """All items of a computing warpgroup; ``run`` is ``each_item`` for this kernel's items."""
    run(functools.partial(_compute_item, static, refs, warpgroup), draws=False)
    plgpu.wait_smem_to_gmem(0)


def _compute_item(static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, item: Item) -> None:
    """One item: the first key tile, the others that need a mask, the full ones, the results."""
    rows = QueryRows.of(static, refs, warpgroup, item)
    plgpu.barrier_wait(refs.memory.q_arrived.at[warpgroup])
    sums = visit_first_keys(rows)
    masked_end = jnp.maximum(item.walk.masked, 1)
    sums = lax.fori_loop(i32(1), masked_end, functools.partial(visit_keys, rows, True), sums)
    sums = lax.fori_loop(masked_end, item.steps, functools.partial(visit_keys, rows, False), sums)

    # Waits until the results of the item before have left the memory that these results come to.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if static.carried:
        fetch_carry(rows)
    acc = _last_product(rows, sums)
    finish(rows, acc, sums.m, sums.total)


def _last_product(rows: QueryRows, sums: ForwardSums) -> jax.Array:
    """acc with the last tile's weighted values, which no further step adds."""
    memory, stage = rows.refs.memory, rows.stage(rows.item.steps - 1)

    def product(acc_ref):
        acc_ref[...] = sums.acc
        plgpu.barrier_wait(memory.v_arrived.at[stage])
        plgpu.wgmma(acc_ref, sums.weights, memory.v.at[stage])
        return acc_ref[...]

    acc = pl.run_scoped(product, accumulators(rows.static)[1])
    # The copies of the next item's keys need not wait for what follows.
    rows.free_stage(memory.v_free, stage)
    return acc
