"""Scores of the backward kernel and their gradients.

Tiles are transposed, ``[64 keys, block_q]``: the registers that hold the weights then are the left
operand of dV's product as they are. Those of :mod:`pallas_kernels.mosaic.sm90.split_step` are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mask import Mask
from pallas_kernels.mosaic.fragments import (
    along_columns,
    along_rows,
    fma,
    i32,
    optimization_barrier,
)
from pallas_kernels.mosaic.score_inputs import (
    TokenArrays,
)
from pallas_kernels.mosaic.scores import RowValues, ScoreTile
from pallas_kernels.mosaic.sm90 import online_softmax
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.inputs import BackwardRefs
from pallas_kernels.mosaic.sm90.instructions import LAYOUTS, ROWS, TILE
from pallas_kernels.mosaic.sm90.row_intervals import RowIntervals
from pallas_kernels.mosaic.sm90.shared_memory import ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import WorkTile
from pallas_kernels.mosaic.user_functions import by_column_chunks
from pallas_kernels.mosaic.work_tiles import TileCoordinates
from pallas_kernels.score import LOG2_E


class StepTile(NamedTuple):
    """Which tile of scores a step computes.

    Attributes:
      warpgroup: index of the warpgroup, which determines the keys; recomputed in every step.
      q_tile: query tile.
      head: query head.
      query: the first query in the query tile.
    """

    warpgroup: Any
    q_tile: Any
    head: Any
    query: Any = 0


class Consumer(NamedTuple):
    """One consumer warpgroup's part of a work tile.

    Steps are counted over all work tiles of a CTA.

    Attributes:
      static: static parameters of the call.
      refs: the kernel's references.
      warpgroup: index of the warpgroup.
      work: the work tile.
      end: one past the work tile's last step.
      kept: tokens of the keys, as far as there are registers to keep them in.
      padding: :meth:`padding_scores`; None if not needed, or recomputed in every step.
      intervals: of the keys; None if the call has none.
      masks_by_interval: whether steps mask by these, which then exist.
    """

    static: BackwardStatic
    refs: BackwardRefs
    warpgroup: Any
    work: WorkTile
    end: Any
    kept: RowValues
    padding: jax.Array | None
    intervals: RowIntervals | None = None
    masks_by_interval: bool = False

    @classmethod
    def of(
        cls, static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile
    ) -> Consumer:
        """Loads what belongs to the keys, as far as there are registers for it."""
        end = work.steps_before + work.steps
        consumer = cls(static, refs, warpgroup, work, end, RowValues(), None)
        others = static.spec.dropout is not None or static.spec.calls_functions
        if static.form.queries_are_rows:
            return consumer
        if static.has_intervals:
            table = refs.inputs.bounds.intervals
            intervals = RowIntervals(table, work.batch, work.tile, warpgroup)
            consumer = consumer._replace(intervals=intervals)
        elif not static.has_bias and not others:
            tile = consumer.tile(StepTile(warpgroup, i32(0), i32(0)))
            consumer = consumer._replace(kept=tile.keeping_rows().kept)
        # A soft cap or a user function needs the registers of the padding.
        score = static.spec.score
        plain = score.logits_soft_cap is None and score.score_mod is None
        if static.keys_are_padded and plain:
            consumer = consumer._replace(padding=consumer.padding_scores(warpgroup))
        return consumer

    def padding_scores(self, warpgroup: Any) -> jax.Array:
        """float32 ``[64]``, added to the scores of each key: -inf past the last key, else 0.

        Keys past the last one are zeros. Their scores would be 0, and 2^-lse may overflow.
        """
        static = self.static
        index = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)
        first = self.work.tile * static.config.block_kv + static.first_key(warpgroup)
        return jnp.where(index < static.kv_length - first, 0.0, -jnp.inf)

    def tile(self, at: StepTile, work: TileCoordinates | None = None) -> ScoreTile:
        """A step's tile of scores; ``work``: the work tile if it is recomputed."""
        config = self.static.config
        batch, tile = (work or self.work).batch, (work or self.work).tile
        first_key = tile * config.block_kv + self.static.first_key(at.warpgroup)
        by_queries = self.static.form.queries_are_rows
        if by_queries:
            # Adds 0, which the compiler does not know. Else it would load the keys' tokens, which
            # are columns here, before the loop, and spill them.
            first_key = first_key + jnp.minimum(at.warpgroup, 0)
        shape = WARPGROUP_ROWS, config.block_kv if by_queries else self.static.score_queries
        return ScoreTile(
            self.static, self.refs.inputs.scores, LAYOUTS, shape,
            batch, at.head, at.q_tile * config.block_q + at.query, first_key,
            transposed=not by_queries, kept=self.kept,
        )  # fmt: skip

    def stage(self, step: Any) -> Any:
        """The stage of a step's queries."""
        return lax.rem(step, i32(self.static.stages))

    def do_stage(self, step: Any) -> Any:
        """The stage of a step's dO."""
        return lax.rem(step, i32(self.static.do_stages))


