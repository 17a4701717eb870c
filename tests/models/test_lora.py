"""Decoders with low-rank adapters: what they compute, what is trained, what raises."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
import qwix
from flax import nnx
from implementations import QUICK, quick_jit
from jax.sharding import AxisType, NamedSharding
from jaxprs import equations
from meshes import assert_close, mesh_of, random_like

import burst_jax
from burst_jax import ShardingRules
from burst_jax.layers.lora import LORA_A, LORA_B, add_adapter, set_adapter
from burst_jax.models import DecoderConfig, Lora, abstract_decoder, add_lora, merge_lora
from burst_jax.training import (
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    place_batch,
    split_trained,
)
from pallas_kernels import XLA

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48
)
RANK, ALPHA = 4, 10.0
B, T = 4, 32
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def base(mesh, config=CONFIG, **options):
    """A decoder on the mesh with random weights, none of them zero."""
    options |= {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": "zigzag"}
    graphdef, shapes = abstract_decoder(config, **options)
    specs = nnx.merge(graphdef, shapes).shardings(shapes).weight_specs(shapes)
    weights = jax.tree.map(
        lambda x, spec: jax.device_put((0.2 * x).astype(x.dtype), NamedSharding(mesh, spec)),
        random_like(shapes, 1),
        specs,
    )
    return nnx.merge(graphdef, weights)


def with_random_adapters(mesh, *, targets=".*", implementation=None, **fields):
    """One with adapters whose B is not zero, so that A has gradients."""
    config = dataclasses.replace(CONFIG, lora=Lora(RANK, ALPHA, targets), **fields)
    return base(mesh, config, implementation=implementation)


def rows():
    """Packed sequences of two documents in natural order, and a cotangent."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)
    segments = np.ones((B, T), np.int32)
    segments[:2, 11:] = 2
    return tokens, segments, rng.standard_normal((B, T, CONFIG.embed_dim)).astype(np.float32)


def by_ring(model, mesh):
    """Hidden states in natural order, and the gradients of the adapters."""
    shards = mesh.shape.get("seq", 1)
    tokens, segments, cotangent = (burst_jax.to_layout(x, "zigzag", shards) for x in rows())
    positions = burst_jax.positions("zigzag", T, num_shards=shards)
    graphdef, adapters, others = nnx.split(model, nnx.LoRAParam, ...)

    @quick_jit
    def run(adapters, others, cotangent):
        def hidden(adapters):
            return nnx.merge(graphdef, adapters, others)(tokens, positions, segments)

        out, vjp = jax.vjp(hidden, adapters)
        if mesh.explicit_axes:
            cotangent = jax.reshard(cotangent, jax.typeof(out).sharding)
        return out, vjp(cotangent)[0]

    out, gradients = run(adapters, others, cotangent)
    return burst_jax.from_layout(np.asarray(out), "zigzag", shards), nnx.to_pure_dict(gradients)


def dense(model):
    """The same by the formulas, in float64: every W is ``W + (alpha / r) A B``."""
    tokens, segments, cotangent = rows()
    keep = segments[:, :, None] == segments[:, None]
    keep &= np.tril(np.ones((T, T), bool))
    positions = np.tile(np.arange(T), (B, 1))
    adapters, others = (
        plain_model.float64(nnx.to_pure_dict(state)) for state in split_trained(nnx.state(model))
    )

    def hidden(adapters, others):
        parts = jax.tree.map(lambda x: x, others)
        for part, projections in adapters["layers"].items():
            for name, two in projections.items():
                kernel = parts["layers"][part][name]["kernel"]
                product = jnp.einsum("lir,lro->lio", two["kernel_lora_a"], two["kernel_lora_b"])
                merged = kernel + ALPHA / RANK * product.reshape(kernel.shape)
                parts["layers"][part][name]["kernel"] = merged
        return plain_model.decoder(parts, tokens, positions, keep, CONFIG.rope_theta)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):

        @quick_jit
        def run(adapters, others, cotangent):
            out, vjp = jax.vjp(lambda adapters: hidden(adapters, others), adapters)
            return out, vjp(cotangent)[0]

        return jax.device_get(run(adapters, others, np.float64(cotangent)))


SLOW = pytest.mark.slow
UNCHECKED = dataclasses.replace(XLA, name="unchecked", checks_vma=False)


