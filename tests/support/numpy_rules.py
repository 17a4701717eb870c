"""Rules of :mod:`numpy_jaxprs` for indices, cumulative reductions and triangular systems.

Each makes of an equation's parameters and the types of its results what it computes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def _starts(shape, indices, dims, numbers, sizes, mode):
    """Indices of the elements of each window, and which windows lie in the array.

    Args:
      shape: of the array.
      indices: ``[..., k]``, starts of windows.
      dims: the array's dimensions that the k numbers are of.
      numbers: the array's batch dimensions, and those of ``indices``.
      sizes: of a window, in every dimension of the array.
      mode: of indices out of bounds; windows are moved into the array.

    Returns:
      An array for each dimension that broadcasts to ``[..., *sizes]``, and bool ``[...]``.
    """
    batch, rank = indices.shape[:-1], len(shape)
    starts: list[Any] = [np.zeros((1,) * len(batch), np.int64)] * rank
    for i, dim in enumerate(dims):
        starts[dim] = indices[..., i].astype(np.int64)
    for dim, of_indices in zip(*numbers, strict=True):
        sides = [1] * len(batch)
        sides[of_indices] = batch[of_indices]
        starts[dim] = np.arange(batch[of_indices]).reshape(sides)
    inside, found = np.ones(batch, bool), []
    for dim, start in enumerate(starts):
        last = shape[dim] - sizes[dim]
        inside = inside & (start >= 0) & (start <= last)
        sides = [1] * rank
        sides[dim] = sizes[dim]
        start = np.clip(start, 0, last)
        found.append(
            start.reshape(*start.shape, *[1] * rank) + np.arange(sizes[dim]).reshape(sides)
        )
    return found, inside | ("fill" not in str(mode).lower())


def gather(params, avals):
    numbers, sizes, dtype = params["dimension_numbers"], params["slice_sizes"], avals[0].dtype
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    fill = params["fill_value"]
    if fill is None:
        signed = np.issubdtype(dtype, np.integer)
        fill = (np.iinfo(dtype).min or np.iinfo(dtype).max) if signed else np.nan

    def gather(x, indices):
        at, inside = _starts(
            x.shape, indices, numbers.start_index_map, batching, sizes, params["mode"]
        )
        count = indices.ndim - 1
        found = x[tuple(at)]
        if not inside.all():
            whole = inside.reshape(*inside.shape, *[1] * x.ndim)
            found = np.where(whole, found, np.asarray(fill).astype(dtype))
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        found = found.squeeze(tuple(count + dim for dim in gone))
        return np.moveaxis(found, range(count, found.ndim), numbers.offset_dims)[()]

    return gather


def scatter(add):
    def rule(params, _):
        numbers = params["dimension_numbers"]
        batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        dims, windows = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
        gone = {int(x) for x in (*numbers.inserted_window_dims, *batching[0])}

        def scatter(x, indices, updates):
            count = updates.ndim - len(windows)
            updates = np.moveaxis(updates, windows, range(count, updates.ndim))
            sides = iter(updates.shape[count:])
            sizes = [1 if dim in gone else next(sides) for dim in range(x.ndim)]
            at, inside = _starts(x.shape, indices, dims, batching, sizes, params["mode"])
            whole = *updates.shape[:count], *sizes
            at = tuple(np.broadcast_to(each, whole)[inside] for each in at)
            x, updates = np.array(x), updates.reshape(whole)[inside]
            if add:
                np.add.at(x, at, updates)
            else:
                x[at] = updates
            return x

        return scatter

    return rule


def cumulative(function):
    def rule(params, _):
        axis = params["axis"]
        if params["reverse"]:
            return lambda x: np.flip(function.accumulate(np.flip(x, axis), axis, x.dtype), axis)
        return lambda x: function.accumulate(x, axis, x.dtype)

    return rule


def triangular_solve(params, _):
    left, lower = params["left_side"], params["lower"]
    transposed, unit = params["transpose_a"], params["unit_diagonal"]
    assert not params["conjugate_a"]

    def solve(a, b):
        a = np.tril(a) if lower else np.triu(a)
        if unit:
            eye = np.eye(a.shape[-1], dtype=a.dtype)
            a = a * (1 - eye) + eye
        a = a.swapaxes(-1, -2) if transposed else a
        if left:
            return np.linalg.solve(a, b)
        return np.linalg.solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)

    return solve


def reduce_precision(params, avals):
    bits = jnp.finfo(avals[0].dtype)
    if (params["exponent_bits"], params["mantissa_bits"]) == (bits.nexp, bits.nmant):
        return lambda x: x
    return lambda x: np.asarray(lax.reduce_precision(x, **params))[()]
