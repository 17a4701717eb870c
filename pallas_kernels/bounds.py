"""Tile bounds: which KV tiles a query tile attends to, and which of them need no mask.

The bounds of a tile are ``(first, full_first, full_end, end)``, in tiles of the other side:

    [first, full_first)      may be partly masked: the kernel applies the mask
    [full_first, full_end)   no score is masked: no mask arithmetic
    [full_end, end)          may be partly masked: the kernel applies the mask

Tiles outside ``[first, end)`` are masked entirely. Empty bounds are ``(0, 0, 0, 0)``. The parts of
a tile, if it has several, can each skip some of ``[full_end, end)``, from the end.

With a block-sparse mask the tiles are not contiguous, so a tile has a list instead::

    (masked, visited, tiles that may be partly masked, tiles without masked scores, other tiles)

A kernel visits the first ``visited`` tiles of the list, of which the first ``masked`` need a mask.
All scores of the other tiles are masked.

Bounds depend on positions, segment ids and KV bounds, not on layers or heads. They are computed
once per pair of shards, from each tile's smallest and largest values. A range may contain a tile
whose scores are all masked; it never omits a tile with an unmasked score.

Where positions are NumPy arrays and nothing else is masked, bounds are computed while tracing and
are constants of the program. On the GPU they take up to seven launches, without those
of :mod:`pallas_kernels.document_bounds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.block_mask import BlockMask
from pallas_kernels.inputs import AttentionInputs, KVSide, QuerySide, Side
from pallas_kernels.mask import Mask, TileSummary, both
from pallas_kernels.spec import AttentionSpec, Tiles

_INT32 = jnp.iinfo(jnp.int32)


def query_bounds(
    mask: Mask,
    query: QuerySide,
    kv: KVSide,
    tiles: Tiles,
    block_mask: BlockMask | None = None,
    parts: int = 1,
) -> jax.Array:
    """Bounds in KV tiles for every query tile.

    Args:
      mask: the mask.
      query: positions, segment ids and KV bounds of the queries.
      kv: positions and segment ids of the keys.
      tiles: the tile sizes.
      block_mask: the block-sparse mask; None: none.
      parts: equal parts of a query tile that skip tiles each for itself; 1 with a block-sparse
        mask.

    Returns:
      int32 ``[R, ceil(T / block_q), 4]``; R is B if sequences differ in segment ids or KV bounds,
      else 1. With several parts, each part's number of skipped tiles follows:
      ``[R, ceil(T / block_q), 4 + parts]``. With a block-sparse mask lists, int32
      ``[R, N or 1, query tiles, 2 + KV tiles]``.
    """
    if parts > 1:
        tiles = dataclasses.replace(tiles, block_q=tiles.block_q // parts)
    possible, full = _tiles(mask, query, kv, tiles, block_mask)
    return _ranges(possible, full, parts) if block_mask is None else _lists(possible, full)


def key_bounds(
    mask: Mask,
    query: QuerySide,
    kv: KVSide,
    tiles: Tiles,
    block_mask: BlockMask | None = None,
    groups: int = 1,
) -> jax.Array:
    """Bounds in query tiles for every KV tile.

    ``groups``: query heads per key/value head.

    Returns:
      int32 ``[R, ceil(S / block_kv), 4]``; R is B if sequences differ in segment ids or KV bounds,
      else 1. With a block-sparse mask lists, int32 ``[R, K or 1, KV tiles, 2 + query tiles]``, of
      the tiles that any query head of the key/value head visits.
    """
    if block_mask is None and mask.mask_mod is None and not query.kv_bounds:
        # Reductions over columns would be more kernels than those over rows.
        sides = _summary(kv, tiles.block_kv), _summary(query, tiles.block_q)
        return _ranges(*mask.exchanged.tiles(*sides))
    possible, full = _tiles(mask, query, kv, tiles, block_mask)
    possible, full = possible.swapaxes(-1, -2), full.swapaxes(-1, -2)
    if block_mask is None:
        return _ranges(possible, full)
    if block_mask.heads > 1:
        by_group = (possible.shape[0], -1, groups, *possible.shape[2:])
        possible, full = possible.reshape(by_group).any(2), full.reshape(by_group).all(2)
    return _lists(possible, full)


def lists_for_all(
    mask: Mask, query: QuerySide, kv: KVSide, tiles: Tiles, block_mask: BlockMask
) -> jax.Array:
    """Lists of the KV tiles that some head of some sequence visits, for every query tile.

    Returns:
      int32 ``[1, 1, query tiles, 2 + KV tiles]``.
    """
    possible, full = _tiles(mask, query, kv, tiles, block_mask)
    return _lists(possible.any((0, 1), keepdims=True), full.all((0, 1), keepdims=True))


def over_batch(bounds: jax.Array) -> jax.Array:
    """``(first, end)`` over the whole batch: ``[R, tiles, 4]`` to ``[tiles, 2]``."""
    first, end = bounds[..., 0], bounds[..., 3]
    # In empty bounds first is 0, which must not lower the minimum over the batch.
    first = jnp.where(first < end, first, _INT32.max).min(0)
    end = end.max(0)
    return jnp.stack([jnp.minimum(first, end), end], axis=-1)


def split_tiles[Bounds](bounds: Bounds) -> tuple[Bounds, Bounds]:
    """Splits a pytree of bounds in two: one keeps the first half of the tiles, one the second.

    The other tiles' bounds are empty.
    """

    def half(table: jax.Array, first: bool) -> jax.Array:
        tiles, xp = table.shape[-2], module_of(table)
        index = np.arange(tiles, dtype=np.int32)[:, None]
        return xp.where((index < (tiles + 1) // 2) == first, table, np.int32(0))

    first, second = (jax.tree.map(lambda x, i=i: half(x, i), bounds) for i in (True, False))
    return first, second


def split_backward[Bounds](
    bounds: Bounds, inputs: AttentionInputs, *, spec: AttentionSpec
) -> tuple[Bounds, Bounds]:
    """:func:`split_tiles` as an implementation's ``split_backward``."""
    del inputs, spec
    return split_tiles(bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HalfBounds[Bounds]:
    """Tile bounds of which those of a half of the tiles are empty, as a kernel knows beforehand.

    Attributes:
      bounds: the bounds of all tiles.
      group_heads: heads per L2 swizzle group.
      writes_half: whether a kernel that makes new arrays leaves those of the second half unset.
    """

    bounds: Bounds
    group_heads: int = dataclasses.field(metadata={"static": True})
    writes_half: bool = dataclasses.field(default=False, metadata={"static": True})


def _tiles(
    mask: Mask, query: QuerySide, kv: KVSide, tiles: Tiles, block_mask: BlockMask | None
) -> tuple[jax.Array, jax.Array]:
    """``(possible, full)`` of every tile of scores: ``[R, q, kv]``, or ``[R, N or 1, q, kv]``."""
    sides = _summary(query, tiles.block_q), _summary(kv, tiles.block_kv)
    possible, full = mask.tiles(*sides)
    if block_mask is None:
        return possible, full
    by_blocks = block_mask.tiles(*sides)
    possible, full = (both(x[:, None], y) for x, y in zip((possible, full), by_blocks, strict=True))
    return possible, full


def _summary(side: Side, block: int) -> TileSummary:
    assert side.positions is not None
    length = side.positions.shape[0]
    count = -(-length // block)
    extra = count * block - length
    pos = module_of(side.positions).pad(side.positions, (0, extra), mode="edge")
    pos = pos.reshape(1, count, block)
    pos_first, pos_last = joint_reduction((lax.min, _INT32.max, pos), (lax.max, _INT32.min, pos))
    whole: Any = np.arange(count, dtype=np.int32)[None] < length // block
    summary = TileSummary(pos_first, pos_last, whole, None, None, None)
    if side.segment_ids is not None:
        summary = summary._replace(**tile_segments(side.segment_ids, count, block))
    if isinstance(side, QuerySide) and side.kv_bounds:
        summary = summary._replace(**_kv_bounds(side.kv_bounds, count, block))
    return summary


def tile_segments(segment_ids: jax.Array, count: int, block: int) -> dict[str, jax.Array]:
    """The fields of :class:`TileSummary` about segments."""
    extra = count * block - segment_ids.shape[1]
    seg = jnp.pad(segment_ids, ((0, 0), (0, extra))).reshape(-1, count, block)
    low, high, padded = joint_reduction(
        (lax.min, _INT32.max, jnp.where(seg == 0, _INT32.max, seg)),
        (lax.max, _INT32.min, jnp.where(seg == 0, _INT32.min, seg)),
        (lax.max, 0, (seg == 0).astype(jnp.int32)),
    )
    only = jnp.where((low == high) & (padded == 0), low, 0)
    return {"segment_low": low, "segment_high": high, "segment": only, "padded": padded}


def tiles_with_padding(segment_ids: jax.Array, block: int) -> jax.Array:
    """int32 ``[B, tiles]``: 1 where a tile of ``block`` tokens holds padding, else 0.

    Next to tile bounds of the same tiles XLA computes nothing twice.
    """
    return tile_segments(segment_ids, -(-segment_ids.shape[1] // block), block)["padded"]


def _kv_bounds(bounds: dict[str, jax.Array], count: int, block: int) -> dict[str, jax.Array]:
    """The fields of :class:`TileSummary` about per-query KV bounds."""
    rows = max(x.shape[0] for x in bounds.values())

    def tiles(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * block - x.shape[1])), mode="edge")
        return jnp.broadcast_to(x.reshape(-1, count, block), (rows, count, block))

    starts, ends = (tiles(bounds[n]) if n in bounds else None for n in ("kv_starts", "kv_ends"))
    sees = True if starts is None or ends is None else starts < ends
    parts = {}
    if starts is not None:
        parts["earliest_start"] = (lax.min, _INT32.max, jnp.where(sees, starts, _INT32.max))
        parts["latest_start"] = (lax.max, _INT32.min, starts)
    if ends is not None:
        parts["earliest_end"] = (lax.min, _INT32.max, ends)
        parts["latest_end"] = (lax.max, _INT32.min, jnp.where(sees, ends, _INT32.min))
    return dict(zip(parts, joint_reduction(*parts.values()), strict=True))


def _ranges(possible: jax.Array, full: jax.Array, parts: int = 1) -> jax.Array:
    count, xp = possible.shape[-1], module_of(possible, full)
    index = xp.arange(count, dtype=np.int32)
    # The range of full tiles is the first run of them. Causal and window masks have only one run.
    # Segments may have more; masking those tiles is needless but correct. The first run ends where
    # a full tile is first followed by one that is not.
    before = xp.pad(full[..., :-1], ((0, 0), (0, 0), (1, 0)))
    first, end, full_first, full_end = joint_reduction(
        (lax.min, count, xp.where(possible, index, count)),
        (lax.max, 0, xp.where(possible, index + 1, 0)),
        (lax.min, count, xp.where(full, index, count)),
        (lax.min, count, xp.where(before & ~full, index, count)),
    )
    part_end = end
    if parts > 1:
        # A part that attends to no key does not make the others mask their tiles.
        full_first, full_end = xp.where(end > 0, full_first, 0), xp.where(end > 0, full_end, count)
        padding = ((0, 0), (0, -first.shape[1] % parts))

        def by_tile(x, fill):
            x = xp.pad(x, padding, constant_values=fill)
            return x.reshape(x.shape[0], -1, parts)

        part_end = by_tile(end, 0)
        first, end = by_tile(first, count).min(-1), part_end.max(-1)
        full_first, full_end = by_tile(full_first, 0).max(-1), by_tile(full_end, count).min(-1)
    first = xp.minimum(first, end)
    full_first = xp.clip(full_first, first, end)
    full_end = xp.clip(full_end, full_first, end)
    bounds = xp.stack([first, full_first, full_end, end], axis=-1)
    if parts == 1:
        return bounds
    skipped = xp.minimum(end[..., None] - part_end, (end - full_end)[..., None])
    skipped = xp.where(part_end > 0, skipped, count)
    return xp.concatenate([bounds, skipped], axis=-1)


def _lists(possible: jax.Array, full: jax.Array) -> jax.Array:
    count = possible.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    masked = possible & ~full
    # Sorted by kind: masked, full, not visited; within a kind in ascending order.
    kind = jnp.where(masked, 0, jnp.where(possible, 1, 2)).astype(jnp.int32)
    tiles = lax.rem(jnp.sort(kind * jnp.int32(count) + index, axis=-1), jnp.int32(count))
    counts = [x.sum(-1, keepdims=True, dtype=jnp.int32) for x in (masked, possible)]
    return jnp.concatenate([*counts, tiles], axis=-1)


def joint_reduction(*parts: tuple[Callable[..., jax.Array], int, jax.Array]) -> Sequence[jax.Array]:
    """Reduces int32 arrays of one shape over their last axis, each ``(operation, start, array)``.

    One joint reduction is one small GPU kernel, which runs before every attention.
    """
    operations, starts, arrays = zip(*parts, strict=True)
    if module_of(*arrays) is np:
        ufuncs = {lax.min: np.minimum, lax.max: np.maximum}
        return [
            ufuncs[operation].reduce(array, axis=-1, initial=start)
            for operation, start, array in parts
        ]

    def combine(left, right):
        return tuple(op(a, b) for op, a, b in zip(operations, left, right, strict=True))

    starts = tuple(jnp.int32(start) for start in starts)
    return lax.reduce(arrays, starts, combine, (arrays[0].ndim - 1,))


def module_of(*arrays: jax.Array | np.ndarray) -> Any:
    """NumPy if all arrays are known while tracing, else ``jax.numpy``."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
