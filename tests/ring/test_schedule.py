"""Schedules written out, here and in the module's docstring, and what holds of every schedule.

A line of a table is a kernel; on its right is what every device sends while that kernel runs. "sum
(1,)" is the partial gradient that the kernel of step (1,) added to last; with "+ sum (1,)" this
kernel adds to it.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from routes import route_of_passes

from burst_jax.ring import schedule
from burst_jax.ring.route import RingMask, Route, make_route
from burst_jax.ring.schedule import backward_schedule, count_hops, forward_schedule, table
from pallas_kernels.mask import Mask

# Eight devices, a window of two shards before and one after: the block visits its own device, the
# next two, and (five devices on) the previous one. The steps between are skipped.
WINDOW = make_route(("seq",), RingMask((8,), "contiguous", 16, 16, Mask(left=20, right=5)))
ROUTES = {
    "1": route_of_passes(1),
    "2": route_of_passes(2),
    "3": route_of_passes(3),
    "4": route_of_passes(4),
    "8": route_of_passes(8),
    "1x4": Route(("outer", "inner"), (1, 4), (((0, 0), (0, 1), (0, 2), (0, 3)),)),
    "2x2": route_of_passes(2, 2),
    "2x3": route_of_passes(3, 3),
    "3x2": route_of_passes(2, 2, 2),
    "4x1": route_of_passes(1, 1, 1, 1),
    "window": WINDOW,
    "uneven": Route(  # Two levels with skipped steps: the passes have 1, 4, 1 and 2 steps.
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


def test_backward_of_two_hosts_of_three_with_two_kernels():
    """The sum of a whole pass is sent in halves, and added at the next pass's last step."""
    same(
        backward_schedule(ROUTES["2x3"], fused=False),
        """
        (0,0) first                       block to (1,0) 1/3
                     stationary
                     rotating             block to (0,1)
        (0,1)                             block to (1,0) 2/3
                     stationary
                     rotating             block to (0,2)
        (0,2)                             block to (1,0) 3/3
                     stationary             sum (0,1) to (0,2)
                     rotating + sum (0,1)
        (1,0)                             sum (0,2) to (1,2) 1/2
                     stationary
                     rotating             block to (1,1)
        (1,1)                             sum (0,2) to (1,2) 2/2
                     stationary             sum (1,0) to (1,1)
                     rotating + sum (1,0)  block to (1,2)
        (1,2)        stationary             sum (1,1) to (1,2)
                     rotating + sum (1,1)
                     then sum (1,2) + sum (0,2)
        (0,0) second                      sum (1,2) to (0,0)
                     stationary
                     rotating + sum (0,0)
                     then sum (0,0) + sum (1,2)
        """,
    )


def test_steps_that_a_window_skips():
    """One hop sends the block from step 2 to step 7, and one the sum of step 2."""
    assert WINDOW.offsets == ((0,), (1,), (2,), (7,))
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


def test_two_levels_with_skipped_steps():
    """A pass of one step sends the block, or the sum, whole."""
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
    offset = ROUTES[route].local
    same(forward_schedule(ROUTES[route]), f"{offset} forward")
    same(backward_schedule(ROUTES[route], fused=True), f"{offset} both")
    same(backward_schedule(ROUTES[route], fused=False), f"{offset} stationary\nrotating")


