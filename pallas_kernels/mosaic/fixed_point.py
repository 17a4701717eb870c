"""dQ as integers: what a bitwise reproducible backward pass accumulates.

CTAs add to dQ in varying order. Sums of floating-point numbers depend on the order, those of
integers do not. The integers are dQ times ``2^b / bound``, where no element of dQ exceeds the
bound. Partial sums may exceed it: two's complement wraps around, and the sum of all parts is right
again.

The sm80 kernel adds 64-bit integers (b = 46). A bound per head is enough, and ``2^16`` times the
bound still fits. The sm90 kernel adds by TMA, which has 32-bit integers (b = 30): there each query
has its own bound, and ``2`` times the bound still fits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.spec import AttentionSpec

_BITS_64 = 46
_BITS_32 = 30
# Smaller bounds would overflow the factors.
_SMALLEST = 1e-20


def dq_bound(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    maximum: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """float32 ``[B, N, T]``, at least the largest absolute value of each query's ``dS K``.

    A query's weights P add up to at most 1. So ``dS K = sum P (dP - delta) K`` is at most the
    largest ``(|dP| + |delta|) |K|`` of all keys, where ``dP = dO V^T`` is at most ``|dO| |V|`` by
    the Cauchy-Schwarz inequality. The largest ``|V| |K|`` of a key is smaller than the product of
    the largest ``|V|`` and the largest ``|K|``. If an input is not finite, or an lse too large, the
    bound is not finite either.

    It does not hold if the derivative of a ``score_mod`` exceeds 1.

    ``maximum``: of :class:`pallas_kernels.backend.DqAccumulator`, over the keys of all calls. The
    weights of all of them add up to at most 1.
    """
    do, stats = inputs.cotangents()
    _, delta = softmax.stats_in_base_2(*stats)

    def norms(x: jax.Array) -> jax.Array:
        """At least the norm of each token and head, ``[B, heads, T]``."""
        x = x.astype(jnp.float32)
        norm, largest = jnp.sqrt(jnp.sum(x * x, axis=3)), jnp.max(jnp.abs(x), axis=3)
        # Squares of other numbers may underflow or overflow.
        is_exact = (norm > 1e-15) & (norm < jnp.inf)
        return jnp.where(is_exact, norm, largest * x.shape[3] ** 0.5).swapaxes(1, 2)

    k = jnp.max(jnp.abs(inputs.kv.k), axis=3).astype(jnp.float32).swapaxes(1, 2)
    largest = jnp.max(jnp.stack([k * norms(inputs.kv.v), k]), axis=3)
    # A maximum over devices may ignore NaN.
    largest = maximum(jnp.where(jnp.isnan(largest), jnp.inf, largest))
    kv, k = jnp.repeat(largest, inputs.groups, axis=2)[..., None]
    dp = norms(do) * kv
    if spec.dropout is not None:
        dp = dp * spec.dropout.unit
    return dp + jnp.abs(delta) * k


def factor_64(bound: jax.Array) -> jax.Array:
    """The factor from dQ to 64-bit integers."""
    return 2.0**_BITS_64 / jnp.maximum(bound, _SMALLEST)


def factor_32(bound: jax.Array) -> jax.Array:
    """The factor from dQ to 32-bit integers."""
    return 2.0**_BITS_32 / jnp.maximum(bound, _SMALLEST)


def from_64(x: jax.Array, bound: jax.Array) -> jax.Array:
    """float32 ``[...]`` of int32 ``[..., 2]``, low and high halves of 64-bit integers.

    The result is not finite where the bound is not.
    """
    low, high = x[..., 0].astype(jnp.uint32), x[..., 1]
    # The absolute value is converted: the low half of a small negative integer is close to 2^32,
    # which would be rounded.
    negative = high < 0
    high = jnp.where(negative, ~high + (low == 0).astype(jnp.int32), high)
    low = jnp.where(negative, ~low + jnp.uint32(1), low)
    value = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
    return jnp.where(negative, -value, value) * (jnp.maximum(bound, _SMALLEST) * 2.0**-_BITS_64)


def from_32(x: jax.Array, bound: jax.Array) -> jax.Array:
    """float32 of int32. The result is not finite where the bound is not."""
    return x.astype(jnp.float32) * (jnp.maximum(bound, _SMALLEST) * 2.0**-_BITS_32)
