"""Half-sequence remat: gradients from saved results of the sequence's second half alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, mesh_of
from ring_cases import a_case, assert_exact, case_id

import burst_jax
from burst_jax.attention.api import ring_call
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from burst_jax.layouts.parse import parse_layout
from burst_jax.models import DecoderConfig, abstract_decoder
from burst_jax.models.remat import Remat
from burst_jax.parallel.mesh import flat_names
from burst_jax.ring.half_remat import (
    attend_recomputing_half,
    attend_saving_half,
    first_half_request,
    redistribute,
    redistribute_back,
)
from burst_jax.ring.route import Route, scores_per_step


def half_attention(query, key, value, *, mesh, return_residual, seq_axis, **options):
    """``burst_attention`` that recomputes the first half of the sequence.

    Results and gradients are those of the recomputation.
    """
    assert return_residual
    tokens = P(None, flat_names(seq_axis, options.get("ulysses_axis")))
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in options.items() if name not in arrays}
    by_token = ("segment", "positions")
    specs = {name: tokens if any(x in name for x in by_token) else P() for name in arrays}

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(tokens,) * 3 + (specs,), out_specs=(tokens, tokens)
    )
    def on_device(query, key, value, arrays):
        call = ring_call(query, key, value, seq_axis, **arrays, **static)
        *_, saved = attend_saving_half(*call)
        return attend_recomputing_half(*call, jax.tree.map(lax.stop_gradient, saved))

    return on_device(query, key, value, arrays)


QUICK = [a_case(2, "zigzag", "packed_causal", "rotate_query") | {"numbers": "both"}]
# The dense reference compiles sooner.
DENSE: Any = {"implementation": "reference"}
CASES = [
    *QUICK,
    # 13 stripes per shard, 7 of them recomputed.
    a_case(3, "striped:4", "packed_causal", shard="50", **DENSE),
    # The first half of a shard is 25 tokens, an odd number: not redistributed.
    a_case(3, "zigzag", "window20", shard="50", **DENSE),
    a_case("1x2+h2", "zigzag", "packed_window_cap", **DENSE) | {"numbers": "sinks"},
]


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, QUICK))
def test_it_is_as_exact_as_one_device(case, program):
    assert_exact(case, attention=half_attention, jit=program)


@pytest.mark.parametrize("sizes", [(1,), (3,), (4,), (2, 3)], ids=str)
def test_contiguous_shards_are_redistributed_as_zigzag(sizes):
    names = ("outer", "inner")[: len(sizes)]
    order = list(zip(names, sizes, strict=True))[::-1]  # The mesh's order does not matter.
    n = math.prod(sizes)
    tokens = jnp.arange(12 * n).reshape(2, 6 * n)
    route = Route(names, sizes, (((0,) * len(sizes),),))

    def on_device(x):
        zigzag = redistribute(route, (x, x))
        return zigzag[0], redistribute_back(route, zigzag)[1]

    run = jax.shard_map(
        on_device, mesh=mesh_of(**dict(order)), in_specs=P(None, names), out_specs=P(None, names)
    )
    zigzag, again = jax.jit(run)(tokens)
    np.testing.assert_array_equal(zigzag, burst_jax.to_layout(tokens, "zigzag", n))
    np.testing.assert_array_equal(again, tokens)


def request(n, layout, *, left=None):
    window: Any = {} if left is None else {"local_window_size": (left, 0)}
    arguments = RingArguments(is_causal=True, layout=layout, **window)
    sizes: Any = {"axis_argument": "seq_axis", "axes": "seq", "size_of": lambda *_: n}
    return make_request(arguments, **sizes, head_dim=8)


def work(request, tokens):
    """Scores of all devices, and of the busiest device of each step: ``(sum, sum)``."""
    counts = scores_per_step(request.route(tokens, tokens), request.ring_mask(tokens, tokens))
    most, mean = (sum(column) for column in zip(*counts.values(), strict=True))
    return mean * request.ring_size, most


@pytest.mark.parametrize("layout", ["zigzag", "striped", "striped:2"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_a_quarter_of_the_scores_is_recomputed(n, layout):
    tokens = 64
    whole, ring = request(n, layout), first_half_request(request(n, layout), tokens)
    scores, busiest = work(ring, tokens // 2)
    length = n * tokens // 2
    assert scores == length * (length + 1) / 2
    assert scores / work(whole, tokens)[0] == pytest.approx(1 / 4, rel=0.02)
    # No device waits for others, but at the first step, where some have half a diagonal more.
    assert busiest == pytest.approx(scores / n, rel=0.07)


@pytest.mark.parametrize(
    ("left", "tokens", "layout"),
    [(None, 32, "zigzag"), (200, 32, "zigzag"), (20, 32, "contiguous"), (None, 31, "contiguous")],
)
def test_the_first_half_runs_in_the_layout_with_the_least_waiting(left, tokens, layout):
    whole = request(8, "zigzag", left=left)
    ring, other = (
        dataclasses.replace(whole, layout=parse_layout(each))
        for each in (layout, {"zigzag": "contiguous"}.get(layout, "zigzag"))
    )
    assert first_half_request(whole, 2 * tokens) == ring
    assert tokens % 2 or work(ring, tokens)[1] <= work(other, tokens)[1]


CONFIG = DecoderConfig(
    vocab_size=40, num_layers=3, embed_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
B, T, N = 2, 48, 3


def kept(remat: Remat):
    """The shapes of what a gradient's backward pass is given."""
    mesh = mesh_of(fsdp=2, seq=N)
    options: Any = {"rules": burst_jax.ShardingRules.of(mesh), "layout": "zigzag"}
    config = dataclasses.replace(CONFIG, remat=remat)
    graphdef, params = abstract_decoder(config, mesh=mesh, implementation="xla", **options)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def forward(params, tokens, positions):
        return jax.vjp(lambda params: nnx.merge(graphdef, params)(tokens, positions), params)

    _, vjp = jax.eval_shape(forward, params, tokens, tokens)
    return [x.shape for x in jax.tree.leaves(vjp)]


