"""Masks by arrays, chunks, block-sparse masks, positions: tiles, traced values, shardings, hops.

test_fuzz.py draws calls with all of them, test_errors.py has their mistakes.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from flax import nnx
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import assert_close, mesh_of
from ring_cases import kept_scores
from rings import B, T, forward_and_gradients, make_inputs, one_device

import burst_jax
from burst_jax import local_attention, merge
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from burst_jax.layouts.parse import parse_layout
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.route import RingMask, make_route, scores_per_step
from pallas_kernels import (
    AttentionInputs,
    BlockMask,
    Implementation,
    KVSide,
    Mask,
    QuerySide,
    SharedInputs,
    Tiles,
    mosaic_sm90,
    resolve,
    xla,
)
from pallas_kernels.mask import end_of_keys_in_window, first_key_in_window
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

ARRAYS, COTANGENTS = make_inputs()
SEQ_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def a_table(shape, share=0.4):
    """bool of this shape: blocks here and there, some whole ones, an empty row."""
    rng = np.random.default_rng(0)
    table = rng.random(shape) < share
    table[..., 0, :] |= rng.random(shape[-1]) < 0.8
    table[..., shape[-2] // 2, :] = False
    return table


# --- exactness on a ring -------------------------------------------------------------------------

GQA = {"dims": (16, 16), "layout": "zigzag"}
# Blocks of several tiles of 16 queries and 24 keys, and more blocks than a word has bits.
# Chunks with a window, in stripes, and of a size that divides nothing.
RINGS: dict[str, tuple[dict[str, int], tuple[str, ...], dict[str, Any]]] = {
    "few-blocks": (
        {"seq": 2}, ("is_causal", "segments", "sink_logits", "alibi_slopes"),
        GQA | {"t": 128, "s": 128, "block_mask": jnp.asarray(a_table((4, 8, 4)))},
    ),
    "chunks-window": (
        {"seq": 3}, (), GQA | {"t": 120, "s": 120, "local_window_size": (5, 9),
                               "attention_chunk_size": 20},
    ),
    "chunks-odd": (
        {"seq": 3}, ("is_causal",), GQA | {"t": 150, "s": 150, "layout": "striped:5",
                                           "attention_chunk_size": 31, "logits_soft_cap": 3.0,
                                           "backward": "rotate_query"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RINGS)
def test_block_masks_and_chunks_on_a_ring_are_exact(name):
    mesh, features, options = RINGS[name]
    valid.assert_exact(valid.program_of(mesh, features, **options), factor=1.5)


def test_chunks_count_positions_below_0_too():
    ids: Any = np.repeat([1, 2, 0, 3], T // 4)[None].repeat(B, 0)
    options = {"attention_chunk_size": 10, "query_offset": -7}
    options |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    run = functools.partial(local_attention, return_residual=True, **options)
    got = forward_and_gradients(run)(ARRAYS, COTANGENTS)
    assert_close(got, one_device(ARRAYS, COTANGENTS, is_causal=False, **options))


def test_tiles_that_a_table_empties_are_skipped():
    """NaNs in the values of keys that no query attends to reach no result."""
    query, key, value = ARRAYS
    table = np.ones((2, 4), bool)
    table[:, 3] = False
    nan = value.copy()
    nan[:, 3 * T // 4 :] = np.nan
    got = burst_jax.burst_attention(
        query, key, nan, mesh=mesh_of(seq=2), return_residual=True,
        implementation=xla.in_tiles(Tiles(8, 4)), block_mask=jnp.asarray(table),
    )  # fmt: skip
    want = one_device(ARRAYS, COTANGENTS, is_causal=False, block_mask=table)
    assert_close(got, tuple(want[:2]))


# --- values that are traced ----------------------------------------------------------------------


def test_one_program_for_all_windows():
    """Of one scan too. A side below 0 moves the window away, and no sum overflows int32."""

    @quick_jit
    def scanned(lefts):
        def layer(_, left):
            attend = functools.partial(
                burst_jax.burst_attention, mesh=mesh_of(seq=2), return_residual=True,
                local_window_size=(left, 0),
            )  # fmt: skip
            results, vjp = jax.vjp(attend, *ARRAYS)
            return None, (*results, *vjp(COTANGENTS))

        return jax.lax.scan(layer, None, lefts)[1]

    lefts = np.array([3, 0, 40, 2**31 - 1, -2, -(2**31)], np.int32)
    got = scanned(lefts)
    for index, left in enumerate(lefts.tolist()):
        results = [np.asarray(x[index]) for x in got]
        if left < 0:
            assert all((x == (-np.inf if i == 1 else 0)).all() for i, x in enumerate(results))
        else:
            window = {"local_window_size": (left, 0)}
            assert_close(results, one_device(ARRAYS, COTANGENTS, **window))


def test_bounds_beyond_int32_are_no_bounds():
    attend: Any = functools.partial(local_attention, *ARRAYS, implementation="reference")
    want = attend()
    far: Any = np.full(T, 2**40), np.full(T, -(2**40))
    bounds: Any = {"key_ends": far[0], "key_starts": far[1], "attention_chunk_size": 2**40}
    assert_close(attend(**bounds), want)
    # As uint32, 2^32 - 1 would be -1 in int32.
    assert_close(attend(key_ends=jnp.full(T, 2**32 - 1, jnp.uint32)), want)


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
    programs, size = [], T // 2

    @jax.jit
    def part(query, key, value, q_start, kv_start):
        programs.append(q_start)
        return local_attention(
            query, key, value, is_causal=True, local_window_size=13, return_residual=True,
            query_offset=q_start, key_value_positions=kv_start + jnp.arange(key.shape[1]),
        )  # fmt: skip

    def in_chunks(query, key, value):
        query, key, value = (jnp.split(x, 2, axis=1) for x in (query, key, value))
        outs = [
            merge(*(part(q, key[j], value[j], size * i, size * j) for j in range(2)))
            for i, q in enumerate(query)
        ]
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *outs)

    got = forward_and_gradients(in_chunks)(ARRAYS, COTANGENTS)
    assert_close(got, one_device(ARRAYS, COTANGENTS, local_window_size=13))
    assert len(programs) == 1
    # An offset of S - T aligns T queries to the last key.
    last = local_attention(
        ARRAYS[0][:, -5:], *ARRAYS[1:], is_causal=True, query_offset=T - 5, local_window_size=13
    )
    assert_close(last, np.asarray(got[0])[:, -5:])


# --- shardings -----------------------------------------------------------------------------------

ARRAY_ARGUMENTS = {*valid.SHAPES, "block_mask", "local_window_size"}
BOUNDS = ("positions_by_row", "key_value_positions", *SEQ_LENGTHS, "key_starts", "key_ends")
GROUPS = {
    "by-sequence": ({"data": 2, "seq": 2}, ("is_causal", *BOUNDS), {}),
    "by-head": (
        {"tensor": 2, "seq": 2},
        ("is_causal", "block_mask", "sink_logits", "alibi_slopes", "segments"), {},
    ),
    "window": ({"seq": 4}, ("positions", "score_mod", "mask_mod"), {"local_window_size": 3}),
    "traced": ({"seq": 2}, ("traced_window", "traced_offset"), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "features", "options"),
    [
        pytest.param(
            *group, id=name, marks=pytest.mark.slow if name in ("by-head", "window") else ()
        )
        for name, group in GROUPS.items()
    ],
)
def test_every_array_is_sharded_in_an_outer_shard_map(mesh, features, options):
    """Each argument enters as burst_attention shards it, with the batch or the heads sharded too.

    User functions read the indices of the outer shard, so its batch and heads are whole.
    """
    program = valid.program_of(mesh, features, t=32, s=16, **options)
    spec = functools.partial(valid.needed_spec, program)

    def attention(**call):
        """ring_attention in a shard_map, called like burst_attention."""
        arrays = {name: call.pop(name) for name in ARRAY_ARGUMENTS & call.keys() - options.keys()}
        specs = {
            name: jax.tree.map(lambda x, name=name: spec(name, np.ndim(x)), x)
            for name, x in arrays.items()
        }
        static = {name: x for name, x in call.items() if name not in ("mesh", *program.axes)}
        of_out = spec("query", 4)
        return jax.shard_map(
            lambda arrays: burst_jax.ring_attention(axis_name="seq", **arrays, **static),
            mesh=program.mesh, in_specs=(specs,), out_specs=(of_out, P(*of_out[:3])),
        )(arrays)  # fmt: skip

    valid.assert_exact(program, attention)


# --- ring steps that are left out ----------------------------------------------------------------

HOPS: list[tuple[dict[str, Any], int]] = [
    # 4 devices with 32 queries and 32 keys each.
    ({"attention_chunk_size": 32, "is_causal": True}, 0),
    ({"attention_chunk_size": 32}, 0),
    ({"attention_chunk_size": 48, "is_causal": True}, 1),
    ({"attention_chunk_size": 48}, 2),
    ({"attention_chunk_size": 64, "query_offset": 16}, 3),
    ({"attention_chunk_size": 2**40, "is_causal": True}, 3),
    ({"attention_chunk_size": 16, "is_causal": True, "layout": "zigzag"}, 0),
    ({"attention_chunk_size": 32, "is_causal": True, "layout": "zigzag"}, 2),
    ({"attention_chunk_size": 64, "is_causal": True, "layout": "striped"}, 3),
    # All queries attend to one shard of keys, which is local on one device.
    ({"layout": "striped", "local_window_size": 0}, 0),
    ({"layout": "striped", "local_window_size": 0, "query_offset": 1}, 1),
    ({"layout": "striped", "local_window_size": 0, "query_offset": None}, 3),
    # Before all keys, and after all of them.
    ({"is_causal": True, "query_offset": -128}, 0),
    ({"local_window_size": (1, 0), "query_offset": 130}, 0),
    ({"local_window_size": (1, 0), "query_offset": 64}, 2),
    ({"local_window_size": (1, 0), "query_offset": None}, 3),
]


@pytest.mark.parametrize(("options", "hops"), HOPS, ids=str)
def test_a_route_has_the_hops_that_chunks_windows_and_offsets_need(options, hops):
    """An offset of None is a traced one."""
    traced = {"query_offset": jnp.int32(0)} if options.get("query_offset", 0) is None else {}
    static = {name: x for name, x in options.items() if x is not None}
    request = make_request(
        RingArguments(**static), axis_argument="seq_axis", axes="seq", size_of=lambda *_: 4,
        head_dim=8, arrays=traced,
    )  # fmt: skip
    assert len(request.route(32, 32).offsets) - 1 == hops


@pytest.mark.parametrize(
    ("sizes", "layout", "queries_rotate"),
    [
        ((3,), "contiguous", True), ((2, 3), "contiguous", False), ((2, 3), "zigzag", True),
        ((3,), "striped", False), ((2, 3), "striped:2", True),
    ],
    ids=str,
)  # fmt: skip
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
            mask = RingMask(
                sizes, parse_layout(layout), t, s, Mask(*window), queries_rotate, 0, known
            )
            route = make_route(("outer", "inner")[-len(sizes) :], mask)
            of = sizes, layout, (t, s), window, queries_rotate
            steps = itertools.product(*map(range, sizes))
            counts = {step: kept_scores(*of, step, table) for step in steps}
            wanted = {step for step, by_device in counts.items() if any(by_device)}
            wanted |= {(0,) * len(sizes)}
            assert set(route.offsets) == wanted
            left_out += n - len(wanted)
            for step, (most, mean) in scores_per_step(route, mask).items():
                assert (most, mean) == (max(counts[step]), np.mean(counts[step]))
    assert left_out


def test_a_static_table_sends_less():
    """Of some head, each device needs the keys of the one before: K and V make one hop."""
    near = np.subtract.outer(np.arange(4), np.arange(4))
    table = np.stack([near == 0, near == 1, near == 0, near == 1])

    def hops(table):
        def gradient(arrays, cotangents):
            attend = functools.partial(
                burst_jax.burst_attention, mesh=mesh_of(seq=4), block_mask=table,
                backward="rotate_kv", return_residual=True,
            )  # fmt: skip
            return jax.vjp(attend, *arrays)[1](cotangents)

        return count(jax.make_jaxpr(gradient)(ARRAYS, COTANGENTS).jaxpr, "ppermute")

    # The forward sends K and V once. The backward does, and returns dK and dV.
    assert (hops(table), hops(jnp.asarray(table))) == (6, 3 * 2 * 3)


# --- layers and kernels --------------------------------------------------------------------------


def test_a_layer_accepts_masks_in_its_call():
    layer = burst_jax.BurstAttention(
        16, 2, mesh=mesh_of(seq=2), is_causal=True, rope_theta=None, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, 16)), jnp.float32)
    projected = [f(x) for f in (layer.query, layer.key, layer.value)]
    masks: Any = {
        "prefix_lengths": np.array([4, 20]), "key_starts": np.arange(T) // 3,
        "block_mask": a_table((8, 4)),
    }  # fmt: skip
    want = layer.out(local_attention(*projected, is_causal=True, **masks))
    assert_close(layer(x, **masks), want)
    unknown: Any = {"scale": 0.5}
    with pytest.raises(TypeError, match=r"call got scale: "):
        layer(x, **unknown)


def test_sm90_kernels_name_the_blocks_that_they_support():
    query: Any = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def named(run: int, name: str | Implementation | None = "mosaic_sm90") -> str:
        blocks = BlockMask(jnp.ones((1, 2, 2), bool), 64, 64, 64, run)
        sides = QuerySide(query), KVSide(query, query)
        inputs = AttentionInputs(*sides, SharedInputs(block_mask=blocks))
        where = {"platform": "gpu", "compute_capability": 9.0, "inputs": inputs}
        return resolve(name, **where, backward=True).name

    assert named(64) == "mosaic_sm90"
    message = r"64 queries and 32 keys side by side .*use larg"
    with pytest.raises(NotImplementedError, match=message):
        named(32)
    assert named(32, None) == "xla"
    # A tile of 96 keys would be of one and a half blocks.
    tile = MosaicConfig(128, 96, 2)
    for kernels in mosaic_sm90(tile), mosaic_sm90(None, tile):
        with pytest.raises(NotImplementedError, match=r"block_kv is 96; .* a multiple of 64"):
            named(64, kernels)
