"""The ring's backward pass: one side rotates with the sum of its gradients, one is stationary."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from burst_jax.ring.local import LocalBackward
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import ChunkedSend, Offset
from burst_jax.ring.schedule import Send, Step, backward_schedule, step_name
from pallas_kernels import AttentionInputs, Implementation
from pallas_kernels.inputs import PerHead, Side


def backward(
    request: Request, implementation: Implementation, inputs: AttentionInputs, rotation: Rotation
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], PerHead]:
    """``(dq, (dk, dv), per_head)``, float32, each with the shape of its primal.

    Runs :func:`burst_jax.ring.schedule.backward_schedule`, whose module lists it for four devices.
    A barrier ends each step: the next one starts when the kernel is done and all that was sent has
    been received.

    ``per_head`` has the gradients of the parameters that the request's spec differentiates, of
    this device alone: they are still to be summed over the ring.
    """
    kernels = LocalBackward(request, implementation, inputs, rotation)
    *steps, last = backward_schedule(kernels.route, splits_local=kernels.splits_local)
    state = _BackwardState(kernels)
    for index, step in enumerate(steps):
        with jax.named_scope(step_name("backward", index)):
            state.step(step)
    with jax.named_scope(step_name("backward", len(steps))):
        state.last_step(last)
    dq, dkv = kernels.results(state.stationary, state.sums[kernels.route.local])
    return dq, dkv, kernels.per_head


class _BackwardState:
    """What a device holds between two steps of the schedule.

    Attributes:
      block: its current block of the rotating side.
      stationary: the gradient of the stationary side over the steps so far; None at first.
      sums: the sums of the rotating side's gradients on this device, each named after the step
        whose kernel added to it last.
    """

    def __init__(self, kernels: LocalBackward):
        self._kernels, self._route = kernels, kernels.route
        self.block = kernels.rotating
        self.stationary: Any = None
        self.sums: dict[Offset, Any] = {}
        # In flight: the block of the next step, and what is sent in chunks to the next pass.
        self._next_block: Side | None = None
        self._outer: dict[tuple[str, Offset], ChunkedSend] = {}

    def step(self, step: Step) -> None:
        """Sends, launches the kernel, waits for both, and adds up the step's ``adds``."""
        self._send_and_launch(step)
        if step.sends:
            self._wait(step)
        if self._next_block is not None:
            self.block, self._next_block = self._next_block, None
        else:
            self._join_chunks()  # A pass has ended, and all chunks have been received.
        self._add(step.adds)

    def last_step(self, step: Step) -> None:
        """The deferred half of the local block's work, and the final send of its gradient.

        There is one barrier per result, for the reasons in :func:`burst_jax.ring.forward.forward`,
        and so that XLA does not move a caller's cast of the gradient ahead of its final send, which
        is in float32.
        """
        self.block = self._kernels.rotating
        self._send_and_launch(step)
        self._join_chunks()
        results = self.stationary, {name: self.sums[name] for name in self._sent_or_made(step)}
        self.stationary, sums = jax.tree.map(lax.optimization_barrier, results)
        self.sums |= sums
        self._add(step.adds)

    def _send_and_launch(self, step: Step) -> None:
        received = None if step.adds_to is None else self.sums.pop(step.adds_to)
        for send in step.sends:
            self._send(send)
        if step.part != "none":
            self.stationary, self.sums[step.offset] = self._kernels(
                step.offset, step.part, self.block, self.stationary, received
            )

    def _send(self, send: Send) -> None:
        """Sends a block or a sum, or its next chunk; it is split before its first chunk."""
        name, is_block = (send.what, send.start), send.what == "block"
        if send.is_outer:
            if send.chunk == 0:
                whole = self.block if is_block else self.sums.pop(send.start)
                self._outer[name] = ChunkedSend(whole, send.chunks)
            self._outer[name].send(self._route, send.start, send.end)
        elif is_block:
            self._next_block = self._route.send(self.block, send.start, send.end)
        else:
            sent = self._route.send(self.sums[send.start], send.start, send.end)
            self.sums[send.start] = sent

    def _join_chunks(self) -> None:
        """Joins what was received in chunks."""
        for (what, start), chunks in self._outer.items():
            if what == "block":
                self.block = chunks.received()
            else:
                self.sums[start] = chunks.received()
        self._outer = {}

    def _wait(self, step: Step) -> None:
        """A barrier over this step's kernel and sends, before the next step.

        Unsent chunks pass it too, or XLA would combine the permutes of all chunks.
        """
        sums = {name: self.sums[name] for name in self._sent_or_made(step)}
        chunks = {name: outer.arrays for name, outer in self._outer.items()}
        self._next_block, chunks, self.stationary, sums = lax.optimization_barrier(
            (self._next_block, chunks, self.stationary, sums)
        )
        self.sums |= sums
        for name, arrays in chunks.items():
            self._outer[name].arrays = arrays

    def _sent_or_made(self, step: Step) -> list[Offset]:
        """Names of this device's sums that a step sent whole, or that its kernel added to."""
        sent = [send.start for send in step.sends if send.what == "sum"]
        return [name for name in (step.offset, *sent) if name in self.sums]

    def _add(self, names: tuple[Offset, ...]) -> None:
        """Adds up sums on this device; the result has the first name."""
        if names:
            sums = [self.sums.pop(name) for name in names]
            self.sums[names[0]] = jax.tree.map(lambda x, *rest: sum(rest, start=x), *sums)
