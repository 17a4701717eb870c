"""The tile scheduler on a CPU: order of work tiles, which CTA gets which, and the tiles of each."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionInputs, AttentionSpec, KVSide, QuerySide
from pallas_kernels.bounds import HalfBounds
from pallas_kernels.mask import Mask
from pallas_kernels.mosaic import tile_scheduler, work_tiles
from pallas_kernels.mosaic.sm90 import dq
from pallas_kernels.mosaic.sm90.implementation import MOSAIC_SM90
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.mosaic.tile_scheduler import for_each_work_tile
from pallas_kernels.mosaic.work_tiles import WorkTiles
from pallas_kernels.score import Score

MIB = 2**20
ZERO = jnp.int32(0)


def order(work_tiles, large=False):
    """``(batch, head, tile)`` of every work tile in order, ``[count, 3]``."""
    at = jax.vmap(lambda index: jnp.stack([jnp.int32(x) for x in work_tiles.coordinates(index)]))
    index = jnp.arange(work_tiles.count, dtype=jnp.int32)
    return np.asarray(at(work_tiles.in_large_groups(index) if large else index))


# --- order ---------------------------------------------------------------------------------------


def test_every_work_tile_comes_once():
    shapes = (1, 6), (2, 6), (3, 1), (1, 7)
    options = itertools.product((False, True), (1, 10 * MIB, 100 * MIB), (False, True))
    for (batch, heads), (last_first, shared, equal) in itertools.product(shapes, options):
        work_tiles = WorkTiles(batch, heads, 5, last_first, shared, equal=equal)
        seen = order(work_tiles)
        assert len({tuple(at) for at in seen}) == work_tiles.count == batch * heads * 5
        assert (seen.max(0) == (batch - 1, heads - 1, 4)).all()
        assert (seen.min(0) == 0).all()


def test_the_longest_tiles_of_an_l2_group_come_first():
    work_tiles = WorkTiles(1, 8, 4, last_first=True, shared_bytes=6 * MIB)
    assert work_tiles.group_heads == 4  # 24 MiB of what they share
    seen = order(work_tiles)
    for group in (seen[:16], seen[16:]):
        assert sorted(set(group[:, 1])) == list(range(group[0, 1], group[0, 1] + 4))
        np.testing.assert_array_equal(group[:, 2], np.repeat([3, 2, 1, 0], 4))
    equal = WorkTiles(1, 8, 4, last_first=True, shared_bytes=1, equal=True)
    assert equal.group_heads == 1
    np.testing.assert_array_equal(order(equal)[:, 1], np.repeat(range(8), 4))


def test_l2_groups_of_local_work_tiles_are_larger():
    """The order is that of a kernel whose tiles share as much less. Not with clusters."""
    for batch, heads, larger in ((1, 32, 8), (2, 8, 8)):
        options: Any = {"tiles": 80, "last_first": True}
        work_tiles = WorkTiles(batch, heads, shared_bytes=12 * MIB, may_be_local=True, **options)
        assert (work_tiles.large_group_heads, work_tiles.chooses_groups) == (larger, True)
        whole = WorkTiles(batch, heads, shared_bytes=3 * MIB, **options)
        assert whole.group_heads == larger
        np.testing.assert_array_equal(order(work_tiles, large=True), order(whole))
        assert work_tiles.in_large_groups(jnp.int32(work_tiles.count)) >= work_tiles.count
    assert not WorkTiles(1, 32, 9, True, 12 * MIB, cluster=2, may_be_local=True).chooses_groups
    for persistent, (widest, large) in itertools.product((True, False), ((2, 1), (3, 0))):
        ranges = jnp.asarray([[[1, 1, 2, 2], [4, 4, 4, 4 + widest]]], jnp.int32)
        options = {"persistent": persistent, "may_be_local": True}
        chosen = WorkTiles(1, 32, 9, True, 12 * MIB, **options).counter(ranges, 8)
        np.testing.assert_array_equal(chosen, [0, large])
    # All CTAs start at once.
    assert not WorkTiles(1, 8, 9, True, 12 * MIB, may_be_local=True).chooses_groups


def test_an_l2_group_is_larger_only_where_the_last_one_would_end_late():
    for heads, tiles, shared, group_heads in (
        (32, 128, 16, 1),
        (8, 128, 16, 1),  # an even number of groups: after short tiles a CTA runs a long one
        (3, 128, 12, 3),  # of the last of three groups the longest tiles would run alone
        (8, 64, 16, 2),
        (32, 32, 4, 4),
        (32, 32, 8, 4),
        (32, 32, 2, 8),
        (8, 256, 40, 1),
    ):
        work_tiles = WorkTiles(1, heads, tiles, last_first=False, shared_bytes=shared * MIB)
        assert work_tiles.group_heads == group_heads
    # Heads that form groups of ``whole`` where all tiles have work: of a half's tiles, fewer or
    # without short ones, the last group's would run alone.
    for heads, tiles, shared, whole, first, second in (
        (32, 64, 8, 2, 4, 4),
        (32, 32, 4, 4, 8, 8),
        (8, 64, 8, 2, 4, 4),
        (8, 128, 16, 1, 2, 2),
        (8, 256, 32, 1, 1, 1),  # two heads do not fit
    ):
        of_half = functools.partial(WorkTiles, 1, heads, tiles, False, shared * MIB)
        groups = [of_half(half=half).group_heads for half in (None, "first", "second")]
        assert groups == [whole, first, second]


@pytest.mark.parametrize(
    ("right", "heads", "group_heads"), [(0, 32, [8, 8]), (0, 2, [2, 2]), (None, 32, [4, 4])]
)
def test_only_halves_with_l2_groups_of_their_own_have_another_kernel(right, heads, group_heads):
    """A jitted call is traced and lowered again only for bounds of another structure."""
    length = 4096
    x: Any = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
    positions: Any = np.arange(length, dtype=np.int32)
    inputs = AttentionInputs(QuerySide(x, positions), KVSide(x, x, positions))
    spec = AttentionSpec(Mask(None, right), Score(1.0))
    whole = np.ones((1, length // 128, 4), np.int32)
    split = MOSAIC_SM90.split_backward
    assert split is not None
    halves = split(whole, inputs, spec=spec)
    of_whole = dq.backward_static(inputs, spec, None).work_tiles.group_heads
    found = [x.group_heads if isinstance(x, HalfBounds) else of_whole for x in halves]
    assert found == group_heads
    is_other = [jax.tree.structure(x) != jax.tree.structure(whole) for x in halves]
    # The first half of a causal mask leaves the other half of dK and dV unset.
    assert is_other == [right == 0, group_heads[1] != of_whole]
    tables = jax.tree.leaves(halves)
    assert all(isinstance(x, np.ndarray) for x in tables)
    np.testing.assert_array_equal(sum(tables), whole)


def test_number_of_ctas():
    assert WorkTiles(1, 32, 128, True, 1).ctas == 132  # an H100's SMs, where no GPU is known
    small = WorkTiles(1, 2, 4, True, 1)
    assert (small.ctas, small.one_per_cta) == (8, True)
    not_persistent = WorkTiles(1, 32, 128, True, 1, persistent=False)
    assert (not_persistent.ctas, not_persistent.one_per_cta) == (4096, True)


# --- the tiles of one work tile ------------------------------------------------------------------


@pytest.mark.parametrize(("rotate", "descending"), [(None, False), (3, False), (3, True)])
def test_every_tile_inside_the_bounds_is_visited_once(rotate, descending):
    """Copies are started ahead: what no step needs may be any tile, but not out of bounds."""
    turn = None if rotate is None else jnp.int32(rotate)
    for bounds in itertools.combinations_with_replacement(range(5), 4):
        first, full_first, full_end, end = bounds
        table = jnp.asarray([[[*bounds, 1, 9]]], jnp.int32)
        iterator = TileIterator(table, ZERO, ZERO, ZERO, 4, turn, descending)
        steps = [int(iterator.tile(jnp.int32(step))) for step in range(7)]
        masked, total = int(iterator.masked), int(iterator.total)
        in_order = [*range(first, full_first), *range(full_end, end)]
        assert steps[:masked] == (in_order[::-1] if descending else in_order)
        start = full_first + (rotate or 0) % max(1, full_end - full_first)
        assert steps[masked:total] == [*range(start, full_end), *range(full_first, start)]
        assert set(steps) <= set(range(5))
        # What kernels call that loop over masked and full tiles apart.
        assert [int(iterator.masked_tile(jnp.int32(i))) for i in range(masked)] == in_order
        # One step is never skipped.
        skipped = [int(iterator.skipped(jnp.int32(part)) or 0) for part in range(2)]
        assert skipped == [min(1, max(total - 1, 0)), max(total - 1, 0)]
        full = [int(iterator.full_tile(jnp.int32(i))) for i in range(total - masked)]
        assert full == list(range(full_first, full_end))


@pytest.mark.parametrize("rotate", [None, 1])
def test_every_listed_tile_is_visited_once(rotate):
    """Of its own batch index, head and tile; past the last, any tile that exists."""
    tiles = np.array([3, 1, 4, 0, 2])
    lists = np.full((2, 3, 2, 7), 99, np.int32)
    for masked, total in itertools.combinations_with_replacement(range(6), 2):
        lists[1, 2, 1] = [masked, total, *tiles]
        turn = None if rotate is None else jnp.int32(rotate)
        at = map(jnp.int32, (1, 2, 1))
        iterator = TileIterator(jnp.asarray(lists), *at, last=4, rotate=turn)
        steps = [int(iterator.tile(jnp.int32(step))) for step in range(7)]
        full, begin = tiles[masked:total], (rotate or 0) % max(1, total - masked)
        assert steps[:total] == [*tiles[:masked], *np.roll(full, -begin)]
        assert set(steps) <= set(range(5))


def test_an_iterator_reads_the_bounds_of_its_own_sequence():
    tables = jnp.arange(2 * 3 * 4, dtype=jnp.int32).reshape(2, 3, 4)
    for batch, tile in itertools.product(range(2), range(3)):
        iterator = TileIterator(tables, jnp.int32(batch), ZERO, jnp.int32(tile), last=99)
        assert int(iterator.tile(ZERO)) == 4 * (3 * batch + tile)
    shared = TileIterator(tables[:1], jnp.int32(1), ZERO, jnp.int32(2), last=99)
    assert int(shared.tile(ZERO)) == 8


# --- work tiles, fetched by several CTAs ---------------------------------------------------------


class Fetched:
    """In a TileScheduler's place: the indices that one CTA fetches, in order."""

    def __init__(self, indices, large):
        self.indices, self.fetches, self.reads = indices, 0, 0
        self.large = large
        self.released = self.drained = 0

    def release_slots(self, is_producer):
        del is_producer
        self.released += 1

    def drain(self):
        self.drained += 1

    def fetch(self, slot):
        assert int(slot) == self.fetches % tile_scheduler.SLOTS
        self.fetches += 1

    def wait(self, slot):
        assert int(slot) == self.reads % tile_scheduler.SLOTS

    def read(self, slot):
        assert int(slot) == self.reads % tile_scheduler.SLOTS
        fetched = jnp.int32(self.indices[self.reads])
        return -1 - fetched if self.large else fetched

    def has_large_groups(self):
        return self.large

    def release(self, slot, is_producer):
        assert int(slot) == self.reads % tile_scheduler.SLOTS
        assert not is_producer or self.reads < self.fetches
        self.reads += 1


