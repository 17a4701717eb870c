"""Root mean square normalization, computed in float32 for activations of any dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + epsilon) * (offset + scale)`` over the last axis.

    Zhang and Sennrich 2019.

    Args:
      features: length of the last axis.
      epsilon: added to the mean square.
      offset: added to ``scale``; 1 for weights stored as differences from 1, as in Gemma.
      param_dtype: floating dtype of ``scale``, ``[features]``, initialized to ``1 - offset``.
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.epsilon = epsilon
        self.offset = offset
        self.scale = nnx.Param(jnp.full((features,), 1 - offset, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes the last axis of ``x``, ``[..., features]``; the result has its dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)
