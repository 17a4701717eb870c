"""Schedules of four and of six devices, written out, and what must hold of every schedule.

A stop says how far a block has come from the device it started on. A line of a table is a kernel;
on its right is what every device sends while that kernel runs. "sum (1,)" is the sum of gradients
that the kernel at stop (1,) added to last; "+ sum (1,)" says that this kernel adds to it.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from routes import route_of_turns

from burst_jax.ring import schedule
from burst_jax.ring.route import RingMask, Route, make_route
from burst_jax.ring.schedule import backward_schedule, count_hops, forward_schedule, table
from pallas_kernels.mask import Mask

# Eight devices, a window of two shards before and one after: the block visits the device itself,
# the next two, and (five devices on) the one before. The stops between are left out.
WINDOW = make_route(("seq",), RingMask((8,), "contiguous", 16, 16, Mask(left=20, right=5)))
ROUTES = {
    "1": route_of_turns(1),
    "2": route_of_turns(2),
    "3": route_of_turns(3),
    "4": route_of_turns(4),
    "8": route_of_turns(8),
    "1x4": Route(("outer", "inner"), (1, 4), (((0, 0), (0, 1), (0, 2), (0, 3)),)),
    "2x2": route_of_turns(2, 2),
    "2x3": route_of_turns(3, 3),
    "3x2": route_of_turns(2, 2, 2),
    "4x1": route_of_turns(1, 1, 1, 1),
    "window": WINDOW,
    "uneven": Route(  # Two levels with stops left out: the turns have 1, 4, 1 and 2 stops.
        ("outer", "inner"),
        (4, 4),
        (((0, 0),), ((1, 0), (1, 1), (1, 2), (1, 3)), ((2, 3),), ((3, 1), (3, 3))),
    ),
    "no-axis": make_route((), RingMask((), "contiguous", 4, 4, Mask())),
}
KINDS = pytest.mark.parametrize("fused", [False, True], ids=["two_kernels", "one_kernel"])


def lines(text):
    """A table without the indent and the empty lines of a test."""
    return [line.strip() for line in text.strip().splitlines()]


def same(found, wanted):
    assert [line.split() for line in lines(table(found))] == [x.split() for x in lines(wanted)]


def test_forward_of_four_devices():
    """Beside every kernel but the last the block goes on."""
    same(
        forward_schedule(ROUTES["4"]),
        """
        (0,)         forward              block to (1,)
        (1,)         forward              block to (2,)
        (2,)         forward              block to (3,)
        (3,)         forward
        """,
    )


def test_backward_of_four_devices_with_two_kernels():
    """One kernel for the side that stays, beside the sum; one for the other side, beside the block.

    The sum that is sent beside "stays" has landed when "travels" begins, which adds to it.
    """
    same(
        backward_schedule(ROUTES["4"], fused=False),
        """
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
        """,
    )


def test_backward_of_four_devices_with_one_kernel():
    """The sum of stop 1 leaves beside the kernel of stop 2, and the kernel of stop 3 adds to it."""
    same(
        backward_schedule(ROUTES["4"], fused=True),
        """
        (0,) first   both                 block to (1,)
        (1,)         both                 block to (2,)
        (2,)         both                 sum (1,) to (3,), block to (3,)
        (3,)         both + sum (1,)      sum (2,) to (0,)
        (0,) second  both + sum (0,)      sum (3,) to (0,)
                     then sum (0,) + sum (3,) + sum (2,)
        """,
    )


def test_one_row_of_four_is_a_ring_of_four():
    """One host of four: the same table, with a place on the outer axis that is always 0."""
    for fused in (False, True):
        flat = table(backward_schedule(ROUTES["4"], fused=fused))
        row = table(backward_schedule(ROUTES["1x4"], fused=fused)).replace("(0,", "(")
        assert row.replace(")", ",)").split() == flat.split()


def test_forward_of_two_hosts_of_three():
    """The block of the second turn goes ahead in thirds, beside the kernels of the first turn."""
    same(
        forward_schedule(ROUTES["2x3"]),
        """
        (0,0)        forward              block to (1,0) 1/3, block to (0,1)
        (0,1)        forward              block to (1,0) 2/3, block to (0,2)
        (0,2)        forward              block to (1,0) 3/3
        (1,0)        forward              block to (1,1)
        (1,1)        forward              block to (1,2)
        (1,2)        forward
        """,
    )


def test_backward_of_two_hosts_of_three_with_two_kernels():
    """The sum of a whole turn goes on in halves, and is added at the next turn's last stop."""
    same(
        backward_schedule(ROUTES["2x3"], fused=False),
        """
        (0,0) first                       block to (1,0) 1/3
                     stays
                     travels              block to (0,1)
        (0,1)                             block to (1,0) 2/3
                     stays
                     travels              block to (0,2)
        (0,2)                             block to (1,0) 3/3
                     stays                sum (0,1) to (0,2)
                     travels + sum (0,1)
        (1,0)                             sum (0,2) to (1,2) 1/2
                     stays
                     travels              block to (1,1)
        (1,1)                             sum (0,2) to (1,2) 2/2
                     stays                sum (1,0) to (1,1)
                     travels + sum (1,0)  block to (1,2)
        (1,2)        stays                sum (1,1) to (1,2)
                     travels + sum (1,1)
                     then sum (1,2) + sum (0,2)
        (0,0) second                      sum (1,2) to (0,0)
                     stays
                     travels + sum (0,0)
                     then sum (0,0) + sum (1,2)
        """,
    )


