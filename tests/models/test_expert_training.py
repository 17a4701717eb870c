"""Training of mixtures of experts: on meshes, and with accumulated gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from experts_by_formula import formula
from flax import nnx
from implementations import QUICK
from jax.sharding import AxisType
from meshes import assert_close, make_mesh
from split_runs import CONFIG as TRAINED
from split_runs import losses, rows, segments

from burst_jax.models import (
    Experts,
    MixtureOfExperts,
    abstract_decoder,
)
from burst_jax.models.experts import exchange
from burst_jax.training import init_train_state, make_batch, make_train_step, place_batch

# Programs of other optimizers are larger.
RATE = 0.3
SGD = optax.sgd(RATE)
MIXTURE: Any = dataclasses.replace(
    TRAINED,
    num_layers=2,
    num_heads=2,
    mlp_dim=32,
    feed_forward=MixtureOfExperts,
    experts=Experts(6, 2, shared_dim=16, balance_loss=0.5, z_loss=0.1),
)
AUXILIARY = ("balance_loss", "router_z_loss", "max_expert_load")
# Without further rounds, which one case has.
ONE_ROUND = dataclasses.replace(MIXTURE.experts, capacity_factor=None)


def formula_gradients(config, *shapes):
    """``run(params, tokens, ids) -> (metrics by name, gradients)`` in float64, by NumPy.

    Each expert on all tokens. ``shapes``: arguments of this call, for tracing.
    """
    experts, num_layers = config.experts, config.num_layers

    def mean_loss(params, inputs, targets, ids, weights, keep):
        positions = np.tile(np.arange(inputs.shape[1]), (len(inputs), 1))
        x, keep = params["embedding"][inputs.astype(int)], keep != 0
        balance, z, load, tokens = 0.0, 0.0, 0.0, jnp.sum(ids != 0)
        for layer in range(num_layers):
            part = jax.tree.map(lambda w: w[layer], params["layers"])  # noqa: B023
            normed = plain_model.rms_norm(x, part["attention_norm"]["scale"])
            x = x + plain_model.attention_layer(
                part["attention"], normed, positions, keep, config.rope_theta
            )
            normed = plain_model.rms_norm(x, part["mlp_norm"]["scale"])
            out, (counts, scores, squares) = formula(part["mlp"], normed, config, ids)
            x = x + out
            share = counts / (tokens * experts.per_token)
            balance += experts.count * jnp.sum(share * scores / tokens) / num_layers
            z += squares / tokens / num_layers
            load = jnp.maximum(load, experts.count * share.max())
        logits = plain_model.rms_norm(x, params["final_norm"]["scale"]) @ params["head"]["kernel"]
        total = plain_model.cross_entropy(logits, targets.astype(int), weights)
        loss = total / weights.sum() + experts.balance_loss * balance + experts.z_loss * z
        return loss, (balance, z, load)

    def arrays(tokens, ids):
        counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        ids = ids[:, :-1]
        return tokens[:, :-1], tokens[:, 1:], ids, counts, plain_model.causal(ids)

    of_loss = 1.0, (0.0, 0.0, 0.0)
    params, *given = shapes
    traced = plain_model.traced_gradients(mean_loss, of_loss, params, *arrays(*given))

    def run(params, tokens, ids):
        (loss, auxiliary), (gradients, *_) = traced(of_loss, params, *arrays(tokens, ids))
        named = dict(
            zip(("balance_loss", "router_z_loss", "max_expert_load"), auxiliary, strict=True)
        )
        norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(gradients)))
        return {"loss": loss, "grad_norm": norm, **named}, gradients

    return run


@functools.cache
def plain_losses(steps):
    """Loss and gradient norm of each step of SGD."""
    params = jax.device_get(nnx.to_pure_dict(decoders.drawn(abstract_decoder(MIXTURE)[1])))
    run, history = formula_gradients(MIXTURE, params, rows(0), segments(0)), []
    for step in range(steps):
        metrics, gradients = run(params, rows(step), segments(step))
        history.append((metrics["loss"], metrics["grad_norm"]))
        params = jax.tree.map(lambda w, g: w - RATE * g, params, gradients)
    return list(zip(*history, strict=True))


@pytest.mark.parametrize(
    ("sizes", "kind", "fields", "expert", "steps"),
    [
        ((1, 2, 1, 2, 2), AxisType.Auto, {"remat": "selective"}, "seq", 3),
        pytest.param(
            (2, 1, 2, 1, 1),
            AxisType.Explicit,
            {"remat": "half", "experts": ONE_ROUND},
            "data",
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_each_expert_on_all_tokens(
    monkeypatch, sizes, kind, fields, expert, steps, program
):
    monkeypatch.setattr(exchange, "_FEW", 0)
    config = dataclasses.replace(MIXTURE, **fields)
    given: Any = {"config": config, "optimizer": SGD, "expert": expert, "program": program}
    got = losses(sizes, kind, steps=steps, **given)
    want = plain_losses(steps)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-4)


def test_accumulated_auxiliary_losses_weigh_slices_by_their_tokens():
    """So the z-loss is that of the whole batch; the load is balanced in each slice."""
    mesh, sgd = make_mesh(), optax.sgd(1.0)
    rows, ids = np.random.default_rng(5).integers(0, 48, (4, 17)), np.ones((4, 17), np.int32)
    # The slices' tokens are as 32 : 11, their targets as 31 : 4.
    ids[1, 4:], ids[2, 5:], ids[3, 6:], ids[3, :6] = 2, 0, 0, range(1, 7)

    # Balance is a metric, and too little of it is in the loss to be seen there.
    experts = Experts(6, 2, shared_dim=16, balance_loss=1e-9, z_loss=4.0)
    config = dataclasses.replace(MIXTURE, experts=experts)
    graphdef, shapes = abstract_decoder(config, mesh=mesh, layout="contiguous")
    params = decoders.drawn(shapes)
    before = jax.device_get(nnx.to_pure_dict(params))
    made = init_train_state(config, sgd, mesh, 0, layout="contiguous", params=params)
    step = make_train_step(graphdef, sgd, accumulate=2, compiler_options=QUICK)
    batch = place_batch(make_batch(rows, segment_ids=ids), mesh)
    after, _, got = step(made[1], made[2], batch)

    of_formula = formula_gradients(config, before, rows, ids)
    want, gradients = of_formula(before, rows, ids)
    found = jax.device_get(nnx.to_pure_dict(after))
    assert_close(jax.tree.map(np.subtract, before, found), gradients, 1e-5)
    for name in ("loss", "grad_norm", "router_z_loss"):
        assert float(got[name]) == pytest.approx(want[name], rel=1e-5)
    slices = []
    for part in (slice(2), slice(2, 4)):
        # The other sequences are padding, so that the formula is traced once.
        present = np.zeros_like(ids)
        present[part] = ids[part]
        slices.append(of_formula(before, rows, present)[0])
    tokens = np.array([32, 11])
    for name in AUXILIARY:
        mean = np.dot(tokens, [each[name] for each in slices]) / tokens.sum()
        assert float(got[name]) == pytest.approx(mean, rel=1e-5)
    assert abs(float(got["balance_loss"]) / want["balance_loss"] - 1) > 1e-3
