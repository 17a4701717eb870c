"""tanh of a tile of products, for soft caps; four columns share a reciprocal.

The unit that computes exponentials computes reciprocals as well, and limits a kernel with a soft
cap.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.fragments import tanh_exponent

# From here on tanh is 1 in float32, and the product of four numbers 2^y + 1 still fits in it.
_LARGEST_EXPONENT = 30.0
# Fragments are sliced in units of so many columns.
_UNIT = 8


def tanh(x: jax.Array, factor: float) -> jax.Array:
    """``tanh(factor x)`` with an absolute error of up to 4e-7; ``tanh.approx`` has 11 bits.

    It is ``1 - 2 / (1 + e^(2 factor x))``, with one reciprocal of the product of four denominators,
    or two, where the columns are no multiple of 32. Elements of a row that share it share a NaN,
    masked ones too. Products are NaN only if a query or a key is not finite.

    Args:
      x: float32 ``[64, columns]``; the columns are a multiple of 16.
      factor: of ``x``.
    """
    y = jnp.minimum(tanh_exponent(x, factor), _LARGEST_EXPONENT)
    count = 2 if x.shape[1] % (4 * _UNIT) else 4
    width = x.shape[1] // count
    numbers = [jnp.exp2(y[:, i * width : (i + 1) * width]) + 1 for i in range(count)]
    return jnp.concatenate([1 - 2 * each for each in _reciprocals(numbers)], 1)


def _reciprocals(numbers: list[jax.Array]) -> list[jax.Array]:
    """``1 / x`` of each of 1, 2 or 4 numbers, from one reciprocal of their product."""
    if len(numbers) == 1:
        return [1 / numbers[0]]
    products = [x * y for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    of_pairs = _reciprocals(products)
    return [of_pairs[i // 2] * numbers[i ^ 1] for i in range(len(numbers))]
