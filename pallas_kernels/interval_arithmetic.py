"""Which tiles a ``mask_mod`` masks entirely or not at all: interval arithmetic on its operations.

Each operation maps the ranges that its arguments have in a tile to a range that holds all its
results. A comparison that is true in the whole range is true for every score of the tile. What has
no rule here, such as floating point, has an unknown result: the tile may be partly masked. So tile
bounds of a ``mask_mod`` cost a few operations per tile, where evaluating it before a call would
cost as many per score.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.elementwise import Operation, Variable, trace

_INT32 = np.iinfo(np.int32)
# Magnitudes in float32 below which an int32 result has surely not wrapped around.
_SURELY_INT32 = np.float32(2**30)
# Tiles of scores up to which bounds are computed while tracing, where positions are known.
_MOST_WHILE_TRACING = 2**16


class Interval(NamedTuple):
    """The least and the largest value that an int32 or a bool (0 or 1) may have: int32 arrays."""

    low: Any
    high: Any


def tiles_of(
    mask_mod: Callable[..., Any], q: tuple[Any, Any], kv: tuple[Any, Any]
) -> tuple[Any, Any]:
    """``(possible, full)`` of every tile of scores, bool ``[R, q tiles, KV tiles]``.

    As :meth:`pallas_kernels.mask.Mask.tiles`. They hold for all batch indices and heads.

    Args:
      mask_mod: the function.
      q: the smallest and the largest position of each query tile, int32 ``[R, q tiles]``.
      kv: the same of each KV tile.
    """
    xp: Any = jnp
    if all(isinstance(x, np.ndarray) for x in (*q, *kv)):
        if q[0].size * kv[0].size <= _MOST_WHILE_TRACING:
            xp = np
        else:  # The compiler must not evaluate it either.
            q, kv = lax.optimization_barrier((q, kv))
    of_queries = Interval(*(x[:, :, :, None, None] for x in _parts(xp, *q)))
    of_keys = Interval(*(x[:, None, None, :, :] for x in _parts(xp, *kv)))
    any_index = Interval(np.int32(0), np.int32(_INT32.max))
    with np.errstate(all="ignore"):
        result = _result(xp, mask_mod, any_index, any_index, of_queries, of_keys)
    shape = q[0].shape[0], 2, q[0].shape[1], 2, kv[0].shape[1]
    low, high = (xp.broadcast_to(x, shape) for x in result)
    parts = [np.s_[:, i, :, j] for i in range(2) for j in range(2)]
    possible = functools.reduce(xp.maximum, [high[part] for part in parts])
    return possible > 0, functools.reduce(xp.minimum, [low[part] for part in parts]) > 0


def _parts(xp: Any, first: Any, last: Any) -> Interval:
    """``[R, 2, tiles]``: a tile's first position, and the others.

    ``x // n`` tests the sign of x. Position 0 has another one than the positions after it.
    """
    second = xp.minimum(first + np.int32(1), last)
    return Interval(xp.stack([first, second], 1), xp.stack([first, last], 1))


def _result(xp: Any, function: Callable[..., Any], *arguments: Interval) -> Interval:
    traced = trace(function, takes_score=False)
    values: dict[Any, Interval | None] = dict(zip(traced.arguments, arguments, strict=True))

    def read(atom: Any) -> Interval | None:
        if isinstance(atom, Variable):
            return values[atom]
        if isinstance(atom, np.generic) and atom.dtype in (np.int32, np.bool_):
            return Interval(np.int32(atom), np.int32(atom))
        return None

    for operation in traced.operations:
        inputs = [read(atom) for atom in operation.inputs]
        values |= {output: _unknown(output) for output in operation.outputs}
        rule, output = _RULES.get(operation.name), operation.outputs[0]
        if rule is not None and values[output] is not None and None not in inputs:
            values[output] = rule(xp, operation, *inputs)
    (result,) = traced.results
    return read(result) or Interval(np.int32(0), np.int32(1))


def _unknown(variable: Variable) -> Interval | None:
    """The interval of a value of which nothing is known; None for other dtypes, and arrays."""
    if variable.shape == () and variable.dtype == np.int32:
        return Interval(np.int32(_INT32.min), np.int32(_INT32.max))
    if variable.shape == () and variable.dtype == np.bool_:
        return Interval(np.int32(0), np.int32(1))
    return None


# --- rules ----------------------------------------------------------------------------------------
# Each maps (module, operation, intervals of the inputs) to the interval of the result.


def _where(xp: Any, condition: Any, interval: Interval) -> Interval:
    """The interval where the condition holds; elsewhere any int32 is possible."""
    low = xp.where(condition, interval.low, np.int32(_INT32.min))
    return Interval(low, xp.where(condition, interval.high, np.int32(_INT32.max)))


def _of_ends(
    xp: Any, function: Callable[[Any, Any], Any], x: Interval, y: Interval, ends: Any
) -> Interval:
    """The range of a function that is extreme at some of the intervals' ends, if none overflows."""
    pairs = [(x[i], y[j]) for i, j in ends]
    results = [function(*pair) for pair in pairs]
    sizes = [abs(function(*(z.astype(np.float32) for z in pair))) for pair in pairs]
    safe = functools.reduce(xp.maximum, sizes) < _SURELY_INT32
    low, high = (functools.reduce(f, results) for f in (xp.minimum, xp.maximum))
    return _where(xp, safe, Interval(low, high))


def _add(xp, _, x, y):
    return _of_ends(xp, lambda a, b: a + b, x, y, ((0, 0), (1, 1)))


def _sub(xp, _, x, y):
    return _of_ends(xp, lambda a, b: a - b, x, y, ((0, 1), (1, 0)))


