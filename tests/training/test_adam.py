"""AdamW's moments: bfloat16 with stochastic rounding, and optimizer-state offload."""

from __future__ import annotations

import functools
import math
from typing import Any

import chex
import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, relative_rms
from split_runs import SMALL, rules_of, run

import burst_jax
from benchmarks import train as bench_train
from burst_jax.training import Checkpoints, abstract_train_state, adam, make_optimizer
from burst_jax.training.adam import random_words, stochastic_round

RNG = np.random.default_rng(0)
assert_same_bits = functools.partial(chex.assert_trees_all_equal, strict=True)
SPECS = {"layers": P("stage", ("fsdp", "seq"), None), "head": P(None, "fsdp"), "norm": P()}
# 7 cannot be cut into equal chunks.
SHAPES = {"layers": (4, 16, 12), "head": (7, 10), "norm": (5,)}


def gradients(step):
    rng = np.random.default_rng(step)
    return {name: np.float32(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def adam_of(clip_norm=1e9, moment_dtype: Any = jnp.float32, moments: Any = "device", b2=0.95):
    return adam.clipped_adam(clip_norm, 0.9, b2, moment_dtype=moment_dtype, moments=moments)


def steps_of(transform_of, clip_norms, shardings=None):
    """For each clipping norm the last updates and the state after three steps, by one program."""
    weights = jax.device_put(gradients(0), shardings)

    def place(x, sharding):
        return jax.device_put(x, sharding.with_memory_kind(x.sharding.memory_kind))

    @jax.jit
    def update(g, state, clip_norm):
        return transform_of(clip_norm).update(g, state, weight_shardings=shardings)

    results = []
    for clip_norm in clip_norms:
        state, updates = transform_of(clip_norm).init(weights), None
        if shardings is not None:
            mu, nu = (jax.tree.map(place, moment, shardings) for moment in (state.mu, state.nu))
            state = state._replace(mu=mu, nu=nu)
        for step in (1, 2, 3):
            gradient = jax.device_put(gradients(step), shardings)
            updates, state = update(gradient, state, jnp.float32(clip_norm))
        results.append((updates, state))
    return results


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def test_float32_moments_are_those_of_optax():
    for clip_norm, (updates, state) in zip((1.0, 1e9), steps_of(adam_of, (1.0, 1e9)), strict=True):
        theirs = optax.chain(optax.clip_by_global_norm(clip_norm), optax.scale_by_adam(0.9, 0.95))
        theirs = optax.with_extra_args_support(theirs)
        with jax.numpy_dtype_promotion("standard"):
            ((want, (_, want_state)),) = steps_of(lambda _, t=theirs: t, [clip_norm])
        assert jax.tree.structure(state) == jax.tree.structure(want_state)
        assert_close((updates, state), (want, want_state))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_norms_and_clipping_of_16_bit_gradients_are_float32(dtype):
    """A million gradients of 0.3 have a sum of squares beyond float16."""
    gradients = {"a": jnp.full((1000, 999), 0.3, dtype), "b": jnp.full((1000,), 0.3, dtype)}
    each = float(gradients["b"][0])
    assert float(adam.global_norm(gradients)) == pytest.approx(1000 * each, rel=1e-5)
    transform = adam_of(clip_norm=1.0)
    state: Any = jax.jit(lambda: transform.update(gradients, transform.init(gradients))[1])()
    for moment in jax.tree.leaves(state.mu):  # A tenth of a gradient of norm 1.
        np.testing.assert_allclose(moment, 1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_memory_and_mesh_change_no_bit(dtype, monkeypatch):
    # Without optimization XLA contracts a product and a sum to one instruction in some loops only:
    # in those with an instruction that LLVM's FastISel does not have, such as conversions to
    # bfloat16 on CPUs with AMX.
    jax.config.update("jax_disable_most_optimizations", False)
    monkeypatch.setattr(adam, "CHUNK_ELEMENTS", 30)
    mesh = mesh_of(stage=2, fsdp=2, seq=2)
    split = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def run(moments, shardings, *clip_norms):
        transform = functools.partial(adam_of, moment_dtype=dtype, moments=moments)
        results = steps_of(transform, clip_norms, shardings)
        kinds = {"pinned_host" if moments == "host" else "device"}
        for updates, state in results:
            assert memories((state.mu, state.nu)) == kinds
            assert memories(updates) == {"device"}
        return results

    (want,) = run("device", None, 1e9)
    assert {x.dtype for x in jax.tree.leaves((want[1].mu, want[1].nu))} == {jnp.dtype(dtype)}
    # The norm that clips is a sum, in another order on another mesh.
    with jax.set_mesh(mesh):
        offloaded, clipped = run("host", split, 1e9, 1.0)
    assert_same_bits(offloaded, want)
    assert_same_bits([clipped], run("device", split, 1.0))
    if dtype == jnp.bfloat16:
        assert_same_bits(run("host", None, 1e9), [want])


def test_stochastic_rounding_has_the_mean_of_its_argument_and_bits_by_index():
    x = np.float32(RNG.standard_normal(64) * 10.0 ** RNG.integers(-30, 30, 64))
    special = np.array([0, -0.0, 1, -3.5, np.inf, -np.inf, np.nan], np.float32)

    @jax.jit
    def drawn():
        """Rounded many times; exact numbers; words of an array, of a part, of another seed."""
        shape, ones = (4096, 64), jnp.full(special.shape, 0xFFFFFFFF, jnp.uint32)
        words = random_words(jnp.uint32(3), shape, [0, 0])
        return (
            stochastic_round(jnp.broadcast_to(x, shape), words),
            stochastic_round(jnp.asarray(special), ones),
            random_words(jnp.uint32(7), (6, 5, 8), [0, 0, 0]),
            random_words(jnp.uint32(7), (2, 5, 3), [4, 0, 5]),
            random_words(jnp.uint32(8), (6, 5, 8), [0, 0, 0]),
        )

    rounded, exact, whole, part, other = map(np.asarray, drawn())
    assert rounded.dtype == exact.dtype == jnp.bfloat16
    got, step = np.float64(rounded), np.spacing(np.abs(x)) * 2.0**16
    # To one of its two neighbors, and at most four standard errors from the mean.
    assert np.all(np.abs(got - x) < step)
    np.testing.assert_array_less(np.abs(got.mean(0) - x) / step, 4 * 0.5 / 64)
    assert len(np.unique(got)) > 64
    np.testing.assert_array_equal(np.float32(exact), special)
    np.testing.assert_array_equal(part, whole[4:, :, 5:])
    assert len(np.unique(whole)) == whole.size
    assert not np.any(whole == other)


def test_a_second_moment_in_bfloat16_decays_slowly():
    """Its gradient is 1, then a tenth: 1,500 steps of a thousandth each."""

    def second_moment(moment_dtype, nearest=False) -> np.ndarray:
        transform: Any = adam_of(moment_dtype=moment_dtype, b2=0.999)
        ones = [jnp.ones((64, 32))] * 2

        def step(state, scale):
            _, state = transform.update([scale * x for x in ones], state)
            if nearest:
                nu = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in state.nu]
                state = state._replace(nu=nu)
            return state, None

        scales = jnp.where(jnp.arange(1900) < 400, 1.0, 0.1)
        return np.asarray(jax.lax.scan(step, transform.init(ones), scales)[0].nu, np.float64)

    want = second_moment(jnp.float32)
    assert relative_rms(second_moment(jnp.float32, nearest=True), want) > 1
    got = second_moment(jnp.bfloat16)
    assert relative_rms(got, want) < 0.1
    assert abs(got.mean() / want.mean() - 1) < 0.003
    assert (got[0] != got[1]).any()  # Each array has random bits of its own.


@pytest.mark.slow
def test_offloaded_moments_train_with_the_same_bits():
    """Sharded, without a ring."""
    sizes: Any = (None, 2, None, None, None)
    offloaded, want = (run(sizes, steps=3, config=SMALL, moments=x) for x in ("host", "device"))
    _, params, opt_state = offloaded
    assert memories(opt_state) == {"pinned_host"}
    assert memories(params) == {"device"}
    assert_same_bits(offloaded, want)


def test_checkpoints_move_moments_between_memories_and_meshes(tmp_path):
    def state_on(mesh, moments):
        optimizer = make_optimizer(1e-3, 10, moment_dtype=jnp.bfloat16, moments=moments)
        return abstract_train_state(SMALL, optimizer, mesh, rules=rules_of(mesh))[1:]

    here = state_on(mesh_of(fsdp=2, seq=2), "host")
    values = jax.tree.map(lambda x: RNG.standard_normal(x.shape).astype(x.dtype), here)
    state = jax.device_put(values, jax.tree.map(lambda x: x.sharding, here))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        for moments in ("device", "host"):
            wanted = state_on(mesh_of(seq=2), moments)
            restored = checkpoints.restore(wanted)
            assert restored is not None
            leaves = map(jax.tree.leaves, (restored.state, wanted, values))
            for x, y, value in zip(*leaves, strict=True):
                assert x.sharding == y.sharding
                np.testing.assert_array_equal(x, value)
            kinds = {"pinned_host" if moments == "host" else "device"}
            assert memories(restored.state[1][1]) == kinds


def test_a_step_may_overwrite_offloaded_moments_that_are_being_written(tmp_path):
    """Enough megabytes to keep the writer busy."""
    value = RNG.standard_normal((64, 2**16)).astype(np.float32)
    sharding = NamedSharding(mesh_of(seq=2), P("seq"), memory_kind="pinned_host")
    moment = jax.device_put(value, sharding)
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"moment": moment})
        jax.jit(lambda x: x * 0, donate_argnums=0)(moment)
        assert moment.is_deleted()
        checkpoints.wait()
        restored = checkpoints.restore({"moment": shape})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["moment"], value)


