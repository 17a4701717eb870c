"""The feed-forward of a layer, in chunks of tokens, with its own gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import relative_rms

from burst_jax.layers.low_rank import set_adapter
from burst_jax.layers.nnx_layer import add_bias
from burst_jax.models import DecoderConfig, Lora
from burst_jax.models.feed_forward import ACTIVATIONS, GatedMLP
from burst_jax.models.remat import keeps_mlp_products

B, T, D, M = 2, 12, 16, 24
RANK = 4
CONFIG = DecoderConfig(embed_dim=D, mlp_dim=M)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def made(config):
    """The graph of a feed-forward, and weights without zeros."""
    init = nnx.initializers.lecun_normal()
    layer = GatedMLP(config, down_init=init, rngs=nnx.Rngs(0))
    if config.lora is not None:
        for linear in (layer.gate, layer.up, layer.down):
            a = jnp.zeros((linear.in_features, RANK))
            set_adapter(linear, a, jnp.zeros((RANK, linear.out_features)), config.lora.scale)
    graphdef, state = nnx.split(layer)
    leaves, tree = jax.tree.flatten(state)
    drawn = [jnp.asarray(random(*x.shape, seed=i), x.dtype) / 4 for i, x in enumerate(leaves)]
    return graphdef, jax.tree.unflatten(tree, drawn)


def formula(weights, x, config):
    def linear(name, x):
        of = weights[name]
        adapter = 0
        if config.lora is not None:
            adapter = config.lora.scale * (x @ of["kernel_lora_a"]) @ of["kernel_lora_b"]
        return x @ of["kernel"] + adapter + of.get("bias", 0)

    activation = ACTIVATIONS[config.activation]
    return linear("down", activation(linear("gate", x)) * linear("up", x))


def results(config, dtype=jnp.float32):
    """Output and gradients of the weights and of x, for a random cotangent."""
    graphdef, state = made(config)

    def feed_forward(state, x):
        keeps = keeps_mlp_products(config.remat)
        return nnx.merge(graphdef, state)(x, keeps_products=keeps)

    @quick_jit
    def run(state, x, cotangent):
        out, vjp = jax.vjp(feed_forward, state, x)
        return out, *vjp(cotangent)

    out, dweights, dx = run(state, *(jnp.asarray(random(B, T, D, seed=s), dtype) for s in (7, 8)))
    return out, nnx.to_pure_dict(dweights), dx


def dense(config):
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(made(config)[1]))
    with jax.enable_x64(True):
        x, cotangent = (jnp.asarray(random(B, T, D, seed=s)) for s in (7, 8))
        out, vjp = jax.vjp(
            lambda weights, x: formula(weights, x, config),
            jax.tree.map(jnp.asarray, weights),
            x,
        )
        return jax.device_get((out, *vjp(cotangent)))


@pytest.mark.parametrize(
    ("activation", "bias", "remat", "chunks"),
    [
        ("silu", False, "none", 1),
        ("gelu", True, "attention", 3),
        ("gelu_tanh", True, "selective", 4),
        ("silu", False, "full", 6),
    ],
)
def test_values_and_gradients_are_the_formula(activation, bias, remat, chunks):
    config = dataclasses.replace(
        CONFIG, activation=activation, mlp_bias=bias, remat=remat, mlp_chunks=chunks
    )
    got, want = results(config), dense(config)
    jax.tree.map(lambda got, want: check(got, want, 1e-5), got, want)


@pytest.mark.parametrize(("bias", "remat", "chunks"), [(False, "none", 1), (True, "attention", 3)])
def test_adapters_are_the_formula_and_the_rest_is_frozen(bias, remat, chunks):
    config = dataclasses.replace(
        CONFIG, mlp_bias=bias, remat=remat, mlp_chunks=chunks, lora=Lora(RANK, alpha=10.0)
    )
    (out, dweights, dx), want = results(config), dense(config)
    check(out, want[0], 1e-5)
    check(dx, want[2], 1e-5)
    for name in ("gate", "up", "down"):
        for adapter in ("kernel_lora_a", "kernel_lora_b"):
            check(dweights[name][adapter], want[1][name][adapter], 1e-5)
        assert not np.any(dweights[name]["kernel"])


def check(got, want, limit):
    assert relative_rms(got, want) < limit


def test_chunks_lose_nothing_in_bfloat16():
    """The gradients of the weights are summed over chunks in float32."""
    half: Any = {"dtype": jnp.bfloat16}
    whole = results(dataclasses.replace(CONFIG, **half), jnp.bfloat16)[1]
    cut = results(dataclasses.replace(CONFIG, mlp_chunks=T, **half), jnp.bfloat16)[1]
    want = dense(CONFIG)[1]
    for name in ("gate", "up", "down"):
        errors = [relative_rms(x[name]["kernel"], want[name]["kernel"]) for x in (whole, cut)]
        assert 1e-4 < errors[0] < 1e-2
        assert errors[1] < 1.2 * errors[0]


def test_gradients_of_biases_are_summed_in_float32():
    """On CPUs XLA widens a bfloat16 sum by itself, so the sum is looked for in the program."""
    out, bias = jnp.zeros((2, 5, 3), jnp.bfloat16), jnp.zeros((3,), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda bias: jax.vjp(lambda b: add_bias(out, b), bias)[1](out))(bias)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert sums
    assert all(eqn.invars[0].aval.dtype == jnp.float32 for eqn in sums)  # pyrefly: ignore


def test_chunks_that_do_not_divide_are_refused():
    graphdef, state = made(dataclasses.replace(CONFIG, mlp_chunks=5))
    with pytest.raises(ValueError, match="mlp_chunks is 5: it must divide the 12 tokens of a row"):
        nnx.merge(graphdef, state)(jnp.zeros((B, T, D)), keeps_products=False)
