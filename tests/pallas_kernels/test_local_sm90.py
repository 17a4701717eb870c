"""The sm90 kernels' shared memory, configs and biases; and on a Hopper GPU their promises.

The latter run with ``--implementation mosaic_sm90`` only. Elsewhere test_sm90_interpreted.py
interprets the kernels, and tests/compiled/test_compiled_mosaic.py compiles them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import compare
import dense
import jax
import jax.numpy as jnp
import local as local_calls
import numpy as np
import pytest
from conftest import IMPLEMENTATION

from pallas_kernels import (
    MOSAIC_SM90,
    REFERENCE,
    AttentionInputs,
    AttentionSpec,
    KVSide,
    QuerySide,
    Score,
    SharedInputs,
    mosaic_sm90,
)
from pallas_kernels.mosaic.sm90.configs import (
    BACKWARD_WARPGROUPS,
    MosaicConfig,
    backward_config,
    float32_lanes,
    forward_config,
    result_lanes,
)
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory, ScratchLayout
from pallas_kernels.mosaic.sm90.static import ForwardStatic
from pallas_kernels.mosaic.tile_scheduler import SLOTS

DIMS = range(16, 257, 16)
LEFT = 200
SPEC = AttentionSpec.of(scale=0.1, left=LEFT, right=0)


@pytest.mark.parametrize("float32", [False, True], ids=["rounded", "float32"])
@pytest.mark.parametrize("dim", DIMS)
def test_forward_tiles_fit(dim, float32):
    out_dtype = jnp.float32 if float32 else jnp.bfloat16
    for bias_in_accumulator, value_dim in itertools.product((False, True), DIMS):
        memory = ForwardMemory.of(
            forward_config(max(dim, value_dim)), dim, jnp.bfloat16, out_dtype, True,
            bias_in_accumulator, value_dim,
        )  # fmt: skip
        assert memory.nbytes <= 227 * 1024, value_dim
    assert dim % result_lanes(dim, float32) == 0
    assert result_lanes(dim, float32) % float32_lanes(dim) == 0
    assert float32_lanes(dim) <= 64


@pytest.mark.parametrize(
    ("dim", "length", "mask", "segments", "tile"),
    [
        (128, 4096, {}, False, 256),
        (128, 4096, {"right": 0}, False, 128),
        (128, 16384, {"right": 0}, False, 256),
        (128, 16384, {"right": 0}, True, 128),
        (128, 16384, {"left": 500, "right": 0}, False, 128),
        (128, 1024, {}, False, 128),
        (256, 16384, {}, False, 128),
        (64, 16384, {}, False, 192),
    ],
)
def test_long_plain_masks_use_clusters(dim, length, mask, segments, tile):
    """The bounds have a row per cluster's tile of queries."""
    x: Any = jax.ShapeDtypeStruct((1, length, 2, dim), jnp.bfloat16)
    ids: Any = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None
    positions: Any = jax.ShapeDtypeStruct((length,), jnp.int32)
    spec = AttentionSpec.of(0.1, **mask)
    bounds = functools.partial(mosaic_sm90().forward_bounds, spec=spec)
    table = jax.eval_shape(
        bounds, AttentionInputs(QuerySide(x, positions, ids), KVSide(x, x, positions, ids))
    )
    assert -(-length // tile) in table.shape


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_backward_tiles_fit(dim):
    for value_dim in {dim, *range(32, 129, 32)} & {*range(0, 129, dim // 2)}:
        config = backward_config(max(dim, value_dim))
        memory = BackwardMemory.of(config, dim, jnp.bfloat16, value_dim)
        assert memory.nbytes <= 227 * 1024, value_dim


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_copies_are_aligned(dim):
    """Bulk copies fail unless their shared-memory address is a multiple of 128 bytes."""
    config = backward_config(dim)
    scratch = ScratchLayout.of(config)
    copied = [scratch.lse(stage) for stage in range(scratch.stages)]
    copied += [scratch.delta(stage) for stage in range(scratch.do_stages)]
    copied += [scratch.per_head_sums(warpgroup) for warpgroup in range(BACKWARD_WARPGROUPS)]
    assert all(part.start * 4 % 128 == 0 for part in copied)
    # Nothing overlaps, nor the tile and head of a stage, nor the scheduler's slots.
    taken = [i for part in copied for i in range(part.start, part.start + part.size)]
    taken += [i for stage in range(scratch.stages) for i in scratch.tile_and_head(stage)]
    taken += range(scratch.slots, scratch.slots + SLOTS)
    assert len(set(taken)) == len(taken)
    assert max(taken) < scratch.size


@pytest.mark.parametrize(
    ("scale", "soft_cap", "expected"),
    [
        (0.1, None, True),
        (0.1, 30.0, False),
        (0.0, None, False),
        (-0.1, None, False),
        (2.0**-63, None, True),
        (2.0**-64, None, False),
    ],
    ids=["plain", "cap", "zero", "negative", "small", "tiny"],
)
def test_which_accumulators_start_from_the_bias(scale, soft_cap, expected):
    assert Score(scale, soft_cap).bias_can_start_products == expected
    _, q, _, kv, tokens = problem(t=64, s=64)
    per_head = {"alibi_slopes": jnp.ones(q.shape[2])}
    inputs = local_calls.inputs_of(q, kv[0], kv[1], *tokens, numbers=per_head)
    spec = AttentionSpec.of(scale, right=0, logits_soft_cap=soft_cap)
    config = forward_config(64)
    static = ForwardStatic.of(inputs, spec, config, out_dtype=jnp.dtype("float32"), has_carry=False)
    assert static.bias_in_accumulator == expected
    assert static.adds_bias != expected
    without = ForwardStatic.of(
        inputs._replace(shared=SharedInputs()),
        spec,
        config,
        out_dtype=static.out_dtype,
        has_carry=False,
    )
    assert not without.bias_in_accumulator
    assert not without.adds_bias


@pytest.mark.parametrize("first", [0, 10_000_019], ids=["near", "far"])
def test_every_form_of_the_bias_is_the_bias(first):
    """For keys at or before a query: the affine form minus its value there, and the signed form."""
    rng = np.random.default_rng(0)
    kv = first + np.sort(rng.choice(5000, 40, replace=False)).astype(np.int32)
    q = kv[-1] + np.arange(3, dtype=np.int32)[:, None]
    score, numbers = Score(0.1), {"alibi_slopes": jnp.float32(0.7)}
    exact = -np.float64(np.float32(0.7)) * (q - kv)

    slope, start = score.affine_bias(jnp.asarray(q, jnp.float32), numbers)
    slope, start = np.float64(slope), np.asarray(start, np.float64)
    line, at_query = (np.float32(slope * at + start) for at in (kv, q))
    np.testing.assert_allclose(line - at_query, exact, rtol=1e-6, atol=0)
    assert first == 0 or np.abs(at_query).max() > 0.01

    signed = score.bias_of_earlier_keys(jnp.asarray(q), jnp.asarray(kv), numbers)
    np.testing.assert_allclose(signed, exact, rtol=1e-6, atol=0)


def test_a_kernel_rejects_tiles_that_it_does_not_support():
    _, q, do, kv, tokens = problem(t=64, s=64)
    stats = (jnp.zeros((2, 4, 64)),) * 2
    local = mosaic_sm90(MosaicConfig(64, 128, 2), MosaicConfig(64, 256, 2))
    with pytest.raises(ValueError, match="block_q is 64: the forward kernel supports 128 or 192"):
        forward(local, q, kv, tokens)
    with pytest.raises(ValueError, match="block_kv is 256: the backward kernel supports 128"):
        backward(local, (q, do), kv, stats, tokens)
    local = mosaic_sm90(backward_config=MosaicConfig(64, 128, 2, cluster=2))
    with pytest.raises(ValueError, match="cluster is 2: the backward kernel supports 1"):
        backward(local, (q, do), kv, stats, tokens)


def normal(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.normal(size=shape), dtype)


def tokens_at(start, length):
    return local_calls.tokens(jnp.arange(start, start + length, dtype=jnp.int32))


def problem(dim=64, t=200, s=328, heads=4, kv_heads=2):
    rng = np.random.default_rng(dim)
    q, do = (normal(rng, 2, t, heads, dim) for _ in range(2))
    kv = normal(rng, 2, 2, s, kv_heads, dim)
    return rng, q, do, kv, (tokens_at(s - t, t), tokens_at(0, s))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("spec", "out_dtype"))
def forward(implementation, q, kv, tokens, carry=None, *, spec=SPEC, out_dtype=None):
    return local_calls.forward(
        implementation, q, kv, tokens[0], tokens[1], carry, spec=spec, out_dtype=out_dtype
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="half")
def backward(implementation, qdo, kv, stats, tokens, dq=None, dkv=None, half=None):
    return local_calls.backward(
        implementation, qdo, kv, stats, tokens[0], tokens[1], dq, dkv, spec=SPEC, part=half
    )


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


if IMPLEMENTATION == "mosaic_sm90":

    @pytest.mark.parametrize("dim", DIMS)
    def test_every_head_dim_forward(dim):
        _, q, do, kv, tokens = problem(dim)
        positions = [np.asarray(side.positions) for side in tokens]
        distance = positions[0][:, None] - positions[1][None, :]
        keep = ((distance >= 0) & (distance <= LEFT))[None]
        scaled = q * (SPEC.score.scale * dim**0.5)  # dense's scale is dim^-0.5
        dlse = np.zeros((2, 200, 4), np.float32)
        arrays = [np.asarray(x) for x in (scaled, kv[0], kv[1])]
        args = (*arrays, keep, np.asarray(do), dlse, None)
        spec = AttentionSpec.of(scale=dim**-0.5, left=LEFT, right=0)
        o, lse = forward(MOSAIC_SM90, scaled, kv, tokens, spec=spec)
        got = [np.asarray(o.astype(q.dtype)), np.asarray(lse.swapaxes(1, 2))]
        pairs = zip(got, dense.one_device(*args), dense.truth(*args), strict=False)
        for (mine, one, truth), eps in zip(pairs, (2**-8, 2**-23), strict=False):
            (worst, rms), (one_worst, one_rms) = (compare.errors(x, truth) for x in (mine, one))
            largest = np.abs(np.where(np.isfinite(truth), truth, 0)).max()
            assert worst <= 1.5 * one_worst + 4 * eps * largest
            assert rms <= 1.5 * one_rms + eps

    def test_nothing_new_leaves_everything_as_it_was():
        rng, q, do, kv, _ = problem()
        tokens = tokens_at(0, 200), tokens_at(200, 328)  # all keys are in the future
        o, lse = normal(rng, *q.shape, dtype=jnp.float32), normal(rng, 2, 4, 200, dtype=jnp.float32)
        equal(forward(MOSAIC_SM90, q, kv, tokens, (o, lse)), (o, lse))
        dq = normal(rng, *q.shape, dtype=jnp.float32)
        dkv = normal(rng, *kv.shape, dtype=jnp.float32)
        equal(backward(MOSAIC_SM90, (q, do), kv, (lse, lse), tokens, dq, dkv), (dq, dkv))
        fresh = forward(MOSAIC_SM90, q, kv, tokens)
        equal(fresh, (jnp.zeros_like(o), jnp.full_like(lse, -jnp.inf)))
        new = backward(MOSAIC_SM90, (q, do), kv, (lse, lse), tokens)
        equal(new, (jnp.zeros_like(dq), jnp.zeros_like(dkv)))

    def test_gradients_are_added_to_what_is_given():
        rng, q, do, kv, tokens = problem()
        stats = forward(MOSAIC_SM90, q, kv, tokens)[1], normal(rng, 2, 4, 200, dtype=jnp.float32)
        new = backward(MOSAIC_SM90, (q, do), kv, stats, tokens)
        given = [normal(rng, *x.shape, dtype=jnp.float32) for x in new]
        got = backward(MOSAIC_SM90, (q, do), kv, stats, tokens, *given)
        for a, b, c in zip(got, new, given, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b + c), rtol=1e-4, atol=1e-5)
            assert np.abs(np.asarray(b)).max() > 0.1

    def test_both_halves_of_the_work_add_up():
        """What a half skips is zero, or unchanged."""
        rng, q, do, kv, tokens = problem()
        stats = forward(MOSAIC_SM90, q, kv, tokens)[1], normal(rng, 2, 4, 200, dtype=jnp.float32)
        arguments = MOSAIC_SM90, (q, do), kv, stats, tokens
        whole = backward(*arguments)
        for order in ((0, 1), (1, 0)):
            half = backward(*arguments, half=order[0])
            both = backward(*arguments, *half, half=order[1])
            for some, got, want in zip(half, both, whole, strict=True):
                np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)
                assert 0.02 < np.abs(np.asarray(some)).sum() / np.abs(np.asarray(want)).sum() < 0.98

    @pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
    def test_the_last_call_rounds_out_and_nothing_else(carried):
        rng, q, _, kv, tokens = problem(128)
        carry = normal(rng, *q.shape, dtype=jnp.float32), normal(rng, 2, 4, 200, dtype=jnp.float32)
        carry = carry if carried else None
        o, lse = forward(MOSAIC_SM90, q, kv, tokens, carry)
        rounded, same_lse = forward(MOSAIC_SM90, q, kv, tokens, carry, out_dtype=jnp.bfloat16)
        equal((rounded, same_lse), (o.astype(jnp.bfloat16), lse))

    def test_large_logits_do_not_overflow():
        _, q, _, kv, tokens = problem()
        spec = AttentionSpec.of(scale=100.0)
        wide = [x.astype(jnp.float32) for x in (q, kv)]
        got = forward(MOSAIC_SM90, q, kv, tokens, spec=spec)
        want = forward(REFERENCE, *wide, tokens, spec=spec)
        assert np.abs(np.asarray(want[1])).max() > 1e3
        assert np.isfinite(np.asarray(got[0])).all()
        np.testing.assert_allclose(np.asarray(got[1]), np.asarray(want[1]), rtol=1e-5)
