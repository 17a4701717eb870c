"""The backward kernel's form SPLIT: one consumer accumulates dV, the other dK (head dim 192).

Both work on the same 96 keys. The first consumer computes the weights P, adds to dV, and computes a
third of the lanes of dQ; the second computes dP and dS, adds to dK, and computes the rest of dQ,
with dS in registers. Tiles of scores are ``[64 queries, 96 keys]``, dK and dV are transposed. So
neither operand of a product but dQ's is read from shared memory by both consumers, which limits the
other steps for wide heads. The second consumer reads P rounded to the inputs' dtype.

In each step the second consumer waits for P, and the first one for dS, while its product for dV
runs. The second has then read the step's P. Before the first one writes the next P, it has finished
its product that reads dS. So one buffer of each is enough.
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

from pallas_kernels.mosaic.fragments import (
    along_rows,
    constant,
    optimization_barrier,
    rounded_to_int32,
)
from pallas_kernels.mosaic.sm90 import instructions
from pallas_kernels.mosaic.sm90.backward_epilogue import load_dq_factors
from pallas_kernels.mosaic.sm90.backward_forms import SHARED_KEYS
from pallas_kernels.mosaic.sm90.backward_scores import (
    Consumer,
    StepTile,
    mask_scores,
    read_tile_and_head,
)
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import BackwardRefs
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile
from pallas_kernels.mosaic.work_tiles import TileCoordinates

# dV or dK of a work tile, transposed: float32 ``[64, keys]`` each, 64 lanes after the other.
type Gradient = Sequence[jax.Array]
# Of three parts of dQ, 64 lanes each, the one that the first consumer computes.
_LAST = 2


def run(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """One work tile of a consumer."""
    consumer = Consumer.of(static, refs, warpgroup, work)
    plgpu.barrier_wait(refs.barriers.kv_arrived)
    pl.when(warpgroup == 0)(functools.partial(_accumulate_dv, consumer))
    pl.when(warpgroup == 1)(functools.partial(_accumulate_dk, consumer))


def write_zeros(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """Writes dK and dV of a work tile whose keys no query attends to."""
    at, buffers = TileCoordinates(work.batch, work.head, work.tile), _buffers(static, refs.memory)
    for role, target in enumerate((refs.results.dv, refs.results.dk)):
        zeros = _zeros(static, target.shape[3])
        write = functools.partial(_write_gradient, static, buffers[role], at, target, zeros)
        pl.when(warpgroup == role)(write)


def check(static: BackwardStatic) -> None:
    """Raises ValueError for what this form does not compute."""
    config = static.config
    if (config.stages, config.do_stages) != (2, 1):
        raise ValueError(
            f"stages is {config.stages} and do_stages {config.do_stages}: where form is "
            f"{config.form} the backward kernel has memory for 2 and 1"
        )
    if static.needs_registers:
        raise ValueError(
            f"form is {config.form}: with a bias, dropout, a soft cap or a user function the "
            f"backward kernel supports {SHARED_KEYS}"
        )


def _accumulate_dv(consumer: Consumer) -> None:
    static, refs, work = consumer.static, consumer.refs, consumer.work
    masked_end = work.steps_before + work.iterator.masked * static.groups
    if static.keys_are_padded:
        # So that all steps bound the weights of keys past the last one.
        masked_end = jnp.where(work.tile == static.kv_tiles - 1, consumer.end, masked_end)
    masked, full = (functools.partial(_dv_step, consumer, masked) for masked in (True, False))
    dv = _zeros(static, static.value_dim)
    dv = lax.fori_loop(work.steps_before, masked_end, masked, dv)
    dv = lax.fori_loop(masked_end, consumer.end, full, dv)
    plgpu.barrier_arrive(refs.barriers.kv_free)
    buffer, _ = _buffers(static, refs.memory)
    _write(consumer, buffer, refs.results.dv, dv)


def _accumulate_dk(consumer: Consumer) -> None:
    static, work = consumer.static, consumer.work
    dk = _zeros(static, static.head_dim)
    step = functools.partial(_dk_step, consumer)
    dk = lax.fori_loop(work.steps_before, consumer.end, step, dk)
    if not static.scale_in_ds:
        dk = tuple(x * static.spec.score.scale for x in dk)
    memory, barriers = consumer.refs.memory, consumer.refs.barriers
    plgpu.barrier_arrive(barriers.kv_free)
    # The other consumer has read the last dS.
    plgpu.barrier_wait(barriers.kv_free)
    _, buffer = _buffers(static, memory)
    _write(consumer, buffer, consumer.refs.results.dk, dk)


def _zeros(static: BackwardStatic, lanes: int) -> Gradient:
    zeros = constant((WARPGROUP_ROWS, static.config.block_kv), 0, TILE)
    return (zeros,) * (lanes // WARPGROUP_ROWS)


def _write(consumer: Consumer, staging: Any, target: Any, gradient: Gradient) -> None:
    at = consumer.work.recompute()
    _write_gradient(consumer.static, staging, at, target, gradient)
    consumer.work.start_next()


def _buffers(static: BackwardStatic, memory: BackwardMemory) -> tuple[Any, Any]:
    """Shared memory of :func:`_write_gradient` for dV and for dK."""
    if static.rounds_dkv:
        return memory.p.at[0], memory.ds.at[0, 0]
    return memory.staging.at[2], memory.staging.at[0]


def _write_gradient(
    static: BackwardStatic,
    staging: Any,
    at: TileCoordinates,
    target: Any,
    gradient: Sequence[jax.Array],
) -> None:
    """Writes a gradient of a work tile's keys, or adds it to global memory.

    Args:
      static: static parameters of the call.
      staging: shared memory of 64 rows, which no product reads any more.
      at: coordinates of the KV tile.
      target: dK or dV.
      gradient: float32 ``[64, keys]`` each, by lanes; scaled.
    """
    parts = [x.astype(static.dkv_dtype) for x in gradient]
    if static.written_dkv_dtype != static.dkv_dtype:
        parts = [lax.bitcast_convert_type(x, static.written_dkv_dtype) for x in parts]
    width, count = staging.shape[1], static.config.block_kv
    for lane in range(0, target.shape[3], width):
        for key in range(0, count, WARPGROUP_ROWS):
            keys = min(WARPGROUP_ROWS, count - key)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for index, part in enumerate(parts):
                first = index * WARPGROUP_ROWS - lane
                if -WARPGROUP_ROWS < first < width:
                    part = part[:, key : key + keys]
                    instructions.store_transposed(staging.at[:keys], part, first)
            plgpu.commit_smem()
            start = at.tile * static.config.block_kv + key
            plgpu.copy_smem_to_gmem(
                staging.at[:keys],
                target.at[at.batch, pl.ds(start, keys), at.head, pl.ds(lane, width)],
                reduction_op="add" if static.adds_dkv else None,
            )


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
    """Computes P, adds to dV, and adds a third of the lanes of dQ to global memory."""
    static, memory, barriers = consumer.static, consumer.refs.memory, consumer.refs.barriers
    plgpu.barrier_wait(barriers.q_arrived.at[consumer.stage(step)])
    data = _Step.of(consumer, step)

    def scores(accumulator):
        plgpu.wgmma(accumulator, memory.q.at[data.stage], data.transposed(consumer, memory.k))
        lse = _row_stats(consumer, ScratchLayout.lse, data.stage)
        products = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
        return _weights(consumer, masked, data.at, products, lse)

    p = pl.run_scoped(scores, _score_accumulator(consumer))
    p, *dv = optimization_barrier(p.astype(static.dtype), *dv)
    # dV of the previous work tile may still be on its way out of the buffer.
    is_first = step == consumer.work.steps_before
    pl.when(is_first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    memory.p[data.zero] = p
    plgpu.commit_smem()
    # Not before: a copy may overwrite lse, which this thread has read.
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    plgpu.barrier_arrive(barriers.p_arrived.at[0])
    plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])

    def products(dq_acc, *accumulators):
        _start(accumulators, dv)
        do = memory.do.at[data.do_stage].transpose((1, 0))
        for index in range(len(accumulators)):
            _issue_part(accumulators, index, do, memory.p.at[data.zero])
        plgpu.barrier_arrive(barriers.ds_arrived)
        plgpu.barrier_wait(barriers.ds_arrived)
        _issue_dq(consumer, data, memory.ds.at[data.zero, 0], _LAST, dq_acc)
        result = _loaded(accumulators, running=1)
        plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
        _add_dq(consumer, data, _LAST, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), copying=0)
        return result

    return pl.run_scoped(products, _dq_accumulator(static), *_gradient_accumulators(static, dv))


def _dk_step(consumer: Consumer, step: Any, dk: Gradient) -> Gradient:
    """Computes dS, adds to dK, and adds the other lanes of dQ to global memory."""
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
    # dK of the previous work tile may still be on its way out of the buffer.
    is_first = step == consumer.work.steps_before
    pl.when(is_first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    def products(*accumulators):
        _start(accumulators, dk)
        q, right = memory.q.at[data.stage].transpose((1, 0)), memory.ds.at[data.zero, 0]

        def part(index, with_dk, dq_acc):
            _issue_dq(consumer, data, ds, index, dq_acc)
            if index == 0:
                memory.ds[data.zero, 0] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers.ds_arrived)
                # Not before: a copy may overwrite delta, which this thread has read.
                plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
            for lanes in with_dk:
                _issue_part(accumulators, lanes, q, right)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=len(with_dk))
            _add_dq(consumer, data, index, dq, copying=1)

        # dQ leaves under products for dK. There are no registers for two parts of it.
        for index, with_dk in enumerate(((0, 1), (2,))):
            pl.run_scoped(functools.partial(part, index, with_dk), _dq_accumulator(static))
        return _loaded(accumulators)

    result = pl.run_scoped(products, *_gradient_accumulators(static, dk))
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    return result


def _issue_dq(consumer: Consumer, data: _Step, ds: Any, index: int, accumulator: Any) -> None:
    """Issues the product of dS, in shared memory or registers, and 64 lanes of the keys."""
    lanes = pl.ds((data.zero + index) * WARPGROUP_ROWS, WARPGROUP_ROWS)
    plgpu.wgmma(accumulator, ds, consumer.refs.memory.k.at[:, lanes])


def _add_dq(consumer: Consumer, data: _Step, index: int, dq: jax.Array, copying: int) -> None:
    """Adds 64 lanes of dQ to global memory; the last ``copying`` copies are from other buffers."""
    static, refs = consumer.static, consumer.refs
    plgpu.wait_smem_to_gmem(copying, wait_read_only=True)
    at = TileCoordinates(consumer.work.recompute().batch, data.at.head, data.at.q_tile)
    factors = load_dq_factors(static, refs, data.zero, at)
    if factors is not None:
        dq = rounded_to_int32(dq * along_rows(factors, dq.shape), TILE)
    staging = refs.memory.staging.at[data.zero + index]
    staging[...] = dq
    plgpu.commit_smem()
    queries = pl.ds(at.tile * static.config.block_q, static.config.block_q)
    lanes = pl.ds(index * WARPGROUP_ROWS, WARPGROUP_ROWS)
    target = refs.results.dq.at[at.batch, queries, at.head, lanes]
    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def _weights(
    consumer: Consumer, masked: bool, at: StepTile, scores: jax.Array, lse: jax.Array
) -> jax.Array:
    """P, float32, from the products of queries and keys."""
    static = consumer.static
    scores = mask_scores(consumer, at, scores) if masked else scores
    exponents = scores * static.base_2_factor - along_rows(lse, scores.shape)
    if masked and static.keys_are_padded:
        # Scores of keys past the last one are 0. Products of their weights with such keys are 0, or
        # not written, if only they are finite: float16 has other tiles (dq.py). A comparison of
        # indices would take registers.
        exponents = jnp.minimum(exponents, 1.0)
    return jnp.exp2(exponents)


def _row_stats(
    consumer: Consumer, place: Callable[[ScratchLayout, Any], Any], stage: Any
) -> jax.Array:
    """lse or delta of a step's queries, in registers."""
    at = place(ScratchLayout.of(consumer.static.config), stage)
    return plgpu.load(consumer.refs.memory.scratch.at[at], layout=ROWS)


