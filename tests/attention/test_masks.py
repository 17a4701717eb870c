"""Masks by arrays, block-sparse masks, positions: tiles, traced windows, shardings, ring steps.

test_fuzz.py shows that any of them are exact on any ring, test_errors.py has their mistakes.
"""

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
from cases import key_ranges
from flax import nnx
from implementations import IMPLEMENTATIONS, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import assert_close, mesh_of
from ring_cases import Ring, a_case, assert_exact, lengths
from rings import B, N, T, forward_and_gradients, make_inputs

import burst_jax
from burst_jax import local_attention, merge
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
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
from pallas_kernels.mask import end_of_keys_in_window, first_key_in_window

ARRAYS, COTANGENTS = make_inputs()
SEQ_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def a_table(shape, share=0.4, seed=0):
    """bool of this shape: blocks here and there, some whole ones, an empty row."""
    rng = np.random.default_rng(seed)
    table = rng.random(shape) < share
    table[..., 0, :] |= rng.random(shape[-1]) < 0.8
    table[..., shape[-2] // 2, :] = False
    return table


def attend(arrays=ARRAYS, mesh=None, **options):
    mesh = mesh or mesh_of(seq=4)
    return burst_jax.burst_attention(*arrays, mesh=mesh, return_residual=True, **options)


# --- tiles ---------------------------------------------------------------------------------------

# In tiles of 16 queries and 32 keys: blocks of several tiles, and more blocks than a word has bits.
TABLES = [
    a_case("2", "zigzag", "packed_causal", "rotate_query") | {"table": (8, 4), "numbers": "both"},
    a_case("2", "striped", "full", "rotate_kv", "triton") | {"table": (64, 128)},
    a_case("2", "striped", "window40_17", "rotate_query", "triton", "63") | {"table": (63, 21)},
]


@pytest.mark.parametrize(
    "case", TABLES, ids=lambda case: f"{case['implementation']}{case['table']}"
)
def test_block_masks_of_every_tile_are_as_exact_as_dense(case):
    t, s = lengths(case["shard"], case["layout"], Ring.of(case))
    table = a_table((case["heads"][0], *case["table"]))
    assert not t % table.shape[1]
    assert not s % table.shape[2]
    hiding = {"block_mask": jnp.asarray(table)}
    assert_exact(case, hiding=hiding, implementation=IMPLEMENTATIONS[case["implementation"]])


def test_tiles_that_a_table_empties_are_skipped():
    """NaNs in the values of keys that no query attends to reach no result."""
    query, key, value = ARRAYS
    table = np.ones((2, 4), bool)
    table[:, 3] = False
    last = slice(3 * T // 4, None)
    nan = value.copy()
    nan[:, last] = np.nan
    options: Any = {"implementation": xla.in_tiles(Tiles(8, 4)), "block_mask": jnp.asarray(table)}
    out, lse = attend((query, key, nan), mesh_of(seq=2), **options)
    keep = dense.Mask().dense(None, None, T, T, block_mask=table)
    want = dense.truth(query, key, value, keep, *COTANGENTS)
    assert_close((out, lse), tuple(want[:2]))


def test_padding_by_lengths_reaches_nothing():
    """Not even a NaN there, forward and backward."""
    by_sequence = dict(zip(SEQ_LENGTHS, np.array([[20, 32], [9, 30]]), strict=True))
    padded = [x.copy() for x in (*ARRAYS, *COTANGENTS)]
    for row in range(B):
        t, s = (by_sequence[name][row] for name in SEQ_LENGTHS)
        for x, length in zip(padded, (t, s, s, t, t), strict=True):
            x[row, length:] = np.nan
    run = forward_and_gradients(lambda *arrays: attend(arrays, **by_sequence))
    got = run(tuple(padded[:3]), tuple(padded[3:]))
    want = run(ARRAYS, COTANGENTS)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    assert (np.asarray(got[0])[0, 20:] == 0).all()
    assert np.isneginf(np.asarray(got[1])[0, 20:]).all()


# --- values that are traced ----------------------------------------------------------------------


@pytest.mark.parametrize("right", [None, 0], ids=["no-right-side", "static-right-side"])
def test_one_program_for_all_windows(right):
    """Of one scan too. A side below 0 moves the window away, and no sum overflows int32."""

    @quick_jit
    def scanned(lefts):
        def layer(_, left):
            results, vjp = jax.vjp(lambda *x: attend(x, local_window_size=(left, right)), *ARRAYS)
            return None, (*results, *vjp(COTANGENTS))

        return jax.lax.scan(layer, None, lefts)[1]

    lefts = np.array([3, 0, 40, 2**31 - 1, -2, -(2**31)], np.int32)
    got = scanned(lefts)
    ahead = np.subtract.outer(np.arange(T), np.arange(T))
    for index, left in enumerate(lefts.astype(int)):
        keep = (ahead <= left) & (ahead >= 0 if right == 0 else True)
        results = [np.asarray(x[index]) for x in got]
        if not keep.any():
            assert all((x == (-np.inf if i == 1 else 0)).all() for i, x in enumerate(results))
            continue
        assert_close(results, dense.truth(*ARRAYS, keep[None], *COTANGENTS))


def test_bounds_beyond_int32_are_no_bounds():
    want = attend()[0]
    far = np.full(T, 2**40), np.full(T, -(2**40))
    assert_close(attend(key_ends=far[0], key_starts=far[1])[0], want)
    # As uint32, 2^32 - 1 would be -1 in int32.
    assert_close(attend(key_ends=jnp.full(T, 2**32 - 1, jnp.uint32))[0], want)


def test_no_sum_of_a_position_and_a_side_overflows():
    positions = np.array([-(2**30), -2, -1, 0, 1, 2**30, 2**31 - 2])
    limits = np.iinfo(np.int32)
    for side in np.array([-(2**31), -(2**30), -1, 0, 3, 2**30, 2**31 - 1]):
        first = first_key_in_window(jnp.asarray(positions, jnp.int32), np.int32(side))
        np.testing.assert_array_equal(first, np.clip(positions - side, limits.min, limits.max))
        end = end_of_keys_in_window(jnp.asarray(positions, jnp.int32), np.int32(side))
        np.testing.assert_array_equal(end, np.clip(positions + side + 1, limits.min, limits.max))


def test_chunks_of_queries_over_parts_of_keys():
    """One program for all chunks and parts: a ring by the two public functions, gradients too."""
    programs = []

    @jax.jit
    def part(query, key, value, q_start, kv_start):
        programs.append(q_start)
        return local_attention(
            query, key, value, is_causal=True, local_window_size=13, return_residual=True,
            query_offset=q_start, key_value_positions=kv_start + jnp.arange(key.shape[1]),
        )  # fmt: skip

    def in_chunks(query, key, value):
        cut = lambda x, i: x[:, 8 * i : 8 * i + 8]  # noqa: E731
        outs = [
            merge(
                *(part(cut(query, i), cut(key, j), cut(value, j), 8 * i, 8 * j) for j in range(4))
            )
            for i in range(4)
        ]
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *outs)

    keep = dense.Mask(is_causal=True, window=13).dense(None, None, T, T)
    got = forward_and_gradients(in_chunks)(ARRAYS, COTANGENTS)
    assert_close(got, dense.truth(*ARRAYS, keep, *COTANGENTS))
    assert len(programs) == 1
    # Without positions both sides count from 0, with T != S too; S - T aligns to the last key.
    for rows, offset in ((slice(0, 5), 0), (slice(T - 5, None), T - 5)):
        out = local_attention(
            ARRAYS[0][:, rows], *ARRAYS[1:], is_causal=True, query_offset=offset,
            local_window_size=13,
        )  # fmt: skip
        assert_close(out, np.asarray(got[0])[:, rows])


# --- shardings -----------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
STARTS, ENDS = key_ranges(RNG, B, T)
GROUPS: dict[str, dict[str, Any]] = {
    "bounds": {
        "prefix_lengths": np.array([T // 3, T - 5]), "query_seq_lengths": np.array([T, T // 2]),
        "key_value_seq_lengths": np.array([T - 8, T + 1]), "key_starts": STARTS,
        "key_ends": ENDS[0], "local_window_size": (np.int32(13), None),
    },
    "positions": {
        "query_positions": RNG.integers(0, T, (B, T)), "key_value_positions": RNG.permutation(T),
        "local_window_size": (np.int32(9), np.int32(2)),
    },
    "offset": {"query_offset": np.array([3, -4]), "key_starts": STARTS[0]},
    "table": {"block_mask": a_table((N, 8, 4)), "sink_logits": np.arange(N, dtype=np.float32)},
}  # fmt: skip
SPECS = {
    "query_positions": P("data", "seq"), "key_value_positions": P("seq"),
    "query_offset": P("data"), "block_mask": P("model"), "sink_logits": P("model"),
    "prefix_lengths": P("data"), "query_seq_lengths": P("data"),
    "key_value_seq_lengths": P("data"), "key_starts": P("data", "seq"), "key_ends": P("seq"),
    "local_window_size": P(),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_every_array_is_sharded_as_the_call_names(kind, group):
    """Under ``jax.set_mesh`` in a ``jax.jit`` and eagerly, and in the caller's own shard_map."""
    given = GROUPS[group]
    axis = "model" if group == "table" else "data"
    mesh = mesh_of(kind, **{axis: 2}, seq=2)
    axes: Any = {"tensor_axis": "model"} if group == "table" else {"batch_axis": "data"}
    masks = {
        name: x for name, x in given.items() if name not in ("local_window_size", "sink_logits")
    }
    window = given.get("local_window_size", (None, 0))
    keep = dense.Mask(is_causal=True, window=window).dense(None, None, T, T, **masks)
    numbers = {name: given[name] for name in given if name == "sink_logits"}
    want = dense.truth(*ARRAYS, keep, *COTANGENTS, numbers=numbers)[:2]

    def run(arrays, given):
        call: Any = {"is_causal": True, "return_residual": True, **axes, **given}
        return burst_jax.burst_attention(*arrays, **call)

    with jax.set_mesh(mesh):
        assert_close(quick_jit(run)(ARRAYS, given), tuple(want))
        if kind is AxisType.Auto:
            traced = {
                name: tuple(side if side is None else jnp.int32(side) for side in x)
                for name, x in given.items()
                if isinstance(x, tuple)
            }
            assert_close(run(ARRAYS, given | traced), tuple(want))

    of_arrays = P(*("data" if axis == "data" else None, "seq", *["model"] * (axis == "model")))
    # What all sequences share has no batch dimension.
    specs = {
        name: P(*SPECS[name][max(0, len(SPECS[name]) - np.ndim(x)) :])
        if not isinstance(x, tuple)
        else P()
        for name, x in given.items()
    }

    @quick_jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=((of_arrays,) * 3, specs), out_specs=of_arrays
    )
    def on_device(arrays, given):
        call: Any = {"is_causal": True, "return_residual": True, **given}
        return burst_jax.ring_attention(*arrays, axis_name="seq", **call)

    put = lambda x, s: x if x is None else jax.device_put(x, jax.NamedSharding(mesh, s))  # noqa: E731
    arrays = tuple(put(x, of_arrays) for x in ARRAYS)
    placed = {
        n: tuple(put(side, P()) for side in x) if isinstance(x, tuple) else put(x, specs[n])
        for n, x in given.items()
    }
    assert_close(on_device(arrays, placed), tuple(want))


# --- ring steps that are left out ----------------------------------------------------------------


def test_ring_steps_that_an_offset_leaves_out():
    """Of a chunk of 16 queries over 64 keys on 4 devices: those to keys after the chunk."""

    def hops(offset, **options):
        traced = {"query_offset": jnp.int32(0)} if offset is None else {}
        request = make_request(
            RingArguments(query_offset=offset or 0, **options), axis_argument="seq_axis",
            axes="seq", size_of=lambda *_: 4, head_dim=8, arrays=traced,
        )  # fmt: skip
        return len(request.route(4, 16).offsets) - 1

    # Device r has queries offset + 4r ..; a query at position p needs the keys of device p // 16.
    assert hops(0, is_causal=True) == 3
    assert hops(0, local_window_size=1) == 3
    assert hops(48, local_window_size=2) == 3
    assert hops(None, local_window_size=2) == 3
    # All queries attend to one shard of keys, which is local on one device.
    striped: Any = {"layout": "striped", "local_window_size": 0}
    assert hops(0, **striped) == 0
    assert hops(1, **striped) == 1
    assert hops(None, **striped) == 3
    # Before all keys.
    assert hops(-16, is_causal=True) == 0


def scores_that_count(sizes, layout, lengths, window, table, queries_rotate, step):
    """How many scores count at a ring step, per device, by the dense mask."""
    n = math.prod(sizes)
    t, s = (n * length for length in lengths)
    keep = dense.Mask(window=window).dense(None, None, t, s, block_mask=table)[0]
    q, kv = (burst_jax.positions(layout, length, n).reshape(n, -1) for length in (t, s))
    counts = []
    for device in range(n):
        place = np.subtract(np.unravel_index(device, sizes), step) % sizes
        source = np.ravel_multi_index(tuple(place), sizes)
        at_q, at_kv = (source, device) if queries_rotate else (device, source)
        counts.append(int(keep[np.ix_(q[at_q], kv[at_kv])].sum()))
    return counts


@pytest.mark.parametrize("queries_rotate", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "striped:2"])
@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=str)
def test_a_static_table_leaves_out_ring_steps(sizes, layout, queries_rotate):
    n, left_out = math.prod(sizes), 0
    for index, ((t, s), blocks) in enumerate(
        [((8, 8), (2, 4)), ((6, 4), (3, 2)), ((12, 6), (4, 1)), ((8, 8), (1, 2))]
    ):
        rng = np.random.default_rng(index)
        table = np.zeros((n * t // blocks[0], n * s // blocks[1]), bool)
        table.flat[rng.choice(table.size, 2)] = True
        for window in ((None, None), (None, 0), (7, 3)):
            known = Blocks(*blocks, table.shape, np.packbits(table).tobytes())
            mask = RingMask(sizes, layout, t, s, Mask(*window), queries_rotate, 0, known)
            route = make_route(("outer", "inner")[-len(sizes) :], mask)
            of = sizes, layout, (t, s), window, table, queries_rotate
            counts = {
                step: scores_that_count(*of, step) for step in itertools.product(*map(range, sizes))
            }
            wanted = {step for step, by_device in counts.items() if any(by_device)}
            wanted |= {(0,) * len(sizes)}
            assert set(route.offsets) == wanted
            left_out += n - len(wanted)
            for step, (most, mean) in scores_per_step(route, mask).items():
                assert (most, mean) == (max(counts[step]), np.mean(counts[step]))
    assert left_out


def test_a_static_table_sends_less():
    """Every device needs its own keys and those of the one before: K and V make one hop."""
    near = np.subtract.outer(np.arange(4), np.arange(4))
    table = (near == 0) | (near == 1)
    keep = dense.Mask().dense(None, None, T, T, block_mask=table)

    def run(table):
        return lambda *arrays: attend(arrays, block_mask=table, backward="rotate_kv")

    def hops(table):
        def gradient(arrays, cotangents):
            return jax.vjp(run(table), *arrays)[1](cotangents)

        return count(jax.make_jaxpr(gradient)(ARRAYS, COTANGENTS).jaxpr, "ppermute")

    # The forward sends K and V once. The backward does, and returns dK and dV.
    assert (hops(table), hops(jnp.asarray(table))) == (6, 3 * 2 * 3)
    got = forward_and_gradients(run(table))(ARRAYS, COTANGENTS)
    assert_close(got, dense.truth(*ARRAYS, keep, *COTANGENTS))


# --- layers and adapters -------------------------------------------------------------------------


def test_adapters_pad_what_has_an_entry_per_token():
    length = 30
    qkv = tuple(jnp.asarray(x[:, :length]) for x in ARRAYS)
    rng = np.random.default_rng(0)
    starts, ends = key_ranges(rng, B, length)
    bounds: Any = {"prefix_lengths": np.array([4, 20]), "key_starts": starts[0], "key_ends": ends}
    places: Any = {
        "query_positions": rng.integers(0, length, (B, length)),
        "key_value_positions": rng.permutation(length),
    }
    for given in (bounds, places):
        fn = nnx_attention_fn(mesh=mesh_of(seq=4), is_causal=True, pad=True, **given)
        assert_close(fn(*qkv), local_attention(*qkv, is_causal=True, **given))
    fn = nnx_attention_fn(mesh=mesh_of(seq=2), pad=True, block_mask=np.ones((3, 3), bool))
    with pytest.raises(ValueError, match="block_mask is given, and lengths 15 and 15 are padded"):
        fn(*(x[:, :15] for x in qkv))


def test_a_layer_accepts_masks_in_its_call():
    mesh = mesh_of(seq=2)
    layer = burst_jax.BurstAttention(
        16, 2, mesh=mesh, is_causal=True, rope_theta=None, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, 16)), jnp.float32)
    projected = [f(x) for f in (layer.query, layer.key, layer.value)]
    masks: Any = {
        "prefix_lengths": np.array([4, 20]), "key_starts": STARTS[0], "block_mask": a_table((8, 4))
    }  # fmt: skip
    want = layer.out(local_attention(*projected, is_causal=True, **masks))
    assert_close(layer(x, **masks), want)
    unknown: Any = {"scale": 0.5}
    with pytest.raises(TypeError, match=r"call got scale: "):
        layer(x, **unknown)


def test_one_devices_attention_accepts_tables():
    """Also one that is compiled in, and with one table per head."""
    table = np.stack([a_table((8, 4), seed=seed) for seed in range(N)])
    keep = dense.Mask().dense(None, None, T, T, block_mask=table)
    want = dense.truth(*ARRAYS, keep, *COTANGENTS)[0]
    for given in (table, jnp.asarray(table)):
        assert_close(local_attention(*ARRAYS, block_mask=given), want)


def test_sm90_kernels_name_the_blocks_that_they_support():
    query: Any = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def named(run: int, name: str | None = "mosaic_sm90") -> str:
        blocks = BlockMask(jnp.ones((1, 2, 2), bool), 64, 64, 64, run)
        sides = QuerySide(query), KVSide(query, query)
        inputs = AttentionInputs(*sides, SharedInputs(block_mask=blocks))
        where = {"platform": "gpu", "compute_capability": 9.0, "inputs": inputs}
        return resolve(name, **where, backward=True).name

    assert named(64) == "mosaic_sm90"
    message = r"64 queries and 32 keys side by side .*use larg"
    with pytest.raises(NotImplementedError, match=message):
        named(32)
    assert named(32, None) == "triton"
