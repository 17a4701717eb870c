"""The online softmax of the forward kernel, for 64 queries and one tile of keys after the other.

Here ``factor`` takes a score to base 2. With m the largest ``factor score`` of a row so far, the
row's weights are ``2^(factor score - m)``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.forward_rows import QueryRows
from pallas_kernels.pallas_mosaic.forward_scores import tile_scores
from pallas_kernels.pallas_mosaic.tiles import (
    COLUMNS,
    ROWS,
    along_columns,
    along_rows,
    computed_here,
)


def start(rows: QueryRows) -> tuple[jax.Array, jax.Array]:
    """``(m, total)`` of the rows before the first tile of keys."""
    sinks = rows.refs.operands.sink
    sink = None if sinks is None else sinks[rows.item.head]
    m, total = softmax.start((WARPGROUP_ROWS,), sink)
    m, total = plgpu.layout_cast(m, ROWS), plgpu.layout_cast(total, ROWS)
    if sink is not None and (excess := rows.excess()) is not None:
        m = m + excess
    return m, total


def weigh(
    rows: QueryRows, step: Any, products: jax.Array, m: jax.Array, total: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes one more tile of keys into the softmax.

    Args:
      rows: the queries.
      step: the item's step, which says which keys.
      products: float32 ``[64, block_kv]``, ``q k^T``.
      m: float32 ``[64]``, the largest scores of the tiles before, in base 2.
      total: float32 ``[64]``, the sums of the weights of the tiles before.
      masked: whether some of the tile's scores may not count.

    Returns:
      ``(weights, m, total, shrink)``: the tile's weights without those that are dropped, the new m
      and total, and what sums over the tiles before are to be multiplied by.
    """
    factor = rows.static.base_2_factor
    scores = tile_scores(rows, step, products, masked)
    m_next = jnp.maximum(m, scores.max(axis=1) * factor)
    shrink = jnp.exp2(m - m_next)
    p = jnp.exp2(scores * factor - along_rows(m_next, scores.shape))
    total = total * shrink + p.sum(axis=1)
    return computed_here(without_dropped(rows, step, p), m_next, total, shrink)


def without_dropped(rows: QueryRows, step: Any, weights: jax.Array) -> jax.Array:
    """A step's weights, 0 where they are dropped."""
    numbers, dropout = rows.refs.operands.dropout, rows.static.spec.dropout
    if numbers is None or dropout is None:
        return weights
    block_kv, shape = rows.static.config.block_kv, weights.shape
    keys = pl.ds(rows.item.walk.tile(step) * block_kv, block_kv)
    columns = along_columns(numbers.load_columns(keys, COLUMNS), shape)
    assert rows.dropout is not None
    kept = dropout.kept(along_rows(rows.dropout, shape), columns)
    return jnp.where(kept, weights, 0.0)
