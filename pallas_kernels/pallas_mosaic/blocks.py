"""The test of scores by a table of blocks in the Mosaic GPU kernels.

A warpgroup's rows are in one entry of the table, and so is every part of 64 columns: blocks whose
tokens lie otherwise are not taken. So a tile of scores is tested by one number or two, which are
read where the tile is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS, MosaicConfig
from pallas_kernels.pallas_mosaic.tiles import TILE, i32


def unsupported_blocks(inputs: AttentionInputs) -> str | None:
    """Why the kernels cannot take the inputs' mask by blocks, or None."""
    mask = inputs.shared.block_mask
    if mask is None or not mask.tests_scores(WARPGROUP_ROWS, WARPGROUP_ROWS):
        return None
    return (
        f"blocks of block_mask hold {mask.q_run} queries and {mask.kv_run} keys side by side on a "
        f"device; it takes multiples of {WARPGROUP_ROWS} (use larger blocks, or None, 'triton' or "
        "'xla')"
    )


class BlockEntries(NamedTuple):
    """A table of blocks in device memory, and where a device's tokens are in it.

    Attributes:
      table: int32 ``[N or 1, rows, columns]``, not 0 where queries may see keys.
      q_rows: int32, the row of every 64 queries side by side.
      kv_columns: int32, the column of every 64 keys side by side.
    """

    table: Any
    q_rows: Any
    kv_columns: Any

    @classmethod
    def of(cls, inputs: AttentionInputs, config: MosaicConfig) -> BlockEntries | None:
        """Those of the inputs, for whole tiles; None without a mask by blocks."""
        mask = inputs.shared.block_mask
        if mask is None:
            return None

        def padded(places: jax.Array, length: int, block: int) -> jax.Array:
            return pad_axis(places, 0, -(-length // block) * block // WARPGROUP_ROWS)

        rows = mask.rows(inputs.q_positions[::WARPGROUP_ROWS])
        columns = mask.columns(inputs.kv_positions[::WARPGROUP_ROWS])
        return cls(
            mask.table.astype(jnp.int32),
            padded(rows, inputs.q_length, config.tiles.block_q),
            padded(columns, inputs.kv_length, config.block_kv),
        )

    def seen(self, head: Any, q_part: Any, kv_part: Any) -> jax.Array:
        """Whether some 64 queries may see some 64 keys."""
        head = head if self.table.shape[0] > 1 else i32(0)
        return self.table[head, self.q_rows[q_part], self.kv_columns[kv_part]] != 0


def columns_seen(shape: tuple[int, ...], seen: Sequence[jax.Array]) -> jax.Array:
    """Which scores of a tile count, if its part i of 64 columns does where ``seen[i]`` is True."""
    index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
    ok = None
    # What counts of two parts side by side is one range of columns.
    for first in range(0, len(seen), 2):
        middle = (first + 1) * WARPGROUP_ROWS
        start = jnp.where(seen[first], i32(middle - WARPGROUP_ROWS), i32(middle))
        end = i32(middle)
        if first + 1 < len(seen):
            end = jnp.where(seen[first + 1], i32(middle + WARPGROUP_ROWS), end)
        here = (index >= start) & (index < end)
        ok = here if ok is None else ok | here
    assert ok is not None
    return ok
