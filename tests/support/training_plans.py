"""Plans of training steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

import burst_jax
from burst_jax.models import DecoderConfig
from burst_jax.plan import GPUS
from burst_jax.plan.presets import config_of

TINY = DecoderConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64,
    dtype=jnp.bfloat16, qkv_bias=True, post_norms=True,
)  # fmt: skip
LLAMA = config_of("llama-3-8b")
RING: Any = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "attention"}


def plan_of(config=LLAMA, length=2**17, moments: Any = "device", memory=None, **options):
    """The plan, optionally for H200s with so much memory in GiB."""
    if memory is not None:
        options["gpu"] = dataclasses.replace(GPUS["h200"], memory=memory)
    return burst_jax.plan.training(config, length=length, moments=moments, **options)


def one(plan, weights="sharded", **fields):
    """The first estimate whose strategy has these fields."""
    fields["weights"] = weights
    return next(
        each
        for each in plan.estimates
        if all(getattr(each.strategy, name) == value for name, value in fields.items())
    )
