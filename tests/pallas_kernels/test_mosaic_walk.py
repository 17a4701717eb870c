"""What a Hopper kernel's programs visit, on a CPU: items of work, and the tiles of each."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest

from burst_jax import positions
from pallas_kernels import Mask, Tiles, query_bounds
from pallas_kernels.pallas_mosaic import items as mosaic_items
from pallas_kernels.pallas_mosaic.items import Items, each_item
from pallas_kernels.pallas_mosaic.walk import Walk

# --- the walk over one item's tiles --------------------------------------------------------------


def steps_of(table, rotate=None, last=None):
    """``(tiles of the masked steps, tiles of the others)`` of one row of bounds, in order."""
    last = 99 if last is None else last
    zero = jnp.int32(0)
    walk = Walk(jnp.asarray([[table]], jnp.int32), zero, zero, zero, last, rotate)
    tiles = [int(walk.tile(jnp.int32(step))) for step in range(int(walk.total))]
    return tiles[: int(walk.masked)], tiles[int(walk.masked) :]


def rows_of_bounds():
    return itertools.combinations_with_replacement(range(5), 4)


@pytest.mark.parametrize("rotate", [None, 0, 1, 3, 7])
def test_every_tile_inside_the_bounds_is_visited_once(rotate):
    rotate = None if rotate is None else jnp.int32(rotate)
    for first, full_first, full_end, end in rows_of_bounds():
        masked, full = steps_of((first, full_first, full_end, end), rotate)
        assert masked == [*range(first, full_first), *range(full_end, end)]
        assert sorted(full) == list(range(full_first, full_end))
        if full:
            start = full_first + (0 if rotate is None else int(rotate) % len(full))
            assert full == [*range(start, full_end), *range(full_first, start)]


def test_steps_behind_the_last_are_tiles_that_exist():
    """Copies are started ahead: what no step needs may be any tile, but not beyond the array."""
    for table in ((0, 0, 0, 0), (0, 1, 2, 3), (2, 2, 3, 3)):
        zero = jnp.int32(0)
        walk = Walk(jnp.asarray([[table]], jnp.int32), zero, zero, zero, last=2)
        for step in range(8):
            assert 0 <= int(walk.tile(jnp.int32(step))) <= 2


@pytest.mark.parametrize("rotate", [None, 0, 1, 3])
def test_every_listed_tile_is_visited_once(rotate):
    """Of its own row of the batch, head and tile; behind them any tile that exists."""
    tiles = np.array([3, 1, 4, 0, 2])
    lists = np.full((2, 3, 2, 7), 99, np.int32)
    for masked, total in itertools.combinations_with_replacement(range(6), 2):
        lists[1, 2, 1] = [masked, total, *tiles]
        turn = None if rotate is None else jnp.int32(rotate)
        walk = Walk(jnp.asarray(lists), *map(jnp.int32, (1, 2, 1)), last=4, rotate=turn)
        steps = [int(walk.tile(jnp.int32(step))) for step in range(7)]
        full, begin = tiles[masked:total], (rotate or 0) % max(1, total - masked)
        assert steps[:total] == [*tiles[:masked], *np.roll(full, -begin)]
        assert set(steps) <= set(range(5))


def test_a_walk_reads_its_own_row_of_the_table():
    tables = jnp.arange(2 * 3 * 4, dtype=jnp.int32).reshape(2, 3, 4)
    for batch, tile in itertools.product(range(2), range(3)):
        walk = Walk(tables, jnp.int32(batch), jnp.int32(0), jnp.int32(tile), last=99)
        assert int(walk.tile(jnp.int32(0))) == 4 * (3 * batch + tile)
    shared = Walk(
        tables[:1], jnp.int32(1), jnp.int32(0), jnp.int32(2), last=99
    )  # one row of tables for all
    assert int(shared.tile(jnp.int32(0))) == 8


# --- items, taken by several programs ------------------------------------------------------------


class Tickets:
    """In a TicketCounter's place: the tickets that one program draws, in order."""

    def __init__(self, numbers):
        self.numbers, self.drawn, self.read_by = numbers, 0, 0
        self.offered = self.awaited = 0

    def offer_slots(self, draws):
        del draws
        self.offered += 1

    def await_last_reads(self):
        self.awaited += 1

    def draw(self, slot):
        assert int(slot) == self.drawn % mosaic_items.SLOTS
        self.drawn += 1

    def read(self, slot, draws):
        assert int(slot) == self.read_by % mosaic_items.SLOTS
        assert not draws or self.read_by < self.drawn
        self.read_by += 1
        return jnp.int32(self.numbers[self.read_by - 1])


def draw(items, rng):
    """Numbers from one counter, drawn by programs in a random order until all have come to an end.

    A program ends when its number is that of no item: the first ``programs`` are given out already.
    """
    numbers = {program: [] for program in range(items.programs)}
    alive, counter = set(numbers), itertools.count()
    while alive:
        program = int(rng.choice(sorted(alive)))
        numbers[program].append(next(counter))
        if items.programs + numbers[program][-1] >= items.count:
            alive.remove(program)
    return numbers


