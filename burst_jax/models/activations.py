"""The activations of a feed-forward's gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
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
    factor = np.asarray(-2 / np.sqrt(np.pi), x.dtype)
    return _erfc(x), factor * jnp.exp(-x * x) * tangent


def gelu(x: jax.Array) -> jax.Array:
    """``x / 2 * erfc(-x / sqrt(2))``: ``jax.nn.gelu`` with ``approximate=False``."""
    half, root = (np.asarray(value, x.dtype) for value in (0.5, np.sqrt(0.5)))
    return half * x * _erfc(-x * root)


# By DecoderConfig.activation.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
