"""A ring's schedule as plain data: which kernel runs at each ring step, and what is sent meanwhile.

A schedule is a tuple of steps. Every device runs the same steps. :mod:`burst_jax.ring.forward` and
:mod:`burst_jax.ring.backward` execute it; byte counts and the planner read it. On four devices, as
:func:`table` prints it::

    (0,)         kernel               block to (1,)
    (1,)         kernel               block to (2,)
    (2,)         kernel               block to (3,)
    (3,)         kernel

In the backward pass one side rotates (K and V, or the queries) and the other is stationary, and
both get a gradient. The gradient of the stationary side never leaves its device: every kernel adds
to it. The gradient of the rotating side is accumulated over all steps and follows its block. A
partial gradient ("sum") is named after the step whose kernel added to it last. Two rules overlap
every send with a kernel:

- The gradient of the local block remains on its device, as the sum of step (0,). The rotating sum
  starts at the second step.
- Each device splits the work on its local block. It does the first half before the ring, during the
  block's first send, and defers the second half to the last step, during the gradient's final send.

Each step's sum is sent during the next step and accumulated in the one after, so two sums are in
flight, those of even and of odd steps::

    (0,) first   kernel               block to (1,)
    (1,)         kernel               block to (2,)
    (2,)         kernel               sum (1,) to (3,), block to (3,)
    (3,)         kernel + sum (1,)    sum (2,) to (0,)
    (0,) second  kernel + sum (0,)    sum (3,) to (0,)
                 then sum (0,) + sum (3,) + sum (2,)

On a two-level ring the block that starts the next inner-ring pass is sent in chunks, one during
each step of this pass. The sums of a pass's devices are added up at its last step. From there the
result is sent, also in chunks, to the last step of the next pass. On 2 x 3 devices::

    (0,0) first  kernel               block to (1,0) 1/3, block to (0,1)
    (0,1)        kernel               block to (1,0) 2/3, block to (0,2)
    (0,2)        kernel               block to (1,0) 3/3, sum (0,1) to (0,2)
                 then sum (0,2) + sum (0,1)
    (1,0)        kernel               sum (0,2) to (1,2) 1/2, block to (1,1)
    (1,1)        kernel               sum (0,2) to (1,2) 2/2, sum (1,0) to (1,2), block to (1,2)
    (1,2)        kernel + sum (1,0)   sum (1,1) to (1,2)
                 then sum (1,2) + sum (0,2) + sum (1,1)
    (0,0) second kernel + sum (0,0)   sum (1,2) to (0,0)
                 then sum (0,0) + sum (1,2)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from burst_jax.ring.route import Offset, Route

Part = Literal["whole", "first", "second", "none"]


@dataclasses.dataclass(frozen=True)
class Send:
    """A permute: every device sends a block or a sum to where it is needed next.

    Attributes:
      what: "block", or "sum": the partial gradient whose name is ``start``.
      start: offset of the step that it is sent from.
      end: offset of the step that it is sent to.
      chunk: index of the chunk, from 0.
      chunks: number of equal chunks that the block or the sum is split into; 1 sends it whole.
    """

    what: Literal["block", "sum"]
    start: Offset
    end: Offset
    chunk: int = 0
    chunks: int = 1

    @property
    def is_outer(self) -> bool:
        """Whether it is sent from one pass to another, over the outer axis."""
        return self.start[:-1] != self.end[:-1]

    def __str__(self) -> str:
        name = "block" if self.what == "block" else f"sum {_text(self.start)}"
        chunk = f" {self.chunk + 1}/{self.chunks}" if self.chunks > 1 else ""
        return f"{name} to {_text(self.end)}{chunk}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A ring step: a kernel, and what is sent while it runs.

    Attributes:
      offset: offset of the block that this device holds.
      part: of the block's work: "first" or "second" half of the local block's, where that is split;
        "none" where the sum is sent back without a kernel; else "whole".
      sends: what is sent during the kernel, and has been received when the next step starts.
      adds_to: name of the sum on this device that the kernel adds to; None if it starts from zero.
      adds: names of the sums on this device that are added up after the step; the result has the
        first name.
    """

    offset: Offset
    part: Part
    sends: tuple[Send, ...] = ()
    adds_to: Offset | None = None
    adds: tuple[Offset, ...] = ()


Schedule = tuple[Step, ...]


@functools.lru_cache
def forward_schedule(route: Route) -> Schedule:
    """The forward pass: K and V rotate, and every kernel merges into out and lse."""
    return tuple(
        Step(offset, "whole", _block_chunk(offsets, following, i) + _next_block(offsets, i))
        for offsets, following in _passes(route)
        for i, offset in enumerate(offsets)
    )


