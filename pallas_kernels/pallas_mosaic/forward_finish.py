"""The end of an item of the forward kernel: o is normalised, merged with the carry and written."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.merge import merge_weights
from pallas_kernels.pallas_mosaic.forward_rows import QueryRows
from pallas_kernels.pallas_mosaic.operands import ForwardResults
from pallas_kernels.pallas_mosaic.tiles import ROWS, TILE, along_rows


def fetch_carry(rows: QueryRows) -> None:
    """Starts the copies of the incoming lse and of the first lanes of the incoming o."""
    memory, warpgroup, item = rows.refs.memory, rows.warpgroup, rows.item
    lse = _carry(rows).lse.at[item.batch_row, item.head, rows.queries]
    plgpu.copy_gmem_to_smem(lse, memory.lse.at[warpgroup], memory.lse_arrived.at[warpgroup])
    _fetch_o(rows, 0)


def finish(rows: QueryRows, acc: jax.Array, m: jax.Array, total: jax.Array) -> None:
    """Normalises, merges with the carry, and writes o and lse.

    Args:
      rows: the queries.
      acc: float32 ``[64, Hv]``, the sum of weights times values.
      m: float32 ``[64]``, the largest score in base 2.
      total: float32 ``[64]``, the sum of weights.
    """
    memory, warpgroup, item = rows.refs.memory, rows.warpgroup, rows.item
    weight, carry_weight, lse = _finish_softmax(rows, m, total)
    memory.lse[warpgroup] = lse
    plgpu.commit_smem()
    lse_out = rows.refs.results.lse.at[item.batch_row, item.head, rows.queries]
    plgpu.copy_smem_to_gmem(memory.lse.at[warpgroup], lse_out)
    for first in range(0, rows.static.value_dim, rows.static.lanes):
        _write_lanes(rows, acc, weight, carry_weight, first)


def _finish_softmax(
    rows: QueryRows, m: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """``(what acc is multiplied by, what the incoming o is multiplied by, lse)``."""
    memory, warpgroup = rows.refs.memory, rows.warpgroup
    excess = rows.excess()
    divisor, lse = softmax.finish(m if excess is None else m - excess, total)
    dropout = rows.static.spec.dropout
    weight = (1.0 if dropout is None else dropout.unit) / divisor
    if not rows.static.carried:
        return weight, None, lse
    plgpu.barrier_wait(memory.lse_arrived.at[warpgroup])
    old_lse = plgpu.load(memory.lse.at[warpgroup], layout=ROWS)
    carry_weight, new_weight, lse = merge_weights(old_lse, lse)
    # Waits for the other threads, which read the lse that is overwritten next.
    plgpu.commit_smem()
    return weight * new_weight, carry_weight, lse


def _write_lanes(
    rows: QueryRows, acc: jax.Array, weight: jax.Array, carry_weight: jax.Array | None, first: int
) -> None:
    """Makes the lanes of o from ``first`` on; writes ``out_lanes`` of them as soon as there are."""
    static, memory, warpgroup, item = rows.static, rows.refs.memory, rows.warpgroup, rows.item
    lanes, out_lanes = static.lanes, static.out_lanes
    part = acc[:, first : first + lanes]
    part = part * along_rows(weight, part.shape)
    out_first = first % out_lanes
    if first and not out_first:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if carry_weight is not None:
        if first:
            _fetch_o(rows, first)
        plgpu.barrier_wait(memory.o_arrived.at[warpgroup])
        old = plgpu.load(_carry_memory(rows).at[warpgroup], layout=TILE)
        part = part + old * along_rows(carry_weight, part.shape)
        if not static.float32_out:
            # Waits for the other threads, which read the lanes that the next copy overwrites.
            plgpu.commit_smem()
    memory.out[warpgroup, :, out_first : out_first + lanes] = part.astype(static.out_dtype)
    if out_first + lanes == out_lanes:
        plgpu.commit_smem()
        written = pl.ds(first + lanes - out_lanes, out_lanes)
        plgpu.copy_smem_to_gmem(
            memory.out.at[warpgroup],
            rows.refs.results.o.at[item.batch_row, rows.queries, item.head, written],
        )


def _fetch_o(rows: QueryRows, first: int) -> None:
    """Starts the copy of some lanes of the incoming o."""
    static, warpgroup, item = rows.static, rows.warpgroup, rows.item
    lanes = pl.ds(first, static.lanes)
    o = _carry(rows).o.at[item.batch_row, rows.queries, item.head, lanes]
    target = _carry_memory(rows).at[warpgroup]
    plgpu.copy_gmem_to_smem(o, target, rows.refs.memory.o_arrived.at[warpgroup])


def _carry(rows: QueryRows) -> ForwardResults:
    """References to the incoming (o, lse): the results' own, if they are written over it."""
    carry = rows.refs.operands.carry
    return rows.refs.results if carry is None else carry


def _carry_memory(rows: QueryRows) -> Any:
    """The memory that lanes of the incoming o come to: the result's, if that is float32 as well."""
    memory = rows.refs.memory
    return memory.out if memory.carry_o is None else memory.carry_o
