"""The backward kernel's loop where one consumer accumulates dV and the other dK (head dim 192).

Both work on the same 96 keys. The first consumer computes the weights P and adds to dV; the second
computes dP and dS and adds to dK; each computes half of the lanes of dQ. Tiles of scores are
``[64 queries, 96 keys]``, dK and dV are transposed. So each product but dQ is one consumer's alone,
and no operand is read from shared memory by both, which is what limits wide heads. The second
consumer reads P rounded to the inputs' dtype.

In each step the second consumer waits for P, and the first one for dS, while its product for dV
runs. It has then read the step's P, and before the first one writes the next P, it has finished the
products that read dS: one buffer of each is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import along_rows, constant, optimization_barrier, rounded_to_int32
from pallas_kernels.mosaic.sm90.backward_epilogue import (
    load_dq_factors,
    write_transposed,
)
from pallas_kernels.mosaic.sm90.backward_scores import (
    Consumer,
    StepTile,
    mask_scores,
    read_tile_and_head,
)
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import BackwardRefs
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE
from pallas_kernels.mosaic.sm90.shared_memory import ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile
from pallas_kernels.mosaic.work_tiles import TileCoordinates

# float32 ``[64, keys]`` each: dV or dK of a work tile, 64 lanes after the other.
Gradient = tuple[jax.Array, ...]
ORDER = ""


def run(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """One work tile of a consumer."""
    consumer = Consumer.of(static, refs, warpgroup, work)
    plgpu.barrier_wait(refs.barriers.kv_arrived)
    pl.when(warpgroup == 0)(functools.partial(_accumulate_dv, consumer))
    pl.when(warpgroup == 1)(functools.partial(_accumulate_dk, consumer))


def _accumulate_dv(consumer: Consumer) -> None:
    static, refs, work = consumer.static, consumer.refs, consumer.work
    masked_end = work.steps_before + work.iterator.masked * static.groups
    if static.keys_are_padded:
        # Keys past the last one are masked.
        masked_end = jnp.where(work.tile == static.kv_tiles - 1, consumer.end, masked_end)
    masked, full = (functools.partial(_dv_step, consumer, masked) for masked in (True, False))
    dv = _zeros(static, static.value_dim)
    dv = lax.fori_loop(work.steps_before, masked_end, masked, dv)
    dv = lax.fori_loop(masked_end, consumer.end, full, dv)
    _wait_for_p_buffer(consumer)
    memory = refs.memory
    staging = memory.p.at[0] if static.rounds_dkv else memory.staging.at[2]
    _write(consumer, staging, refs.results.dv, dv)


def _accumulate_dk(consumer: Consumer) -> None:
    static, work = consumer.static, consumer.work
    dk = _zeros(static, static.head_dim)
    step = functools.partial(_dk_step, consumer)
    dk = lax.fori_loop(work.steps_before, consumer.end, step, dk)
    if not static.scale_in_ds:
        dk = tuple(x * static.spec.score.scale for x in dk)
    memory = consumer.refs.memory
    staging = memory.ds.at[0, 0] if static.rounds_dkv else memory.staging.at[0]
    _write(consumer, staging, consumer.refs.results.dk, dk)


def _zeros(static: BackwardStatic, lanes: int) -> Gradient:
    zeros = constant((WARPGROUP_ROWS, static.config.block_kv), 0, TILE)
    return (zeros,) * (lanes // WARPGROUP_ROWS)


def _write(consumer: Consumer, staging: Any, target: Any, gradient: Gradient) -> None:
    plgpu.barrier_arrive(consumer.refs.barriers.kv_free)
    at = consumer.work.recompute()
    write_transposed(consumer.static, staging, at, target, gradient)
    consumer.work.start_next()


class _Step(NamedTuple):
    """What a step works on, and where it is in shared memory.

    Attributes:
      at: the tile of scores.
      stage: stage of its queries.
      do_stage: stage of its dO.
      zero: 0, which the compiler does not know. Addresses in memory that is the same in all steps
        follow from it: kept, they would take registers that the tiles need.
    """

    at: StepTile
    stage: Any
    do_stage: Any
    zero: Any

    @classmethod
    def of(cls, consumer: Consumer, step: Any) -> _Step:
        """Of a step whose queries have arrived."""
        warpgroup = optimization_barrier(consumer.warpgroup)
        stage = consumer.stage(step)
        scratch = consumer.refs.memory.scratch
        at = StepTile(warpgroup, *read_tile_and_head(consumer.static, scratch, stage))
        zero = jnp.minimum(warpgroup, 0)
        do_stage = zero if consumer.static.do_stages == 1 else consumer.do_stage(step)
        return cls(at, stage, do_stage, zero)

    def transposed(self, consumer: Consumer, operand: Any) -> Any:
        """The work tile's keys or values, as a right operand of the scores' or dP's product."""
        count = consumer.static.config.block_kv
        return operand.at[pl.ds(self.zero * count, count)].transpose((1, 0))


