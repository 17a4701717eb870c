"""One step of the backward kernel's main loop: a tile of queries meets the item's keys.

A step first makes its weights P and their gradients dS. Then it starts three products together: its
own parts of dV and dK, and dQ of the step before. dQ needs dS of both warpgroups. Made a step late,
it reads what the other warpgroup wrote long ago, so one warpgroup may run almost a step ahead of
the other: the exponentials of one overlap with the products of the other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.backward_per_head import add_per_head_sums
from pallas_kernels.pallas_mosaic.backward_rows import KeyRows
from pallas_kernels.pallas_mosaic.backward_scores import (
    BiasLine,
    dropout_factors,
    exponents,
    logit_gradients,
    score_gradients,
    tile_scores,
)
from pallas_kernels.pallas_mosaic.backward_write import add_dq, ds_buffer
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Place
from pallas_kernels.pallas_mosaic.memory import ScratchLayout
from pallas_kernels.pallas_mosaic.static import BackwardStatic
from pallas_kernels.pallas_mosaic.tiles import (
    COLUMNS,
    TILE,
    along_columns,
    computed_here,
    constant,
    i32,
)


class BackwardSums(NamedTuple):
    """What a warpgroup keeps from step to step.

    dk and dv are sums over the steps so far. dQ of the last of them has not been made.

    Attributes:
      dk: float32 ``[64, H]``.
      dv: float32 ``[64, Hv]``.
      q_tile: the last step's query tile; -1 before the first step.
      head: the last step's query head.
    """

    dk: jax.Array
    dv: jax.Array
    q_tile: Any
    head: Any

    @classmethod
    def none(cls, static: BackwardStatic) -> BackwardSums:
        """Before the first step."""
        # Where both head dims are one, dk and dv begin as the same zeros.
        dims = static.dim, static.value_dim
        zeros = {dim: constant((WARPGROUP_ROWS, dim), 0, TILE) for dim in dict.fromkeys(dims)}
        dk, dv = (zeros[dim] for dim in dims)
        return cls(dk, dv, i32(-1), i32(0))


class _StepData(NamedTuple):
    """What a step works on, and where that lies in shared memory.

    Attributes:
      stage: stage of its queries.
      do_stage: stage of its dO.
      ds: buffer of its dS.
      earlier_ds: buffer of the dS of the step before.
      warpgroup: number of the warpgroup.
      q_tile: query tile.
      head: query head.
      keys: the warpgroup's keys in the item's tile.
      lanes: the lanes of dQ that the warpgroup makes.
    """

    stage: Any
    do_stage: Any
    ds: Any
    earlier_ds: Any
    warpgroup: Any
    q_tile: Any
    head: Any
    keys: Any
    lanes: Any

    @classmethod
    def of(cls, rows: KeyRows, step: Any) -> _StepData:
        """Those of a step whose queries have arrived."""
        stage, do_stage = rows.stage(step), rows.do_stage(step)
        ds, earlier_ds = ds_buffer(step), ds_buffer(step - 1)
        # What follows from the warpgroup is computed anew in every step: kept, it would be in
        # registers that the tiles need.
        warpgroup = computed_here(rows.warpgroup)
        scratch, half = rows.refs.memory.scratch, rows.static.half_dim
        indices = ScratchLayout.of(rows.static.config).tile_and_head(stage)
        q_tile, head = (scratch[index].astype(jnp.int32) for index in indices)
        keys = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        lanes = pl.ds(warpgroup * half, half)
        return cls(stage, do_stage, ds, earlier_ds, warpgroup, q_tile, head, keys, lanes)


def visit_queries(rows: KeyRows, masked: bool, step: Any, sums: BackwardSums) -> BackwardSums:
    """Visits a tile of queries of one head.

    Args:
      rows: the keys.
      masked: whether some of the step's scores may not count.
      step: the step, counted over all items of the program.
      sums: what the steps before have left.
    """
    refs, data = rows.refs, _StepData.of(rows, step)
    p, ds = _weights_and_gradients(rows, masked, step, data)
    p, ds, dk, dv = computed_here(p, ds, sums.dk, sums.dv)

    # Waits until the other warpgroup has written its dS of the step before. By then it has finished
    # the products of the step before that one, which read the buffer that is written next. Before
    # the first step nobody has written a dS.
    @pl.when(sums.q_tile >= 0)
    def _():
        plgpu.barrier_wait(refs.barriers.ds_arrived)

    if rows.static.rounds_dkv:
        # dK and dV of the item before may still be on their way out of the buffer.
        pl.when(sums.q_tile < 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    refs.memory.ds[data.ds, data.keys] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.barriers.ds_arrived)
    return _add_products(rows, data, sums._replace(dk=dk, dv=dv), p, ds)


def _weights_and_gradients(
    rows: KeyRows, masked: bool, step: Any, data: _StepData
) -> tuple[jax.Array, jax.Array]:
    """``(P, dS)``, ``[64, block_q]``, rounded to the inputs' dtype; P after dropout."""
    memory, barriers = rows.refs.memory, rows.refs.barriers
    accumulator = plgpu.ACC((WARPGROUP_ROWS, rows.static.config.block_q), jnp.float32)

    def with_scores(scores_ref):
        queries = memory.q.at[data.stage].transpose((1, 0))
        plgpu.wgmma(scores_ref, memory.k.at[data.keys], queries)
        if rows.static.spec.score.has_slope:
            # P, its slope and dP would fill the registers: dP is made when the two others are one.
            weights = _sloped_weights(rows, masked, data, scores_ref)
            return pl.run_scoped(functools.partial(with_slope, weights), accumulator)
        plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
        # This accumulator begins here, behind the wait: then ptxas, at least in a first loop, lets
        # the product begin from zero, and writes no zeros to 32 registers.
        return pl.run_scoped(functools.partial(with_dp, scores_ref), accumulator)

    def with_dp(scores_ref, dp_ref):
        do = memory.do.at[data.do_stage].transpose((1, 0))
        plgpu.wgmma(dp_ref, memory.v.at[data.keys], do)
        p, lse, _ = _weights(rows, masked, data, scores_ref, wait_n=1)
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
        dp, p = computed_here(dp, p)
        wait_for_queries(rows, step + 1)
        return _gradients(rows, data, p, dp, lse)

    def with_slope(weights, dp_ref):
        plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
        do = memory.do.at[data.do_stage].transpose((1, 0))
        plgpu.wgmma(dp_ref, memory.v.at[data.keys], do)
        wait_for_queries(rows, step + 1)
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
        return _sloped_gradients(rows, data, weights, dp)

    return pl.run_scoped(with_scores, accumulator)


