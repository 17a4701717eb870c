"""Rounding to bfloat16 at random, the same on every mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# The bits that float32 has beyond bfloat16.
_DROPPED = 0xFFFF


def random_words(
    seed: jax.Array, shape: Sequence[int], starts: Sequence[jax.typing.ArrayLike]
) -> jax.Array:
    """A random word for each element, which depends on the seed and the element's index alone.

    So a device that has a part of an array draws what it would draw for it with the whole array, in
    whatever parts it takes its part, and nothing is kept between calls.

    Args:
      seed: uint32 scalar.
      shape: the part's shape.
      starts: the index in the whole array of the part's first element, a number for each dimension.

    Returns:
      uint32 of ``shape``, evenly distributed.
    """
    words = seed
    for size, start in zip(shape, starts, strict=True):
        index = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start, jnp.uint32)
        words = mixed(words[..., None] ^ index)
    return words


def mixed(words: jax.Array) -> jax.Array:
    """Maps uint32 words one to one to others that look random.

    Shifts and multiplications in turns, as in the last step of MurmurHash3; the constants are those
    of Chris Wellons' search for the least bias, https://nullprogram.com/blog/2018/07/31/.
    """
    words = (words ^ (words >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return words ^ (words >> jnp.uint32(16))


def round_at_random(x: jax.Array, words: jax.Array) -> jax.Array:
    """``x`` in bfloat16, rounded up as often as the part that is dropped says.

    A value a quarter of the way between two bfloat16 becomes the upper one in a quarter of all
    cases, so that the mean of many roundings is the value itself.

    Args:
      x: float32.
      words: uint32 of the same shape, whose lower 16 bits are random.

    Returns:
      bfloat16 of the same shape; what is infinite or not a number stays so.
    """
    dropped = jnp.uint32(_DROPPED)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (words & dropped)
    rounded = lax.bitcast_convert_type(bits & ~dropped, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
