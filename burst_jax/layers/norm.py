"""Root mean square normalization, computed in float32 for activations of any dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from burst_jax.errors import shown
from burst_jax.parallel.mesh import AxisNames, flat_names


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


class JointRMSNorm(nnx.Module):
    """RMS normalization of the features of all heads of a token together, as in OLMo 2.

    ``x / sqrt(mean(x^2) + epsilon) * (offset + scales)`` for ``[B, T, heads, H]``, the mean over
    the last two axes. Inside a ``shard_map`` the heads are one device's, and the mean is that of
    all devices along ``heads_axis``, on each of which as many heads are.

    Args:
      num_heads: number of heads.
      head_dim: number of features of a head, H.
      epsilon: added to the mean square.
      offset: added to ``scales``.
      heads_axis: mesh axis, or axes, that shard the heads.
      param_dtype: floating dtype of ``scales``, ``[heads, H]``, initialized to ``1 - offset``.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        heads_axis: AxisNames = None,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.epsilon, self.offset, self.heads_axis = epsilon, offset, heads_axis
        self.scales = nnx.Param(jnp.full((num_heads, head_dim), 1 - offset, param_dtype))

    def __call__(self, x: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """Normalizes ``[B, T, heads, H]``; the result has its dtype.

        ``first`` is the index in ``scales`` of the first head, where ``x`` has some of them; None
        is 0.
        """
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), (-2, -1), keepdims=True)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if axes := tuple(name for name in flat_names(self.heads_axis) if name in manual):
            mean = lax.pmean(mean, axes)
        scales = self.scales[...]
        if first is not None and scales.shape[0] != x.shape[-2]:
            scales = lax.dynamic_slice_in_dim(scales, first, x.shape[-2])
        scales = scales.astype(jnp.float32) + self.offset
        return (wide * lax.rsqrt(mean + self.epsilon) * scales).astype(x.dtype)


def mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    """``mean(x^2) + epsilon`` over the last axis, float32 ``[..., 1]``.

    Both constants are inside the sum: XLA runs sum and normalization as one kernel, but for a
    single row only if there is no constant between them.
    """
    return jnp.sum((jnp.square(x.astype(jnp.float32)) + epsilon) / x.shape[-1], -1, keepdims=True)


def check_qk_norm(value: object) -> None:
    """Raises ValueError unless it is one of the norms of queries and keys of a layer."""
    if value != "joint" and not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"qk_norm is {shown(value)}: use True, False or 'joint'")
