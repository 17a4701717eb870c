"""Tokens exchanged between devices with different experts, against each expert on all tokens."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from experts_by_formula import CONFIG, D, formula, layer_of
from flax import nnx
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of

from burst_jax import ShardingRules
from burst_jax.models import (
    Experts,
)
from burst_jax.models.experts import exchange
from burst_jax.models.weights import flat_weights, with_weights
from burst_jax.parallel.mesh import flat_names


@pytest.mark.parametrize(
    ("sizes", "expert", "factor", "popular", "chunks"),
    [
        ({"fsdp": 2, "seq": 2, "tensor": 2}, ("seq", "fsdp"), 0.5, (), 1),
        ({"seq": 2}, "seq", 0.5, (7, 9), 3),
        pytest.param({"data": 2, "seq": 3}, "seq", None, (), 3, marks=pytest.mark.slow),
    ],
)
def test_exchanged_tokens_give_the_formula(monkeypatch, sizes, expert, factor, popular, chunks):
    """In several rounds, with padding; two popular experts have all tokens, the others none."""
    monkeypatch.setattr(exchange, "_FEW", 0)
    together, barrier = [], jax.lax.optimization_barrier

    def recorded(x):
        together.append([leaf.dtype.name for leaf in jax.tree.leaves(x)])
        return barrier(x)

    monkeypatch.setattr(jax.lax, "optimization_barrier", recorded)
    experts = Experts(24, 2, router_bias=True, capacity_factor=factor)
    config = dataclasses.replace(CONFIG, experts=experts, mlp_bias=True, mlp_chunks=chunks)
    layer, mesh = layer_of(config), mesh_of(**sizes)
    rules = dataclasses.replace(ShardingRules.of(mesh), expert=expert)
    layer.expert_axis, layer.hidden_axis = rules.expert, rules.tensor
    graphdef, state = nnx.split(layer)
    weights = flat_weights(state)
    if popular:
        bias = 9.0 * np.isin(np.arange(24), popular)
        weights["router", "kernel"] = np.zeros((D, 24), np.float32)
        weights["router", "bias"] = np.asarray(bias, np.float32)
    # Not gathered, unlike a decoder's.
    whole = dataclasses.replace(rules, data=None, fsdp=None, seq=None)
    specs = {path: whole.spec(config.feed_forward.weight_axes[path]) for path in weights}
    over = rules.batch_axes + flat_names(rules.seq)
    tokens = P(rules.batch_axes or None, rules.seq)
    rng = np.random.default_rng(3)
    x, cotangent = rng.standard_normal((2, 4, 18, D))
    present = np.ones((4, 18), np.int32)
    present[1, 5:] = 0
    dscores, dz = rng.standard_normal(24), 0.3

    def local(weights, x, present):
        layer = nnx.merge(graphdef, with_weights(state, weights))
        out, sums = layer.with_sums(x, present, keeps_products=True)
        return out, tuple(jax.lax.psum(sums, over))

    @quick_jit
    def run(weights, x, present, cotangent):
        specs_in = specs, tokens, tokens
        feed_forward = jax.shard_map(local, mesh=mesh, in_specs=specs_in, out_specs=(tokens, P()))
        found, vjp = jax.vjp(lambda weights, x: feed_forward(weights, x, present), weights, x)
        dsums = jnp.zeros(24), jnp.asarray(dscores, jnp.float32), jnp.float32(dz), jnp.zeros(2)
        return found, *vjp((cotangent, dsums))

    arrays = np.float32(x), present, np.float32(cotangent)
    (out, (*sums, (rounds, devices))), dweights, dx = jax.device_get(run(weights, *arrays))
    found = out, tuple(sums)
    # Tokens, weights and numbers: else XLA of JAX 0.11 sends one of them apart.
    assert ["float32", "float32", "int32"] in together
    assert devices == math.prod(mesh.shape[name] for name in over)
    assert (rounds > 0) == (factor is not None)
    want, (gradients, want_dx) = plain_model.gradients(
        lambda weights, x: formula(weights, x, config, present),
        (cotangent, (np.zeros(24), dscores, dz)),
        nnx.to_pure_dict(with_weights(state, weights)),
        x,
    )
    if popular:
        assert sorted(want[1][0]) == [0] * 22 + [59] * 2
    wanted = {path: gradients[path[0]][path[1]] for path in dweights}
    assert_close((found, dweights, dx), (want, wanted, want_dx), 1e-5)


def test_a_round_has_all_rows_or_a_part():
    sizes = exchange.round_sizes
    assert sizes(512, 8, 1.5) == (512, 0)
    assert sizes(513, 8, 1.5) == (104, 32)
    assert sizes(16384, 8, None) == sizes(16384, 2, 2.0) == (16384, 0)
    assert sizes(8208, 2, 1.9) == (7800, 408)
