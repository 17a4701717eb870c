"""Masks by blocks: exact against dense attention, on every ring, and what they leave out."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers
from flax import nnx
from implementations import IMPLEMENTATIONS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import assert_close, mesh_of
from mistakes import good
from ring_cases import Ring, a_case, assert_exact, case_id, lengths
from rings import forward_and_gradients, make_inputs

import burst_jax
from burst_jax.layers.attention_fn import nnx_attention_fn
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.route import RingMask, make_route, scores_per_step
from pallas_kernels import (
    AttentionInputs,
    BlockMask,
    KVSide,
    Mask,
    QuerySide,
    SharedInputs,
    Tiles,
    resolve,
    xla,
)


def attend(arrays, mesh, **options):
    query, key, value = arrays
    return burst_jax.burst_attention(query, key, value, mesh=mesh, return_residual=True, **options)


def a_table(shape, share=0.4, seed=0):
    """bool of this shape: blocks here and there, some whole ones in a row, an empty row."""
    rng = np.random.default_rng(seed)
    table = rng.random(shape) < share
    table[..., 0, :] |= rng.random(shape[-1]) < 0.8
    table[..., shape[-2] // 2, :] = False
    return table


def a_block_case(ring, layout, mask, backward, blocks, **changes):
    """blocks: rows and columns of the table, and whether each head has its own."""
    implementation = changes.pop("implementation", "xla")
    case = a_case(ring, layout, mask, backward, implementation) | changes
    return case | {"blocks": blocks, "static": changes.get("static", False)}


CASES = [
    a_block_case("1", "contiguous", "causal", "rotate_kv", (16, 8, False)),
    a_block_case("2", "zigzag", "packed_causal", "rotate_query", (16, 16, True), numbers="both"),
    a_block_case("3", "striped", "full", "rotate_query", (24, 12, False), static=True),
    a_block_case("5", "contiguous", "window40_17", "rotate_kv", (20, 40, True), static=True),
    a_block_case("8", "zigzag", "causal", "rotate_kv", (32, 16, False)),
    a_block_case("2x3", "zigzag", "packed", "rotate_query", (12, 6, True), static=True),
    a_block_case("2+h4", "striped", "causal", "rotate_kv", (16, 8, True), dropout=0.3),
    a_block_case("h4", "contiguous", "cap", "rotate_kv", (4, 4, True), numbers="sinks"),
    a_block_case(
        "3", "zigzag", "full", "rotate_kv", (5, 29, False), shard="longer_keys", heads=(2, 2)
    ),
    a_block_case(
        "2",
        "striped",
        "full",
        "rotate_query",
        (63, 18, True),
        shard="63",
        implementation="reference",
    ),
    # In tiles of 16 queries and 32 keys: of one block, with blocks of several columns, and of
    # more keys than a word has bits.
    a_block_case("2", "zigzag", "causal", "rotate_kv", (8, 4, True), implementation="triton"),
    a_block_case(
        "3", "contiguous", "packed_causal", "rotate_query", (4, 6, False), implementation="triton"
    ),
    a_block_case("2", "striped", "full", "rotate_kv", (64, 128, True), implementation="triton"),
    a_block_case(
        "2",
        "striped",
        "window40_17",
        "rotate_query",
        (63, 21, True),
        shard="63",
        implementation="triton",
        numbers="both",
    ),
]


def block_case_id(case):
    rows, columns, by_head = case["blocks"]
    kind = f"{rows}x{columns}{'-by_head' if by_head else ''}{'-static' if case['static'] else ''}"
    return f"{case_id(case)}-{case['implementation']}-{kind}"


@pytest.mark.parametrize(
    "case", in_tiers(CASES, block_case_id, [CASES[i] for i in (0, 1, 2, 5, 10, 13)])
)
def test_as_exact_as_dense(case):
    """Gradients too, by random cotangents, against the mask written out in float64."""
    rows, columns, by_head = case["blocks"]
    t, s = lengths(case["shard"], case["layout"], Ring.of(case))
    assert not t % rows
    assert not s % columns
    table: Any = a_table((*[case["heads"][0]] * by_head, rows, columns))
    if not case["static"]:
        table = jnp.asarray(table)
    implementation = IMPLEMENTATIONS[case["implementation"]]
    assert_exact(case, hiding={"block_mask": table}, implementation=implementation)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_tables_of_heads_that_an_axis_splits(kind):
    """Over ``jax.set_mesh``, eager and in a ``jax.jit``, and in the caller's own shard_map."""
    arrays, _ = make_inputs()
    heads = arrays[0].shape[2]
    tables: Any = a_table((heads, 8, 4))
    want = attend(arrays, mesh_of(seq=4), is_causal=True, block_mask=tables)
    mesh = mesh_of(kind, model=2, seq=2)

    def run(arrays, tables):
        options: Any = {"tensor_axis": "model", "is_causal": True, "return_residual": True}
        return burst_jax.burst_attention(*arrays, block_mask=tables, **options)

    with jax.set_mesh(mesh):
        assert_close(run(arrays, tables), want)
        assert_close(jax.jit(run)(arrays, tables), want)
    specs = P(None, "seq", "model")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=((specs,) * 3, P("model")), out_specs=specs
    )
    def on_device(arrays, tables):
        query, key, value = arrays
        masks: Any = {"is_causal": True, "block_mask": tables}
        return burst_jax.ring_attention(query, key, value, "seq", return_residual=True, **masks)

    put = [jax.device_put(x, jax.NamedSharding(mesh, specs)) for x in arrays]
    tables = jax.device_put(tables, jax.NamedSharding(mesh, P("model")))
    assert_close(jax.jit(on_device)(tuple(put), tables), want)


