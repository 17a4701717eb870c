"""From rows of token ids to a batch: shifted, padded and permuted on the host, then placed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from burst_jax.layout import Layout, pad_to_layout, to_layout
from burst_jax.sharding import AxisNames, token_spec

Batch = dict[str, Any]


def make_batch(
    rows: np.ndarray,
    *,
    layout: Layout = "contiguous",
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
) -> Batch:
    """Makes a next-token batch from rows of T + 1 tokens.

    Targets are shifted first, while a token's neighbour is still beside it. Then everything is
    padded to a length that the layout can split, and permuted together::

        rows      a b c d e          inputs   a b c d     targets  b c d e
        zigzag, 2 shards             inputs   a d b c     targets  b e c d

    Args:
      rows: integers ``[B, T + 1]``.
      layout: order of the tokens, see :func:`burst_jax.to_layout`.
      num_shards: shards of the ring, see :func:`burst_jax.positions`.
      segment_ids: int32 ``[B, T + 1]``, 0 for padding; None is one segment per row, no padding.

    Returns:
      A dict of NumPy arrays ``[B, T_padded]`` in ``layout``:

      - ``inputs``, ``targets``: int32.
      - ``positions``: int32, the index in the row (RoPE needs differences only, so it need not
        restart with a segment).
      - ``segment_ids``: int32, 0 for padding; None if there is no padding and none were given.
      - ``weights``: float32, 1 where the target counts: the token and its target are of the same
        segment, and it is not 0.

    Raises:
      ValueError: rows of another rank or dtype or shorter than 2, segment ids of another shape or
        dtype, an unknown layout.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ValueError(f"rows has shape {rows.shape}: it needs [B, T + 1] with T at least 1")
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows has dtype {rows.dtype}: token ids are integers")
    if segment_ids is not None:
        if segment_ids.shape != rows.shape:
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape}, rows {rows.shape}: they must be equal"
            )
        if segment_ids.dtype != np.int32:
            raise ValueError(f"segment_ids has dtype {segment_ids.dtype}: convert it to int32")
    batch_size, length = rows.shape[0], rows.shape[1] - 1
    weights = np.ones((batch_size, length), np.float32)
    segments = None
    if segment_ids is not None:
        segments, next_segments = segment_ids[:, :-1], segment_ids[:, 1:]
        weights = ((segments == next_segments) & (segments != 0)).astype(np.float32)
    batch = {
        "inputs": rows[:, :-1].astype(np.int32),
        "targets": rows[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length)),
        "weights": weights,
    }
    batch, padded_segments = pad_to_layout(batch, layout, num_shards, segments)
    if segments is not None or padded_segments.shape[1] != length:
        batch["segment_ids"] = padded_segments
    batch = to_layout(batch, layout, num_shards)
    batch.setdefault("segment_ids", None)
    return batch


def place_batch(
    batch: Batch, mesh: Any, *, seq_axis: AxisNames = "seq", batch_axis: AxisNames = None
) -> Batch:
    """Puts a batch of ``[B, T]`` host arrays onto the mesh, every device its own tokens only.

    Every process passes the same whole batch. A process copies only its devices' part.

    Raises:
      ValueError: B or T that the mesh axes do not divide.
    """
    sharding = NamedSharding(mesh, token_spec(batch_axis, seq_axis))

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)
