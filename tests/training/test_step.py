"""The training step, its optimizer's schedule, and evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from flax import nnx
from implementations import QUICK, quick_jit
from jax.sharding import AxisType
from meshes import assert_close, make_mesh, mesh_of
from split_runs import ROWS, SEGMENTS, SMALL, SMALL_STEPS, batch_on, optimizer_of, trained

from burst_jax.models import Decoder, Lora, abstract_decoder
from burst_jax.training import (
    LowPrecisionWeights,
    evaluate,
    evaluation,
    init_train_state,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
)


def test_the_optimizer_follows_its_schedule_decays_only_matrices_and_clips():
    schedule: Any = jax.jit(make_optimizer(2.0, 100, warmup_steps=10, final_fraction=0.1).schedule)
    # The last but two is half-way down the cosine: between peak and end.
    rates = [float(schedule(jnp.int32(index))) for index in (0, 5, 10, 55, 100, 500)]
    np.testing.assert_allclose(rates, [2 / 11, 12 / 11, 2.0, 1.1, 0.2, 0.2], rtol=1e-5)
    params: Any = {
        "layers": {"norm": {"scale": jnp.ones((2, 4))}, "up": {"kernel": jnp.ones((2, 4, 4))}},
        "embedding": jnp.ones((5, 4)),
    }
    transform: Any = make_optimizer(1.0, 10, warmup_steps=0, weight_decay=0.5).transform

    @quick_jit
    def updated(scale):
        gradients = jax.tree.map(lambda x: scale * x, params)
        return transform.update(gradients, transform.init(params), params)

    with jax.numpy_dtype_promotion("standard"):
        updates, _ = updated(0.0)
        _, state = updated(1e3)
    np.testing.assert_allclose(updates["layers"]["up"]["kernel"], -0.5)
    assert not updates["layers"]["norm"]["scale"].any()
    assert not updates["embedding"].any()
    moments = jax.tree.leaves(state[1].mu)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(m))) for m in moments)) / 0.1
    assert norm == pytest.approx(1.0, rel=1e-5)


@functools.cache
def truth():
    """Of :func:`trained`, in float64: ``(initial weights, mean loss, gradients, their norm)``."""
    run = trained()
    initial = jax.tree.map(lambda x: np.asarray(x, np.float64), run.initial)
    weights = np.float64((SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] != 0))
    keep = plain_model.causal(SEGMENTS[:, :-1])
    assert weights.sum() == run.before.tokens == 19 + 30

    def mean_loss(params):
        pos = np.tile(np.arange(30), (2, 1))
        hidden = plain_model.decoder(params, ROWS[:, :-1], pos, keep, SMALL.rope_theta)
        logits = hidden @ params["head"]["kernel"]
        return plain_model.cross_entropy(logits, ROWS[:, 1:], weights) / weights.sum()

    loss, (grads,) = plain_model.gradients(mean_loss, 1.0, initial)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    return initial, float(loss), grads, float(norm)


def test_the_first_step_on_a_ring_is_that_of_the_mean_loss():
    """Loss, gradient norm and Adam's direction, against gradients in float64."""
    run, (initial, loss, grads, norm) = trained(), truth()
    metrics = run.history[0]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert run.before.nll == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["targets"] == 19 + 30
    rate = metrics["learning_rate"]
    assert rate == pytest.approx(1e-2 / 3)
    # Adam's first step is the sign of the gradient, where that is well above epsilon; matrices also
    # decay by a tenth of the learning rate.
    old, new, slopes = (dict(jax.tree.leaves_with_path(x)) for x in (initial, run.first, grads))
    for path, slope in slopes.items():
        sure = np.abs(slope / max(norm, 1.0)) > 1e-5
        assert sure.any(), path
        decay = 0.1 * old[path] if path[-1].key == "kernel" else 0
        want = -rate * (np.sign(slope) + decay)
        np.testing.assert_allclose((new[path] - old[path])[sure], want[sure], rtol=5e-3)


@pytest.mark.parametrize(
    ("param_dtype", "weight", "accumulate"),
    [
        pytest.param(jnp.float16, 1e4, 2, id="accumulated"),
        pytest.param(jnp.float32, 1e6, 1, id="float32-weights", marks=pytest.mark.slow),
    ],
)
def test_float16_trains_whatever_the_sum_of_the_weights(param_dtype, weight, accumulate):
    """The sum of the losses, and of their gradients, is beyond float16's largest number."""
    initial, loss, grads, norm = truth()
    config = dataclasses.replace(SMALL, dtype=jnp.float16, param_dtype=param_dtype)
    # A rate so large that rounded weights of 1 show what they are moved by.
    rate = 32
    mesh, sgd = make_mesh(), optax.sgd(rate)
    params: Any = abstract_decoder(config, mesh=mesh)[1]
    start = jax.tree.map(lambda x: x.astype(param_dtype), initial)
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.array, start))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowPrecisionWeights)
        graphdef, params, state = init_train_state(
            config, sgd, mesh, 0, params=params, layout="contiguous"
        )
    batch: Any = make_batch(ROWS, segment_ids=SEGMENTS)
    # Copies of the batch: the mean is the same, the sum is not.
    batch = jax.tree.map(lambda x: np.tile(x, (accumulate, 1)), batch)
    placed = place_batch(batch | {"weights": np.float32(weight) * batch["weights"]}, mesh)
    step = make_train_step(graphdef, sgd, compiler_options=QUICK, accumulate=accumulate)
    params, _, metrics = step(params, state, placed)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-3)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-2)
    assert float(metrics["targets"]) == weight * accumulate * (19 + 30)
    for old, new, want in zip(
        *map(jax.tree.leaves, (start, nnx.to_pure_dict(params), grads)), strict=True
    ):
        got = (np.float64(old) - np.float64(new)) / rate
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_steps_reduce_the_loss_in_donated_replicated_state():
    run = trained()
    for state in run.donated:  # Weights and optimizer state.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for leaf in jax.tree.leaves((run.params, run.opt_state)):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.mesh.shape == {"data": 2, "seq": 2, "model": 1}
    assert {leaf.dtype for leaf in jax.tree.leaves(run.params)} == {jnp.dtype(jnp.float32)}
    assert run.before.nll == pytest.approx(np.log(48), abs=0.2)
    assert run.after.nll < run.before.nll - 0.5
    assert run.after.perplexity == pytest.approx(np.exp(run.after.nll))
    assert run.after.tokens == 2 * run.before.tokens
    # A batch without targets.
    assert [run.empty[name] for name in ("loss", "grad_norm", "targets")] == [0, 0, 0]
    schedule: Any = jax.jit(optimizer_of().schedule)
    rates = [float(schedule(jnp.int32(index))) for index in range(SMALL_STEPS)]
    assert [m["learning_rate"] for m in run.history] == pytest.approx(rates)


