"""The producer warpgroup of a scan: copies of chunks to shared memory, and of results out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
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
    """A result of every chunk or of some, that leaves through shared memory.

    Attributes:
      buffer: ``[SLOTS, ...]`` shared memory.
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

    def put(self, step: Any, x: Any, *, transpose: bool = False) -> None:
        """Hands ``x`` to the producer. The threads of the warpgroup do not wait for each other."""
        slot, ordinal = self._slot(step), self._ordinal(step)
        pl.when(ordinal >= SLOTS)(lambda: plgpu.barrier_wait(self.free.at[slot]))
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
        return lax.rem(self._ordinal(step), i32(SLOTS))

    def _where_it_exists(self, step: Any) -> Callable[[Callable[[], None]], None]:
        return (lambda run: run()) if self.exists is None else pl.when(self.exists(step))


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

        for result in results:
            result.send(step)
        if results:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for result in results:
                result.release(step)

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
