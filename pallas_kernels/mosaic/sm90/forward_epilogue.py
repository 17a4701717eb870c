"""Epilogue of the forward kernel: o is normalized, merged with the carry and written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.merge import merge_weights
from pallas_kernels.mosaic.fragments import along_rows
from pallas_kernels.mosaic.sm90 import online_softmax
from pallas_kernels.mosaic.sm90.forward_scores import Consumer
from pallas_kernels.mosaic.sm90.inputs import ForwardResults
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE


def fetch_carry(consumer: Consumer) -> None:
    """Starts the copies of the incoming lse and of the first lanes of the incoming o."""
    memory, warpgroup, work = consumer.refs.memory, consumer.warpgroup, consumer.work
    lse = _carry(consumer).lse.at[work.batch, work.head, consumer.queries]
    plgpu.copy_gmem_to_smem(lse, memory.lse.at[warpgroup], memory.lse_arrived.at[warpgroup])
    _fetch_o(consumer, 0)


def finish(consumer: Consumer, acc: jax.Array, m: jax.Array, total: jax.Array) -> None:
    """Normalizes, merges with the carry, and writes o and lse.

    Args:
      consumer: the queries.
      acc: float32 ``[64, Hv]``, the sum of weights times values.
      m: float32 ``[64]``, the largest score in base 2, or a margin below it.
      total: float32 ``[64]``, the sum of weights; with ``split_softmax`` each thread's part of it.
    """
    memory, warpgroup, work = consumer.refs.memory, consumer.warpgroup, consumer.work
    weight, carry_weight, lse = _finish_softmax(consumer, m, total)
    memory.lse[warpgroup] = lse
    plgpu.commit_smem()
    lse_out = consumer.refs.results.lse.at[work.batch, work.head, consumer.queries]
    plgpu.copy_smem_to_gmem(memory.lse.at[warpgroup], lse_out)
    for first in range(0, consumer.static.value_dim, consumer.static.lanes):
        _write_lanes(consumer, acc, weight, carry_weight, first)


def _finish_softmax(
    consumer: Consumer, m: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """``(factor of acc, factor of the incoming o, lse)``."""
    memory, warpgroup = consumer.refs.memory, consumer.warpgroup
    if consumer.static.config.split_softmax:
        total = online_softmax.sum_parts(total)
    excess = consumer.excess()
    divisor, lse = softmax.finish(m if excess is None else m - excess, total)
    dropout = consumer.static.spec.dropout
    weight = (1.0 if dropout is None else dropout.unit) / divisor
    if not consumer.static.has_carry:
        return weight, None, lse
    plgpu.barrier_wait(memory.lse_arrived.at[warpgroup])
    old_lse = plgpu.load(memory.lse.at[warpgroup], layout=ROWS)
    carry_weight, new_weight, lse = merge_weights(old_lse, lse)
    # Waits for the other threads, which read the lse that is overwritten next.
    plgpu.commit_smem()
    return weight * new_weight, carry_weight, lse


def _write_lanes(
    consumer: Consumer,
    acc: jax.Array,
    weight: jax.Array,
    carry_weight: jax.Array | None,
    first: int,
) -> None:
    """Computes lanes of o from ``first`` on; writes them once ``out_lanes`` are complete."""
    static, memory = consumer.static, consumer.refs.memory
    warpgroup, work = consumer.warpgroup, consumer.work
    lanes, out_lanes = static.lanes, static.out_lanes
    part = acc[:, first : first + lanes]
    part = part * along_rows(weight, part.shape)
    out_first = first % out_lanes
    if first and not out_first:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if carry_weight is not None:
        old = _incoming(consumer, first)
        part = part + old * along_rows(carry_weight, part.shape)
        if not static.in_place:
            # Waits for the other threads, which read the lanes that the next copy overwrites.
            plgpu.commit_smem()
    memory.out[warpgroup, :, out_first : out_first + lanes] = part.astype(static.out_dtype)
    if out_first + lanes == out_lanes:
        plgpu.commit_smem()
        written = pl.ds(first + lanes - out_lanes, out_lanes)
        plgpu.copy_smem_to_gmem(
            memory.out.at[warpgroup],
            consumer.refs.results.o.at[work.batch, consumer.queries, work.head, written],
        )


def _incoming(consumer: Consumer, first: int) -> jax.Array:
    """Lanes of the incoming o from ``first`` on, float32; they are copied where none before was."""
    memory, warpgroup = _carry_memory(consumer), consumer.warpgroup
    offset = first % memory.shape[-1]
    if not offset:
        if first:
            _fetch_o(consumer, first)
        plgpu.barrier_wait(consumer.refs.memory.o_arrived.at[warpgroup])
    lanes = pl.ds(offset, consumer.static.lanes)
    return plgpu.load(memory.at[warpgroup, :, lanes], layout=TILE).astype(jnp.float32)


def _fetch_o(consumer: Consumer, first: int) -> None:
    """Starts the copy of some lanes of the incoming o."""
    memory, warpgroup, work = _carry_memory(consumer), consumer.warpgroup, consumer.work
    lanes = pl.ds(first, memory.shape[-1])
    o = _carry(consumer).o.at[work.batch, consumer.queries, work.head, lanes]
    arrived = consumer.refs.memory.o_arrived.at[warpgroup]
    plgpu.copy_gmem_to_smem(o, memory.at[warpgroup], arrived)


def _carry(consumer: Consumer) -> ForwardResults:
    """References to the incoming (o, lse): the results' own, if they are updated in place."""
    carry = consumer.refs.inputs.carry
    return consumer.refs.results if carry is None else carry


def _carry_memory(consumer: Consumer) -> Any:
    """The staging buffer of the incoming o: the result's, if they have one dtype."""
    memory = consumer.refs.memory
    return memory.out if memory.carry_o is None else memory.carry_o
