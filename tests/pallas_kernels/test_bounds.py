"""Tile bounds against dense masks: no tile omitted, none unmasked that needs its mask."""

from __future__ import annotations

import functools
import itertools

import dense
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from cases import key_ranges, packed_segments

from burst_jax import positions
from burst_jax.layouts.permutation import run_in_blocks
from pallas_kernels import AttentionSpec, BlockMask, Mask, Tiles, key_bounds, query_bounds
from pallas_kernels.bounds import lists_for_all, over_batch, split_tiles

HUGE = 2**31 - 1


@functools.partial(jax.jit, static_argnums=(0, 3))
def tables(spec, q_tokens, kv_tokens, tiles):
    """Query bounds, key bounds, and the query bounds for the whole batch."""
    by_query = query_bounds(spec.mask, q_tokens, kv_tokens, tiles)
    return by_query, key_bounds(spec.mask, q_tokens, kv_tokens, tiles), for_the_batch(by_query)


def for_the_batch(bounds):
    """Bounds for all rows of the batch: what :func:`over_batch` says, and what is full in each."""
    first, end = jnp.moveaxis(over_batch(bounds), -1, 0)
    full_first = jnp.clip(bounds[..., 1].max(0), first, end)
    full_end = jnp.clip(bounds[..., 2].min(0), full_first, end)
    return jnp.stack([first, full_first, full_end, end], axis=-1)


def tokens(at, segment_ids=None):
    ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return local.tokens(jnp.asarray(at, jnp.int32), ids)


def mask_of(spec, q_tokens, kv_tokens):
    """bool ``[R, T, S]`` by the definition."""
    q, kv = (np.asarray(side.positions, np.int64) for side in (q_tokens, kv_tokens))
    ahead = kv[None, :] - q[:, None]
    keep = np.ones_like(ahead, bool)
    if spec.mask.left is not None:
        keep &= ahead >= -spec.mask.left
    if spec.mask.right is not None:
        keep &= ahead <= spec.mask.right
    keep = keep[None]
    if q_tokens.kv_starts is not None:
        keep = keep & (kv >= np.asarray(q_tokens.kv_starts)[:, :, None])
    if q_tokens.kv_ends is not None:
        keep = keep & (kv < np.asarray(q_tokens.kv_ends)[:, :, None])
    if q_tokens.segment_ids is not None:
        q_ids, kv_ids = np.asarray(q_tokens.segment_ids), np.asarray(kv_tokens.segment_ids)
        same = q_ids[:, :, None] == kv_ids[:, None, :]
        keep = keep & same & (q_ids != 0)[:, :, None]
    return keep