def _mul(xp, _, x, y):
    return _of_ends(xp, lambda a, b: a * b, x, y, ((0, 0), (0, 1), (1, 0), (1, 1)))


def _neg(xp, operation, x):
    return _sub(xp, operation, Interval(np.int32(0), np.int32(0)), x)


def _abs(xp, _, x):
    crosses = (x.low < 0) & (x.high > 0)
    ends = abs(x.low), abs(x.high)
    low = xp.where(crosses, np.int32(0), xp.minimum(*ends))
    return _where(xp, x.low > _INT32.min, Interval(low, xp.maximum(*ends)))


def _quotient(xp: Any, x: Any, y: Any) -> Any:
    """``x / y`` rounded towards zero; x is not the least int32, y is positive."""
    return xp.sign(x) * (abs(x) // y)


def _div(xp, _, x, y):
    divisors = xp.maximum(y.low, 1), xp.maximum(y.high, 1)
    found = [_quotient(xp, a, b) for a in x for b in divisors]
    low, high = (functools.reduce(f, found) for f in (xp.minimum, xp.maximum))
    return _where(xp, (y.low > 0) & (x.low > _INT32.min), Interval(low, high))


def _rem(xp, _, x, y):
    divisor, zero = xp.maximum(y.high, 1), np.int32(0)
    quotients = [_quotient(xp, a, divisor) for a in x]
    # The results rise by one from one end to the other, unless they start again in between.
    rises = (y.low == y.high) & (quotients[0] == quotients[1])
    first, last = (a - q * divisor for a, q in zip(x, quotients, strict=True))
    low = xp.where(rises, first, xp.where(x.low >= 0, zero, 1 - divisor))
    high = xp.where(rises, last, xp.where(x.high <= 0, zero, divisor - 1))
    return _where(xp, (y.low > 0) & (x.low > _INT32.min), Interval(low, high))


def _shift_right(xp, operation, x, y):
    known = (y.low == y.high) & (y.low >= 0) & (y.low < 32)
    if operation.name == "shift_right_logical":
        known = known & (x.low >= 0)
    by = xp.clip(y.low, 0, 31)
    return _where(xp, known, Interval(x.low >> by, x.high >> by))


def _max(xp, _, x, y):
    return Interval(*map(xp.maximum, x, y))


def _min(xp, _, x, y):
    return Interval(*map(xp.minimum, x, y))


def _clamp(xp, operation, least, x, most):
    return _min(xp, operation, _max(xp, operation, x, least), most)


def _sign(xp, _, x):
    return Interval(*map(xp.sign, x))


def _is_bool(operation: Operation) -> bool:
    return operation.outputs[0].dtype == np.bool_


def _and(xp, operation, x, y):
    if _is_bool(operation):
        return _min(xp, operation, x, y)
    most = Interval(np.int32(0), xp.minimum(x.high, y.high))
    return _where(xp, (x.low >= 0) & (y.low >= 0), most)


def _or(xp, operation, x, y):
    known = _max(xp, operation, x, y)
    return known if _is_bool(operation) else _where(xp, np.bool_(False), known)


def _xor(xp, operation, x, y):
    differ = _ne(xp, operation, x, y)
    return differ if _is_bool(operation) else _where(xp, np.bool_(False), differ)


def _not(xp, operation, x):
    del xp
    if _is_bool(operation):
        return Interval(1 - x.high, 1 - x.low)
    return Interval(~x.high, ~x.low)


def _truth(always: Any, possibly: Any) -> Interval:
    return Interval(always.astype(np.int32), possibly.astype(np.int32))


def _lt(xp, _, x, y):
    del xp
    return _truth(x.high < y.low, x.low < y.high)


def _le(xp, _, x, y):
    del xp
    return _truth(x.high <= y.low, x.low <= y.high)


def _gt(xp, operation, x, y):
    return _lt(xp, operation, y, x)


def _ge(xp, operation, x, y):
    return _le(xp, operation, y, x)


def _eq(xp, _, x, y):
    del xp
    always = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return _truth(always, (x.low <= y.high) & (y.low <= x.high))


def _ne(xp, operation, x, y):
    equal = _eq(xp, operation, x, y)
    return Interval(1 - equal.high, 1 - equal.low)


def _union(xp: Any, x: Interval, y: Interval) -> Interval:
    return Interval(xp.minimum(x.low, y.low), xp.maximum(x.high, y.high))


def _select_n(xp, operation, which, *cases):
    if len(cases) == 1:
        return cases[0]
    if operation.inputs[0].dtype != np.bool_:
        return functools.reduce(functools.partial(_union, xp), cases)
    chosen = []
    for of_false, of_true, of_both in zip(*cases, _union(xp, *cases), strict=True):
        unless_false = xp.where(which.low > 0, of_true, of_both)
        chosen.append(xp.where(which.high > 0, unless_false, of_false))
    return Interval(*chosen)


def _convert(xp, operation, x):
    if not _is_bool(operation):
        return x
    zero = Interval(np.int32(0), np.int32(0))
    return _ne(xp, operation, x, zero)


_RULES: dict[str, Callable[..., Interval]] = {
    "abs": _abs, "add": _add, "and": _and, "clamp": _clamp, "convert_element_type": _convert,
    "div": _div, "eq": _eq, "ge": _ge, "gt": _gt, "le": _le, "lt": _lt, "max": _max, "min": _min,
    "mul": _mul, "ne": _ne, "neg": _neg, "not": _not, "or": _or, "rem": _rem,
    "select_n": _select_n, "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right, "sign": _sign, "sub": _sub, "xor": _xor,
}  # fmt: skip
