"""Positions that a call says itself: an offset of the queries, and positions of each token."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers
from implementations import IMPLEMENTATIONS, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of
from mistakes import B, H, K, N, T, good, zeros
from ring_cases import Ring, a_case, assert_exact, case_id, lengths
from rings import forward_and_gradients, make_inputs

import burst_jax
from burst_jax import local_attention, merge, ring_attention
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from pallas_kernels.mask import end_of_keys_in_window, first_key_in_window


def said_positions(kinds, t, s):
    """Arguments of these kinds, in natural order."""
    rng = np.random.default_rng(3)
    made: dict[str, Any] = {
        "ahead": {"query_offset": s // 3},
        "last_key": {"query_offset": s - t},
        "traced": {"query_offset": jnp.int32(s // 3)},
        "by_row": {"query_offset": jnp.array([5, s // 2], jnp.int32)},
        "queries": {"query_positions": rng.permutation(2 * t)[:t] - t // 2},
        "queries_by_row": {"query_positions": rng.integers(-9, s, (2, t))},
        "keys": {"key_value_positions": rng.permutation(2 * s)[:s]},
        "prefix": {"prefix_lengths": np.array([7, s // 2], np.int32)},
        "lengths": {
            "query_seq_lengths": np.array([s // 3 + t // 2, s], np.int32),
            "key_value_seq_lengths": np.array([s - 5, s // 2], np.int32),
        },
    }
    return functools.reduce(lambda x, y: x | y, (made[kind] for kind in kinds))


def a_positioned_case(ring, layout, mask, backward, kinds, implementation="xla", **changes):
    case = a_case(ring, layout, mask, backward, implementation)
    return case | {"kinds": kinds, "shard": "longer_keys"} | changes


CASES = [
    a_positioned_case("1", "contiguous", "causal", "rotate_kv", ("by_row", "prefix"), "triton"),
    a_positioned_case("3", "zigzag", "window96", "rotate_query", ("traced", "lengths")),
    a_positioned_case(
        "2", "striped", "window40_17", "rotate_kv", ("queries", "keys"), numbers="both", dropout=0.2
    ),
    a_positioned_case(
        "1",
        "contiguous",
        "window40_17",
        "rotate_kv",
        ("queries", "keys"),
        "triton",
        numbers="both",
        dropout=0.2,
    ),
    a_positioned_case("3", "contiguous", "packed_causal", "rotate_query", ("ahead", "keys")),
    a_positioned_case("2", "zigzag", "window40_17", "rotate_query", ("queries_by_row", "lengths")),
    a_positioned_case("3", "striped", "causal", "rotate_kv", ("last_key",), numbers="both"),
    a_positioned_case("2", "contiguous", "window96", "rotate_kv", ("ahead",), "triton"),
    a_positioned_case(
        "3", "zigzag", "causal", "rotate_query", ("last_key",), "reference", shard="longer_queries"
    ),
    a_positioned_case("2+h4", "zigzag", "window96", "rotate_query", ("traced", "keys")),
    a_positioned_case("2x3", "striped", "causal", "rotate_kv", ("by_row",)),
]


@pytest.mark.parametrize(
    "case",
    in_tiers(
        CASES,
        lambda case: f"{case_id(case)}-{case['implementation']}-{'+'.join(case['kinds'])}",
        CASES[:4],
    ),
)
def test_as_exact_as_dense(case):
    """Gradients too, and those of the numbers of each head, by random cotangents."""
    t, s = lengths(case["shard"], case["layout"], Ring.of(case))
    implementation = IMPLEMENTATIONS[case["implementation"]]
    assert_exact(case, hiding=said_positions(case["kinds"], t, s), implementation=implementation)


def test_by_default_both_sides_count_from_0():
    """With T != S too; S - T aligns the queries to the last key."""
    (query, key, value), _ = make_inputs()
    attend = functools.partial(local_attention, is_causal=True, return_residual=True)
    last = query[:, -5:]
    for rows, options in ((query[:, :5], {}), (last, {"query_offset": key.shape[1] - 5})):
        whole = attend(query, key, value)
        part = slice(0, 5) if rows is not last else slice(-5, None)
        assert_close(attend(rows, key, value, **options), tuple(x[:, part] for x in whole))


@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_of_keys_at_their_own_positions_are_merged(count):
    """What a ring does, by the two public functions: chunks of queries over parts of the keys."""
    arrays, cotangents = make_inputs()
    length = arrays[0].shape[1]
    ends = [length * i // count for i in range(count + 1)]
    attend = functools.partial(
        local_attention, is_causal=True, local_window_size=13, return_residual=True
    )

    def in_chunks(query, key, value):
        outs = []
        for q_start, q_end in itertools.pairwise(ends):
            parts = []
            for start, end in itertools.pairwise(ends):
                own: Any = {
                    "query_offset": q_start,
                    "key_value_positions": np.arange(start, end),
                }
                keys, values = key[:, start:end], value[:, start:end]
                parts.append(attend(query[:, q_start:q_end], keys, values, **own))
            outs.append(merge(*parts))
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *outs)

    got, want = (forward_and_gradients(run)(arrays, cotangents) for run in (in_chunks, attend))
    assert_close(got, want)


def test_one_program_for_all_chunks():
    (query, key, value), _ = make_inputs()
    programs = []

    @quick_jit
    def chunk(query, offset):
        programs.append(offset)
        return local_attention(query, key, value, is_causal=True, query_offset=offset)

    want = local_attention(query, key, value, is_causal=True)
    for start in range(0, query.shape[1], 8):
        assert_close(chunk(query[:, start : start + 8], start), want[:, start : start + 8])
    assert len(programs) == 1


def test_which_hops_an_offset_leaves_out():
    """Of a chunk of 16 queries over 64 keys on 4 devices: those to keys behind the chunk."""

    def hops(offset, **options):
        traced = {"query_offset": jnp.int32(0)} if offset is None else {}
        request = make_request(
            RingArguments(query_offset=offset or 0, **options),
            axis_argument="seq_axis",
            axes="seq",
            size_of=lambda *_: 4,
            head_dim=8,
            arrays=traced,
        )
        return len(request.route(4, 16).offsets) - 1

    # On device r are queries offset + 4r ..; a query at position p needs the keys of p // 16.
    assert hops(0, is_causal=True) == 3
    assert hops(0, local_window_size=1) == 3
    assert hops(48, local_window_size=2) == 3
    assert hops(None, local_window_size=2) == 3
    # All queries see one shard of keys; it is at home on one device.
    striped = {"layout": "striped", "local_window_size": 0}
    assert hops(0, **striped) == 0
    assert hops(1, **striped) == 1
    assert hops(None, **striped) == 3
    # Before all keys.
    assert hops(-16, is_causal=True) == 0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(AxisType.Auto, id="auto", marks=pytest.mark.slow), AxisType.Explicit],
)
def test_rows_that_an_axis_splits(kind):
    """Over ``jax.set_mesh``, eager and in a ``jax.jit``, and in the caller's own shard_map."""
    (query, key, value), _ = make_inputs()
    t = query.shape[1]
    own: dict[str, Any] = {
        "query_positions": np.random.default_rng(0).integers(0, t, (2, t)),
        "key_value_positions": np.random.default_rng(1).permutation(t),
    }
    offset: dict[str, Any] = {"query_offset": np.array([3, -4])}
    mesh = mesh_of(kind, data=2, seq=2)
    options: Any = {"is_causal": True, "local_window_size": (9, None), "return_residual": True}
    for given in (own, offset):
        want = local_attention(query, key, value, **given, **options)

        def run(arrays, given):
            return burst_jax.burst_attention(*arrays, batch_axis="data", **given, **options)

        with jax.set_mesh(mesh):
            assert_close(run((query, key, value), given), want)
            assert_close(jax.jit(run)((query, key, value), given), want)
        specs = {
            "query_positions": P("data", "seq"),
            "key_value_positions": P("seq"),
            "query_offset": P("data"),
        }
        specs = {name: specs[name] for name in given}

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P("data", "seq"), specs),
            out_specs=P("data", "seq"),
        )
        def on_device(arrays, given):
            query, key, value = arrays
            return ring_attention(query, key, value, "seq", **given, **options)

        put = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, s))
        arrays = jax.device_put((query, key, value), jax.NamedSharding(mesh, P("data", "seq")))
        placed = put(given, {name: jax.NamedSharding(mesh, s) for name, s in specs.items()})
        assert_close(jax.jit(on_device)(arrays, placed), want)


