"""Merging attention over two disjoint sets of keys by log-sum-exp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_weights(lse_a: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights ``(w_a, w_b)`` and the joint lse of two partial results.

    ``w = exp(lse - m) / sum exp(lse - m)`` with m the larger lse: neither overflows, and -inf (no
    keys) on either side or on both is exact: weights 0 and 1, or 0 and 0 with lse -inf.
    """
    m = jnp.maximum(lse_a, lse_b)
    m = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)
    a, b = jnp.exp(lse_a - m), jnp.exp(lse_b - m)
    total = a + b
    empty = total == 0
    # Where there are no keys, the gradients of 1 / total and of log(total) would be 0 / 0.
    total = jnp.where(empty, jnp.ones_like(total), total)
    share = 1 / total
    lse = jnp.where(empty, jnp.full_like(total, -jnp.inf), m + jnp.log(total))
    return a * share, b * share, lse


def merge(
    o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two key sets from the attention over each.

    Args:
      o_a: float32 ``[..., Hv]``, softmax-normalized over the first keys; 0 where there are none.
      lse_a: float32 ``[...]``, natural log of the softmax's denominator; -inf where there are none.
      o_b: as ``o_a``, over the second keys.
      lse_b: as ``lse_a``, over the second keys.

    Returns:
      ``(o, lse)``, float32, shaped as ``(o_a, lse_a)``.
    """
    w_a, w_b, lse = merge_weights(lse_a, lse_b)
    return o_a * w_a[..., None] + o_b * w_b[..., None], lse
