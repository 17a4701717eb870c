"""A program's way over the tiles of the other side that its bounds allow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pallas_mosaic.tiles import i32


class Walk:
    """The order in which an item visits tiles: first those that need a mask, then the full ones.

    Args:
      bounds: int32 ``[1 or B, tiles, 4]`` in device memory: query_bounds' or key_bounds'. Or their
        lists, ``[1 or B, 1 or heads, tiles, 2 + tiles of the other side]``.
      batch_row: the item's row of the batch.
      head: the item's head, of the side that items are split over.
      tile: the item's tile.
      last: the last tile of the side that is walked over.
      rotate: start the full tiles so many tiles further on, and come back to the first ones at the
        end.

    Attributes:
      masked: how many tiles need a mask.
      total: how many tiles there are.
    """

    def __init__(
        self, bounds: Any, batch_row: Any, head: Any, tile: Any, last: int, rotate: Any = None
    ):
        row = batch_row if bounds.shape[0] != 1 else i32(0)
        self._last, self._list = i32(last), None
        if len(bounds.shape) == 4:
            place = (row, head if bounds.shape[1] != 1 else i32(0), tile)
            self._list = lambda index: bounds[(*place, index + 2)]
            # A list has ranges of places.
            full_first, end = (bounds[(*place, i32(c))] for c in range(2))
            first, full_end = i32(0), end
        else:
            first, full_first, full_end, end = (bounds[(row, tile, i32(c))] for c in range(4))
        self._first, self._full_first, self._full_end = first, full_first, full_end
        self._before = full_first - first
        full_tiles = full_end - full_first
        self._rotate = None if rotate is None else lax.rem(rotate, jnp.maximum(full_tiles, 1))
        self.masked = self._before + (end - full_end)
        self.total = end - first

    def tile(self, step: Any) -> jax.Array:
        """The tile of a step. Beyond the last step: any tile."""
        masked = jnp.where(
            step < self._before, self._first + step, self._full_end + (step - self._before)
        )
        i = step - self.masked
        if self._rotate is not None:
            i = i + self._rotate
            count = self._full_end - self._full_first
            i = jnp.where(i >= count, i - count, i)
        tile = jnp.where(step < self.masked, masked, self._full_first + i)
        tile = jnp.clip(tile, 0, self._last)
        return tile if self._list is None else self._list(tile)
