"""Dropout in the Mosaic GPU kernels: numbers of rows and columns, made once outside of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.dropout import column_numbers
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.pallas_mosaic.configs import MosaicConfig


class DropoutNumbers(NamedTuple):
    """What says which weights are dropped, in device memory.

    Attributes:
      rows: int32 ``[B, N, T]``, the number of each query.
      columns: int32 ``[S]``, the number of each key.
    """

    rows: Any
    columns: Any

    @classmethod
    def padded(cls, inputs: AttentionInputs, config: MosaicConfig) -> DropoutNumbers | None:
        """Arrays padded to whole tiles; None if nothing is dropped."""
        if inputs.shared.dropout_seeds is None:
            return None
        block_q = config.tiles.block_q
        q_length = -(-inputs.q_length // block_q) * block_q
        kv_length = -(-inputs.kv_length // config.block_kv) * config.block_kv
        columns = column_numbers(inputs.kv_positions)
        rows = pad_axis(inputs.dropout_rows, 2, q_length)
        return cls(rows, pad_axis(columns, 0, kv_length))

    def load_rows(self, batch_row: Any, head: Any, queries: Any, layout: Any) -> jax.Array:
        """The numbers of some queries, in registers."""
        ref = self.rows.at[batch_row, head, queries]
        return plgpu.load(ref, layout=layout, optimized=False)

    def load_columns(self, keys: Any, layout: Any) -> jax.Array:
        """The numbers of some keys, in registers."""
        return plgpu.load(self.columns.at[keys], layout=layout, optimized=False)
