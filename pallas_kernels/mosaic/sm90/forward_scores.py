"""Scores and online softmax of the forward kernel; queries are the rows of a tile of scores.

With m the largest score of a query so far, times ``factor``, which takes a score to base 2, or at
most a margin below that (``online_softmax.py``), the query's weights are ``2^(factor score - m)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.document_bounds import DocumentBounds
from pallas_kernels.mosaic.fragments import (
    along_columns,
    along_rows,
    fma,
    i32,
    optimization_barrier,
    warpgroup_barrier,
)
from pallas_kernels.mosaic.scores import ScoreTile
from pallas_kernels.mosaic.sm90 import online_softmax
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import ForwardRefs
from pallas_kernels.mosaic.sm90.instructions import COLUMNS, LAYOUTS, ROWS, TILE
from pallas_kernels.mosaic.sm90.row_intervals import RowIntervals
from pallas_kernels.mosaic.sm90.static import ForwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile


class Consumer(NamedTuple):
    """One consumer warpgroup's part of a work tile: 64 queries.

    Attributes:
      static: static parameters of the call.
      refs: the kernel's references.
      warpgroup: index of the warpgroup.
      work: the work tile.
      queries: slice of the query axis.
      scores: a tile of the queries' scores; what it reads of them is in registers, or, with
        intervals, loaded where it is read.
      positions: float32 ``[64]``, positions of the queries; None unless the accumulator of
        ``q k^T`` starts from the bias.
      affine: ``(slope, intercept)`` of the bias over the scale, a scalar and float32 ``[64]``
        (:meth:`pallas_kernels.score.Score.affine_bias`); None unless the accumulator starts from
        an affine bias.
    """

    static: ForwardStatic
    refs: ForwardRefs
    warpgroup: Any
    work: WorkTile
    queries: Any
    scores: ScoreTile
    positions: jax.Array | None
    affine: tuple[jax.Array, jax.Array] | None

    @classmethod
    def of(
        cls, static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, work: WorkTile
    ) -> Consumer:
        """Loads what belongs to the queries."""
        first = work.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
        intervals = None
        if isinstance(refs.inputs.bounds, DocumentBounds):
            table = refs.inputs.bounds.intervals
            intervals = RowIntervals(table, work.batch, work.tile, warpgroup)
        scores = ScoreTile(
            static, refs.inputs.scores, LAYOUTS, (WARPGROUP_ROWS, static.config.block_kv),
            work.batch, work.head, first, i32(0), intervals=intervals,
        )  # fmt: skip
        if intervals is None:
            # With intervals few tiles read them.
            scores = scores.keeping_rows()
        positions = affine = None
        if static.bias_in_accumulator:
            positions = scores.row_positions().astype(jnp.float32)
            if static.bias_is_affine:
                score = static.spec.score
                affine = score.affine_bias(positions, scores.per_head(), 1 / score.raw_factor)
        queries = pl.ds(first, WARPGROUP_ROWS)
        return cls(static, refs, warpgroup, work, queries, scores, positions, affine)

    def tile(self, step: Any) -> ScoreTile:
        """The tile of scores of a step of the KV loop."""
        first_key = self.work.iterator.tile(step) * self.static.config.block_kv
        return self.scores._replace(first_key=first_key)

    def loading_intervals(self, masked: bool) -> Consumer:
        """Starts loading the rows' intervals, if a step is masked and there may be any."""
        intervals = self.scores.intervals
        if intervals is None or not masked:
            return self
        return self._replace(scores=self.scores._replace(intervals=intervals.loaded()))

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


def accumulators(static: ForwardStatic) -> tuple[Any, Any]:
    """wgmma accumulators of the scores and of the weighted values."""
    scores = plgpu.ACC((WARPGROUP_ROWS, static.config.block_kv), jnp.float32)
    return scores, plgpu.ACC((WARPGROUP_ROWS, static.value_dim), jnp.float32)


def bias_accumulator(consumer: Consumer, stage: Any) -> jax.Array:
    """float32 ``[64, block_kv]``, the bias over the scale, which ``q k^T`` accumulates on.

    So the tensor cores add the bias, and the softmax has nothing to add. ``stage`` is that of the
    keys.
    """
    static = consumer.static
    shape = (WARPGROUP_ROWS, static.config.block_kv)
    of_stage = consumer.refs.memory.k_positions.at[stage, pl.ds(0, static.config.block_kv)]
    k_positions = plgpu.load(of_stage, layout=COLUMNS)
    k_positions = along_columns(k_positions, shape)
    if consumer.affine is not None:
        slope, intercept = consumer.affine
        return fma(slope, k_positions, along_rows(intercept, shape), TILE)
    assert consumer.positions is not None
    q_positions = along_rows(consumer.positions, shape)
    score = static.spec.score
    bias = score.bias(q_positions, k_positions, consumer.scores.per_head(), 1 / score.raw_factor)
    assert bias is not None
    return bias


