"""Start and end of the online softmax, shared by all kernels.

In between, a kernel loops over KV tiles. Per query it keeps the largest score so far, ``m``, and
``total``, the sum of ``base^(score - m)`` over the keys so far.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.score import LOG2_E

# The initial m. It is finite, so that a query without keys so far never computes -inf - -inf.
FLOOR = -1e30


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
    m = jnp.maximum(sink, FLOOR)
    # 1, or 0 for a sink of -inf, which is no sink.
    return m, jnp.exp(sink - m)


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
      divisor is 1, so that the output is 0, and lse is -inf.
    """
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    natural = m / LOG2_E if base == "2" else m
    return divisor, jnp.where(empty, -jnp.inf, natural + jnp.log(divisor))
