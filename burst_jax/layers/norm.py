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
        return self.with_mean(x, mean_square(x, self.epsilon))

    def with_mean(self, x: jax.Array, mean_square: jax.Array) -> jax.Array:
        """The same, given :func:`mean_square` of ``x``, epsilon included."""
        normed = x.astype(jnp.float32) * jax.lax.rsqrt(mean_square)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)


def mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    """``mean(x^2) + epsilon`` over the last axis, float32 ``[..., 1]``.

    Both constants are inside the sum: XLA runs sum and normalization as one kernel, but for a
    single row only if there is no constant between them.
    """
    return jnp.sum((jnp.square(x.astype(jnp.float32)) + epsilon) / x.shape[-1], -1, keepdims=True)
