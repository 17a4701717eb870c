"""Layouts: the order in which the tokens of a sequence lie on the shards of a ring.

A layout is only a permutation. ``length`` tokens over ``n`` shards of ``c = length // n`` tokens;
shard ``r`` holds, in index order:

========== ================================= ====================
contiguous block ``r``                       ``length % n == 0``
zigzag     half-blocks ``r`` and ``2n-1-r``  ``length % 2n == 0``
striped    tokens ``r, r+n, r+2n, ...``      ``length % n == 0``
========== ================================= ====================

Four shards, 16 tokens::

             contiguous      zigzag          striped
    shard 0   0  1  2  3     0  1  14 15     0 4 8  12
    shard 1   4  5  6  7     2  3  12 13     1 5 9  13
    shard 2   8  9  10 11    4  5  10 11     2 6 10 14
    shard 3   12 13 14 15    6  7  8  9      3 7 11 15

Positions ascend inside every shard: the local kernels' tile bounds are tight because of it.

Under a causal mask a contiguous ring leaves the first shard idle most of the time. Zigzag gives
every shard the same work at every step but the first; striped (Brandon et al. 2023, Striped
Attention, section 3) does so to within one diagonal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import auto_axes

from burst_jax.sharding import flat_names
from pallas_kernels.arrays import as_int32

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def blocks_per_shard(layout: str) -> int:
    """Number of equal blocks that make up one shard: the divisor a shard's length must have."""
    check_layout(layout)
    return 2 if layout == "zigzag" else 1