LAYOUTS = ("contiguous", "zigzag", "striped", "striped:2")


def scores_that_count(sizes, layout, lengths, window, table, rotates_query, stop):
    """How many scores count at a stop, by device, by the mask written out."""
    n = math.prod(sizes)
    t, s = (n * length for length in lengths)
    keep = dense.Mask(window=window).dense(None, None, t, s, block_mask=table)[0]
    q, kv = (burst_jax.positions(layout, length, n).reshape(n, -1) for length in (t, s))
    counts = []
    for device in range(n):
        place = np.subtract(np.unravel_index(device, sizes), stop) % sizes
        source = np.ravel_multi_index(tuple(place), sizes)
        at_q, at_kv = (source, device) if rotates_query else (device, source)
        counts.append(int(keep[np.ix_(q[at_q], kv[at_kv])].sum()))
    return counts


@pytest.mark.parametrize("rotates_query", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(3,), (4,), (2, 3)], ids=str)
def test_a_known_table_leaves_out_stops_and_counts_scores(sizes, layout, rotates_query):
    n, left_out = math.prod(sizes), 0
    for index, ((t, s), blocks) in enumerate(
        [((8, 8), (2, 4)), ((6, 4), (3, 2)), ((12, 6), (4, 1)), ((8, 8), (1, 2))]
    ):
        rng = np.random.default_rng(index)
        table = np.zeros((n * t // blocks[0], n * s // blocks[1]), bool)
        table.flat[rng.choice(table.size, 2)] = True
        for window in ((None, None), (None, 0), (7, 3)):
            known = Blocks(*blocks, table.shape, np.packbits(table).tobytes())
            mask = RingMask(sizes, layout, t, s, Mask(*window), rotates_query, 0, known)
            route = make_route(("outer", "inner")[-len(sizes) :], mask)
            of = sizes, layout, (t, s), window, table, rotates_query
            counts = {
                stop: scores_that_count(*of, stop) for stop in itertools.product(*map(range, sizes))
            }
            wanted = {stop for stop, by_device in counts.items() if any(by_device)}
            wanted |= {(0,) * len(sizes)}
            assert set(route.offsets) == wanted
            left_out += n - len(wanted)
            for stop, (most, mean) in scores_per_step(route, mask).items():
                assert (most, mean) == (max(counts[stop]), np.mean(counts[stop]))
    assert left_out


def test_a_static_table_sends_less():
    """What a device needs lies in its own part and the one before, so K and V make one hop."""
    arrays, cotangents = make_inputs()
    near = np.subtract.outer(np.arange(4), np.arange(4))
    table = (near == 0) | (near == 1)
    mesh = mesh_of(seq=4)

    def run(table):
        return lambda *arrays: attend(arrays, mesh, block_mask=table, backward="rotate_kv")

    def hops(table):
        def both_ways(arrays, cotangents):
            return jax.vjp(run(table), *arrays)[1](cotangents)

        return count(jax.make_jaxpr(both_ways)(arrays, cotangents).jaxpr, "ppermute")

    # The forward sends K and V once. The backward does, and sends dK and dV home.
    assert (hops(table), hops(jnp.asarray(table))) == (6, 3 * 2 * 3)
    got, want = (
        forward_and_gradients(run(x))(arrays, cotangents) for x in (table, jnp.asarray(table))
    )
    assert_close(got, want)


def test_tiles_that_a_table_empties_are_not_visited():
    """NaNs in the keys of a block that nobody sees reach no result, wherever tiles are skipped."""
    (query, key, value), _ = make_inputs()
    length = query.shape[1]
    table = np.ones((2, 4), bool)
    table[:, 3] = False
    value = value.copy()
    value[:, 3 * length // 4 :] = np.nan
    implementation = xla.in_tiles(Tiles(8, 4))
    out, lse = attend(
        (query, key, value),
        mesh_of(seq=2),
        block_mask=jnp.asarray(table),
        implementation=implementation,
    )
    kept = slice(0, 3 * length // 4)
    want = attend((query, key[:, kept], value[:, kept]), mesh_of(seq=2))
    assert_close((out, lse), want)


MISTAKES: dict[str, tuple[Any, str]] = {
    "list": ([[True]], "block_mask is a list: it must be a bool array"),
    "dtype": (np.ones((4, 4), np.int32), "block_mask has dtype int32: convert it to bool"),
    "rank": (np.ones(4, bool), r"block_mask has shape \(4,\): it must be \[T / bq, S / bk\] or"),
    "empty": (np.ones((0, 4), bool), r"block_mask has shape \(0, 4\): it must be \[T / bq"),
    "heads": (
        np.ones((2, 4, 4), bool),
        r"block_mask has shape \(2, 4, 4\), query 4 heads: its first axis must be N, 4 .*or leave",
    ),
    "rows": (
        np.ones((5, 4), bool),
        r"block_mask has shape \(5, 4\), 5 rows, the whole query 16 tokens: the rows must divide",
    ),
    "columns": (
        np.ones((4, 7), bool),
        r"block_mask has shape \(4, 7\), 7 columns, the whole key 16 tokens: the columns must",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_to_do(name):
    table, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        burst_jax.burst_attention(**good(), block_mask=table)


@pytest.mark.parametrize(
    "positions",
    [
        {"query_offset": 4},
        {"query_positions": np.arange(32, dtype=np.int32)},
        {"key_value_positions": np.arange(32, dtype=np.int32)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_positions_of_the_callers_are_refused(positions: Any):
    x = jnp.ones((1, 32, 2, 8), jnp.float32)
    message = "block_mask with query_offset, query_positions or key_value_positions: .*key_starts"
    with pytest.raises(NotImplementedError, match=message):
        burst_jax.local_attention(x, x, x, block_mask=np.ones((4, 4), bool), **positions)


def test_one_devices_attention_takes_it():
    """Also by a program that knows the table, and with one table for each head."""
    query, key, value = (
        jnp.asarray(np.random.default_rng(i).normal(size=(1, 32, 2, 8)), jnp.float32)
        for i in range(3)
    )
    table = np.stack([a_table((8, 4)), a_table((8, 4))[::-1]])
    want = attend((query, key, value), mesh_of(seq=2), block_mask=table)[0]
    for given in (table, jnp.asarray(table)):
        assert_close(burst_jax.local_attention(query, key, value, block_mask=given), want)


def test_adapters_do_not_pad_beside_a_table():
    query = np.ones((1, 15, 2, 8), np.float32)
    attention_fn = nnx_attention_fn(mesh=mesh_of(seq=2), pad=True, block_mask=np.ones((3, 3), bool))
    with pytest.raises(ValueError, match="block_mask is given, and lengths 15 and 15 are padded"):
        attention_fn(query, query, query)


def test_a_layer_takes_it_in_its_call():
    mesh = mesh_of(seq=2)
    layer = burst_jax.BurstAttention(
        16, 2, mesh=mesh, is_causal=True, rope_theta=None, rngs=nnx.Rngs(0)
    )
    x, table = (
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 16)), jnp.float32),
        a_table((8, 4)),
    )
    query, key, value = (project(x) for project in (layer.query, layer.key, layer.value))
    masks: Any = {"is_causal": True, "block_mask": table}
    assert_close(
        layer(x, block_mask=table), layer.out(attend((query, key, value), mesh, **masks)[0])
    )


def test_hoppers_kernels_say_which_blocks_they_take():
    query: Any = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def named(run: int, name: str | None = "mosaic_sm90") -> str:
        blocks = BlockMask(jnp.ones((1, 2, 2), bool), 64, 64, 64, run)
        sides = QuerySide(query), KVSide(query, query)
        inputs = AttentionInputs(*sides, SharedInputs(block_mask=blocks))
        where = {"platform": "gpu", "compute_capability": 9.0, "inputs": inputs}
        return resolve(name, **where, backward=True).name

    assert named(64) == "mosaic_sm90"
    with pytest.raises(
        NotImplementedError, match=r"64 queries and 32 keys side by side .*use larg"
    ):
        named(32)
    assert named(32, None) == "triton"