def test_local_work_that_cannot_be_split():
    """It is done at once, and the final send of the sum overlaps with nothing."""
    same(
        backward_schedule(ROUTES["2"], fused=True, splits_local=False),
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
    """The sums while a schedule runs: ``{name: (offset where it is, what is in it)}``."""

    def __init__(self):
        self.here, self.chunks = {}, {}

    def made(self, name, parts):
        assert name not in self.here
        self.here[name] = name, parts

    def take(self, name, offset):
        """A sum that has been received whole at this offset."""
        at, parts = self.here.pop(name)
        assert at == offset
        assert name not in self.chunks
        return parts

    def send(self, send):
        assert self.here[send.start][0] == send.start
        assert send.chunk == self.chunks.get(send.start, 0)
        self.chunks[send.start] = send.chunk + 1

    def receive(self, send):
        if send.chunk == send.chunks - 1:
            self.here[send.start] = send.end, self.here[send.start][1]
            del self.chunks[send.start]


def run_backward(steps):
    """Runs the schedule: which steps' gradients are in the sum that is left, and where it is."""
    sums = Sums()
    for step in steps:
        step_sums = [send for send in step.sends if send.what == "sum"]
        for send in step_sums:
            sums.send(send)
        for launch in step.launches:
            launch_sums = [send for send in launch.sends if send.what == "sum"]
            # It was received before the kernel starts, so it is not what is sent during the kernel.
            added = [] if launch.adds_to is None else sums.take(launch.adds_to, step.offset)
            for send in launch_sums:
                sums.send(send)
            if launch.kernel == "stationary":
                assert not added
            else:
                sums.made(step.offset, [*added, (step.offset, step.part)])
            for send in launch_sums:
                sums.receive(send)
        for send in step_sums:
            sums.receive(send)
        if step.adds:
            parts = [sums.take(name, step.offset) for name in step.adds]
            sums.here[step.adds[0]] = step.offset, list(itertools.chain(*parts))
    assert not sums.chunks
    ((name, (at, parts)),) = sums.here.items()
    assert name == at
    return at, parts


def check_blocks(route, steps):
    """Every step's block has been received whole before the step, and before it is sent on."""
    received, chunks = {route.local}, {}
    for step in steps:
        assert step.offset in received
        for send in step.all_sends:
            if send.what == "block":
                assert send.chunk == chunks.get(send.end, 0)
                assert send.chunk > 0 or send.start == step.offset
                chunks[send.end] = send.chunk + 1
                if chunks[send.end] == send.chunks:
                    received.add(send.end)
    assert received == set(route.offsets)


@KINDS
@pytest.mark.parametrize("splits_local", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("name", ROUTES)
def test_every_gradient_is_returned_once(name, splits_local, fused):
    """A kernel adds to received sums only, and no step's gradient is lost or added twice."""
    route = ROUTES[name]
    steps = backward_schedule(route, fused=fused, splits_local=splits_local)
    check_blocks(route, steps)
    at, found = run_backward(steps)
    assert at == route.local
    local = [(route.local, "whole")]
    if splits_local and len(route.offsets) > 1:
        local = [(route.local, "first"), (route.local, "second")]
    assert sorted(found) == sorted([*local, *((offset, "whole") for offset in route.offsets[1:])])


@pytest.mark.parametrize("name", ROUTES)
def test_every_step_has_its_kernels(name):
    """So every send overlaps with one, and the sums of a step are added up under its name."""
    route = ROUTES[name]
    check_blocks(route, forward_schedule(route))
    for steps, kernels in (
        (forward_schedule(route), ["forward"]),
        (backward_schedule(route, fused=False), ["stationary", "rotating"]),
        (backward_schedule(route, fused=True), ["both"]),
    ):
        offsets = list(route.offsets)
        if len(offsets) > 1 and kernels != ["forward"]:
            offsets.append(route.local)
        assert [step.offset for step in steps] == offsets
        for step in steps:
            assert [launch.kernel for launch in step.launches] == kernels
            assert not step.adds or step.adds[0] == step.offset


@pytest.mark.parametrize("name", ROUTES)
def test_hops_are_the_same_for_all_backends(name):
    """A block is sent as often forward as backward, each time to a new step."""
    route, hops = ROUTES[name], count_hops(ROUTES[name])
    steps, passes = len(route.offsets), len(route.passes)
    assert (hops.blocks, hops.sums, hops.outer_blocks) == (steps - 1, steps - 1, passes - 1)
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
            assert sum(Fraction(1, send.chunks) for send in some) == count
            assert sum(Fraction(1, send.chunks) for send in some if send.is_outer) == outer
        reached = {send.end for send in sends if send.what == "block"}
        assert reached == set(route.offsets[1:])