@pytest.mark.parametrize(
    ("kind", "axes", "options"),
    [
        (AUTO, {"fsdp": 2, "seq": 2}, {"targets": "v_proj|down|gate"}),
        # More devices than key heads, and JAX inserts no sums over devices by itself.
        pytest.param(AUTO, {"seq": 2, "tensor": 4}, {"implementation": UNCHECKED}, marks=SLOW),
        pytest.param(EXPLICIT, {"fsdp": 2, "seq": 2, "tensor": 2}, {}, marks=SLOW),
        pytest.param(AUTO, {"stage": 2, "fsdp": 2, "seq": 2}, {"remat": "half"}, marks=SLOW),
    ],
    ids=["targets", "tensor4-unchecked", "explicit", "pipeline-half"],
)
def test_values_and_gradients_are_those_of_dense_formulas(kind, axes, options):
    mesh = mesh_of(kind, **axes)
    model = with_random_adapters(mesh, **options)
    out, gradients = by_ring(model, mesh)
    assert_close((out, gradients), dense(model), 1e-5)
    assert model.config.num_adapter_params == sum(x.size for x in jax.tree.leaves(gradients))
    if "targets" in options:
        adapted = {part: set(names) for part, names in gradients["layers"].items()}
        assert adapted == {"attention": {"value"}, "mlp": {"gate", "down"}}
        value = gradients["layers"]["attention"]["value"]
        assert value["kernel_lora_a"].shape == (2, 32, RANK)
        assert value["kernel_lora_b"].shape == (2, RANK, 16)


def test_products_are_those_that_qwix_intercepts():
    """On one projection; qwix replaces JAX's product during the call."""
    linear = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), use_bias=False, rngs=nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=".*", rank=RANK, alpha=ALPHA)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 4, 8)), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = qwix.apply_lora_to_model(linear, provider, x, rngs=nnx.Rngs(params=3))
        graphdef, adapter, kernel = nnx.split(theirs, nnx.LoRAParam, ...)
        adapter = random_like(adapter, 4)
        want = nnx.merge(graphdef, adapter, kernel)(x)
    own = nnx.clone(linear)
    a, b = (adapter[name].get_value() for name in (LORA_A, LORA_B))
    set_adapter(own, a, b, ALPHA / RANK)
    assert_close(add_adapter(own, x, own(x)), want)
    assert float(jnp.abs(want - linear(x)).max()) > 0.1


def batch_of(mesh):
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, T + 1))
    segments = np.ones((2, T + 1), np.int32)
    segments[0, 20:] = 2
    batch = make_batch(tokens, segment_ids=segments, layout="zigzag", num_shards=mesh.shape["seq"])
    return place_batch(batch, mesh, batch_axis="fsdp")


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=SLOW)])
def test_a_step_moves_adapters_alone(accumulate):
    """The bfloat16 base does not change by a bit; adapters are float32."""
    mesh = mesh_of(fsdp=2 // accumulate, seq=2)
    half = dataclasses.replace(CONFIG, param_dtype=jnp.bfloat16)
    plain = base(mesh, half)
    model = add_lora(plain, RANK)
    optimizer = make_optimizer(1e-2, 10, warmup_steps=0)
    graphdef, params, opt_state = init_train_state(
        model.config, optimizer, mesh, 0, params=nnx.state(model), rules=model.rules,
        layout="zigzag",
    )  # fmt: skip
    trained, frozen = split_trained(params)
    sizes = [x.size for x in jax.tree.leaves(trained)]
    assert sum(sizes) == model.config.num_adapter_params
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}
    # Two moments and two counts.
    assert sum(x.size for x in jax.tree.leaves(opt_state)) == 2 * sum(sizes) + 2
    before = jax.device_get((trained, frozen))
    step = make_train_step(graphdef, optimizer, accumulate=accumulate, compiler_options=QUICK)
    batch = batch_of(mesh)
    # Frozen weights have no gradients: none of the size of a kernel is sent.
    traced = step.trace(params, opt_state, batch)
    sent = [eqn for eqn, _ in equations(traced.jaxpr) if eqn.primitive.name == "reduce_scatter"]
    assert {math.prod(eqn.outvars[0].aval.shape) for eqn in sent} == {RANK * 32 // mesh.size}
    losses = []
    for _ in range(3):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]
    after = jax.device_get(split_trained(params))
    jax.tree.map(np.testing.assert_array_equal, after[1], before[1])
    # In the first step A has no gradient yet, as B is zero.
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[0], before[0])
    assert all(0 < change < 0.1 for change in jax.tree.leaves(moved))


