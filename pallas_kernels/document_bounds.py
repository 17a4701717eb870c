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

from pallas_kernels.bounds import joint_reduction, module_of, tile_segments
from pallas_kernels.inputs import KVSide, QuerySide
from pallas_kernels.mask import Mask

_INT32_MAX = np.iinfo(np.int32).max
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
    number from query to query and from key to key.

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
    start, end, tokens = joint_reduction(
        (lax.min, keys, jnp.where(same, index, keys)),
        (lax.max, 0, jnp.where(same, index + 1, 0)),
        (lax.add, 0, same.astype(jnp.int32)),
    )
    start = jnp.minimum(start, end)
    is_interval = (only != 0) & (tokens == end - start)
    first_start, first_end = jnp.int32(-_FAR), jnp.int32(_FAR)
    if mask.reads_positions:
        assert query.positions is not None
        assert kv.positions is not None
        steady, first, step = _steps(query.positions, kv.positions, count, block)
        is_interval = is_interval & steady[None]
        # The windows are cut off where their sums with positions would overflow.
        if mask.left is not None:
            left = jnp.minimum(mask.left, _INT32_MAX + jnp.minimum(first, 0))
            first_start = -((left - first) // step)
        if mask.right is not None:
            right = jnp.minimum(mask.right, _INT32_MAX - jnp.maximum(first, 0))
            first_end = jnp.minimum((first + right) // step, _FAR) + 1
    end = jnp.where(is_interval, end, -1)
    limits = (jnp.clip(x, -_FAR, _FAR) for x in (first_start, first_end))
    numbers = [jnp.broadcast_to(x, end.shape) for x in (start, end, *limits)]
    return jnp.stack(numbers, axis=-1).reshape(end.shape[0], -1, INTERVAL_SIZE * parts)


def _steps(queries: jax.Array, keys: jax.Array, count: int, block: int) -> tuple[Any, Any, Any]:
    """``(steady, first, step)`` of positions.

    ``steady``, ``[count]``: whether the positions of all keys, and those of the part's queries,
    grow by ``step`` from token to token. ``first``, the same: position of the part's first query
    minus that of the first key.
    """
    xp = module_of(queries, keys)
    step = keys[1] - keys[0] if keys.shape[0] > 1 else xp.ones((), np.int32)
    all_keys = (xp.diff(keys) == step).all() & (step > 0)
    extra = count * block - queries.shape[0]
    # The padding repeats the last position; a part with padding is of no single document.
    padded = xp.pad(queries, (0, extra), mode="edge").reshape(count, block)
    of_queries = (xp.diff(padded) == step).all(1)
    return all_keys & of_queries, padded[:, 0] - keys[0], xp.maximum(step, 1)
