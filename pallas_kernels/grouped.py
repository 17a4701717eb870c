"""Grouped matrix product: each group of consecutive rows has its own right operand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_xla
from pallas_kernels.arrays import as_int32, value_range, vary, varying_axes
from pallas_kernels.backend import runs_anywhere
from pallas_kernels.device import Target, target_of

NAMES = ("xla",)
_KERNEL_DTYPES = ("bfloat16", "float16")
# Both families read operands in swizzled tiles of so many lanes.
LANES = 64


@dataclasses.dataclass(frozen=True)
class GroupedProducts:
    """An implementation of the two products. Hashable.

    Attributes:
      name: the public name.
      product: ``(x, w, group_sizes, *, transposed) -> [M, N]``, rows of group g times ``w[g]``, or
        its transpose: ``w`` is ``[G, K, N]``, or ``[G, N, K]`` if ``transposed``. Rows after the
        last group are 0. In x's dtype, summed in float32.
      weight_gradient: ``(x, dy, group_sizes) -> [G, K, N]``, ``x_g^T dy_g`` of each group's rows, 0
        of empty groups, from ``[M, K]`` and ``[M, N]``. Rows after the last group may hold NaN.
      unavailable: ``(platform, compute_capability) -> reason``: why it cannot run there, or None if
        it can.
      is_kernel: whether it supports what kernels do: 16-bit dtypes, K and N multiples of 64.
    """

    name: str
    product: Callable[..., jax.Array]
    weight_gradient: Callable[..., jax.Array]
    unavailable: Callable[[str, float | None], str | None] = runs_anywhere
    is_kernel: bool = True

    def obstacle(self, target: Target, x: jax.Array, w: jax.Array) -> str | None:
        """Why it cannot run, or None if it can."""
        reason = self.unavailable(*target)
        if reason is not None or not self.is_kernel:
            return reason
        if x.dtype not in _KERNEL_DTYPES:
            return f"x is {x.dtype}; it supports bfloat16 and float16; use None or 'xla'"
        for name, dim in zip("KN", w.shape[1:], strict=True):
            if dim % LANES or not dim:
                return f"{name} is {dim}; it supports multiples of {LANES}; use None or 'xla'"
        return None


XLA = GroupedProducts("xla", grouped_xla.product, grouped_xla.weight_gradient, is_kernel=False)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix, like the experts of a mixture of experts.

        out[i] = x[i] w[g]    for the rows i of group g

    Differentiable in ``x`` and ``w``. No copy of ``x`` per group and no transposed copy of ``w`` is
    made. Both gradients are bitwise reproducible.

    Args:
      x: ``[M, K]``, rows ordered by group. Kernels support bfloat16 and float16, XLA also wider.
      w: ``[G, K, N]``, dtype of ``x``. Kernels support multiples of 64 for K and N.
      group_sizes: int32 ``[G]``, rows of each group, 0 or more. The sum is at most M. Traced values
        are not checked: rows past the last one are left out.
      implementation: "xla"; None chooses.

    Returns:
      ``[M, N]`` in the dtype of ``x``, summed in float32. Rows after the last group are 0; what
      ``x`` holds there does not matter.

    Raises:
      ValueError: shapes or dtypes that do not match, sizes that are negative or more than M, or an
        unknown implementation.
      NotImplementedError: the named implementation does not support the device or the arrays.
    """
    _check(x, w, group_sizes)
    group_sizes = as_int32("group_sizes", group_sizes)
    _check_sizes(group_sizes, x.shape[0])
    chosen = _choose(implementation, x, w)
    # Inside shard_map all vary alike, so that the gradient of an operand that is the same on all
    # devices is summed over them.
    x, w, group_sizes = vary((x, w, jnp.asarray(group_sizes)), varying_axes(x, w, group_sizes))
    return _product(chosen, False, x, w, group_sizes)


def _check(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> None:
    expected = ("x", x, "MK"), ("w", w, "GKN"), ("group_sizes", group_sizes, "G")
    for name, array, letters in expected:
        if array.ndim != len(letters):
            raise ValueError(f"{name} has shape {array.shape}: it must be [{', '.join(letters)}]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has dtype {x.dtype}: convert it to a floating-point dtype")
    if w.dtype != x.dtype:
        raise ValueError(f"w is {w.dtype}, x {x.dtype}: convert one to the dtype of the other")
    if w.shape[1] != x.shape[1]:
        raise ValueError(
            f"w has shape {w.shape}, x {x.shape}: the second axis of w must have as many elements "
            "as a row of x"
        )
    if group_sizes.shape[0] != w.shape[0]:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[0]} elements, w {w.shape[0]} groups: each group "
            "must have a size"
        )


def _check_sizes(group_sizes: jax.Array, rows: int) -> None:
    """Checks the values, unless they are traced."""
    known = value_range(group_sizes)
    if not known or not getattr(group_sizes, "is_fully_addressable", True):
        return
    if known[0] < 0:
        raise ValueError(f"group_sizes holds {known[0]}: sizes must be 0 or more")
    total = int(np.sum(jax.device_get(group_sizes), dtype=np.int64))
    if total > rows:
        raise ValueError(f"group_sizes add up to {total}, x has {rows} rows: pass all rows")


def _choose(implementation: str | None, x: jax.Array, w: jax.Array) -> GroupedProducts:
    target = target_of(x)
    if implementation is None:
        names = NAMES if target.platform == "gpu" else ("xla",)
        candidates = map(_named, names)
        return next(each for each in candidates if each.obstacle(target, x, w) is None)
    if implementation not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"implementation is {implementation!r}: use None or one of {names}")
    chosen = _named(implementation)
    if (obstacle := chosen.obstacle(target, x, w)) is not None:
        raise NotImplementedError(f"implementation {chosen.name!r} cannot run: {obstacle}")
    return chosen


def _named(name: str) -> GroupedProducts:
    """An implementation by its name."""
    assert name in NAMES
    return XLA


# The two products are each other's gradients, so either can be differentiated any number of times.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    chosen: GroupedProducts, transposed: bool, x: jax.Array, w: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return chosen.product(x, w, group_sizes, transposed=transposed)


def _product_forward(chosen, transposed, x, w, group_sizes):
    return _product(chosen, transposed, x, w, group_sizes), (x, w, group_sizes)


def _product_backward(chosen, transposed, residuals, dy):
    x, w, group_sizes = residuals
    dx = _product(chosen, not transposed, dy, w, group_sizes)
    sides = (dy, x) if transposed else (x, dy)
    return dx, _weight_gradient(chosen, *sides, group_sizes), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_gradient(
    chosen: GroupedProducts, x: jax.Array, dy: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return chosen.weight_gradient(x, dy, group_sizes)


def _weight_gradient_forward(chosen, x, dy, group_sizes):
    return _weight_gradient(chosen, x, dy, group_sizes), (x, dy, group_sizes)


def _weight_gradient_backward(chosen, residuals, dw):
    x, dy, group_sizes = residuals
    dx = _product(chosen, True, dy, dw, group_sizes)
    return dx, _product(chosen, False, x, dw, group_sizes), None


_product.defvjp(_product_forward, _product_backward)
_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)
