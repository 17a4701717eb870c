"""dQ as 64-bit integers: what a bitwise reproducible backward pass accumulates.

CTAs add to dQ in varying order. Sums of floating-point numbers depend on the order, those of
integers do not. The integers are dQ times ``2^46 / bound``, where no partial sum of dQ exceeds the
bound: the resolution is ``2^-46`` of the bound, and ``2^16`` times the bound still fits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.spec import AttentionSpec

_BITS = 46
# Smaller bounds would overflow the scale.
_SMALLEST = 1e-20


def dq_bound(
    inputs: AttentionInputs, spec: AttentionSpec, maximum: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """float32 ``[B, N]``, at least the largest absolute value of any partial sum of ``dS K``.

    A query's weights P add up to at most 1, so ``|dQ| = |sum P (dP - delta) K|`` is at most the
    largest ``|dP - delta|`` times the largest ``|K|``, where ``dP = dO V^T``. Derivatives of a
    ``score_mod`` may exceed 1: up to 2^16 is safe. If an input is not finite, neither is the bound.

    ``maximum``: of :class:`pallas_kernels.backend.DqAccumulator`, over the keys of all calls. The
    weights of all of them add up to at most 1.
    """
    do, stats = inputs.cotangents()

    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), axis=(1, 3)).astype(jnp.float32)

    of_keys = jnp.stack([largest(x) for x in (inputs.kv.k, inputs.kv.v)])
    # A maximum over devices may ignore NaN.
    of_keys = maximum(jnp.where(jnp.isnan(of_keys), jnp.inf, of_keys))
    k, v = jnp.repeat(of_keys, inputs.groups, axis=2)
    dp = largest(do) * v * inputs.value_dim
    if spec.dropout is not None:
        dp = dp * spec.dropout.unit
    return jnp.maximum((dp + jnp.max(jnp.abs(stats[1]), axis=2)) * k, _SMALLEST)


def scale(bound: jax.Array) -> jax.Array:
    """The factor from dQ to its fixed-point integers."""
    return 2.0**_BITS / bound


def to_float(x: jax.Array, bound: jax.Array) -> jax.Array:
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
    return jnp.where(negative, -value, value) * (bound * 2.0**-_BITS)