def check_layout(layout: str) -> None:
    """Raises ValueError unless ``layout`` is one of :data:`LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: use one of {', '.join(map(repr, LAYOUTS))}")


def padded_length(layout: str, length: int, num_shards: int) -> int:
    """The smallest length, ``length`` or longer, that ``layout`` can split over ``num_shards``."""
    multiple = blocks_per_shard(layout) * _check_shards(num_shards)
    return -(-length // multiple) * multiple


def check_length(layout: str, length: int, num_shards: int, name: str = "length") -> None:
    """Raises ValueError, saying what to pad to, if ``layout`` cannot split ``length``."""
    fit = padded_length(layout, length, num_shards)
    if fit != length:
        multiple = blocks_per_shard(layout) * num_shards
        raise ValueError(
            f"{name} is {length}: the {layout} layout over {num_shards} shards needs a multiple of "
            f"{multiple}; pad to {fit} (pad_to_layout pads and masks the padding)"
        )


def shard_positions(layout: str, shard_length: int, num_shards: int, shard: Any) -> jax.Array:
    """Positions of the tokens that one shard holds, in index order.

    Args:
      layout: the layout's name.
      shard_length: tokens per shard, ``c``.
      num_shards: shards on the ring, ``n``.
      shard: the shard's index, a Python int or a traced int32 (``lax.axis_index``).

    Returns:
      int32 ``[shard_length]``, ascending.
    """
    check_layout(layout)
    shard = jnp.asarray(shard, jnp.int32)
    index = jnp.arange(shard_length, dtype=jnp.int32)
    if layout == "contiguous":
        return shard * shard_length + index
    if layout == "striped":
        return shard + num_shards * index
    half = shard_length // 2
    # The second half-block, 2n-1-r, starts where index - half would be 0.
    start = jnp.where(index < half, shard * half, (2 * num_shards - 1 - shard) * half - half)
    return start + index


def shard_runs(layout: str, shard_length: int, num_shards: int) -> tuple[np.ndarray, int, int]:
    """Every shard's positions as runs of equal distance: what :func:`shard_positions` holds.

    Returns:
      ``(starts, stride, count)``: run j of shard r holds ``starts[r, j] + stride * i`` for i from 0
      to ``count - 1``; starts is int64 ``[num_shards, runs]``.
    """
    blocks = blocks_per_shard(layout)
    shard, count = np.arange(num_shards), shard_length // blocks
    if layout == "striped":
        return shard[:, None], num_shards, count
    last = 2 * num_shards - 1
    starts = np.stack([shard, last - shard][:blocks], axis=1) * count
    return starts, 1, count


def positions(layout: Layout, length: int, num_shards: int) -> np.ndarray:
    """The position of every token of a sequence in ``layout``: ``to_layout(arange(length))``.

    Feed it to RoPE (and shard it like the tokens), never an ``arange``.

    Args:
      layout: "contiguous", "zigzag" or "striped".
      length: tokens of the whole sequence.
      num_shards: size of ``seq_axis``, of both axes together if it is a pair;
        ``head_parallel_axis`` does not count.

    Returns:
      int32 NumPy array ``[length]``; index ``i`` of a sequence in ``layout`` holds token
      ``positions[i]``.

    Raises:
      ValueError: the layout is unknown or cannot split ``length``; the message says what to pad to.
    """
    check_layout(layout)
    check_length(layout, length, _check_shards(num_shards))
    index = np.arange(length, dtype=np.int32)
    if layout == "contiguous":
        return index
    if layout == "striped":
        return index.reshape(-1, num_shards).T.reshape(-1)
    halves = index.reshape(2 * num_shards, -1)
    pairs = np.stack([halves[:num_shards], halves[: num_shards - 1 : -1]], axis=1)
    return pairs.reshape(-1)


def to_layout(x: Any, layout: Layout, num_shards: int, axis: int = 1) -> Any:
    """Permutes the tokens along ``axis`` from their natural order into ``layout``.

    Do it once, where batches are made, for tokens, targets, positions and segment ids together.
    NumPy arrays stay on the host; JAX arrays are permuted where they are, and stay sharded as they
    are, over Auto and Explicit mesh axes.

    Args:
      x: an array or a pytree of arrays, all of the same length along ``axis``.
      layout: "contiguous", "zigzag" or "striped".
      num_shards: shards of the ring, as in :func:`positions`.
      axis: the tokens' axis, 1 for ``[B, T, ...]``.

    Returns:
      ``x`` permuted, same types, shapes and dtypes.

    Raises:
      ValueError: the layout is unknown, or cannot split the length (says what to pad to).
    """
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=False), x)


def from_layout(x: Any, layout: Layout, num_shards: int, axis: int = 1) -> Any:
    """Inverse of :func:`to_layout`: back to the natural order. Same arguments and errors."""
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=True), x)


def pad_to_layout(
    tree: Any,
    layout: Layout,
    num_shards: int,
    segment_ids: Any = None,
    *,
    multiple_of: int = 1,
) -> tuple[Any, Any]:
    """Pads sequences at their end to a length that ``layout`` can split, and masks the padding.

    Call it before :func:`to_layout`. Padded tokens get segment 0, which attends to nothing and is
    attended by nothing, so their outputs and gradients are exactly zero.

    Args:
      tree: an array ``[B, T, ...]`` or a pytree of them, all with the same B and T. Padding is
        zeros of the array's dtype.
      layout: "contiguous", "zigzag" or "striped".
      num_shards: shards of the ring, as in :func:`positions`.
      segment_ids: ``[B, T]`` of any integer dtype, whose values int32 can hold, 0 for padding; or
        None for one segment per row.
      multiple_of: what the padded length must be a multiple of besides. With a
        ``head_parallel_axis`` it is the number of devices on the ring and on that axis together,
        and ``num_shards`` stays the ring's.

    Returns:
      ``(tree, segment_ids)``: the padded pytree, and int32 ``[B, T_padded]`` for
      ``query_segment_ids`` and ``key_value_segment_ids``. NumPy in, NumPy out.

    Raises:
      ValueError: arrays of different ``[B, T]``, fewer than two axes, an unknown layout, a padded
        length that the Explicit mesh axes do not divide which an array is already split over, or
        ``segment_ids`` of another shape or of a dtype that is no integer.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("tree holds no arrays: pass an array [B, T, ...] or a pytree of them")
    for leaf in leaves:
        if np.ndim(leaf) < 2:
            raise ValueError(f"tree holds an array of shape {np.shape(leaf)}: it needs [B, T, ...]")
    shapes = {np.shape(leaf)[:2] for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(f"tree holds arrays of different [B, T]: {sorted(shapes)}")
    ((batch, length),) = shapes
    if segment_ids is None:
        segment_ids = np.ones((batch, length), np.int32)
        if arrays := [leaf for leaf in leaves if isinstance(leaf, jax.Array)]:
            segment_ids = _sharded_alike(jnp.asarray(segment_ids), arrays[0])
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
    step = math.lcm(padded_length(layout, 1, num_shards), int(multiple_of))
    extra = -length % step
    padded = jax.tree.map(lambda leaf: _pad_end(leaf, extra), tree)
    return padded, _pad_end(segment_ids, extra)


def _pad_end(x: Any, extra: int) -> Any:
    widths = [(0, 0), (0, extra)] + [(0, 0)] * (np.ndim(x) - 2)
    if not isinstance(x, jax.Array):
        return np.pad(x, widths)
    mesh, names = _split_over_explicit_axes(x, 1)
    devices, length = math.prod(mesh.shape[name] for name in names), x.shape[1] + extra
    if length % devices:
        raise ValueError(
            f"the padded length is {length}, and the array's tokens are split over the Explicit "
            f"mesh axes {names}, {devices} devices, which do not divide it: make num_shards a "
            f"multiple of {devices}, or pad before the array is put onto the mesh"
        )
    return _explicit_axes_aside(lambda x: jnp.pad(x, widths), x)


def _split_over_explicit_axes(x: jax.Array, axis: int) -> tuple[Any, tuple[str, ...]]:
    """An array's mesh, and its Explicit axes that one of the array's own axes is split over."""
    sharding = jax.typeof(x).sharding
    split = sharding.spec[axis] if axis < len(sharding.spec) else None
    explicit = sharding.mesh.explicit_axes
    return sharding.mesh, tuple(name for name in flat_names(split) if name in explicit)


def _sharded_alike(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` ``[B, T]`` split over the Explicit mesh axes that ``like`` ``[B, T, ...]`` is."""
    mesh, batch = _split_over_explicit_axes(like, 0)
    _, tokens = _split_over_explicit_axes(like, 1)
    if not mesh.explicit_axes:
        return x
    if not isinstance(like, jax.core.Tracer) and isinstance(like.sharding, jax.NamedSharding):
        mesh = like.sharding.mesh  # With its devices, which its type does not know.
    return jax.reshard(x, jax.NamedSharding(mesh, jax.P(batch or None, tokens or None)))


def _permute(x: Any, layout: str, num_shards: int, axis: int, *, inverse: bool) -> Any:
    check_layout(layout)
    _check_shards(num_shards)
    shape = np.shape(x)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis is {axis}: the array has shape {shape}")
    axis %= len(shape)
    check_length(layout, shape[axis], num_shards, name=f"the array's length along axis {axis}")
    if layout == "contiguous":
        return x
    reorder = functools.partial(
        _reorder, layout=layout, num_shards=num_shards, axis=axis, inverse=inverse
    )
    return _explicit_axes_aside(reorder, x) if isinstance(x, jax.Array) else reorder(x, np)


def _explicit_axes_aside(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``function(x)``, sharded like ``x``, over whose Explicit mesh axes JAX would refuse it.

    Where axes are Explicit every operation must say how its result is split, which a reshape of
    split tokens cannot: here the compiler sees to it, as over Auto axes.
    """
    sharding = jax.typeof(x).sharding
    explicit = tuple(sharding.mesh.explicit_axes)
    if not set(explicit) & set(flat_names(*sharding.spec)):
        return function(x)
    aside: Any = auto_axes(function, axes=explicit, out_sharding=sharding)
    return aside(x)


def _reorder(
    x: Any, xp: Any = jnp, *, layout: str, num_shards: int, axis: int, inverse: bool
) -> Any:
    # Reshape, flip, transpose: no gather, and XLA fuses them into one copy.
    shape = x.shape
    n, lead, tail = num_shards, shape[:axis], shape[axis + 1 :]
    if layout == "striped":
        rows = (n, -1) if inverse else (-1, n)
        return xp.swapaxes(xp.reshape(x, (*lead, *rows, *tail)), axis, axis + 1).reshape(shape)
    at = (slice(None),) * axis
    if inverse:  # [n, (low, high), half] -> the low halves in order, then the high ones reversed
        pairs = xp.reshape(x, (*lead, n, 2, -1, *tail))
        low, high = pairs[(*at, slice(None), 0)], pairs[(*at, slice(None), 1)]
        return xp.concatenate([low, xp.flip(high, axis)], axis).reshape(shape)
    halves = xp.reshape(x, (*lead, 2 * n, -1, *tail))
    low, high = halves[(*at, slice(0, n))], halves[(*at, slice(n, None))]
    return xp.stack([low, xp.flip(high, axis)], axis + 1).reshape(shape)


def _check_shards(num_shards: int) -> int:
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards is {num_shards!r}: it must be a positive integer")
    return int(num_shards)
