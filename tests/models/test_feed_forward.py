"""Feed-forwards: the gated MLP in chunks with its own gradient, and one defined in this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import assert_close, random_like, relative_rms
from split_runs import CONFIG as TRAINED
from split_runs import ONE, losses, plain_losses, sized

import burst_jax
from burst_jax import ShardingRules
from burst_jax.layers.lora import set_adapter
from burst_jax.layers.projection import add_bias
from burst_jax.models import DecoderConfig, FeedForward, Lora, abstract_decoder
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.models.hf.config import config_json
from burst_jax.models.remat import keeps_mlp_products
from burst_jax.models.weights import weight_specs
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.rules import LogicalAxes

B, T, D, M = 2, 12, 16, 24
RANK = 4
CONFIG = DecoderConfig(embed_dim=D, mlp_dim=M)
LORA = Lora(RANK, alpha=10.0)
INPUTS = np.random.default_rng(7).standard_normal((2, B, T, D))


def made(config):
    """The graph of a feed-forward, and weights without zeros."""
    layer = GatedMLP(config, out_init=nnx.initializers.lecun_normal(), rngs=nnx.Rngs(0))
    if config.lora is not None:
        for linear in (layer.gate, layer.up, layer.down):
            a = jnp.zeros((linear.in_features, RANK))
            set_adapter(linear, a, jnp.zeros((RANK, linear.out_features)), config.lora.scale)
    graphdef, state = nnx.split(layer)
    return graphdef, jax.tree.map(lambda x: x / 4, random_like(state, 0))


def formula(weights, x, config):
    def linear(name, x):
        of = weights[name]
        adapter = 0
        if config.lora is not None:
            adapter = config.lora.scale * (x @ of["kernel_lora_a"]) @ of["kernel_lora_b"]
        return x @ of["kernel"] + adapter + of.get("bias", 0)

    activation = plain_model.ACTIVATIONS[config.activation]
    return linear("down", activation(linear("gate", x)) * linear("up", x))


def results(config, dtype=jnp.float32):
    """Output, and the gradients of the weights and of x, for a random cotangent."""
    graphdef, state = made(config)

    @quick_jit
    def run(state, x, cotangent):
        def feed_forward(state, x):
            keeps = keeps_mlp_products(config.remat)
            return nnx.merge(graphdef, state)(x, keeps_products=keeps)

        out, vjp = jax.vjp(feed_forward, state, x)
        return out, *vjp(cotangent)

    out, dweights, dx = run(state, *(jnp.asarray(x, dtype) for x in INPUTS))
    return out, nnx.to_pure_dict(dweights), dx


def dense(config):
    weights, (x, cotangent) = nnx.to_pure_dict(made(config)[1]), INPUTS
    out, gradients = plain_model.gradients(
        lambda weights, x: formula(weights, x, config), cotangent, weights, x
    )
    return out, *gradients


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "gelu", "mlp_bias": True, "remat": "attention", "mlp_chunks": 3},
        {"activation": "gelu_tanh", "mlp_bias": True, "remat": "selective", "mlp_chunks": 4},
        {"lora": LORA},
        {"lora": LORA, "mlp_bias": True, "remat": "attention", "mlp_chunks": 3},
    ],
)
def test_values_and_gradients_are_the_formula(fields):
    """With adapters everything else is frozen."""
    config = dataclasses.replace(CONFIG, **{"remat": "none"} | fields)
    (out, dweights, dx), want = results(config), dense(config)
    if config.lora is not None:
        assert not any(np.any(dweights[name]["kernel"]) for name in want[1])
        dweights = decoders.adapters_of(dweights)
        want = want[0], decoders.adapters_of(want[1]), want[2]
    assert_close((out, dweights, dx), want, 1e-5)


def test_chunks_lose_nothing_in_bfloat16():
    """The gradients of the weights are summed over chunks in float32."""
    half: Any = {"dtype": jnp.bfloat16}
    whole = results(dataclasses.replace(CONFIG, **half), jnp.bfloat16)[1]
    chunked = results(dataclasses.replace(CONFIG, mlp_chunks=T, **half), jnp.bfloat16)[1]
    want = dense(CONFIG)[1]
    for name in ("gate", "up", "down"):
        errors = [relative_rms(x[name]["kernel"], want[name]["kernel"]) for x in (whole, chunked)]
        assert 1e-4 < errors[0] < 1e-2
        assert errors[1] < 1.2 * errors[0]


def test_gradients_of_biases_are_summed_in_float32():
    """In the program, because XLA on CPUs computes a bfloat16 sum in float32 anyway."""
    out, bias = jnp.zeros((2, 5, 3), jnp.bfloat16), jnp.zeros((3,), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda bias: jax.vjp(lambda b: add_bias(out, b), bias)[1](out))(bias)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert {eqn.invars[0].aval.dtype for eqn in sums} == {jnp.dtype("float32")}  # pyrefly: ignore


def test_chunks_that_do_not_divide_raise():
    graphdef, state = made(dataclasses.replace(CONFIG, mlp_chunks=5))
    with pytest.raises(ValueError, match="mlp_chunks is 5: it must divide the 12 tokens per seque"):
        nnx.merge(graphdef, state)(jnp.zeros((B, T, D)), keeps_products=False)


class Mixture(FeedForward):
    """A mixture of three experts, each weighted by its router probability."""

    weight_axes: ClassVar[Mapping[tuple[str, ...], LogicalAxes]] = {
        ("router", "kernel"): ("embed", None),
        ("up",): (None, "embed", "mlp"),
        ("down",): (None, "mlp", "embed"),
    }

    def __init__(self, config, *, out_init, hidden_axis=None, rngs):
        del out_init
        init = nnx.initializers.lecun_normal(batch_axis=0)
        d, m = config.embed_dim, config.mlp_dim
        self.router = nnx.Linear(d, 3, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (3, d, m)))
        self.down = nnx.Param(init(rngs.params(), (3, m, d)))
        self.hidden_axis = hidden_axis

    def __call__(self, x, *, keeps_products):
        del keeps_products
        hidden = jax.nn.silu(jnp.einsum("btd,edm->btem", x, self.up[...]))
        out = jnp.einsum("btem,emd->bted", hidden, self.down[...])
        out = jnp.einsum("bted,bte->btd", out, jax.nn.softmax(self.router(x)))
        return psum_manual(out, self.hidden_axis)

    @classmethod
    def num_matmul_params(cls, config):
        return 3 * config.embed_dim * (2 * config.mlp_dim + 1)


MIXTURE = dataclasses.replace(TRAINED, num_layers=1, num_heads=2, feed_forward=Mixture)


@pytest.mark.slow
def test_a_feed_forward_of_ones_own_trains_sharded():
    def mixture(weights, x):
        hidden = plain_model.ACTIVATIONS["silu"](jnp.einsum("btd,edm->btem", x, weights["up"]))
        router = jnp.exp(x @ weights["router"]["kernel"])
        parts = jnp.einsum("btem,emd->bted", hidden, weights["down"])
        return (parts * router[..., None]).sum(2) / router.sum(-1, keepdims=True)

    got = losses((1, 2, 1, 1, 2), steps=3, config=MIXTURE, optimizer=optax.sgd(0.1))
    want = plain_losses(3, 0.1, 0.0, MIXTURE, mixture)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)
    mesh = sized((1, 2, 1, 2, 2))
    graphdef, shapes = abstract_decoder(MIXTURE, mesh=mesh, rules=ShardingRules.of(mesh))
    specs = nnx.merge(graphdef, shapes).shardings(shapes).weight_specs(shapes)
    spec = specs["layers"]["mlp"]["down"].get_value()
    assert spec == jax.P("stage", None, "tensor", ("fsdp", "seq"))


def test_what_is_known_of_a_feed_forward_of_ones_own():
    attention = 2 * 48 * 8 * (2 + 2)
    assert MIXTURE.num_matmul_params == attention + 3 * 48 * 193 + 48 * 48
    for targets in (("query", "up", "gate"), "up|gate"):
        with pytest.raises(ValueError, match=r"no projection gate, up: choose among query, key"):
            abstract_decoder(dataclasses.replace(MIXTURE, lora=Lora(RANK, targets=targets)))
    with pytest.raises(NotImplementedError, match="no model family"):
        config_json(MIXTURE, "float32", 64)
    with pytest.raises(
        NotImplementedError, match="feed_forward is Mixture: the planner supports GatedM"
    ):
        burst_jax.plan.training(MIXTURE, length=64, batch=8)
    with pytest.raises(ValueError, match="feed_forward is 'moe': use a subclass of burst_jax"):
        dataclasses.replace(CONFIG, feed_forward="moe")  # pyrefly: ignore
    with pytest.raises(ValueError, match="mlp_chunks is 2, and feed_forward Mixture does not run"):
        dataclasses.replace(MIXTURE, mlp_chunks=2)


def test_an_incomplete_feed_forward_is_named():
    class Incomplete(Mixture):
        weight_axes: ClassVar = {("up",): (None, "embed", "mlp")}
        num_matmul_params = classmethod(FeedForward.num_matmul_params.__func__)

    config = dataclasses.replace(MIXTURE, feed_forward=Incomplete)
    with pytest.raises(NotImplementedError, match="Incomplete defines no num_matmul_params"):
        print(config.num_matmul_params)
    mesh = sized(ONE)
    _, shapes = abstract_decoder(config, mesh=mesh)
    with pytest.raises(ValueError, match=r"add \('down',\) to Incomplete.weight_axes, with the"):
        weight_specs(shapes, config, mesh, ShardingRules.of(mesh))
