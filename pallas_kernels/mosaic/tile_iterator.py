"""The loop over one work tile's tiles of the other side: KV tiles (forward) or query tiles."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.fragments import i32, optimization_barrier


class TileIterator:
    """The tiles within a work tile's bounds, in loop order: tiles that need a mask, then full ones.

    Args:
      bounds: reference to tile bounds, int32 ``[1 or B, tiles, 4 or 4 + parts]``, or to tile
        lists, int32 ``[1 or B, 1 or heads, tiles, 2 + tiles of the other side]``
        (:mod:`pallas_kernels.bounds`).
      batch: batch index of the work tile.
      head: head index of the work tile.
      tile: tile index of the work tile.
      last: index of the last tile of the other side.
      rotate: index of the full tile to start with; the loop wraps around. None starts with the
        first one.
      descending: whether the tiles that need a mask are visited from the last to the first.

    Attributes:
      masked: int32, number of tiles that need a mask.
      full: int32, number of tiles that need none.
      total: int32, number of tiles.
    """

    def __init__(
        self, bounds: Any, batch: Any, head: Any, tile: Any, last: int, rotate: Any = None,
        descending: bool = False,
    ):  # fmt: skip
        batch = batch if bounds.shape[0] != 1 else i32(0)
        self._last, self._list, self._descending = i32(last), None, descending
        self._skipped = None
        if len(bounds.shape) == 4:
            at = (batch, head if bounds.shape[1] != 1 else i32(0), tile)
            self._list = lambda index: bounds[(*at, index + 2)]
            # Ranges of indices into the list, instead of ranges of tiles.
            full_first, end = (bounds[(*at, i32(c))] for c in range(2))
            first, full_end = i32(0), end
        else:
            first, full_first, full_end, end = (bounds[(batch, tile, i32(c))] for c in range(4))
            if bounds.shape[2] > 4:
                self._skipped = lambda part: bounds[(batch, tile, part + 4)]
        self._derive(first, full_first, full_end, end)
        self._rotate = None if rotate is None else lax.rem(rotate, jnp.maximum(self.full, 1))

    def _derive(self, first: Any, full_first: Any, full_end: Any, end: Any) -> None:
        self._first, self._full_first, self._full_end, self._end = first, full_first, full_end, end
        self._before = full_first - first
        self.full = full_end - full_first
        self.masked = self._before + (end - full_end)
        self.total = end - first

    def recompute(self) -> TileIterator:
        """The same; what follows from the ranges is computed again, not kept in registers."""
        again = copy.copy(self)
        ranges = self._first, self._full_first, self._full_end, self._end
        again._derive(*optimization_barrier(*ranges))
        return again

    def tile(self, step: Any, masked: bool = True) -> jax.Array:
        """The tile of a loop step; past the last step any valid tile.

        ``masked``: whether the step may be one whose tile needs a mask.
        """
        i = step - self.masked
        if self._descending:
            step = jnp.where(i < 0, -1 - i, step)
        if self._rotate is not None:
            i = i + self._rotate
            count = self._full_end - self._full_first
            i = jnp.where(i >= count, i - count, i)
        tile = self._full_first + i
        if masked:
            after = self._full_end + (step - self._before)
            masked_tile = jnp.where(step < self._before, self._first + step, after)
            tile = jnp.where(step < self.masked, masked_tile, tile)
        tile = jnp.clip(tile, 0, self._last)
        return tile if self._list is None else self._list(tile)

    def masked_tile(self, index: Any) -> jax.Array:
        """The ``index``-th tile that needs a mask; past the last one any valid tile."""
        if self._list is not None:
            return self._list(jnp.minimum(index, self._last))
        after = self._full_end + (index - self._before)
        tile = jnp.where(index < self._before, self._first + index, after)
        return jnp.clip(tile, 0, self._last)

    def full_tile(self, index: Any) -> jax.Array:
        """The ``index``-th full tile, without ``rotate``; past the last one any valid tile."""
        tile = jnp.minimum(self._full_first + index, self._last)
        return tile if self._list is None else self._list(tile)

    def next_full(self, tile: Any) -> tuple[jax.Array, jax.Array] | None:
        """The full tile visited after a full one, and whether (0 or 1) it is the first one again.

        None for tile lists.
        """
        if self._list is not None:
            return None
        first = self._full_first if self._rotate is None else self._full_first + self._rotate
        following = jnp.where(tile + 1 < self._full_end, tile + 1, self._full_first)
        return following, (following == first).astype(jnp.int32)

    def skipped(self, part: Any) -> jax.Array | None:
        """How many of the first loop steps a part of the work tile can skip, not all of them.

        None if bounds are not given by parts (``query_bounds(..., parts)``).
        """
        if self._skipped is None:
            return None
        return jnp.minimum(self._skipped(part), jnp.maximum(self.total - 1, 0))
