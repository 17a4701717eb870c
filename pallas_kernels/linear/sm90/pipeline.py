"""The producer warpgroup of a scan: copies of chunks to shared memory, and of results out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.sm90.chunk_operands import accumulator, decay, transposed
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import CLUSTER_AXIS

# Chunks in shared memory, and buffers of each result, where there is room for them.
STAGES = 3
SLOTS = 2
# Steps of a scan whose number is computed.
LEAST_STEPS = STAGES - 1
# CTAs of a thread-block cluster: they have columns of the same head, and each copies its part of
# what they share to all.
CLUSTER = 2
# Warpgroups: one computes, one copies. Each has 255 registers, with ``setmaxnreg`` or without.
WARPGROUPS = 2


class Result(NamedTuple):
    """A result of every chunk or of some, that leaves through shared memory.

    Attributes:
      buffer: ``[slots, ...]`` shared memory.
      written: by slot: the chain has written it.
      free: by slot: it has been copied.
      target: from the index of a loop step to global memory.
      exists: from the index of a loop step to whether it has such a result; None is always.
      ordinal: from the index of a loop step to the number of such results before it; None is the
        index itself.
    """

    buffer: Any
    written: Any
    free: Any
    target: Callable[[Any], Any]
    exists: Callable[[Any], Any] | None = None
    ordinal: Callable[[Any], Any] | None = None

    @property
    def slots(self) -> int:
        """Number of buffers."""
        return self.buffer.shape[0]

    def put(self, step: Any, x: Any, *, transpose: bool = False) -> None:
        """Hands ``x`` to the producer. The threads of the warpgroup do not wait for each other."""
        slot, ordinal = self._slot(step), self._ordinal(step)
        pl.when(ordinal >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        buffer = self.buffer.at[slot]
        if transpose:
            buffer = buffer.transpose((1, 0))
        buffer[...] = x
        proxy_fence()
        plgpu.barrier_arrive(self.written.at[slot])

    def send(self, step: Any) -> None:
        """Starts the copy of what the chain has put."""

        @self._where_it_exists(step)
        def _():
            slot = self._slot(step)
            plgpu.barrier_wait(self.written.at[slot])
            plgpu.copy_smem_to_gmem(self.buffer.at[slot], self.target(step))

    def release(self, step: Any) -> None:
        """Marks the slot as free: its copy has read it."""

        @self._where_it_exists(step)
        def _():
            plgpu.barrier_arrive(self.free.at[self._slot(step)])

    def _ordinal(self, step: Any) -> Any:
        return step if self.ordinal is None else self.ordinal(step)

    def _slot(self, step: Any) -> Any:
        return lax.rem(self._ordinal(step), i32(self.slots))

    def _where_it_exists(self, step: Any) -> Callable[[Callable[[], None]], None]:
        return (lambda run: run()) if self.exists is None else pl.when(self.exists(step))


class Scores(NamedTuple):
    """``P = scale decay q k^T`` of every chunk, which the producer computes for the chain.

    Through global memory it would take as many bytes as X, in both directions.

    Attributes:
      q: by stage.
      k: by stage.
      vectors: by stage, from INTO to START.
      arrived: by stage.
      p: ``[STAGES, 64, 64]``.
      written: by stage.
      scale: of q k.
    """

    q: Any
    k: Any
    vectors: Any
    arrived: Any
    p: Any
    written: Any
    scale: float

    def compute(self, step: Any) -> None:
        """Computes a step's P when its inputs have arrived. The chain has ended step - 2."""
        stage = lax.rem(step, i32(STAGES))
        plgpu.barrier_wait(self.arrived.at[stage])

        def product(acc):
            plgpu.wgmma(acc, self.q.at[stage], transposed(self.k.at[stage]))
            decays = decay(self.vectors.at[stage]) * self.scale
            p = plgpu.wgmma_accumulator_load(acc) * decays
            self.p.at[stage][...] = p.astype(jnp.bfloat16)

        pl.run_scoped(product, accumulator())
        proxy_fence()
        plgpu.barrier_arrive(self.written.at[stage])

    def wait(self, stage: Any) -> Any:
        """P of the step in a stage."""
        plgpu.barrier_wait(self.written.at[stage])
        return self.p.at[stage]


