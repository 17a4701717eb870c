"""Tile bounds against dense masks: no tile omitted, none unmasked that needs its mask."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import dense
import functions
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from cases import key_ranges, packed_segments

from burst_jax import positions
from burst_jax.layouts.parse import parse_layout
from pallas_kernels import BlockMask, Mask, Tiles, key_bounds, query_bounds
from pallas_kernels.bounds import _summary, lists_for_all, over_batch, split_tiles
from pallas_kernels.document_bounds import INTERVAL_SIZE, query_intervals

HUGE = 2**31 - 1
PARTS = 3


@functools.partial(jax.jit, static_argnums=(0, 3))
def tables(masks, q_tokens, kv_tokens, tiles):
    """Of each mask query bounds, key bounds, and the queries' range over the whole batch."""
    found = []
    for mask in masks:
        by_query = query_bounds(mask, q_tokens, kv_tokens, tiles)
        by_key = key_bounds(mask, q_tokens, kv_tokens, tiles)
        of_parts = Tiles(PARTS * tiles.block_q, tiles.block_kv)
        by_parts = query_bounds(mask, q_tokens, kv_tokens, of_parts, parts=PARTS)
        found.append((by_query, by_key, over_batch(by_query), by_parts))
    return found


def tokens(at, segment_ids=None):
    ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return local.tokens(jnp.asarray(at, jnp.int32), ids)


def mask_of(mask, q, kv):
    """bool ``[R, T, S]`` by the definition."""
    arrays: dict[str, Any] = {"query_positions": q.positions, "key_value_positions": kv.positions}
    for name, bound in (("key_starts", q.kv_starts), ("key_ends", q.kv_ends)):
        arrays |= {} if bound is None else {name: np.asarray(bound)}
    if q.segment_ids is not None:
        arrays |= {"query_segment_ids": q.segment_ids, "key_value_segment_ids": kv.segment_ids}
    window, lengths = (mask.left, mask.right), (len(q.positions), len(kv.positions))
    return dense.kept(*lengths, local_window_size=window, **arrays)[:, 0]


