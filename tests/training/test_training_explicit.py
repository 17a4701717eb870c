"""Training over Explicit mesh axes, with weights that are split over them too."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import QUICK, quick_jit
from jax.sharding import AxisType
from meshes import assert_close, make_mesh
from trainings import CONFIG, ROWS, B, T, dense_results, loss_inputs, trained

from burst_jax.models import Decoder, abstract_decoder
from burst_jax.training import (
    chunked_cross_entropy,
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    next_token_loss,
    place_batch,
)


def test_loss_over_explicit_axes_takes_targets_from_anywhere():
    hidden, kernel, targets, _ = loss_inputs()
    targets = jnp.maximum(targets, 0)
    mesh = make_mesh(2, 4, kind=AxisType.Explicit)
    placed = jax.device_put(hidden, jax.NamedSharding(mesh, jax.P("data", "seq")))
    split = jax.device_put(kernel, jax.NamedSharding(mesh, jax.P(None, "data")))
    with jax.set_mesh(mesh):
        total, _ = chunked_cross_entropy(placed, split, targets, batch_axis="data")
    ones = jnp.ones((B, T), jnp.float32)
    np.testing.assert_allclose(total, dense_results(hidden, kernel, targets, ones, 1)[0], rtol=1e-6)


@pytest.mark.slow
def test_explicit_axes_train_too():
    explicit = trained(2, 2, steps=3, kind=AxisType.Explicit)[4]
    auto = trained(2, 2)[4]
    assert explicit[0]["loss"] == pytest.approx(auto[0]["loss"], rel=1e-6)
    assert explicit[0]["grad_norm"] == pytest.approx(auto[0]["grad_norm"], rel=1e-5)


def split_over(axis, mesh, tree):
    """The arrays, each split along the last dimension that the mesh axis divides."""

    def place(x):
        spec = [None] * x.ndim
        fits = [d for d in range(x.ndim) if d > 0 and x.shape[d] % mesh.shape[axis] == 0]
        for dim in fits[-1:]:
            spec[dim] = axis
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    return jax.tree.map(place, tree)


@functools.cache
def whole_weights():
    return nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh()))


def loss_and_gradients(names, sizes, kinds, batch_axis, split_axis):
    mesh = jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: math.prod(sizes)])
    config = dataclasses.replace(CONFIG, remat="none")
    graphdef, _ = abstract_decoder(config, mesh=mesh, batch_axis=batch_axis, layout="zigzag")
    params = split_over(split_axis, mesh, whole_weights())
    batch = make_batch(ROWS, layout="zigzag", num_shards=mesh.shape["seq"])
    batch = place_batch(batch, mesh, batch_axis=batch_axis)

    @quick_jit
    @jax.value_and_grad
    def loss(params):
        return next_token_loss(nnx.merge(graphdef, params), batch, chunk_size=7)[0]

    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(params)}
    return *jax.device_get(loss(params)), specs


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPLITS = {
    "seq": (("data", "seq"), (2, 2), (EXPLICIT, EXPLICIT), "data", "seq"),
    "fsdp-beside-auto": (
        ("data", "fsdp", "seq"), (1, 2, 2), (AUTO, EXPLICIT, AUTO), "data", "fsdp",
    ),
}  # fmt: skip


@functools.cache
def one_device_gradients():
    return loss_and_gradients(("data", "seq"), (1, 1), (AUTO, AUTO), "data", "data")


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_weights_may_be_split_over_explicit_axes(split):
    loss, gradients, specs = loss_and_gradients(*split)
    want, want_gradients, _ = one_device_gradients()
    assert any(split[-1] in spec for spec in specs)
    assert loss == pytest.approx(want, rel=1e-6)
    assert_close(gradients, want_gradients, 1e-5)


@pytest.mark.slow
def test_split_weights_take_the_step_and_stay_split():
    mesh = make_mesh(2, 2, kind=EXPLICIT)
    optimizer = make_optimizer(1e-2, 12, warmup_steps=2)
    options = {"batch_axis": "data", "layout": "zigzag"}
    graphdef, *states = init_train_state(CONFIG, optimizer, mesh, 0, **options)
    params, opt_state = split_over("data", mesh, states)
    before = jax.tree.map(lambda x: x.sharding, params)
    batch = place_batch(make_batch(ROWS, layout="zigzag", num_shards=2), mesh, batch_axis="data")
    step = make_train_step(graphdef, optimizer, chunk_size=7, compiler_options=QUICK)
    params, _, metrics = step(params, opt_state, batch)
    assert jax.tree.map(lambda x: x.sharding, params) == before
    want = trained(2, 2)[4][0]
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(want[name], rel=1e-5)


def test_the_axis_of_the_layers_is_not_to_be_split():
    mesh = make_mesh(2, 2, kind=EXPLICIT)
    graphdef, _ = abstract_decoder(CONFIG, mesh=mesh)
    params = jax.device_put(whole_weights(), jax.NamedSharding(mesh, jax.P()))
    params["layers"] = jax.device_put(params["layers"], jax.NamedSharding(mesh, jax.P("data")))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"layers\['attention'\].* first axis counts the layers"):
        jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x, x), params, tokens)
