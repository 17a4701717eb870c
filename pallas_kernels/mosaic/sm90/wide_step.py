"""One step of the backward kernel's loop for head dims above 128.

dK and dV of 64 keys fill the registers there. So P, dP and dS are computed for 32 queries at a
time, and dQ some lanes at a time. Two of :mod:`pallas_kernels.mosaic.sm90.backward_forms`:

- OWN_KEYS, for (192, 128): a consumer accumulates dK and dV of 64 keys, as in
  :mod:`pallas_kernels.mosaic.sm90.backward_step`. It multiplies them with all 64 queries of a tile,
  and computes the rest of the scores in two halves. dS is dK's left operand in shared memory, where
  dQ reads it, too.
- SHARED_KEYS, up to (256, 256): both consumers work on the same keys. Each computes the scores of
  half of the queries, and accumulates half of the lanes of dK and dV. P and dS are exchanged in
  shared memory. While a step's exponentials are computed, the first part of the previous step's dQ
  is. At (192, 192) it serves the calls that :mod:`pallas_kernels.mosaic.sm90.split_step` does not:
  those it has no registers for, block-sparse masks, and all with JAX 0.12.

Without a producer warpgroup a step starts the copies of the next one under its first products: the
step before has read the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import optimization_barrier
from pallas_kernels.mosaic.sm90.backward_epilogue import add_dq, ds_buffer, load_dq_factors
from pallas_kernels.mosaic.sm90.backward_forms import OWN_KEYS, WIDE_SCORE_QUERIES
from pallas_kernels.mosaic.sm90.backward_scores import Consumer
from pallas_kernels.mosaic.sm90.backward_step import (
    State,
    StepData,
    arrive_ds_free,
    gradients,
    wait_for_queries,
    weights,
    weights_and_gradients,
)
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.work_tiles import TileCoordinates


def step(
    consumer: Consumer,
    masked: bool,
    copy_ahead: Callable[[Any, bool], None],
    step: Any,
    state: State,
) -> State:
    """See :func:`pallas_kernels.mosaic.sm90.backward_step.step`."""
    config = consumer.static.config
    of_form = _step_with_own_keys if config.form is OWN_KEYS else _step_with_shared_keys
    state = of_form(consumer, masked, functools.partial(copy_ahead, step, True), step, state)
    if not config.producer_warpgroup:
        # Their copy was started in this step, which would have waited too early.
        wait_for_queries(consumer, step + 1)
    return state


def _step_with_own_keys(
    consumer: Consumer, masked: bool, copy_ahead: Callable[[], None], step: Any, state: State
) -> State:
    refs, data = consumer.refs, StepData.of(consumer, step)
    memory, barriers = refs.memory, refs.barriers

    def write(query: int, p: jax.Array, ds: jax.Array) -> None:
        if query == 0:
            _wait_for_ds_buffer(consumer, step, state)
        queries = slice(query, query + WIDE_SCORE_QUERIES)
        memory.ds[data.ds, 0, data.keys, queries] = ds
        memory.p[0, data.keys, queries] = p

    _weights_and_gradients_by_halves(consumer, masked, copy_ahead, step, data, write)
    dk, dv = optimization_barrier(state.dk, state.dv)
    state = state._replace(dk=dk, dv=dv)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.ds_arrived)
    dq = _Dq.of(consumer, state, data.earlier_ds)

    # One part of dQ after the other: there are no registers for both.
    def products(dv_acc, dk_acc):
        dv_acc[...] = state.dv
        dk_acc[...] = state.dk

        def first(dq_acc):
            dq.issue(0, dq_acc)
            plgpu.wgmma(dv_acc, memory.p.at[0, data.keys], memory.do.at[data.do_stage])
            dq.add(0, dq_acc, wait_n=1)

        def second(dq_acc):
            dq.issue(1, dq_acc)
            plgpu.wgmma(dk_acc, memory.ds.at[data.ds, 0, data.keys], memory.q.at[data.stage])
            dq.add(1, dq_acc, wait_n=1)
            arrive_ds_free(consumer)

        for part, accumulator in zip((first, second), dq.accumulators(), strict=True):
            pl.run_scoped(part, accumulator)
        return _finish(consumer, data, dk_acc, dv_acc)

    return pl.run_scoped(products, *_dkv_accumulators(consumer))


def _weights_and_gradients_by_halves(
    consumer: Consumer, masked: bool, also: Callable[[], None], step: Any, data: StepData,
    write: Callable[[int, jax.Array, jax.Array], None],
) -> None:  # fmt: skip
    """Calls ``write(first query, P, dS)`` for half of a tile's queries, then for the others.

    The products of keys and queries are computed for all of them at once. So keys, their left
    operand, are read from shared memory once. The registers of P, dP and dS are those of a half.
    ``also`` is called when the first products have been issued.
    """
    memory, barriers = consumer.refs.memory, consumer.refs.barriers

    def half(query, load_products, dp_ref):
        do = memory.do.at[data.do_stage, pl.ds(query, WIDE_SCORE_QUERIES)].transpose((1, 0))
        plgpu.wgmma(dp_ref, memory.v.at[data.keys], do)
        if query == 0:
            also()
        products = load_products()
        part = data._replace(at=data.at._replace(query=query))
        of_half = products[:, query : query + WIDE_SCORE_QUERIES]
        found = weights(consumer, masked, part, lambda: of_half)
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
        dp, found = optimization_barrier(dp, found)
        if query > 0 and consumer.static.config.producer_warpgroup:
            wait_for_queries(consumer, step + 1)
        write(query, *optimization_barrier(*gradients(consumer, part, found, dp)))
        return products

    def with_scores(scores_ref):
        q = memory.q.at[data.stage].transpose((1, 0))
        plgpu.wgmma(scores_ref, memory.k.at[data.keys], q)
        plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
        load = functools.partial(plgpu.wgmma_accumulator_load, scores_ref, wait_n=1)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, WIDE_SCORE_QUERIES), jnp.float32)
        products = pl.run_scoped(functools.partial(half, 0, load), accumulator)
        second = functools.partial(half, WIDE_SCORE_QUERIES, lambda: products)
        pl.run_scoped(second, accumulator)

    shape = WARPGROUP_ROWS, consumer.static.config.block_q
    pl.run_scoped(with_scores, plgpu.ACC(shape, jnp.float32))


def _wait_for_ds_buffer(consumer: Consumer, step: Any, state: State) -> None:
    """Waits until a step may write dS, see :func:`backward_step.step`."""
    barriers = consumer.refs.barriers
    pl.when(state.q_tile >= 0)(lambda: plgpu.barrier_wait(barriers.ds_arrived))
    pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_free.at[0]))
    if consumer.static.rounds_dkv:
        pl.when(state.q_tile < 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))


def _step_with_shared_keys(
    consumer: Consumer, masked: bool, copy_ahead: Callable[[], None], step: Any, state: State
) -> State:
    data = StepData.of(consumer, step)
    data = data._replace(at=data.at._replace(query=data.at.warpgroup * WIDE_SCORE_QUERIES))
    dq = _Dq.of(consumer, state, data.ds)
    last = len(dq.widths) - 1

    def with_dq(first_acc):
        def also():
            dq.issue(0, first_acc)
            copy_ahead()

        p, ds = weights_and_gradients(
            consumer, masked, step, data, also, running=1,
            last=consumer.static.config.producer_warpgroup,
        )  # fmt: skip
        p, ds, dk, dv = optimization_barrier(p, ds, state.dk, state.dv)
        at_step = state._replace(dk=dk, dv=dv)
        if not last:
            return _exchange_and_add(consumer, data, at_step, dq, (p, ds), first_acc)

        def with_second(second_acc):
            dq.issue(1, second_acc)
            dq.add(0, first_acc, wait_n=1)
            return _exchange_and_add(consumer, data, at_step, dq, (p, ds), second_acc)

        return pl.run_scoped(with_second, dq.accumulators()[1])

    return pl.run_scoped(with_dq, dq.accumulators()[0])


def _exchange_and_add(
    consumer: Consumer, data: StepData, state: State, dq: _Dq,
    weights: tuple[jax.Array, jax.Array], dq_acc: Any,
) -> State:  # fmt: skip
    """Writes ``(P, dS)``, and adds the products of those of both consumers to dV and dK."""
    refs, (p, ds) = consumer.refs, weights
    memory, barriers = refs.memory, refs.barriers
    # The last product that reads the dS of the previous step.
    dq_part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
    arrive_ds_free(consumer)
    plgpu.barrier_wait(barriers.ds_free.at[0])
    queries = pl.ds(data.at.query, WIDE_SCORE_QUERIES)
    memory.p[0, :, queries] = p
    memory.ds[0, 0, :, queries] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.ds_arrived)
    dq.add_loaded(len(dq.widths) - 1, dq_part)
    plgpu.barrier_wait(barriers.ds_arrived)

    def products(dv_acc, dk_acc):
        dv_acc[...] = state.dv
        dk_acc[...] = state.dk
        dk_lanes, dv_lanes = (
            pl.ds(data.at.warpgroup * lanes, lanes) for lanes in consumer.static.dkv_dims
        )
        plgpu.wgmma(dv_acc, memory.p.at[data.ds], memory.do.at[data.do_stage, :, dv_lanes])
        plgpu.wgmma(dk_acc, memory.ds.at[data.ds, 0], memory.q.at[data.stage, :, dk_lanes])
        return _finish(consumer, data, dk_acc, dv_acc)

    return pl.run_scoped(products, *_dkv_accumulators(consumer))


def _dkv_accumulators(consumer: Consumer) -> tuple[Any, Any]:
    """Of a consumer's parts of dV and of dK."""
    dk_lanes, dv_lanes = consumer.static.dkv_dims
    shapes = (WARPGROUP_ROWS, dv_lanes), (WARPGROUP_ROWS, dk_lanes)
    return plgpu.ACC(shapes[0], jnp.float32), plgpu.ACC(shapes[1], jnp.float32)


