"""Intervals of packed documents, next to tile bounds.

Most tiles that need a mask are at an edge of one document. If the queries of a part of a tile are
of one document, or of one and the next, each attends to one range of key *indices*. A mask by these
loads no position and no segment id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bounds import joint_reduction, module_of
from pallas_kernels.inputs import KVSide, QuerySide
from pallas_kernels.mask import Mask

_INT32 = np.iinfo(np.int32)
# Indices of tokens are below this.
_FAR = 2**29
# Keys of a chunk.
_CHUNK = 64
# Numbers of a part, and its size in the table, so that they begin at a multiple of 16 bytes.
INTERVAL_NUMBERS, INTERVAL_SIZE = 9, 12


class DocumentBounds(NamedTuple):
    """Tile bounds of query tiles, and intervals of their queries.

    Those of the backward pass are of KV tiles: read keys for queries, and queries for keys.

    Attributes:
      ranges: tile bounds (:mod:`pallas_kernels.bounds`).
      intervals: int32 ``[B, query tiles, 12 * parts]``: for each part of a tile ``(start, end,
        first_start, first_end)``, four changes, ``split``, and three zeros. Query r of the part
        attends to the keys with index from ``max(start, first_start + r)`` up to, not including,
        ``min(end, first_end + r)``. From query ``split`` on, the changes are added to the first
        four numbers. Where ``end`` is -1, queries have no such intervals, or they are unknown.
    """

    ranges: Any
    intervals: Any


def query_intervals(mask: Mask, query: QuerySide, kv: KVSide, block: int, parts: int) -> jax.Array:
    """``intervals`` of :class:`DocumentBounds`.

    A part has intervals if its queries are of one document, or of one and the next, where padding
    is a document without keys; if a document's keys are neighbors; and if positions, where a window
    reads them, grow by the same number from query to query and from key to key of a document. So a
    document may not cross places where positions jump, like the middle of a zigzag layout's shard.
    A part's second document is the first one of the next part, unless it ends with its own: then
    the part has none.

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
    ids = jnp.pad(query.segment_ids, ((0, 0), (0, count * block - length)))
    ids = ids.reshape(-1, count, block)
    first_id, following_id = ids[:, :, 0], _following(ids[:, :, 0], 0)
    changed = (ids[:, :, 1:] != ids[:, :, :-1]).astype(jnp.int32)
    place = np.arange(1, block, dtype=np.int32)[None, None]
    changes, split = joint_reduction((lax.add, 0, changed), (lax.add, 0, changed * place))
    step: Any = np.int32(1)
    offset: Any = np.zeros(keys, np.int32)
    if mask.reads_positions:
        assert kv.positions is not None
        if keys > 1:
            step = kv.positions[1] - kv.positions[0]
        # Equal where positions grow by ``step``. Sums that overflow wrap, which changes nothing.
        offset = kv.positions - step * np.arange(keys, dtype=np.int32)
    start, end, tokens, is_hidden = _documents(first_id, kv.segment_ids, offset)
    is_padding = first_id == 0
    start, end = (jnp.where(is_padding, 0, x) for x in (jnp.minimum(start, end), end))
    is_known = is_padding | ((tokens == end - start) & ~is_hidden)
    goes_on = jnp.bool_(True)
    first_start, first_end = jnp.int32(-_FAR), jnp.int32(_FAR)
    if mask.reads_positions:
        steady, position = _steps(query.positions, step, count, block)
        steady, position = steady[None], position[None]
        is_known &= is_padding | steady
        goes_on = steady & (_following(position, 0) == position + step * np.int32(block))
        # Position of the part's first query minus that of the document's first key.
        first = position - (jnp.take(offset, start, mode="clip") + step * start)
        # The windows are cut off where their sums with positions would overflow.
        step = jnp.maximum(step, 1)
        if mask.left is not None:
            left = jnp.minimum(mask.left, _INT32.max + jnp.minimum(first, 0))
            first_start = start - jnp.clip((left - first) // step, -_FAR, _FAR)
        if mask.right is not None:
            right = jnp.minimum(mask.right, _INT32.max - jnp.maximum(first, 0))
            first_end = start + jnp.clip((first + right) // step, -_FAR, _FAR - 1) + 1
    first = [jnp.broadcast_to(x, end.shape) for x in (start, end, first_start, first_end)]
    # The second document's first query has the same number in both parts' queries, less ``block``.
    second = [_following(x, 0) for x in first]
    second[2:] = (x - np.int32(block) for x in second[2:])
    is_second_known = _following(is_known, True) & (goes_on | (following_id == 0))
    is_second_known &= (changes == 1) & (ids[:, :, -1] == following_id)
    exists = is_known & ((changes == 0) | is_second_known)
    split = jnp.broadcast_to(jnp.where(changes == 0, np.int32(block), split), end.shape)
    numbers = [first[0], jnp.where(exists, first[1], -1), *first[2:]]
    numbers += [y - x for x, y in zip(first, second, strict=True)]
    numbers += [split] + [jnp.zeros_like(end)] * (INTERVAL_SIZE - INTERVAL_NUMBERS)
    return jnp.stack(numbers, axis=-1).reshape(end.shape[0], -1, INTERVAL_SIZE * parts)


def _documents(
    ids: jax.Array, segment_ids: jax.Array, offset: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Where the keys of some documents are.

    A key is compared with the first and the last id of its chunk, and a document with these ids
    alone: S / 64 comparisons instead of S.

    Args:
      ids: int32 ``[R, documents]``.
      segment_ids: int32 ``[R, S]``, of the keys.
      offset: int32 ``[S]``: position minus index, up to a factor.

    Returns:
      ``[R, documents]`` each, of keys with the document's id, which must not be 0: the first index,
      the end, how many do not come after a jump of the offset, and whether there may be others,
      which are not counted, where a chunk has more than two ids. With no key the index is S, and
      the end 0.
    """
    keys = segment_ids.shape[1]
    count = -(-keys // _CHUNK)
    extra = count * _CHUNK - keys

    def in_chunks(x: Any, **options: Any) -> Any:
        x = module_of(x).pad(x, ((0, 0), (0, extra)), **options)
        return x.reshape(-1, count, _CHUNK)

    index: Any = in_chunks(np.arange(keys, dtype=np.int32)[None], constant_values=keys)
    after: Any = in_chunks(np.arange(1, keys + 1, dtype=np.int32)[None])
    counted: Any = in_chunks(_not_after_jump(segment_ids, offset))
    of_keys = in_chunks(segment_ids, mode="edge")
    edges = of_keys[:, :, 0], of_keys[:, :, -1]
    # The last id's keys are none where it is the first one, too.
    is_first, is_last = (_all_ones_where_equal(of_keys, x[:, :, None]) for x in edges)
    kinds = is_first, is_last & ~is_first
    left_out = is_first | is_last | _all_ones_where_equal(of_keys, jnp.int32(0))
    reductions: list[Any] = []
    for kind in kinds:
        reductions += [
            (lax.min, keys, (kind & index) | (~kind & np.int32(keys))),
            (lax.max, 0, kind & after),
            (lax.add, 0, kind & counted),
        ]
    for operation, start in ((lax.min, _INT32.max), (lax.max, _INT32.min)):
        others = (left_out & np.int32(start)) | (~left_out & of_keys)
        reductions.append((operation, start, others))
    *by_kind, low, high = joint_reduction(*reductions)
    found = []
    for edge, numbers in zip(edges, (by_kind[:3], by_kind[3:]), strict=True):
        same = _all_ones_where_equal(ids[:, :, None], edge[:, None])
        first, end, number = (x[:, None] for x in numbers)
        found.append(((same & first) | (~same & np.int32(keys)), same & end, same & number))
    (a_first, a_end, a_number), (b_first, b_end, b_number) = found
    document = ids[:, :, None]
    between = (document >= low[:, None]) & (document <= high[:, None])
    start, end, tokens, hidden = joint_reduction(
        (lax.min, keys, jnp.minimum(a_first, b_first)),
        (lax.max, 0, jnp.maximum(a_end, b_end)),
        (lax.add, 0, a_number + b_number),
        (lax.max, 0, between.astype(jnp.int32)),
    )
    return start, end, tokens, hidden != 0


def _following(x: jax.Array, last: Any) -> jax.Array:
    """``x[:, 1:]``, and ``last``."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)


def _all_ones_where_equal(x: jax.Array, y: jax.Array) -> jax.Array:
    """-1 where two int32 arrays are equal, else 0.

    XLA writes the result of a comparison that several operands of a reduction share to memory,
    by a kernel of its own, and then reads it. It does not do so with other arithmetic.
    """
    apart = jnp.minimum(lax.bitcast_convert_type(x ^ y, jnp.uint32), jnp.uint32(1))
    return apart.astype(jnp.int32) - 1


def _not_after_jump(segment_ids: jax.Array, offset: Any) -> Any:
    """1, or 0 where a key has another offset than the key before it, of the same document."""
    if isinstance(offset, np.ndarray) and (offset == offset[0]).all():
        return np.ones((1, segment_ids.shape[1]), np.int32)
    jumps = jnp.diff(offset)[None] != 0
    after_jump = jumps & (segment_ids[:, 1:] == segment_ids[:, :-1])
    return 1 - jnp.pad(after_jump, ((0, 0), (1, 0))).astype(jnp.int32)


def _steps(positions: Any, step: Any, count: int, block: int) -> tuple[Any, Any]:
    """``(steady, first)``, ``[count]``: of the queries of each part.

    ``steady``: whether their positions grow by ``step``, which is positive. ``first``: position of
    the first one.
    """
    extra, xp = count * block - positions.shape[0], module_of(positions)
    padded = xp.pad(positions, (0, extra), mode="edge")
    # Positions of the padding follow the last one.
    after = np.maximum(np.arange(count * block, dtype=np.int32) - (positions.shape[0] - 1), 0)
    padded = (padded + step * after).reshape(count, block)
    return (padded[:, 1:] - padded[:, :-1] == step).all(1) & (step > 0), padded[:, 0]
