"""Scores and online softmax of the forward kernel; queries are the rows of a tile of scores.

With m the largest score of a query so far, times ``factor``, which takes a score to base 2, the
query's weights are ``2^(factor score - m)``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.mosaic.fragments import (
    along_columns,
    along_rows,
    fma,
    i32,
    optimization_barrier,
    tanh,
    warpgroup_barrier,
)
from pallas_kernels.mosaic.score_inputs import (
    BLOCK_TOKENS,
    TokenArrays,
    allowed_columns,
    token_mask,
)
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import ForwardRefs
from pallas_kernels.mosaic.sm90.instructions import COLUMNS, ROWS, TILE
from pallas_kernels.mosaic.sm90.static import ForwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile
from pallas_kernels.mosaic.user_functions import by_column_chunks, run_on_fragments


class Consumer(NamedTuple):
    """One consumer warpgroup's part of a work tile: 64 queries.

    Attributes:
      static: static parameters of the call.
      refs: the kernel's references.
      warpgroup: index of the warpgroup.
      work: the work tile.
      queries: slice of the query axis.
      tokens: tokens of the queries, in registers.
      positions: float32 ``[64]``, positions of the queries; None unless the accumulator of
        ``q k^T`` starts from the bias.
      affine: ``(slope, intercept)`` of the bias over the scale, a scalar and float32 ``[64]``
        (:meth:`pallas_kernels.score.Score.affine_bias`); None unless the accumulator starts from
        an affine bias.
      per_head: the head's value of each per-head parameter of logits.
      dropout: int32 ``[64]``, hashes of the queries; None without dropout.
    """

    static: ForwardStatic
    refs: ForwardRefs
    warpgroup: Any
    work: WorkTile
    queries: Any
    tokens: TokenArrays
    positions: jax.Array | None
    affine: tuple[jax.Array, jax.Array] | None
    per_head: dict[str, Any]
    dropout: jax.Array | None

    @classmethod
    def of(
        cls, static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, work: WorkTile
    ) -> Consumer:
        """Loads what belongs to the queries."""
        first = work.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
        queries, inputs = pl.ds(first, WARPGROUP_ROWS), refs.inputs.scores
        tokens = inputs.q_tokens.load(work.batch, queries, ROWS)
        per_head = {name: ref[work.head] for name, ref in inputs.per_head.items()}
        positions = affine = dropout = None
        if inputs.dropout is not None:
            dropout = inputs.dropout.load_queries(work.batch, work.head, queries, ROWS)
        if static.bias_in_accumulator:
            positions = tokens.positions.astype(jnp.float32)
            if static.bias_is_affine:
                score = static.spec.score
                affine = score.affine_bias(positions, per_head, unit=1 / score.raw_factor)
        of_scores = positions, affine, per_head, dropout
        return cls(static, refs, warpgroup, work, queries, tokens, *of_scores)

    def excess(self) -> jax.Array | None:
        """float32 ``[64]``: by how much scores in base 2 are too large; None if they are exact.

        It is the value of the affine bias at the queries' own positions.
        """
        if self.affine is None:
            return None
        slope, intercept = self.affine
        assert self.positions is not None
        at_query = fma(slope, self.positions, intercept, ROWS)
        return at_query * self.static.base_2_factor

    def free_stage(self, free: Any, stage: Any) -> None:
        """Arrives at a stage's barrier in ``free``: this warpgroup has read the stage."""
        if self.static.config.cluster > 1:
            # One thread arrives at a cluster's barrier for the whole warpgroup.
            warpgroup_barrier()
        plgpu.barrier_arrive(free.at[stage])

    def stage(self, step: Any) -> Any:
        """The stage of a step's keys."""
        return lax.rem(self.work.steps_before + step, i32(self.static.config.stages))

    def v_stage(self, step: Any) -> Any:
        """The stage of a step's values."""
        return lax.rem(self.work.steps_before + step, i32(self.static.v_stages))


def bias_accumulator(consumer: Consumer, stage: Any) -> jax.Array:
    """float32 ``[64, block_kv]``, the bias over the scale, which ``q k^T`` accumulates on.

    So the tensor cores add the bias, and the softmax has nothing to add. ``stage`` is that of the
    keys.
    """
    static = consumer.static
    shape = (WARPGROUP_ROWS, static.config.block_kv)
    k_positions = plgpu.load(consumer.refs.memory.k_positions.at[stage], layout=COLUMNS)
    k_positions = along_columns(k_positions, shape)
    if consumer.affine is not None:
        slope, intercept = consumer.affine
        return fma(slope, k_positions, along_rows(intercept, shape), TILE)
    assert consumer.positions is not None
    q_positions = along_rows(consumer.positions, shape)
    score = static.spec.score
    bias = score.bias(q_positions, k_positions, consumer.per_head, unit=1 / score.raw_factor)
    assert bias is not None
    return bias


