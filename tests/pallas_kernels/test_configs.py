"""Tile configs: shared memory, alignment, what chooses them, and that they check themselves."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import local
import pytest

from pallas_kernels import (
    AttentionInputs,
    AttentionSpec,
    BlockMask,
    Dropout,
    KVSide,
    QuerySide,
    Score,
    SharedInputs,
    Tiles,
    mosaic_sm90,
)
from pallas_kernels.mosaic.sm80 import configs as sm80
from pallas_kernels.mosaic.sm90 import configs as sm90
from pallas_kernels.mosaic.sm90 import dq
from pallas_kernels.mosaic.sm90.backward_forms import (
    OWN_KEYS,
    SHARED_KEYS,
    SPLIT,
    WIDE_HEAD_DIMS,
)
from pallas_kernels.mosaic.sm90.configs import MosaicConfig
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory, ScratchLayout
from pallas_kernels.mosaic.sm90.static import ForwardStatic
from pallas_kernels.mosaic.tile_scheduler import SLOTS

SPEC = AttentionSpec.of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SPEC(float("nan")), "scale is nan: it must be a finite number"),
        (lambda: SPEC(float("inf")), "scale is inf: it must be a finite number"),
        (lambda: SPEC(1.0, left=-1), "window's left is -1: it must be from 0 to"),
        (lambda: SPEC(1.0, left=2**31), "window's left is 2147483648: .* or None"),
        (lambda: SPEC(1.0, right=-7), "window's right is -7: .* or None"),
        (lambda: SPEC(1.0, logits_soft_cap=0.0), "soft_cap is 0.0: .* positive"),
        (lambda: SPEC(1.0, logits_soft_cap=-2.0), "soft_cap is -2.0: .* positive"),
        (lambda: SPEC(1.0, logits_soft_cap=float("inf")), "soft_cap is inf: "),
        (lambda: Tiles(0, 8), "block_q is 0: it must be 1 or more"),
        (lambda: Tiles(8, -1), "block_kv is -1: it must be 1 or more"),
        (lambda: MosaicConfig(128, 128, 1), "stages is 1: it must be 2 or more"),
        (
            lambda: MosaicConfig(32, 128, 2),
            "block_q is 32: it must be 64 or more, a multiple of 64",
        ),
        (
            lambda: MosaicConfig(128, 100, 2),
            "block_kv is 100: it must be 64 or more, a multiple of 16",
        ),
        (lambda: MosaicConfig(128, 128, 2, cluster=0), "cluster is 0: it must be 1 or 2"),
        (lambda: MosaicConfig(128, 128, 2, cluster=3), "cluster is 3: it must be 1 or 2"),
        (
            lambda: MosaicConfig(128, 128, 2, cluster=2, producer_warpgroup=False),
            "cluster is 2: without a producer warpgroup it must be 1",
        ),
        (
            lambda: MosaicConfig(64, 96, 2, form=SPLIT, producer_warpgroup=False),
            "form is SPLIT: it needs a producer warpgroup",
        ),
        (
            lambda: MosaicConfig(64, 64, 2, do_stages=1, form=SHARED_KEYS),
            "do_stages is 1: it must be 2 or more",
        ),
        (
            lambda: MosaicConfig(128, 64, 2, form=SHARED_KEYS),
            "block_q is 128: where form is SHARED_KEYS it must be 64",
        ),
        (
            lambda: MosaicConfig(64, 64, 2, form=OWN_KEYS),
            "block_kv is 64: where form is OWN_KEYS it must be 128",
        ),
        (lambda: sm80.ForwardConfig(96, 64), "block_q is 96: it must be a multiple of 64"),
        (lambda: sm80.ForwardConfig(128, 16), "block_kv is 16: it must be a multiple of 32"),
        (lambda: sm80.BackwardConfig(96, 128), "block_q is 96: it must be a multiple of 64"),
        (lambda: sm80.BackwardConfig(64, 32), "block_kv is 32: it must be a multiple of 64"),
        (lambda: sm80.BackwardConfig(64, 64, 3), "stages is 3: it must be 1 or 2"),
    ],
)
def test_configs_check_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_copy_of_a_form_is_the_form():
    """Forms are compared by identity."""
    config = sm90.wide_backward_config(192, 192)
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        assert copied.form is config.form


def test_sm90_kernels_reject_tiles_that_they_do_not_support():
    q, k = (jnp.zeros((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    side = local.tokens(jnp.arange(64, dtype=jnp.int32))
    stats = (jnp.zeros((1, 4, 64)),) * 2
    kernels = mosaic_sm90(MosaicConfig(64, 128, 2), MosaicConfig(64, 256, 2))
    with pytest.raises(ValueError, match="block_q is 64: the forward kernel supports 128 or 192"):
        local.forward(kernels, q, (k, k), side, side, spec=SPEC(0.1))
    for config, message in (
        (MosaicConfig(64, 256, 2), "block_kv is 256: the backward kernel supports 128"),
        (MosaicConfig(64, 128, 2, cluster=2), "cluster is 2: the backward kernel supports 1"),
        (
            MosaicConfig(64, 128, 2, form=OWN_KEYS),
            r"form is OWN_KEYS: with head dims \(64, 64\) the backward kernel supports NARROW",
        ),
        (
            MosaicConfig(64, 128, 2, producer_warpgroup=False),
            "stages is 2: without a producer warpgroup the backward kernel needs 3",
        ),
    ):
        kernels = mosaic_sm90(backward_config=config)
        with pytest.raises(ValueError, match=message):
            local.gradients(kernels, (q, q), (k, k), stats, side, side, spec=SPEC(0.1))


def test_which_calls_have_tiles_of_96_keys_in_the_backward():
    """Others would get wrong gradients, or tiles that do not fit."""
    side = local.tokens(jnp.arange(64, dtype=jnp.int32))
    q = jnp.zeros((1, 64, 2, 192), jnp.bfloat16)
    stats = (jnp.zeros((1, 2, 64)),) * 2
    tiles = MosaicConfig(64, 96, 2, do_stages=1, form=SPLIT)
    slopes: Any = {"numbers": {"alibi_slopes": jnp.ones(2)}}
    for config, options, message in (
        (tiles, slopes, "form is SPLIT: with a bias, dropout, .* supports SHARED_KEYS"),
        (
            dataclasses.replace(tiles, do_stages=None), {},
            "stages is 2 and do_stages None: where form is SPLIT .* has memory for 2 and 1",
        ),
    ):  # fmt: skip
        kernels = mosaic_sm90(backward_config=config)
        with pytest.raises(ValueError, match=message):
            local.gradients(kernels, (q, q), (q, q), stats, side, side, spec=SPEC(0.1), **options)
    for dtype, length, keys in (
        (jnp.bfloat16, 64, 96), (jnp.float16, 96, 96), (jnp.float16, 64, 64),
    ):  # fmt: skip
        x = jnp.zeros((1, length, 2, 192), dtype)
        inputs = local.inputs_of(x, x, x, side, side)
        expected = keys if sm90.moves_registers() else 64
        assert dq.shipped_config(inputs, SPEC(0.1)).block_kv == expected


# --- sm90 ----------------------------------------------------------------------------------------

DIMS = range(16, 257, 16)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_sm90_forward_tiles_fit(out_dtype, monkeypatch):
    for equal, *dims, in_accumulator in itertools.product((0, 1), DIMS, DIMS, (False, True)):
        monkeypatch.setattr(sm90, "moves_registers", lambda equal=equal: not equal)
        config = sm90.forward_config(dims[0], dims[1])
        plain = (
            sm90.plain_forward_config(config, max(dims), causal, 64) for causal in (False, True)
        )
        for each in (config, *plain):
            for carry_dtype in {jnp.float32, out_dtype}:
                memory = ForwardMemory.of(
                    each, dims[0], jnp.bfloat16, out_dtype, carry_dtype, in_accumulator, dims[1]
                )
                # The largest tiles have no room for a float32 carry that is rounded.
                has_room = each.block_kv != sm90.LARGE_WIDE_BLOCK_KV or dims != [192, 192]
                has_room = has_room or out_dtype == carry_dtype
                assert (memory.nbytes <= sm90.SHARED_MEMORY) == has_room, (dims, carry_dtype)
    assert sm90.SHARED_MEMORY == 227 * 1024
    for dim in DIMS:
        for most in sm90.staging_limits(dim):
            lanes = sm90.float32_lanes(dim, most)
            out_lanes = sm90.result_lanes(dim, out_dtype == jnp.float32, most)
            assert dim % out_lanes == out_lanes % lanes == 0
            assert lanes <= most


@pytest.mark.parametrize(
    ("dim", "is_causal", "expected"),
    [
        (64, True, (128, 128, True)), (64, False, (192, 128, False)),
        (128, False, (128, 96, True)), (128, True, (128, 128, False)),
        (96, False, (128, 128, False)),
    ],
)  # fmt: skip
def test_a_producer_without_more_registers_for_consumers(monkeypatch, dim, is_causal, expected):
    """Where it gains."""
    monkeypatch.setattr(sm90, "moves_registers", lambda: False)
    config = sm90.plain_forward_config(sm90.forward_config(dim), dim, is_causal, 16384)
    assert (config.block_q, config.block_kv, config.producer_warpgroup) == expected
    assert config.cluster == 1


def test_a_thread_per_row_zeroes_padding():
    """Not in taller tiles, without a producer warpgroup, nor in clusters: those need zeros."""
    for keys, others, expected in (
        (128, {}, True), (112, {}, True), (192, {}, False), (128, {"cluster": 2}, False),
        (128, {"producer_warpgroup": False}, False),
    ):  # fmt: skip
        config: Any = functools.partial(sm90.MosaicConfig, 128, keys, 2)
        assert sm90.can_zero_padding(config(**others)) == expected, (keys, others)


def test_staging_buffers_of_the_forward_kernel_are_the_widest_that_fit():
    """The largest tiles leave 16 KiB for o: 32 of its lanes in float32, 16 with a carry."""
    for config, out_dtype, carry_dtype, expected in (
        (sm90.MosaicConfig(128, 64, 2), "bfloat16", None, (64, 128)),
        (sm90.MosaicConfig(128, 64, 2), "float32", None, (64, 64)),
        (sm90.MosaicConfig(128, 128, 2), "bfloat16", None, (32, 32)),
        (sm90.MosaicConfig(128, 128, 2), "float32", "float32", (32, 32)),
        (sm90.MosaicConfig(128, 128, 2), "bfloat16", "float32", (16, 16)),
        (sm90.MosaicConfig(128, 128, 2), "bfloat16", "bfloat16", (32, 32)),
    ):
        q, v = jnp.zeros((1, 128, 2, 192), jnp.bfloat16), jnp.zeros((1, 128, 2, 128), jnp.bfloat16)
        side = local.tokens(jnp.arange(128, dtype=jnp.int32))
        static = ForwardStatic.of(
            local.inputs_of(q, q, v, side, side), SPEC(0.1), config,
            out_dtype=jnp.dtype(out_dtype),
            carry_dtype=None if carry_dtype is None else jnp.dtype(carry_dtype),
        )  # fmt: skip
        assert (static.lanes, static.out_lanes) == expected


def test_sm90_backward_tiles_of_wide_heads_fit(monkeypatch):
    for equal, dims in itertools.product((False, True), WIDE_HEAD_DIMS):
        monkeypatch.setattr(sm90, "moves_registers", lambda equal=equal: not equal)
        config = sm90.for_this_jax(sm90.wide_backward_config(*dims))
        for in_fixed_point in (False, True):
            memory = BackwardMemory.of(config, dims[0], jnp.bfloat16, dims[1], in_fixed_point)
            assert memory.nbytes <= sm90.SHARED_MEMORY
        if config.form is SPLIT:
            continue  # One consumer computes two thirds of dQ.
        # Both are tiled in swizzled memory as their products read them.
        widths = sm90.dq_widths(config, dims[0])
        assert sum(widths) == dims[0] // 2
        assert all(x % sm90.staging_lanes(config, *dims) == 0 for x in widths)


@pytest.mark.parametrize(
    ("dim", "small"), [(32, False), (32, True), (64, False), (64, True), (96, True), (128, True)]
)
def test_sm90_backward_tiles_fit_and_bulk_copies_are_aligned(dim, small):
    """Copies fail unless their shared-memory address is a multiple of 128 bytes."""
    for value_dim in {dim, *range(32, 129, 32)} & {*range(0, 129, dim // 2)}:
        config = sm90.backward_config(max(dim, value_dim), small)
        assert BackwardMemory.of(config, dim, jnp.bfloat16, value_dim).nbytes <= 227 * 1024
    scratch = ScratchLayout.of(sm90.backward_config(dim, small))
    copied = [scratch.lse(stage) for stage in range(scratch.stages)]
    copied += [scratch.delta(stage) for stage in range(scratch.do_stages)]
    copied += [scratch.per_head_sums(i) for i in range(sm90.BACKWARD_WARPGROUPS)]
    assert all(part.start * 4 % 128 == 0 for part in copied)
    # Nothing overlaps, nor the tile and head of a stage, nor the scheduler's slots.
    taken = [i for part in copied for i in range(part.start, part.start + part.size)]
    taken += [i for stage in range(scratch.stages) for i in scratch.tile_and_head(stage)]
    taken += range(scratch.slots, scratch.slots + SLOTS)
    assert len(set(taken)) == len(taken)
    assert max(taken) < scratch.size


@pytest.mark.parametrize(
    ("block_q", "options"),
    [
        (128, {}),
        (128, {"ids": True}),
        (128, {"blocks": 256}),
        (128, {"deterministic": True}),
        (64, {"dim": 96}),
        (64, {"dropout": Dropout(0.1)}),
        (64, {"slopes": True}),
        # Tiles would be larger than the mask's blocks.
        (64, {"blocks": 64}),
        (64, {"ids": True, "deterministic": True}),
        (128, {"equal_registers": True}),
        (64, {"equal_registers": True, "ids": True}),
        (64, {"equal_registers": True, "deterministic": True}),
    ],
    ids=str,
)
def test_sm90_backward_tiles_of_128_queries(monkeypatch, block_q, options):
    """Where they have registers, and the mask no smaller blocks. Bounds and dQ depend on it."""
    monkeypatch.setattr(sm90, "EQUAL_REGISTERS_SINCE", (0 if "equal_registers" in options else 99,))
    x = jnp.zeros((1, 512, 2, options.get("dim", 64)), jnp.bfloat16)
    ids = jnp.zeros((1, 512), jnp.int32) if "ids" in options else None
    side, blocks = local.tokens(jnp.arange(512, dtype=jnp.int32), ids), None
    if "blocks" in options:
        size = options["blocks"]
        blocks = BlockMask(jnp.ones((1, 512 // size, 512 // size), bool), *[size] * 4)
    kernels: Any = mosaic_sm90(deterministic="deterministic" in options)
    spec = dataclasses.replace(SPEC(0.1), dropout=options.get("dropout"))
    seeds = jnp.zeros((1, 2), jnp.int32) if spec.dropout else None
    numbers = {"alibi_slopes": jnp.ones(2)} if "slopes" in options else None
    inputs = local.inputs_of(x, x, x, side, side, numbers, seeds, blocks)
    inputs = local.with_cotangents(inputs, x, jnp.zeros((2, 1, 2, 512)))
    bounds = kernels.backward_bounds(inputs, spec=spec)
    zeros = jax.eval_shape(
        functools.partial(kernels.dq_accumulator.zeros, spec=spec), inputs, bounds
    )
    made = (1, 2, 4, 2, 128, 32) if block_q == 128 else x.shape
    assert zeros.values.shape == made


@pytest.mark.parametrize("equal_registers", [False, True])
def test_long_plain_masks_use_clusters(monkeypatch, equal_registers):
    """The bounds have a row per cluster's tile of queries."""
    monkeypatch.setattr(sm90, "EQUAL_REGISTERS_SINCE", (0 if equal_registers else 99,))
    for dim, length, mask, segments, tile in (
        (128, 4096, {}, False, 256),
        (128, 4096, {"right": 0}, False, 128),
        (128, 16384, {"right": 0}, False, 256),
        (128, 16384, {"right": 0}, True, 128),
        (128, 16384, {"left": 500, "right": 0}, False, 128),
        (128, 1024, {}, False, 128),
        (160, 4096, {}, False, 256),
        (160, 16384, {"right": 0}, False, 256),
        (192, 16384, {}, False, 128),
        (192, 16384, {"right": 0}, False, 128),
        (256, 16384, {"right": 0}, False, 128),
        (64, 16384, {}, False, 192),
    ):
        x: Any = jax.ShapeDtypeStruct((1, length, 2, dim), jnp.bfloat16)
        ids: Any = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None
        positions: Any = jax.ShapeDtypeStruct((length,), jnp.int32)
        bounds = functools.partial(mosaic_sm90().forward_bounds, spec=SPEC(0.1, **mask))
        inputs = AttentionInputs(QuerySide(x, positions, ids), KVSide(x, x, positions, ids))
        tile = 128 if equal_registers and tile == 256 else tile
        assert -(-length // tile) in jax.eval_shape(bounds, inputs).shape


@pytest.mark.parametrize(
    ("dim", "out_dtype", "carry_dtype", "producer", "expected"),
    [
        (128, "bfloat16", None, True, (2, 3, True)),
        (128, "float32", "float32", True, (2, 3, True)),
        # A third stage leaves a carry that is rounded a quarter of the staging memory.
        (128, "bfloat16", "float32", True, (2, 3, True)),
        (128, "bfloat16", "bfloat16", True, (2, 3, True)),
        (192, "bfloat16", None, True, (2, 2, True)),
        (96, "bfloat16", None, True, (2, 2, False)),
        (256, "bfloat16", None, True, (2, 2, False)),
        (128, "float32", "float32", False, (2, 3, False)),
        (64, "float32", "float32", False, (3, 3, False)),
    ],
)
def test_third_stages_and_what_needs_them(dim, out_dtype, carry_dtype, producer, expected):
    q = jnp.zeros((1, 128, 2, dim), jnp.bfloat16)
    side = local.tokens(jnp.arange(128, dtype=jnp.int32))
    config = dataclasses.replace(sm90.forward_config(dim), producer_warpgroup=producer)
    if not producer:
        config = dataclasses.replace(config, stages=2)
    static = ForwardStatic.of(
        local.inputs_of(q, q, q, side, side), SPEC(0.1), config,
        out_dtype=jnp.dtype(out_dtype),
        carry_dtype=None if carry_dtype is None else jnp.dtype(carry_dtype),
    ).with_third_stages()  # fmt: skip
    assert static.memory.nbytes <= sm90.SHARED_MEMORY
    found = static.config
    assert (found.stages, static.v_stages, found.split_softmax) == expected


def test_which_accumulators_start_from_the_bias():
    q = jnp.zeros((1, 64, 4, 64), jnp.bfloat16)
    side = local.tokens(jnp.arange(64, dtype=jnp.int32))
    inputs = local.inputs_of(q, q, q, side, side, numbers={"alibi_slopes": jnp.ones(4)})
    options: Any = {"out_dtype": jnp.dtype("float32"), "carry_dtype": None}
    options |= {"config": sm90.forward_config(64)}
    for scale, soft_cap, expected in (
        (0.1, None, True),
        (0.1, 30.0, False),
        (0.0, None, False),
        (-0.1, None, False),
        (2.0**-63, None, True),
        (2.0**-64, None, False),
    ):
        assert Score(scale, soft_cap).bias_can_start_products == expected
        options["spec"] = SPEC(scale, right=0, logits_soft_cap=soft_cap)
        static = ForwardStatic.of(inputs, **options)
        assert (static.bias_in_accumulator, static.adds_bias) == (expected, not expected)
        without = ForwardStatic.of(inputs._replace(shared=SharedInputs()), **options)
        assert (without.bias_in_accumulator, without.adds_bias) == (False, False)


# --- sm80 ----------------------------------------------------------------------------------------


def test_sm80_tiles_fit():
    square = ((dim, dim) for dim in (16, 32, 64, 96, 128, 256))
    for dims in (*square, (192, 96), (192, 128), (256, 32)):
        forward, backward = sm80.forward_config(*dims), sm80.backward_config(*dims)
        for config in (forward, backward):
            assert config.shared_memory(*dims) <= sm80.SHARED_MEMORY, config
        # Two CTAs of the forward share an SM, each with a KiB of the system's own.
        assert 2 * (forward.shared_memory(*dims) + 1024) <= sm80.SHARED_MEMORY + 1024
        small = sm80.backward_config(*dims, sm80.SMALL_SHARED_MEMORY)
        fits = small.shared_memory(*dims) <= sm80.SMALL_SHARED_MEMORY
        assert fits == (sum(dims) <= 320)
        # GPUs with less shared memory run the same tiles.
        assert forward.shared_memory(*dims) <= sm80.SMALL_SHARED_MEMORY
        queries, lanes = backward.dq_part(dims[0])
        assert 2 * queries * lanes == backward.block_q * dims[0]
