"""Start and end of the online softmax, shared by all kernels.

In between, a kernel loops over KV tiles. Per query it keeps the largest score so far, ``m``, and
``total``, the sum of ``base^(score - m)`` over the keys so far.

Kernels with base 2 compute ``score factor - m`` by one fused multiply-add, while ``m`` is rounded.
So all weights of a query contain one common factor ``2^d``, where d is that rounding error. It
cancels in the output and in lse, but weights overflow or vanish where it is large. Such queries are
NaN: see :data:`LARGEST`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.score import LOG2_E

# The initial m, at most every logit. It is finite, so that a query without keys so far never
# computes -inf - -inf.
FLOOR = float(jnp.finfo(jnp.float32).min)
# A kernel may keep an m that the largest score exceeds by no more than this, in base 2. Weights are
# then at most 2^8, and most tiles rescale nothing.
MARGIN = 8.0
# The largest |m| in base 2 for which kernels compute out and lse. m is then off by at most 2, so
# that the weights of every query, at most 2^10, also fit float16.
LARGEST = 2.0**26
# The largest |lse| in base 2 for which kernels compute gradients. The roundings of lse then change
# weights by at most 10 %.
LARGEST_LSE = 2.0**20
# The lse of a query that attends to no key, for gradients: all of its weights are 0.
NO_KEYS = 1e30


def start(
    shape: tuple[int, ...], sink: jax.Array | None, base: Literal["2", "e"] = "2"
) -> tuple[jax.Array, jax.Array]:
    """``(m, total)`` before the first key.

    Args:
      shape: of the queries.
      sink: sink logit, like a key whose value is 0, broadcast against the queries; None: none.
      base: of m, as in :func:`finish`.
    """
    if sink is None:
        return jnp.full(shape, FLOOR, jnp.float32), jnp.zeros(shape, jnp.float32)
    sink = jnp.broadcast_to(sink * (LOG2_E if base == "2" else 1.0), shape)
    # A sink of -inf is no sink.
    return jnp.maximum(sink, FLOOR), jnp.where(sink == -jnp.inf, 0.0, jnp.ones_like(sink))


def finish(
    m: jax.Array, total: jax.Array, base: Literal["2", "e"] = "2"
) -> tuple[jax.Array, jax.Array]:
    """The divisor of a query's sum of values, and its natural log-sum-exp.

    Args:
      m: float32, the largest score, in ``base``.
      total: float32, shape of m: the sum of ``base^(score - m)``; 0 without keys.
      base: "2" if scores include a factor log2(e) and weights come from exp2, else "e".

    Returns:
      ``(divisor, lse)``: ``(total, m + log(total))`` in natural logarithms. Without keys the
      divisor is 1, so that the output is 0, and lse is -inf. In base 2 both are NaN if m exceeds
      :data:`LARGEST`.
    """
    total = checked(m, total) if base == "2" else total
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    natural = m / LOG2_E if base == "2" else m
    return divisor, jnp.where(empty, -jnp.inf, natural + jnp.log(divisor))


def checked(m: jax.Array, total: jax.Array) -> jax.Array:
    """``total`` in base 2, NaN for queries whose ``|m|`` exceeds :data:`LARGEST`."""
    too_large = (jnp.abs(m) > LARGEST) & (m != FLOOR)
    return jnp.where(too_large, jnp.nan, total)


def stats_in_base_2(lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(lse in base 2, delta)``, from which kernels compute gradients.

    The lse of a query that attends to no key becomes so large that all of its weights are 0. Both
    are NaN for queries whose ``|lse|`` exceeds :data:`LARGEST_LSE`.
    """
    scaled, no_keys = lse * LOG2_E, lse == -jnp.inf
    too_large = (jnp.abs(scaled) > LARGEST_LSE) & ~no_keys
    scaled, delta = (jnp.where(too_large, jnp.nan, x) for x in (scaled, delta))
    return jnp.where(no_keys, NO_KEYS, scaled), delta
