"""User ``score_mod`` and ``mask_mod`` on fragments: the supported operations, and how they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.elementwise import on_tiles
from pallas_kernels.mosaic.fragments import optimization_barrier, tanh
from pallas_kernels.spec import AttentionSpec, unsupported_functions

# Operations that Mosaic GPU lowers for fragments. Sine and cosine are missing on purpose: Mosaic
# uses sin.approx and cos.approx, which are accurate for small angles only.
OPERATIONS = frozenset((
    *("abs", "add", "and", "clamp", "convert_element_type", "div", "eq", "exp", "exp2", "ge", "gt"),
    *("integer_pow", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
    *("not", "one_minus_square", "or", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sqrt", "square", "sub", "tanh"),
    "xor",
))  # fmt: skip
INTEGER_OPERATIONS = frozenset({"rem"})
DTYPES = ("bool", "float32", "int32", "uint32")


def unsupported(spec: AttentionSpec, *, backward: bool) -> str | None:
    """Why Mosaic kernels cannot run the spec's functions, or None if they can."""
    return unsupported_functions(
        spec, backward=backward, operations=OPERATIONS, integer_operations=INTEGER_OPERATIONS,
        dtypes=DTYPES,
    )  # fmt: skip


def _integer_pow(x: jax.Array, *, y: int) -> jax.Array:
    """``x ** y``; Mosaic GPU lowers few exponents itself."""
    if y < 0:
        return 1 / _integer_pow(x, y=-y)
    result = None
    while y:
        if y % 2:
            result = x if result is None else result * x
        x, y = x * x, y // 2
    return jnp.ones_like(x) if result is None else result


def _with_bools(primitive: Any) -> Callable[..., jax.Array]:
    """The primitive, which Mosaic GPU lowers for numbers alone, also of bools: by 0 and 1."""

    def run(*inputs: jax.Array, **params: Any) -> jax.Array:
        if inputs[0].dtype != jnp.bool_:
            return primitive.bind(*inputs, **params)
        result = primitive.bind(*(x.astype(jnp.int32) for x in inputs), **params)
        return result if result.dtype == jnp.bool_ else result != 0

    return run


def _not(x: jax.Array, **params: Any) -> jax.Array:
    """``~x``: of an int32 all bits change, of a bool one."""
    return x.astype(jnp.int32) == 0 if x.dtype == jnp.bool_ else lax.not_p.bind(x, **params)


def _convert(x: jax.Array, **params: Any) -> jax.Array:
    """``x.astype``; to bools by a comparison."""
    if params["new_dtype"] != jnp.bool_ or x.dtype == jnp.bool_:
        return lax.convert_element_type_p.bind(x, **params)
    return x != jnp.zeros((), x.dtype)


_COMPARISONS = lax.eq_p, lax.ne_p, lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p
_OF_BOOLS = *_COMPARISONS, lax.clamp_p, lax.max_p, lax.min_p, lax.xor_p
_REPLACED: dict[str, Callable[..., Any]] = {
    **{primitive.name: _with_bools(primitive) for primitive in _OF_BOOLS},
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "not": _not,
    "tanh": lambda x, **_: tanh(x),
}
run_on_fragments = functools.partial(on_tiles, replaced=_REPLACED)
# Columns per chunk of :func:`by_column_chunks`.
_CHUNK = 16


def by_column_chunks(
    function: Callable[[slice, jax.Array], tuple[jax.Array, ...]], tile: jax.Array
) -> tuple[jax.Array, ...]:
    """``function(columns, chunk)`` of 16 columns of a tile at a time; the results concatenated.

    Applied to a whole tile, a user function's intermediates and the positions it reads would be
    whole tiles as well, and registers do not suffice for those.
    """
    results: list[tuple[jax.Array, ...]] = []
    for first in range(0, tile.shape[1], _CHUNK):
        chunk = tile[:, first : first + _CHUNK]
        if results:
            *before, chunk = optimization_barrier(*results[-1], chunk)
            results[-1] = tuple(before)
        results.append(function(slice(first, first + _CHUNK), chunk))
    return tuple(jnp.concatenate(chunks, 1) for chunks in zip(*results, strict=True))
