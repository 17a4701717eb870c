"""Dropout of attention weights: the one definition of which weights are dropped.

    out = sum over keys of  kept(q, k) weight(q, k) v(k) / (1 - rate)

The weights are those of the softmax over all keys: lse does not depend on dropout. Whether a weight
is kept depends on a hash of its query and a hash of its key only. So it is the same on any number
of devices, in every layout, with every tile size, and in the backward pass, which recomputes it.

    kept  =  a(seed, p_q) c(p_k)  >=  threshold         (int32, wrapping around)

``seed`` is one random number per batch index and query head, ``p`` are positions. a and c are odd
hashes. Their product is uniform over all odd int32. Two keys of a query, or two queries of a key,
are kept independently except for one pair in millions, whose hashes have a simple ratio: this is
multiplicative hashing, with a random multiplier per query (Dietzfelbinger et al. 1997, "A reliable
randomized algorithm for the closest-pair problem"). Per score it costs one multiplication, one
comparison and one selection; everything else is per token.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of weights. Hashable, so that it can be part of a jit cache key.

    Attributes:
      rate: the probability that a weight is dropped, in [0, 1).
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
          rows: :func:`row_hashes` of the queries, broadcast against the tile.
          columns: :func:`column_hashes` of the keys, broadcast against the tile.
        """
        return self.keeps(score_hashes(rows, columns))

    def keeps(self, hashes: jax.Array) -> jax.Array:
        """Which scores are kept, by :func:`score_hashes`."""
        return hashes >= jnp.int32(self.threshold)


def score_hashes(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Hashes of scores, of which those from :attr:`Dropout.threshold` on keep their weights."""
    return rows * columns


def row_hashes(seeds: jax.Array, q_positions: jax.Array) -> jax.Array:
    """a of queries. ``seeds``: int32, of their batch indices and heads."""
    return _scrambled(seeds ^ _scrambled(q_positions)) | jnp.int32(1)


def column_hashes(kv_positions: jax.Array) -> jax.Array:
    """c of keys."""
    # Another constant than for queries; position 0 would hash to 0 without one.
    return _scrambled(kv_positions ^ jnp.int32(0x3C6EF372)) | jnp.int32(1)


def _scrambled(x: jax.Array) -> jax.Array:
    """A one-to-one hash: each bit of int32 ``x`` flips about half of the bits of the result.

    The two multipliers and the shifts are those of hash-prospector's ``lowbias32``, which were
    optimized for that property (github.com/skeeto/hash-prospector, public domain).
    """
    x = (x ^ lax.shift_right_logical(x, jnp.int32(16))) * jnp.int32(0x7FEB352D)
    x = (x ^ lax.shift_right_logical(x, jnp.int32(15))) * jnp.int32(0x846CA68B - 2**32)
    return x ^ lax.shift_right_logical(x, jnp.int32(16))
