"""Traced programs evaluated by NumPy, one equation after the other, without compiling anything.

For programs that are evaluated a few times: formulas in float64, and interpreted kernels, whose
callbacks then get NumPy's arrays, too. An equation without a rule here is evaluated by JAX, which
compiles it.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy_rules
from jax._src.state import discharge

_programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def evaluate(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr, as NumPy arrays or scalars."""
    with np.errstate(all="ignore"):
        return program_of(jaxpr)(*map(_value, (*consts, *args)))


def traced(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """``function``, traced by JAX for arguments of these shapes and evaluated by NumPy.

    Of functions that call kernels with JAX 0.12 or newer.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    if jaxpr.effects:  # A kernel's arguments are references.
        jaxpr = discharge.discharge_state(jaxpr)

    def run(*args: Any) -> Any:
        found = evaluate(jaxpr, jaxpr.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def _value(x: Any) -> Any:
    """An array, or a scalar, with which NumPy is faster than with an array of one."""
    return np.asarray(x)[()]


def program_of(jaxpr: Any) -> _Program:
    """A jaxpr's program, made once; constants of a closed one are its first arguments."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    with _lock:
        found = _programs.get(jaxpr)
        if found is None:
            found = _programs[jaxpr] = _Program(jaxpr)
        return found


def _closed(jaxpr: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr with its constants."""
    program, consts = program_of(jaxpr), [_value(x) for x in getattr(jaxpr, "consts", ())]
    return (lambda *args: program(*consts, *args)) if consts else program


class _Program:
    """A jaxpr's equations as functions of numbered values: its constants and arguments come first.

    It does not refer to the jaxpr, so that it is kept as long as that is.
    """

    def __init__(self, jaxpr: Any):
        self.first: list[Any] = []  # Literals, and None for everything else.
        numbers: dict[Any, int] = {}

        def number(var: Any) -> int:
            literal = hasattr(var, "val")
            if literal or var not in numbers:
                self.first.append(np.asarray(var.val, var.aval.dtype)[()] if literal else None)
                if literal:
                    return len(self.first) - 1
                numbers[var] = len(self.first) - 1
            return numbers[var]

        self.count = len([number(var) for var in (*jaxpr.constvars, *jaxpr.invars)])
        self.steps = []
        for eqn in jaxpr.eqns:
            inputs = [number(var) for var in eqn.invars]
            self.steps.append((_function_of(eqn), inputs, [number(var) for var in eqn.outvars]))
        self.results = [number(var) for var in jaxpr.outvars]

    def __call__(self, *args: Any) -> list[Any]:
        values = self.first.copy()
        assert len(args) == self.count
        values[: self.count] = args
        for function, inputs, outputs in self.steps:
            results = function(*[values[i] for i in inputs])
            for i, result in zip(outputs, results, strict=True):
                values[i] = result
        return [values[i] for i in self.results]


def _function_of(eqn: Any) -> Callable[..., Sequence[Any]]:
    """What an equation computes: a list of results of its inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE:
        function = _ELEMENTWISE[name]
        return lambda *args: (function(*args),)
    if name in RULES:
        function = RULES[name](params, [var.aval for var in eqn.outvars])
        if eqn.primitive.multiple_results:
            return function
        return lambda *args: (function(*args),)
    bind, several = eqn.primitive.bind, eqn.primitive.multiple_results

    def of_jax(*args):
        results = bind(*args, **params)
        return [_value(x) for x in (results if several else [results])]

    return of_jax


# --- rules: of an equation's parameters and the types of its results, what it computes -----------


def _called(params, _):
    return _closed(params.get("jaxpr") or params["call_jaxpr"])


def _custom_vmap(params, _):
    return _closed(discharge.discharge_state(params["call"]))


def _cond(params, _):
    branches = [_closed(branch) for branch in params["branches"]]
    return lambda index, *args: branches[min(max(int(index), 0), len(branches) - 1)](*args)


def _while(params, _):
    goes_on, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]

    def run(*args):
        tested, consts = args[:of_cond], args[of_cond : of_cond + of_body]
        values = args[of_cond + of_body :]
        while goes_on(*tested, *values)[0]:
            values = body(*consts, *values)
        return values

    return run


def _scan(params, avals):
    jaxpr, length = params["jaxpr"], params["length"]
    body, order = _closed(jaxpr), range(length)[:: -1 if params["reverse"] else 1]
    parts = params["ft_in"].update(range(len(jaxpr.invars))).unpack()
    consts, carried, _ = (len(list(part)) for part in parts)
    of_steps = avals[carried:]

    def run(*args):
        constant, carry = args[:consts], args[consts : consts + carried]
        xs = args[consts + carried :]
        made = [np.empty(aval.shape, aval.dtype) for aval in of_steps]
        for i in order:
            results = body(*constant, *carry, *(x[i] for x in xs))
            carry = results[:carried]
            for each, y in zip(made, results[carried:], strict=True):
                each[i] = y
        return *carry, *made

    return run


def _callback(params, avals):
    function = params["callback"]

    def run(*args):
        # Neither side sees what the other one writes into its arrays later.
        results = function(*[np.array(x)[()] for x in args])
        return [
            np.array(x, aval.dtype).reshape(aval.shape)[()]
            for x, aval in zip(results, avals, strict=True)
        ]

    return run


def _convert(params, _):
    dtype = np.dtype(params["new_dtype"])
    if not np.issubdtype(dtype, np.integer):
        return lambda x: x.astype(dtype)
    limits = np.iinfo(dtype)

    def convert(x):
        if x.dtype.kind in "biu":
            return x.astype(dtype)
        # As XLA does: the nearest integer that exists, and 0 for what is no number.
        x = np.nan_to_num(x.astype(np.float64), nan=0.0)
        return np.clip(x, limits.min, limits.max).astype(dtype)

    return convert


def _bitcast(params, _):
    return lambda x: x.view(params["new_dtype"])


def _empty(params, _):
    """No value of it may be read before it is written."""
    kind = np.dtype(params["dtype"])
    fill = {"b": True, "i": -(2**7), "u": 2**8 - 1}.get(kind.kind, np.nan)
    return lambda: np.full(params["shape"], fill, kind)


def _broadcast(params, _):
    shape, dims = params["shape"], params["broadcast_dimensions"]

    def broadcast(x):
        sizes = [1] * len(shape)
        for dim, size in zip(dims, x.shape, strict=True):
            sizes[dim] = size
        return np.broadcast_to(x.reshape(sizes), shape)[()]

    return broadcast


def _iota(params, _):
    shape, axis = params["shape"], params["dimension"]
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    values = np.arange(shape[axis]).astype(params["dtype"]).reshape(sizes)
    return lambda: np.broadcast_to(values, shape)


def _reshape(params, _):
    assert params.get("dimensions") is None
    return lambda x: x.reshape(params["new_sizes"])[()]


def _squeeze(params, _):
    return lambda x: x.squeeze(params["dimensions"])[()]


def _slice(params, _):
    bounds = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or [1] * len(bounds[0])
    at = tuple(map(slice, *bounds, strides))
    return lambda x: x[at]


def _clamped(starts, shape, sizes):
    """The slices of such sizes, moved to where the array is."""
    return tuple(
        slice(first := min(max(int(start), 0), length - size), first + size)
        for start, length, size in zip(starts, shape, sizes, strict=True)
    )


def _dynamic_slice(params, _):
    return lambda x, *starts: x[_clamped(starts, x.shape, params["slice_sizes"])]


def _dynamic_update_slice(params, _):
    del params

    def update(x, new, *starts):
        x = np.array(x)
        x[_clamped(starts, x.shape, new.shape)] = new
        return x

    return update


def _pad(params, avals):
    """What negative padding cuts off is written, too, and then left out."""
    config = [tuple(map(int, each)) for each in params["padding_config"]]
    cut = [(max(-low, 0), max(-high, 0)) for low, high, _ in config]
    sizes = [size + sum(ends) for size, ends in zip(avals[0].shape, cut, strict=True)]
    at = tuple(
        slice(max(low, 0), size - max(high, 0), inner + 1)
        for size, (low, high, inner) in zip(sizes, config, strict=True)
    )
    kept = tuple(slice(low, size - high) for size, (low, high) in zip(sizes, cut, strict=True))

    def pad(x, fill):
        whole = np.full(sizes, fill, x.dtype)
        whole[at] = x
        return whole[kept]

    return pad


def _split(params, _):
    ends = np.cumsum(params["sizes"])[:-1]
    return lambda x: np.split(x, ends, params["axis"])


def _sort(params, _):
    """By the first arrays, equal ones in their order."""
    axis, keys = params["dimension"], params["num_keys"]

    def sort(*arrays):
        order = np.lexsort(arrays[:keys][::-1], axis=axis)
        return [np.take_along_axis(x, order, axis) for x in arrays]

    return sort


def _reduce(function):
    return lambda params, _: lambda x: function(x, axis=tuple(params["axes"]))


def _reduce_by_program(params, _):
    """By halves: what ``lax.reduce`` is given is associative, and here elementwise."""
    combine, dims = _closed(params["jaxpr"]), params["dimensions"]

    def run(*operands):
        xs, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        first = range(len(dims))
        xs = [np.moveaxis(x, dims, first).reshape(-1, *np.delete(x.shape, dims)) for x in xs]
        while (half := len(xs[0]) // 2) > 0:
            odd = [x[2 * half :] for x in xs]
            new = combine(*(x[:half] for x in xs), *(x[half : 2 * half] for x in xs))
            xs = [np.concatenate(pair) for pair in zip(new, odd, strict=True)]
        return combine(*starts, *(x[0] for x in xs)) if len(xs[0]) else starts

    return run


def _sum(params, avals):
    to = avals[0].dtype
    wide = np.float32 if to.itemsize < 4 and to.kind not in "iu" else to
    return lambda x: np.sum(x, axis=tuple(params["axes"]), dtype=wide).astype(to)


def _dot_general(params, avals):
    (of_left, of_right), (left_batch, right_batch) = params["dimension_numbers"]
    to = avals[0].dtype
    wide = np.float32 if to.itemsize < 4 else to

    def product(left, right):
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        lefts, rights = [""] * left.ndim, [""] * right.ndim
        for pairs in ((left_batch, right_batch), (of_left, of_right)):
            for i, j in zip(*pairs, strict=True):
                lefts[i] = rights[j] = next(letters)
        lefts, rights = ([x or next(letters) for x in each] for each in (lefts, rights))
        batch = [lefts[i] for i in left_batch]
        contracted = {lefts[i] for i in of_left}
        kept = [x for x in (*lefts, *rights) if x not in contracted and x not in batch]
        spec = f"{''.join(lefts)},{''.join(rights)}->{''.join((*batch, *kept))}"
        return np.einsum(spec, left.astype(wide), right.astype(wide), optimize=True).astype(to)

    return product


def _divide(x, y):
    if x.dtype.kind not in "iu":
        return x / y
    quotient = np.floor_divide(x, y)  # XLA rounds towards zero.
    return quotient + ((quotient < 0) & (quotient * y != x)).astype(x.dtype)


def _shift(shift):
    """By more bits than there are: zero."""

    def run(x, bits):
        width = x.dtype.itemsize * 8
        return np.where((bits >= 0) & (bits < width), shift(x, bits), x.dtype.type(0))[()]

    return run


def _right(x, bits):
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> bits.view(unsigned)).view(x.dtype)


def _select(which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])[()]
    return np.choose(which, cases)[()]


