"""Training with sharded weights, on products of all mesh axes, against one device."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh, mesh_of, relative_rms
from split_runs import CONFIG, ONE, losses, plain_losses, rows, sized

import burst_jax
from burst_jax import ShardingRules
from burst_jax.models import Decoder, abstract_decoder, shardings
from burst_jax.models.weights import name_of
from burst_jax.training import (
    abstract_params,
    abstract_train_state,
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    place_batch,
)
from pallas_kernels import REFERENCE

AUTO, EXPLICIT, SLOW = AxisType.Auto, AxisType.Explicit, pytest.mark.slow
SMALL = dataclasses.replace(CONFIG, num_layers=1, embed_dim=16, mlp_dim=32, num_heads=2)


def matrices(params):
    return jax.tree.map(lambda weight: weight.ndim > 2, params)


ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=8)
OPTIMIZERS: dict[str, Any] = {
    "adamw": make_optimizer(1e-3, 20),
    "adafactor": optax.MultiSteps(optax.masked(ADAFACTOR, matrices), 2).gradient_transformation(),
    "sgd": optax.sgd(1e-2, momentum=0.9),
}


# Of a width that three devices divide.
OTHER_OPTIMIZER = {
    "config": dataclasses.replace(SMALL, embed_dim=24),
    "optimizer": optax.masked(ADAFACTOR, matrices),
}


def size_per_device(abstract):
    """The number of values that a device has of these arrays."""
    leaves = jax.tree.leaves(abstract)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


# Remat changes no result.
SELECTIVE = dataclasses.replace(CONFIG, remat="selective")


def assert_same(got, want):
    """Loss and gradient norm of each step."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)  # Rounding moves these more.


@SLOW
def test_a_pipeline_takes_the_steps_of_the_formula():
    options: Any = {"accumulate": 2, "config": SELECTIVE, "optimizer": OPTIMIZERS["sgd"]}
    assert_same(losses((1, 1, 2, 2, 2), EXPLICIT, steps=3, **options), plain_losses(3, 1e-2, 0.9))


@SLOW
def test_three_devices_take_the_same_steps_as_one(program):
    options = {**OTHER_OPTIMIZER, "program": program}
    got = losses((2, None, None, 3, None), AUTO, steps=3, **options)
    assert_same(got, losses(ONE, steps=3, **options))


@SLOW
def test_abstract_state_is_that_of_the_state():
    """And a seed's weights are the same on every mesh."""
    weights = []
    for name, sizes in (("adamw", (1, 2, 1, 2, 2)), ("adafactor", (1, 1, 1, 2, 1))):
        optimizer, mesh = OPTIMIZERS[name], sized(sizes)
        options: Any = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
        graphdef, *abstract = abstract_train_state(SMALL, optimizer, mesh, **options)
        made_graphdef, *made = init_train_state(SMALL, optimizer, mesh, 0, **options)
        assert graphdef == made_graphdef
        described = [
            jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
            for tree in (abstract, made)
        ]
        assert described[0] == described[1]
        assert abstract_params(SMALL, mesh, **options) == (graphdef, abstract[0])
        weights.append(made[0])
    first, second = weights
    assert_close(second, first)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2, 2), (1, 1, 2, 4, 1)], ids=str)
def test_weights_and_moments_are_sharded(sizes):
    mesh = sized(sizes)
    _, params, state = abstract_train_state(
        CONFIG, OPTIMIZERS["adamw"], mesh, rules=ShardingRules.of(mesh), layout="zigzag"
    )
    norms = [
        weight.size
        for path, weight in jax.tree_util.tree_leaves_with_path(params)
        if "norm" in jax.tree_util.keystr(path)
    ]
    total = sum(x.size for x in jax.tree.leaves(params)) - sum(norms)
    # Norms are replicated except over the stages, and so are Adam's two counters.
    held, most = total // mesh.size, total // mesh.size + sum(norms)
    assert held <= size_per_device(params) <= most
    assert 2 * held <= size_per_device(state) <= 2 * most + 2


def test_initialization_holds_no_unsharded_copy():
    config = dataclasses.replace(CONFIG, embed_dim=512, mlp_dim=1024, vocab_size=512)
    mesh = sized((1, 2, 1, 4, 1))
    options: Any = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
    optimizer = OPTIMIZERS["adamw"]
    _, params, state = abstract_train_state(config, optimizer, mesh, **options)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def init():
        params = nnx.state(Decoder(config, rngs=nnx.Rngs(0), mesh=mesh, **options))
        return params, optimizer.transform.init(params)

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    memory: Any = jax.jit(init, out_shardings=shardings).lower().compile().memory_analysis()
    assert memory.output_size_in_bytes < 3.1 * total / 8
    assert memory.temp_size_in_bytes < total / 2