def by_tile(keep, block_q, block_kv):
    """bool ``[R, query tiles, key tiles]``: does any score count, and do all of a full tile."""
    rows, t, s = keep.shape
    extra = -t % block_q, -s % block_kv
    padded = np.pad(keep, ((0, 0), (0, extra[0]), (0, extra[1])))  # so no ragged tile is whole
    shape = (rows, padded.shape[1] // block_q, block_q, padded.shape[2] // block_kv, block_kv)
    padded = padded.reshape(shape)
    return padded.any((2, 4)), padded.all((2, 4))


def assert_right(bounds, some, whole):
    """Bounds ``[..., rows, 4]`` serve the tiles ``[..., rows, tiles]``."""
    bounds = np.asarray(bounds)
    assert bounds.dtype == np.int32
    assert bounds.shape == (*some.shape[:-1], 4)
    first, full_first, full_end, end = np.moveaxis(bounds, -1, 0)[..., None]
    count = some.shape[-1]
    assert (first >= 0).all()
    assert (first <= full_first).all()
    assert (full_first <= full_end).all()
    assert (full_end <= end).all()
    assert (end <= count).all()
    index = np.arange(count)
    assert not (some & ((index < first) | (index >= end))).any(), "a tile that counts is left out"
    full = (index >= full_first) & (index < full_end)
    assert whole[full].all(), "a tile that needs its mask runs without"
    empty = first == end
    assert (bounds[empty[..., 0]] == 0).all()


def assert_tight(bounds, some, whole):
    """The same tiles as the mask has, to the last one; its full tiles are one range."""
    first, full_first, full_end, end = np.moveaxis(np.asarray(bounds), -1, 0)[..., None]
    index = np.arange(some.shape[-1])
    np.testing.assert_array_equal((index >= first) & (index < end), some)
    np.testing.assert_array_equal((index >= full_first) & (index < full_end), whole)


def check(spec, q_tokens, kv_tokens, tiles, tight=False):
    by_query, by_key, joint = tables(spec, q_tokens, kv_tokens, tiles)
    some, whole = by_tile(mask_of(spec, q_tokens, kv_tokens), tiles.block_q, tiles.block_kv)
    assert_right(by_query, some, whole)
    assert_right(by_key, some.swapaxes(1, 2), whole.swapaxes(1, 2))
    assert_right(joint, some.any(0), whole.all(0))
    if tight:
        assert_tight(by_query, some, whole)
        assert_tight(by_key, some.swapaxes(1, 2), whole.swapaxes(1, 2))
        assert_tight(joint, some.any(0), whole.all(0))
    return by_query, by_key


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

WINDOWS = {
    "full": (None, None),
    "causal": (None, 0),
    "window9_4": (9, 4),
    "causal_window13": (13, 0),
    "left0": (0, None),
    "ahead3": (None, 3),
}
# Tokens per shard and tiles, ragged on the query's, the key's, both or neither side.
SHAPES = {
    "even": (24, 24, Tiles(8, 6)),
    "ragged_keys": (24, 38, Tiles(6, 8)),
    "ragged_queries": (38, 24, Tiles(16, 4)),
    "ragged": (26, 38, Tiles(8, 16)),
    "one_tile": (10, 14, Tiles(16, 16)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("segments", [False, True], ids=["plain", "packed"])
def test_bounds_cover_the_mask(shape, window, segments):
    rng = np.random.default_rng([len(shape), len(window), segments])
    t, s, tiles = SHAPES[shape]
    left, right = WINDOWS[window]
    spec, n = AttentionSpec.of(scale=1.0, left=left, right=right), 3
    for layout in ("contiguous", "zigzag", "striped"):
        q_all, kv_all = (positions(layout, n * size, n).reshape(n, size) for size in (t, s))
        ids = packed(rng, n * max(t, s))
        for _ in range(4):
            q_at, kv_at = q_all[rng.integers(n)], kv_all[rng.integers(n)]
            q, kv = (tokens(at, ids[:, at] if segments else None) for at in (q_at, kv_at))
            # Two-sided windows may fall between striped positions, and packing between documents.
            one_sided = left is None or right is None
            check(spec, q, kv, tiles, tight=one_sided and not segments)


@pytest.mark.parametrize("window", WINDOWS)
def test_any_order_of_positions_is_right(window):
    rng = np.random.default_rng(len(window))
    spec = AttentionSpec.of(scale=1.0, left=WINDOWS[window][0], right=WINDOWS[window][1])
    for _ in range(6):
        q_at, kv_at = rng.integers(0, 60, 26), rng.integers(0, 60, 38)
        ids = rng.integers(0, 3, (3, 60)).astype(np.int32)
        check(spec, tokens(q_at), tokens(kv_at), Tiles(8, 16))
        check(spec, tokens(q_at, ids[:, q_at]), tokens(kv_at, ids[:, kv_at]), Tiles(8, 16))


# --- by hand -------------------------------------------------------------------------------------


def test_causal_table():
    """Sixteen tokens, tiles of 4 x 2: query tile i sees 2 (i + 1) key tiles, 2 i of them full."""
    side = tokens(np.arange(16))
    spec, tiles = AttentionSpec.of(scale=1.0, right=0), Tiles(4, 2)
    by_query, by_key = check(spec, side, side, tiles, tight=True)
    np.testing.assert_array_equal(
        by_query[0], [[0, 2, 2, 2], [0, 0, 2, 4], [0, 0, 4, 6], [0, 0, 6, 8]]
    )
    np.testing.assert_array_equal(
        by_key[0],
        [
            [0, 1, 4, 4],
            [0, 1, 4, 4],
            [1, 2, 4, 4],
            [1, 2, 4, 4],
            [2, 3, 4, 4],
            [2, 3, 4, 4],
            [3, 4, 4, 4],
            [3, 4, 4, 4],
        ],
    )


def test_earlier_and_later_shards():
    spec, near, far = AttentionSpec.of(scale=1.0, right=0), np.arange(16), np.arange(16, 32)
    by_query, by_key = check(spec, tokens(far), tokens(near), Tiles(4, 2), tight=True)
    np.testing.assert_array_equal(by_query[0], [[0, 0, 8, 8]] * 4)
    np.testing.assert_array_equal(by_key[0], [[0, 0, 4, 4]] * 8)
    by_query, by_key = check(spec, tokens(near), tokens(far), Tiles(4, 2), tight=True)
    assert not np.asarray(by_query).any()
    assert not np.asarray(by_key).any()


@pytest.mark.parametrize("window", [None, HUGE], ids=["no_window", "huge_window"])
def test_full_attention_is_all_full(window):
    spec = AttentionSpec.of(scale=1.0, left=window, right=window)
    q, kv = tokens(np.arange(32)), tokens(np.arange(18))
    by_query, by_key = check(spec, q, kv, Tiles(8, 6), tight=True)
    np.testing.assert_array_equal(by_query[0], [[0, 0, 3, 3]] * 4)
    np.testing.assert_array_equal(by_key[0], [[0, 0, 4, 4]] * 3)


def test_ragged_tiles_are_never_full():
    spec = AttentionSpec.of(scale=1.0)
    by_query, by_key = check(spec, tokens(np.arange(30)), tokens(np.arange(17)), Tiles(8, 6))
    np.testing.assert_array_equal(np.asarray(by_query)[0, :3], [[0, 0, 2, 3]] * 3)
    np.testing.assert_array_equal(np.asarray(by_key)[0, :2], [[0, 0, 3, 4]] * 2)
    for last in (by_query[0, -1], by_key[0, -1]):
        first, full_first, full_end, end = np.asarray(last).tolist()
        assert (first, full_first) == (0, full_end)
        assert end > 0


@pytest.mark.parametrize("far", [0, 2**30, HUGE - 16], ids=["near", "far", "last"])
@pytest.mark.parametrize(
    "sides", [(HUGE, 0), (0, HUGE), (HUGE, HUGE), (HUGE, None)], ids=lambda sides: f"{sides}"
)
def test_huge_windows_do_not_overflow(far, sides):
    spec = AttentionSpec.of(scale=1.0, left=sides[0], right=sides[1])
    near, there = tokens(np.arange(16)), tokens(far + np.arange(16))
    for q, kv in ((near, there), (there, near), (there, there)):
        check(spec, q, kv, Tiles(4, 4), tight=True)


def test_one_document_is_full_and_its_neighbour_is_skipped():
    ids = np.array([[1] * 8 + [2] * 8 + [0] * 4 + [3] * 4], np.int32)
    side = tokens(np.arange(24), ids)
    by_query, _ = check(AttentionSpec.of(scale=1.0), side, side, Tiles(4, 4), tight=True)
    np.testing.assert_array_equal(
        by_query[0],
        [[0, 0, 2, 2], [0, 0, 2, 2], [2, 2, 4, 4], [2, 2, 4, 4], [0, 0, 0, 0], [5, 5, 6, 6]],
    )


@pytest.mark.parametrize("window", [(None, None), (9, 4)], ids=["alone", "in-a-window"])
def test_bounds_of_kv_bounds_cover_the_mask(window):
    """Both bounds, one of them, shared by all sequences, empty ones, with segments."""
    rng = np.random.default_rng(0)
    spec = AttentionSpec.of(1.0, left=window[0], right=window[1])
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
        check(spec, q, kv, tiles)


@pytest.mark.parametrize("prefix", [0, 13, 16, 40])
def test_bounds_of_a_prefix_are_tight(prefix):
    """Every tile that a prefix or causality lets count is visited, and no other."""
    at = np.arange(40, dtype=np.int32)
    q = tokens(at)._replace(kv_ends=jnp.asarray(np.maximum(at + 1, prefix)[None]))
    check(AttentionSpec.of(1.0), q, tokens(at), Tiles(8, 8), tight=True)


def test_segments_of_the_largest_and_smallest_id():
    """Ids at int32's ends are segments like others; padding still overlaps none of them."""
    ids = np.array([[HUGE] * 4 + [0] * 4 + [-HUGE - 1] * 4], np.int32)
    side = tokens(np.arange(12), ids)
    check(AttentionSpec.of(scale=1.0), side, side, Tiles(4, 4), tight=True)


# --- over the batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "joint"),
    [
        ([[1, 2, 4, 5], [2, 3, 6, 7]], [1, 3, 4, 7]),
        ([[0, 0, 2, 2], [4, 4, 6, 6]], [0, 4, 4, 6]),
        ([[3, 3, 5, 6], [0, 0, 0, 0]], [3, 3, 3, 6]),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], [0, 0, 0, 0]),
        ([[2, 3, 3, 4]], [2, 3, 3, 4]),
    ],
    ids=["overlapping", "disjoint", "one_empty", "all_empty", "single"],
)
def test_over_batch(rows, joint):
    bounds = jnp.asarray(rows, jnp.int32)[:, None]
    for got, want in ((for_the_batch(bounds), joint), (over_batch(bounds), joint[::3])):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, [want])


