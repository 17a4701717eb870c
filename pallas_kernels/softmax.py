"""How an online softmax begins and ends. All kernels share both, whatever their tiles are.

Between begin and end a kernel visits tiles of keys. For every row it keeps the largest score so far
``m`` and ``total``, the sum of ``base^(score - m)`` over the keys seen.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.score import LOG2_E

# The first m. It is finite, so that a row with nothing allowed yet never computes -inf - -inf.
FLOOR = -1e30


def start(
    shape: tuple[int, ...], sink: jax.Array | None, base: Literal["2", "e"] = "2"
) -> tuple[jax.Array, jax.Array]:
    """``(m, total)`` of rows that have seen no key.

    Args:
      shape: the rows'.
      sink: the logit that a row begins with, as if it had seen a key whose value is 0. It
        broadcasts against the rows. None: the row begins with nothing.
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
    """What a row divides its sum of values by, and its natural log-sum-exp.

    Args:
      m: float32, the row's largest score, in ``base``.
      total: float32, shaped as m: the sum of ``base^(score - m)``; 0 if the row has seen no key.
      base: "2" where scores carry a factor log2(e) and weights come from exp2, else "e".

    Returns:
      ``(divisor, lse)``: ``(total, m + log(total))`` in natural logarithms. A row that has seen no
      key has divisor 1, so that its output is 0, and lse -inf.
    """
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    natural = m / LOG2_E if base == "2" else m
    return divisor, jnp.where(empty, -jnp.inf, natural + jnp.log(divisor))
