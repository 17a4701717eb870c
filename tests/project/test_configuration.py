"""The library under JAX's switches: 64-bit types, strict rank promotion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from flax import nnx
from implementations import QUICK
from meshes import assert_close, make_mesh
from ring_cases import a_case, program_of

import burst_jax
from burst_jax.models import DecoderConfig
from burst_jax.training import init_train_state, make_batch, make_optimizer, make_train_step
from pallas_kernels.arrays import as_int32


def assert_same(got, want):
    """The same values in the same dtypes."""
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]


@pytest.mark.slow
def test_switches_change_no_bit_of_a_ring():
    """64-bit types on, and arrays of different ranks refused by every jnp function."""
    program = program_of(a_case("2", "zigzag", "packed_causal"))
    inputs = valid.draw(program, 0)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        strict = valid.compiled(program, inputs[0])(*inputs)
    assert_same(strict, valid.compiled(program, inputs[0])(*inputs))


@pytest.mark.slow
def test_x64_changes_no_bit_of_a_step_s_loss_and_gradient():
    """Positions and segment ids as jnp.arange makes them, int64 under x64; the ring is above."""
    config = DecoderConfig(
        vocab_size=61, num_layers=1, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=48
    )
    rows = np.random.default_rng(0).integers(0, 61, (2, 33))
    segments = np.ones_like(rows, np.int32)
    batch: Any = make_batch(rows, segment_ids=segments)
    mesh, optimizer = make_mesh(), make_optimizer(1e-2, 10)
    with jax.enable_x64(True):
        graphdef, *state = init_train_state(config, optimizer, mesh, seed=0)
        state = jax.tree.map(np.asarray, state)

    def run():
        step = make_train_step(graphdef, optimizer, compiler_options=QUICK)
        params, opt_state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
        integers = {name: jnp.asarray(batch[name], int) for name in ("positions", "segment_ids")}
        params, _, metrics = step(params, opt_state, batch | integers)
        return jax.device_get((metrics, nnx.to_pure_dict(params), integers))

    with jax.enable_x64(True):
        wide, wide_params, integers = run()
    narrow, narrow_params, _ = run()
    assert {x.dtype for x in integers.values()} == {np.dtype("int64")}
    assert_same((wide["loss"], wide["grad_norm"]), (narrow["loss"], narrow["grad_norm"]))
    # optax computes some of Adam's factors in float64 then.
    assert_close(wide_params, narrow_params, 1e-7)


def test_any_integers_are_segment_ids():
    arrays, _ = valid.draw(program_of(a_case("2", "zigzag", "packed")), 0)
    *arrays, segments, _ = arrays.values()

    def attend(ids):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return burst_jax.burst_attention(
            *map(jnp.asarray, arrays), mesh=make_mesh(seq=2), implementation="reference", **given
        )

    want = np.asarray(attend(segments))
    kinds = (np.int64, np.asarray), (np.int64, jnp.asarray), (np.uint8, jnp.asarray)
    for kind, array in (*kinds, (">i4", np.asarray), (np.uint64, np.asarray)):
        with jax.enable_x64(True):
            ids = array(segments.astype(kind))
            assert ids.dtype == kind
            got = attend(ids)
        assert_same(np.asarray(got), want)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_integers_that_int32_cannot_hold_raise(array):
    ids = np.ones((2, 8), np.int64)
    assert as_int32("ids", ids).dtype == np.int32
    with jax.enable_x64(True):
        for value in (2**31, -(2**31) - 1, 2**32 + 1):
            ids[1, 3] = value
            with pytest.raises(ValueError, match=rf"ids holds {value}: int32 cannot; renumber"):
                as_int32("ids", array(ids))
        with pytest.raises(ValueError, match=r"segment_ids holds .*: int32 cannot"):
            burst_jax.pad_to_layout(np.ones((2, 8)), "zigzag", 2, array(ids))
        x, wide = jnp.ones((1, 8, 1, 8), jnp.float32), array(np.full(8, 2**32, np.int64))
        for options in (
            {"query_segment_ids": wide[None], "key_value_segment_ids": wide[None]},
            {"query_offset": wide[:1]},
            {"query_positions": wide},
        ):
            with pytest.raises(ValueError, match=r"query_\w+ holds 4294967296: int32 cannot"):
                burst_jax.local_attention(x, x, x, is_causal=True, **options)
        # Bounds are clipped: those that no key reaches.
        out = burst_jax.local_attention(x, x, x, key_ends=wide, key_value_seq_lengths=wide[:1])
    np.testing.assert_array_equal(out, x)