def _score_accumulator(consumer: Consumer) -> Any:
    config = consumer.static.config
    return plgpu.ACC((config.block_q, config.block_kv), jnp.float32)


def _gradient_accumulators(static: BackwardStatic, gradient: Sequence[jax.Array]) -> list[Any]:
    shape = WARPGROUP_ROWS, static.config.block_kv
    return [plgpu.ACC(shape, jnp.float32) for _ in gradient]


def _dq_accumulator(static: BackwardStatic) -> Any:
    return plgpu.ACC((static.config.block_q, WARPGROUP_ROWS), jnp.float32)


def _start(accumulators: Sequence[Any], gradient: Sequence[jax.Array]) -> None:
    for accumulator, part in zip(accumulators, gradient, strict=True):
        accumulator[...] = part


def _issue_part(accumulators: Sequence[Any], index: int, left: Any, right: Any) -> None:
    """Issues the product that is added to 64 lanes of a gradient."""
    lanes = slice(index * WARPGROUP_ROWS, (index + 1) * WARPGROUP_ROWS)
    plgpu.wgmma(accumulators[index], left.at[lanes], right)


def _loaded(accumulators: Sequence[Any], running: int = 0) -> Gradient:
    """A gradient, when its products have ended; ``running`` later ones may still run."""
    return tuple(plgpu.wgmma_accumulator_load(x, wait_n=running) for x in accumulators)
