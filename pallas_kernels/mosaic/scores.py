"""Scores of one tile in a warpgroup's registers, for every kernel: logits, mask, dropout.

A feature that a call does not use emits no code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import score_hashes
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.mask import Mask, both
from pallas_kernels.mosaic.fragments import along_columns, along_rows, constant, fma, i32, tanh
from pallas_kernels.mosaic.score_inputs import (
    BLOCK_TOKENS,
    DropoutHashes,
    ScoreInputs,
    TokenArrays,
    load_tokens,
)
from pallas_kernels.mosaic.static import KernelStatic
from pallas_kernels.mosaic.user_functions import by_column_chunks, run_on_fragments
from pallas_kernels.score import LOG2_E


class RowValues(NamedTuple):
    """What a kernel keeps in registers for all tiles with the same rows.

    Attributes:
      tokens: token arrays of the rows; None: they are loaded for each tile.
      dropout: int32 ``[rows]``, hashes of the rows; the same.
      per_head: the head's value of each per-head parameter of logits; the same.
      line: float32 ``[rows]``, of :class:`LinePositions`, for user functions; the same.
    """

    tokens: TokenArrays | None = None
    dropout: jax.Array | None = None
    per_head: dict[str, Any] | None = None
    line: jax.Array | None = None


class ScoreTile(NamedTuple):
    """One tile of scores of one batch index and query head: ``[queries, keys]``, or transposed.

    Attributes:
      static: static parameters of the call.
      inputs: references to the inputs of scores.
      layouts: object with the register layouts ``tile``, ``rows`` and ``columns``.
      shape: number of rows and columns.
      batch: batch index.
      head: query head.
      first_query: index of the first query.
      first_key: index of the first key.
      line: result of :meth:`affine_bias`, for all tiles with these queries; None: it is loaded.
      transposed: whether keys are the rows and queries the columns.
      kept: what is not loaded, because it is in registers.
      intervals: :class:`pallas_kernels.mosaic.sm90.row_intervals.RowIntervals`, or None.
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
    transposed: bool = False
    kept: RowValues = RowValues()
    intervals: Any = None

    def raw(
        self, products: jax.Array, tanh: Callable[[jax.Array, float], jax.Array] = tanh
    ) -> jax.Array:
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
            coordinates = self.coordinates()

            def apply(columns: slice, part: jax.Array) -> tuple[jax.Array]:
                places = coordinates(columns)
                if score.score_mod is not None:
                    part = score.modified(part, places)
                if mask_mod is not None:
                    part = jnp.where(places.apply(mask_mod), part, -jnp.inf)
                return (part,)

            (scores,) = by_column_chunks(apply, scores)
        if self.static.adds_bias and self.static.bias_is_affine:
            assert self.inputs.line is not None
            line = self._line(self.inputs.line.kv, self._slices()[1], self.layouts.columns)
            scores = scores * score.base_2_factor + self._over_columns(line)
        elif self.static.adds_bias:
            scores, _ = score.with_bias(scores, *self.positions(), self.per_head())
        if not masked:
            return scores

        def by_tokens(scores):
            allowed = self._allowed()
            return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)

        if self.intervals is None:
            return by_tokens(scores)
        return self.intervals.mask(scores, self.first_key, by_tokens)

    def excess(self) -> jax.Array | None:
        """float32 ``[M]``: by how much each query's base-2 scores are too large; None if exact.

        An affine bias is ``line(k) - line(q)``, but scores contain ``line(k)``. ``line(q)`` is the
        same for all keys of a query, and small: it is relative to the tile's first query.
        """
        if not self.static.bias_is_affine:
            return None
        assert self.inputs.line is not None
        return self._line(self.inputs.line.q, self._slices()[0], self.layouts.rows)

    def affine_bias(self) -> tuple[Any, Any] | None:
        """``(slope, intercept)``: :meth:`pallas_kernels.score.Score.affine_bias`, in base 2."""
        if not self.static.bias_is_affine:
            return None
        assert self.inputs.line is not None
        base = self.inputs.line.q[self.first_query]
        return self.static.spec.score.affine_bias(base, self.per_head(), LOG2_E)

    def _line(self, positions: Any, tokens: Any, layout: Any) -> jax.Array:
        """The affine bias at ``positions[tokens]``."""
        line = self.line or self.affine_bias()
        assert line is not None
        positions = plgpu.load(positions.at[tokens], layout=layout, optimized=False)
        intercept = plgpu.layout_cast(jnp.full(positions.shape, line[1]), layout)
        return fma(line[0], positions, intercept, layout)

    def dropout_factors(self, unit: float | None = None) -> jax.Array | None:
        """The factors by which dropout multiplies the tile's weights; None without dropout.

        ``unit``: of the weights that are kept; None is :attr:`Dropout.unit`.

        With products the compiler adds nothing. For a select between weights and 0 it may first
        round the weights to 16 bits, and then unpack pairs of them.
        """
        kept, dropout = self._kept(), self.static.spec.dropout
        if kept is None or dropout is None:
            return None
        unit = dropout.unit if unit is None else unit
        return jnp.where(kept, constant(self.shape, unit, self.layouts.tile), 0.0)

    def without_dropped(self, weights: jax.Array) -> jax.Array:
        """The weights, 0 where dropped; those that are kept are not scaled."""
        kept = self._kept()
        return weights if kept is None else jnp.where(kept, weights, 0.0)

    def dropout_hashes(self) -> jax.Array | None:
        """:func:`pallas_kernels.dropout.score_hashes` of the tile; None without dropout."""
        hashes = self.inputs.dropout
        if hashes is None:
            return None
        _, columns = self._slices()
        _, of_columns = self._oriented(*hashes.of(self.batch, self.head))
        at_rows = self._over_rows(self._row_hashes(hashes))
        at_columns = self._over_columns(load_tokens(of_columns, columns, self.layouts.columns))
        return score_hashes(at_rows, at_columns)

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

        coordinates = self.coordinates()

        def apply(columns: slice, part: jax.Array) -> tuple[jax.Array]:
            of_part = weights[:, columns], ds[:, columns], coordinates(columns)
            return (score.to_products(part, *of_part),)

        (ds,) = by_column_chunks(apply, raw)
        return ds

    def per_head_gradients(self, ds: jax.Array) -> dict[str, jax.Array]:
        """Each score's contribution to per-head gradients; ``ds``: gradients of the logits."""
        score = self.static.spec.score
        if not score.differentiated:
            return {}
        return score.per_head_gradients(ds, *self.positions())

    def positions(self, columns: slice | None = None) -> tuple[jax.Array, jax.Array]:
        """``(q, k)`` positions, int32, broadcast over the tile or over some of its columns."""
        _, tokens = self._oriented(self.inputs.q_tokens, self.inputs.kv_tokens)
        _, at = self._slices(columns)
        shape = self.shape[0], at.size
        of_rows = self._over_rows(self.row_positions(), shape)
        of_columns = tokens.load_positions(at, self.layouts.columns)
        return self._oriented(of_rows, self._over_columns(of_columns, shape))

    def row_positions(self) -> jax.Array:
        """Positions of the tile's rows, kept or loaded."""
        if self.kept.tokens is not None:
            return self.kept.tokens.positions
        tokens, _ = self._oriented(self.inputs.q_tokens, self.inputs.kv_tokens)
        rows, _ = self._slices()
        return tokens.load_positions(rows, self.layouts.rows)

    def keeping_rows(self) -> ScoreTile:
        """With all that is read of the rows in registers, for all tiles with the same rows."""
        side, _ = self._oriented(self.inputs.q_tokens, self.inputs.kv_tokens)
        tokens = side.load(self.batch, self._slices()[0], self.layouts.rows)
        hashes = self.inputs.dropout
        dropout = None if hashes is None else self._row_hashes(hashes)
        return self._replace(
            kept=RowValues(tokens, dropout, self.per_head(), self._row_line_positions())
        )

    def keeping_row_positions(self) -> ScoreTile:
        """With the positions of the rows in registers, for several calls that read them."""
        tokens, line = TokenArrays(self.row_positions()), self._row_line_positions()
        return self._replace(kept=self.kept._replace(tokens=tokens, line=line))

    def coordinates(self) -> Callable[[slice], ScoreCoordinates]:
        """The coordinates of some of the tile's columns, for user functions."""
        indices = self.inputs.indices
        assert indices is not None
        place = indices.batch[self.batch], indices.head[self.head]

        def of_columns(columns: slice) -> ScoreCoordinates:
            floats = functools.partial(self._float_positions, columns)
            run = functools.partial(
                run_on_fragments, float_positions=None if self.inputs.line is None else floats
            )
            return ScoreCoordinates(*place, *self.positions(columns), run)

        return of_columns

    def _float_positions(self, columns: slice) -> tuple[jax.Array, jax.Array]:
        """``(q, k)``: :class:`LinePositions`, broadcast over some of the tile's columns."""
        assert self.inputs.line is not None
        _, at = self._slices(columns)
        _, of_columns = self._oriented(self.inputs.line.q, self.inputs.line.kv)
        of_columns = load_tokens(of_columns, at, self.layouts.columns)
        of_rows, shape = self._row_line_positions(), (self.shape[0], at.size)
        assert of_rows is not None
        return self._oriented(
            self._over_rows(of_rows, shape), self._over_columns(of_columns, shape)
        )

    def _row_line_positions(self) -> jax.Array | None:
        """:class:`LinePositions` of the tile's rows, kept or loaded; None if nothing reads them."""
        if self.kept.line is not None or self.inputs.line is None:
            return self.kept.line
        of_rows, _ = self._oriented(self.inputs.line.q, self.inputs.line.kv)
        return load_tokens(of_rows, self._slices()[0], self.layouts.rows)

    def per_head(self) -> dict[str, Any]:
        """The head's value of each per-head parameter of logits."""
        if self.kept.per_head is not None:
            return self.kept.per_head
        return {name: ref[self.head] for name, ref in self.inputs.per_head.items()}

    def tokens(self, *names: str) -> tuple[TokenArrays, TokenArrays]:
        """``(q, k)``: the tile's token arrays, of the queries only those of ``names`` if given."""
        queries = self.inputs.q_tokens.only(*names) if names else self.inputs.q_tokens
        sides = self._oriented(queries, self.inputs.kv_tokens)
        rows, columns = self._slices()
        of_rows = self.kept.tokens or sides[0].load(self.batch, rows, self.layouts.rows)
        of_columns = sides[1].load(self.batch, columns, self.layouts.columns)
        return self._oriented(of_rows, of_columns)

    def allowed_by_tokens(self, mask: Mask, q: TokenArrays, k: TokenArrays) -> jax.Array | None:
        """True where arrays of :meth:`tokens` do not mask a score; None if they mask none.

        ``mask``: the window; its ``mask_mod`` must be None.
        """
        q_over, k_over = self._oriented(self._over_rows, self._over_columns)
        q_positions, q_ids, starts, ends = (None if x is None else q_over(x) for x in q)
        k_positions, k_ids, *_ = (None if x is None else k_over(x) for x in k)
        return mask.allowed(q_positions, k_positions, q_ids, k_ids, starts, ends)

    def allowed_by_blocks(self) -> jax.Array | None:
        """Mask of the block-sparse mask; None without one.

        Its entries are for BLOCK_TOKENS rows and columns of a tile, of which one is the whole tile.
        """
        blocks = self.inputs.blocks
        if blocks is None:
            return None
        axis = 0 if self.shape[0] > BLOCK_TOKENS else 1
        assert BLOCK_TOKENS % self.shape[1 - axis] == 0
        # Else a part of the tile would be of two entries.
        assert self.shape[axis] % BLOCK_TOKENS == 0 or BLOCK_TOKENS % self.shape[axis] == 0
        q_part, kv_part = (
            lax.div(x, i32(BLOCK_TOKENS)) for x in (self.first_query, self.first_key)
        )
        along_queries = (axis == 0) != self.transposed
        entries = []
        for part in range(max(1, self.shape[axis] // BLOCK_TOKENS)):
            at = (q_part + part, kv_part) if along_queries else (q_part, kv_part + part)
            entries.append(blocks.allowed(self.head, *at))
        return _allowed_parts(self.shape, entries, self.layouts.tile, axis)

    def _kept(self) -> jax.Array | None:
        hashes, dropout = self.dropout_hashes(), self.static.spec.dropout
        if hashes is None or dropout is None:
            return None
        return dropout.keeps(hashes)

    def _row_hashes(self, hashes: DropoutHashes) -> jax.Array:
        """Hashes of the tile's rows, kept or loaded."""
        if self.kept.dropout is not None:
            return self.kept.dropout
        of_rows, _ = self._oriented(*hashes.of(self.batch, self.head))
        return load_tokens(of_rows, self._slices()[0], self.layouts.rows)

    def _oriented[T](self, x: T, y: T) -> tuple[T, T]:
        """From (queries, keys) to (rows, columns), or back."""
        return (y, x) if self.transposed else (x, y)

    def _over_rows(self, x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Broadcasts a value per row over the tile, or over ``shape``."""
        return plgpu.layout_cast(along_rows(x, shape or self.shape), self.layouts.tile)

    def _over_columns(self, x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Broadcasts a value per column over the tile, or over ``shape``."""
        return plgpu.layout_cast(along_columns(x, shape or self.shape), self.layouts.tile)

    def _slices(self, columns: slice | None = None) -> tuple[Any, Any]:
        """Slices of the token axes: the tile's rows, and its columns or some of them."""
        rows_from, columns_from = self._oriented(self.first_query, self.first_key)
        first, count = 0, self.shape[1]
        if columns is not None:
            first, count = columns.start, columns.stop - columns.start
        return pl.ds(rows_from, self.shape[0]), pl.ds(columns_from + first, count)

    def _allowed(self) -> jax.Array | None:
        """True where a score is not masked; None if no score is masked."""
        mask = dataclasses.replace(self.static.mask, mask_mod=None)
        allowed = self.allowed_by_tokens(mask, *self.tokens())
        for test in (self.allowed_by_blocks(), self._before_padding()):
            if test is not None:
                allowed = test if allowed is None else both(allowed, test)
        return allowed

    def _before_padding(self) -> jax.Array | None:
        if not self.static.keys_are_padded:
            return None
        axis = 0 if self.transposed else 1
        index = plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layouts.tile)
        return index < self.static.kv_length - self.first_key


def _allowed_parts(
    shape: tuple[int, ...], allowed: Sequence[jax.Array], layout: Any, axis: int
) -> jax.Array:
    """Mask of a tile in ``layout``: True in the i-th BLOCK_TOKENS along ``axis`` if allowed[i]."""
    index = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    mask = None
    # Two neighboring parts make one range.
    for first in range(0, len(allowed), 2):
        middle = (first + 1) * BLOCK_TOKENS
        start = jnp.where(allowed[first], i32(middle - BLOCK_TOKENS), i32(middle))
        end = i32(middle)
        if first + 1 < len(allowed):
            end = jnp.where(allowed[first + 1], i32(middle + BLOCK_TOKENS), end)
        here = (index >= start) & (index < end)
        mask = here if mask is None else mask | here
    assert mask is not None
    return mask
