"""The one definition of a score and of the mask; reference, XLA and Pallas kernels all use it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.spec import AttentionSpec

LOG2_E = math.log2(math.e)


def scaled_logits(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    """``scale * products``, soft-capped to ``c * tanh(. / c)`` if the spec has a cap c."""
    logits = products * spec.scale
    if spec.logits_soft_cap is None:
        return logits
    return spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)


def products_gradient(
    spec: AttentionSpec, logits: jax.Array, logits_gradient: jax.Array
) -> jax.Array:
    """Gradient with respect to the scaled products, before the soft cap.

    ``d/dx c tanh(x / c) = 1 - tanh(x / c)^2``, and ``logits`` is ``c tanh(x / c)`` already.
    The caller multiplies by the scale, once, after its last matmul.
    """
    if spec.logits_soft_cap is None:
        return logits_gradient
    return logits_gradient * (1 - (logits / spec.logits_soft_cap) ** 2)


def raw_scores(
    spec: AttentionSpec,
    products: jax.Array,
    tanh: Callable[[jax.Array], jax.Array] = jnp.tanh,
) -> jax.Array:
    """Scores up to a positive factor, :func:`log2_factor`."""
    if spec.logits_soft_cap is not None:
        return tanh(products * (spec.scale / spec.logits_soft_cap))
    return products if spec.scale > 0 else products * spec.scale


def log2_factor(spec: AttentionSpec) -> float:
    """What takes raw scores to scores in base 2, so that the softmax needs exp2 alone."""
    if spec.logits_soft_cap is not None:
        return spec.logits_soft_cap * LOG2_E
    return (spec.scale if spec.scale > 0 else 1.0) * LOG2_E


def products_slope(spec: AttentionSpec, raw: jax.Array, ds: jax.Array) -> jax.Array:
    """Gradient with respect to the scaled products: times the soft cap's slope, if there is one."""
    return ds if spec.logits_soft_cap is None else ds * (1 - raw * raw)


def allowed(
    spec: AttentionSpec,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Which scores count; None if all do.

    The query's and the key's arrays broadcast against each other (``[T, 1]`` and ``[1, S]``).
    Segment ids may have more axes than positions, in front; the result has as many as they have.
    Distances are compared, not shifted positions, so that a huge window cannot overflow int32.
    """
    tests = []
    if spec.left is not None:
        tests.append(q_positions - kv_positions <= spec.left)
    if spec.right is not None:
        tests.append(kv_positions - q_positions <= spec.right)
    if q_segment_ids is not None:
        assert kv_segment_ids is not None
        tests.append((q_segment_ids == kv_segment_ids) & (q_segment_ids != 0))
    return functools.reduce(both, tests) if tests else None


def both(mask: jax.Array, other: jax.Array) -> jax.Array:
    """``mask & other``, the one of lower rank broadcast over further axes in front.

    ``&`` alone would do it too, but not where ``jax_numpy_rank_promotion`` is "raise".
    """
    if mask.ndim > other.ndim:
        other = lax.expand_dims(other, range(mask.ndim - other.ndim))
    elif mask.ndim < other.ndim:
        mask = lax.expand_dims(mask, range(other.ndim - mask.ndim))
    return mask & other
