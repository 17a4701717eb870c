"""AdamW's moments: in bfloat16, in the host's memory, and in checkpoints of both."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import split_runs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, relative_rms

import burst_jax
from benchmarks import train as bench_train
from burst_jax.training import Checkpoints, abstract_train_state, adam, make_optimizer
from burst_jax.training.rounding import random_words, round_at_random

RNG = np.random.default_rng(0)
SPECS = {"layers": P("stage", ("fsdp", "seq"), None), "head": P(None, "fsdp"), "norm": P()}
# Seven rows cannot be cut into parts of equal size.
SHAPES = {"layers": (4, 16, 12), "head": (7, 10), "norm": (5,)}


def gradients(step):
    rng = np.random.default_rng(step)
    return {name: np.float32(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def steps_of(transform, shardings=None, count=3):
    """The last updates and the state after some steps, from a state that lies as the weights do."""
    weights = jax.device_put(gradients(0), shardings)

    def place(x, sharding):
        return jax.device_put(x, sharding.with_memory_kind(x.sharding.memory_kind))

    state = transform.init(weights)
    if shardings is not None:
        mu, nu = (jax.tree.map(place, moment, shardings) for moment in (state.mu, state.nu))
        state = state._replace(mu=mu, nu=nu)
    update = jax.jit(lambda g, state: transform.update(g, state, weight_shardings=shardings))
    updates = None
    for step in range(1, count + 1):
        updates, state = update(jax.device_put(gradients(step), shardings), state)
    return updates, state


def same_bits(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize("clip_norm", [1.0, 1e9], ids=["clipped", "not-clipped"])
def test_float32_moments_are_those_of_optax(clip_norm):
    mine = adam.clipped_adam(clip_norm, 0.9, 0.95, moment_dtype=jnp.float32, moments="device")
    theirs = optax.chain(optax.clip_by_global_norm(clip_norm), optax.scale_by_adam(0.9, 0.95))
    theirs = optax.with_extra_args_support(theirs)
    updates, state = steps_of(mine)
    with jax.numpy_dtype_promotion("standard"):
        want, (_, want_state) = steps_of(theirs)
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    assert_close((updates, state), (want, want_state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_memory_and_mesh_change_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(adam, "PART_SIZE", 30)
    mesh = mesh_of(stage=2, fsdp=2, seq=2)
    split = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def run(moments, shardings, clip_norm):
        transform = adam.clipped_adam(clip_norm, 0.9, 0.95, moment_dtype=dtype, moments=moments)
        updates, state = steps_of(transform, shardings)
        kinds = {"pinned_host" if moments == "host" else "device"}
        assert memories((state.mu, state.nu)) == kinds
        assert memories(updates) == {"device"}
        return updates, state

    want = run("device", None, 1e9)
    assert {x.dtype for x in jax.tree.leaves((want[1].mu, want[1].nu))} == {jnp.dtype(dtype)}
    same_bits(run("host", None, 1e9), want)
    same_bits(run("device", split, 1e9), want)
    same_bits(run("host", split, 1e9), want)
    # The norm that clips is a sum, in another order on another mesh.
    same_bits(run("host", split, 1.0), run("device", split, 1.0))


def test_rounding_at_random_has_the_mean_of_what_it_rounds():
    x = jnp.float32(RNG.standard_normal(64) * 10.0 ** RNG.integers(-30, 30, 64))
    shape = 4096, 64
    rounded = round_at_random(
        jnp.broadcast_to(x, shape), random_words(jnp.uint32(3), shape, [0, 0])
    )
    got = np.asarray(rounded, np.float64)
    step = np.spacing(np.abs(np.asarray(x))) * 2.0**16
    # To one of its two neighbours, and four standard errors from the mean at most.
    assert np.all(np.abs(got - np.asarray(x)) < step)
    np.testing.assert_array_less(np.abs(got.mean(0) - np.asarray(x)) / step, 4 * 0.5 / 64)
    assert len(np.unique(got)) > 64


def test_rounding_at_random_keeps_what_bfloat16_has():
    x = jnp.float32([0, -0.0, 1, -3.5, jnp.inf, -jnp.inf, jnp.nan])
    words = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
    rounded = round_at_random(x, words)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded.astype(jnp.float32), x)


def test_random_words_depend_on_seed_and_index_alone():
    whole = np.asarray(random_words(jnp.uint32(7), (6, 5, 8), [0, 0, 0]))
    part = random_words(jnp.uint32(7), (2, 5, 3), [4, 0, 5])
    np.testing.assert_array_equal(part, whole[4:, :, 5:])
    assert len(np.unique(whole)) == whole.size
    assert not np.any(whole == np.asarray(random_words(jnp.uint32(8), (6, 5, 8), [0, 0, 0])))


def test_a_second_moment_in_bfloat16_falls_with_a_slow_decay():
    """Its gradient is 1, and then a tenth: 1,500 steps of a thousandth each."""

    def second_moment(moment_dtype, nearest=False):
        transform: Any = adam.clipped_adam(
            1e9, 0.9, 0.999, moment_dtype=moment_dtype, moments="device"
        )
        ones = jnp.ones((64, 64))

        def step(state, scale):
            _, state = transform.update(scale * ones, state)
            if nearest:
                nu = state.nu.astype(jnp.bfloat16).astype(jnp.float32)
                state = state._replace(nu=nu)
            return state, None

        scales = jnp.where(jnp.arange(1900) < 400, 1.0, 0.1)
        return jax.lax.scan(step, transform.init(ones), scales)[0].nu

    want = second_moment(jnp.float32)
    assert relative_rms(second_moment(jnp.float32, nearest=True), want) > 1
    got = np.asarray(second_moment(jnp.bfloat16), np.float64)
    assert relative_rms(got, want) < 0.1
    assert abs(got.mean() / np.asarray(want).mean() - 1) < 0.003


SMALL = dataclasses.replace(
    split_runs.CONFIG, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24
)
FSDP2_SEQ2 = (None, 2, None, 2, None)


@functools.cache
def forty_steps(moment_dtype=jnp.float32, moments="device", steps=40):
    options = {"config": SMALL, "moment_dtype": moment_dtype, "moments": moments}
    return split_runs.run(FSDP2_SEQ2, AxisType.Explicit, steps=steps, **options)


@pytest.mark.slow
def test_bfloat16_moments_train_as_float32_ones():
    """In 40 steps the weights move 2 % at most away from where float32 moments move them."""
    _, first, _ = forty_steps(steps=0)
    history, weights, _ = forty_steps()
    got_history, got, state = forty_steps(jnp.bfloat16)
    np.testing.assert_allclose(np.array(got_history)[:, 0], np.array(history)[:, 0], rtol=2e-3)
    moved, want = (
        np.concatenate([np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, pair), strict=True)])
        for pair in ((got, first), (weights, first))
    )
    assert 0 < relative_rms(moved, want) < 0.02
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(jnp.bfloat16)}


def test_moments_on_the_host_train_with_the_same_bits():
    history, weights, state = forty_steps(jnp.bfloat16, "host")
    assert memories(state) == {"pinned_host"}
    assert memories(weights) == {"device"}
    for x, y in zip(jax.tree.leaves(state[1].mu), jax.tree.leaves(weights), strict=True):
        assert x.sharding.spec == y.sharding.spec
    want = forty_steps(jnp.bfloat16)
    assert history == want[0]
    same_bits((weights, state), want[1:])


@pytest.mark.slow
def test_moments_on_the_host_in_a_pipeline_with_parts_of_a_batch():
    sizes = (1, 1, 2, 2, 2)
    options = {"steps": 3, "accumulate": 2, "moment_dtype": jnp.bfloat16}
    want = split_runs.run(sizes, **options)
    got = split_runs.run(sizes, **options, moments="host")
    assert got[0] == want[0]
    same_bits(got[1:], want[1:])


def test_checkpoints_move_moments_between_memories_and_meshes(tmp_path):
    def state_on(mesh, moments):
        optimizer = make_optimizer(1e-3, 10, moment_dtype=jnp.bfloat16, moments=moments)
        return abstract_train_state(
            SMALL, optimizer, mesh, rules=split_runs.rules_of(mesh), layout="zigzag"
        )[1:]

    one, other = mesh_of(fsdp=2, seq=2), mesh_of(seq=2)
    here = state_on(one, "host")
    values = [RNG.standard_normal(x.shape).astype(x.dtype) for x in jax.tree.leaves(here)]
    arrays = [
        jax.device_put(x, y.sharding) for x, y in zip(values, jax.tree.leaves(here), strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(here), arrays)
    renewed = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        renewed(state)
        checkpoints.wait()
        for mesh, moments in ((one, "host"), (other, "device"), (other, "host")):
            wanted = state_on(mesh, moments)
            restored = checkpoints.restore(wanted)
            assert restored is not None
            for x, y, value in zip(
                jax.tree.leaves(restored.state), jax.tree.leaves(wanted), values, strict=True
            ):
                assert x.sharding == y.sharding
                np.testing.assert_array_equal(x, value)
            kinds = {"pinned_host" if moments == "host" else "device"}
            assert memories(restored.state[1][1]) == kinds


def test_a_step_takes_the_memory_of_moments_that_are_being_written(tmp_path):
    """Many megabytes, so that it takes the writer a while."""
    value = RNG.standard_normal((64, 2**17)).astype(np.float32)
    sharding = NamedSharding(mesh_of(seq=2), P("seq"), memory_kind="pinned_host")
    moment = jax.device_put(value, sharding)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"moment": moment})
        jax.jit(lambda x: x * 0, donate_argnums=0)(moment)
        assert moment.is_deleted()
        checkpoints.wait()
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        restored = checkpoints.restore({"moment": shape})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["moment"], value)


def test_what_is_saved_beside_a_state_is_checked_before_the_state(tmp_path):
    def check(extra):
        raise ValueError(f"of a run with {extra}")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, "float32")
        checkpoints.wait()
        with pytest.raises(ValueError, match="of a run with float32"):
            checkpoints.restore({"x": jnp.ones(3, jnp.bfloat16)}, check=check)


def test_moments_on_the_host_are_refused_in_the_state_of_others():
    transform = make_optimizer(1e-3, 10, moments="host").transform
    mesh = mesh_of(seq=2)
    wrappers: Any = (optax.MultiSteps(transform, 2), optax.apply_if_finite(transform, 3))
    for wrapped in wrappers:
        with pytest.raises(
            NotImplementedError, match=r"opt_state.inner\w*_state\[1\].mu.* kept by"
        ):
            abstract_train_state(SMALL, wrapped, mesh)
    abstract_train_state(SMALL, optax.chain(transform, optax.scale(0.5)), mesh)


def test_optax_multi_steps_keep_moments_in_bfloat16():
    transform = make_optimizer(1e-3, 10, moment_dtype=jnp.bfloat16).transform
    wrapped: Any = optax.MultiSteps(transform, 2)
    state: Any = abstract_train_state(SMALL, wrapped, mesh_of(seq=2))[2]
    dtypes = {x.dtype for x in jax.tree.leaves(state.inner_opt_state) if x.ndim}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


def bytes_of_parts(tree):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_of_moments_on_the_host_a_gpu_has_a_layer_at_most(dtype):
    """Compiled for two GPUs: AdamW of Llama 3 8B, whose weights are split over both."""
    mesh = compiled.named_mesh("h100", seq=2)
    rules = split_runs.rules_of(mesh)
    optimizer = make_optimizer(1e-4, 10, moment_dtype=dtype, moments="host")
    config = bench_train.SHAPES["llama-3-8b"]
    state: Any = abstract_train_state(config, optimizer, mesh, rules=rules, layout="zigzag")[1:]
    shardings: Any = jax.tree.map(lambda x: x.sharding, state)
    transform = optax.with_extra_args_support(optimizer.transform)

    def step(weights, opt_state):
        gradients = jax.lax.optimization_barrier(jax.tree.map(jnp.sin, weights))
        updates, opt_state = transform.update(
            gradients, opt_state, weights, weight_shardings=shardings[0]
        )
        return optax.apply_updates(weights, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):
        traced = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings).trace(*state)
    options = burst_jax.compiler_options("gpu")
    program = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    memory: Any = program.memory_analysis()
    opt_state: Any = state[1]
    weights = bytes_of_parts(state[0])
    moments = bytes_of_parts((opt_state[1].mu, opt_state[1].nu))
    assert moments == weights * 2 * jnp.dtype(dtype).itemsize // 4
    # They are renewed in place, and nothing is computed or copied on the host.
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == moments
    assert memory.host_temp_size_in_bytes == 0
    assert weights <= memory.argument_size_in_bytes < weights + 64
    # Beside weights and gradients: both moments of a layer's largest matrix, old and new.
    beside = memory.temp_size_in_bytes - weights
    assert beside < 1.05 * 4 * 4 * config.embed_dim * config.mlp_dim // mesh.size
    assert beside < 2 * bytes_of_parts(state[0]["layers"]) // config.num_layers
