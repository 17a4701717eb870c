"""Dropout of attention weights: the one definition of which weights are dropped.

    out = sum over keys of  kept(q, k) weight(q, k) v(k) / (1 - rate)

The weights are those of the softmax over all keys: lse does not know of dropout. Whether a weight
is kept depends on numbers of its own row and column alone, and not on where or when it is computed.
So it is the same on any number of devices, in every layout, for every tile, and in the backward
pass, which computes it again.

    kept  =  a(seed, p_q) c(p_k)  >=  threshold         (int32, wrapping around)

``seed`` is one random number for each batch row and query head, ``p`` are positions. a and c are
scrambled until nothing of the order of tokens is left, and odd. Then the product is uniform over
all odd int32. Two keys of a row, or two queries of a column, are kept independently of each other
but for one pair in millions, whose numbers happen to have a simple ratio: this is multiplicative
hashing, with a random multiplier for every row (Dietzfelbinger et al. 1997, "A reliable randomized
algorithm for the closest-pair problem"). All but one multiplication, one comparison and one
selection is work for each token, not for each score.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Dropout:
    """How many weights are dropped. Hashable, so that it can key a jit cache.

    Attributes:
      rate: the probability that a weight is dropped, from 0 up to but without 1.
    """

    rate: float

    def __post_init__(self):
        if not (math.isfinite(self.rate) and 0 <= self.rate < 1):
            raise ValueError(
                f"dropout_rate is {self.rate}: it must be a probability below 1, as 0.1; 0 is none"
            )

    @property
    def unit(self) -> float:
        """The factor on the weights that are kept: ``1 / (1 - rate)``."""
        return 1 / (1 - self.rate)

    @property
    def threshold(self) -> int:
        """The smallest product that keeps a weight, in -2^31 .. 2^31 - 1."""
        return min(round(self.rate * 2**32), 2**32 - 1) - 2**31

    def kept(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Which scores of a tile are kept.

        Args:
          rows: :func:`row_numbers` of the queries, which broadcast against the tile.
          columns: :func:`column_numbers` of the keys, which broadcast against the tile.
        """
        return rows * columns >= jnp.int32(self.threshold)


def row_numbers(seeds: jax.Array, q_positions: jax.Array) -> jax.Array:
    """a of queries. ``seeds``, int32, are those of their batch rows and heads."""
    return _scrambled(seeds ^ _scrambled(q_positions)) | jnp.int32(1)


def column_numbers(kv_positions: jax.Array) -> jax.Array:
    """c of keys."""
    # A number of its own, lest position 0 be scrambled to 0.
    return _scrambled(kv_positions ^ jnp.int32(0x3C6EF372)) | jnp.int32(1)


def _scrambled(x: jax.Array) -> jax.Array:
    """One-to-one: each bit of int32 ``x`` turns about half of the bits of the result.

    The two multipliers and the shifts are those of hash-prospector's ``lowbias32``, which were
    searched for by that measure (github.com/skeeto/hash-prospector, public domain).
    """
    x = (x ^ lax.shift_right_logical(x, jnp.int32(16))) * jnp.int32(0x7FEB352D)
    x = (x ^ lax.shift_right_logical(x, jnp.int32(15))) * jnp.int32(0x846CA68B - 2**32)
    return x ^ lax.shift_right_logical(x, jnp.int32(16))
