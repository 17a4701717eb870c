"""Functions of the caller's in the Mosaic GPU kernels: what they may do, how they run on tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise import on_tiles
from pallas_kernels.pallas_mosaic.tiles import computed_here, tanh

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
run_on_tile = functools.partial(on_tiles, replaced=_REPLACED)
# How many columns of a tile a function runs on at a time.
_COLUMNS = 16


def by_parts(
    make: Callable[[slice, jax.Array], tuple[jax.Array, ...]], tile: jax.Array
) -> tuple[jax.Array, ...]:
    """What ``make(columns, part)`` makes of a tile, by a few columns after the other.

    What a function makes on its way, and the positions that it reads, would be whole tiles
    otherwise, for which there are no registers. ``columns`` is a slice.
    """
    made: list[tuple[jax.Array, ...]] = []
    for first in range(0, tile.shape[1], _COLUMNS):
        part = tile[:, first : first + _COLUMNS]
        if made:
            *before, part = computed_here(*made[-1], part)
            made[-1] = tuple(before)
        made.append(make(slice(first, first + _COLUMNS), part))
    return tuple(jnp.concatenate(parts, 1) for parts in zip(*made, strict=True))