def _round(params, _):
    to_even = int(params["rounding_method"]) == 1
    return np.rint if to_even else lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _divide,
    "rem": np.fmod, "max": np.maximum, "min": np.minimum, "neg": operator.neg, "sign": np.sign,
    "abs": abs, "floor": np.floor, "ceil": np.ceil, "exp": np.exp, "exp2": np.exp2, "log": np.log,
    "tanh": np.tanh, "sqrt": np.sqrt, "is_finite": np.isfinite, "square": np.square,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "select_n": _select,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "shift_right_arithmetic": lambda x, bits: x >> np.minimum(bits, x.itemsize * 8 - 1),
    "shift_left": _shift(operator.lshift), "shift_right_logical": _shift(_right),
    "add_any": operator.add, "sin": np.sin, "cos": np.cos, "log1p": np.log1p, "expm1": np.expm1,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "complex": lambda x, y: x + 1j * y, "real": np.real, "imag": np.imag,
    "stop_gradient": lambda x: x, "pow": operator.pow, "copy": lambda x: x,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
}  # fmt: skip
RULES: dict[str, Callable[[dict[str, Any], list[Any]], Callable[..., Any]]] = {
    "jit": _called, "pjit": _called, "closed_call": _called, "custom_jvp_call": _called,
    "custom_vjp_call": _called, "custom_vmap_call": _custom_vmap, "cond": _cond, "while": _while,
    "scan": _scan, "empty": _empty,
    "io_callback": _callback, "pure_callback": _callback, "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast, "iota": _iota, "reshape": _reshape, "squeeze": _squeeze,
    "transpose": lambda params, _: lambda x: x.transpose(params["permutation"]),
    "concatenate": lambda params, _: lambda *xs: np.concatenate(xs, params["dimension"]),
    "slice": _slice, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min), "reduce_or": _reduce(np.any),
    "reduce_and": _reduce(np.all), "reduce_sum": _sum, "dot_general": _dot_general,
    "reduce": _reduce_by_program,
    "integer_pow": lambda params, _: lambda x: x ** params["y"], "round": _round,
    "bitcast_convert_type": _bitcast, "optimization_barrier": lambda *_: lambda *xs: xs,
    "stack": lambda params, _: lambda *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params, _: lambda x: [y[()] for y in np.moveaxis(x, params["axis"], 0)],
    "pad": _pad, "split": _split, "sort": _sort, "remat2": _called, "eval_jaxpr": _called,
    "cumsum": numpy_rules.cumulative(np.add), "reduce_precision": numpy_rules.reduce_precision,
    "gather": numpy_rules.gather, "scatter": numpy_rules.scatter(False),
    "scatter-add": numpy_rules.scatter(True),
    "cummax": numpy_rules.cumulative(np.maximum), "triangular_solve": numpy_rules.triangular_solve,
}  # fmt: skip
