"""Mixtures of experts against each expert on all tokens, masked, in float64."""

from __future__ import annotations

import dataclasses

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from experts_by_formula import CONFIG, COTANGENT, PRESENT, D, M, X, formula, layer_of
from flax import nnx
from implementations import quick_jit
from jaxprs import count, equations
from meshes import assert_close, make_mesh, mesh_of, random_like

from burst_jax import ShardingRules
from burst_jax.models import (
    DecoderConfig,
    Experts,
    Lora,
    MixtureOfExperts,
    abstract_decoder,
    save_adapter,
)
from burst_jax.models.experts import rows as expert_rows
from burst_jax.models.experts.mixture import Sums
from burst_jax.models.feed_forward import GatedMLP


@pytest.mark.parametrize(
    ("experts", "fields"),
    [
        (Experts(5, 2, shared_dim=8, shared_gate=True), {}),
        (Experts(6, 3, score="sigmoid", normalize=False, router_bias=True), {"remat": "selective"}),
        (Experts(4, 4, clamp=0.5, router_bias=True), {"mlp_bias": True, "mlp_chunks": 13}),
        (Experts(7, 1, score="sigmoid"), {"lora": Lora(2, alpha=3.0)}),
        (Experts(8, 3, "sigmoid", choice_bias=True, groups=4, groups_per_token=2, scale=2.5), {}),
    ],
)
def test_values_sums_and_gradients_are_the_formula(experts, fields):
    config = dataclasses.replace(CONFIG, experts=experts, **fields)
    graphdef, state = nnx.split(layer_of(config))
    rng = np.random.default_rng(3)
    dsums = rng.standard_normal(experts.count), rng.standard_normal(experts.count), 0.3

    @quick_jit
    def run(state, x, present, cotangent):
        def feed_forward(state, x):
            layer = nnx.merge(graphdef, state)
            return layer.with_sums(x, present, keeps_products=config.remat == "selective")

        (out, sums), vjp = jax.vjp(feed_forward, state, x)
        return (out, tuple(sums)), *vjp((out * 0 + cotangent, type(sums)(*cotangents)))

    cotangents = jax.tree.map(np.float32, dsums)
    found, dweights, dx = run(state, np.float32(X), PRESENT, np.float32(COTANGENT))
    weights = nnx.to_pure_dict(state)
    want, gradients = plain_model.gradients(
        lambda weights, x: formula(weights, x, config, PRESENT),
        (COTANGENT, (0 * dsums[0], *dsums[1:])),
        weights,
        X,
    )
    dweights = nnx.to_pure_dict(dweights)
    if experts.choice_bias:  # It enters the choice alone.
        assert not np.any(dweights.pop("choice_bias"))
        assert not np.any(gradients[0].pop("choice_bias"))
    assert_close((found, dweights, dx), (want, *gradients), 1e-5)


