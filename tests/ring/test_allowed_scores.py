"""The scores that a mask allows in a ring step, against dense masks, and the memory of counting."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import dense
import numpy as np
import pytest

import burst_jax
from burst_jax.layouts.parse import parse_layout
from burst_jax.ring.block_mask import AttentionChunks, Blocks
from burst_jax.ring.route import AllowedScores, RingMask, make_route
from pallas_kernels.mask import Mask

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2", "striped:6")
WINDOWS = ((None, None), (None, 0), (5, 0), (3, 2), (0, 7), (40, 11))


def allowed(ring: RingMask, keep, step):
    """Allowed scores by device, of a dense mask ``[T, S]`` of the whole sequences."""
    n, counts = ring.size, []
    q, kv = (
        burst_jax.positions(ring.layout, n * length, n).reshape(n, -1)
        for length in (ring.q_length, ring.kv_length)
    )
    for device in range(n):
        place = np.subtract(np.unravel_index(device, ring.ring_sizes), step) % ring.ring_sizes
        source = np.ravel_multi_index(tuple(place), ring.ring_sizes)
        of_q, of_kv = (source, device) if ring.rotates_query else (device, source)
        counts.append(int(keep[np.ix_(q[of_q], kv[of_kv])].sum()))
    return counts


def drawn(rng):
    """A ring's mask by drawn blocks or chunks, and its dense equivalent."""
    sizes = ((1,), (2,), (3,), (5,), (2, 2), (2, 3))[rng.integers(6)]
    layout, (left, right) = LAYOUTS[rng.integers(5)], WINDOWS[rng.integers(6)]
    unit, n = {"zigzag": 2, "striped:2": 2, "striped:6": 6}.get(layout, 1), math.prod(sizes)
    lengths = [unit * int(rng.integers(1, 24 // unit + 1)) for _ in range(2)]
    t, s = (n * length for length in lengths)
    kind, offset, blocks, masks = rng.integers(3), 0, None, {}
    if kind == 1:
        size = int(rng.integers(1, max(t, s) + 2))
        blocks, masks = AttentionChunks(size, size), {"attention_chunk_size": size}
        offset = int(rng.integers(-t, s + 1))
    elif kind == 2:
        q_block, kv_block = (rng.choice([x for x in range(1, y + 1) if y % x == 0]) for y in (t, s))
        table = rng.random((t // q_block, s // kv_block)) < rng.choice([0.1, 0.5, 1])
        bits = np.packbits(table).tobytes()
        blocks = Blocks(int(q_block), int(kv_block), table.shape, bits)
        masks = {"block_mask": table}
    rotates_query = bool(rng.integers(2))
    of_shard = dict(zip(("q_length", "kv_length"), lengths, strict=True))
    ring = RingMask(
        sizes, parse_layout(layout), mask=Mask(left, right), rotates_query=rotates_query,
        query_offset=offset, blocks=blocks, **of_shard,
    )  # fmt: skip
    keep = dense.kept(t, s, local_window_size=(left, right), query_offset=offset, **masks)
    return ring, keep[0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_dense_masks(seed):
    """Layouts, windows, chunks, blocks, offsets and rings, each of several sizes."""
    rng, some, none = np.random.default_rng(seed), 0, 0
    for _ in range(60):
        ring, keep = drawn(rng)
        scores = AllowedScores(ring)
        route = make_route(("outer", "inner")[-len(ring.ring_sizes) :], ring)
        for step in itertools.product(*map(range, ring.ring_sizes)):
            want = allowed(ring, keep, step)
            assert scores.by_device(*ring.shards(step)).tolist() == want, (ring, step)
            needed = any(want) or not any(step) or not ring.excludes_scores
            assert (step in route.offsets) == needed, (ring, step)
            some, none = some + any(want), none + (not any(want))
    assert min(some, none) > 10


def causal_table(blocks):
    table = np.tri(blocks, dtype=bool) & (np.random.default_rng(0).random((blocks,) * 2) < 0.5)
    return np.packbits(table).tobytes()


@pytest.mark.parametrize("layout", ["zigzag", "striped", "striped:64"])
@pytest.mark.parametrize(
    "blocks",
    [
        AttentionChunks(1, 1), AttentionChunks(32, 32), AttentionChunks(2048, 2048),
        Blocks(128, 128, (128, 128), causal_table(128)), None,
    ],
    ids=["chunks1", "chunks32", "chunks2048", "table", "causal"],
)  # fmt: skip
def test_a_route_takes_memory_in_proportion_to_the_tokens(layout, blocks):
    """Pairs of runs once took terabytes on the host. NumPy reports what its arrays take."""
    n, tokens = 4, 4096
    tracemalloc.start()
    try:
        ring = RingMask((n,), parse_layout(layout), tokens, tokens, Mask(None, 0), False, 0, blocks)
        route = make_route.__wrapped__(("seq",), ring)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 400 * n * tokens + (1 << 24)
    # Chunks within a stripe, or within half a shard, are on one device.
    alone = layout != "striped" and blocks in (AttentionChunks(1, 1), AttentionChunks(32, 32))
    alone |= layout == "striped" and blocks == AttentionChunks(1, 1)
    alone |= layout == "zigzag" and blocks == AttentionChunks(2048, 2048)
    assert len(route.offsets) == (1 if alone else n)
