"""Every operation that kernels support in user functions, on every dtype: lowered, and its values.

Interpreted kernels run an operation as JAX does, so they show nothing of how Mosaic GPU lowers it.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_calls import FAMILIES
from jax import lax
from lowered import lower

from pallas_kernels import AttentionSpec, Mask, Score
from pallas_kernels.elementwise import trace
from pallas_kernels.mosaic.user_functions import (
    DTYPES,
    INTEGER_OPERATIONS,
    OPERATIONS,
    run_on_fragments,
    unsupported,
)


def pick(x, y):
    which = y if y.dtype == jnp.bool_ else y > jnp.ones((), y.dtype)
    return lax.select_n(which, x, y)


COMPARED = {
    "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
}  # fmt: skip
OF_ONE = {
    "exp": lax.exp, "exp2": lax.exp2, "log": lax.log, "logistic": lax.logistic, "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt, "tanh": lax.tanh, "neg": lax.neg, "abs": lax.abs, "sign": lax.sign,
    "square": lax.square, "not": lax.bitwise_not, "log2": jnp.log2,
    "one_minus_square": lambda x: lax.one_minus_square_p.bind(x),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "integer_pow of a square": lambda x: lax.integer_pow(x, 2),
    "integer_pow of an inverse": lambda x: lax.integer_pow(x, -2),
}  # fmt: skip
TO = {
    f"convert_element_type to {dtype}": functools.partial(
        lax.convert_element_type, new_dtype=np.dtype(dtype)
    )
    for dtype in DTYPES
}
OF_TWO = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "rem": lax.rem,
    "max": lax.max, "min": lax.min, "and": lax.bitwise_and, "or": lax.bitwise_or,
    "xor": lax.bitwise_xor, "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical, "select_n": pick,
    "clamp": lambda x, y: lax.clamp(jnp.zeros((), x.dtype), x, y),
}  # fmt: skip
ALL = COMPARED | OF_TWO | {name: lambda x, y, f=f: f(x) for name, f in (OF_ONE | TO).items()}


def operands(dtype, q, k):
    """Two numbers of the dtype that depend on both positions."""
    x, y = q - k, (k & 7) + 1
    if dtype == "bool":
        return x > 0, y > 5
    return x.astype(dtype), y.astype(dtype)


def as_mask(name, dtype):
    """A ``mask_mod`` that is one operation on values of a dtype."""

    def mask_mod(batch, head, q, k):
        del batch, head
        result = ALL[name](*operands(dtype, q, k))
        return result if result.dtype == jnp.bool_ else result > jnp.ones((), result.dtype)

    return mask_mod


def supported(dtype):
    """The functions of one operation that kernels run on the dtype, by name."""
    found = {}
    for name in ALL:
        try:
            trace(as_mask(name, dtype), takes_score=False)
        except (TypeError, ValueError):
            continue  # JAX has no such operation.
        if unsupported(
            AttentionSpec(Mask(mask_mod=as_mask(name, dtype)), Score(1.0)), backward=True
        ):
            assert name in INTEGER_OPERATIONS
            assert dtype == "float32"
        else:
            found[name] = as_mask(name, dtype)
    return found


def test_every_operation_is_tried():
    masks = [mask_mod for dtype in DTYPES for mask_mod in supported(dtype).values()]
    traced = [trace(mask_mod, takes_score=False) for mask_mod in masks]
    tried = {operation.name for each in traced for operation in each.operations}
    # jnp.log2 may be a logarithm and a quotient.
    assert (OPERATIONS | INTEGER_OPERATIONS) - tried <= {"log2"}
    for dtype in ("bool", "int32", "float32"):
        assert len(supported(dtype)) > 15


@pytest.mark.parametrize(
    "family", ["mosaic_sm80", pytest.param("mosaic_sm90", marks=pytest.mark.slow)]
)
def test_operations_lower(family):
    """Of all dtypes in one kernel."""
    functions = [mask_mod for dtype in DTYPES for mask_mod in supported(dtype).values()]

    def mask_mod(*place):
        return functools.reduce(operator.and_, (function(*place) for function in functions))

    lower(FAMILIES[family], AttentionSpec(Mask(mask_mod=mask_mod), Score(0.125)))


def test_a_bool_that_is_inverted_lowers():
    """On Hopper, whose other operations are tried with the slow tests."""

    def mask_mod(batch, head, q, k):
        return ~(q < k) ^ (q == 5)

    lower(FAMILIES["mosaic_sm90"], AttentionSpec(Mask(mask_mod=mask_mod), Score(0.125)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_have_jax_values(dtype):
    """Some of them run in kernels as others."""
    q, k = (x.astype(np.int32) for x in np.mgrid[:16, :16])
    zeros = jnp.zeros_like(q)
    for name, mask_mod in supported(dtype).items():
        places = zeros, zeros, jnp.asarray(q), jnp.asarray(k)
        got = run_on_fragments(mask_mod, *places)
        expected = jax.vmap(jax.vmap(mask_mod))(*places)
        np.testing.assert_array_equal(got, expected, name)