def start_softmax(consumer: Consumer) -> tuple[jax.Array, jax.Array]:
    """``(m, total)`` before the first KV tile; see :func:`update_softmax`."""
    sinks = consumer.refs.inputs.sink
    sink = None if sinks is None else sinks[consumer.work.head]
    m, total = softmax.start((WARPGROUP_ROWS,), sink)
    m, total = plgpu.layout_cast(m, ROWS), plgpu.layout_cast(total, ROWS)
    if sink is not None and (excess := consumer.excess()) is not None:
        m = m + excess
    if consumer.static.config.split_softmax:
        total = total / online_softmax.THREADS_OF_ROW
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
      m: float32 ``[64]``, the largest score so far, in base 2, or a margin below it.
      total: float32 ``[64]``, the sum of weights so far; with ``split_softmax`` each thread's part.
      masked: whether any of the tile's scores may be masked.

    Returns:
      ``(weights, m, total, shrink)``: the tile's weights, 0 where dropped, the new m and total, and
      the factor for sums over the tiles before.
    """
    scores, m_next, shrink = _next_maximum(consumer, step, products, m, masked)
    p = jnp.exp2(scores * consumer.static.base_2_factor - along_rows(m_next, scores.shape))
    if consumer.static.config.split_softmax:
        total = online_softmax.add_parts(total * shrink, p)
    else:
        total = total * shrink + p.sum(axis=1)
    hashes = consumer.tile(step).dropout_hashes()
    for half in range(2):
        p = _without_dropped(consumer, p, hashes, half)
    return optimization_barrier(p, m_next, total, shrink)


class FirstHalf(NamedTuple):
    """What :func:`first_half` computes.

    Attributes:
      p: float32 ``[64, block_kv]``, the weights of half of the rows, 0 where dropped, and the
        others' scores.
      m: float32 ``[64]``, the new m.
      total: float32 ``[64]``, each thread's part of the sum of weights; with this half if it is
        summed by halves.
      shrink: float32 ``[64]``, the factor for sums over the tiles before.
      hashes: of the tile's weights; None without dropout.
    """

    p: jax.Array
    m: jax.Array
    total: jax.Array
    shrink: jax.Array
    hashes: jax.Array | None


def first_half(
    consumer: Consumer, step: Any, products: jax.Array, m: jax.Array, total: jax.Array, masked: bool
) -> FirstHalf:
    """The first half of :func:`update_softmax`, with the same arguments."""
    scores, m_next, shrink = _next_maximum(consumer, step, products, m, masked)
    half = online_softmax.exp2_of_half(scores, m_next, consumer.static.base_2_factor, 0)
    half, m_next, shrink = optimization_barrier(half, m_next, shrink)
    total, hashes = total * shrink, consumer.tile(step).dropout_hashes()
    if _sums_by_halves(consumer, hashes):
        total = online_softmax.add_part(total, half, 0)
    half = _without_dropped(consumer, half, hashes, 0)
    return FirstHalf(half, m_next, total, shrink, hashes)


def second_half(consumer: Consumer, half: FirstHalf) -> tuple[jax.Array, jax.Array]:
    """The second half: ``(weights, total)``."""
    p = online_softmax.exp2_of_half(half.p, half.m, consumer.static.base_2_factor, 1)
    if _sums_by_halves(consumer, half.hashes):
        total = online_softmax.add_part(half.total, p, 1)
    else:
        total = online_softmax.add_parts(half.total, p)
    return _without_dropped(consumer, p, half.hashes, 1), total


def _sums_by_halves(consumer: Consumer, hashes: jax.Array | None) -> bool:
    """Whether the first half's weights are summed before some of them are dropped, or early."""
    return hashes is not None or consumer.static.config.sums_early


def _without_dropped(consumer: Consumer, p: jax.Array, hashes: Any, half: int) -> jax.Array:
    dropout = consumer.static.spec.dropout
    if hashes is None or dropout is None:
        return p
    return online_softmax.without_dropped(p, hashes, dropout.threshold, half)


def _next_maximum(
    consumer: Consumer, step: Any, products: jax.Array, m: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(scores, m, shrink)`` of a tile; see :func:`update_softmax`."""
    tile = consumer.tile(step)
    scores = tile.scores(tile.raw(products, online_softmax.tanh), masked=masked)
    factor = consumer.static.base_2_factor
    m_next = online_softmax.raised(m, scores, factor)
    return scores, m_next, jnp.exp2(m - m_next)