def test_logits_of_sharded_weights():
    mesh = sized((1, 2, 1, 2, 2))
    model = decoders.with_drawn_weights(
        SMALL, mesh=mesh, layout="zigzag", rules=ShardingRules.of(mesh)
    )
    batch = make_batch(rows(0), layout="zigzag", num_shards=2)
    batch = place_batch(batch, mesh, batch_axis=("data", "fsdp"))
    logits = quick_jit(lambda: model.unembed(model(batch["inputs"], batch["positions"])))()
    assert logits.sharding.spec[-1] == "tensor"
    single = model.with_attention(mesh=make_mesh())
    want = quick_jit(lambda: single.unembed(single(jnp.asarray(rows(0)[:, :-1]), np.arange(48))))()
    got = burst_jax.from_layout(np.asarray(logits), "zigzag", 2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Mostly one token, so that its embedding's gradient is a sum of many terms.
SKEWED = np.where(np.random.default_rng(0).random((4, 513)) < 0.9, 3, 5)


def step_gradients(config, program, weight=1.0, **options):
    """Loss and gradients of a step on four devices, by SGD, with a weight per target."""
    mesh = sized((1, 2, 1, 2, 1))
    options |= {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": "zigzag"}
    graphdef, params = nnx.split(decoders.with_drawn_weights(config, **options))
    batch = make_batch(SKEWED, layout="zigzag", num_shards=2)
    batch["weights"] = batch["weights"] * np.float32(weight)
    batch = place_batch(batch, mesh, batch_axis=("data", "fsdp"))
    step = program(make_train_step(graphdef, optax.sgd(1.0), chunk_size=8))
    before = jax.device_get(params)
    after, _, metrics = step(params, optax.sgd(1.0).init(params), batch)
    return float(metrics["loss"]), jax.tree.map(np.subtract, before, jax.device_get(after))


@functools.cache
def formula_gradients():
    """The same by the formula in float64."""
    inputs, targets = SKEWED[:, :-1], SKEWED[:, 1:]
    params = nnx.to_pure_dict(nnx.state(decoders.with_drawn_weights(SMALL, mesh=make_mesh())))
    keep, positions = plain_model.causal(np.ones_like(inputs)), np.arange(inputs.shape[1])

    def loss(params):
        hidden = plain_model.decoder(
            params, inputs, np.tile(positions, (len(inputs), 1)), keep, SMALL.rope_theta
        )
        weights = np.full(targets.shape, 1 / targets.size)
        return plain_model.cross_entropy(hidden @ params["head"]["kernel"], targets, weights)

    value, (gradients,) = plain_model.gradients(loss, 1.0, params)
    return float(value), gradients


@pytest.mark.slow
def test_gradients_of_gathered_weights_are_summed_in_float32(program):
    """The embedding's over tokens, the head's over chunks, although sent in bfloat16."""
    _, got = step_gradients(dataclasses.replace(SMALL, dtype=jnp.bfloat16), program)
    _, want = formula_gradients()
    assert relative_rms(got["embedding"].get_value(), want["embedding"]) < 0.02
    assert relative_rms(got["head"]["kernel"].get_value(), want["head"]["kernel"]) < 0.02


@SLOW
def test_implementations_without_vma_checks_have_the_same_gradients(program):
    """In ``shard_map(check_vma=False)``, whose border sums gradients; target weights are small."""
    unchecked = dataclasses.replace(REFERENCE, checks_vma=False)
    loss, gradients = step_gradients(SMALL, program, 1e-4, implementation=unchecked)
    want, want_gradients = formula_gradients()
    assert loss == pytest.approx(want, rel=1e-5)
    assert_close(nnx.to_pure_dict(gradients), want_gradients, 1e-4)


@pytest.mark.parametrize("copies", [False, True])
def test_early_gradients_are_sent_by_copy_engines(monkeypatch, copies):
    """NCCL's kernels, which also sum over a data axis, would take SMs from attention."""
    monkeypatch.setattr(shardings, "has_peer_copies", lambda: copies)
    meshes: list[Any] = [{"fsdp": 2, "seq": 2}, {"seq": 2, "tensor": 2}, {"data": 2, "seq": 2}]
    for sizes in meshes:
        mesh = mesh_of(**sizes)
        rules = ShardingRules.of(mesh)
        graphdef, shapes = abstract_decoder(CONFIG, mesh=mesh, rules=rules, layout="zigzag")
        of_mesh = nnx.merge(graphdef, shapes).shardings(shapes)
        specs = dict(jax.tree.leaves_with_path(of_mesh.weight_specs(shapes)))
        of_layers = {path: name_of(path) for path in specs if name_of(path).startswith("layers.")}
        early = {name for path, name in of_layers.items() if of_mesh.is_sent_early(specs, path)}
        matrices = {f"layers.mlp.{name}.kernel" for name in ("gate", "up", "down")}
        assert early == (matrices if copies and "data" not in sizes else set())


def test_specs_of_logical_names():
    rules = ShardingRules(seq=("outer", "inner"), stage="stage")
    assert rules.spec(("batch", "tokens")) == P(("data", "fsdp"), ("outer", "inner"))
    assert rules.spec(("layers", "embed", "heads", None)) == P(
        "stage", ("fsdp", "outer", "inner"), "tensor", None
    )
    assert rules.spec(("vocab", "embed")) == P("tensor", ("fsdp", "outer", "inner", "stage"))


def init(sizes, **options):
    mesh = sized(sizes)
    rules = ShardingRules.of(mesh)
    return init_train_state(CONFIG, OPTIMIZERS["sgd"], mesh, 0, rules=rules, **options)


def call(sizes, batch, **options):
    mesh = sized(sizes)
    return traced(mesh, batch, rules=ShardingRules.of(mesh), **options)


def traced(mesh, batch, **options):
    tokens = jnp.zeros(batch, jnp.int32), np.arange(batch[1])
    return jax.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh, **options)(*tokens))


