"""Functions of the caller's in the Mosaic GPU kernels: what they may do, and how they run on tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise import Numbering, Places, on_tiles
from pallas_kernels.pallas_mosaic.tiles import tanh

# Operations that Mosaic GPU has for tiles. It has sines, too, but with the GPU's own instruction,
# which is exact for small angles alone.
OPERATIONS = frozenset((
    *("abs", "add", "and", "clamp", "convert_element_type", "div", "eq", "exp", "exp2", "ge", "gt"),
    *("integer_pow", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
    *("not", "one_minus_square", "or", "rem", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sqrt", "square", "sub", "tanh"),
    "xor",
))  # fmt: skip
DTYPES = ("bool", "float32", "int32", "uint32")


def _power(x: jax.Array, *, y: int) -> jax.Array:
    """``x ** y``. Mosaic GPU's own has few exponents."""
    if y < 0:
        return 1 / _power(x, y=-y)
    result = None
    while y:
        if y % 2:
            result = x if result is None else result * x
        x, y = x * x, y // 2
    return jnp.ones_like(x) if result is None else result


_REPLACED: dict[str, Callable[..., Any]] = {
    "integer_pow": _power,
    # The GPU's own instruction has 11 bits.
    "tanh": lambda x, **_: tanh(x),
}
_run = functools.partial(on_tiles, replaced=_REPLACED)


def places_of(
    numbering: Numbering, batch_row: Any, head: Any, q_positions: jax.Array, kv_positions: jax.Array
) -> Places:
    """Where the scores of a tile are.

    Args:
      numbering: references to the numbers of rows and heads.
      batch_row: the tile's row of the batch.
      head: its query head.
      q_positions: int32, over the tile.
      kv_positions: int32, over the tile.
    """
    numbers = numbering.batch[batch_row], numbering.head[head]
    return Places(*numbers, q_positions, kv_positions, _run)