def fetch_all(work_tiles, rng):
    """Indices from one counter, fetched by CTAs in random order until all have exited.

    A CTA exits when its index is past the last work tile: the first ``ctas`` are taken already.
    """
    indices = {cta: [] for cta in range(work_tiles.ctas)}
    alive, counter = set(indices), itertools.count()
    while alive:
        cta = int(rng.choice(sorted(alive)))
        indices[cta].append(next(counter))
        if work_tiles.ctas + indices[cta][-1] >= work_tiles.count:
            alive.remove(cta)
    return indices


@pytest.fixture
def run_ctas(monkeypatch):
    """``run(work_tiles, bounds, skip_empty=...)``: what all CTAs visit and skip, in order.

    Loops and conditions run as Python's (``jax.disable_jit``), so that a visit can be recorded.
    """
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 3)

    def run(work_tiles, bounds, *, skip_empty, steps_per_tile=1, is_producer=True, seed=0, rank=0):
        visited, empty = [], []
        indices = fetch_all(work_tiles, np.random.default_rng(seed))
        for cta in range(work_tiles.ctas):
            axes = {"cta": cta, "cluster": rank}
            monkeypatch.setattr(jax.lax, "axis_index", lambda name, a=axes: jnp.int32(a[name]))
            fetched, steps_before = Fetched(indices[cta], work_tiles.chooses_groups), 0
            scheduler: Any = fetched

            def record(into, work, cta=cta):
                nonlocal steps_before
                at = tuple(int(x) for x in (work.batch, work.head, work.tile))
                assert at == tuple(int(x) for x in work.recompute())
                assert int(work.steps_before) == steps_before
                steps_before += int(work.steps)
                into.append((cta, at, int(work.steps), int(work.iterator.total)))

            with jax.disable_jit():
                steps = for_each_work_tile(
                    work_tiles,
                    scheduler,
                    lambda batch, head, tile: TileIterator(bounds, batch, head, tile, last=99),
                    functools.partial(record, visited),
                    is_producer=is_producer,
                    steps_per_tile=steps_per_tile,
                    skip_empty=skip_empty,
                    run_empty=functools.partial(record, empty),
                )
            assert int(steps) == steps_before
            loops, clusters = not work_tiles.one_per_cta, work_tiles.cluster > 1
            assert fetched.reads == loops * len(indices[cta])
            assert fetched.fetches == (loops and is_producer) * len(indices[cta])
            # All warpgroups of a cluster wait for indices.
            assert fetched.released == (loops and (clusters or not is_producer))
            assert fetched.drained == (loops and clusters and is_producer)
        return visited, empty

    return run


