"""Mixtures of experts in a decoding step: few tokens, and the same tokens on all devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import interpreted_sm80
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_by_formula import CONFIG, X, layer_of
from implementations import quick_jit
from meshes import random_like

from burst_jax.models import (
    Experts,
)
from burst_jax.models.experts import decoding
from burst_jax.models.experts import mixture as moe
from pallas_kernels.mosaic.sm80 import few_rows
from pallas_kernels.timing import relative_error


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (1, {}),
        (5, {"experts": Experts(6, 3, clamp=0.5), "mlp_bias": True}),
        (3, {"experts": Experts(5, 2, shared_dim=64, shared_gate=True)}),
    ],
)
def test_few_tokens_read_each_expert_once(monkeypatch, tokens, fields):
    """The decoding path's kernels, interpreted, next to the path of many tokens."""
    config = dataclasses.replace(CONFIG, embed_dim=64, mlp_dim=64, dtype=jnp.bfloat16, **fields)
    layer = layer_of(config)
    x = random_like(jax.ShapeDtypeStruct((tokens, 1, 64), jnp.bfloat16), 1)
    experts: Any = config.experts

    @quick_jit
    def of_many_tokens(x):
        logits = layer.router(x[:, 0].astype(jnp.float32))
        return layer(x, keeps_products=False), jax.lax.top_k(logits, experts.per_token)[1]

    wanted, chosen = of_many_tokens(x)
    layer = layer.decoding(hidden_axis=None, same_tokens_axis=None)
    monkeypatch.setattr(moe, "can_decode", lambda *_: True)

    @quick_jit
    def decode(x):
        read = []

        def product(x, weights, slots, **options):
            read.append((slots.matrices, slots.count))
            assert bool(options["first"]) == bool(experts.shared_dim)
            return few_rows.few_rows_product(x, weights, slots, **options)

        monkeypatch.setattr(decoding, "few_rows_product", product)
        return layer(x, keeps_products=False), read

    monkeypatch.setattr(few_rows, "num_sms", lambda: 4)
    with interpreted_sm80.interpreted():
        found, read = jax.block_until_ready(decode(x))
    assert read
    for matrices, number in read:
        used = matrices[: number[0]].tolist()
        assert sorted(used) == sorted(set(chosen.reshape(-1).tolist()))
    # The other path rounds the shared expert's output, and then the sum.
    assert relative_error(found, wanted) < (8e-3 if experts.shared_dim else 5e-3)


@pytest.mark.parametrize("fields", [{}, {"normalize": False}, {"score": "sigmoid"}])
def test_decoding_chooses_and_weighs_experts_as_other_passes_do(fields):
    config = dataclasses.replace(CONFIG, experts=Experts(7, 3, **fields))
    layer = layer_of(config)
    decoding_layer = layer.decoding(hidden_axis=None, same_tokens_axis=None)

    @quick_jit
    def both(x):
        return [each(x, keeps_products=False) for each in (decoding_layer, layer)]

    assert relative_error(*both(np.float32(X))) < 1e-6


def test_the_largest_logits():
    """Equal ones in ascending order; indices that exist, whatever the logits are."""
    logits = np.random.default_rng(0).integers(-3, 3, (5, 12)).astype(np.float32)
    values, index = decoding.largest(jnp.asarray(logits), 7)
    wanted = jax.lax.top_k(logits, 7)
    assert (values == wanted[0]).all()
    assert (index == wanted[1]).all()
    logits[:, ::2] = np.nan
    index = decoding.largest(jnp.asarray(logits), 7)[1]
    assert (index >= 0).all()
    assert (index < 12).all()


def test_decoding_skips_experts_of_other_devices():
    slots = decoding._hit(jnp.asarray([[4, 1], [1, 5], [3, 5]], jnp.int32), 5)
    assert slots.count.tolist() == [3]
    assert slots.matrices.tolist()[:3] == [1, 3, 4]