def test_an_adapter_pads_positions_too():
    (query, key, value), _ = make_inputs()
    query, key, value = (jnp.asarray(x[:, :30]) for x in (query, key, value))
    own: Any = {
        "query_positions": np.random.default_rng(0).integers(0, 30, (2, 30)),
        "key_value_positions": np.random.default_rng(1).permutation(30),
    }
    attend = burst_jax.nnx_attention_fn(mesh=mesh_of(seq=4), is_causal=True, pad=True, **own)
    assert_close(
        attend(query, key, value), local_attention(query, key, value, is_causal=True, **own)
    )


def test_no_sum_of_a_position_and_a_side_overflows():
    positions = np.array([-(2**30), -2, -1, 0, 1, 2**30, 2**31 - 2])
    sides = np.array([-(2**31), -(2**30), -1, 0, 3, 2**30, 2**31 - 1])
    limits = np.iinfo(np.int32)
    for side in sides:
        first = first_key_in_window(jnp.asarray(positions, jnp.int32), np.int32(side))
        np.testing.assert_array_equal(first, np.clip(positions - side, limits.min, limits.max))
        end = end_of_keys_in_window(jnp.asarray(positions, jnp.int32), np.int32(side))
        np.testing.assert_array_equal(end, np.clip(positions + side + 1, limits.min, limits.max))


