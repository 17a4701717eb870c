"""Draws a layer's low-rank adapters, by the library qwix.

qwix makes A and B of each projection, before layers are stacked: their names and shapes, A at
random, B zero. The products with them are this library's own (:mod:`burst_jax.layers.low_rank`).
qwix's would have to replace ``jax.lax.dot_general`` while the decoder is traced, and would not see
the feed-forward, whose gradient is written by hand (``EXPERIMENTS.md``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from burst_jax.errors import optional
from burst_jax.layers.low_rank import LORA_A, LORA_B, Linear, set_adapter
from burst_jax.models.lora_config import Lora


def draw_adapters(projections: Mapping[str, Linear], lora: Lora, rngs: nnx.Rngs) -> None:
    """Gives projections adapters with which they compute what they did, as B is zero.

    Args:
      projections: a layer's projections by name.
      lora: which of them get adapters, of which rank.
      rngs: random numbers (stream "params").

    Raises:
      ImportError: the library qwix is missing.
    """
    for name in lora.projections:
        linear = projections[name]
        set_adapter(linear, *_drawn(linear, lora, rngs), lora.scale)


def _drawn(linear: Linear, lora: Lora, rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """A and B, float32 whatever the dtype of the weights is."""
    qwix = optional("qwix", user="a low-rank adapter", extra="lora")
    # qwix gives an adapter the dtype of its kernel, and finds it by running the projection.
    stand_in = nnx.clone(linear)
    stand_in.kernel = nnx.Param(jnp.zeros(linear.kernel.shape, jnp.float32))
    stand_in.bias, stand_in.use_bias, stand_in.dtype = None, False, jnp.float32
    features = linear.in_features
    features = (features,) if isinstance(features, int) else tuple(features)
    provider = qwix.LoraProvider(module_path=".*", rank=lora.rank, alpha=lora.scale * lora.rank)
    with warnings.catch_warnings():
        # qwix calls methods that Flax has given other names since.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = qwix.apply_lora_to_model(
            stand_in, provider, jnp.zeros((1, *features), jnp.float32), rngs=rngs
        )
    return getattr(found, LORA_A)[...], getattr(found, LORA_B)[...]
