"""Lists of tiles, which a mask by blocks needs, against the mask written out."""

from __future__ import annotations

import functools
import itertools

import dense
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from cases import packed_segments

from burst_jax import positions
from burst_jax.layouts.permutation import run_in_blocks
from pallas_kernels import BlockMask, Mask, Tiles, key_bounds, query_bounds
from pallas_kernels.bounds import lists_for_all, split_tiles

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")
N, T, S, SHARDS = 4, 24, 36, 2


@functools.partial(jax.jit, static_argnums=(0, 3))
def lists(mask, q_tokens, kv_tokens, tiles, block_mask):
    of = mask, q_tokens, kv_tokens, tiles, block_mask
    return query_bounds(*of), key_bounds(*of, groups=2), lists_for_all(*of)


def by_tile(keep, tiles):
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
            some, whole = by_tile(here, tiles)
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
        some, whole = by_tile(keep[:, :, q_at][:, :, :, kv_at], tiles)
        np.testing.assert_array_equal(some, whole)
        assert_lists(got, some, whole, tight=True)
        visited.append(np.asarray(got)[..., 1].sum())
        halves = split_tiles(got)
        np.testing.assert_array_equal(halves[0] + halves[1], got)
        assert not np.asarray(halves[0])[:, :, 4:].any()
    assert 0 < sum(visited) < 3 * 16 * 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_lie_in_blocks(layout):
    for n, length, block in itertools.product((1, 2, 3, 4), (8, 12, 16, 40), (1, 2, 6, 8, 16)):
        run = run_in_blocks(layout, length, n, block)
        of_shards = (positions(layout, n * length, n) // block).reshape(n, -1)
        for shard in of_shards:
            for first in range(0, length, run):
                assert len(set(shard[first : first + run])) == 1, (n, length, block, run)
    assert run_in_blocks("contiguous", 1024, 8, 128) == 128
    assert run_in_blocks("zigzag", 1024, 8, 768) == 256
    assert run_in_blocks("striped", 1024, 8, 128) == 16