def read_tile_and_head(static: BackwardStatic, scratch: Any, stage: Any) -> tuple[Any, Any]:
    """The query tile and the head of the queries in a stage, which have arrived."""
    q_tile, head = (
        scratch[index].astype(jnp.int32)
        for index in ScratchLayout.of(static.config).tile_and_head(stage)
    )
    return q_tile, head


def tile_scores(
    consumer: Consumer, at: StepTile, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """``(scores, derivative)``.

    The scores are raw ones (:meth:`pallas_kernels.score.Score.raw`), or the results of a
    ``score_mod``; -inf past the last key. The derivative is that of the scores with respect to the
    scaled products, computed while the products are still in registers; None where it is 1.

    Args:
      consumer: the keys.
      at: the step's tile.
      products: float32, ``k q^T``.
    """
    static, score, derivative = consumer.static, consumer.static.spec.score, None
    scores = score.raw(products, online_softmax.tanh)
    if score.score_mod is not None:
        tile = consumer.tile(at, consumer.work.recompute())
        coordinates = tile.keeping_row_positions().coordinates()

        def modified(columns: slice, part: jax.Array) -> tuple[jax.Array, ...]:
            results = score.modified_with_derivative(part, coordinates(columns))
            return tuple(x for x in results if x is not None)

        scores, *derivatives = by_column_chunks(modified, scores)
        derivative = derivatives[0] if derivatives else None
    if static.keys_are_padded:
        padding = consumer.padding
        if padding is None:
            padding = consumer.padding_scores(at.warpgroup)
        padding = along_rows(padding, scores.shape)
        if score.score_mod is None:
            scores = scores + padding
        else:  # A score_mod may return NaN for them.
            scores = jnp.where(padding == 0, scores, padding)
    return scores, derivative


def exponents(
    consumer: Consumer, at: StepTile, scores: jax.Array, lse: jax.Array, masked: bool
) -> jax.Array:
    """Logits in base 2 minus lse; -inf where masked.

    Args:
      consumer: the keys.
      at: the step's tile.
      scores: float32, of :func:`tile_scores`.
      lse: float32, in base 2, broadcast over the tile.
      masked: whether any of the scores may be masked.
    """
    static, score = consumer.static, consumer.static.spec.score
    if static.has_bias:
        tile = consumer.tile(at)
        positions, per_head = tile.positions(), tile.per_head()
        if static.bias_is_affine:
            # lse comes first: there are no registers for it together with the positions.
            scores = scores * static.base_2_factor - lse
            scores = scores + score.bias_of_earlier_keys(*positions, per_head, LOG2_E)
            return mask_scores(consumer, at, scores)
        scores, _ = score.with_bias(scores, *positions, per_head)
    if masked:
        scores = mask_scores(consumer, at, scores)
    return scores * static.base_2_factor - lse


class AffineBias(NamedTuple):
    """The bias in base 2 minus lse, over a tile in which all scores count: no key is after a query.

    It is ``slope (p_k - base) - offset``, see :meth:`pallas_kernels.score.Score.affine_bias`. The
    base is the smallest position of the queries. No key is after it, so neither a query nor a key
    is further from it than they are from each other: every rounding error is small relative to the
    bias.

    Attributes:
      slope: a scalar.
      keys: float32 ``[64]``, the keys' positions minus the base.
    """

    slope: jax.Array
    keys: jax.Array

    @classmethod
    def of(cls, consumer: Consumer, at: StepTile) -> AffineBias:
        """That of the step's tile."""
        tile = consumer.tile(at)
        slope = consumer.static.spec.score.bias_slope(tile.per_head(), LOG2_E)
        positions = tile.row_positions()
        from_base = positions - consumer.refs.inputs.q_bases[at.q_tile]
        return cls(slope, from_base.astype(jnp.float32))

    def minus(self, offsets: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Over the tile. ``offsets``: float32 ``[block_q]``, lse minus the bias's intercept."""
        keys, offsets = along_rows(self.keys, shape), along_columns(offsets, shape)
        return fma(self.slope, keys, -offsets, TILE)


def mask_scores(consumer: Consumer, at: StepTile, scores: jax.Array) -> jax.Array:
    """Scores, -inf where window, KV bounds, segment ids, mask_mod or block mask exclude them."""
    static, inputs = consumer.static, consumer.refs.inputs.scores
    if consumer.masks_by_interval:
        assert consumer.intervals is not None
        first_query = at.q_tile * static.config.block_q
        return consumer.intervals.mask_by_interval(scores, first_query)
    # One test after the other, first by positions, then by segment ids: positions and ids would not
    # fit in registers together.
    tests = [("positions", dataclasses.replace(static.mask, mask_mod=None))]
    if static.has_kv_bounds:
        tests = [(name, Mask()) for name in ("kv_starts", "kv_ends")]
        tests = [test for test in tests if not inputs.q_tokens.only(test[0]).is_empty]
    if static.has_segments:
        tests.append(("segment_ids", Mask()))

    # With a bias there are no registers to load all tokens at once if there are KV bounds or a
    # block-sparse mask.
    one_by_one = static.has_bias and (static.has_kv_bounds or static.has_block_mask)
    one_by_one = one_by_one or static.spec.calls_functions or static.form.queries_are_rows
    q_tokens = k_tokens = TokenArrays()
    if not one_by_one:
        q_tokens, k_tokens = consumer.tile(at).tokens()
    for name, mask in tests:
        if one_by_one:
            scores, q_tile, warpgroup = optimization_barrier(scores, at.q_tile, at.warpgroup)
            at = at._replace(q_tile=q_tile, warpgroup=warpgroup)
            q_tokens, k_tokens = consumer.tile(at).tokens(name)
        of_keys = name if name == "segment_ids" else "positions"
        tokens = q_tokens.only(name), k_tokens.only(of_keys)
        allowed = consumer.tile(at).allowed_by_tokens(mask, *tokens)
        if allowed is not None:
            scores = optimization_barrier(jnp.where(allowed, scores, -jnp.inf))
    if static.mask.mask_mod is not None:
        scores, at = _barrier(scores, at)
        mask_mod = static.mask.mask_mod
        tile = consumer.tile(at, consumer.work.recompute())
        coordinates = tile.keeping_row_positions().coordinates()

        def kept(columns: slice, part: jax.Array) -> tuple[jax.Array]:
            allowed = coordinates(columns).apply(mask_mod)
            return (jnp.where(allowed, part, -jnp.inf),)

        (scores,) = by_column_chunks(kept, scores)
        scores = optimization_barrier(scores)
    if inputs.blocks is not None:
        # The addresses are computed here, so that no register holds them before.
        scores, at = _barrier(scores, at)
        allowed = consumer.tile(at, consumer.work.recompute()).allowed_by_blocks()
        assert allowed is not None
        scores = jnp.where(allowed, scores, -jnp.inf)
    return scores


def _barrier(scores: jax.Array, at: StepTile) -> tuple[jax.Array, StepTile]:
    """Both behind one :func:`optimization_barrier`."""
    scores, q_tile, warpgroup, head = optimization_barrier(scores, at.q_tile, at.warpgroup, at.head)
    return scores, StepTile(warpgroup, q_tile, head, at.query)


def logit_gradients(
    consumer: Consumer, weights: jax.Array, dp: jax.Array, delta: jax.Array
) -> jax.Array:
    """Gradients of the logits; times the scale if it is part of dS.

    Args:
      consumer: the keys.
      weights: float32, ``2^(score - lse)``.
      dp: float32, ``v dO^T``, times dropout's factors.
      delta: float32 ``[block_q]``, times the scale if it is part of dS.
    """
    static = consumer.static
    if static.scale_in_ds and not static.dropout_has_scale:
        dp = dp * static.spec.score.scale
    return weights * (dp - along_columns(delta, weights.shape))
