"""The producer warpgroup of a scan: copies of chunks to shared memory, and of results out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import i32, proxy_fence

# Chunks in shared memory, and buffers of each result.
STAGES = 3
SLOTS = 2
# Warpgroups: one computes, one copies. Each has 255 registers, with ``setmaxnreg`` or without.
WARPGROUPS = 2


class Result(NamedTuple):
    """A result of every chunk, that leaves through shared memory.

    Attributes:
      buffer: ``[SLOTS, ...]`` shared memory.
      written: by slot: the chain has written it.
      free: by slot: it has been copied.
      target: from the index of a loop step to global memory.
    """

    buffer: Any
    written: Any
    free: Any
    target: Callable[[Any], Any]

    def put(self, step: Any, x: Any, *, transpose: bool = False) -> None:
        """Hands ``x`` to the producer. The threads of the warpgroup do not wait for each other."""
        slot = lax.rem(step, i32(SLOTS))
        pl.when(step >= SLOTS)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        buffer = self.buffer.at[slot]
        if transpose:
            buffer = buffer.transpose((1, 0))
        buffer[...] = x
        proxy_fence()
        plgpu.barrier_arrive(self.written.at[slot])


def produce(
    chunks: int,
    start: Callable[[Any, Any], None],
    free: Any,
    results: Sequence[Result] = (),
) -> None:
    """Copies the inputs of all steps, ahead of the chain, and the results that it hands over.

    The copies of step i + STAGES - 1 start when step i - 1 has ended, which is before results of
    step i exist: waiting for these delays no input.

    Args:
      chunks: number of steps.
      start: ``start(step, stage)`` starts the copies of a step.
      free: by stage: the chain has read it.
      results: in the order in which the chain writes them.
    """
    for step in range(min(STAGES - 1, chunks)):
        start(i32(step), i32(step))

    @pl.loop(0, chunks)
    def _(step):
        ahead = step + (STAGES - 1)
        stage = lax.rem(ahead, i32(STAGES))

        @pl.when(ahead < chunks)
        def _():
            pl.when(step >= 1)(lambda: plgpu.barrier_wait(free.at[stage]))
            start(ahead, stage)

        slot = lax.rem(step, i32(SLOTS))
        for result in results:
            plgpu.barrier_wait(result.written.at[slot])
            plgpu.copy_smem_to_gmem(result.buffer.at[slot], result.target(step))
        if results:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for result in results:
                plgpu.barrier_arrive(result.free.at[slot])

    if results:
        plgpu.wait_smem_to_gmem(0)
