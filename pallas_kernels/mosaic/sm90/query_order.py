"""The order in which a work tile of the backward kernel visits query tiles and heads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.sm90.backward_scores import read_tile_and_head
from pallas_kernels.mosaic.sm90.inputs import BackwardRefs
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile

# Loop steps of a chunk of query tiles, of all heads that share keys: 16 MiB of queries, dO and dQ.
# With fewer steps than CTAs, these would add to the same dQ at once.
_CHUNK_STEPS = 256
# The work tiles of a head start their chunks so many steps apart.
_STEPS_APART = 5


def tile_and_head(
    static: BackwardStatic, work: WorkTile, step: Any, masked: bool = True
) -> tuple[Any, Any]:
    """The query tile and the query head of a step.

    Tiles that need a mask come first, for all heads, then the others. In both groups heads vary
    slowest: CTAs that run at the same time then mostly read one head's queries, which fit in the L2
    cache. If they do not fit (:attr:`BackwardStatic.visits_chunks`), heads of full tiles vary
    fastest.
    """
    iterator, groups = work.iterator, static.groups
    if groups == 1:
        return iterator.tile(step, masked), work.head
    if static.visits_chunks:
        return _in_chunks(static, work, step)
    if not masked:
        tiles = jnp.maximum(iterator.full, 1)
        step = step - iterator.masked * groups
        group = _divide(step, tiles)
        step = step - group * tiles + iterator.masked
        return iterator.tile(step, masked), work.head * groups + group
    masked_steps = iterator.masked * groups
    in_masked = step < masked_steps
    tiles = jnp.where(in_masked, iterator.masked, iterator.total - iterator.masked)
    tiles = jnp.maximum(tiles, 1)
    step = jnp.where(in_masked, step, step - masked_steps)
    group = lax.div(step, tiles)
    step = lax.rem(step, tiles) + jnp.where(in_masked, 0, iterator.masked)
    return iterator.tile(step), work.head * groups + group


def _in_chunks(static: BackwardStatic, work: WorkTile, step: Any) -> tuple[Any, Any]:
    """:func:`tile_and_head` where full tiles are visited by chunks, from the last to the first.

    Under a causal mask all work tiles end with the same queries, but differ in how many they visit.
    If each visited all queries of one head first, CTAs that run at the same time would soon read
    different heads. With chunks they mostly read the same part of all heads.
    """
    iterator, groups = work.iterator, static.groups
    masked_steps = iterator.masked * groups
    masked_group = lax.div(step, jnp.maximum(iterator.masked, 1))
    masked_tile = iterator.masked_tile(step - masked_group * iterator.masked)
    index, group = chunk_order(step - masked_steps, iterator.full, groups, work.tile)
    in_masked = step < masked_steps
    tile = jnp.where(in_masked, masked_tile, iterator.full_tile(jnp.maximum(index, 0)))
    return tile, work.head * groups + jnp.where(in_masked, masked_group, group)


def chunk_order(step: Any, full: Any, groups: int, tile: Any) -> tuple[Any, Any]:
    """The full tile's index and the head's, within its group, of a step.

    Args:
      step: the step, counted from the first one of a full tile.
      full: number of full tiles.
      groups: query heads per key/value head.
      tile: tile index of the work tile.
    """
    tiles = max(1, _CHUNK_STEPS // groups)
    steps = tiles * groups
    chunk = lax.div(step, i32(steps))
    left = full - chunk * tiles
    count = jnp.minimum(left, tiles)
    start = lax.rem(tile * _STEPS_APART, i32(steps))
    place = step - chunk * steps + jnp.where(start < count * groups, start, 0)
    place = jnp.where(place >= count * groups, place - count * groups, place)
    return left - count + lax.div(place, i32(groups)), lax.rem(place, i32(groups))


def following_tile_and_head(
    static: BackwardStatic, refs: BackwardRefs, work: WorkTile, step: Any
) -> tuple[Any, Any] | None:
    """:func:`tile_and_head` from the step before, by counting; neither step needs a mask.

    The warpgroup must have started the copy of that step's queries, or waited for it. None for a
    block-sparse mask.
    """
    stage = lax.rem(work.steps_before + step - 1, i32(static.stages))
    tile, head = read_tile_and_head(static, refs.memory.scratch, stage)
    following = work.iterator.next_full(tile)
    return following and (following[0], head + following[1])


def _divide(x: Any, y: Any) -> Any:
    """``x / y``, rounded down, for 0 <= x < 2^21 and y > 0, in a few instructions."""
    quotient = (x.astype(jnp.float32) + 0.5) / y.astype(jnp.float32)
    return quotient.astype(jnp.int32)
