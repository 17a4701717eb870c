"""The library under JAX's switches: 64-bit types, strict rank promotion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import IMPLEMENTATIONS, QUICK, quick_jit
from meshes import assert_close, make_mesh, random_like
from ring_cases import a_case, case_id, make_inputs, ring_results

import burst_jax
from burst_jax.models import DecoderConfig
from burst_jax.training import init_train_state, make_batch, make_optimizer, make_train_step
from pallas_kernels.arrays import as_int32

# Every layout, both rotations, two levels, Ulysses, windows, packed documents, each implementation.
RINGS = [
    a_case("4", "zigzag", "causal"),
    a_case("3", "striped", "packed_window_cap", "rotate_query"),
    a_case("4", "contiguous", "window96", "rotate_query"),
    a_case("2x3", "zigzag", "packed_causal"),
    a_case("2x2", "striped", "cap", "rotate_query"),
    a_case("2+h2", "zigzag", "packed_causal"),
    a_case("h2", "contiguous", "packed"),
    a_case("2", "zigzag", "packed_causal", implementation="triton"),
    a_case("2", "zigzag", "packed_causal", implementation="reference"),
]


def ring_id(case):
    return f"{case_id(case)}-{case['implementation']}"


def results(case, inputs):
    return ring_results(case, *inputs, implementation=IMPLEMENTATIONS[case["implementation"]])


def assert_same(got, want):
    """The same values in the same dtypes."""
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=ring_id(case), marks=() if index % 8 == 0 else pytest.mark.slow)
        for index, case in enumerate(RINGS)
    ],
)
def test_switches_change_no_bit_of_a_ring(case):
    """64-bit types on, and arrays of different ranks refused by every jnp function."""
    inputs = make_inputs(case)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        strict = results(case, inputs)
    assert_same(strict, results(case, inputs))


LENGTH, SHARDS = 32, 4


def of_both(run):
    """What ``run`` gives with 64-bit types, where its integers are int64, and without."""
    with jax.enable_x64(True):
        assert jnp.arange(3).dtype == jnp.int64
        wide = jax.tree.map(np.asarray, run())
    return wide, jax.tree.map(np.asarray, run())


@pytest.mark.slow
def test_x64_changes_no_bit_of_a_layer():
    """Positions and segment ids as jnp.arange makes them, int64 under x64."""
    x = random_like(jax.ShapeDtypeStruct((2, LENGTH, 32), jnp.float32), 1)
    segments = 1 + np.arange(LENGTH) // 20 * np.ones((2, 1), np.int64)

    def run():
        layer = burst_jax.BurstAttention(
            32,
            4,
            num_kv_heads=2,
            mesh=make_mesh(seq=SHARDS),
            layout="zigzag",
            is_causal=True,
            qk_norm=True,
            rngs=nnx.Rngs(0),
        )
        graphdef, params = nnx.split(layer)
        permuted = burst_jax.to_layout(
            (jnp.arange(LENGTH)[None], jnp.asarray(segments)), "zigzag", SHARDS
        )

        @quick_jit
        def out_and_gradients(params, x, positions, segments):
            out, vjp = jax.vjp(
                lambda params, x: nnx.merge(graphdef, params)(x, positions, segments), params, x
            )
            return out, *vjp(out)

        return nnx.to_pure_dict(out_and_gradients(params, x, *permuted)[1]), permuted[0]

    (wide, wide_positions), (narrow, _) = of_both(run)
    assert wide_positions.dtype == np.int64
    assert_same(wide, narrow)


@pytest.mark.slow
def test_x64_changes_no_bit_of_a_step_s_loss_and_gradient():
    config = DecoderConfig(
        vocab_size=61, num_layers=1, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=48
    )
    rows = np.random.default_rng(0).integers(0, 61, (2, LENGTH + 1))
    batch: Any = make_batch(rows, layout="striped", num_shards=2)
    mesh, optimizer = make_mesh(seq=2), make_optimizer(1e-2, 10)
    with jax.enable_x64(True):
        graphdef, *state = init_train_state(config, optimizer, mesh, seed=0, layout="striped")
        state = jax.tree.map(np.asarray, state)

    def run():
        step = make_train_step(graphdef, optimizer, compiler_options=QUICK)
        replicated = jax.NamedSharding(mesh, jax.P())
        params, opt_state = jax.device_put(state, replicated)
        params, _, metrics = step(params, opt_state, batch)
        return metrics, nnx.to_pure_dict(params)

    (wide, wide_params), (narrow, narrow_params) = of_both(run)
    assert_same((wide["loss"], wide["grad_norm"]), (narrow["loss"], narrow["grad_norm"]))
    # optax computes some of Adam's factors in float64 then.
    assert_close(wide_params, narrow_params, 1e-7)


@pytest.mark.parametrize("kind", [np.int64, np.uint8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_any_integers_are_segment_ids(kind, array):
    arrays, _, (segments, _) = make_inputs(a_case("2", "zigzag", "packed_causal"))
    assert segments is not None

    def attend(ids):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return burst_jax.burst_attention(
            *map(jnp.asarray, arrays), mesh=make_mesh(seq=2), implementation="reference", **given
        )

    with jax.enable_x64(True):
        ids = array(segments.astype(kind))
        assert ids.dtype == kind
        got = attend(ids)
    assert_same(np.asarray(got), np.asarray(attend(segments)))


def test_integers_that_int32_cannot_hold_are_refused():
    ids = np.ones((2, 8), np.int64)
    assert as_int32("ids", ids).dtype == np.int32
    for value in (2**31, -(2**31) - 1):
        ids[1, 3] = value
        with pytest.raises(ValueError, match=rf"ids holds {value}: int32 cannot; renumber them"):
            as_int32("ids", ids)
    with pytest.raises(ValueError, match=r"segment_ids holds .*: int32 cannot"):
        burst_jax.pad_to_layout(np.ones((2, 8)), "zigzag", 2, ids)
