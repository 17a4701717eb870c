"""Grouped matrix products: each group of rows has its own right operand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_xla
from pallas_kernels.arrays import as_int32, value_range, vary, varying_axes
from pallas_kernels.choice import NAMES, choose, substitute
from pallas_kernels.device import current_target, target_of
from pallas_kernels.grouped_products import GroupedProducts, Slots

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
      implementation: "mosaic_sm90" (Hopper), "mosaic_sm80" (Ampere and newer) or "xla"; None uses
        the first of them that supports the device and the arrays.

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
    return choose(implementation, _find, target, lambda each: each.obstacle(target, w))


def _find(name: str) -> GroupedProducts:
    """An implementation by its name. Importing kernels takes most of a second, so it is late."""
    if name not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"implementation is {name!r}: use None or one of {names}")
    if name == "mosaic_sm90":
        from pallas_kernels.mosaic.sm90.grouped import GROUPED_SM90

        return GROUPED_SM90
    if name == "mosaic_sm80":
        from pallas_kernels.mosaic.sm80.grouped import GROUPED_SM80

        return GROUPED_SM80
    return XLA


def supports_few_rows(rows: int, *weights: jax.Array) -> bool:
    """Whether the program being traced can run :func:`few_rows_product` with each of the weights.

    It has no other implementation: a caller without the kernel takes other products, like
    :func:`grouped_matmul`.
    """
    target = current_target()
    if target.platform != "gpu" or substitute() is not None:
        return False
    from pallas_kernels.mosaic.sm80 import few_rows

    if few_rows.unavailable(*target) is not None:
        return False
    return all(few_rows.unsupported(rows, each) is None for each in weights)


def few_rows_product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    slots: Slots,
    *,
    summed: bool,
    first: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Multiplies a few rows by the matrices of all used slots, each of which is read once.

        out[j, u] = x[u] weights[j][slots.matrices[u]]

    Not differentiable.

    Args:
      x: ``[U, R, K]``, the rows of each slot, or ``[1, R, K]``, the same for all.
      weights: J arrays ``[G, K, N]`` of x's dtype.
      slots: U of them.
      summed: whether to return partial sums over the slots instead.
      first: J matrices ``[K, N]`` of one more slot, the first of then U + 1; or none.

    Returns:
      float32 ``[J, U, R, N]``, undefined for unused slots; or ``[J, S, R, N]``, whose sum over S is
      that over the used slots.
    """
    from pallas_kernels.mosaic.sm80 import few_rows

    return few_rows.few_rows_product(x, weights, slots, summed=summed, first=first)


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