# --- mistakes ------------------------------------------------------------------------------------


def ids(*shape, dtype=np.int32):
    return np.ones(shape, dtype)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "offset-float": ({"query_offset": 3.0}, r"query_offset is 3\.0: it must be an integer, an"),
    "offset-bool": ({"query_offset": True}, "query_offset is True: it must be an integer"),
    "offset-none": ({"query_offset": None}, "query_offset is None: it must be an integer"),
    "offset-list": ({"query_offset": [1, 2]}, r"query_offset is \[1, 2\]: it must be an integer"),
    "offset-far": ({"query_offset": 2**30}, r"query_offset is 1073741824: it must be between -2\*"),
    "offset-shape": (
        {"query_offset": ids(B + 1)},
        r"query_offset has shape \(3,\): it must be \[\], \(\) or \[B\], \(2,\)",
    ),
    "offset-dtype": (
        {"query_offset": jnp.float32(3)},
        "query_offset has dtype float32: convert it to int32",
    ),
    "offset-holds": (
        {"query_offset": np.array([0, -(2**30)])},
        r"query_offset holds -1073741824: positions must be between -2\*\*30 and 2\*\*30",
    ),
    "offset-and-positions": (
        {"query_offset": 3, "query_positions": ids(T)},
        "query_offset is 3 and query_positions are given, .*: pass one of them",
    ),
    "traced-offset-and-positions": (
        {"query_offset": jnp.int32(0), "query_positions": ids(T)},
        "query_offset is 0 and query_positions are given, .*: pass one of them",
    ),
    "query-positions-list": (
        {"query_positions": [0] * T},
        "query_positions is a list: it must be an int32 array",
    ),
    "query-positions-shape": (
        {"query_positions": ids(1, T)},
        r"query_positions has shape \(1, 16\): it must be \[T\], \(16,\) or \[B, T\], \(2, 16\)",
    ),
    "query-positions-dtype": (
        {"query_positions": ids(T, dtype=np.float32)},
        "query_positions has dtype float32: convert it to int32",
    ),
    "key-positions-shape": (
        {"key_value_positions": ids(T - 1)},
        r"key_value_positions has shape \(15,\): it must be \[S\], \(16,\) or \[B, S\], \(2, 16\)",
    ),
    "key-positions-far": (
        {"key_value_positions": np.arange(2**30 - T + 1, 2**30 + 1)},
        r"key_value_positions holds 1073741824: positions must be between",
    ),
}

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "key-positions-by-row": (
        {"key_value_positions": ids(B, T)},
        r"key_value_positions has shape \(2, 16\): .*; pass \[S\], or call for one sequence at",
    ),
    "slopes-by-row": (
        {"query_offset": ids(B), "alibi_slopes": zeros(N)},
        r"query_offset has shape \(2,\), and alibi_slopes reads positions: .*; pass a query_offset",
    ),
    "dropout-by-row": (
        {"query_positions": ids(B, T), "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        r"query_positions has shape \(2, 16\), and dropout_rate reads positions: .*\(jax.lax.map\)",
    ),
}


def as_local(**arguments):
    return local_attention(**{name: x for name, x in arguments.items() if name != "mesh"})


@pytest.mark.parametrize("function", [burst_jax.burst_attention, as_local], ids=["burst", "local"])
@pytest.mark.parametrize("name", [*MISTAKES, *IMPOSSIBLE])
def test_mistakes(function, name):
    kind = ValueError if name in MISTAKES else NotImplementedError
    change, message = (MISTAKES | IMPOSSIBLE)[name]
    with pytest.raises(kind, match=message):
        function(**good() | change)


def test_the_remedy_for_rows_of_their_own():
    """One row at a time is what a call for all rows would be."""
    query, key, value = (jax.random.normal(jax.random.key(i), (B, T, K, H)) for i in range(3))
    places, slopes = jnp.array([np.arange(T), np.arange(T)[::-1]]), jnp.ones(K)

    def of_row(row):
        query, key, value, at = (x[None] for x in row)
        return local_attention(
            query, key, value, is_causal=True, key_value_positions=at, query_offset=at.max(1),
            alibi_slopes=slopes,
        )[0]  # fmt: skip

    got = jax.lax.map(of_row, (query, key, value, places))
    flipped = [x.at[1].set(x[1, ::-1]) for x in (key, value)]
    want = local_attention(query, *flipped, is_causal=True, query_offset=T - 1, alibi_slopes=slopes)
    assert_close(got, want)


@pytest.mark.parametrize("name", ["query_offset", "query_positions", "key_value_positions"])
def test_layers_take_none(name):
    with pytest.raises(
        ValueError, match=f"BurstAttention does not accept {name}: queries and keys a"
    ):
        burst_jax.BurstAttention(16, 2, rngs=None, **{name: 3})  # pyrefly: ignore
