"""One step of the forward kernel's main loop: 64 queries meet a tile of keys.

A step starts two products together: ``q k^T`` of its own tile, and ``p v`` of the tile before.
While one warpgroup makes the softmax of its ``q k^T``, the tensor cores work on the other
warpgroup's products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic import forward_softmax
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.forward_rows import QueryRows
from pallas_kernels.pallas_mosaic.forward_scores import start_of_products
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import (
    TILE,
    computed_here,
    constant,
    end_reads,
    i32,
    shrink_rows,
)


class ForwardSums(NamedTuple):
    """What a warpgroup keeps from step to step.

    All weights are ``2^(score - m)``, with scores in base 2 and m the largest one so far. ``total``
    is over all tiles visited; ``acc`` lacks the last one, whose product with the values is made in
    the next step.

    Attributes:
      weights: ``[64, block_kv]``, of the last tile visited, rounded to the inputs' dtype.
      acc: float32 ``[64, Hv]``, the sum of weights times values.
      m: float32 ``[64]``, the largest score, in base 2.
      total: float32 ``[64]``, the sum of weights.
    """

    weights: jax.Array
    acc: jax.Array
    m: jax.Array
    total: jax.Array


def visit_first_keys(rows: QueryRows) -> ForwardSums:
    """Visits the first tile of keys, which has no tile before it."""
    static, item = rows.static, rows.item
    _wait_for_keys(rows, i32(0))

    def products(scores_ref):
        _start_scores(rows, scores_ref, rows.stage(i32(0)))
        return scores_ref[...]

    scores = pl.run_scoped(products, accumulators(static)[0])
    _free_keys(rows, rows.stage(i32(0)))
    _free_queries(rows, item.steps == 1)
    m, total = forward_softmax.start(rows)
    p, m, total, _ = forward_softmax.weigh(rows, i32(0), scores, m, total, masked=True)
    p = p.astype(static.dtype)
    _wait_for_keys(rows, i32(1))
    acc = constant((WARPGROUP_ROWS, static.value_dim), 0, TILE)
    return ForwardSums(p, acc, m, total)


def visit_keys(rows: QueryRows, masked: bool, step: Any, sums: ForwardSums) -> ForwardSums:
    """Visits one more tile of keys, and adds the weighted values of the tile before to acc."""
    static, memory = rows.static, rows.refs.memory
    stage, earlier_stage = rows.stage(step), rows.stage(step - 1)

    def products(scores_ref, acc_ref):
        acc_ref[...] = sums.acc
        _start_scores(rows, scores_ref, stage)
        plgpu.barrier_wait(memory.v_arrived.at[earlier_stage])
        plgpu.wgmma(acc_ref, sums.weights, memory.v.at[earlier_stage])
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        _free_keys(rows, stage)
        _free_queries(rows, step == rows.item.steps - 1)
        p, m, total, shrink = forward_softmax.weigh(rows, step, scores, sums.m, sums.total, masked)
        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
        # The weights are rounded only now: until here the product above may have been reading the
        # registers of the weights before.
        acc, p = computed_here(acc, p)
        _wait_for_keys(rows, step + 1)
        rows.free_stage(memory.v_free, earlier_stage)
        # Most tiles hold no score larger than all before it: then nothing shrinks.
        acc = shrink_rows(acc, shrink)
        return ForwardSums(p.astype(static.dtype), acc, m, total)

    return pl.run_scoped(products, *accumulators(static))


def accumulators(static: ForwardStatic) -> tuple[Any, Any]:
    """Accumulators of matrix instructions: of the scores, and of the weighted values."""
    scores = plgpu.ACC((WARPGROUP_ROWS, static.config.block_kv), jnp.float32)
    return scores, plgpu.ACC((WARPGROUP_ROWS, static.value_dim), jnp.float32)


def _start_scores(rows: QueryRows, scores_ref: Any, stage: Any) -> None:
    """Starts the product of the queries and the keys of a stage."""
    memory = rows.refs.memory
    if rows.static.bias_in_products:
        scores_ref[...] = start_of_products(rows, stage)
    keys_t = memory.k.at[stage].transpose((1, 0))
    # The address of the queries is computed anew for every tile: kept, it would take a register.
    queries = memory.q.at[computed_here(rows.warpgroup)]
    plgpu.wgmma(scores_ref, queries, keys_t)


def _wait_for_keys(rows: QueryRows, step: Any) -> None:
    """Waits until the keys of a step have arrived, if there is such a step."""

    @pl.when(step < rows.item.steps)
    def _():
        plgpu.barrier_wait(rows.refs.memory.k_arrived.at[rows.stage(step)])


def _free_keys(rows: QueryRows, stage: Any) -> None:
    """Says that the keys of a stage have been read, and their positions."""
    if rows.static.bias_in_products:
        end_reads()
    rows.free_stage(rows.refs.memory.k_free, stage)


def _free_queries(rows: QueryRows, condition: Any) -> None:
    """Under the condition, says that the queries have been read for the last time."""

    @pl.when(condition)
    def _():
        plgpu.barrier_arrive(rows.refs.memory.q_free.at[rows.warpgroup])
