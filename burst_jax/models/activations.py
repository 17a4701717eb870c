"""The activations of a feed-forward's gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    return lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """By the formula, ``-2 / sqrt(pi) exp(-x^2)``.

    JAX 0.12 differentiates ``lax.erfc`` and ``lax.erf`` of float32 by a polynomial whose
    coefficients do not vary over the mesh axes that x varies over, which a ``shard_map`` that
    checks varying axes rejects.
    """
    (x,), (tangent,) = primals, tangents
    return _erfc(x), -2 / math.sqrt(math.pi) * jnp.exp(-x * x) * tangent


def gelu(x: jax.Array) -> jax.Array:
    """``x / 2 * erfc(-x / sqrt(2))``: ``jax.nn.gelu`` with ``approximate=False``."""
    return 0.5 * x * _erfc(-x * math.sqrt(0.5))


# By DecoderConfig.activation.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