def cta_index(cluster: Any) -> Any:
    """Index of the CTA in the grid, from that of its cluster."""
    return cluster * CLUSTER + lax.axis_index(CLUSTER_AXIS) if CLUSTER > 1 else cluster


def copy_to_cluster(source: Any, target: Any, barrier: Any) -> None:
    """Starts the copy of what all CTAs of a cluster read; ``barrier`` is each CTA's own."""
    axes = CLUSTER_AXIS if CLUSTER > 1 else None
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=axes)


def stages_barrier(stages: int = STAGES, chains: int = 1) -> Any:
    """Description of the barriers at which stages become free, in all CTAs of the cluster.

    Args:
      stages: chunks in shared memory.
      chains: of a CTA; each of them arrives.
    """
    if CLUSTER == 1:
        return plgpu.Barrier(num_arrivals=chains, num_barriers=stages)
    axes = (CLUSTER_AXIS,)
    return plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=chains, num_barriers=stages)


def free_stage(barrier: Any) -> None:
    """The chain has read a stage."""
    if CLUSTER > 1:
        # One thread arrives at a cluster's barrier for the whole warpgroup.
        warpgroup_barrier()
    plgpu.barrier_arrive(barrier)


def produce(
    chunks: Any,
    start: Callable[[Any, Any], None],
    free: Any,
    results: Sequence[Result] = (),
    scores: Scores | None = None,
    stages: int = STAGES,
) -> None:
    """Copies the inputs of all steps, ahead of the chain, and the results that it hands over.

    The copies of step i + stages - 1 start when step i - 1 has ended, which is before results of
    step i exist: waiting for these delays no input. P of step i + 1 is computed during step i.

    Args:
      chunks: number of steps; if traced, at least :data:`LEAST_STEPS`.
      start: ``start(step, stage)`` starts the copies of a step.
      free: by stage: the chains of the cluster have read it.
      results: in the order in which the chain writes them.
      scores: P, where the chain needs it and it is no input.
      stages: chunks in shared memory.
    """
    for step in range(stages - 1):
        if not isinstance(chunks, int) or step < chunks:
            start(i32(step), i32(step))
    if scores is not None:
        scores.compute(i32(0))

    @pl.loop(0, chunks)
    def _(step):
        ahead = step + (stages - 1)
        stage = lax.rem(ahead, i32(stages))

        # The stage of step - 1.
        @pl.when((step >= 1) & (step + 1 < chunks))
        def _():
            plgpu.barrier_wait(free.at[stage])

        pl.when(ahead < chunks)(lambda: start(ahead, stage))
        if scores is not None:
            pl.when(step + 1 < chunks)(lambda: scores.compute(step + 1))

        for result in results:
            result.send(step)
        if results:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for result in results:
                result.release(step)

    # The other CTA arrives at barriers in this one's memory, which is gone once it has exited.
    for step in (chunks - 2, chunks - 1):
        if not isinstance(step, int) or step >= 0:
            plgpu.barrier_wait(free.at[lax.rem(i32(step), i32(stages))])
    if results:
        plgpu.wait_smem_to_gmem(0)


def for_each_pair(
    chunks: int, step: Callable[..., jax.Array], state: jax.Array, *, reverse: bool = False
) -> jax.Array:
    """Runs ``state = step(index, state, is_first_of_pair)`` for every chunk.

    Two steps are one of the loop, so that what only one of them does needs no branch. If the number
    of chunks is odd, the last chunk is a pair by itself, which is the first step in reverse order.
    """

    def pair(first: Any, state: jax.Array) -> jax.Array:
        return step(first + 1, step(first, state, True), False)

    alone = chunks % 2
    before = alone if reverse else 0
    if before:
        state = step(i32(0), state, True)

    def body(i: Any, state: jax.Array) -> jax.Array:
        return pair(2 * i + before, state)

    state = lax.fori_loop(i32(0), i32(chunks // 2), body, state)
    return step(i32(chunks - 1), state, True) if alone and not reverse else state
