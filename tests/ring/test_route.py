"""Where blocks stop: against masks by their definition, and the hops between the stops."""

from __future__ import annotations

import functools
import itertools
import math

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import mesh_of
from ring_cases import kept_scores
from routes import hops_of_turns

import burst_jax
from burst_jax.ring.route import RingMask, cut, make_route, paste
from burst_jax.ring.schedule import count_hops
from pallas_kernels.mask import Mask

LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")
AXES = {0: (), 1: ("seq",), 2: ("outer", "inner")}
WINDOWS = ((None, None), (None, 0), (0, 0), (5, 0), (3, 2), (0, 7), (None, 3), (40, 11))


def route_of(sizes, layout, lengths, window, queries_travel=False):
    (q_length, kv_length), (left, right) = lengths, window
    mask = RingMask(sizes, layout, q_length, kv_length, Mask(left, right), queries_travel)
    return make_route(AXES[len(sizes)], mask)


def needed(sizes, layout, lengths, window, queries_travel):
    """Stops at which some device has a score that counts, by the dense mask."""
    of = sizes, layout, lengths, window, queries_travel
    return {stop for stop in itertools.product(*map(range, sizes)) if any(kept_scores(*of, stop))}


@pytest.mark.parametrize("queries_travel", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (8,), (2, 3), (3, 2), (4, 1)], ids=str)
def test_stops_are_those_that_a_score_needs(sizes, layout, queries_travel):
    left_out = 0
    for lengths, window in itertools.product([(4, 4), (6, 2), (2, 8)], WINDOWS):
        route = route_of(sizes, layout, lengths, window, queries_travel)
        start = (0,) * len(sizes)
        assert route.stops[0] == start
        want = needed(sizes, layout, lengths, window, queries_travel) | {start}
        assert set(route.stops) == want, (lengths, window)
        assert len(route.stops) == len(want)
        for turn in route.turns:
            assert len({stop[:-1] for stop in turn}) == 1
            assert list(turn) == sorted(turn)
        left_out += math.prod(sizes) - len(want)
    assert left_out or math.prod(sizes) < 3


def test_no_axis_is_one_stop():
    route = route_of((), "contiguous", (4, 4), (None, 0))
    assert (route.size, route.stops, count_hops(route)) == (1, ((),), hops_of_turns(1))


@pytest.mark.parametrize(
    ("turns", "hops"),
    [
        ([1], (0, 0, 0, 0)),
        ([8], (7, 7, 0, 0)),  # a ring: n - 1 hops
        ([8, 8], (15, 15, 1, 2)),  # two nodes of eight: the same, of which few between the nodes
        ([4, 4, 4], (11, 11, 2, 3)),
        ([1, 1, 1], (2, 2, 2, 2)),  # nothing to send from the first turn, of one stop
        ([3], (2, 2, 0, 0)),  # a window of two shards: two hops; one, and the jump home
    ],
    ids=str,
)
def test_hops(turns, hops):
    assert hops_of_turns(*turns) == hops


@pytest.mark.parametrize("inner_first", [False, True], ids=["mesh-order", "inner-first"])
@pytest.mark.parametrize("sizes", [(4,), (2, 3)], ids=str)
def test_moves_bring_the_block_of_the_source(sizes, inner_first):
    """What a device holds at a stop is the block of ``route.source(stop)``.

    The outer axis need not be the first one of the mesh.
    """
    n, axes = math.prod(sizes), AXES[len(sizes)]
    along = list(zip(axes, sizes, strict=True))
    mesh = mesh_of(**dict(along[::-1] if inner_first else along))
    route = route_of(sizes, "contiguous", (1, 1), (None, None))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(axes), out_specs=P(None, axes))
    def visit(block):
        held = []
        for stop in route.stops:
            moved = route.move({"block": block}, route.stops[0], stop)["block"]
            held.append(jnp.stack([moved[0], route.source(stop)]))
        back = route.move(moved, route.stops[-1], route.stops[0])
        return jnp.stack([*held, jnp.stack([back[0], block[0]])])[:, None]

    held = np.asarray(visit(jnp.arange(n, dtype=jnp.int32)))
    assert held.shape == (n + 1, n, 2)
    np.testing.assert_array_equal(held[..., 0], held[..., 1])
    np.testing.assert_array_equal(np.sort(held[:-1, :, 0], axis=0).T, np.tile(np.arange(n), (n, 1)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_pieces_make_the_whole(count):
    rng = np.random.default_rng(0)
    tree = {"kv": rng.normal(size=(2, 3, 5)), "ids": rng.integers(0, 9, (3,)), "none": None}
    tree = jax.tree.map(jnp.asarray, tree)
    pieces = cut(tree, count)
    assert len(pieces) == count
    sizes = [jax.tree.leaves(piece)[1].size for piece in pieces]
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 1
    whole = paste(pieces, tree)
    assert jax.tree.structure(whole) == jax.tree.structure(tree)
    for name in ("kv", "ids"):
        np.testing.assert_array_equal(whole[name], tree[name])


def permutes(window, layout="contiguous", n=8, **options):
    """``ppermute`` equations of the forward, and of forward and backward."""
    mesh = mesh_of(seq=n)
    x = jnp.zeros((1, 16 * n, 2, 8))
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh, layout=layout, local_window_size=window, **options
    )

    def both(x):
        out, vjp = jax.vjp(attend, x, x, x)
        return vjp(out)

    return [
        count(jax.make_jaxpr(run)(*args).jaxpr, "ppermute")
        for run, args in ((attend, [x] * 3), (both, [x]))
    ]


def test_a_window_makes_few_hops():
    """16 tokens a device: 33 tokens back reach the third device back, 5 ahead the next one."""
    # K and V, and backward dK and dV.
    assert permutes((33, 0), backward="rotate_kv") == [2 * 3, 2 * 3 + 2 * 3 + 2 * 3]
    # Q, dO and (lse, delta).
    assert permutes((33, 0), backward="rotate_query") == [2 * 3, 2 * 3 + 3 * 3 + 3]
    assert permutes((33, 5), backward="rotate_kv") == [2 * 4, 2 * 4 + 2 * 4 + 2 * 4]
    assert permutes((0, 0), backward="rotate_kv") == [0, 0]
    # A zigzag shard has two neighbours on either side; striped shards have tokens everywhere.
    assert permutes((5, 0), "zigzag", backward="rotate_kv") == [2 * 2, 2 * 2 + 2 * 2 + 2 * 2]
    assert permutes((8, 0), "striped", backward="rotate_kv") == [2 * 7, 2 * 7 + 2 * 7 + 2 * 7]


def test_segment_ids_do_not_shorten_the_way():
    """They are data: what they hide is not known when the program is made."""
    ids = jnp.ones((1, 128), jnp.int32)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    assert permutes(None, **segments)[0] == 3 * 7  # K, V and their ids


def test_dense_masks_and_routes_mean_the_same_window():
    """(left, right) here is local_window_size, as in the dense mask that all tests compare with."""
    keep = dense.Mask(window=(3, 2)).dense(None, None, 8, 8)[0]
    route = route_of((8,), "contiguous", (1, 1), (3, 2))
    seen = {(q - kv) % 8 for q, kv in zip(*np.nonzero(keep), strict=True)}
    assert {stop[0] for stop in route.stops} == seen