@pytest.mark.slow
def test_a_step_over_explicit_axes_is_that_over_auto_axes_and_keeps_shardings():
    mesh = mesh_of(AxisType.Explicit, data=2, seq=2)

    def split(x):
        """Sharded along its last dimension, if that is not the layers'."""
        spec = [None] * (x.ndim - 1) + ["seq"] if x.ndim > 1 else []
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    options = {"batch_axis": "data", "layout": "zigzag"}
    graphdef, *states = init_train_state(SMALL, optimizer_of(), mesh, 0, **options)
    params, opt_state = jax.tree.map(split, states)
    before = jax.tree.map(lambda x: x.sharding, params)
    train_step = make_train_step(graphdef, optimizer_of(), chunk_size=7, compiler_options=QUICK)
    params, opt_state, metrics = train_step(params, opt_state, batch_on(mesh))
    assert jax.tree.map(lambda x: x.sharding, params) == before
    want = trained()
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(want.history[0][name], rel=1e-5)
    # The first moments are the gradients, and the weights have moved by their signs.
    assert_close(jax.device_get(nnx.to_pure_dict(params)), want.first, 1e-4)
    state: Any = opt_state
    assert_close(jax.device_get(state[1].mu), want.first_moments, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_training_weights_in_16_bits_warns(dtype):
    """But not of frozen ones."""
    half = dataclasses.replace(SMALL, dtype=dtype, param_dtype=dtype)
    message = f"are {jnp.dtype(dtype).name}: .* keep them in float32, by param_dtype=jnp.float32 of"

    def init(config):
        params = decoders.drawn(abstract_decoder(config)[1])
        init_train_state(config, optax.sgd(1.0), make_mesh(), 0, params=params)

    with pytest.warns(LowPrecisionWeights, match=message) as caught:
        init(half)
    assert [each.filename for each in caught] == [__file__]
    init(dataclasses.replace(half, lora=Lora(2)))  # Warnings are errors here.


def test_the_dimension_of_the_layers_must_not_be_sharded():
    mesh = make_mesh(2, 2, kind=AxisType.Explicit)
    graphdef, params = abstract_decoder(SMALL, mesh=mesh)

    def split(path, x):
        spec = jax.P("data") if path[0].key == "layers" else jax.P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(split, params)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"layers\['attention'\].* dimension 0 is that of the la"):
        jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x, x), params, tokens)


# --- evaluation ----------------------------------------------------------------------------------


def test_the_mean_is_over_targets_not_batches():
    sums = iter(((6.0, 4.0), (30.0, 8.0), (0.0, 0.0)))
    eval_step: Any = lambda params, batch: next(sums)  # noqa: E731 - called once per batch
    params: Any = None
    batches: Any = [{}] * 3
    result = evaluate(eval_step, params, batches)
    assert (result.nll, result.tokens) == (3.0, 12)
    assert result.perplexity == pytest.approx(np.exp(3.0))
    sums = iter([(1e6, 1.0)])
    assert evaluate(eval_step, params, batches[:1])[:2] == (1e6, math.inf)  # Not an OverflowError.
    with pytest.raises(ValueError, match="batches hold no targets"):
        evaluate(eval_step, params, [])


def test_an_evaluation_checks_only_its_first_successful_call(monkeypatch):
    """Each check merges the model, which is slow; a mistake is reported again."""
    checks = []

    def check(_):
        checks.append("check")
        if len(checks) == 1:
            raise ValueError("split")

    weighed = lambda model, batch, chunk_size: (batch["weights"].sum(),) * 2  # noqa: E731
    monkeypatch.setattr(Decoder, "reject_sharded_weights", check)
    monkeypatch.setattr(evaluation, "next_token_loss", weighed)
    graphdef, params = abstract_decoder(SMALL, mesh=make_mesh(), layout="zigzag")
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    eval_step = make_eval_step(graphdef)
    batch = place_batch(make_batch(ROWS, layout="zigzag"), make_mesh())
    with pytest.raises(ValueError, match="split"):
        eval_step(params, batch)
    results = [eval_step(params, batch) for _ in range(3)]
    assert len(checks) == 2
    assert {float(total) for total, _ in results} == {float(batch["weights"].sum())}
