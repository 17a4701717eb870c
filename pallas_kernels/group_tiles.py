"""Tiles of a ragged matrix: runs of rows that belong to one group."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class GroupBounds(NamedTuple):
    """The rows of each group: consecutive, in the order of the groups.

    Attributes:
      starts: int32 ``[G]``, first row.
      sizes: int32 ``[G]``, number of rows.
    """

    starts: Any
    sizes: Any

    @classmethod
    def of(cls, group_sizes: jax.Array, rows: int) -> GroupBounds:
        """Bounds of groups of these sizes. Rows that do not exist, of ``rows``, are left out."""
        sizes = jnp.maximum(group_sizes, 0)
        ends = jnp.minimum(_sums(sizes), rows)
        starts = jnp.minimum(_sums(sizes) - sizes, rows)
        return cls(starts, ends - starts)


class GroupTiles(NamedTuple):
    """Tiles of ``block`` rows, each for one group, in the order of the rows.

    A group's first tile starts at the group's first row, or up to ``align - 1`` rows before it. The
    rows after the last group are tiles of group G::

        group_sizes [5, 0, 3], 10 rows, block 4, align 2

        tile        0  1  2  3
        group       0  0  2  3
        first       0  4  4  8
        begin       0  4  5  8
        end         4  5  8  10

    Attributes:
      group: int32 ``[T]``.
      first: int32 ``[T]``, first row of the tile, a multiple of ``align``.
      begin: int32 ``[T]``, first of the tile's rows that belong to the group.
      end: int32 ``[T]``, row after the last that does; ``begin`` in unused tiles at the end.
      count: int32 ``[1]``, number of tiles with rows.
    """

    group: Any
    first: Any
    begin: Any
    end: Any
    count: Any

    @classmethod
    def of(cls, group_sizes: jax.Array, rows: int, block: int, align: int = 1) -> GroupTiles:
        """The tiles of ``rows`` rows; T is the most that any sizes need."""
        groups = group_sizes.shape[0]
        bounds = GroupBounds.of(group_sizes, rows)
        rest = rows - bounds.sizes.sum(dtype=jnp.int32)
        sizes = jnp.append(bounds.sizes, rest)
        starts = jnp.append(bounds.starts, rows - rest)
        firsts = starts // align * align
        tiles = jnp.where(sizes > 0, (starts - firsts + sizes + (block - 1)) // block, 0)
        tile_ends = _sums(tiles)
        index = lax.iota(jnp.int32, cls.most(groups, rows, block, align))
        # Small reductions, which XLA fuses, instead of a scan and a binary search.
        group = (tile_ends[None] <= index[:, None]).sum(1, dtype=jnp.int32)
        group = jnp.minimum(group, groups)
        first = firsts[group] + (index - (tile_ends - tiles)[group]) * block
        begin = jnp.maximum(first, starts[group])
        end = jnp.clip((starts + sizes)[group], begin, jnp.maximum(first + block, begin))
        return cls(group, first, begin, end, tile_ends[-1:])

    @staticmethod
    def most(groups: int, rows: int, block: int, align: int = 1) -> int:
        """The largest number of tiles; a tile has a row, and G + 1 groups round up."""
        return min(rows, (rows + (groups + 1) * (block + align - 2)) // block)


def _sums(x: jax.Array) -> jax.Array:
    """Inclusive prefix sums of a short int32 vector."""
    index = lax.iota(jnp.int32, x.shape[0])
    return jnp.where(index[None] <= index[:, None], x[None], 0).sum(1, dtype=jnp.int32)
