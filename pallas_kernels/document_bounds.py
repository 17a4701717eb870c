"""Intervals of packed documents, next to tile bounds.

Most tiles that need a mask are at an edge of one document. If the queries of a part of a tile are
all of one document, each attends to one range of key *indices*. A mask by these loads no position
and no segment id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bounds import joint_reduction, tile_segments
from pallas_kernels.inputs import KVSide, QuerySide
from pallas_kernels.mask import Mask

_INT32 = np.iinfo(np.int32)
# Indices of tokens are below this.
_FAR = 2**29
# Numbers that an interval has.
INTERVAL_SIZE = 4


class DocumentBounds(NamedTuple):
    """Tile bounds of query tiles, and intervals of their queries.

    Attributes:
      ranges: tile bounds (:mod:`pallas_kernels.bounds`).
      intervals: int32 ``[B, query tiles, 4 * parts]``: for each part of a tile ``(start, end,
        first_start, first_end)``. Query r of the part attends to the keys with index from
        ``max(start, first_start + r)`` up to, not including, ``min(end, first_end + r)``. Where
        ``end`` is -1, queries have no such intervals, or they are unknown.
    """

    ranges: Any
    intervals: Any


def query_intervals(mask: Mask, query: QuerySide, kv: KVSide, block: int, parts: int) -> jax.Array:
    """``intervals`` of :class:`DocumentBounds`.

    A part has an interval if all of its queries are of one document, and none is padding, if the
    document's keys are neighbors, and if positions, where a window reads them, grow by the same
    number from query to query and from key to key of the document. So a document may not cross
    places where positions jump, like the middle of a zigzag layout's shard.

    Args:
      mask: the window; its ``mask_mod`` must be None.
      query: positions and segment ids of the queries.
      kv: those of the keys.
      block: queries of a part.
      parts: parts of a tile.
    """
    assert query.segment_ids is not None
    assert kv.segment_ids is not None
    length, keys = query.segment_ids.shape[1], kv.segment_ids.shape[1]
    count = -(-length // (block * parts)) * parts
    only = tile_segments(query.segment_ids, count, block)["segment"]
    index = jnp.arange(keys, dtype=jnp.int32)
    same = only[:, :, None] == kv.segment_ids[:, None, :]
    parts_of_keys = [
        (lax.min, keys, jnp.where(same, index, keys)),
        (lax.max, 0, jnp.where(same, index + 1, 0)),
        (lax.add, 0, same.astype(jnp.int32)),
    ]
    step: Any = jnp.int32(1)
    if mask.reads_positions:
        assert kv.positions is not None
        if keys > 1:
            step = kv.positions[1] - kv.positions[0]
        # Equal where positions grow by ``step``. Sums that overflow wrap, which changes nothing.
        offset = kv.positions - step * index
        parts_of_keys += [
            (lax.min, _INT32.max, jnp.where(same, offset, _INT32.max)),
            (lax.max, _INT32.min, jnp.where(same, offset, _INT32.min)),
        ]
    start, end, tokens, *offsets = joint_reduction(*parts_of_keys)
    start = jnp.minimum(start, end)
    is_interval = (only != 0) & (tokens == end - start)
    first_start, first_end = jnp.int32(-_FAR), jnp.int32(_FAR)
    if mask.reads_positions:
        low, high = offsets
        is_interval &= (low == high) | (tokens == 0)
        steady, position = _steps(query.positions, step, count, block)
        is_interval &= steady[None]
        # Position of the part's first query minus that of the document's first key.
        first = position - (low + step * start)
        # The windows are cut off where their sums with positions would overflow.
        step = jnp.maximum(step, 1)
        if mask.left is not None:
            left = jnp.minimum(mask.left, _INT32.max + jnp.minimum(first, 0))
            first_start = start - jnp.clip((left - first) // step, -_FAR, _FAR)
        if mask.right is not None:
            right = jnp.minimum(mask.right, _INT32.max - jnp.maximum(first, 0))
            first_end = start + jnp.clip((first + right) // step, -_FAR, _FAR - 1) + 1
    end = jnp.where(is_interval, end, -1)
    numbers = [jnp.broadcast_to(x, end.shape) for x in (start, end, first_start, first_end)]
    return jnp.stack(numbers, axis=-1).reshape(end.shape[0], -1, INTERVAL_SIZE * parts)


def _steps(positions: Any, step: jax.Array, count: int, block: int) -> tuple[Any, Any]:
    """``(steady, first)``, ``[count]``: of the queries of each part.

    ``steady``: whether their positions grow by ``step``, which is positive. ``first``: position of
    the first one.
    """
    extra = count * block - positions.shape[0]
    # The padding repeats the last position; a part with padding is of no single document.
    padded = jnp.pad(positions, (0, extra), mode="edge").reshape(count, block)
    return (jnp.diff(padded) == step).all(1) & (step > 0), padded[:, 0]
