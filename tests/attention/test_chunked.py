"""``attention_chunk_size``: a query attends to keys of its own chunk of C positions."""

from __future__ import annotations

from typing import Any

import dense
import jax
import numpy as np
import pytest
from rings import T, assert_close, attend, forward_and_gradients, make_inputs, make_mesh

import burst_jax
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request

LENGTH = 120


def chunk_mask(size: int, positions: Any = None) -> np.ndarray:
    """bool ``[T, S]`` by definition; ``positions`` ``[T]`` of the queries."""
    keys = np.arange(LENGTH)
    queries = keys if positions is None else np.asarray(positions)
    return queries[:, None] // size == keys // size


@pytest.mark.parametrize(
    ("n", "layout", "size", "options"),
    [
        (1, "contiguous", 7, {}),
        (3, "contiguous", 40, {}),
        (4, "contiguous", 13, {"is_causal": False}),
        (3, "zigzag", 20, {"is_causal": False, "local_window_size": (5, 9)}),
        (5, "zigzag", 31, {"backward": "rotate_query"}),
        (5, "zigzag", 24, {"backward": "rotate_kv"}),
        (4, "striped", 1, {}),
        (4, "striped:5", 50, {"logits_soft_cap": 3.0}),
        (3, "zigzag", 1000, {}),
    ],
)
def test_chunks_on_a_ring_are_exact(n, layout, size, options):
    (query, key, value), cotangents = make_inputs(length=LENGTH)
    causal = options.get("is_causal", True)
    keep = chunk_mask(size) & (np.tri(LENGTH, dtype=bool) if causal else True)
    if "local_window_size" in options:
        ahead = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
        keep = keep & (ahead >= -5) & (ahead <= 9)
    run = attend(make_mesh(1, n, 1), layout, attention_chunk_size=size, **options)
    got = forward_and_gradients(run)((query, key, value), cotangents)
    cap = options.get("logits_soft_cap")
    assert_close(got, dense.truth(query, key, value, keep[None], *cotangents, cap))


@pytest.mark.parametrize("offset", [-30, 17])
def test_chunks_count_global_positions(offset):
    """Positions of queries that an offset moves, also below 0, with documents and padding."""
    (query, key, value), cotangents = make_inputs(length=LENGTH)
    ids: Any = np.repeat([1, 2, 0, 3], 30)[None].repeat(2, 0)
    keep = chunk_mask(32, np.arange(LENGTH) + offset)
    keep = keep & (ids[0][:, None] == ids[0]) & (ids[0][:, None] != 0)

    def run(*arrays):
        query, key, value = arrays
        return burst_jax.local_attention(
            query,
            key,
            value,
            attention_chunk_size=32,
            query_offset=offset,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            return_residual=True,
        )

    got = forward_and_gradients(run)((query, key, value), cotangents)
    assert_close(got, dense.truth(query, key, value, keep[None], *cotangents))


@pytest.mark.parametrize(
    ("layout", "size", "causal", "offset", "hops"),
    [
        ("contiguous", 32, True, 0, 0),
        ("contiguous", 32, False, 0, 0),
        ("contiguous", 48, True, 0, 1),
        ("contiguous", 48, False, 0, 2),
        ("contiguous", 64, False, 16, 3),
        ("contiguous", 128, True, 0, 3),
        ("contiguous", 2**40, True, 0, 3),
        ("zigzag", 16, True, 0, 0),
        ("zigzag", 32, True, 0, 2),
        ("striped", 64, True, 0, 3),
    ],
)
def test_a_ring_skips_hops_between_chunks(layout, size, causal, offset, hops):
    """4 devices with 32 tokens each."""
    request = make_request(
        RingArguments(
            layout=layout, is_causal=causal, attention_chunk_size=size, query_offset=offset
        ),
        axis_argument="seq_axis",
        axes="seq",
        size_of=lambda *_: 4,
        head_dim=8,
    )
    assert len(request.route(32, 32).offsets) - 1 == hops


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8", np.array([8])])
def test_mistakes(size):
    (query, key, value), _ = make_inputs()
    with pytest.raises(
        ValueError, match=r"attention_chunk_size is .*: it must be an integer, at l"
    ):
        burst_jax.local_attention(query, key, value, attention_chunk_size=size)


def test_a_layer_takes_chunks():
    """The layers' options are the call's arguments, so they need no code for a new one."""
    mesh = make_mesh(1, 2, 1)
    query = jax.random.normal(jax.random.key(0), (2, T, 4, 8))
    attend_fn = burst_jax.nnx_attention_fn(mesh=mesh, is_causal=True, attention_chunk_size=8)
    want = burst_jax.local_attention(query, query, query, is_causal=True, attention_chunk_size=8)
    assert_close(attend_fn(query, query, query), want)