def test_new_adapters_change_nothing_and_are_the_same_on_every_mesh():
    meshes = mesh_of(fsdp=2, seq=2), mesh_of(seq=1)
    plain = [base(mesh) for mesh in meshes]
    models = [add_lora(each, RANK, seed=7) for each in plain]
    positions = burst_jax.positions("zigzag", T, num_shards=2)

    def hidden(model):
        graphdef, state = nnx.split(model)
        return quick_jit(lambda state: nnx.merge(graphdef, state)(rows()[0], positions))(state)

    np.testing.assert_array_equal(hidden(models[0]), hidden(plain[0]))
    drawn = [jax.device_get(nnx.to_pure_dict(nnx.state(m, nnx.LoRAParam))) for m in models]
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    a = drawn[0]["layers"]["mlp"]["gate"]["kernel_lora_a"]
    assert np.std(a) == pytest.approx(np.sqrt(2 / CONFIG.embed_dim), rel=0.1)
    assert not np.array_equal(a[0], a[1])


def test_merged_weights_are_the_sum():
    mesh = mesh_of(fsdp=2, seq=2)
    model = with_random_adapters(mesh, targets=("out", "up"))
    merged = merge_lora(model)
    assert merged.config == CONFIG
    shards, positions = 2, burst_jax.positions("zigzag", T, num_shards=2)
    tokens = jnp.asarray(burst_jax.to_layout(rows()[0], "zigzag", shards))
    assert_close(merged(tokens, positions), np.asarray(model(tokens, positions)), 1e-6)
    assert merged.layers.mlp.up.kernel.sharding == model.layers.mlp.up.kernel.sharding
    half = merge_lora(model, param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0: it must be an integer, at least 1"),
        ({"rank": 4, "alpha": -1.0}, "alpha is -1.0: it must be positive and finite, or None"),
        ({"rank": 4, "targets": "q"}, r"targets is 'q': it matches none of query \(q_proj\), key"),
        (
            {"rank": 4, "targets": "("},
            r"targets is '\(': not a regular .* 'query\|value'",
        ),
        ({"rank": 4, "targets": ["query", "norm"]}, r"targets is \('query', 'norm'\): pass a reg"),
        ({"rank": 4, "targets": []}, r"targets is \(\): it matches none of query"),
        ({"rank": 4, "seed": -1}, "seed is -1: it must be an integer, at least 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        add_lora(base(mesh_of(seq=1)), **options)


def test_adapters_twice_or_not_at_all():
    model = base(mesh_of(seq=1))
    with pytest.raises(ValueError, match="model has no adapters: there is nothing to merge"):
        merge_lora(model)
    with pytest.raises(ValueError, match=r"model already has adapters, Lora.*: merge them first"):
        add_lora(add_lora(model, RANK), RANK)


def test_without_qwix_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"needs qwix, .*: pip install 'burst-jax\[lora\]'"):
        add_lora(base(mesh_of(seq=1)), RANK)


def test_flops_of_frozen_weights():
    """Frozen weights have no gradients, adapters have."""
    lora = dataclasses.replace(CONFIG, lora=Lora(RANK))
    attention = CONFIG.train_flops_per_token(T) - 6 * CONFIG.num_matmul_params
    want = 4 * CONFIG.num_matmul_params + 6 * lora.num_adapter_params + attention
    assert lora.train_flops_per_token(T) == want


def test_any_optax_transformation_trains_adapters():
    mesh = mesh_of(fsdp=2, seq=2)
    model = add_lora(base(mesh), RANK, targets="query|out")
    _, params, state = init_train_state(
        model.config, optax.adafactor(1e-3), mesh, 0, params=nnx.state(model), rules=model.rules,
        layout="zigzag",
    )  # fmt: skip
    adapters = model.config.num_adapter_params
    assert sum(x.size for x in jax.tree.leaves(state)) < 3 * adapters
    attention = params["layers"]["attention"]
    spec = attention["query"]["kernel_lora_a"].sharding.spec
    assert spec == jax.P(None, ("fsdp", "seq"), None)
    assert attention["out"]["kernel_lora_b"].sharding.spec == jax.P(None, None, ("fsdp", "seq"))
