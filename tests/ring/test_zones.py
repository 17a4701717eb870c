"""Balanced layouts: documents whole on a shard or split over zones, against float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import compare
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from meshes import mesh_of

import burst_jax
from burst_jax.layouts.balanced import balance_batch

KV, H, HV = 2, 8, 6
# Lengths of the documents of two sequences, shards of 24 tokens, and a zone. Short documents are
# whole, some of them partly in the zone; padding; one document alone; documents that fit exactly.
MIXES = {
    "mixed": lambda n: [[8 * n + 9, 14, 9] + [9, 6, 1] * (n - 2), [14, 2] * n],
    "one": lambda n: [[24 * n], [24 * n - 5]],
    "whole": lambda n: [[24] * n, [12, 11] * n],
}
# Where blocks go does not depend on it, and it compiles in two thirds of the time.
DENSE = {"implementation": "reference"}
CASES = [
    # mesh, axes, mix, zone, heads, dtype, options. Zones of more than two shards in all are sent
    # in slices: a zone of 18 on 5 devices in two, of 16 on 8 devices in three.
    ({"seq": 2}, {}, "mixed", 16, 4, "float32", {"backward": "rotate_kv"}),
    ({"seq": 3}, {}, "mixed", 20, 2, "bfloat16", {"sinks": True}),
    (
        {"seq": 5}, {}, "mixed", 18, 4, "float32",
        {"local_window_size": (9, 0), "logits_soft_cap": 2.0, "sinks": True, **DENSE},
    ),
    ({"seq": 3}, {}, "one", None, 4, "float32", {"sinks": True, **DENSE}),
    (
        {"seq": 4}, {}, "whole", 8, 4, "float32",
        {"local_window_size": (3, 4), "is_causal": False, **DENSE},
    ),
    ({"seq": 1}, {}, "whole", None, 4, "float32", DENSE),
    (
        {"outer": 2, "seq": 3},
        {"seq_axis": ("outer", "seq")},
        "mixed", 18, 4, "float32", DENSE,
    ),
    (
        {"data": 2, "seq": 2, "heads": 2},
        {"batch_axis": "data", "ulysses_axis": "heads"},
        "mixed", 18, 4, "float32", DENSE,
    ),
]  # fmt: skip


@functools.cache
def placed(mix, shards, zone):
    """A placement for each of two sequences."""
    lengths = MIXES[mix](shards)
    return lengths, balance_batch(lengths, num_shards=shards, tokens_per_shard=24, zone=zone)


def in_order(placements, arrays, *, inverse=False):
    """Arrays ``[B, T, ...]`` placed, or restored and padded, sequence by sequence."""

    def one(x):
        x = np.asarray(x)
        if not inverse:
            return np.stack([p.place(row, 0) for p, row in zip(placements, x, strict=True)])
        rows = [p.restore(row, 0) for p, row in zip(placements, x, strict=True)]
        return np.stack([np.concatenate([r, np.zeros_like(x[0, len(r) :])]) for r in rows])

    return jax.tree.map(one, arrays)


def arguments(placements):
    """Layout, segment ids and positions of a call."""
    own, order = (
        np.stack([getattr(p, name) for p in placements]) for name in ("segment_ids", "positions")
    )
    call: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), own)
    call |= dict.fromkeys(("query_positions", "key_value_positions"), order)
    return call | {"layout": placements[0].layout}


def ids_of(lengths, total):
    """Segment ids in natural order, 0 after the documents."""
    ids = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    return np.stack([np.pad(x, (0, total - len(x))) for x in ids]).astype(np.int32)


@pytest.mark.parametrize(
    ("sizes", "axes", "mix", "zone", "heads", "dtype", "options"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 2 else ()) for i, case in enumerate(CASES)],
    ids=["-".join(f"{k}{v}" for k, v in c[0].items()) + f"-{c[2]}" for c in CASES],
)
def test_balanced_layouts_are_as_exact_as_one_device(sizes, axes, mix, zone, heads, dtype, options):
    ring = {name: size for name, size in sizes.items() if name not in ("heads", "data")}
    shards = int(np.prod(list(ring.values())))
    lengths, placements = placed(mix, shards, zone)
    total, rng = 24 * shards, np.random.default_rng(0)
    shapes = [(heads, H), (KV, H), (KV, HV), (heads, HV)]
    q, k, v, do = (rng.normal(size=(2, total, *x)).astype(np.float32) for x in shapes)
    q, k, v, do = (x.astype(jnp.dtype(dtype)) for x in (q, k, v, do))
    dlse = rng.normal(size=(2, total, heads)).astype(np.float32)
    ids = ids_of(lengths, total)
    options = {"is_causal": True, **options}
    sinks: Any = {"sink_logits": rng.normal(size=heads).astype(np.float32)}
    sinks = sinks if options.pop("sinks", False) else {}

    given: Any = options | axes | arguments(placements)
    given |= {"mesh": mesh_of(**sizes), "return_residual": True}

    def attend(q, k, v, sinks):
        return burst_jax.burst_attention(q, k, v, **given, **sinks)

    @quick_jit
    def run(arrays, cotangents):
        results, vjp = jax.vjp(attend, *arrays, sinks)
        return results, vjp(cotangents)

    arrays, cotangents = in_order(placements, ((q, k, v), (do, dlse)))
    results, (*gradients, of_sinks) = run(arrays, cotangents)
    got = in_order(placements, (*results, *gradients), inverse=True)
    blind = {"sink_logits": sinks["sink_logits"]} if sinks else {}
    got[1][ids == 0] = blind.get("sink_logits", -np.inf)
    masks = {name: x for name, x in options.items() if name not in ("backward", *DENSE)}
    reference = dense.reference(
        do, np.where(ids[..., None] == 0, 0, dlse), query=q, key=k, value=v,
        query_segment_ids=ids, key_value_segment_ids=ids, **masks, **sinks,
    )  # fmt: skip
    got = [*got, *of_sinks.values()]
    compare.assert_exact(got, reference, dtype)
    padding = in_order(placements, ids) == 0
    for x in (results[0], *gradients):
        assert not np.asarray(x)[padding].any()


def test_ring_attention_runs_them_inside_a_shard_map():
    given = arguments(placed("mixed", 3, 18)[1])
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 72, n, H)), jnp.float32) for n in (4, KV, KV))
    attend = {"layout": given.pop("layout"), "is_causal": True, **DENSE}
    mesh, spec = mesh_of(seq=3), P(None, "seq")

    @quick_jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def inside(q, k, v, given):
        return burst_jax.ring_attention(q, k, v, "seq", **attend, **given)

    want = burst_jax.burst_attention(q, k, v, mesh=mesh, **attend, **given)
    np.testing.assert_array_equal(inside(q, k, v, given), want)


def a_call(mix, zone):
    """Keyword arguments on two devices."""
    return arguments(placed(mix, 2, zone)[1]) | {"mesh": mesh_of(seq=2), "is_causal": True}


@pytest.mark.parametrize(("mix", "sends"), [("whole", False), ("mixed", True)])
def test_only_a_zone_is_sent(mix, sends):
    """Without one, of each sequence five segment ids: those that another shard must not have."""
    attend = functools.partial(burst_jax.burst_attention, **a_call(mix, None))
    x = jnp.zeros((2, 48, KV, H))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(attend, x, x, x)[1](x))(x).jaxpr
    sent = [
        each.invars[0].aval.size
        for each, _ in equations(jaxpr)
        if each.primitive.name.startswith(("ppermute", "all_gather", "psum_scatter", "all_to_all"))
    ]
    assert sends == (sent != [5 * 2])


def test_what_balanced_layouts_need_and_lack():
    x = jnp.zeros((2, 48, KV, H))
    good = a_call("mixed", 16)
    own, order = good["query_segment_ids"], good["query_positions"]

    def fails(kind, message, key=x, **change):
        with pytest.raises(kind, match=message):
            burst_jax.burst_attention(x, key, key, **good | change)

    ids = {"query_segment_ids": None, "key_value_segment_ids": None}
    fails(ValueError, "query_segment_ids is None with layout 'balanced:", **ids)
    fails(ValueError, "query_positions is None with layout", query_positions=None)
    twice = {"key_value_segment_ids": np.tile(own, 2), "key_value_positions": np.tile(order, 2)}
    fails(
        ValueError, "query has 48 tokens, key 96, with layout", jnp.zeros((2, 96, KV, H)), **twice
    )
    fails(ValueError, "layout is 'balanced:25', and a shard has 24 tokens", layout="balanced:25")
    fails(ValueError, "layout is 'balanced', without the size of its gath", layout="balanced")
    slopes = jnp.ones(KV)
    layouts = itertools.cycle(("zigzag", "striped"))
    for name, value in {
        "alibi_slopes": slopes, "prefix_lengths": np.array([1, 1]), "attention_chunk_size": 4,
        "key_ends": order, "dropout_rate": 0.5, "block_mask": np.ones((2, 2), bool),
        "mask_mod": lambda b, h, q, k: q > k, "query_seq_lengths": np.array([4, 4]),
    }.items():  # fmt: skip
        more = {"dropout_key": jax.random.key(0)} if name == "dropout_rate" else {}
        message = f"{name} is given with layout 'balanced:.*use the zigzag or striped layout with"
        fails(NotImplementedError, message, **{name: value}, **more)
        remedy = good | {name: value, "layout": next(layouts)} | more
        remedy = {key: each for key, each in remedy.items() if not key.endswith("_positions")}
        jax.eval_shape(lambda x, o=remedy: burst_jax.burst_attention(x, x, x, **o), x)
    fails(ValueError, "pad is True with .*: .* or burst_jax.layouts.balance places", pad=True)
    fails(NotImplementedError, "backward is 'rotate_query' with layout", backward="rotate_query")
    window = (jnp.asarray(3), None)
    fails(NotImplementedError, "a traced local_window_size is given", local_window_size=window)
    for function in (burst_jax.to_layout, burst_jax.from_layout):
        with pytest.raises(ValueError, match="whose order differs between sequences: use what"):
            function(x, good["layout"], 2)
    with pytest.raises(ValueError, match="whose order differs between sequences: use what"):
        burst_jax.positions(good["layout"], 48, 2)


def attended(call, layout, gradient):
    """Out, and the gradient of the queries if wanted, of two sequences on three devices."""
    x = np.ones((2, 72, KV, H), np.float32)

    @quick_jit
    def run(x):
        attend = functools.partial(
            burst_jax.burst_attention, key=x, value=x, **call, layout=layout, is_causal=True,
            mesh=mesh_of(seq=3), **DENSE,
        )  # fmt: skip
        if not gradient:
            return (attend(x),)
        out, vjp = jax.vjp(attend, x)
        return out, *vjp(jnp.ones_like(out))

    return map(np.asarray, run(x))


def assert_nan_in(call, layout, wrong, gradient=False):
    """In tokens that a loss reads, of these sequences alone."""
    live = call["query_segment_ids"] != 0
    for x in attended(call, layout, gradient):
        assert (np.isnan(x).any((2, 3)) & live).any(1).tolist() == wrong
        assert not np.isnan(x)[~np.array(wrong)].any()


@pytest.mark.parametrize(("zone", "wrong"), [(20, False), (24, False), (1, True), (0, True)])
def test_a_zone_of_another_placement_gives_nan(zone, wrong):
    """Pieces before the zone would miss keys. The documents of the other sequence are whole."""
    call = arguments(placed("mixed", 3, 20)[1])
    del call["layout"]
    assert_nan_in(call, f"balanced:{zone}", [wrong, False], gradient=zone in (20, 1))


@pytest.mark.parametrize("zone", [0, 8])
def test_pieces_before_every_zone_give_nan(zone):
    """Padding fills the zones of all shards."""
    lengths = [[33], [7, 7, 7]]
    placements = balance_batch(lengths, num_shards=3, tokens_per_shard=24, zone=24)
    call = arguments(placements)
    assert (call["query_segment_ids"].reshape(2, 3, 24)[:, :, -8:] == 0).all()
    own = call.pop("layout")
    if not zone:
        assert_nan_in(call, own, [False, False])
    assert_nan_in(call, f"balanced:{zone}", [True, False])


@pytest.mark.parametrize(
    ("order", "zone"), [("contiguous", 0), ("contiguous", 4), ("zigzag", 0), ("striped", 4)]
)
def test_the_order_of_a_fixed_layout_gives_nan(order, zone):
    """Of a document over several shards. Documents that each lie in one are as in a placement."""
    # Contiguous, document 2 ends the first shard, with its zone, and begins the second.
    ids = [np.repeat([1, 2, 3, 4], [22, 3, 23, 24]), np.repeat([1, 2, 3], 24)]
    ids = np.stack(ids).astype(np.int32)
    places = np.stack([np.arange(72, dtype=np.int32)] * 2)
    ids, places = (burst_jax.to_layout(x, order, 3) for x in (ids, places))
    call = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    call |= dict.fromkeys(("query_positions", "key_value_positions"), places)
    assert_nan_in(call, f"balanced:{zone}", [True, order != "contiguous"])


@pytest.mark.parametrize(
    ("order", "window"), [("contiguous", None), ("zigzag", 9), ("striped", None)]
)
def test_a_zone_of_whole_shards_needs_sorted_tokens_alone(order, window):
    """Any order is right if ids and positions ascend on every shard; no other one is."""
    ids = np.repeat([[1, 2, 3], [3, 1, 2], [1, 2, 1], [0, 1, 2], [1, 3, 0]], [30, 30, 12], 1)
    index = np.asarray(burst_jax.positions(order, 72, 3))
    x = np.random.default_rng(3).normal(size=(5, 72, KV, H)).astype(np.float32)
    window = {} if window is None else {"local_window_size": (window, 0)}
    # The largest id is not that of padding.
    call: Any = dict.fromkeys(
        ("query_segment_ids", "key_value_segment_ids"),
        np.where(ids == 3, 2**31 - 1, ids).astype(np.int32),
    )
    expected = dense.reference(
        np.zeros_like(x), np.zeros(x.shape[:3], np.float32), query=x, key=x, value=x,
        is_causal=True, **window, **call,
    )[0][0]  # fmt: skip
    call = {name: each[:, index] for name, each in call.items()}
    at = np.where(ids[:, index] == 0, 0, index).astype(np.int32)
    call |= dict.fromkeys(("query_positions", "key_value_positions"), at)
    attend = functools.partial(burst_jax.burst_attention, layout="balanced:24", is_causal=True)
    attend = functools.partial(attend, mesh=mesh_of(seq=3), **window, **call, **DENSE)
    got = quick_jit(attend)(x[:, index], x[:, index], x[:, index])
    for row, own in enumerate(ids[:, index]):
        shards = np.where(own == 0, 9, own).reshape(3, 24)
        is_sorted = (np.diff(100 * shards + index.reshape(3, 24)) > 0).all()
        assert is_sorted or row in (1, 2, 3)
        assert np.isnan(got[row]).any() == (not is_sorted)
        if is_sorted:
            of_row = expected[row, index]
            np.testing.assert_allclose(got[row][own != 0], of_row[own != 0], atol=2e-6)


def test_a_layer_passes_its_positions_on():
    """With and without RoPE; the tokens' order does not matter."""
    _, placements = placed("mixed", 2, 16)
    given = arguments(placements)
    own, order = given["query_segment_ids"], given["query_positions"]
    x = np.random.default_rng(2).normal(size=(2, 48, 16)).astype(np.float32)
    natural = in_order(placements, own, inverse=True)
    for theta in (10_000.0, None):
        outs = []
        for layout, shards in ((given["layout"], 2), ("contiguous", 1)):
            layer = burst_jax.BurstAttention(
                16, 2, rope_theta=theta, mesh=mesh_of(seq=shards), layout=layout, is_causal=True,
                rngs=burst_jax.layers.nnx_layer.nnx.Rngs(0),
            )  # fmt: skip
            if layout == "contiguous":
                positions = None if theta is None else np.arange(48)
                outs.append(quick_jit(layer)(x, positions, natural))
            else:
                out = quick_jit(layer)(in_order(placements, x), order, own)
                outs.append(in_order(placements, out, inverse=True))
        live = natural != 0
        np.testing.assert_allclose(outs[0][live], np.asarray(outs[1])[live], atol=2e-6)