def _dv_step(consumer: Consumer, masked: bool, step: Any, dv: Gradient) -> Gradient:
    """Computes P, and adds to dV."""
    memory, barriers = consumer.refs.memory, consumer.refs.barriers
    plgpu.barrier_wait(barriers.q_arrived.at[consumer.stage(step)])
    data = _Step.of(consumer, step)

    def scores(accumulator):
        plgpu.wgmma(accumulator, memory.q.at[data.stage], data.transposed(consumer, memory.k))
        lse = _row_stats(consumer, ScratchLayout.lse, data.stage)
        products = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
        return _weights(consumer, masked, data.at, products, lse)

    p = pl.run_scoped(scores, _score_accumulator(consumer))
    p, *dv = optimization_barrier(p.astype(consumer.static.dtype), *dv)
    is_first = step == consumer.work.steps_before
    pl.when(~is_first)(functools.partial(_wait_for_p_buffer, consumer))
    pl.when(is_first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    memory.p[data.zero] = p
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    plgpu.barrier_arrive(barriers.p_arrived.at[0])
    plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])

    def product(*accumulators):
        _start(accumulators, dv)
        do = memory.do.at[data.do_stage].transpose((1, 0))
        for index in range(len(accumulators)):
            _issue_part(accumulators, index, do, memory.p.at[data.zero])
        return _loaded(accumulators)

    result = pl.run_scoped(product, *_gradient_accumulators(consumer, len(dv)))
    plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
    return result


def _wait_for_p_buffer(consumer: Consumer) -> None:
    """Waits until the other consumer has read the last P."""
    free = consumer.refs.barriers.p_free.at[0]
    plgpu.barrier_arrive(free)
    plgpu.barrier_wait(free)


