"""Decoders with low-rank adapters: what they compute, what is trained, what raises."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from implementations import QUICK
from jax.sharding import NamedSharding
from jaxprs import equations
from meshes import assert_close, mesh_of, random_like

from burst_jax import ShardingRules
from burst_jax.layers.lora import LORA_A, LORA_B
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
B, T = 2, 32


def base(mesh, implementation=None, **fields):
    """A decoder on the mesh with random weights, none of them zero."""
    options: Any = {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": "zigzag"}
    options["implementation"] = implementation
    graphdef, shapes = abstract_decoder(dataclasses.replace(CONFIG, **fields), **options)
    specs = nnx.merge(graphdef, shapes).shardings(shapes).weight_specs(shapes)
    weights = jax.tree.map(
        lambda x, spec: jax.device_put(
            (0.2 * np.asarray(x)).astype(x.dtype), NamedSharding(mesh, spec)
        ),
        random_like(shapes, 1),
        specs,
    )
    return nnx.merge(graphdef, weights)


def with_random_adapters(mesh, targets=".*", **options):
    """One with adapters whose B is not zero, so that A has gradients."""
    return base(mesh, lora=Lora(RANK, ALPHA, targets), **options)


RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 11:] = 2
COTANGENT = RNG.standard_normal((B, T, CONFIG.embed_dim)).astype(np.float32)


UNCHECKED = dataclasses.replace(XLA, name="unchecked", checks_vma=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"seq": 2, "tensor": 2}, {"targets": "v_proj|o_proj|down|gate"}),
        # More devices than key heads, and JAX inserts no sums over devices by itself.
        (
            {"stage": 2, "seq": 2, "tensor": 2},
            {"implementation": UNCHECKED, "num_kv_heads": 1, "remat": "half"},
        ),
    ],
    ids=["targets", "pipeline-tensor2-unchecked-half"],
)
def test_values_and_gradients_are_those_of_dense_formulas(axes, options):
    model = with_random_adapters(mesh_of(**axes), **options)
    out, gradients = decoders.on_its_mesh(model, TOKENS, SEGMENTS, COTANGENT)
    want = decoders.by_formulas(model, TOKENS, SEGMENTS, COTANGENT)
    assert_close((out, gradients), want, 1e-5)
    assert model.config.num_adapter_params == sum(x.size for x in jax.tree.leaves(gradients))
    if "targets" in options:
        adapted = {part: set(names) for part, names in gradients["layers"].items()}
        assert adapted == {"attention": {"value", "out"}, "mlp": {"gate", "down"}}
        value = gradients["layers"]["attention"]["value"]
        assert value["kernel_lora_a"].shape == (2, 32, RANK)
        assert value["kernel_lora_b"].shape == (2, RANK, 16)


def train_state(model, optimizer):
    mesh, params = dict(model.options)["mesh"], nnx.state(model)
    return init_train_state(
        model.config, optimizer, mesh, 0, params=params, rules=model.rules, layout="zigzag"
    )


@pytest.mark.slow
def test_a_step_moves_adapters_alone():
    """The bfloat16 base does not change by a bit; adapters are float32."""
    mesh = mesh_of(fsdp=2, seq=2)
    model = add_lora(base(mesh, param_dtype=jnp.bfloat16), RANK)
    optimizer = make_optimizer(1e-2, 10, warmup_steps=0)
    graphdef, params, opt_state = train_state(model, optimizer)
    trained, frozen = split_trained(params)
    sizes = [x.size for x in jax.tree.leaves(trained)]
    assert sum(sizes) == model.config.num_adapter_params
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}
    # Two moments and two counts.
    assert sum(x.size for x in jax.tree.leaves(opt_state)) == 2 * sum(sizes) + 2
    before = jax.device_get((trained, frozen))
    step = make_train_step(graphdef, optimizer, compiler_options=QUICK)
    tokens = np.append(TOKENS, TOKENS[:, :1], 1)
    batch = place_batch(make_batch(tokens, layout="zigzag", num_shards=2), mesh, batch_axis="fsdp")
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
    models = [
        add_lora(base(mesh), RANK, seed=7) for mesh in (mesh_of(fsdp=2, seq=2), mesh_of(seq=1))
    ]
    drawn = [jax.device_get(nnx.to_pure_dict(nnx.state(m, nnx.LoRAParam))) for m in models]
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    assert not any(np.any(part["kernel_lora_b"]) for part in drawn[0]["layers"]["mlp"].values())
    a = drawn[0]["layers"]["mlp"]["gate"]["kernel_lora_a"]
    assert np.std(a) == pytest.approx(np.sqrt(2 / CONFIG.embed_dim), rel=0.1)
    assert not np.array_equal(a[0], a[1])


def test_merged_weights_are_the_sum():
    mesh = mesh_of(fsdp=2, seq=2)
    model = with_random_adapters(mesh, targets=("out", "up"))
    merged = merge_lora(model)
    assert merged.config == CONFIG
    for part_of in (lambda model: model.layers.attention.out, lambda model: model.layers.mlp.up):
        found, part = part_of(merged), part_of(model)
        a, b = (np.asarray(getattr(part, key)[...], np.float64) for key in (LORA_A, LORA_B))
        product = ALPHA / RANK * np.matmul(a, b).reshape(part.kernel.shape)
        assert_close(found.kernel[...], np.asarray(part.kernel[...], np.float64) + product)
        assert found.kernel.sharding == part.kernel.sharding
    half = merge_lora(model, param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype(jnp.bfloat16)}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"rank": 0}, "rank is 0: it must be an integer, at least 1"),
    ({"alpha": -1.0}, "alpha is -1.0: it must be positive and finite, or None"),
    ({"targets": "q"}, r"targets is 'q': it matches none of query \(q_proj\), key"),
    ({"targets": "("}, r"targets is '\(': not a regular .* 'query\|value'"),
    ({"targets": ["query", "norm"]}, r"targets is \('query', 'norm'\): pass a regular"),
    ({"targets": []}, r"targets is \(\): it matches none of query"),
    ({"rank_stabilized": 1}, "rank_stabilized is 1: it must be True or False"),
    ({"seed": -1}, "seed is -1: it must be an integer, at least 0"),
]


def test_mistakes(monkeypatch):
    model = base(mesh_of(seq=1))
    for wrong, message in MISTAKES:
        options: Any = {"rank": 4} | wrong
        with pytest.raises(ValueError, match=message):
            add_lora(model, **options)
    with pytest.raises(ValueError, match="model has no adapters: there is nothing to merge"):
        merge_lora(model)
    with pytest.raises(ValueError, match=r"model already has adapters, Lora.*: merge them first"):
        add_lora(add_lora(model, RANK), RANK)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"needs qwix, .*: pip install 'burst-jax\[lora\]'"):
        add_lora(model, RANK)


def test_flops_of_frozen_weights():
    lora = dataclasses.replace(CONFIG, lora=Lora(RANK))
    attention = CONFIG.train_flops_per_token(T) - 6 * CONFIG.num_matmul_params
    want = 4 * CONFIG.num_matmul_params + 6 * lora.num_adapter_params + attention
    assert lora.train_flops_per_token(T) == want


def test_any_optax_transformation_trains_adapters():
    model = add_lora(base(mesh_of(fsdp=2, seq=2)), RANK, targets="query|out")
    _, params, state = train_state(model, optax.adafactor(1e-3))
    assert sum(x.size for x in jax.tree.leaves(state)) < 3 * model.config.num_adapter_params
    attention = params["layers"]["attention"]
    spec = attention["query"]["kernel_lora_a"].sharding.spec
    assert spec == jax.P(None, ("fsdp", "seq"), None)
    assert attention["out"]["kernel_lora_b"].sharding.spec == jax.P(None, None, ("fsdp", "seq"))