def _weights(
    rows: KeyRows, masked: bool, data: _StepData, scores_ref: Any, wait_n: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """``(P, lse, slope)``, float32 ``[64, block_q]``, the slope that of :func:`tile_scores`.

    ``wait_n`` products that were started later are still made.
    """
    static = rows.static
    line = None
    if static.bias_is_line and not masked:
        # Loaded while the products are made.
        line = BiasLine.of(rows, data.warpgroup, data.q_tile, data.head)
    products = plgpu.wgmma_accumulator_load(scores_ref, wait_n=wait_n)
    scores, slope = tile_scores(rows, data.warpgroup, data.q_tile, data.head, products)
    # lse is loaded before the mask is tested: behind the tests, programs with segment ids spill.
    where = ScratchLayout.of(static.config).lse(data.stage)
    lse = plgpu.load(rows.refs.memory.scratch.at[where], layout=COLUMNS)
    if line is None:
        lse = along_columns(lse, scores.shape)
        scores = exponents(rows, data.warpgroup, data.q_tile, data.head, scores, lse, masked)
    else:
        scores = scores * static.base_2_factor + line.less(lse, scores.shape)
    return computed_here(jnp.exp2(scores)), lse, slope


def _sloped_weights(
    rows: KeyRows, masked: bool, data: _StepData, scores_ref: Any
) -> tuple[jax.Array, ...]:
    """A step's weights where a function of the caller's has a slope.

    Returns:
      P after dropout, rounded to the inputs' dtype; float32, P times the slope; and P, rounded, if
      gradients of per-head arrays are made of it.
    """
    static = rows.static
    p, _, slope = _weights(rows, masked, data, scores_ref, wait_n=0)
    assert slope is not None
    factors = dropout_factors(rows, data.warpgroup, data.q_tile, data.head, p.shape)
    used = (p if factors is None else p * factors).astype(static.dtype)
    # Where a score does not count a function may have no derivative.
    made = used, jnp.where(p == 0, 0.0, p * slope)
    if static.spec.score.differentiated:
        made = *made, p.astype(static.dtype)
    return tuple(computed_here(*made))


def _gradients(
    rows: KeyRows, data: _StepData, p: jax.Array, dp: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(P, dS)``, rounded to the inputs' dtype; P after dropout."""
    static = rows.static
    used = p
    factors = dropout_factors(rows, data.warpgroup, data.q_tile, data.head, p.shape)
    if factors is not None:
        used, dp = p * factors, dp * factors
    ds = logit_gradients(rows, p, dp, _delta(rows, data))
    if static.spec.score.differentiated:
        add_per_head_sums(rows, data.warpgroup, data.q_tile, data.head, ds)
    ds = score_gradients(rows, data.warpgroup, data.q_tile, data.head, p, ds, lse)
    return used.astype(static.dtype), ds.astype(static.dtype)


def _delta(rows: KeyRows, data: _StepData) -> jax.Array:
    """delta of a step's queries, in registers."""
    where = ScratchLayout.of(rows.static.config).delta(data.do_stage)
    return plgpu.load(rows.refs.memory.scratch.at[where], layout=COLUMNS)


def _sloped_gradients(
    rows: KeyRows, data: _StepData, weights: tuple[jax.Array, ...], dp: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(P, dS)`` as of :func:`_gradients`, from the weights of a function that has a slope."""
    used, sloped, *rounded = weights
    factors = dropout_factors(rows, data.warpgroup, data.q_tile, data.head, dp.shape)
    dp = dp if factors is None else dp * factors
    delta = _delta(rows, data)
    if rounded:
        of_logits = logit_gradients(rows, rounded[0].astype(jnp.float32), dp, delta)
        add_per_head_sums(rows, data.warpgroup, data.q_tile, data.head, of_logits)
    return used, logit_gradients(rows, sloped, dp, delta).astype(rows.static.dtype)


def _add_products(
    rows: KeyRows, data: _StepData, sums: BackwardSums, p: jax.Array, ds: jax.Array
) -> BackwardSums:
    """Adds a step's parts of dV and dK to the sums, and dQ of the step before to device memory."""
    static, memory, barriers = rows.static, rows.refs.memory, rows.refs.barriers

    def products(dv_acc, dk_acc, dq_acc):
        dv_acc[...] = sums.dv
        dk_acc[...] = sums.dk
        _start_dq(rows, dq_acc, data.earlier_ds, data.lanes)
        plgpu.wgmma(dv_acc, p, memory.do.at[data.do_stage])
        plgpu.wgmma(dk_acc, ds, memory.q.at[data.stage])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
        has_earlier_step = sums.q_tile >= 0
        q_place = Place(rows.item.recompute_place().batch_row, sums.head, sums.q_tile)
        add_dq(
            static, rows.refs, data.warpgroup, q_place, data.lanes, dq, predicate=has_earlier_step
        )
        dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
        dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=None)
        plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
        plgpu.barrier_arrive(barriers.q_free.at[data.stage])
        return BackwardSums(dk, dv, data.q_tile, data.head)

    dk_acc, dv_acc = (
        plgpu.ACC((WARPGROUP_ROWS, dim), jnp.float32) for dim in (static.dim, static.value_dim)
    )
    return pl.run_scoped(products, dv_acc, dk_acc, _dq_accumulator(static))


def last_dq(rows: KeyRows, lanes: Any) -> jax.Array:
    """Half the lanes of dQ of the item's last step, which no further step makes."""

    def product(dq_acc):
        _start_dq(rows, dq_acc, ds_buffer(rows.end - 1), lanes)
        return dq_acc[...]

    plgpu.barrier_wait(rows.refs.barriers.ds_arrived)
    return pl.run_scoped(product, _dq_accumulator(rows.static))


def wait_for_queries(rows: KeyRows, step: Any) -> None:
    """Waits until the queries of a step have arrived, if the item has such a step."""

    @pl.when(step < rows.end)
    def _():
        plgpu.barrier_wait(rows.refs.barriers.q_arrived.at[rows.stage(step)])


def _start_dq(rows: KeyRows, dq_acc: Any, buffer: Any, lanes: Any) -> None:
    """Starts the product of a dS, of both warpgroups, and half the lanes of the keys."""
    memory = rows.refs.memory
    plgpu.wgmma(dq_acc, memory.ds.at[buffer].transpose((1, 0)), memory.k.at[:, lanes])


def _dq_accumulator(static: BackwardStatic) -> Any:
    """Accumulator of half the lanes of a query tile's dQ."""
    return plgpu.ACC((static.config.block_q, static.half_dim), jnp.float32)
