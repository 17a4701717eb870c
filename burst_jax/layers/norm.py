"""Root mean square normalisation, computed in float32 whatever the dtype of the activations."""

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
      offset: added to ``scale``; with 1 the weights are differences from 1, as Gemma's are.
      param_dtype: floating dtype of ``scale``, ``[features]``, which starts at ``1 - offset``.
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
        """Normalises the last axis of ``x``.

        Args:
          x: ``[..., features]``, any floating dtype; computed in float32.

        Returns:
          ``[..., features]`` in the dtype of ``x``.
        """
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)
