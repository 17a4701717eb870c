"""The order in which a work tile of the sm90 backward kernel visits query tiles and heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec
from pallas_kernels.inputs import AttentionInputs, KVSide, QuerySide
from pallas_kernels.mosaic.sm90 import dq, query_order
from pallas_kernels.mosaic.sm90.configs import backward_config


@pytest.mark.parametrize("groups", [2, 3, 8, 300])
def test_every_full_tile_of_every_head_is_visited_once(groups):
    for full in (1, 2, 100, 253):
        for tile in (0, 1, 77, 511):
            steps = jnp.arange(full * groups, dtype=jnp.int32)
            at = jnp.int32(full), groups, jnp.int32(tile)
            index, group = map(np.asarray, query_order.chunk_order(steps, *at))
            seen = set(zip(index.tolist(), group.tolist(), strict=True))
            assert seen == {(x, y) for x in range(full) for y in range(groups)}


def test_chunks_come_from_the_last_to_the_first_and_start_apart(monkeypatch):
    """So work tiles of different lengths read the same part of the queries."""
    monkeypatch.setattr(query_order, "_CHUNK_STEPS", 12)

    def order(full, tile):
        steps = jnp.arange(full * 2, dtype=jnp.int32)
        index, group = query_order.chunk_order(steps, jnp.int32(full), 2, jnp.int32(tile))
        # Counted from the last tile, as a causal mask ends with it.
        return [(full - 1 - int(i), int(g)) for i, g in zip(index, group, strict=True)]

    long, short = order(20, 0), order(14, 1)
    assert long[:3] == [(5, 0), (5, 1), (4, 0)]
    assert short[:2] == [(3, 1), (2, 0)]
    for first in (0, 12):
        assert set(long[first : first + 12]) == set(short[first : first + 12])
    # What is left, from its first step on if the work tile would start past its end.
    assert short[24:] == [(13, 0), (13, 1), (12, 0), (12, 1)]


@pytest.mark.parametrize(
    ("kv_heads", "length", "dim", "mask", "segments", "chunks"),
    [
        (8, 32768, 128, {"right": 0}, False, True),
        (8, 16384, 128, {"right": 0}, False, False),
        (32, 32768, 128, {"right": 0}, False, False),
        (8, 32768, 64, {"right": 0}, False, False),
        (8, 32768, 128, {}, False, False),
        (8, 32768, 128, {"left": 4095, "right": 0}, False, False),
        (8, 32768, 128, {"right": 0}, True, False),
    ],
)
def test_chunks_are_for_long_causal_calls_with_shared_heads(
    kv_heads, length, dim, mask, segments, chunks
):
    def heads(count) -> Any:
        return jax.ShapeDtypeStruct((1, length, count, dim), jnp.bfloat16)

    positions: Any = jax.ShapeDtypeStruct((length,), jnp.int32)
    ids: Any = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None
    keys = KVSide(heads(kv_heads), heads(kv_heads), positions, ids)
    inputs = AttentionInputs(QuerySide(heads(32), positions, ids), keys)
    spec = AttentionSpec.of(0.1, **mask)
    static = dq.backward_static(inputs, spec, backward_config(dim))
    # As with intervals, which masks by arrays are not.
    static = dataclasses.replace(static, has_intervals=segments)
    assert static.visits_chunks == chunks