def test_wrappers_support_bfloat16_moments_but_not_offloaded_ones():
    mesh = mesh_of(seq=2)
    offloaded = make_optimizer(1e-3, 10, moments="host").transform
    wrappers: Any = (optax.MultiSteps(offloaded, 2), optax.apply_if_finite(offloaded, 3))
    for wrapped in wrappers:
        message = r"opt_state.inner\w*_state\[1\].mu.* wrapped by"
        with pytest.raises(NotImplementedError, match=message):
            abstract_train_state(SMALL, wrapped, mesh)
    abstract_train_state(SMALL, optax.chain(offloaded, optax.scale(0.5)), mesh)
    half = make_optimizer(1e-3, 10, moment_dtype=jnp.bfloat16).transform
    multiple: Any = optax.MultiSteps(half, 2)
    state: Any = abstract_train_state(SMALL, multiple, mesh)[2]
    dtypes = {x.dtype for x in jax.tree.leaves(state.inner_opt_state) if x.ndim}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


def shard_bytes(tree):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@pytest.mark.cuda_compiler
def test_a_gpu_holds_at_most_a_layer_of_offloaded_moments():
    """Compiled for two GPUs: AdamW of Llama 3 8B, whose weights are sharded over both."""
    mesh = compiled.named_mesh("h100", seq=2)
    optimizer = make_optimizer(1e-4, 10, moments="host")
    config = bench_train.SHAPES["llama-3-8b"]
    state: Any = abstract_train_state(
        config, optimizer, mesh, rules=rules_of(mesh), layout="zigzag"
    )[1:]
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
    weights, moments = shard_bytes(state[0]), shard_bytes((state[1][1].mu, state[1][1].nu))
    assert moments == 2 * weights
    # Updated in place, and nothing is computed or copied on the host.
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == moments
    assert memory.host_temp_size_in_bytes == 0
    assert weights <= memory.argument_size_in_bytes < weights + 64
    # In addition to weights and gradients: old and new moments of a layer's largest matrix.
    more = memory.temp_size_in_bytes - weights
    assert more < 1.05 * 4 * 4 * config.embed_dim * config.mlp_dim // mesh.size
    assert more < 2 * shard_bytes(state[0]["layers"]) // config.num_layers
