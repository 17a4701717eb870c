"""Pipelines: what the layers of each stage keep."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import equations
from split_runs import CONFIG, losses, sized

from burst_jax import ShardingRules
from burst_jax.models import abstract_decoder

SIZES = (1, 1, 2, 2, 1)


def selective_in(count):
    return dataclasses.replace(CONFIG, remat="selective", remat_layers=count)


def traced_gradient(config):
    mesh = sized(SIZES)
    graphdef, shapes = abstract_decoder(
        config, mesh=mesh, rules=ShardingRules.of(mesh), layout="zigzag"
    )

    def gradient(params, tokens, positions):
        return jax.grad(lambda params: nnx.merge(graphdef, params)(tokens, positions).sum())(params)

    tokens = jax.ShapeDtypeStruct((4, 48), jnp.int32)
    return jax.make_jaxpr(gradient)(shapes, tokens, tokens).jaxpr


@pytest.mark.parametrize(("count", "of_stage"), [(2, 1), (4, 2)])
def test_each_stage_keeps_the_products_of_its_part_of_the_layers(count, of_stage):
    """The products of gate and up of the feed-forward; a stage has two layers."""
    kept = [
        out.aval.shape
        for equation, around in equations(traced_gradient(selective_in(count)))
        if equation.primitive.name == "scan" and "scan" not in around
        for out in equation.outvars
        if out.aval.ndim == 5 and out.aval.shape[-1] == CONFIG.mlp_dim
    ]
    # In each of three ticks, of two rows, and of the half of their tokens that a device has.
    assert kept == [(3, of_stage, 2, 24, CONFIG.mlp_dim)] * 2


def test_selective_layers_that_stages_cannot_share_raise():
    message = (
        r"remat_layers is 3, and the layers are in 2 stages, of which each has as many of them: "
        r"use a multiple of 2"
    )
    with pytest.raises(ValueError, match=message):
        traced_gradient(selective_in(3))


@pytest.mark.slow
def test_layers_that_keep_their_products_take_the_same_steps():
    for got, want, limit in zip(
        losses(SIZES, steps=3, config=selective_in(2)),
        losses((1, 1, 1, 1, 1), steps=3),
        (1e-5, 1e-4),  # Rounding moves norms of gradients more.
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=limit)
