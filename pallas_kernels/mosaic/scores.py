"""Scores of one tile in a warpgroup's registers, queries along the rows: logits, mask, dropout.

For kernels whose tiles of scores are ``[queries, keys]``. A feature that a call does not use emits
no code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.mask import Mask, both
from pallas_kernels.mosaic.fragments import along_columns, along_rows, fma, i32, tanh
from pallas_kernels.mosaic.score_inputs import BLOCK_TOKENS, ScoreInputs, token_mask
from pallas_kernels.mosaic.static import KernelStatic
from pallas_kernels.mosaic.user_functions import by_column_chunks, run_on_fragments
from pallas_kernels.score import LOG2_E


class ScoreTile(NamedTuple):
    """One tile of scores ``[M queries, N keys]`` of one batch index and query head.

    Attributes:
      static: static parameters of the call.
      inputs: references to the inputs of scores.
      layouts: object with the register layouts ``tile``, ``rows`` and ``columns``.
      shape: ``(M, N)``.
      batch: batch index.
      head: query head.
      first_query: index of the first query.
      first_key: index of the first key.
      line: result of :meth:`affine_bias`, for all tiles with these queries; None: it is loaded.
    """

    static: KernelStatic
    inputs: ScoreInputs
    layouts: Any
    shape: tuple[int, int]
    batch: Any
    head: Any
    first_query: Any
    first_key: Any
    line: tuple[Any, Any] | None = None

    def raw(self, products: jax.Array) -> jax.Array:
        """:meth:`pallas_kernels.score.Score.raw` of the products ``q k^T``."""
        return self.static.spec.score.raw(products, tanh)

    def scores(self, raw: jax.Array, *, masked: bool) -> jax.Array:
        """Scores that, times ``base_2_factor``, are logits in base 2; -inf where masked.

        Args:
          raw: float32, result of :meth:`raw`.
          masked: whether some of the tile's scores may be masked.
        """
        score, scores = self.static.spec.score, raw
        mask_mod = self.static.mask.mask_mod if masked else None
        if score.score_mod is not None or mask_mod is not None:

            def apply(columns: slice, part: jax.Array) -> tuple[jax.Array]:
                places = self._places(columns)
                if score.score_mod is not None:
                    part = score.modified(part, places)
                if mask_mod is not None:
                    part = jnp.where(places.apply(mask_mod), part, -jnp.inf)
                return (part,)

            (scores,) = by_column_chunks(apply, scores)
        if self.static.bias_is_affine:
            _, keys = self._slices()
            assert self.inputs.line is not None
            line = self._line(self.inputs.line.kv, keys, self.layouts.columns)
            scores = scores * score.base_2_factor + self._over_columns(line)
        elif self.static.has_bias:
            scores, _ = score.with_bias(scores, *self._positions(), self._per_head())
        if not masked:
            return scores
        allowed = self._allowed()
        return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)

    def excess(self) -> jax.Array | None:
        """float32 ``[M]``: by how much each query's base-2 scores are too large; None if exact.

        An affine bias is ``line(k) - line(q)``, but scores contain ``line(k)``. ``line(q)`` is the
        same for all keys of a query, and small: it is relative to the tile's first query.
        """
        if not self.static.bias_is_affine:
            return None
        queries, _ = self._slices()
        assert self.inputs.line is not None
        return self._line(self.inputs.line.q, queries, self.layouts.rows)

    def affine_bias(self) -> tuple[Any, Any] | None:
        """``(slope, intercept)``: :meth:`pallas_kernels.score.Score.affine_bias`, in base 2."""
        if not self.static.bias_is_affine:
            return None
        assert self.inputs.line is not None
        base = self.inputs.line.q[self.first_query]
        return self.static.spec.score.affine_bias(base, self._per_head(), LOG2_E)

    def _line(self, positions: Any, tokens: Any, layout: Any) -> jax.Array:
        """The affine bias at ``positions[tokens]``."""
        line = self.line or self.affine_bias()
        assert line is not None
        positions = plgpu.load(positions.at[tokens], layout=layout, optimized=False)
        intercept = plgpu.layout_cast(jnp.full(positions.shape, line[1]), layout)
        return fma(line[0], positions, intercept, layout)

    def dropout_factors(self) -> jax.Array | None:
        """The factors by which dropout multiplies the tile's weights; None without dropout."""
        kept, dropout = self._kept(), self.static.spec.dropout
        if kept is None or dropout is None:
            return None
        unit = plgpu.layout_cast(jnp.full(self.shape, dropout.unit, jnp.float32), self.layouts.tile)
        return jnp.where(kept, unit, 0.0)

    def without_dropped(self, weights: jax.Array) -> jax.Array:
        """The weights, 0 where dropped; those that are kept are not scaled."""
        kept = self._kept()
        return weights if kept is None else jnp.where(kept, weights, 0.0)

    def product_gradients(self, raw: jax.Array, weights: jax.Array, ds: jax.Array) -> jax.Array:
        """Gradients of the scaled products.

        Args:
          raw: float32, result of :meth:`raw`.
          weights: float32, softmax weights.
          ds: float32, gradients of the logits.
        """
        score = self.static.spec.score
        if score.score_mod is None:
            return score.through_cap(raw, ds)

        def apply(columns: slice, part: jax.Array) -> tuple[jax.Array]:
            of_part = weights[:, columns], ds[:, columns], self._places(columns)
            return (score.to_products(part, *of_part),)

        (ds,) = by_column_chunks(apply, raw)
        return ds

    def per_head_gradients(self, ds: jax.Array) -> dict[str, jax.Array]:
        """Each score's contribution to per-head gradients; ``ds``: gradients of the logits."""
        score = self.static.spec.score
        if not score.differentiated:
            return {}
        return score.per_head_gradients(ds, *self._positions())

    def _kept(self) -> jax.Array | None:
        numbers, dropout = self.inputs.dropout, self.static.spec.dropout
        if numbers is None or dropout is None:
            return None
        queries, keys = self._slices()
        rows = numbers.load_queries(self.batch, self.head, queries, self.layouts.rows)
        columns = numbers.load_keys(keys, self.layouts.columns)
        return dropout.kept(self._over_rows(rows), self._over_columns(columns))

    def _over_rows(self, x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Broadcasts ``[M]`` over the tile, or over ``shape``."""
        return plgpu.layout_cast(along_rows(x, shape or self.shape), self.layouts.tile)

    def _over_columns(self, x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Broadcasts ``[N]`` over the tile, or over ``shape``."""
        return plgpu.layout_cast(along_columns(x, shape or self.shape), self.layouts.tile)

    def _slices(self, columns: slice | None = None) -> tuple[Any, Any]:
        first, count = (0, self.shape[1])
        if columns is not None:
            first, count = columns.start, columns.stop - columns.start
        return pl.ds(self.first_query, self.shape[0]), pl.ds(self.first_key + first, count)

    def _positions(self, columns: slice | None = None) -> tuple[jax.Array, jax.Array]:
        """``(q, k)`` positions, int32, broadcast over the tile or over some of its columns."""
        queries, keys = self._slices(columns)
        of_queries = self.inputs.q_tokens.only("positions")
        of_keys = self.inputs.kv_tokens.only("positions")
        q = of_queries.load(None, queries, self.layouts.rows).positions
        k = of_keys.load(None, keys, self.layouts.columns).positions
        shape = self.shape[0], keys.size
        return self._over_rows(q, shape), self._over_columns(k, shape)

    def _places(self, columns: slice) -> ScoreCoordinates:
        indices = self.inputs.indices
        assert indices is not None
        place = indices.batch[self.batch], indices.head[self.head]
        return ScoreCoordinates(*place, *self._positions(columns), run_on_fragments)

    def _per_head(self) -> dict[str, Any]:
        return {name: ref[self.head] for name, ref in self.inputs.per_head.items()}

    def _allowed(self) -> jax.Array | None:
        """True where a score is not masked; None if no score is masked."""
        queries, keys = self._slices()
        mask = dataclasses.replace(self.static.mask, mask_mod=None)
        allowed = None
        if mask != Mask() or not self._tests_nothing():
            q_tokens = self.inputs.q_tokens.load(self.batch, queries, self.layouts.rows)
            k_tokens = self.inputs.kv_tokens.load(self.batch, keys, self.layouts.columns)
            along = self._over_rows, self._over_columns
            allowed = token_mask(mask, self.shape, q_tokens, k_tokens, *along)
        tests = [self._allowed_by_blocks(), self._before_padding()]
        for test in tests:
            if test is not None:
                allowed = test if allowed is None else both(allowed, test)
        return allowed

    def _tests_nothing(self) -> bool:
        q = self.inputs.q_tokens
        return all(x is None for x in (q.segment_ids, q.kv_starts, q.kv_ends))

    def _before_padding(self) -> jax.Array | None:
        if not self.static.keys_are_padded:
            return None
        index = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layouts.tile)
        return index < self.static.kv_length - self.first_key

    def _allowed_by_blocks(self) -> jax.Array | None:
        """Mask of the block-sparse mask, which has one entry per BLOCK_TOKENS queries of a tile."""
        blocks = self.inputs.blocks
        if blocks is None:
            return None
        assert self.shape[1] <= BLOCK_TOKENS
        q_part, kv_part = (jax.lax.div(x, i32(BLOCK_TOKENS)) for x in self._firsts())
        parts = max(1, self.shape[0] // BLOCK_TOKENS)
        index = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layouts.tile)
        allowed = None
        for part in range(parts):
            seen = blocks.allowed(self.head, q_part + part, kv_part)
            # The part's rows are unmasked if its entry allows them: else the range is empty.
            first, end = i32(part * BLOCK_TOKENS), i32((part + 1) * BLOCK_TOKENS)
            here = (index >= first) & (index < jnp.where(seen, end, first))
            allowed = here if allowed is None else allowed | here
        return allowed

    def _firsts(self) -> tuple[Any, Any]:
        return self.first_query, self.first_key
