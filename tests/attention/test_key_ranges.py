"""Masks that arrays say: prefixes, lengths, ranges of keys, and windows whose size is traced."""

from __future__ import annotations

import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers, key_ranges
from flax import nnx
from implementations import IMPLEMENTATIONS, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of
from ring_cases import MASKS, Ring, a_case, assert_exact, case_id, lengths
from rings import forward_and_gradients, make_inputs

import burst_jax
from burst_jax.layers.attention_fn import nnx_attention_fn

BATCH = 2


def hiding_arrays(kinds, t, s, seed=0):
    """burst_attention's arguments of these kinds, in natural order."""
    rng = np.random.default_rng(seed)
    starts, ends = key_ranges(rng, BATCH, max(t, s))
    made = {
        "prefix_lengths": np.array([s // 3, s - 5], np.int32),
        "query_seq_lengths": np.array([t, t // 2], np.int32),
        "key_value_seq_lengths": np.array([s - s // 4, s + 1], np.int32),
        "key_starts": starts[:, :t],
        "key_ends": ends[:, :t],
        "shared_ends": ends[0, :t],
    }
    given = {name: made[name] for name in kinds}
    if "shared_ends" in given:
        given["key_ends"] = given.pop("shared_ends")
    return given


RANGES = ("key_starts", "key_ends")
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
ALL = ("prefix_lengths", *LENGTHS, *RANGES)


def a_hidden_case(
    ring, layout, mask, backward, kinds, implementation="xla", window=None, **changes
):
    case = a_case(ring, layout, mask, backward, implementation) | changes
    return case | {"kinds": kinds, "window": window}


# window: (left, right) of which "-" is said by a traced number, and the other is static.
CASES = [
    a_hidden_case("1", "contiguous", "causal", "rotate_kv", ("prefix_lengths",), shard="50"),
    a_hidden_case(
        "2", "zigzag", "packed_causal", "rotate_query", ALL, "triton", (45, None), numbers="both"
    ),
    a_hidden_case("3", "striped", "full", "rotate_query", ("shared_ends",), shard="longer_keys"),
    a_hidden_case(
        "5", "contiguous", "causal", "rotate_kv", ("prefix_lengths", *LENGTHS), "reference"
    ),
    a_hidden_case("8", "zigzag", "packed_causal", "rotate_kv", ALL, window=(150, None)),
    a_hidden_case(
        "2x3", "zigzag", "full", "rotate_query", RANGES, window=(90, 40), numbers="slopes"
    ),
    a_hidden_case("2+h4", "striped", "causal", "rotate_query", ALL, window=(60, 60)),
    a_hidden_case("h4", "zigzag", "cap", "rotate_kv", LENGTHS, window=(None, 20), numbers="sinks"),
    a_hidden_case("3", "zigzag", "window96", "rotate_query", ALL, "triton", shard="longer_queries"),
    a_hidden_case("4", "striped", "causal", "rotate_kv", ("key_starts",), "triton", numbers="both"),
]


def hidden_case_id(case):
    return f"{case_id(case)}-{case['implementation']}-{'+'.join(case['kinds'])}-{case['window']}"


@pytest.mark.parametrize("case", in_tiers(CASES, hidden_case_id, [CASES[i] for i in (0, 1, 6)]))
def test_as_exact_as_dense(case):
    """Gradients too, by random cotangents, against the mask written out in float64."""
    mask = MASKS[case["mask"]]
    options: dict[str, Any] = {"implementation": IMPLEMENTATIONS[case["implementation"]]}
    if case["window"] is not None:
        mask = dense.Mask(**vars(mask) | {"window": case["window"]})
        left, right = case["window"]
        # One side is traced, and the other is a Python number or None.
        options["local_window_size"] = (left if left is None else jnp.int32(left), right)
    t, s = lengths(case["shard"], case["layout"], Ring.of(case))
    assert_exact(case, hiding=hiding_arrays(case["kinds"], t, s), mask=mask, **options)


def attend(arrays, mesh=None, **options):
    query, key, value = arrays
    mesh = mesh or mesh_of(seq=4)
    return burst_jax.burst_attention(query, key, value, mesh=mesh, return_residual=True, **options)


def test_layers_of_different_windows_in_one_scan():
    arrays, _ = make_inputs()
    windows = [(3, 1), (0, 6), (40, 0), (2**31 - 1, 2**31 - 1)]

    @quick_jit
    def scanned(arrays, lefts, rights):
        def layer(_, sides):
            return None, attend(arrays, local_window_size=tuple(sides))[0]

        return jax.lax.scan(layer, None, (lefts, rights))[1]

    got = scanned(arrays, *jnp.asarray(windows, jnp.int32).T)
    for out, window in zip(got, windows, strict=True):
        assert_close(out, attend(arrays, local_window_size=window)[0])


def test_a_traced_window_below_zero_moves_away_from_its_query():
    arrays, cotangents = make_inputs()
    length = arrays[0].shape[1]
    run = functools.partial(attend, local_window_size=(jnp.int8(-2), None))
    got = forward_and_gradients(lambda *arrays: run(arrays))(arrays, cotangents)
    keep = (np.arange(length)[None] >= np.arange(length)[:, None] + 2)[None]
    assert_close(got, dense.truth(*arrays, keep, *cotangents))


@pytest.mark.parametrize("side", [-(2**31), 2**31 - 1])
def test_a_traced_window_of_any_int32(side):
    """No sum of a position and a side overflows."""
    arrays, _ = make_inputs()
    sees_all = side > 0
    for window in ((jnp.int32(side), None), (None, jnp.int32(side))):
        out, lse = attend(arrays, local_window_size=window)
        assert bool(np.isneginf(lse).all()) == (not sees_all)
        assert_close(out, attend(arrays)[0]) if sees_all else np.testing.assert_array_equal(out, 0)


def test_ends_beyond_int32_are_no_ends():
    arrays, _ = make_inputs()
    length = arrays[0].shape[1]
    far = np.full(length, 2**40), np.full(length, -(2**40))
    out, _ = attend(arrays, key_ends=far[0], key_starts=far[1])
    assert_close(out, attend(arrays)[0])
    # As uint32, 2^32 - 1 would be -1 in int32.
    out, _ = attend(arrays, key_ends=jnp.full(length, 2**32 - 1, jnp.uint32))
    assert_close(out, attend(arrays)[0])


def test_what_lies_behind_the_lengths_reaches_nothing():
    """Not even a NaN there, forward and backward."""
    (query, key, value), (do, dlse) = make_inputs()
    lengths_of = dict(zip(LENGTHS, np.array([[20, 32], [9, 30]]), strict=True))
    padded = [x.copy() for x in (query, key, value, do, dlse)]
    for row in range(BATCH):
        t, s = (lengths_of[f"{side}_seq_lengths"][row] for side in ("query", "key_value"))
        for x, length in zip(padded, (t, s, s, t, t), strict=True):
            x[row, length:] = np.nan
    run = forward_and_gradients(lambda *arrays: attend(arrays, **lengths_of))
    got = run(tuple(padded[:3]), tuple(padded[3:]))
    want = run((query, key, value), (do, dlse))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    assert (np.asarray(got[0])[0, 20:] == 0).all()
    assert np.isneginf(np.asarray(got[1])[0, 20:]).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_that_an_axis_splits(kind):
    """Over ``jax.set_mesh``, eager and in a ``jax.jit``, and in the caller's own shard_map."""
    arrays, _ = make_inputs()
    t = arrays[0].shape[1]
    hiding = hiding_arrays(("prefix_lengths", *LENGTHS, "key_starts", "shared_ends"), t, t)
    options: Any = {"is_causal": True, "local_window_size": (jnp.int32(13), None)}
    want = attend(arrays, **hiding, **options)
    mesh = mesh_of(kind, data=2, seq=2)

    def run(arrays, hiding, left):
        masks: Any = {"is_causal": True, "local_window_size": (left, None), **hiding}
        return burst_jax.burst_attention(*arrays, batch_axis="data", return_residual=True, **masks)

    with jax.set_mesh(mesh):
        assert_close(run(arrays, hiding, jnp.int32(13)), want)
        assert_close(jax.jit(run)(arrays, hiding, 13), want)
    specs = {name: P("data") if x.ndim == 1 else P("data", "seq") for name, x in hiding.items()} | {
        "key_ends": P("seq")
    }

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", "seq"), specs, P()),
        out_specs=P("data", "seq"),
    )
    def on_device(arrays, hiding, left):
        query, key, value = arrays
        masks: Any = {"is_causal": True, "local_window_size": (left, None), **hiding}
        return burst_jax.ring_attention(query, key, value, "seq", return_residual=True, **masks)

    def put(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    arrays = tuple(put(x, P("data", "seq")) for x in arrays)
    hiding = {name: put(x, specs[name]) for name, x in hiding.items()}
    left = put(jnp.int32(13), P())
    assert_close(jax.jit(on_device)(arrays, hiding, left), want)


def test_flax_hands_them_on():
    """The layer in its call, the adapters as options, also where they pad."""
    mesh, length = mesh_of(seq=4), 30
    rng = np.random.default_rng(0)
    starts, ends = key_ranges(rng, BATCH, length)
    hiding: Any = {
        "prefix_lengths": np.array([4, 20], np.int32),
        "key_starts": starts[0],
        "key_ends": ends,
    }
    x = jnp.asarray(rng.normal(size=(BATCH, length, 16)), jnp.float32)
    layers = [
        nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn
        )
        for attention_fn in (
            nnx_attention_fn(mesh=mesh, is_causal=True, pad=True, **hiding),
            nnx.dot_product_attention,
        )
    ]
    keep = dense.Mask(is_causal=True).dense(None, None, length, length, **hiding)
    sees = keep.any(2)
    got, want = layers[0](x), layers[1](x, mask=jnp.asarray(keep[:, None]))
    assert_close(np.asarray(got)[sees], np.asarray(want)[sees])

    layer = burst_jax.BurstAttention(
        16, 2, mesh=mesh_of(seq=2), is_causal=True, rope_theta=None, rngs=nnx.Rngs(0)
    )
    query, key, value = (f(x) for f in (layer.query, layer.key, layer.value))
    out = attend((query, key, value), mesh_of(seq=2), is_causal=True, **hiding)[0]
    assert_close(layer(x, **hiding), layer.out(out))
    unknown: Any = {"scale": 0.5}
    with pytest.raises(TypeError, match="call got scale: beside segment_ids it takes query_s"):
        layer(x, **unknown)
