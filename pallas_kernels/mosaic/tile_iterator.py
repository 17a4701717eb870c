"""Which tiles of the other side a work tile visits, and in which order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pallas_mosaic.tiles import i32


class TileIterator:
    """The tiles that a work tile's bounds allow: first those that need a mask, then the full ones.

    Attributes:
      masked: int32, number of tiles that need a mask.
      full: int32, number of tiles in which every score counts.
    """

    def __init__(self, bounds: Any, batch: Any, head: Any, tile: Any, last: int):
        """Reads a row of a table of bounds.

        Args:
          bounds: reference to :func:`pallas_kernels.bounds.query_bounds` or ``key_bounds``, int32
            ``[1 or B, tiles, 4]``, or their lists ``[1 or B, 1 or heads, tiles, 2 + others]``.
          batch: batch index of the work tile.
          head: head index of the work tile, on the side that work tiles are split over.
          tile: tile index of the work tile.
          last: index of the last tile of the other side.
        """
        row = batch if bounds.shape[0] != 1 else i32(0)
        self._last, self._list = i32(last), None
        if len(bounds.shape) == 4:
            place = (row, head if bounds.shape[1] != 1 else i32(0), tile)
            self._list = lambda index: bounds[(*place, index + 2)]
            self.masked, total = (bounds[(*place, i32(c))] for c in range(2))
            self.full = total - self.masked
            return
        first, full_first, full_end, end = (bounds[(row, tile, i32(c))] for c in range(4))
        self._first, self._full_first, self._full_end = first, full_first, full_end
        self._before = full_first - first
        self.masked = self._before + (end - full_end)
        self.full = full_end - full_first

    def masked_tile(self, index: Any) -> jax.Array:
        """The tile of this index among those that need a mask; beyond the last one, any tile."""
        if self._list is not None:
            return self._listed(index)
        after = self._full_end + (index - self._before)
        return self._inside(jnp.where(index < self._before, self._first + index, after))

    def full_tile(self, index: Any) -> jax.Array:
        """The tile of this index among the full ones; beyond the last one, any tile."""
        if self._list is not None:
            return self._listed(self.masked + index)
        return jnp.minimum(self._full_first + index, self._last)

    def tile(self, index: Any) -> jax.Array:
        """The tile of this index among all; beyond the last one, any tile."""
        if self._list is not None:
            return self._listed(index)
        full = self.full_tile(index - self.masked)
        return jnp.where(index < self.masked, self.masked_tile(index), full)

    def _listed(self, index: Any) -> jax.Array:
        assert self._list is not None
        # A list has an entry for every tile of the other side.
        return self._list(jnp.minimum(index, self._last))

    def _inside(self, tile: jax.Array) -> jax.Array:
        return jnp.clip(tile, 0, self._last)
