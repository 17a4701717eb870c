"""Tile bounds: which key tiles a query tile needs, and which of those need no mask.

A row of a table is ``(first, full_first, full_end, end)``, in tiles of the other side:

    [first, full_first)      may hold scores that count: masked
    [full_first, full_end)   every score counts: no mask arithmetic
    [full_end, end)          may hold scores that count: masked

Nothing outside ``[first, end)`` counts. An empty row is ``(0, 0, 0, 0)``.

Tables depend on positions and segment ids, not on layers or heads: a few thousand comparisons once
per pair of shards, from each tile's smallest and largest position and segment. They may hold a tile
that turns out to be masked; they never leave out one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.spec import AttentionSpec, Tiles, Tokens

_INT32 = jnp.iinfo(jnp.int32)


def query_bounds(
    spec: AttentionSpec, q_tokens: Tokens, kv_tokens: Tokens, tiles: Tiles
) -> jax.Array:
    """Bounds in key tiles for every query tile.

    Returns:
      int32 ``[R, ceil(T / block_q), 4]``; R is B with segment ids, else 1.
    """
    q, kv = _summary(q_tokens, tiles.block_q), _summary(kv_tokens, tiles.block_kv)
    return _ranges(*_classify(spec, q, kv))


def key_bounds(spec: AttentionSpec, q_tokens: Tokens, kv_tokens: Tokens, tiles: Tiles) -> jax.Array:
    """Bounds in query tiles for every key tile.

    Returns:
      int32 ``[R, ceil(S / block_kv), 4]``; R is B with segment ids, else 1.
    """
    q, kv = _summary(q_tokens, tiles.block_q), _summary(kv_tokens, tiles.block_kv)
    possible, full = _classify(spec, q, kv)
    return _ranges(possible.swapaxes(1, 2), full.swapaxes(1, 2))


def over_batch(bounds: jax.Array) -> jax.Array:
    """Bounds that hold for every row of the batch: ``[R, tiles, 4]`` to ``[tiles, 4]``."""
    first, full_first, full_end, end = jnp.moveaxis(bounds, -1, 0)
    # An empty row's first must not pull the others' down.
    first = jnp.where(first < end, first, _INT32.max).min(0)
    end = end.max(0)
    first = jnp.minimum(first, end)
    full_first = jnp.clip(full_first.max(0), first, end)
    full_end = jnp.clip(full_end.min(0), full_first, end)
    return jnp.stack([first, full_first, full_end, end], axis=-1)


def halves_of_tiles(bounds: Any) -> tuple[Any, Any]:
    """Cuts a pytree of bounds in two: the work of the first half of all rows, and of the second."""

    def rows(first: bool) -> Any:
        def keep(table: jax.Array) -> jax.Array:
            tiles = table.shape[1]
            index = jnp.arange(tiles, dtype=jnp.int32)[:, None]
            return jnp.where((index < (tiles + 1) // 2) == first, table, 0)

        return jax.tree.map(keep, bounds)

    return rows(True), rows(False)


class _Summary(NamedTuple):
    """What the bounds need to know of each tile; arrays are ``[R, tiles]`` or ``[1, tiles]``."""

    first: jax.Array
    last: jax.Array
    whole: jax.Array  # False for a ragged last tile, whose tail must be masked
    segment_low: jax.Array | None  # over the tokens that are not padding
    segment_high: jax.Array | None
    segment: jax.Array | None  # the tile's only segment, or 0 if there are several or padding


def _summary(tokens: Tokens, block: int) -> _Summary:
    length = tokens.positions.shape[0]
    count = -(-length // block)
    extra = count * block - length
    pos = jnp.pad(tokens.positions, (0, extra), mode="edge").reshape(1, count, block)
    pos_first, pos_last = _reduce((lax.min, _INT32.max, pos), (lax.max, _INT32.min, pos))
    whole = jnp.arange(count, dtype=jnp.int32)[None] < length // block
    if tokens.segment_ids is None:
        return _Summary(pos_first, pos_last, whole, None, None, None)
    seg = jnp.pad(tokens.segment_ids, ((0, 0), (0, extra))).reshape(-1, count, block)
    low, high, padded = _reduce(
        (lax.min, _INT32.max, jnp.where(seg == 0, _INT32.max, seg)),
        (lax.max, _INT32.min, jnp.where(seg == 0, _INT32.min, seg)),
        (lax.max, 0, (seg == 0).astype(jnp.int32)),
    )
    only = jnp.where((low == high) & (padded == 0), low, 0)
    return _Summary(pos_first, pos_last, whole, low, high, only)


def _classify(spec: AttentionSpec, q: _Summary, kv: _Summary) -> tuple[jax.Array, jax.Array]:
    """``(possible, full)``, bool ``[R, query tiles, key tiles]``."""

    def pair(a, b):
        return a[:, :, None], b[:, None, :]

    q_whole, kv_whole = pair(q.whole, kv.whole)
    full = q_whole & kv_whole
    possible = jnp.ones_like(full)
    q_first, kv_first = pair(q.first, kv.first)
    q_last, kv_last = pair(q.last, kv.last)
    if spec.left is not None:
        possible &= q_first - kv_last <= spec.left
        full &= q_last - kv_first <= spec.left
    if spec.right is not None:
        possible &= kv_first - q_last <= spec.right
        full &= kv_last - q_first <= spec.right
    if q.segment is not None:
        assert kv.segment is not None
        q_low, kv_low = pair(q.segment_low, kv.segment_low)
        q_high, kv_high = pair(q.segment_high, kv.segment_high)
        q_only, kv_only = pair(q.segment, kv.segment)
        # A tile of padding has low > high and overlaps nothing.
        possible = possible & (jnp.maximum(q_low, kv_low) <= jnp.minimum(q_high, kv_high))
        full = full & (q_only == kv_only) & (q_only != 0)
    return possible, full


def _ranges(possible: jax.Array, full: jax.Array) -> jax.Array:
    count = possible.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    # The first run of full tiles. Causal and window masks make only one; packing may make more, and
    # those are masked needlessly, not wrongly. It ends where a full tile is first followed by
    # one that is not.
    before = jnp.pad(full[..., :-1], ((0, 0), (0, 0), (1, 0)))
    first, end, full_first, full_end = _reduce(
        (lax.min, count, jnp.where(possible, index, count)),
        (lax.max, 0, jnp.where(possible, index + 1, 0)),
        (lax.min, count, jnp.where(full, index, count)),
        (lax.min, count, jnp.where(before & ~full, index, count)),
    )
    first = jnp.minimum(first, end)
    full_first = jnp.clip(full_first, first, end)
    full_end = jnp.clip(full_end, full_first, end)
    return jnp.stack([first, full_first, full_end, end], axis=-1)


def _reduce(*parts: tuple[Callable[..., jax.Array], int, jax.Array]) -> Sequence[jax.Array]:
    """Reduces int32 arrays of one shape over their last axis, each ``(operation, start, array)``.

    Together: a GPU then runs one tiny kernel, and tables are made before every attention.
    """
    operations, starts, arrays = zip(*parts, strict=True)

    def combine(left, right):
        return tuple(op(a, b) for op, a, b in zip(operations, left, right, strict=True))

    starts = tuple(jnp.int32(start) for start in starts)
    return lax.reduce(arrays, starts, combine, (arrays[0].ndim - 1,))