def _finish(consumer: Consumer, data: StepData, dk_acc: Any, dv_acc: Any) -> State:
    """Waits for dV and dK, in this order, and releases dO and the queries."""
    barriers = consumer.refs.barriers
    dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=1)
    plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
    dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    return State(dk, dv, data.at.q_tile, data.at.head)


class _Dq:
    """A warpgroup's part of dQ of one step, some lanes at a time."""

    def __init__(self, consumer: Consumer, at: TileCoordinates, buffer: Any):
        self._consumer, self._at, self._buffer = consumer, at, buffer
        self.widths = consumer.static.dq_widths
        # Loaded early to hide the latency.
        tile = at._replace(tile=jnp.maximum(at.tile, 0))
        self._warpgroup = optimization_barrier(consumer.warpgroup)
        self._factors = load_dq_factors(consumer.static, consumer.refs, self._warpgroup, tile)

    @classmethod
    def of(cls, consumer: Consumer, state: State, buffer: Any) -> _Dq:
        """Of the step before, whose dS is in a buffer; there may be none."""
        batch = consumer.work.recompute().batch
        return cls(consumer, TileCoordinates(batch, state.head, state.q_tile), buffer)

    def accumulators(self) -> list[Any]:
        """One for each part."""
        block_q = self._consumer.static.config.block_q
        return [plgpu.ACC((block_q, width), jnp.float32) for width in self.widths]

    def issue(self, index: int, acc: Any) -> None:
        """Issues the product of a part."""
        static, memory = self._consumer.static, self._consumer.refs.memory
        first = static.first_lane(self._warpgroup) + sum(self.widths[:index])
        k = memory.k.at[:, pl.ds(first, self.widths[index])]
        plgpu.wgmma(acc, memory.ds.at[self._buffer, 0].transpose((1, 0)), k)

    def compute(self, index: int, acc: Any) -> None:
        """Computes a part, and adds it to global memory."""
        self.issue(index, acc)
        self.add(index, acc, wait_n=0)

    def add(self, index: int, acc: Any, wait_n: int) -> None:
        """Adds a part to global memory, when its product has ended; ``wait_n`` later ones run."""
        self.add_loaded(index, plgpu.wgmma_accumulator_load(acc, wait_n=wait_n))

    def add_loaded(self, index: int, dq: jax.Array) -> None:
        """The same of a part in registers."""
        add_dq(
            self._consumer.static, self._consumer.refs, self._warpgroup, self._at, dq,
            self._factors, predicate=self._at.tile >= 0, first=sum(self.widths[:index]),
        )  # fmt: skip


def finish(consumer: Consumer, state: State) -> State:
    """Ends the work tile's last step: adds what no further step computes."""
    config, barriers = consumer.static.config, consumer.refs.barriers
    if config.form is OWN_KEYS:
        plgpu.barrier_wait(barriers.ds_arrived)
        # The last step's products have read the buffer to which dK and dV may go.
        plgpu.barrier_wait(barriers.ds_free.at[0])
    dq = _Dq.of(consumer, state, ds_buffer(consumer.static, consumer.end - 1))
    for index, accumulator in enumerate(dq.accumulators()):
        pl.run_scoped(functools.partial(dq.compute, index), accumulator)
    if config.form is OWN_KEYS:
        arrive_ds_free(consumer)
    return state
