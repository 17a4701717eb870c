"""Grouped matrix products in plain JAX: a loop over tiles of rows.

``lax.ragged_dot`` would compute the same, but where XLA has no kernel for it, as on CPUs, it copies
all rows once per group: its memory grows with G M K.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary, varying_axes
from pallas_kernels.group_tiles import GroupTiles

_BLOCK = 128


def product(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """``[M, N]``, see :class:`pallas_kernels.grouped_products.GroupedProducts`."""
    rows = x.shape[0]
    out = jnp.zeros((rows, w.shape[1 if transposed else 2]), x.dtype)
    tiles, block = _tiles(group_sizes, rows)

    def one_tile(tile: Any, out: jax.Array) -> jax.Array:
        first, exists = _rows(tiles, tile, rows, block)
        weights = lax.dynamic_index_in_dim(w, tiles.group[tile], keepdims=False)
        product = _dot(_block(x, first, block), weights, (1, 1 if transposed else 0))
        old = _block(out, first, block)
        new = jnp.where(exists, product.astype(x.dtype), old)
        return lax.dynamic_update_slice_in_dim(out, new, first, 0)

    return _for_each_tile(tiles, w.shape[0], one_tile, out, (x, w, group_sizes))


def weight_gradient(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """``[G, K, N]``, see :class:`pallas_kernels.grouped_products.GroupedProducts`."""
    rows, groups = x.shape[0], group_sizes.shape[0]
    tiles, block = _tiles(group_sizes, rows)
    out = jnp.zeros((groups, x.shape[1], dy.shape[1]), _wide(x))

    def one_tile(tile: Any, out: jax.Array) -> jax.Array:
        first, exists = _rows(tiles, tile, rows, block)
        # Neither may be infinite or NaN in other groups' rows.
        of_x, of_dy = (jnp.where(exists, _block(each, first, block), 0) for each in (x, dy))
        group = tiles.group[tile]
        new = lax.dynamic_index_in_dim(out, group) + _dot(of_x, of_dy, (0, 0))[None]
        return lax.dynamic_update_slice_in_dim(out, new, group, 0)

    out = _for_each_tile(tiles, groups, one_tile, out, (x, dy, group_sizes))
    return out.astype(x.dtype)


def _tiles(group_sizes: jax.Array, rows: int) -> tuple[GroupTiles, int]:
    block = min(rows, _BLOCK)
    return GroupTiles.of(group_sizes, rows, max(1, block)), block


def _rows(tiles: GroupTiles, tile: Any, rows: int, block: int) -> tuple[Any, jax.Array]:
    """First row of a slice that holds a tile, and which of the slice's rows are the tile's."""
    first = jnp.minimum(tiles.first[tile], rows - block)
    row = first + lax.iota(jnp.int32, block)
    return first, ((row >= tiles.begin[tile]) & (row < tiles.end[tile]))[:, None]


def _block(x: jax.Array, first: Any, block: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, block)


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Product over one axis of each, not in TF32, which would be a GPU's default for float32."""
    axes, wide = ((contracted[:1], contracted[1:]), ((), ())), _wide(x)
    highest = lax.Precision.HIGHEST if x.dtype == wide else None
    return lax.dot_general(x, y, axes, precision=highest, preferred_element_type=wide)


def _wide(x: jax.Array) -> Any:
    """The dtype that sums are computed in."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _for_each_tile(tiles: GroupTiles, groups: int, one_tile: Any, out: Any, given: Any) -> Any:
    """Updates ``out`` by all tiles of groups; its other rows remain."""
    if not out.size or not tiles.group.size:
        return out
    count = ((tiles.end > tiles.begin) & (tiles.group < groups)).sum(dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, one_tile, vary(out, varying_axes(given)))