def by_tile(keep, tiles):
    """bool ``[.., query tiles, key tiles]``: does any score count, and do all of a full tile."""
    *ahead, t, s = keep.shape
    q_tiles, kv_tiles = -(-t // tiles.block_q), -(-s // tiles.block_kv)
    # Beyond a partial tile nothing counts, so it is not whole.
    padded = np.zeros((*ahead, q_tiles * tiles.block_q, kv_tiles * tiles.block_kv), bool)
    padded[..., :t, :s] = keep
    cut = padded.reshape(*ahead, q_tiles, tiles.block_q, kv_tiles, tiles.block_kv)
    return cut.any((-3, -1)), cut.all((-3, -1))


def assert_right(bounds, some, whole, *, tight=False):
    """Bounds ``[.., rows, 4]`` serve the tiles ``[.., rows, tiles]``.

    ``tight``: with the same tiles as the mask has, to the last one; its full tiles are one range.
    """
    bounds = np.asarray(bounds)
    assert bounds.dtype == np.int32
    assert bounds.shape == (*some.shape[:-1], 4)
    first, full_first, full_end, end = np.moveaxis(bounds, -1, 0)[..., None]
    count = some.shape[-1]
    ascending = (first >= 0) & (first <= full_first) & (full_first <= full_end)
    assert (ascending & (full_end <= end) & (end <= count)).all()
    index = np.arange(count)
    visited = (index >= first) & (index < end)
    assert not (some & ~visited).any(), "a tile that counts is left out"
    full = (index >= full_first) & (index < full_end)
    assert whole[full].all(), "a tile that needs its mask runs without"
    empty = first == end
    assert (bounds[empty[..., 0]] == 0).all()
    if tight:
        np.testing.assert_array_equal(visited, some)
        np.testing.assert_array_equal(full, whole)


def assert_parts_right(bounds, some, whole, *, tight=False):
    """The same of PARTS rows each, which may skip tiles from the end of the masked ones."""
    bounds, count = np.asarray(bounds), some.shape[-1]
    assert bounds.dtype == np.int32
    padding = ((0, 0), (0, -some.shape[1] % PARTS), (0, 0))
    some, whole = (np.pad(x, padding).reshape(len(some), -1, PARTS, count) for x in (some, whole))
    full_end, end, skipped = bounds[..., 2, None], bounds[..., 3, None], bounds[..., 4:]
    assert skipped.shape == some.shape[:-1]
    # Parts that skip everything, like those past the last query, need no mask.
    everything = skipped == count
    assert_right(bounds[..., :4], some.any(2), (whole | everything[..., None]).all(2))
    assert ((skipped <= end - full_end) | everything).all()
    visited = np.arange(count) < (end - skipped)[..., None]
    assert not (some & ~visited).any(), "a tile that counts is skipped"
    if tight:
        last = np.where(some, np.arange(count) + 1, 0).max(-1)
        most = np.where(last > 0, np.minimum(end - last, end - full_end), count)
        np.testing.assert_array_equal(skipped, most)


def check(masks, q_tokens, kv_tokens, tiles, tight=False):
    """Both sides' bounds, held to the dense mask; ``tight`` may be a function of the mask.

    Returns query and key bounds of the last of the masks.
    """
    found = []
    for mask, found in zip(masks, tables(masks, q_tokens, kv_tokens, tiles), strict=True):
        some, whole = by_tile(mask_of(mask, q_tokens, kv_tokens), tiles)
        exact = tight(mask) if callable(tight) else tight
        assert_right(found[0], some, whole, tight=exact)
        assert_right(found[1], some.swapaxes(1, 2), whole.swapaxes(1, 2), tight=exact)
        assert_parts_right(found[3], some, whole, tight=exact)
        if q_tokens.segment_ids is None and not q_tokens.kv_bounds:
            q, kv = (x._replace(positions=np.asarray(x.positions)) for x in (q_tokens, kv_tokens))
            for bounds, traced in zip((query_bounds, key_bounds), found[:2], strict=True):
                while_tracing = bounds(mask, q, kv, tiles)
                assert isinstance(while_tracing, np.ndarray)
                assert while_tracing.dtype == np.int32
                np.testing.assert_array_equal(while_tracing, traced)
        first, end = np.moveaxis(np.asarray(found[2]), -1, 0)[..., None]
        index = np.arange(some.shape[2])
        visited = (index >= first) & (index < end)
        assert (visited >= some.any(0)).all()
        assert not exact or (visited == some.any(0)).all()
    return tuple(np.asarray(bounds[0]).tolist() for bounds in found[:2])


def packed(rng, length):
    """Three rows: documents and padding inside; one document; padding alone."""
    rows = np.zeros((3, length), np.int32)
    at = 0
    for segment in (5, 1, -2, 7):
        size = int(rng.integers(1, length // 2))
        rows[0, at : at + size] = segment
        at += size + int(rng.integers(0, 6))
    rows[1] = 3
    return rows


# --- brute force ---------------------------------------------------------------------------------

WINDOWS = (None, None), (None, 0), (9, 4), (13, 0), (0, None), (None, 3)
# Tokens per shard and tiles: even, ragged on one side or on both, and one tile.
SHAPES = (
    (24, 24, Tiles(8, 6)),
    (24, 38, Tiles(6, 8)),
    (38, 24, Tiles(16, 4)),
    (26, 38, Tiles(8, 16)),
    (10, 14, Tiles(16, 16)),
)


@pytest.mark.parametrize(("t", "s", "tiles"), SHAPES, ids=str)
@pytest.mark.parametrize("segments", [False, True], ids=["plain", "packed"])
def test_bounds_cover_the_mask(t, s, tiles, segments):
    n, rng = 3, np.random.default_rng([t, s, segments])
    masks = tuple(Mask(*window) for window in WINDOWS)
    ids = packed(rng, n * max(t, s))
    for layout in ("contiguous", "zigzag", "striped", "any order"):

        def tight(mask, layout=layout):
            # Two-sided windows may fall between striped positions, and packing between documents.
            return not segments and layout != "any order" and None in (mask.left, mask.right)

        def order(size, layout=layout):
            if layout == "any order":
                return rng.integers(0, n * size, (n, size))
            return positions(layout, n * size, n).reshape(n, size)

        of_queries, of_keys = order(t), order(s)
        for shards in ((0, 0), (1, 2), (2, 1), (0, 2), (2, 0)):
            at = of_queries[shards[0]], of_keys[shards[1]]
            q, kv = (tokens(x, ids[:, x] if segments else None) for x in at)
            check(masks, q, kv, tiles, tight)


def test_every_tile_is_masked_by_a_function():
    mask, side = Mask(mask_mod=functions.mask_mod), tokens(np.arange(16))
    for bounds in (query_bounds, key_bounds):
        first, full, full_end, end = np.moveaxis(
            np.asarray(bounds(mask, side, side, Tiles(4, 4))), -1, 0
        )
        assert (full == full_end).all()
        assert (end - first == 4).all()


def test_the_brute_force_notices():
    """The guard: bounds that leave a tile out, or unmask one, fail."""
    mask, side, tiles = Mask(right=0), tokens(np.arange(16)), Tiles(4, 4)
    some, whole = by_tile(mask_of(mask, side, side), tiles)
    good = np.asarray(query_bounds(mask, side, side, tiles))
    assert_right(good, some, whole)
    late, early, unmasked = good.copy(), good.copy(), good.copy()
    late[0, 3, 0:2] += 1
    early[0, 3, 3] -= 1
    unmasked[0, 3, 2] += 1
    for wrong, message in ((late, "left out"), (early, "left out"), (unmasked, "needs its mask")):
        with pytest.raises(AssertionError, match=message):
            assert_right(wrong, some, whole)


# --- by hand -------------------------------------------------------------------------------------


def test_tables_by_hand():
    """Of 16 tokens in tiles of 4 x 2, query tile i sees 2 (i + 1) key tiles, 2 i of them full."""
    near, far = tokens(np.arange(16)), tokens(np.arange(16, 32))
    causal = [[0, 2, 2, 2], [0, 0, 2, 4], [0, 0, 4, 6], [0, 0, 6, 8]]
    of_keys = [[i // 2, i // 2 + 1, 4, 4] for i in range(8)]
    nothing = [[0, 0, 0, 0]]
    for q, kv, want in (
        (near, near, (causal, of_keys)),
        (far, near, ([[0, 0, 8, 8]] * 4, [[0, 0, 4, 4]] * 8)),
        (near, far, (nothing * 4, nothing * 8)),
    ):
        assert check((Mask(right=0),), q, kv, Tiles(4, 2), tight=True) == want
    for window in (None, HUGE):
        got = check((Mask(window, window),), far, near, Tiles(4, 2), tight=True)
        assert got == ([[0, 0, 8, 8]] * 4, [[0, 0, 4, 4]] * 8)
    # A document is full, its neighbour is skipped; padding.
    ids = np.array([[1] * 8 + [2] * 8 + [0] * 4 + [3] * 4], np.int32)
    side = tokens(np.arange(24), ids)
    of_documents = [[0, 0, 2, 2]] * 2 + [[2, 2, 4, 4]] * 2 + [[0, 0, 0, 0], [5, 5, 6, 6]]
    assert check((Mask(),), side, side, Tiles(4, 4), tight=True)[0] == of_documents


@pytest.mark.parametrize("sides", [(HUGE, 0), (0, HUGE), (HUGE, HUGE), (HUGE, None)], ids=str)
def test_huge_windows_do_not_overflow(sides):
    near = tokens(np.arange(16))
    for far in (0, 2**30, HUGE - 16):
        there = tokens(far + np.arange(16))
        for q, kv in ((near, there), (there, near), (there, there)):
            check((Mask(*sides),), q, kv, Tiles(4, 4), tight=True)


@pytest.mark.parametrize("window", [(None, None), (9, 4)], ids=["alone", "in-a-window"])
def test_bounds_of_kv_bounds_cover_the_mask(window):
    """Both bounds, one of them, shared by all sequences, empty ones, with segments."""
    rng = np.random.default_rng(0)
    t, s, tiles = 38, 58, Tiles(8, 16)
    for rows, ends, segments in ((3, True, True), (1, True, False), (3, False, False)):
        ids = packed(rng, s) if segments else None
        kv = tokens(np.arange(s), ids)
        q = tokens(np.arange(t), None if ids is None else ids[:, :t])
        starts, stops = key_ranges(rng, rows, s)
        # Besides random ranges: a tile that is full, and one whose queries attend to nothing.
        starts[:, 8:16], stops[:, 8:16] = 0, s
        starts[0, 16:24], stops[0, 16:24] = s, 0
        q = q._replace(kv_starts=jnp.asarray(starts[:, :t]))
        if ends:
            q = q._replace(kv_ends=jnp.asarray(stops[:, :t]))
        check((Mask(*window),), q, kv, tiles)


def test_bounds_of_a_prefix_are_tight():
    """Every tile that a prefix or causality lets count is visited, and no other."""
    at = np.arange(40, dtype=np.int32)
    for prefix in (0, 13, 16, 40):
        q = tokens(at)._replace(kv_ends=jnp.asarray(np.maximum(at + 1, prefix)[None]))
        check((Mask(),), q, tokens(at), Tiles(8, 8), tight=True)


def test_segments_of_the_largest_and_smallest_id():
    """Ids at int32's ends are segments like others; padding still overlaps none of them."""
    ids = np.array([[HUGE] * 4 + [0] * 4 + [-HUGE - 1] * 4], np.int32)
    side = tokens(np.arange(12), ids)
    check((Mask(),), side, side, Tiles(4, 4), tight=True)


def test_over_batch():
    for rows, joint in (
        ([[1, 2, 4, 5], [2, 3, 6, 7]], [1, 7]),
        ([[3, 3, 5, 6], [0, 0, 0, 0]], [3, 6]),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], [0, 0]),
    ):
        got = over_batch(jnp.asarray(rows, jnp.int32)[:, None])
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, [joint])


def test_halves_have_all_of_the_work_between_them():
    rng = np.random.default_rng(0)
    tables = {n: jnp.asarray(rng.integers(1, 9, (2, n, 4)), jnp.int32) for n in (1, 2, 7, 8)}
    first, second = jax.jit(split_tiles)(tables)
    for n, table in tables.items():
        assert not np.asarray(first[n])[:, (n + 1) // 2 :].any()
        assert not np.asarray(second[n])[:, : (n + 1) // 2].any()
        np.testing.assert_array_equal(first[n] + second[n], table)


# --- tile lists, of block-sparse masks ------------------------------------------------------------

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")
N, T, S, SHARDS = 4, 24, 36, 2


@functools.partial(jax.jit, static_argnums=(0, 3))
def lists(mask, q_tokens, kv_tokens, tiles, block_mask):
    of = mask, q_tokens, kv_tokens, tiles, block_mask
    return query_bounds(*of), key_bounds(*of, groups=2), lists_for_all(*of)


def assert_lists(got, some, whole, *, tight):
    """All tiles that count are visited once, and those that need no mask are behind the others."""
    some, whole = (np.broadcast_to(x, (*got.shape[:2], *x.shape[2:])) for x in (some, whole))
    for place in np.ndindex(*got.shape[:3]):
        masked, visited, *tiles = map(int, np.asarray(got)[place])
        assert sorted(tiles) == list(range(some.shape[3]))
        assert set(np.flatnonzero(some[place])) <= set(tiles[:visited])
        assert all(whole[place][tiles[masked:visited]])
        if tight:
            assert visited == some[place].sum()
            assert visited - masked == whole[place].sum()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_that_counts_is_listed(layout, packed):
    """Of each head its own table, of two shards, in whole tiles and parts of tiles."""
    rng = np.random.default_rng(0)
    at = [positions(layout, SHARDS * x, SHARDS).reshape(SHARDS, x) for x in (T, S)]
    ids = packed_segments(rng, 2, SHARDS * S) if packed else None
    for (left, right), (q_block, kv_block), heads, tiles in (
        ((None, None), (6, 12), N, (8, 12)),
        ((None, 0), (3, 4), 1, (10, 16)),
        ((9, 4), (12, 6), N, (6, 6)),
    ):
        table = rng.random((heads, SHARDS * T // q_block, SHARDS * S // kv_block)) < 0.4
        q_ids, kv_ids = (None if ids is None else ids[:, : SHARDS * x] for x in (T, S))
        keep = dense.kept(
            SHARDS * T, SHARDS * S, local_window_size=(left, right), block_mask=table,
            query_segment_ids=q_ids, key_value_segment_ids=kv_ids,
        )  # fmt: skip
        for q_shard, kv_shard in itertools.product(range(SHARDS), repeat=2):
            q_at, kv_at = at[0][q_shard], at[1][kv_shard]
            q, kv = (
                local.tokens(jnp.asarray(x), None if ids is None else jnp.asarray(ids[:, x]))
                for x in (q_at, kv_at)
            )
            mask = BlockMask(jnp.asarray(table), q_block, kv_block)
            got = lists(Mask(left, right), q, kv, Tiles(*tiles), mask)
            here = keep[:, :, q_at][:, :, :, kv_at]
            some, whole = by_tile(here, Tiles(*tiles))
            # Blocks of contiguous tokens that tiles are parts of leave nothing to be unsure of.
            exact = layout == "contiguous" and not packed and (q_block, tiles) == (12, (6, 6))
            assert_lists(got[0], some, whole, tight=exact and (left, right) == (None, None))
            by_group = [x.reshape(len(x), -1, min(2, heads), *x.shape[2:]) for x in (some, whole)]
            some_of_group, whole_of_group = by_group[0].any(2), by_group[1].all(2)
            flipped = (x.swapaxes(2, 3) for x in (some_of_group, whole_of_group))
            assert_lists(got[1], *flipped, tight=False)
            for_all = some.any((0, 1), keepdims=True), whole.all((0, 1), keepdims=True)
            assert_lists(got[2], *for_all, tight=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_of_one_block_are_listed_exactly(layout):
    """Where blocks consist of whole tiles, no tile without a score that counts is visited."""
    n, q_block, kv_block, tiles = 2, 16, 32, (8, 16)
    at = positions(layout, 128, n).reshape(n, -1)
    runs = [parse_layout(layout).run_in_blocks(64, n, block) for block in (q_block, kv_block)]
    table = np.random.default_rng(0).random((4, 128 // q_block, 128 // kv_block)) < 0.3
    mask = BlockMask(jnp.asarray(table), q_block, kv_block, *runs)
    assert not mask.tests_scores(*tiles)
    keep = dense.kept(128, 128, block_mask=table)
    visited = []
    for q_at, kv_at in itertools.product(at, repeat=2):
        q, kv = (local.tokens(jnp.asarray(x)) for x in (q_at, kv_at))
        got, *_ = lists(Mask(), q, kv, Tiles(*tiles), mask)
        some, whole = by_tile(keep[:, :, q_at][:, :, :, kv_at], Tiles(*tiles))
        np.testing.assert_array_equal(some, whole)
        assert_lists(got, some, whole, tight=True)
        visited.append(np.asarray(got)[..., 1].sum())
        halves = split_tiles(got)
        np.testing.assert_array_equal(halves[0] + halves[1], got)
        assert not np.asarray(halves[0])[:, :, 4:].any()
    assert 0 < sum(visited) < 4 * 16 * 8


def test_tiles_of_a_block_mask_are_possible_and_full_as_its_scores_are():
    rng = np.random.default_rng(3)
    q, kv = (tokens(np.sort(rng.choice(64, n, False))) for n in (24, 36))
    blocks, tiles = ((8, 16), (4, 4), (64, 2)), ((8, 12), (4, 6), (24, 36))
    for (q_block, kv_block), (block_q, block_kv) in zip(blocks, tiles, strict=True):
        heads = 2 if block_q == 8 else 1
        table = rng.random((heads, 64 // q_block, 64 // kv_block)) < 0.5
        mask = BlockMask(jnp.asarray(table), q_block, kv_block)
        summaries = (
            jax.jit(_summary, static_argnums=1)(*x) for x in ((q, block_q), (kv, block_kv))
        )
        possible, full = jax.jit(BlockMask.tiles)(mask, *summaries)
        # All blocks between those of a tile's first and last token count.
        for (h, i, j), got in np.ndenumerate(np.asarray(possible)):
            rows, columns = (
                np.asarray(side.positions)[n * size : (n + 1) * size] // block
                for side, n, size, block in ((q, i, block_q, q_block), (kv, j, block_kv, kv_block))
            )
            part = table[h, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert (got, bool(full[h, i, j])) == (part.any(), part.all())


def test_scores_are_tested_where_a_tile_is_not_in_one_block():
    for runs, expected in (((64, 64), False), ((32, 64), True), ((64, 16), True)):
        mask = BlockMask(jnp.ones((2, 1, 1), bool), 64, 64, *runs)
        assert mask.tests_scores(64, 32) == expected


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(right=0), Mask(300, 0), Mask(70, 40), Mask(HUGE, HUGE)]
)
@pytest.mark.parametrize("step", [1, 3])
def test_intervals_of_documents(mask, step):
    """Exact wherever they exist: with padding, other documents first, and repeated ids."""
    block, parts, t, s = 64, 2, 500, 450
    orders = {
        "ascending": np.repeat([1, 2, 3], [200, 230, 70]),
        "padding": np.repeat([1, 0, 2, 0], [160, 40, 250, 50]),
        "descending": np.repeat([3, 2], [300, 200]),
        "repeated": np.repeat([1, 2, 1], [170, 130, 200]),
        # One part has three documents, and one part's second document ends with it.
        "short": np.repeat([1, 2, 3, 4, 5, 6], [70, 20, 130, 36, 100, 144]),
        # Some of a document's keys are neither first nor last in a chunk of 64 keys.
        "hidden": np.repeat([-3, 4, -3, 5, 6], [240, 20, 10, 20, 210]),
    }
    ids = np.stack(list(orders.values())).astype(np.int32)
    q_at, kv_at = 100 + step * np.arange(t), 40 + step * np.arange(s)
    q, index = tokens(q_at, ids), np.arange(s)
    run = jax.jit(query_intervals, static_argnums=(0, 3, 4))
    # Also where key positions jump, like in a zigzag layout. Documents that cross it have none.
    for jump, expected in ((0, [8, 8, 8, 1, 6, 3]), (900, [4, 3, 3, 0, 6, 3])):
        kv = tokens(kv_at + jump * (index >= 180), ids[:, -s:])
        table = np.asarray(run(mask, q, kv, block, parts))
        assert table.shape == (len(ids), 4, INTERVAL_SIZE * parts)
        # The same where positions of one side or of both are known while tracing.
        q_known, kv_known = (x._replace(positions=np.asarray(x.positions)) for x in (q, kv))
        with jax.numpy_rank_promotion("raise"):
            known = query_intervals(mask, q_known, kv_known, block, parts)
        np.testing.assert_array_equal(table, known)
        if jump == 0:
            tiles = {"block": block, "parts": parts}
            of_q = jax.jit(functools.partial(query_intervals, mask, q_known, **tiles))(kv=kv)
            of_kv = jax.jit(functools.partial(query_intervals, mask, kv=kv_known, **tiles))(query=q)
            np.testing.assert_array_equal(of_q, table)
            np.testing.assert_array_equal(of_kv, table)
        keep = mask_of(mask, q, kv)
        found = np.zeros(len(ids), int)
        for row, part in np.ndindex(len(ids), -(-t // block)):
            numbers = table[row].reshape(-1, INTERVAL_SIZE)[part]
            exists, split = numbers[1] >= 0, numbers[8]
            found[row] += exists
            for r in range(min(block, t - block * part) if exists else 0):
                changes = numbers[4:8] if r >= split else np.zeros(4, int)
                start, end, first_start, first_end = numbers[:4] + changes
                inside = (index >= max(start, first_start + r)) & (index < min(end, first_end + r))
                np.testing.assert_array_equal(inside, keep[row, block * part + r])
        if mask.reads_positions or jump == 0:
            np.testing.assert_array_equal(found, expected)
    # None is known where positions are in another order.
    shuffled = tokens(kv_at[::-1], ids[:, -s:])
    table = np.asarray(run(mask, q, shuffled, block, parts)).reshape(len(ids), -1, INTERVAL_SIZE)
    known = table[..., 1] >= 0
    assert known[:, :-1].any() == (not mask.reads_positions)