def test_backward_of_two_hosts_of_three_with_one_kernel():
    """Sums that no kernel of the turn adds to any more wait at the turn's last stop."""
    same(
        backward_schedule(ROUTES["2x3"], fused=True),
        """
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
        """,
    )


def test_stops_that_a_window_leaves_out():
    """The block goes from stop 2 to stop 7 by one hop, and so does the sum of stop 2."""
    assert WINDOW.stops == ((0,), (1,), (2,), (7,))
    same(
        backward_schedule(WINDOW, fused=False),
        """
        (0,) first   stays
                     travels              block to (1,)
        (1,)         stays
                     travels              block to (2,)
        (2,)         stays                sum (1,) to (2,)
                     travels + sum (1,)   block to (7,)
        (7,)         stays                sum (2,) to (7,)
                     travels + sum (2,)
        (0,) second                       sum (7,) to (0,)
                     stays
                     travels + sum (0,)
                     then sum (0,) + sum (7,)
        """,
    )
    same(
        backward_schedule(WINDOW, fused=True),
        """
        (0,) first   both                 block to (1,)
        (1,)         both                 block to (2,)
        (2,)         both                 sum (1,) to (7,), block to (7,)
        (7,)         both + sum (1,)      sum (2,) to (0,)
        (0,) second  both + sum (0,)      sum (7,) to (0,)
                     then sum (0,) + sum (7,) + sum (2,)
        """,
    )


def test_two_levels_with_stops_left_out():
    """A turn of one stop sends the block, or the sum, ahead as a whole."""
    same(
        backward_schedule(ROUTES["uneven"], fused=True),
        """
        (0,0) first  both                 block to (1,0)
        (1,0)        both                 block to (2,3) 1/4, block to (1,1)
        (1,1)        both                 block to (2,3) 2/4, sum (1,0) to (1,2), block to (1,2)
        (1,2)        both + sum (1,0)     block to (2,3) 3/4, sum (1,1) to (1,3), block to (1,3)
        (1,3)        both + sum (1,1)     block to (2,3) 4/4, sum (1,2) to (1,3)
                     then sum (1,3) + sum (1,2)
        (2,3)        both                 block to (3,1), sum (1,3) to (2,3)
                     then sum (2,3) + sum (1,3)
        (3,1)        both                 sum (2,3) to (3,3), block to (3,3)
        (3,3)        both                 sum (3,1) to (3,3)
                     then sum (3,3) + sum (2,3) + sum (3,1)
        (0,0) second both + sum (0,0)     sum (3,3) to (0,0)
                     then sum (0,0) + sum (3,3)
        """,
    )


@pytest.mark.parametrize("route", ["1", "no-axis"])
def test_one_device_sends_nothing(route):
    stop = ROUTES[route].home
    same(forward_schedule(ROUTES[route]), f"{stop} forward")
    same(backward_schedule(ROUTES[route], fused=True), f"{stop} both")
    same(backward_schedule(ROUTES[route], fused=False), f"{stop} stays\ntravels")


def test_work_at_home_that_cannot_be_cut():
    """It is done at once, and the sum goes home beside nothing."""
    same(
        backward_schedule(ROUTES["2"], fused=True, cuts_home=False),
        """
        (0,)         both                 block to (1,)
        (1,)         both
        (0,)                              sum (1,) to (0,)
                     then sum (0,) + sum (1,)
        """,
    )


@pytest.mark.parametrize(
    ("route", "made"),
    [
        ("4", lambda route: forward_schedule(route)),
        ("4", lambda route: backward_schedule(route, fused=False)),
        ("4", lambda route: backward_schedule(route, fused=True)),
        ("2x3", lambda route: backward_schedule(route, fused=True)),
    ],
    ids=["forward", "two_kernels", "one_kernel", "two_levels"],
)
def test_the_tables_in_the_docstring(route, made):
    assert schedule.__doc__ is not None
    shown = "\n".join(line.strip() for line in schedule.__doc__.splitlines())
    assert "\n".join(lines(table(made(ROUTES[route])))) in shown