def _dk_step(consumer: Consumer, step: Any, dk: Gradient) -> Gradient:
    """Computes dS, adds to dK, and adds dQ to global memory, half of the lanes after the other."""
    static, memory, barriers = consumer.static, consumer.refs.memory, consumer.refs.barriers
    plgpu.barrier_wait(barriers.q_arrived.at[consumer.stage(step)])
    data = _Step.of(consumer, step)
    plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])

    def gradients(accumulator):
        do = memory.do.at[data.do_stage]
        plgpu.wgmma(accumulator, do, data.transposed(consumer, memory.v))
        delta = _row_stats(consumer, ScratchLayout.delta, data.do_stage)
        dp = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
        dp, delta = optimization_barrier(dp, delta)
        plgpu.barrier_arrive(barriers.p_arrived.at[0])
        plgpu.barrier_wait(barriers.p_arrived.at[0])
        p = plgpu.load(memory.p.at[data.zero], layout=TILE).astype(jnp.float32)
        dp = dp * static.spec.score.scale if static.scale_in_ds else dp
        return (p * (dp - along_rows(delta, p.shape))).astype(static.dtype)

    ds = pl.run_scoped(gradients, _score_accumulator(consumer))
    ds, *dk = optimization_barrier(ds, *dk)
    plgpu.barrier_arrive(barriers.p_free.at[0])
    # dK of the previous work tile may still be on its way out of the buffers.
    is_first = step == consumer.work.steps_before
    pl.when(is_first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    def products(*accumulators):
        _start(accumulators, dk)
        q, right = memory.q.at[data.stage].transpose((1, 0)), memory.ds.at[data.zero, 0]

        def part(index, dq_acc):
            lanes = pl.ds((data.zero + index) * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.wgmma(dq_acc, ds, memory.k.at[:, lanes])
            if index == 0:
                memory.ds[data.zero, 0] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
            _issue_part(accumulators, index, q, right)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            _add_dq(consumer, data, step, index, dq)

        for index in range(len(accumulators)):
            accumulator = plgpu.ACC((static.config.block_q, WARPGROUP_ROWS), jnp.float32)
            pl.run_scoped(functools.partial(part, index), accumulator)
        return _loaded(accumulators)

    result = pl.run_scoped(products, *_gradient_accumulators(consumer, len(dk)))
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    return result


def _add_dq(consumer: Consumer, data: _Step, step: Any, index: int, dq: jax.Array) -> None:
    """Adds 64 lanes of dQ to global memory."""
    static, refs = consumer.static, consumer.refs
    # One buffer is that of a float32 dV.
    buffers = refs.memory.staging.shape[0] if static.rounds_dkv else 2
    plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
    at = TileCoordinates(consumer.work.recompute().batch, data.at.head, data.at.q_tile)
    factors = load_dq_factors(static, refs, data.zero, at)
    if factors is not None:
        dq = rounded_to_int32(dq * along_rows(factors, dq.shape), TILE)
    buffer = data.zero + index if buffers == 3 else lax.rem(step + index, 2)
    staging = refs.memory.staging.at[buffer]
    staging[...] = dq
    plgpu.commit_smem()
    queries = pl.ds(at.tile * static.config.block_q, static.config.block_q)
    target = refs.results.dq.at[at.batch, queries, at.head, pl.ds(index * 64, 64)]
    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def _weights(
    consumer: Consumer, masked: bool, at: StepTile, scores: jax.Array, lse: jax.Array
) -> jax.Array:
    """P, float32, from the products of queries and keys."""
    static = consumer.static
    if masked:
        scores = mask_scores(consumer, at, scores)
        if static.keys_are_padded:
            index = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=TILE)
            count = static.kv_length - consumer.work.tile * static.config.block_kv
            scores = jnp.where(index < count, scores, -jnp.inf)
    return jnp.exp2(scores * static.base_2_factor - along_rows(lse, scores.shape))


def _row_stats(
    consumer: Consumer, place: Callable[[ScratchLayout, Any], Any], stage: Any
) -> jax.Array:
    """lse or delta of a step's queries, in registers."""
    at = place(ScratchLayout.of(consumer.static.config), stage)
    return plgpu.load(consumer.refs.memory.scratch.at[at], layout=ROWS)


def _score_accumulator(consumer: Consumer) -> Any:
    config = consumer.static.config
    return plgpu.ACC((config.block_q, config.block_kv), jnp.float32)


def _gradient_accumulators(consumer: Consumer, count: int) -> list[Any]:
    shape = WARPGROUP_ROWS, consumer.static.config.block_kv
    return [plgpu.ACC(shape, jnp.float32) for _ in range(count)]


def _start(accumulators: Sequence[Any], gradient: Sequence[jax.Array]) -> None:
    for accumulator, part in zip(accumulators, gradient, strict=True):
        accumulator[...] = part


def _issue_part(accumulators: Sequence[Any], index: int, left: Any, right: Any) -> None:
    """Issues the product that is added to 64 lanes of a gradient."""
    lanes = slice(index * WARPGROUP_ROWS, (index + 1) * WARPGROUP_ROWS)
    plgpu.wgmma(accumulators[index], left.at[lanes], right)


def _loaded(accumulators: Sequence[Any]) -> Gradient:
    """A gradient, when all products have ended."""
    return tuple(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in accumulators)