def test_halves_have_all_of_the_work_between_them():
    rng = np.random.default_rng(0)
    tables = {n: jnp.asarray(rng.integers(1, 9, (2, n, 4)), jnp.int32) for n in (1, 2, 7, 8)}
    first, second = split_tiles(tables)
    for n, table in tables.items():
        assert not np.asarray(first[n])[:, (n + 1) // 2 :].any()
        assert not np.asarray(second[n])[:, : (n + 1) // 2].any()
        np.testing.assert_array_equal(first[n] + second[n], table)


def test_the_brute_force_notices():
    """The guard: bounds that leave a tile out, or unmask one, fail."""
    spec, side, tiles = AttentionSpec.of(scale=1.0, right=0), tokens(np.arange(16)), Tiles(4, 4)
    some, whole = by_tile(mask_of(spec, side, side), 4, 4)
    good = np.asarray(query_bounds(spec.mask, side, side, tiles))
    assert_right(good, some, whole)
    late, early, unmasked = good.copy(), good.copy(), good.copy()
    late[0, 3, 0:2] += 1
    early[0, 3, 3] -= 1
    unmasked[0, 3, 2] += 1
    for wrong, message in ((late, "left out"), (early, "left out"), (unmasked, "needs its mask")):
        with pytest.raises(AssertionError, match=message):
            assert_right(wrong, some, whole)


# --- tile lists, of block-sparse masks ------------------------------------------------------------

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")
N, T, S, SHARDS = 4, 24, 36, 2


@functools.partial(jax.jit, static_argnums=(0, 3))
def lists(mask, q_tokens, kv_tokens, tiles, block_mask):
    of = mask, q_tokens, kv_tokens, tiles, block_mask
    return query_bounds(*of), key_bounds(*of, groups=2), lists_for_all(*of)


def lists_by_tile(keep, tiles):
    """``(some, whole)``, bool ``[R, N, q tiles, kv tiles]``: which tiles have scores that count."""
    block_q, block_kv = tiles
    rest = (-keep.shape[2] % block_q, -keep.shape[3] % block_kv)
    padded = np.pad(keep, ((0, 0), (0, 0), (0, rest[0]), (0, rest[1])))
    rows, heads, t, s = padded.shape
    cut = padded.reshape(rows, heads, t // block_q, block_q, s // block_kv, block_kv)
    return cut.any((3, 5)), cut.all((3, 5))


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
        written_out = dense.Mask(window=(left, right)).dense
        keep = written_out(q_ids, kv_ids, SHARDS * T, SHARDS * S, block_mask=table)
        for q_shard, kv_shard in itertools.product(range(SHARDS), repeat=2):
            q_at, kv_at = at[0][q_shard], at[1][kv_shard]
            q, kv = (
                local.tokens(jnp.asarray(x), None if ids is None else jnp.asarray(ids[:, x]))
                for x in (q_at, kv_at)
            )
            mask = BlockMask(jnp.asarray(table), q_block, kv_block)
            got = lists(Mask(left, right), q, kv, Tiles(*tiles), mask)
            here = keep[:, :, q_at][:, :, :, kv_at]
            some, whole = lists_by_tile(here, tiles)
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
    runs = [run_in_blocks(layout, 64, n, block) for block in (q_block, kv_block)]
    table = np.random.default_rng(0).random((3, 128 // q_block, 128 // kv_block)) < 0.3
    mask = BlockMask(jnp.asarray(table), q_block, kv_block, *runs)
    assert not mask.tests_scores(*tiles)
    assert mask.tests_scores(*tiles, together=2)
    keep = dense.Mask().dense(None, None, 128, 128, block_mask=table)
    visited = []
    for q_at, kv_at in itertools.product(at, repeat=2):
        q, kv = (local.tokens(jnp.asarray(x)) for x in (q_at, kv_at))
        got = query_bounds(Mask(), q, kv, Tiles(*tiles), mask)
        some, whole = lists_by_tile(keep[:, :, q_at][:, :, :, kv_at], tiles)
        np.testing.assert_array_equal(some, whole)
        assert_lists(got, some, whole, tight=True)
        visited.append(np.asarray(got)[..., 1].sum())
        halves = split_tiles(got)
        np.testing.assert_array_equal(halves[0] + halves[1], got)
        assert not np.asarray(halves[0])[:, :, 4:].any()
    assert 0 < sum(visited) < 3 * 16 * 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_within_blocks(layout):
    for n, length, block in itertools.product((1, 2, 3, 4), (8, 12, 16, 40), (1, 2, 6, 8, 16)):
        run = run_in_blocks(layout, length, n, block)
        of_shards = (positions(layout, n * length, n) // block).reshape(n, -1)
        for shard in of_shards:
            for first in range(0, length, run):
                assert len(set(shard[first : first + run])) == 1, (n, length, block, run)
    assert run_in_blocks("contiguous", 1024, 8, 128) == 128
    assert run_in_blocks("zigzag", 1024, 8, 768) == 256
    assert run_in_blocks("striped", 1024, 8, 128) == 16