class Sums:
    """The gradient sums while a schedule runs: ``{name: (stop where it is, what is in it)}``."""

    def __init__(self):
        self.here, self.pieces = {}, {}

    def made(self, name, parts):
        assert name not in self.here
        self.here[name] = name, parts

    def take(self, name, stop):
        """A sum that has landed at this stop, all of it."""
        at, parts = self.here.pop(name)
        assert at == stop
        assert name not in self.pieces
        return parts

    def leave(self, send):
        assert self.here[send.start][0] == send.start
        assert send.piece == self.pieces.get(send.start, 0)
        self.pieces[send.start] = send.piece + 1

    def land(self, send):
        if send.piece == send.pieces - 1:
            self.here[send.start] = send.end, self.here[send.start][1]
            del self.pieces[send.start]


def run_backward(steps):
    """Carries the schedule out: which stops' gradients are in the sum that is left, and where."""
    sums = Sums()
    for step in steps:
        step_sums = [send for send in step.sends if send.what == "sum"]
        for send in step_sums:
            sums.leave(send)
        for launch in step.launches:
            launch_sums = [send for send in launch.sends if send.what == "sum"]
            # It has landed before the kernel begins, so it is not what is sent beside the kernel.
            added = [] if launch.adds_to is None else sums.take(launch.adds_to, step.stop)
            for send in launch_sums:
                sums.leave(send)
            if launch.kernel == "stays":
                assert not added
            else:
                sums.made(step.stop, [*added, (step.stop, step.part)])
            for send in launch_sums:
                sums.land(send)
        for send in step_sums:
            sums.land(send)
        if step.adds:
            parts = [sums.take(name, step.stop) for name in step.adds]
            sums.here[step.adds[0]] = step.stop, list(itertools.chain(*parts))
    assert not sums.pieces
    ((name, (at, parts)),) = sums.here.items()
    assert name == at
    return at, parts


def check_blocks(route, steps):
    """Every step's block has landed before the step begins, and is whole before it is sent on."""
    landed, pieces = {route.home}, {}
    for step in steps:
        assert step.stop in landed
        for send in step.all_sends:
            if send.what == "block":
                assert send.piece == pieces.get(send.end, 0)
                assert send.piece > 0 or send.start == step.stop
                pieces[send.end] = send.piece + 1
                if pieces[send.end] == send.pieces:
                    landed.add(send.end)
    assert landed == set(route.stops)


@KINDS
@pytest.mark.parametrize("cuts_home", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("name", ROUTES)
def test_every_gradient_comes_home_once(name, cuts_home, fused):
    """What a kernel adds to has landed by then, and no stop's gradient is lost or added twice."""
    route = ROUTES[name]
    steps = backward_schedule(route, fused=fused, cuts_home=cuts_home)
    check_blocks(route, steps)
    at, found = run_backward(steps)
    assert at == route.home
    home = [(route.home, "whole")]
    if cuts_home and len(route.stops) > 1:
        home = [(route.home, "first"), (route.home, "second")]
    assert sorted(found) == sorted([*home, *((stop, "whole") for stop in route.stops[1:])])


@pytest.mark.parametrize("name", ROUTES)
def test_every_step_has_its_kernels(name):
    """So whatever is sent lies beside one, and what a step brings together is of that step."""
    route = ROUTES[name]
    check_blocks(route, forward_schedule(route))
    for steps, kernels in (
        (forward_schedule(route), ["forward"]),
        (backward_schedule(route, fused=False), ["stays", "travels"]),
        (backward_schedule(route, fused=True), ["both"]),
    ):
        stops = list(route.stops)
        if len(stops) > 1 and kernels != ["forward"]:
            stops.append(route.home)
        assert [step.stop for step in steps] == stops
        for step in steps:
            assert [launch.kernel for launch in step.launches] == kernels
            assert not step.adds or step.adds[0] == step.stop


@pytest.mark.parametrize("name", ROUTES)
def test_hops_are_the_same_for_all_backends(name):
    """And a block goes as often forward as backward, each time to a stop that it has not seen."""
    route, hops = ROUTES[name], count_hops(ROUTES[name])
    stops, turns = len(route.stops), len(route.turns)
    assert (hops.blocks, hops.sums, hops.outer_blocks) == (stops - 1, stops - 1, turns - 1)
    for steps in (
        forward_schedule(route),
        backward_schedule(route, fused=False),
        backward_schedule(route, fused=True),
    ):
        sends = [send for step in steps for send in step.all_sends]
        for what, count, outer in (
            ("block", hops.blocks, hops.outer_blocks),
            ("sum", hops.sums, hops.outer_sums),
        ):
            if what == "sum" and steps[0].launches[0].kernel == "forward":
                continue
            some = [send for send in sends if send.what == what]
            assert sum(Fraction(1, send.pieces) for send in some) == count
            assert sum(Fraction(1, send.pieces) for send in some if send.crosses) == outer
        reached = {send.end for send in sends if send.what == "block"}
        assert reached == set(route.stops[1:])
