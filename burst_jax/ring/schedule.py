"""What a ring does, as plain data: which kernel runs at which stop, and what is sent beside it.

A schedule is a tuple of steps, one for each stop of a route, in the order in which they run. Every
device runs the same steps. The executors (:mod:`burst_jax.ring.forward`,
:mod:`burst_jax.ring.backward`) only carry them out; byte counts and the planner read them. On four
devices, as :func:`table` prints it::

    (0,)         forward              block to (1,)
    (1,)         forward              block to (2,)
    (2,)         forward              block to (3,)
    (3,)         forward

In the backward one side travels (K and V, or the queries) and the other one stays, and both get a
gradient. The gradient of the side that stays never leaves its device: every kernel adds to it. The
gradient of the side that travels is a sum over all stops, and follows its block from stop to stop.
A sum has the name of the stop whose kernel added to it last. Two things keep every send beside a
kernel:

- What a block gets from its own device stays there, as the sum of stop (0,). The sum that travels
  begins at the second stop.
- The work at home is cut in two parts. The first part begins the ring, beside the block's first
  hop. The second part ends it, beside the last hop of the sum, which goes home.

Some backends have two kernels. One makes the gradient of the side that stays, beside the sum's hop.
The sum has landed when the other one begins, which makes the gradient of the side that travels, and
adds to it. Beside that kernel the block goes on::

    (0,) first   stays
                 travels              block to (1,)
    (1,)         stays
                 travels              block to (2,)
    (2,)         stays                sum (1,) to (2,)
                 travels + sum (1,)   block to (3,)
    (3,)         stays                sum (2,) to (3,)
                 travels + sum (2,)
    (0,) second                       sum (3,) to (0,)
                 stays
                 travels + sum (0,)
                 then sum (0,) + sum (3,)

Other backends have one kernel for both gradients. A sum that is sent beside it lands too late for
it. So a sum goes two stops at once: it leaves beside the kernel of the next stop, and the kernel of
the stop after that adds to it. Two sums are on their way, of the even stops and of the odd ones::

    (0,) first   both                 block to (1,)
    (1,)         both                 block to (2,)
    (2,)         both                 sum (1,) to (3,), block to (3,)
    (3,)         both + sum (1,)      sum (2,) to (0,)
    (0,) second  both + sum (0,)      sum (3,) to (0,)
                 then sum (0,) + sum (3,) + sum (2,)

On a ring of rings the block that begins the next turn is sent ahead in pieces, one beside every
step of this turn. What the devices of a turn have added to the sum is brought together at the
turn's last stop. From there it goes, in pieces too, to the last stop of the next turn. Of 2 x 3
devices::

    (0,0) first  both                 block to (1,0) 1/3, block to (0,1)
    (0,1)        both                 block to (1,0) 2/3, block to (0,2)
    (0,2)        both                 block to (1,0) 3/3, sum (0,1) to (0,2)
                 then sum (0,2) + sum (0,1)
    (1,0)        both                 sum (0,2) to (1,2) 1/2, block to (1,1)
    (1,1)        both                 sum (0,2) to (1,2) 2/2, sum (1,0) to (1,2), block to (1,2)
    (1,2)        both + sum (1,0)     sum (1,1) to (1,2)
                 then sum (1,2) + sum (0,2) + sum (1,1)
    (0,0) second both + sum (0,0)     sum (1,2) to (0,0)
                 then sum (0,0) + sum (1,2)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from burst_jax.ring.route import Route, Stop

Kernel = Literal["forward", "stays", "travels", "both"]
Part = Literal["whole", "first", "second"]


@dataclasses.dataclass(frozen=True)
class Send:
    """One hop: every device sends something that is at one stop to where it is at another stop.

    Attributes:
      what: "block", or "sum": the gradient sum whose name is ``start``.
      start: the stop that it leaves.
      end: the stop that it reaches.
      piece: which of the pieces it is, from 0.
      pieces: how many equal pieces the block or the sum is cut into; 1 sends it whole.
    """

    what: Literal["block", "sum"]
    start: Stop
    end: Stop
    piece: int = 0
    pieces: int = 1

    @property
    def crosses(self) -> bool:
        """Whether it goes from one turn to another, over the links of the outer axis."""
        return self.start[:-1] != self.end[:-1]

    def __str__(self) -> str:
        name = "block" if self.what == "block" else f"sum {_text(self.start)}"
        piece = f" {self.piece + 1}/{self.pieces}" if self.pieces > 1 else ""
        return f"{name} to {_text(self.end)}{piece}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, and what is sent while it runs.

    Attributes:
      kernel: "forward"; or by whose gradient it makes: of the side that "stays", of the side that
        "travels", or of "both".
      adds_to: the name of the sum here that the kernel adds to; None if it starts from zero, or
        makes no gradient of the side that travels.
      sends: what leaves beside this kernel, and has landed when the next one begins. It is there
        for the next kernel, not for this one.
    """

    kernel: Kernel
    adds_to: Stop | None = None
    sends: tuple[Send, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """All that happens while a block is at one stop.

    Attributes:
      stop: which one.
      part: "first" or "second" part of the work at home, where that is cut in two; else "whole".
      launches: the kernels in their order: one or two; none where the sum goes home beside nothing.
      sends: what leaves at the step's beginning, and has landed when the step is over, beside all
        of its kernels.
      adds: names of sums here that are added when the step is over. The first name is the result's.
    """

    stop: Stop
    part: Part
    launches: tuple[Launch, ...]
    sends: tuple[Send, ...] = ()
    adds: tuple[Stop, ...] = ()

    @property
    def all_sends(self) -> Iterator[Send]:
        """The step's own and those of its launches."""
        yield from self.sends
        for launch in self.launches:
            yield from launch.sends


Schedule = tuple[Step, ...]


@functools.lru_cache
def forward_schedule(route: Route) -> Schedule:
    """The forward: K and V visit all stops, and every kernel merges what it sees into out and lse.

    The first kernel starts the merged result, the last one finishes it.
    """
    steps = []
    for turn, following in _turns(route):
        for index, stop in enumerate(turn):
            launch = Launch("forward", sends=_block_onward(turn, index))
            steps.append(Step(stop, "whole", (launch,), _block_ahead(turn, following, index)))
    return tuple(steps)


@functools.lru_cache
def backward_schedule(route: Route, *, fused: bool, cuts_home: bool = True) -> Schedule:
    """The backward. What travels on ``route`` is a block and the sum of its gradients.

    After the last step the sum of ``route.home`` is the whole gradient of the side that travels.

    Args:
      route: the travelling side's.
      fused: whether one kernel makes both gradients, or there are two kernels.
      cuts_home: whether the work at home can be done in two parts. If not, it is done at once in
        the first step, and the sum goes home beside no kernel.
    """
    if len(route.stops) == 1:
        return (Step(route.home, "whole", _launches(fused)),)
    one_turn = len(route.turns) == 1
    steps: list[Step] = []
    gathered: tuple[Stop, ...] = ()  # The name of the sum of all turns so far, once there is one.
    left_over: tuple[Stop, ...] = ()
    for turn, following in _turns(route):
        left_over = _left_over(route, turn, fused)
        for index, stop in enumerate(turn):
            sums, adds_to = _sums_inside(route, turn, index, fused)
            launches = _launches(fused, adds_to, sums, _block_onward(turn, index))
            ahead = _block_ahead(turn, following, index) + _sum_ahead(turn, gathered, index)
            part: Part = "first" if stop == route.home and cuts_home else "whole"
            adds = left_over[:1] + gathered + left_over[1:]
            turn_is_over = index == len(turn) - 1 and not one_turn and len(adds) > 1
            steps.append(Step(stop, part, launches, ahead, adds if turn_is_over else ()))
        gathered = left_over[:1]
    launches = _launches(fused, adds_to=route.home) if cuts_home else ()
    homeward = Send("sum", route.stops[-1], route.home)
    adds = (route.home, *(left_over if one_turn else gathered))
    part = "second" if cuts_home else "whole"
    return (*steps, Step(route.home, part, launches, (homeward,), adds))


def step_name(direction: Literal["forward", "backward"], index: int) -> str:
    """What profiles and compiled programs call a step of a schedule; steps count from 0.

    Every operation of the step has the name in its path, the step's sends and kernels among them.
    """
    return f"ring_{direction}_step_{index}"


def _turns(route: Route) -> Iterator[tuple[tuple[Stop, ...], tuple[Stop, ...] | None]]:
    """Every turn beside the one that follows it."""
    return zip(route.turns, (*route.turns[1:], None), strict=True)


def _block_onward(turn: tuple[Stop, ...], index: int) -> tuple[Send, ...]:
    """The block's hop to the next stop of its turn."""
    return (Send("block", turn[index], turn[index + 1]),) if index < len(turn) - 1 else ()


def _block_ahead(
    turn: tuple[Stop, ...], following: tuple[Stop, ...] | None, index: int
) -> tuple[Send, ...]:
    """The piece of the block that goes to the first stop of the following turn."""
    if following is None:
        return ()
    return (Send("block", turn[0], following[0], index, len(turn)),)


def _sum_ahead(turn: tuple[Stop, ...], gathered: tuple[Stop, ...], index: int) -> tuple[Send, ...]:
    """The piece of the sum of all earlier turns, which goes ahead to this turn's last stop.

    All pieces have landed before the turn's last step, unless that is its only one.
    """
    pieces = max(1, len(turn) - 1)
    return tuple(Send("sum", name, turn[-1], index, pieces) for name in gathered if index < pieces)


def _distance(fused: bool) -> int:
    """How many stops a sum goes on, from the kernel that added to it to the next that does."""
    return 2 if fused else 1


def _sums_inside(
    route: Route, turn: tuple[Stop, ...], index: int, fused: bool
) -> tuple[tuple[Send, ...], Stop | None]:
    """``(sends, adds_to)`` of a step's kernel.

    The sum to which the step before has added is sent on. The kernel adds to a sum that has landed.
    What the kernel at home makes stays there: it is not sent, and no other stop adds to it.
    """
    distance = _distance(fused)
    sends, adds_to = (), None
    if index >= 1 and (start := turn[index - 1]) != route.home:
        # Where no further kernel of the turn adds to it, it goes to where the turn's sums are
        # brought together: to the turn's last stop, or home if this turn is the only one.
        end = turn[-1] if len(route.turns) > 1 else route.home
        if index - 1 + distance < len(turn):
            end = turn[index - 1 + distance]
        sends = (Send("sum", start, end),)
    if index >= distance and turn[index - distance] != route.home:
        adds_to = turn[index - distance]
    return sends, adds_to


def _left_over(route: Route, turn: tuple[Stop, ...], fused: bool) -> tuple[Stop, ...]:
    """The sums that no further kernel of the turn adds to, the last one first."""
    return tuple(stop for stop in turn[::-1][: _distance(fused)] if stop != route.home)


def _launches(
    fused: bool,
    adds_to: Stop | None = None,
    sums: tuple[Send, ...] = (),
    blocks: tuple[Send, ...] = (),
) -> tuple[Launch, ...]:
    """The kernels of one step.

    Where there are two, the sum is sent beside the first one, and the block beside the second one.
    """
    if fused:
        return (Launch("both", adds_to, sums + blocks),)
    return Launch("stays", None, sums), Launch("travels", adds_to, blocks)


class Hops(NamedTuple):
    """How often a device sends a travelling array; a piece of one of p pieces counts 1 / p.

    Attributes:
      blocks: times that it sends a block, in the forward and in the backward.
      sums: times that it sends a gradient sum, in the backward.
      outer_blocks: of ``blocks``, those from turn to turn, over the outer axis of a ring of rings.
      outer_sums: of ``sums``, those from turn to turn.
    """

    blocks: int
    sums: int
    outer_blocks: int
    outer_sums: int

    @property
    def between_turns(self) -> Hops:
        """Those from turn to turn alone."""
        return self._replace(blocks=self.outer_blocks, sums=self.outer_sums)


@functools.lru_cache
def count_hops(route: Route) -> Hops:
    """The hops on a route. They are the same with one and with two backward kernels."""
    sends = [send for step in backward_schedule(route, fused=True) for send in step.all_sends]
    blocks, sums = ([send for send in sends if send.what == what] for what in ("block", "sum"))
    outer_blocks, outer_sums = ([x for x in group if x.crosses] for group in (blocks, sums))
    return Hops(*map(_times, (blocks, sums, outer_blocks, outer_sums)))


def _times(sends: Iterable[Send]) -> int:
    """How many whole blocks or sums these are: all pieces of one are among them."""
    return sum(send.piece == send.pieces - 1 for send in sends)


def table(schedule: Schedule) -> str:
    """A schedule as text: a line for each kernel, and what is sent beside it.

    What is sent beside both kernels of a step has a line before the kernels. A line that begins
    with "then" has the sums that are added when the step is over.
    """
    lines = []
    for step in schedule:
        rows = [("", step.sends)] if step.sends else []
        for launch in step.launches:
            added = "" if launch.adds_to is None else f" + sum {_text(launch.adds_to)}"
            rows.append((f"{launch.kernel}{added}", launch.sends))
        if len(step.launches) == 1:
            rows = [(rows[-1][0], step.sends + rows[-1][1])]
        if step.adds:
            rows.append(("then " + " + ".join(f"sum {_text(stop)}" for stop in step.adds), ()))
        name = _text(step.stop) + ("" if step.part == "whole" else f" {step.part}")
        for row, (kernel, sends) in enumerate(rows):
            sent = ", ".join(map(str, sends))
            lines.append(f"{'' if row else name:<13}{kernel:<21}{sent}".rstrip())
    return "\n".join(lines)


def _text(stop: Stop) -> str:
    return str(stop).replace(" ", "")
