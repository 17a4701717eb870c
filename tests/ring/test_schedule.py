"""Schedules: the tables in the module's docstring, and what holds of every schedule."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from routes import route_of_passes

from burst_jax.layouts import Contiguous
from burst_jax.ring import schedule
from burst_jax.ring.route import RingMask, Route, make_route
from burst_jax.ring.schedule import backward_schedule, count_hops, forward_schedule, table
from pallas_kernels.mask import Mask

# Eight devices, a window of two shards before and one after: the block visits its own device, the
# next two, and (five devices on) the previous one. The steps between are skipped.
WINDOW = make_route(("seq",), RingMask((8,), Contiguous(), 16, 16, Mask(left=20, right=5)))
ROUTES = {
    **{str(n): route_of_passes(n) for n in (1, 2, 3, 4, 8)},
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
    "no-axis": make_route((), RingMask((), Contiguous(), 4, 4, Mask())),
}


@pytest.mark.parametrize(
    "made",
    [
        forward_schedule(ROUTES["4"]),
        backward_schedule(ROUTES["4"]),
        backward_schedule(ROUTES["2x3"]),
    ],
    ids=["forward", "backward", "two_levels"],
)
def test_the_tables_in_the_docstring(made):
    assert schedule.__doc__ is not None
    found, shown = (
        [line.strip() for line in text.splitlines()] for text in (table(made), schedule.__doc__)
    )
    assert "\n".join(found) in "\n".join(shown)


def run_backward(steps):
    """Runs the schedule: which steps' gradients are in the sum that is left, and where it is."""
    here, chunks = {}, {}  # Of each sum: the offset where it is, and what is in it; chunks sent.

    def take(name, offset):
        """A sum that has been received whole at this offset."""
        at, parts = here.pop(name)
        assert at == offset
        assert name not in chunks
        return parts

    def sums_of(sends):
        sends = [send for send in sends if send.what == "sum"]
        for send in sends:
            assert here[send.start][0] == send.start
            assert send.chunk == chunks.get(send.start, 0)
            chunks[send.start] = send.chunk + 1
        return sends

    def receive(sends):
        for send in sends:
            if send.chunk == send.chunks - 1:
                here[send.start] = send.end, here[send.start][1]
                del chunks[send.start]

    for step in steps:
        # It was received before the kernel starts, so it is not what is sent during the kernel.
        added = [] if step.adds_to is None else take(step.adds_to, step.offset)
        sums = sums_of(step.sends)
        if step.part != "none":
            assert step.offset not in here
            here[step.offset] = step.offset, [*added, (step.offset, step.part)]
        receive(sums)
        if step.adds:
            parts = [take(name, step.offset) for name in step.adds]
            here[step.adds[0]] = step.offset, list(itertools.chain(*parts))
    assert not chunks
    ((name, (at, parts)),) = here.items()
    assert name == at
    return at, parts


def check_blocks(route, steps):
    """Every step's block has been received whole before the step, and before it is sent on."""
    received, chunks = {route.local}, {}
    for step in steps:
        assert step.offset in received
        for send in step.sends:
            if send.what == "block":
                assert send.chunk == chunks.get(send.end, 0)
                assert send.chunk > 0 or send.start == step.offset
                chunks[send.end] = send.chunk + 1
                if chunks[send.end] == send.chunks:
                    received.add(send.end)
    assert received == set(route.offsets)


@pytest.mark.parametrize("splits_local", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("name", ROUTES)
def test_every_gradient_is_returned_once(name, splits_local):
    """A kernel adds to received sums only, and no step's gradient is lost or added twice."""
    route = ROUTES[name]
    steps = backward_schedule(route, splits_local=splits_local)
    check_blocks(route, steps)
    at, found = run_backward(steps)
    assert at == route.local
    local = [(route.local, "whole")]
    if splits_local and len(route.offsets) > 1:
        local = [(route.local, "first"), (route.local, "second")]
    assert sorted(found) == sorted([*local, *((offset, "whole") for offset in route.offsets[1:])])


@pytest.mark.parametrize("name", ROUTES)
def test_every_block_and_sum_makes_the_hops(name):
    """And a block is sent to a new step each time."""
    route, hops = ROUTES[name], count_hops(ROUTES[name])
    check_blocks(route, forward_schedule(route))
    steps, passes = len(route.offsets), len(route.passes)
    assert (hops.blocks, hops.sums, hops.outer_blocks) == (steps - 1, steps - 1, passes - 1)
    back = [] if steps == 1 else [route.local]
    for found, end, sums_sent in (
        (forward_schedule(route), [], (0, 0)),
        (backward_schedule(route), back, (hops.sums, hops.outer_sums)),
    ):
        assert [step.offset for step in found] == [*route.offsets, *end]
        assert all(not step.adds or step.adds[0] == step.offset for step in found)
        sends = [send for step in found for send in step.sends]
        blocks, sums = ([send for send in sends if send.what == what] for what in ("block", "sum"))
        counts = [
            sum(Fraction(1, send.chunks) for send in some)
            for group in (blocks, sums)
            for some in (group, [send for send in group if send.is_outer])
        ]
        assert counts == [hops.blocks, hops.outer_blocks, *sums_sent]
        assert {send.end for send in blocks} == set(route.offsets[1:])
