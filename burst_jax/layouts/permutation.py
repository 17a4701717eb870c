"""Permutes arrays into a layout and back, and pads them to a length that the layout can split.

The layouts: :mod:`burst_jax.layouts.fixed`, and for packed documents
:mod:`burst_jax.layouts.balanced`, whose placements permute their own arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, auto_axes

from burst_jax.layouts.layout import check_shards
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.parallel.mesh import axes_size, flat_names
from pallas_kernels.arrays import as_int32

Array = jax.Array | np.ndarray


def padded_length(layout: LayoutLike, length: int, num_shards: int) -> int:
    """The smallest length, ``length`` or longer, that ``layout`` can split over ``num_shards``."""
    return parse_layout(layout).padded_length(length, num_shards)


def positions(layout: LayoutLike, length: int, num_shards: int) -> np.ndarray:
    """The position of every token of a sequence in ``layout``: ``to_layout(arange(length))``.

    RoPE needs these positions, sharded like the tokens. With an ``arange`` most tokens would get
    the position of another token.

    Args:
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.fixed`).
      length: number of tokens of the whole sequence.
      num_shards: number of shards on the ring: the size of ``seq_axis``, or of both axes together
        if it is a pair. ``ulysses_axis`` does not count.

    Returns:
      int32 NumPy array ``[length]``; index ``i`` of a sequence in ``layout`` holds token
      ``positions[i]``.

    Raises:
      ValueError: the layout is unknown or cannot split ``length``; the message has the length to
        pad to.
    """
    return parse_layout(layout).fixed_positions(length, num_shards)


def to_layout[Tree](x: Tree, layout: LayoutLike, num_shards: int, axis: int = 1) -> Tree:
    """Permutes the tokens along ``axis`` from natural order into ``layout``.

    Do it once, where batches are made, for tokens, targets, positions and segment ids together.
    NumPy arrays stay on the host. JAX arrays are permuted on their devices and keep their sharding,
    over Auto and Explicit mesh axes.

    Args:
      x: an array or a pytree of arrays, all of the same length along ``axis``.
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.fixed`).
      num_shards: number of shards on the ring, as in :func:`positions`.
      axis: the sequence axis, 1 for ``[B, T, ...]``.

    Returns:
      ``x`` permuted, with its types, shapes and dtypes.

    Raises:
      ValueError: the layout is unknown, or cannot split the length (the message has the length to
        pad to).
    """
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=False), x)


def from_layout[Tree](x: Tree, layout: LayoutLike, num_shards: int, axis: int = 1) -> Tree:
    """Permutes the tokens along ``axis`` from ``layout`` back into natural order.

    The inverse of :func:`to_layout`, with the same arguments and errors.
    """
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=True), x)


def pad_to_layout[Tree](
    tree: Tree,
    layout: LayoutLike,
    num_shards: int,
    segment_ids: Array | None = None,
    *,
    multiple_of: int = 1,
) -> tuple[Tree, Array]:
    """Pads sequences at the end to a length that ``layout`` can split, and masks the padding.

    Call it before :func:`to_layout`. Padding has segment id 0, which attends to nothing and is
    attended to by nothing, so its outputs and gradients are exactly zero.

    Args:
      tree: an array ``[B, T, ...]`` or a pytree of such arrays, all with the same B and T. They are
        padded with zeros of their dtype.
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.fixed`).
      num_shards: number of shards on the ring, as in :func:`positions`.
      segment_ids: ``[B, T]`` of any integer dtype with values in the range of int32, 0 for padding;
        None is one segment per sequence.
      multiple_of: another divisor of the padded length, default 1. With a ``ulysses_axis`` it is
        the number of devices on the ring and on that axis together, while ``num_shards`` counts the
        ring only.

    Returns:
      ``(tree, segment_ids)``: the padded pytree, and int32 ``[B, T_padded]`` for
      ``query_segment_ids`` and ``key_value_segment_ids``. NumPy arrays stay NumPy arrays, and JAX
      arrays stay JAX arrays; segment ids made for JAX arrays are a JAX array.

    Raises:
      ValueError: arrays of different ``[B, T]``, fewer than two dimensions, an unknown layout,
        ``segment_ids`` of another shape or of a non-integer dtype, or an array that is sharded over
        Explicit mesh axes which do not divide the padded length.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("tree holds no arrays: pass an array [B, T, ...] or a pytree of them")
    for leaf in leaves:
        _check_is_array("tree", leaf)
        if np.ndim(leaf) < 2:
            raise ValueError(f"tree holds an array of shape {np.shape(leaf)}: it needs [B, T, ...]")
    shapes = {np.shape(leaf)[:2] for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(f"tree holds arrays of different [B, T]: {sorted(shapes)}")
    ((batch, length),) = shapes
    if segment_ids is None:
        segment_ids = np.ones((batch, length), np.int32)
        if arrays := [leaf for leaf in leaves if isinstance(leaf, jax.Array)]:
            segment_ids = _shard_like(jnp.asarray(segment_ids), arrays[0])
    if not hasattr(segment_ids, "dtype"):
        raise ValueError(
            f"segment_ids is a {type(segment_ids).__name__}: it must be an int32 array [B, T]"
        )
    if np.shape(segment_ids) != (batch, length):
        raise ValueError(
            f"segment_ids has shape {np.shape(segment_ids)}: it must be {(batch, length)}, the "
            "arrays' [B, T]"
        )
    segment_ids = as_int32("segment_ids", segment_ids)
    if not isinstance(multiple_of, (int, np.integer)) or multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of!r}: it must be a positive integer")
    step = math.lcm(parse_layout(layout).padded_length(1, num_shards), int(multiple_of))
    extra = -length % step
    padded = jax.tree.map(lambda leaf: _pad_end(leaf, extra), tree)
    return padded, _pad_end(segment_ids, extra)


def _pad_end(x: Array, extra: int) -> Array:
    """``x`` ``[B, T, ...]`` with ``extra`` zeros appended to the T tokens."""
    widths = [(0, 0), (0, extra)] + [(0, 0)] * (np.ndim(x) - 2)
    if not isinstance(x, jax.Array):
        return np.pad(x, widths)
    mesh, names = _explicit_axes(x, 1)
    devices, length = axes_size(mesh, names), x.shape[1] + extra
    if length % devices:
        raise ValueError(
            f"the padded length is {length}, and the array's tokens are sharded over the Explicit "
            f"mesh axes {names}, {devices} devices, which do not divide it: make num_shards a "
            f"multiple of {devices}, or pad before the array is placed on the mesh"
        )
    return _over_auto_axes(lambda x: jnp.pad(x, widths), x)


def _explicit_axes(x: jax.Array, axis: int) -> tuple[AbstractMesh, tuple[str, ...]]:
    """The mesh of ``x``, and the Explicit mesh axes that shard its dimension ``axis``."""
    sharding = jax.typeof(x).sharding
    split = sharding.spec[axis] if axis < len(sharding.spec) else None
    explicit = sharding.mesh.explicit_axes
    return sharding.mesh, tuple(name for name in flat_names(split) if name in explicit)


def _shard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` ``[B, T]``, sharded over Explicit mesh axes like ``like`` ``[B, T, ...]``."""
    mesh, batch = _explicit_axes(like, 0)
    _, tokens = _explicit_axes(like, 1)
    if not mesh.explicit_axes:
        return x
    if not isinstance(like, jax.core.Tracer) and isinstance(like.sharding, jax.NamedSharding):
        mesh = like.sharding.mesh  # Concrete; the mesh in the type has no devices.
    return jax.reshard(x, jax.NamedSharding(mesh, jax.P(batch or None, tokens or None)))


def _permute(x: Array, layout: LayoutLike, num_shards: int, axis: int, *, inverse: bool) -> Array:
    """One leaf of :func:`to_layout`, or of :func:`from_layout` with ``inverse``."""
    layout = parse_layout(layout)
    layout.check_is_fixed()
    check_shards(num_shards)
    _check_is_array("x", x)
    shape = np.shape(x)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis is {axis}: the array has shape {shape}")
    axis %= len(shape)
    layout.check_length(shape[axis], num_shards, f"the array's length along axis {axis}")
    if layout.in_natural_order:
        return x

    def reorder(x: Any, xp: Any = jnp) -> Any:
        return layout.reorder(x, num_shards, axis, xp, inverse=inverse)

    return _over_auto_axes(reorder, x) if isinstance(x, jax.Array) else reorder(x, np)


def _over_auto_axes(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``function(x)`` with the sharding of ``x``, with Explicit mesh axes treated as Auto inside.

    Over Explicit axes JAX infers the sharding of every result, and rejects a reshape of a sharded
    sequence as ambiguous. Over Auto axes the compiler decides.
    """
    sharding = jax.typeof(x).sharding
    explicit = tuple(sharding.mesh.explicit_axes)
    if not set(explicit) & set(flat_names(*sharding.spec)):
        return function(x)
    over_auto: Any = auto_axes(function, axes=explicit, out_sharding=sharding)
    return over_auto(x)


def _check_is_array(name: str, leaf: Any) -> None:
    """Raises ValueError for a Python number: a list of them is a pytree, not an array."""
    if not hasattr(leaf, "dtype"):
        raise ValueError(
            f"{name} holds {leaf!r}, of type {type(leaf).__name__}: pass an array or a pytree of "
            "arrays, np.asarray(x) for a list of numbers"
        )