def tile_scores(consumer: Consumer, step: Any, products: jax.Array, masked: bool) -> jax.Array:
    """Scores that :attr:`Sm90Static.base_2_factor` takes to base 2; -inf where masked.

    Args:
      consumer: the queries.
      step: loop step, which determines the keys.
      products: float32 ``[64, block_kv]``, ``q k^T``, with the bias if it was in the accumulator.
      masked: whether any of the scores may be masked.
    """
    static, inputs = consumer.static, consumer.refs.inputs.scores
    block_kv, score = static.config.block_kv, static.spec.score
    scores = score.raw(products, tanh)
    if not masked and not static.adds_bias and score.score_mod is None:
        return scores
    first_key = consumer.work.iterator.tile(step) * block_kv
    keys = pl.ds(first_key, block_kv)
    k_tokens = inputs.kv_tokens.load(consumer.work.batch, keys, COLUMNS)
    shape = scores.shape
    if score.score_mod is not None or static.mask.mask_mod is not None:
        scores = _apply_user_functions(consumer, first_key, scores, masked)
    if static.adds_bias:
        q_positions = along_rows(consumer.tokens.positions, shape)
        k_positions = along_columns(k_tokens.positions, shape)
        scores, _ = score.with_bias(scores, q_positions, k_positions, consumer.per_head)
    if not masked:
        return scores
    window = dataclasses.replace(static.mask, mask_mod=None)
    allowed = token_mask(window, shape, consumer.tokens, k_tokens, along_rows, along_columns)
    if inputs.blocks is not None:
        parts = static.config.block_q // BLOCK_TOKENS
        q_part = consumer.work.tile * parts + consumer.warpgroup
        kv_parts = [
            lax.div(first_key, i32(BLOCK_TOKENS)) + i for i in range(shape[1] // BLOCK_TOKENS)
        ]
        entries = [inputs.blocks.allowed(consumer.work.head, q_part, part) for part in kv_parts]
        by_blocks = allowed_columns(shape, entries, TILE)
        allowed = by_blocks if allowed is None else allowed & by_blocks
    if static.keys_are_padded:
        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        inside = index < static.kv_length - first_key
        allowed = inside if allowed is None else allowed & inside
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


def _apply_user_functions(
    consumer: Consumer, first_key: Any, scores: jax.Array, masked: bool
) -> jax.Array:
    """Applies ``score_mod`` and, if ``masked``, ``mask_mod`` to a tile's scores."""
    spec, inputs, work = consumer.static.spec, consumer.refs.inputs.scores, consumer.work
    assert inputs.indices is not None
    batch, head = inputs.indices
    indices = batch[work.batch], head[work.head]

    def apply(columns: slice, part: jax.Array) -> tuple[jax.Array]:
        keys = pl.ds(first_key + columns.start, part.shape[1])
        k_positions = inputs.kv_tokens.load_positions(keys, COLUMNS)
        q_positions = along_rows(consumer.tokens.positions, part.shape)
        positions = q_positions, along_columns(k_positions, part.shape)
        coordinates = ScoreCoordinates(*indices, *positions, run_on_fragments)
        if spec.score.score_mod is not None:
            part = spec.score.modified(part, coordinates)
        if masked and spec.mask.mask_mod is not None:
            part = jnp.where(coordinates.apply(spec.mask.mask_mod), part, -jnp.inf)
        return (part,)

    (scores,) = by_column_chunks(apply, scores)
    return scores


def start_softmax(consumer: Consumer) -> tuple[jax.Array, jax.Array]:
    """``(m, total)`` before the first KV tile."""
    sinks = consumer.refs.inputs.sink
    sink = None if sinks is None else sinks[consumer.work.head]
    m, total = softmax.start((WARPGROUP_ROWS,), sink)
    m, total = plgpu.layout_cast(m, ROWS), plgpu.layout_cast(total, ROWS)
    if sink is not None and (excess := consumer.excess()) is not None:
        m = m + excess
    return m, total


def update_softmax(
    consumer: Consumer,
    step: Any,
    products: jax.Array,
    m: jax.Array,
    total: jax.Array,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax.

    Args:
      consumer: the queries.
      step: loop step, which determines the keys.
      products: float32 ``[64, block_kv]``, ``q k^T``.
      m: float32 ``[64]``, the largest score so far, in base 2.
      total: float32 ``[64]``, the sum of weights so far.
      masked: whether any of the tile's scores may be masked.

    Returns:
      ``(weights, m, total, shrink)``: the tile's weights, 0 where dropped, the new m and total, and
      the factor for sums over the tiles before.
    """
    factor = consumer.static.base_2_factor
    scores = tile_scores(consumer, step, products, masked)
    m_next = jnp.maximum(m, scores.max(axis=1) * factor)
    shrink = jnp.exp2(m - m_next)
    p = jnp.exp2(scores * factor - along_rows(m_next, scores.shape))
    total = total * shrink + p.sum(axis=1)
    return optimization_barrier(_drop(consumer, step, p), m_next, total, shrink)


def _drop(consumer: Consumer, step: Any, weights: jax.Array) -> jax.Array:
    """Applies dropout to a step's weights, without scaling those that are kept."""
    hashes, dropout = consumer.refs.inputs.scores.dropout, consumer.static.spec.dropout
    if hashes is None or dropout is None:
        return weights
    block_kv, shape = consumer.static.config.block_kv, weights.shape
    keys = pl.ds(consumer.work.iterator.tile(step) * block_kv, block_kv)
    columns = along_columns(hashes.load_keys(keys, COLUMNS), shape)
    assert consumer.dropout is not None
    kept = dropout.kept(along_rows(consumer.dropout, shape), columns)
    return jnp.where(kept, weights, 0.0)
