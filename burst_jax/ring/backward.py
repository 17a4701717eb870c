"""The ring's backward: one side travels with a sum of its gradients behind it, the other stays."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
from jax import lax

from burst_jax.ring.local import LocalBackward
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Pieces, Stop
from burst_jax.ring.schedule import Launch, Send, Step, backward_schedule, step_name
from pallas_kernels import AttentionInputs, Implementation
from pallas_kernels.inputs import PerHead, Side


def backward(
    request: Request, implementation: Implementation, inputs: AttentionInputs, rotation: Rotation
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], PerHead]:
    """``(dq, (dk, dv), per_head)``, float32, each with the shape of what it is the gradient of.

    Runs :func:`burst_jax.ring.schedule.backward_schedule`, whose module has it written out for four
    devices. One step of it, where one kernel makes the gradients of both sides:

    1. The block leaves for the next stop. The sum that the step before has added to leaves for the
       stop after the next kernel's, so it goes two stops.
    2. While both are on their way the kernel runs on the block that is here. It adds to the
       gradient of the side that stays, and to the sum that has landed here during the step before.
    3. A barrier: the next step begins when the kernel is done and both sends have landed.

    Where there are two kernels, the sum is sent beside the first one, by one stop only. The second
    kernel waits until the sum has landed and adds to it. Beside the second kernel the block leaves.

    Args:
      request: what the call asks for. Its spec says which numbers of each head get a gradient.
      implementation: the local attention.
      inputs: this device's arrays. The gradients of per-head parameters are this device's part,
        still to be summed over the ring.
      rotation: "rotate_kv" or "rotate_query": which side travels.
    """
    kernels = LocalBackward(request, implementation, inputs, rotation)
    *steps, last = backward_schedule(
        kernels.route, fused=kernels.fused, cuts_home=kernels.cuts_home
    )
    run = _Run(kernels)
    for index, step in enumerate(steps):
        with jax.named_scope(step_name("backward", index)):
            run.step(step)
    with jax.named_scope(step_name("backward", len(steps))):
        run.last_step(last)
    dq, dkv = kernels.by_side(run.staying, run.sums[kernels.route.home])
    return dq, dkv, kernels.per_head


class _Run:
    """What a device has between two steps of the schedule.

    Attributes:
      block: the block that is here, of the side that travels.
      staying: the gradient of the side that stays, from all blocks that were here; None at first.
      sums: the sums of the travelling side's gradients that are here. A sum has the name of the
        stop whose kernel added to it last.
    """

    def __init__(self, kernels: LocalBackward):
        self._kernels, self._route = kernels, kernels.route
        self.block = kernels.travelling
        self.staying: Any = None
        self.sums: dict[Stop, Any] = {}
        # What is on its way: the block of the next step, and what goes ahead to the next turn.
        self._next_block: Side | None = None
        self._ahead: dict[tuple[str, Stop], Pieces] = {}

    def step(self, step: Step) -> None:
        """Sends, launches, waits for both, and adds the sums that are brought together here."""
        self._send_and_launch(step)
        # Where there are two kernels, nothing is sent beside the last kernel of the last step away
        # from home. That step needs no barrier: the sum that goes home next is what it makes.
        if step.launches[-1].sends or any(send.what == "block" for send in step.sends):
            self._wait(step)
        if self._next_block is not None:
            self.block, self._next_block = self._next_block, None
        else:
            self._assemble()  # A turn is over, and all pieces have landed.
        self._add(step.adds)

    def last_step(self, step: Step) -> None:
        """The work at home that is left, on this device's own block, and its sums brought together.

        There is a barrier for each result, for the reasons that
        :func:`burst_jax.ring.forward.forward` has, and for one more. A caller may cast the
        gradient, and XLA would cast it before its last hop. It comes home in float32.
        """
        self.block = self._kernels.travelling
        self._send_and_launch(step)
        self._assemble()
        results = self.staying, {name: self.sums[name] for name in self._sent_or_made(step)}
        self.staying, sums = jax.tree.map(lax.optimization_barrier, results)
        self.sums |= sums
        self._add(step.adds)

    def _send_and_launch(self, step: Step) -> None:
        for send in step.sends:
            self._send_piece(send)
        bounds = self._kernels.bounds(step.stop, step.part, self.block)
        for launch in step.launches:
            self._launch(launch, step.stop, bounds)

    def _launch(self, launch: Launch, stop: Stop, bounds: Any) -> None:
        """The sends beside one kernel, then the kernel."""
        landed = None if launch.adds_to is None else self.sums.pop(launch.adds_to)
        if launch.kernel == "travels" and landed is not None:
            # The second of two kernels waits for the sum that was sent beside the first one. The
            # block waits too: free to leave earlier, it would go by the same permute as the sum.
            self.staying, landed, self.block = lax.optimization_barrier(
                (self.staying, landed, self.block)
            )
        for send in launch.sends:
            self._send(send)
        gradients = functools.partial(self._kernels, launch.kernel, stop, bounds, self.block)
        if launch.kernel == "both":
            self.staying, self.sums[stop] = gradients(self.staying, landed)
        elif launch.kernel == "stays":
            self.staying = gradients(self.staying)
        else:
            self.sums[stop] = gradients(landed)

    def _send(self, send: Send) -> None:
        """Sends a whole block, for the next step, or a whole sum."""
        if send.what == "block":
            self._next_block = self._route.move(self.block, send.start, send.end)
        else:
            moved = self._route.move(self.sums[send.start], send.start, send.end)
            self.sums[send.start] = moved

    def _send_piece(self, send: Send) -> None:
        """Sends the next piece of a block or of a sum, which is cut when its first piece leaves."""
        name = send.what, send.start
        if send.piece == 0:
            whole = self.block if send.what == "block" else self.sums.pop(send.start)
            self._ahead[name] = Pieces(whole, send.pieces)
        self._ahead[name].move(self._route, send.start, send.end)

    def _assemble(self) -> None:
        """Makes whole again what was sent in pieces."""
        for (what, start), pieces in self._ahead.items():
            if what == "block":
                self.block = pieces.whole()
            else:
                self.sums[start] = pieces.whole()
        self._ahead = {}

    def _wait(self, step: Step) -> None:
        """A barrier: the next step begins when this one's kernels are done and its sends landed.

        Pieces that are yet to go pass it too. XLA would otherwise send all pieces by one permute.
        """
        sums = {name: self.sums[name] for name in self._sent_or_made(step)}
        pieces = {name: ahead.arrays for name, ahead in self._ahead.items()}
        self._next_block, pieces, self.staying, sums = lax.optimization_barrier(
            (self._next_block, pieces, self.staying, sums)
        )
        self.sums |= sums
        for name, arrays in pieces.items():
            self._ahead[name].arrays = arrays

    def _sent_or_made(self, step: Step) -> list[Stop]:
        """Names of the sums here that a step has sent whole, or that its kernel has added to."""
        sent = [send.start for send in step.all_sends if send.what == "sum"]
        return [name for name in (step.stop, *sent) if name in self.sums]

    def _add(self, names: tuple[Stop, ...]) -> None:
        """Adds sums that are here. The first one's name is the result's."""
        if names:
            sums = [self.sums.pop(name) for name in names]
            self.sums[names[0]] = jax.tree.map(_sum, *sums)


def _sum(*parts: jax.Array) -> jax.Array:
    return functools.reduce(operator.add, parts)