def test_gradients_hold_no_dense_arrays_and_choose_experts_once():
    """A recomputation that rounds otherwise would send tokens to other experts."""
    config = dataclasses.replace(
        CONFIG, num_layers=2, num_heads=2, head_dim=8, experts=Experts(64, 2), remat="selective"
    )
    jaxpr = decoders.traced_gradient(config, make_mesh(), 4, 32)
    sizes = [out.aval.size for each, _ in equations(jaxpr) for out in each.outvars]
    # The experts' own weights; tokens x experts x features are more.
    assert max(sizes) == 2 * 64 * D * M < 4 * 32 * 64 * D
    assert count(jaxpr, "top_k") == 1
    all_again = dataclasses.replace(config, remat="full")
    assert count(decoders.traced_gradient(all_again, make_mesh(), 4, 32), "top_k") == 2
    # In chunks, there are hidden features of one chunk only.
    chunked = decoders.traced_gradient(
        dataclasses.replace(config, mlp_chunks=8), make_mesh(), 4, 32
    )
    for traced, count_of_rows in ((jaxpr, 4 * 32 * 2), (chunked, 4 * 32 * 2 // 8)):
        shapes = [out.aval.shape for each, _ in equations(traced) for out in each.outvars]
        assert max(shape[0] for shape in shapes if shape[1:] == (M,)) == count_of_rows
    # The gradients of biases scatter no rows: the largest that is scattered are the embedding's.
    biased = decoders.traced_gradient(
        dataclasses.replace(config, mlp_bias=True), make_mesh(), 4, 32
    )
    scattered = [each for each, _ in equations(biased) if each.primitive.name == "scatter-add"]
    assert max(each.invars[2].aval.size for each in scattered) == 4 * 32 * D < 4 * 32 * 2 * M


def test_auxiliary_losses_are_means_over_tokens_and_layers():
    """Each from its definition, with every token's logits in each of three layers."""
    count, k, tokens = 5, 2, 40
    logits = 2 * np.random.default_rng(1).standard_normal((3, tokens, count))
    chosen = np.sort(np.argsort(logits, -1)[..., -k:], -1)
    counts = np.stack([np.bincount(each.ravel(), minlength=count) for each in chosen])
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    squared = np.log(np.exp(logits).sum(-1)) ** 2
    rounds = np.array([[2, 4], [0, 4], [4, 4]])
    given = Sums(*map(jnp.float32, (counts, scores.sum(1), squared.sum(1), rounds)))
    experts = Experts(count, k, balance_loss=0.25, z_loss=0.125)
    config = dataclasses.replace(CONFIG, experts=experts)
    loss, metrics, _ = jax.device_get(MixtureOfExperts.auxiliary(config, given))
    balance = count * np.mean(np.sum(counts / (tokens * k) * scores.mean(1), -1))
    want = {
        "balance_loss": balance,
        "router_z_loss": squared.mean(),
        "max_expert_load": counts.max() / (tokens * k / count),
        "further_rounds": 2 / 4 + 4 / 4,
    }
    assert metrics == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(0.25 * balance + 0.125 * squared.mean(), rel=1e-5)


def test_copies_are_summed_in_float32():
    """Next to 256 bfloat16 has no 1; the gradient of copies is such a sum, rounded once."""
    copies = jnp.array([[256.0], [1.0], [2.0], [2.0], [256.0], [1.0]], jnp.bfloat16)
    np.testing.assert_array_equal(expert_rows.summed(copies, 2), [[259], [259]])
    index = jnp.arange(6)
    _, vjp = jax.vjp(lambda x: expert_rows.copied(x, index, index), jnp.zeros((2, 1), jnp.bfloat16))
    np.testing.assert_array_equal(np.float32(vjp(copies)[0]), [[260], [260]])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Experts(4, 5), ValueError, "per_token is 5: it must be .* at most 4"),
        (
            lambda: Experts(4, 2, score="max"),  # pyrefly: ignore
            ValueError,
            "score is 'max': use one of 'softmax', ",
        ),
        (lambda: Experts(4, 2, clamp=0.0), ValueError, "clamp is 0.0: it must be positive"),
        (lambda: Experts(4, 2, balance_loss=True), ValueError, "balance_loss is True: it must be"),
        (lambda: Experts(4, 2, z_loss=-1.0), ValueError, "z_loss is -1.0: it must be 0, which is"),
        (
            lambda: DecoderConfig(experts=Experts(4, 2)),
            ValueError,
            "feed_forward is GatedMLP, experts Experts.*: use feed_forward=MixtureOfExperts",
        ),
        (
            lambda: dataclasses.replace(CONFIG, experts=None),
            ValueError,
            "feed_forward is MixtureOfExperts, experts None: use feed_forward=Mixture",
        ),
        (
            lambda: dataclasses.replace(CONFIG, lora=Lora(2, targets=("query", "up"))).adapted,
            NotImplementedError,
            r"targets \('query', 'up'\), and up have a matrix per expert: experts have no adapters",
        ),
        (
            lambda: Experts(4, 2, capacity_factor=0.0),
            ValueError,
            "capacity_factor is 0.0: it must be positive.*or None",
        ),
        (
            lambda: Experts(4, 2, shared_dim=8, shared_gate=1),  # pyrefly: ignore
            ValueError,
            "shared_gate is 1: it must be True or False",
        ),
        (
            lambda: ShardingRules(expert=("seq", "tensor")),
            NotImplementedError,
            r"expert is \('seq', 'tensor'\), and tensor names 'tensor' too: experts can share devi",
        ),
        (
            lambda: abstract_decoder(
                dataclasses.replace(CONFIG, feed_forward=GatedMLP, experts=None),
                rules=ShardingRules(expert="seq"),
            ),
            ValueError,
            "expert is 'seq', and feed_forward GatedMLP has no weights with a dimension \"expert\"",
        ),
    ],
)
def test_what_is_not_supported_raises(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_active_weights_are_counted():
    config = dataclasses.replace(CONFIG, experts=Experts(5, 2, shared_dim=8), num_layers=1)
    dense = dataclasses.replace(config, feed_forward=GatedMLP, experts=None)
    assert config.num_matmul_params - dense.num_matmul_params == D * (5 + 3 * (2 * M + 8 - M))


def test_adapters_are_of_attention_and_the_router(tmp_path):
    config = dataclasses.replace(CONFIG, num_layers=2, lora=Lora(2))
    assert config.adapted == ("query", "key", "value", "out", "router")
    mesh = mesh_of(fsdp=2, seq=2)
    config = dataclasses.replace(config, experts=Experts(6, 2))
    rules = dataclasses.replace(ShardingRules.of(mesh), expert="seq")
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=rules)
    adapters, _ = nnx.split_state(shapes, nnx.LoRAParam, ...)
    assert sum(x.size for x in jax.tree.leaves(adapters)) == config.num_adapter_params
    specs = nnx.merge(graphdef, shapes).shardings(shapes).weight_specs(shapes)
    assert specs["layers"]["mlp"]["router"]["kernel_lora_a"].get_value() == jax.P(None, None, None)
    up = specs["layers"]["mlp"]["up"]["kernel"].get_value()
    assert up == jax.P(None, ("seq",), ("fsdp",), None)
    with pytest.raises(NotImplementedError, match="adapter of the router, which peft does not"):
        save_adapter(nnx.merge(graphdef, random_like(shapes, 0)), tmp_path / "adapter")