@pytest.fixture
def run_programs(monkeypatch):
    """``run(items, tables, leave_empty, ...)``: what all programs visit and leave out, in order.

    Loops and conditions run as Python's (``jax.disable_jit``), so that a visit can be written down.
    """
    monkeypatch.setattr(mosaic_items, "multiprocessors", lambda: 3)

    def run(items, tables, *, leave_empty, steps_per_tile=1, draws=True, seed=0, rank=0):
        visited, empty = [], []
        numbers = draw(items, np.random.default_rng(seed))
        for program in range(items.programs):
            places = {"programs": program, "cluster": rank}
            monkeypatch.setattr(jax.lax, "axis_index", lambda name, p=places: jnp.int32(p[name]))
            tickets, steps_before = Tickets(numbers[program]), 0
            in_its_place: Any = tickets

            def write(into, item, program=program):
                nonlocal steps_before
                place = tuple(int(x) for x in (item.batch_row, item.head, item.tile))
                assert place == tuple(int(x) for x in item.recompute_place())
                assert int(item.steps_before) == steps_before
                steps_before += int(item.steps)
                into.append((program, place, int(item.steps), int(item.walk.total)))

            with jax.disable_jit():
                steps = each_item(
                    items,
                    in_its_place,
                    lambda batch_row, head, tile: Walk(tables, batch_row, head, tile, last=99),
                    functools.partial(write, visited),
                    draws=draws,
                    steps_per_tile=steps_per_tile,
                    leave_empty=leave_empty,
                    empty=functools.partial(write, empty),
                )
            assert int(steps) == steps_before
            looped, clusters = not items.one_each, items.cluster > 1
            assert tickets.read_by == looped * len(numbers[program])
            assert tickets.drawn == (looped and draws) * len(numbers[program])
            # All warpgroups of a cluster wait for tickets.
            assert tickets.offered == (looped and (clusters or not draws))
            assert tickets.awaited == (looped and clusters and draws)
        return visited, empty

    return run


def some_tables(batch, tiles):
    """Bounds of which every third tile's are empty."""
    rng = np.random.default_rng(batch)
    tables = np.sort(rng.integers(0, 5, (batch, tiles, 4)), axis=-1)
    tables[:, ::3] = 0
    return jnp.asarray(tables, jnp.int32)


@pytest.mark.parametrize("equal", [False, True], ids=["tickets", "equal"])
@pytest.mark.parametrize("tiles", [1, 5], ids=["one_each", "several"])
def test_programs_of_a_cluster_take_neighbouring_tiles(run_programs, tiles, equal):
    """And the same steps, in the same order."""
    items = Items(1, 1 if tiles == 1 else 2, tiles, True, 1, equal=equal, cluster=2)
    assert items.programs == 1  # of three multiprocessors
    tables = some_tables(1, tiles)
    (first, none), (second, no_more) = (
        run_programs(items, tables, leave_empty=False, rank=rank) for rank in range(2)
    )
    assert not none + no_more
    assert {place for _, place, *_ in first + second} == set(
        itertools.product(range(1), range(items.heads), range(2 * tiles))
    )
    for (*_, (row, head, tile), steps, total), other in zip(first, second, strict=True):
        assert other[1:] == ((row, head, tile + 1), steps, total)
        assert tile % 2 == 0


@pytest.mark.parametrize("leave_empty", [False, True], ids=["visit_empty", "leave_empty"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 4), {"last_first": True}),
        ((1, 2, 5), {"last_first": False, "equal": True}),
        ((1, 2, 1), {"last_first": True}),  # an item for each program: no loop
        ((2, 2, 3), {"last_first": True, "looped": False}),
    ],
    ids=["sections", "equal", "one_each", "unlooped"],
)
def test_programs_visit_every_item_once(run_programs, shape, options, leave_empty):
    batch, heads, tiles = shape
    items = Items(*shape, shared_bytes=8 * 2**20, **options)
    tables = some_tables(batch, tiles)
    totals = np.asarray(tables[..., 3] - tables[..., 0])
    assert totals.any() == (tiles > 1)  # some have tiles to visit
    assert not totals.all()  # others do not
    everything = set(itertools.product(range(batch), range(heads), range(tiles)))
    for seed, draws in ((0, True), (1, False)):
        visited, empty = run_programs(
            items, tables, leave_empty=leave_empty, steps_per_tile=2, draws=draws, seed=seed
        )
        places = [place for _, place, *_ in visited + empty]
        assert collections.Counter(places) == collections.Counter(everything)
        for _, (row, _, tile), steps, total in visited + empty:
            assert total == totals[row, tile]
            assert steps == 2 * (total if leave_empty else max(total, 1))
        left_out = {place for _, place, *_ in empty}
        nothing = {place for place in everything if not totals[place[0], place[2]]}
        assert left_out == (nothing if leave_empty else set())
        assert len({program for program, *_ in visited + empty}) == items.programs


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_causal_kernel_walks_every_tile_that_has_a_score(run_programs, layout):
    """From the tables that it really gets to the tiles that its programs come to."""
    n, length, tiles = 3, 24, Tiles(8, 4)
    at = positions(layout, n * length, n).reshape(n, length)
    q_tokens, kv_tokens = (local.tokens(jnp.asarray(at[shard], jnp.int32)) for shard in (1, 0))
    tables = query_bounds(Mask(right=0), q_tokens, kv_tokens, tiles)
    keep = (at[1][:, None] >= at[0][None, :]).reshape(3, 8, 6, 4)
    items = Items(1, 2, 3, last_first=True, shared_bytes=2**20)
    visited, _ = run_programs(items, tables, leave_empty=True)
    seen = np.zeros((2, 3, 6), int)
    for _, (_, head, tile), steps, _ in visited:
        walk = Walk(tables, jnp.int32(0), jnp.int32(0), jnp.int32(tile), last=5)
        for step in range(steps):
            place = int(walk.tile(jnp.int32(step)))
            seen[head, tile, place] += 1
            if step >= int(walk.masked):
                assert keep[tile, :, place].all()
    assert seen.max() == 1
    np.testing.assert_array_equal(seen, np.stack([keep.any((1, 3))] * 2))
