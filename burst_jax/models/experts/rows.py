"""Rows of tokens by expert: where tokens are sent, and the gathers that sort and return them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary, varying_axes
from pallas_kernels.grouped import grouped_matmul

# Columns of ones: the fewest that the kernels support.
_ONES = 64


class Routes(NamedTuple):
    """Where n tokens are sent, k times each; row i is of token order[i] // k.

    Attributes:
      ids: int32 ``[n k]``, the expert of each assignment, E for padding.
      sorted_ids: int32 ``[n k]``, the expert of each row, in ascending order.
      order: int32 ``[n k]``, the assignment of each row.
      inverse: int32 ``[n k]``, the row of each assignment.
      sizes: int32 ``[E]``, the number of rows of each expert.
    """

    ids: jax.Array
    sorted_ids: jax.Array
    order: jax.Array
    inverse: jax.Array
    sizes: jax.Array


def routes_of(ids: jax.Array, count: int) -> Routes:
    """The routes of assignments to ``count`` experts, ``ids`` int32 ``[n k]``."""
    index = vary(jnp.arange(ids.size, dtype=jnp.int32), varying_axes(ids))
    sorted_ids, order = lax.sort((ids, index), num_keys=1, is_stable=True)
    _, inverse = lax.sort((order, index), num_keys=1)
    return Routes(ids, sorted_ids, order, inverse, sizes_of(ids, count))


def sizes_of(ids: jax.Array, count: int) -> jax.Array:
    """The number of assignments to each of ``count`` experts, int32."""
    # One reduction; a binary search would be a loop of small kernels.
    return jnp.sum(ids[:, None] == jnp.arange(count, dtype=jnp.int32), 0, dtype=jnp.int32)


# Rows are gathered in both directions; JAX's own gradient would scatter and add. Indices past the
# end stand for rows of zeros.


@jax.custom_vjp
def moved(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """``x[index]``. ``inverse`` has where each row of ``x`` is in the result."""
    return x.at[index].get(mode="fill", fill_value=0)


moved.defvjp(
    lambda x, index, inverse: (moved(x, index, inverse), inverse),
    lambda inverse, gradient: (gradient.at[inverse].get(mode="fill", fill_value=0), None, None),
)


@jax.custom_vjp
def copied(tokens: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows of tokens ``[n, D]``, each of which has k copies: row i is token ``index[i] // k``."""
    index = index // (inverse.shape[0] // tokens.shape[0])
    return tokens.at[index].get(mode="fill", fill_value=0)


def _copied_forward(
    tokens: jax.Array, index: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The empty residual carries the number of tokens.
    return copied(tokens, index, inverse), (inverse, jnp.zeros((tokens.shape[0], 0)))


def _copied_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    inverse, empty = residuals
    copies = gradient.at[inverse].get(mode="fill", fill_value=0)
    return summed(copies, empty.shape[0]).astype(gradient.dtype), None, None


copied.defvjp(_copied_forward, _copied_backward)


def summed(copies: jax.Array, tokens: int) -> jax.Array:
    """The sum of each token's copies, ``[n k, D]`` to float32 ``[n, D]``."""
    return copies.reshape(tokens, -1, copies.shape[-1]).sum(1, dtype=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_groups(dtype: Any, x: jax.Array, ids: jax.Array, sizes: jax.Array) -> jax.Array:
    """``x[ids]``, float32 ``[E, m]`` to ``[R, m]``, for rows ordered by group.

    JAX's own gradient would scatter and add, in whatever order rows arrive. Here it is a grouped
    product of ones, summed in float32 and rounded to ``dtype``, as the groups' matrices' is.

    Args:
      dtype: of the gradient of the result, in which its values are exact.
      x: one row per group.
      ids: int32 ``[R]``, the group of each row; those after the last group may have any.
      sizes: int32 ``[E]``, rows of each group.
    """
    return x.at[ids].get(mode="clip")


def _of_groups_forward(
    dtype: Any, x: jax.Array, ids: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return of_groups(dtype, x, ids, sizes), sizes


def _of_groups_backward(
    dtype: Any, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    rows, columns = gradient.shape
    shapes = (rows, _ONES), (sizes.shape[0], _ONES, columns)
    axes = varying_axes(gradient, sizes)
    ones, zeros, sizes = vary(
        (jnp.ones(shapes[0], dtype), jnp.zeros(shapes[1], dtype), sizes), axes
    )
    transpose = jax.vjp(lambda matrices: grouped_matmul(ones, matrices, sizes), zeros)[1]
    (sums,) = transpose(gradient.astype(dtype))
    return sums[:, 0].astype(gradient.dtype), None, None


of_groups.defvjp(_of_groups_forward, _of_groups_backward)
