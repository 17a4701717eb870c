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
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh
from split_runs import CONFIG as TRAINED
from split_runs import B as ROWS
from split_runs import T as TOKENS
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
# Without further rounds, which one case has.
ONE_ROUND = dataclasses.replace(MIXTURE.experts, capacity_factor=None)


@functools.cache
def plain_losses(steps):
    """Loss and gradient norm of each step of SGD, with each expert on all tokens, in float64."""
    experts, num_layers = MIXTURE.experts, MIXTURE.num_layers
    assert experts is not None
    params = nnx.to_pure_dict(decoders.drawn(abstract_decoder(MIXTURE)[1]))
    positions = np.tile(np.arange(TOKENS), (ROWS, 1))

    def mean_loss(params, inputs, targets, ids, weights, keep):
        x, keep = params["embedding"][inputs.astype(int)], keep != 0
        balance, z, tokens = 0.0, 0.0, jnp.sum(ids != 0)
        for layer in range(num_layers):
            part = jax.tree.map(lambda w: w[layer], params["layers"])  # noqa: B023
            normed = plain_model.rms_norm(x, part["attention_norm"]["scale"])
            x = x + plain_model.attention_layer(
                part["attention"], normed, positions, keep, MIXTURE.rope_theta
            )
            normed = plain_model.rms_norm(x, part["mlp_norm"]["scale"])
            out, (counts, scores, squares) = formula(part["mlp"], normed, MIXTURE, ids)
            x = x + out
            share = counts / (tokens * experts.per_token)
            balance += experts.count * jnp.sum(share * scores / tokens) / num_layers
            z += squares / tokens / num_layers
        logits = plain_model.rms_norm(x, params["final_norm"]["scale"]) @ params["head"]["kernel"]
        total = plain_model.cross_entropy(logits, targets.astype(int), weights)
        return total / weights.sum() + experts.balance_loss * balance + experts.z_loss * z

    def arrays(step):
        tokens, ids = rows(step), segments(step)
        counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        ids = ids[:, :-1]
        return tokens[:, :-1], tokens[:, 1:], ids, counts, plain_model.causal(ids)

    run, history = plain_model.traced_gradients(mean_loss, 1.0, params, *arrays(0)), []
    for step in range(steps):
        loss, (gradients, *_) = run(1.0, params, *arrays(step))
        squares = sum(np.sum(x**2) for x in jax.tree.leaves(gradients))
        history.append((float(loss), float(np.sqrt(squares))))
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
            20,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_each_expert_on_all_tokens(
    monkeypatch, sizes, kind, fields, expert, steps
):
    monkeypatch.setattr(exchange, "_FEW", 0)
    config = dataclasses.replace(MIXTURE, **fields)
    got = losses(sizes, kind, steps=steps, config=config, optimizer=SGD, expert=expert)
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
    _, *state = init_train_state(config, sgd, mesh, 0, layout="contiguous", params=params)
    state = jax.device_get(state)

    def step(run, part):
        """Of a part of the sequences, the others being padding: of the whole batch's shape."""
        present = np.zeros_like(ids)
        present[part] = ids[part]
        batch = place_batch(make_batch(rows, segment_ids=present), mesh)
        params, _, metrics = run(*jax.device_put(state, jax.NamedSharding(mesh, P())), batch)
        return nnx.to_pure_dict(params), {name: float(x) for name, x in metrics.items()}

    at_once, in_two = (
        make_train_step(graphdef, sgd, accumulate=count, compiler_options=QUICK) for count in (1, 2)
    )
    want, got = (step(run, slice(4)) for run in (at_once, in_two))
    assert_close(got[0], want[0], 1e-5)
    for name in ("loss", "grad_norm", "router_z_loss"):
        assert got[1][name] == pytest.approx(want[1][name], rel=1e-5)
    tokens = np.array([32, 11])
    slices = [step(at_once, part)[1] for part in (slice(2), slice(2, 4))]
    for name in ("balance_loss", "router_z_loss", "max_expert_load"):
        mean = np.dot(tokens, [each[name] for each in slices]) / tokens.sum()
        assert got[1][name] == pytest.approx(mean, rel=1e-5)
    assert abs(got[1]["balance_loss"] / want[1]["balance_loss"] - 1) > 1e-3