@functools.lru_cache
def backward_schedule(route: Route, *, splits_local: bool = True) -> Schedule:
    """The backward pass. Blocks and the sums of their gradients rotate on ``route``.

    After the last step the sum of ``route.local`` is the whole gradient of the rotating side.

    Args:
      route: the rotating side's.
      splits_local: whether the local block's work can be split. If not, it is done in the first
        step, and the sum's final send overlaps with no kernel.
    """
    if len(route.offsets) == 1:
        return (Step(route.local, "whole"),)
    one_pass = len(route.passes) == 1
    steps: list[Step] = []
    gathered: tuple[Offset, ...] = ()  # The name of the sum of all passes so far, if any.
    left_over: tuple[Offset, ...] = ()
    for offsets, following in _passes(route):
        # The sums that no further kernel of the pass adds to, the last one first.
        left_over = tuple(offset for offset in offsets[:-3:-1] if offset != route.local)
        for index, offset in enumerate(offsets):
            sums, adds_to = _sums_inside(route, offsets, index)
            outer = _block_chunk(offsets, following, index) + _sum_chunk(offsets, gathered, index)
            part: Part = "first" if offset == route.local and splits_local else "whole"
            adds = left_over[:1] + gathered + left_over[1:]
            pass_ends = index == len(offsets) - 1 and not one_pass and len(adds) > 1
            sends = outer + sums + _next_block(offsets, index)
            steps.append(Step(offset, part, sends, adds_to, adds if pass_ends else ()))
        gathered = left_over[:1]
    final_send = Send("sum", route.offsets[-1], route.local)
    adds = (route.local, *(left_over if one_pass else gathered))
    part, adds_to = ("second", route.local) if splits_local else ("none", None)
    return (*steps, Step(route.local, part, (final_send,), adds_to, adds))


def step_name(direction: Literal["forward", "backward"], index: int) -> str:
    """The name of a step of a schedule in profiles and compiled programs; steps count from 0.

    It is part of the path of all operations of the step, including sends and kernels.
    """
    return f"ring_{direction}_step_{index}"


def _passes(route: Route) -> Iterator[tuple[tuple[Offset, ...], tuple[Offset, ...] | None]]:
    """Every pass and the one that follows it."""
    return zip(route.passes, (*route.passes[1:], None), strict=True)


def _next_block(offsets: tuple[Offset, ...], index: int) -> tuple[Send, ...]:
    """Sends the block to the next step of its pass."""
    last = index == len(offsets) - 1
    return () if last else (Send("block", offsets[index], offsets[index + 1]),)


def _block_chunk(
    offsets: tuple[Offset, ...], following: tuple[Offset, ...] | None, index: int
) -> tuple[Send, ...]:
    """Sends a chunk of the block to the first step of the following pass."""
    if following is None:
        return ()
    return (Send("block", offsets[0], following[0], index, len(offsets)),)


def _sum_chunk(
    offsets: tuple[Offset, ...], gathered: tuple[Offset, ...], index: int
) -> tuple[Send, ...]:
    """Sends a chunk of the sum of all earlier passes to this pass's last step.

    All chunks have been received before that step, unless it is the pass's only one.
    """
    chunks = max(1, len(offsets) - 1)
    return tuple(Send("sum", n, offsets[-1], index, chunks) for n in gathered if index < chunks)


def _sums_inside(
    route: Route, offsets: tuple[Offset, ...], index: int
) -> tuple[tuple[Send, ...], Offset | None]:
    """``(sends, adds_to)`` of a step's kernel.

    The sum of the previous step is sent on. The kernel adds to the sum of the step before that,
    which has been received. The local block's sum is not sent, and no other step adds to it.
    """
    sends, adds_to = (), None
    if index >= 1 and (start := offsets[index - 1]) != route.local:
        # If no further kernel of the pass adds to it, it is sent to where the pass's sums are added
        # up: to the pass's last step, or to its own device if there is only one pass.
        end = offsets[-1] if len(route.passes) > 1 else route.local
        sends = (Send("sum", start, offsets[index + 1] if index + 1 < len(offsets) else end),)
    if index >= 2 and offsets[index - 2] != route.local:
        adds_to = offsets[index - 2]
    return sends, adds_to


class Hops(NamedTuple):
    """How often a device sends each rotating array; a chunk of p chunks counts 1 / p.

    Attributes:
      blocks: number of times it sends a block, in the forward pass and in the backward pass.
      sums: number of times it sends a sum, in the backward pass.
      outer_blocks: of ``blocks``, those from pass to pass, over the outer axis of a two-level ring.
      outer_sums: of ``sums``, those from pass to pass.
    """

    blocks: int
    sums: int
    outer_blocks: int
    outer_sums: int

    @property
    def between_passes(self) -> Hops:
        """Those from pass to pass alone."""
        return self._replace(blocks=self.outer_blocks, sums=self.outer_sums)


@functools.lru_cache
def count_hops(route: Route) -> Hops:
    """The hops on a route."""
    sends = [send for step in backward_schedule(route) for send in step.sends]
    blocks, sums = ([send for send in sends if send.what == what] for what in ("block", "sum"))
    outer_blocks, outer_sums = ([x for x in group if x.is_outer] for group in (blocks, sums))
    return Hops(*map(_count, (blocks, sums, outer_blocks, outer_sums)))


def _count(sends: Iterable[Send]) -> int:
    """The number of whole blocks or sums, given all chunks of each."""
    return sum(send.chunk == send.chunks - 1 for send in sends)


def table(schedule: Schedule) -> str:
    """A schedule as text: a line per step, with what is sent while its kernel runs.

    A line that starts with "then" lists the sums that are added up after the step.
    """
    lines = []
    for step in schedule:
        name = _text(step.offset) + (f" {step.part}" if step.part in ("first", "second") else "")
        added = "" if step.adds_to is None else f" + sum {_text(step.adds_to)}"
        kernel = "" if step.part == "none" else f"kernel{added}"
        lines.append(f"{name:<13}{kernel:<21}{', '.join(map(str, step.sends))}".rstrip())
        if step.adds:
            added = " + ".join(f"sum {_text(name)}" for name in step.adds)
            lines.append(f"{'':<13}then {added}")
    return "\n".join(lines)


def _text(offset: Offset) -> str:
    return str(offset).replace(" ", "")