def test_a_layer_keeps_its_input_and_half_of_its_attention():
    lead, tokens = (CONFIG.num_layers * 2 * N, B // 2), T // N
    heads, width = CONFIG.num_heads, CONFIG.head_dim
    sizes = []
    for remat, length in (("attention", tokens), ("half", tokens // 2)):
        shapes = kept(remat)
        arrays = [(tokens, CONFIG.embed_dim), (length, heads, width), (heads, length)]
        of_layers = [shape for shape in shapes if shape[:2] == lead]
        assert sorted(of_layers) == sorted((*lead, *array) for array in arrays)
        sizes.append(sum(map(math.prod, shapes)))
    assert sizes[0] - sizes[1] == CONFIG.num_layers * B * T // 2 * (heads * width + heads)


# Positions and segment ids, as a decoder passes them.
PLACED = {
    f"{side}_{what}": jnp.ones((1, 8), jnp.int32)
    for side in ("query", "key_value")
    for what in ("positions", "segment_ids")
}


@pytest.mark.parametrize(
    ("layout", "keys", "options", "message"),
    [
        ("zigzag", 8, {}, r"is_causal is False, or .* save all of it \(remat="),
        (
            "zigzag",
            16,
            {"is_causal": True},
            "query has 4 tokens per shard, key 8: .* one s",
        ),
        ("contiguous", 8, {"is_causal": True}, r"layout is 'contiguous' over 2 devices.*zigzag"),
        ("zigzag", 8, {"is_causal": True, "query_offset": 1}, "query_offset, .* save all of it"),
        (
            "balanced:4",
            8,
            {"is_causal": True, **PLACED},
            r"^layout is 'balanced:4', .*; use layout=\"zigzag\" .* save all of it \(remat=",
        ),
    ],
    ids=["full", "keys", "contiguous", "offset", "balanced"],
)
def test_what_it_cannot_do_raises(layout, keys, options, message):
    q, k = jnp.ones((1, 8, 2, 8)), jnp.ones((1, keys, 2, 8))
    options |= {"mesh": make_mesh(seq=2), "seq_axis": "seq", "layout": layout}
    attend = functools.partial(half_attention, return_residual=True, **options)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        jax.eval_shape(attend, q, k, k)
