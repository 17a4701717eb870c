"""Scores of the forward kernel: of 64 queries, along the rows, and a tile of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.elementwise import Places
from pallas_kernels.pallas_mosaic.blocks import columns_seen
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.forward_rows import QueryRows
from pallas_kernels.pallas_mosaic.functions import by_parts, run_on_tile
from pallas_kernels.pallas_mosaic.tiles import (
    COLUMNS,
    TILE,
    along_columns,
    along_rows,
    i32,
    multiply_add,
    tanh,
)
from pallas_kernels.pallas_mosaic.tokens import score_mask


def start_of_products(rows: QueryRows, stage: Any) -> jax.Array:
    """float32 ``[64, block_kv]``: the bias over the scale, from which the products start.

    So the matrix instruction adds the bias, and the softmax has nothing to add.

    Args:
      rows: the queries.
      stage: the stage that holds the keys.
    """
    static = rows.static
    shape = (WARPGROUP_ROWS, static.config.block_kv)
    k_positions = plgpu.load(rows.refs.memory.k_positions.at[stage], layout=COLUMNS)
    k_positions = along_columns(k_positions, shape)
    if rows.line is not None:
        slope, start = rows.line
        return multiply_add(slope, k_positions, along_rows(start, shape), TILE)
    assert rows.positions is not None
    q_positions = along_rows(rows.positions, shape)
    score = static.spec.score
    bias = score.bias(q_positions, k_positions, rows.per_head, unit=1 / score.raw_factor)
    assert bias is not None
    return bias


def tile_scores(rows: QueryRows, step: Any, products: jax.Array, masked: bool) -> jax.Array:
    """Scores that :attr:`MosaicStatic.base_2_factor` takes to base 2; -inf where they do not count.

    Args:
      rows: the queries.
      step: the item's step, which says which keys.
      products: float32 ``[64, block_kv]``, ``q k^T``, with the bias if it is in the products.
      masked: whether some of the tile's scores may not count.
    """
    static, operands, block_kv = rows.static, rows.refs.operands, rows.static.config.block_kv
    score = static.spec.score
    scores = score.raw(products, tanh)
    if not masked and not static.adds_bias and score.score_mod is None:
        return scores
    first_key = rows.item.walk.tile(step) * block_kv
    keys = pl.ds(first_key, block_kv)
    k_tokens = operands.kv_tokens.load(rows.item.batch_row, keys, COLUMNS)
    shape = scores.shape
    if score.score_mod is not None or static.mask.mask_mod is not None:
        scores = _through_functions(rows, first_key, scores, masked)
    if static.adds_bias:
        q_positions = along_rows(rows.tokens.positions, shape)
        k_positions = along_columns(k_tokens.positions, shape)
        scores, _ = score.with_bias(scores, q_positions, k_positions, rows.per_head)
    if not masked:
        return scores
    mask = dataclasses.replace(static.mask, mask_mod=None)
    ok = score_mask(mask, shape, rows.tokens, k_tokens, along_rows, along_columns)
    if operands.blocks is not None:
        q_part = rows.item.tile * (static.config.block_q // WARPGROUP_ROWS) + rows.warpgroup
        kv_parts = [
            lax.div(first_key, i32(WARPGROUP_ROWS)) + i for i in range(shape[1] // WARPGROUP_ROWS)
        ]
        seen = [operands.blocks.seen(rows.item.head, q_part, part) for part in kv_parts]
        by_blocks = columns_seen(shape, seen)
        ok = by_blocks if ok is None else ok & by_blocks
    if static.keys_are_cut_off:
        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        inside = index < static.kv_length - first_key
        ok = inside if ok is None else ok & inside
    return scores if ok is None else jnp.where(ok, scores, -jnp.inf)


def _through_functions(
    rows: QueryRows, first_key: Any, scores: jax.Array, masked: bool
) -> jax.Array:
    """What functions of the caller's make of a tile's scores; the arguments are tile_scores'."""
    spec, operands = rows.static.spec, rows.refs.operands
    assert operands.numbering is not None
    batch, head = operands.numbering
    numbers = batch[rows.item.batch_row], head[rows.item.head]

    def through(columns: slice, part: jax.Array) -> tuple[jax.Array]:
        keys = pl.ds(first_key + columns.start, part.shape[1])
        k_positions = operands.kv_tokens.only("positions").load(None, keys, COLUMNS).positions
        q_positions = along_rows(rows.tokens.positions, part.shape)
        of_tile = q_positions, along_columns(k_positions, part.shape)
        places = Places(*numbers, *of_tile, run_on_tile)
        if spec.score.score_mod is not None:
            part = spec.score.modified(part, places)
        if masked and spec.mask.mask_mod is not None:
            part = jnp.where(places.apply(spec.mask.mask_mod), part, -jnp.inf)
        return (part,)

    (scores,) = by_parts(through, scores)
    return scores
