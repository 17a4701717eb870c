"""The ring steps of a route, against masks by their definition, and the hops between them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import mesh_of
from ring_cases import kept_scores
from routes import hops_of_passes, route_of_passes

import burst_jax
from burst_jax.layouts.parse import parse_layout
from burst_jax.ring.rotation import (
    ShardShape,
    backward_bytes,
    choose_rotation,
    forward_bytes,
    hop_bytes,
)
from burst_jax.ring.route import ChunkedSend, RingMask, make_route
from pallas_kernels.mask import Mask

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")
AXES = {1: ("seq",), 2: ("outer", "inner")}
WINDOWS = ((None, None), (None, 0), (0, 0), (5, 0), (3, 2), (0, 7), (None, 3), (40, 11))


def route_of(sizes, layout, lengths, window, rotates_query=False):
    (q_length, kv_length), (left, right) = lengths, window
    mask = RingMask(
        sizes, parse_layout(layout), q_length, kv_length, Mask(left, right), rotates_query
    )
    return make_route(AXES[len(sizes)], mask)


def needed(sizes, layout, lengths, window, rotates_query):
    """Offsets of the steps with an allowed score on some device, by the dense mask."""
    of = sizes, layout, lengths, window, rotates_query
    every = itertools.product(*map(range, sizes))
    return {offset for offset in every if any(kept_scores(*of, offset))}


@pytest.mark.parametrize("rotates_query", [False, True], ids=["kv", "query"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (8,), (2, 3), (4, 1)], ids=str)
def test_steps_are_those_that_an_allowed_score_needs(sizes, layout, rotates_query):
    skipped = 0
    for lengths, window in itertools.product([(4, 4), (6, 2), (2, 8)], WINDOWS):
        route = route_of(sizes, layout, lengths, window, rotates_query)
        start = (0,) * len(sizes)
        assert route.offsets[0] == start
        want = needed(sizes, layout, lengths, window, rotates_query) | {start}
        assert set(route.offsets) == want, (lengths, window)
        assert len(route.offsets) == len(want)
        for offsets in route.passes:
            assert len({offset[:-1] for offset in offsets}) == 1
            assert list(offsets) == sorted(offsets)
        skipped += math.prod(sizes) - len(want)
    assert skipped or math.prod(sizes) < 3


@pytest.mark.parametrize("inner_first", [False, True], ids=["mesh-order", "inner-first"])
@pytest.mark.parametrize("sizes", [(4,), (2, 3)], ids=str)
def test_sends_bring_the_block_of_the_source(sizes, inner_first):
    """At each step a device holds the block of ``route.source``, for both orders of mesh axes."""
    n, axes = math.prod(sizes), AXES[len(sizes)]
    along = list(zip(axes, sizes, strict=True))
    mesh = mesh_of(**dict(along[::-1] if inner_first else along))
    route = route_of(sizes, "contiguous", (1, 1), (None, None))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(axes), out_specs=P(None, axes))
    def visit(block):
        held = []
        for offset in route.offsets:
            sent = route.send({"block": block}, route.offsets[0], offset)["block"]
            held.append(jnp.stack([sent[0], route.source(offset)]))
        back = route.send(sent, route.offsets[-1], route.offsets[0])
        return jnp.stack([*held, jnp.stack([back[0], block[0]])])[:, None]

    held = np.asarray(visit(jnp.arange(n, dtype=jnp.int32)))
    assert held.shape == (n + 1, n, 2)
    np.testing.assert_array_equal(held[..., 0], held[..., 1])
    known = [[route.source_on(device, x) for device in range(n)] for x in route.offsets]
    np.testing.assert_array_equal(held[:-1, :, 1], known)
    np.testing.assert_array_equal(np.sort(held[:-1, :, 0], axis=0).T, np.tile(np.arange(n), (n, 1)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_chunks_are_even_and_join_to_the_whole(count):
    rng = np.random.default_rng(0)
    tree = {"kv": rng.normal(size=(2, 3, 5)), "ids": rng.integers(0, 9, (3,)), "none": None}
    tree = jax.tree.map(jnp.asarray, tree)
    chunks = ChunkedSend(tree, count)
    sizes = [jax.tree.leaves(chunk)[1].size for chunk in chunks.arrays[0]]
    assert (len(sizes), sum(sizes)) == (count, 30)
    assert max(sizes) - min(sizes) <= 1
    for _ in sizes:
        chunks.send(route_of_passes(1), (0,), (0,))  # to where they are
    whole = chunks.received()
    assert jax.tree.structure(whole) == jax.tree.structure(tree)
    for name in ("kv", "ids"):
        np.testing.assert_array_equal(whole[name], tree[name])


def permutes(
    window=None, layout="contiguous", backward: Any = "rotate_kv", wrap: Any = lambda x: x, **ids
):
    """Number of ``ppermute`` equations of the forward and the backward pass, on 8 devices."""
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(seq=8), layout=layout, local_window_size=window,
        backward=backward, **ids,
    )  # fmt: skip
    x = jnp.zeros((1, 128, 2, 8))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(wrap(attend), x, x, x)[1](x))(x)
    return count(jaxpr.jaxpr, "ppermute")


def test_a_window_makes_few_hops():
    """16 tokens a device: 33 tokens back reach the third device back, 5 ahead the next one."""
    # K and V forward; backward K and V, dK and dV.
    assert permutes((33, 5)) == 2 * 4 + 2 * 4 + 2 * 4
    # K and V forward; Q, dO and (lse, delta) backward, and dQ.
    assert permutes((33, 0), backward="rotate_query") == 2 * 3 + 3 * 3 + 3
    assert permutes((0, 0)) == 0
    # A zigzag shard has two neighbours on either side.
    assert permutes((5, 0), "zigzag") == 2 * 2 + 2 * 2 + 2 * 2
    # Segment ids skip no step: they are traced, so what they mask is unknown. They are sent, too.
    ids = jnp.ones((1, 128), jnp.int32)
    both = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    assert permutes(None, **both) == 3 * 7 + 3 * 7 + 2 * 7


def test_what_the_names_save_needs_no_second_ring():
    """Something comes before the attention, so that its inputs too are recomputed."""

    def hops(policy):
        def wrap(attend):
            return jax.checkpoint(lambda *xs: attend(*map(jnp.sin, xs)), policy=policy)

        return permutes(wrap=wrap)

    saved = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)
    assert (hops(saved), hops(None)) == (permutes(), permutes() + 2 * 7)


@pytest.mark.parametrize(("kv_heads", "chosen"), [(8, "rotate_query"), (4, "rotate_kv")])
def test_auto_rotates_the_side_with_fewer_bytes(kv_heads, chosen):
    shape = ShardShape(16, 16, 8, kv_heads, 32, itemsize=2, batch=3, value_dim=24)
    tokens, hops = 3 * 16, hops_of_passes(4)
    # K, V and their float32 gradients; Q, dO, float32 lse and delta, and float32 dQ.
    kv = (tokens * kv_heads * 56 * 2, tokens * kv_heads * 56 * 4)
    query = (tokens * 8 * (56 * 2 + 2 * 4), tokens * 8 * 32 * 4)
    assert (hop_bytes("rotate_kv", shape), hop_bytes("rotate_query", shape)) == (kv, query)
    assert backward_bytes("rotate_kv", hops, shape) == 3 * sum(kv)
    assert forward_bytes(hops, shape) == 3 * kv[0]
    assert choose_rotation("auto", shape, kv_hops=hops, query_hops=hops) == chosen
    # A window may need fewer hops of one side.
    few = hops_of_passes(1)
    assert choose_rotation("auto", shape, kv_hops=few, query_hops=hops) == "rotate_kv"
    assert choose_rotation("rotate_query", shape, kv_hops=few, query_hops=hops) == "rotate_query"