def some_bounds(batch, tiles):
    """Bounds of which every third tile's are empty."""
    rng = np.random.default_rng(batch)
    bounds = np.sort(rng.integers(0, 5, (batch, tiles, 4)), axis=-1)
    bounds[:, ::3] = 0
    return jnp.asarray(bounds, jnp.int32)


@pytest.mark.parametrize("tiles", [1, 5], ids=["one-each", "several"])
def test_ctas_of_a_cluster_take_neighboring_tiles(run_ctas, tiles):
    """And run the same steps, in the same order."""
    work_tiles = WorkTiles(1, 1 if tiles == 1 else 2, tiles, True, 1, equal=True, cluster=2)
    assert work_tiles.ctas == 1  # of three SMs
    (first, none), (second, no_more) = (
        run_ctas(work_tiles, some_bounds(1, tiles), skip_empty=False, rank=rank)
        for rank in range(2)
    )
    assert not none + no_more
    assert {at for _, at, *_ in first + second} == set(
        itertools.product(range(1), range(work_tiles.heads), range(2 * tiles))
    )
    for (*_, (batch, head, tile), steps, total), other in zip(first, second, strict=True):
        assert other[1:] == ((batch, head, tile + 1), steps, total)
        assert tile % 2 == 0


@pytest.mark.parametrize("skip_empty", [False, True], ids=["run-empty", "skip-empty"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 4), {"last_first": True}),
        ((1, 2, 1), {"last_first": True}),  # one work tile per CTA: no loop
        ((2, 2, 3), {"last_first": True, "persistent": False}),
        ((2, 6, 4), {"last_first": True, "may_be_local": True}),
    ],
    ids=["groups", "one-each", "not-persistent", "large-groups"],
)
def test_ctas_visit_every_work_tile_once(run_ctas, shape, options, skip_empty):
    batch, heads, tiles = shape
    work_tiles = WorkTiles(*shape, shared_bytes=8 * MIB, **options)
    bounds = some_bounds(batch, tiles)
    totals = np.asarray(bounds[..., 3] - bounds[..., 0])
    assert totals.any() == (tiles > 1)
    assert not totals.all()
    everything = set(itertools.product(range(batch), range(heads), range(tiles)))
    for seed, is_producer in ((0, True), (1, False)):
        visited, empty = run_ctas(
            work_tiles, bounds, skip_empty=skip_empty, steps_per_tile=2, is_producer=is_producer,
            seed=seed,
        )  # fmt: skip
        seen = [at for _, at, *_ in visited + empty]
        assert collections.Counter(seen) == collections.Counter(everything)
        for _, (sequence, _, tile), steps, total in visited + empty:
            assert total == totals[sequence, tile]
            assert steps == 2 * (total if skip_empty else max(total, 1))
        nothing = {at for at in everything if not totals[at[0], at[2]]}
        assert {at for _, at, *_ in empty} == (nothing if skip_empty else set())
        assert len({cta for cta, *_ in visited + empty}) == work_tiles.ctas