def traced_step(**options):
    mesh = sized(ONE)
    graphdef, params, state = abstract_train_state(SMALL, OPTIMIZERS["sgd"], mesh)
    batch = place_batch(make_batch(rows(0)), mesh)
    return make_train_step(graphdef, OPTIMIZERS["sgd"], **options).trace(params, state, batch)


def without_rules(**options):
    return traced(mesh_of(seq=2, data=2), (2, 8), **options)


MISTAKES = [
    (lambda: ShardingRules().check_mesh(mesh_of(seq=2)),
     r"ShardingRules' data is 'data': the mesh's axes are 'seq'; .* data=None, or "),
    (lambda: ShardingRules.of(mesh_of(rows=2)),
     r"the mesh has an axis 'rows': ShardingRules\.of accepts data, fsdp, seq, tensor, stage"),
    (lambda: ShardingRules(data="seq"),
     r"ShardingRules' seq is 'seq', and data names 'seq' too: use different mesh axes"),
    (lambda: ShardingRules(fsdp=cast(Any, 3)),
     r"ShardingRules' fsdp is 3: it must be a mesh axis, a tuple of them, or None"),
    (lambda: ShardingRules(stage=cast(Any, ("a", "b"))),
     r"ShardingRules' stage is \('a', 'b'\): it must be one mesh axis"),
    (lambda: ShardingRules().spec(("embed", "hats")),
     r"'hats' is not a logical dimension name: use batch, tokens, embed, expert, layers, heads"),
    (lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), rules=cast(Any, "fsdp")),
     r"rules is a str: it must be a ShardingRules"),
    (lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), rules=ShardingRules(stage="s"), microbatches=0),
     r"microbatches is 0: it must be an integer, at least 1"),
    (lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), microbatches=2),
     r"microbatches is 2: only a pipeline has them; pass rules with a stage"),
    (lambda: without_rules(seq_axis="ring"),
     r"seq_axis is 'ring': the mesh's axes are 'seq', 'data'"),
    (lambda: without_rules(batch_axis="seq"),
     r"batch_axis is 'seq', and so is one of seq_axis: use different mesh axes"),
    (lambda: call((1, 2, 1, 2, 1), (4, 8), ulysses_axis="fsdp"),
     r"ulysses_axis is 'fsdp', and so is one of rules: use different mesh axes"),
    (lambda: init((1, 1, 1, 5, 1)),
     r"embedding has shape \(48, 48\): dimension 1, 48, is .* over 5 devices \(fsdp 1 x "
     r"seq 5 x stage 1\), which do not divide it; use a size that is a multiple of 5"),
    (lambda: init((1, 1, 3, 2, 1)),
     r"layers\..* has shape \(4, .*: dimension 0, 4, is .* over 3 devices \(stage 3\)"),
    (lambda: init((1, 1, 1, 1, 3)),
     r"num_kv_heads is 2, and the tensor axis \('tensor',\) has 3 devices: one of the two"),
    (lambda: init((1, 1, 1, 2, 1), seq_axis="seq"),
     r"seq_axis is given together with rules, which set it: leave it out"),
    (lambda: call((2, 2, 1, 1, 1), (6, 8)),
     r"tokens has shape \(6, 8\): dimension 0, 6, is .* over 4 devices \(data 2 x fsdp 2\)"),
    (lambda: call((1, 1, 1, 4, 1), (2, 10)),
     r"tokens has shape \(2, 10\): dimension 1, 10, is .* over 4 devices \(seq 4\)"),
    (lambda: call((1, 2, 2, 1, 1), (6, 8)),
     r"tokens has shape \(6, 8\), 3 sequences per device, which 2 stages do not .* of 4"),
    (lambda: call((1, 1, 2, 1, 1), (4, 8), microbatches=3),
     r"4 sequences per device, which 3 microbatches do not divide: .* of 3"),
    (lambda: make_train_step(nnx.graphdef(nnx.Dict()), OPTIMIZERS["sgd"], accumulate=0),
     r"accumulate is 0: it must be an integer, at least 1"),
    (lambda: traced_step(accumulate=3),
     r"accumulate is 3, the batch has 4 .*: use a multiple"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), MISTAKES)
def test_what_the_mesh_cannot_shard_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
