"""Scores of the backward kernel, of 64 keys and a tile of queries, and their gradients.

Tiles are transposed, ``[64, block_q]``, keys along the rows: so the registers that hold the weights
are a matrix instruction's left operand without a change.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.elementwise import Places
from pallas_kernels.mask import Mask
from pallas_kernels.pallas_mosaic.backward_rows import KeyRows
from pallas_kernels.pallas_mosaic.blocks import columns_seen
from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.functions import by_parts, run_on_tile
from pallas_kernels.pallas_mosaic.tiles import (
    COLUMNS,
    ROWS,
    TILE,
    along_columns,
    along_rows,
    computed_here,
    constant,
    multiply_add,
    tanh,
)
from pallas_kernels.pallas_mosaic.tokens import SideTokens, score_mask
from pallas_kernels.score import LOG2_E

# The least weight whose logarithm is taken.
_LEAST_WEIGHT = 1e-37


def tile_scores(
    rows: KeyRows, warpgroup: Any, q_tile: Any, head: Any, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """``(scores, slope)``.

    The scores are raw ones (:meth:`pallas_kernels.score.Score.raw`), or what a function of the
    caller's makes of them; -inf for keys beyond the last one. The slope is their derivative with
    respect to the scaled products. It is made here, where the products still are; None without
    one (:attr:`pallas_kernels.score.Score.has_slope`).

    Args:
      rows: the keys.
      warpgroup: the number of the warpgroup, computed anew in this step.
      q_tile: which queries.
      head: which query head.
      products: float32, ``k q^T``.
    """
    static, score, slope = rows.static, rows.static.spec.score, None
    scores = score.raw(products, tanh)
    if score.score_mod is not None:
        places = _TilePlaces.of(rows, warpgroup, head)

        def modified(columns: slice, part: jax.Array) -> tuple[jax.Array, ...]:
            made = score.modified_with_slope(part, places.part(q_tile, columns))
            return tuple(x for x in made if x is not None)

        scores, *slopes = by_parts(modified, scores)
        slope = slopes[0] if slopes else None
    if static.keys_are_cut_off:
        outside = rows.outside_scores(warpgroup) if rows.outside is None else rows.outside
        outside = along_rows(outside, scores.shape)
        if score.score_mod is None:
            scores = scores + outside
        else:  # What a function makes of them may be no number.
            scores = jnp.where(outside == 0, scores, outside)
    return scores, slope


class _TilePlaces(NamedTuple):
    """Where the scores of a tile are, for functions of the caller's.

    Attributes:
      rows: the keys.
      numbers: of the row of the batch and of the query head.
      k_positions: int32 ``[64]``.
    """

    rows: KeyRows
    numbers: tuple[Any, Any]
    k_positions: jax.Array

    @classmethod
    def of(cls, rows: KeyRows, warpgroup: Any, head: Any) -> _TilePlaces:
        """The arguments are those of :func:`exponents`."""
        numbering = rows.refs.operands.numbering
        assert numbering is not None
        numbers = numbering.batch[rows.item.recompute_place().batch_row], numbering.head[head]
        return cls(rows, numbers, rows.load_tokens(warpgroup).positions)

    def part(self, q_tile: Any, columns: slice) -> Places:
        """Those of some columns of a tile of queries, whose positions are loaded."""
        count = columns.stop - columns.start
        queries = pl.ds(q_tile * self.rows.static.config.block_q + columns.start, count)
        q_tokens = self.rows.refs.operands.q_tokens.only("positions")
        q_positions = q_tokens.load(None, queries, COLUMNS).positions
        shape = WARPGROUP_ROWS, count
        of_tile = along_columns(q_positions, shape), along_rows(self.k_positions, shape)
        return Places(*self.numbers, *of_tile, run_on_tile)


def exponents(
    rows: KeyRows,
    warpgroup: Any,
    q_tile: Any,
    head: Any,
    scores: jax.Array,
    lse: jax.Array,
    masked: bool,
) -> jax.Array:
    """Logits in base 2 less lse; -inf where they do not count.

    Args:
      rows: the keys.
      warpgroup: the number of the warpgroup, computed anew in this step.
      q_tile: which queries.
      head: which query head.
      scores: float32, of :func:`tile_scores`.
      lse: float32, in base 2, over the tile.
      masked: whether some of the scores may not count.
    """
    static, score = rows.static, rows.static.spec.score
    if static.has_bias:
        positions = tile_positions(rows, warpgroup, q_tile, scores.shape)
        per_head = rows.per_head_of(head)
        if static.bias_is_line:
            # lse comes first: there are no registers for it beside the positions.
            scores = scores * static.base_2_factor - lse
            scores = scores + score.bias_of_earlier_keys(*positions, per_head, LOG2_E)
            return mask_scores(rows, warpgroup, q_tile, head, scores)
        scores, _ = score.with_bias(scores, *positions, per_head)
    if masked:
        scores = mask_scores(rows, warpgroup, q_tile, head, scores)
    return scores * static.base_2_factor - lse


class BiasLine(NamedTuple):
    """The bias in base 2 less lse, over a tile in which all scores count: no key is after a query.

    It is ``slope (p_k - base) - offset``, see :meth:`pallas_kernels.score.Score.bias_line`. The
    base is the smallest position of the queries. No key is after it, so neither a query nor a key
    is further from it than they are from each other: every rounding error is small beside the bias.

    Attributes:
      slope: a scalar.
      keys: float32 ``[64]``, the keys' positions less the base.
    """

    slope: jax.Array
    keys: jax.Array

    @classmethod
    def of(cls, rows: KeyRows, warpgroup: Any, q_tile: Any, head: Any) -> BiasLine:
        """That of a tile; the arguments are those of :func:`score_gradients`."""
        slope = rows.static.spec.score.bias_slope(rows.per_head_of(head), LOG2_E)
        from_base = rows.load_tokens(warpgroup).positions - rows.refs.operands.q_bases[q_tile]
        return cls(slope, from_base.astype(jnp.float32))

    def less(self, offsets: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Over the tile. ``offsets``: float32 ``[block_q]``, lse less the start of the line."""
        keys, offsets = along_rows(self.keys, shape), along_columns(offsets, shape)
        return multiply_add(self.slope, keys, -offsets, TILE)


def tile_positions(
    rows: KeyRows, warpgroup: Any, q_tile: Any, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """``(of the queries, of the keys)``, over a tile of scores."""
    block_q = rows.static.config.block_q
    queries = pl.ds(q_tile * block_q, block_q)
    q_tokens = rows.refs.operands.q_tokens.only("positions")
    q_positions = q_tokens.load(None, queries, COLUMNS).positions
    k_positions = rows.load_tokens(warpgroup).positions
    return along_columns(q_positions, shape), along_rows(k_positions, shape)


def mask_scores(
    rows: KeyRows, warpgroup: Any, q_tile: Any, head: Any, scores: jax.Array
) -> jax.Array:
    """Scores, -inf where positions, ranges of keys, segment ids or blocks forbid them."""
    static, of_queries = rows.static, rows.refs.operands.q_tokens
    # One test after the other, first by positions, then the segments': the positions and the ids
    # would not fit in registers together.
    window = dataclasses.replace(static.mask, mask_mod=None)
    tests = [("positions", window)]
    if static.has_key_ranges:
        tests = [(name, Mask()) for name in ("kv_starts", "kv_ends")]
        tests = [test for test in tests if not of_queries.only(test[0]).is_empty]
    if static.has_segments:
        tests.append(("segment_ids", Mask()))

    def load(side: SideTokens, q_tile: Any, warpgroup: Any) -> tuple[SideTokens, SideTokens]:
        queries = pl.ds(q_tile * static.config.block_q, static.config.block_q)
        k_tokens = rows.load_tokens(warpgroup)
        return side.load(rows.item.batch_row, queries, COLUMNS), k_tokens

    # Beside a bias there are no registers to load all at once, if there are ranges or blocks.
    one_by_one = static.has_bias and (static.has_key_ranges or static.has_blocks)
    one_by_one = one_by_one or static.spec.calls_functions
    q_tokens = k_tokens = SideTokens()
    if not one_by_one:
        q_tokens, k_tokens = load(of_queries, q_tile, warpgroup)
    for name, mask in tests:
        if one_by_one:
            scores, q_tile, warpgroup = computed_here(scores, q_tile, warpgroup)
            q_tokens, k_tokens = load(of_queries.only(name), q_tile, warpgroup)
        of_keys = name if name == "segment_ids" else "positions"
        q_tested, k_tested = q_tokens.only(name), k_tokens.only(of_keys)
        ok = score_mask(mask, scores.shape, q_tested, k_tested, along_columns, along_rows)
        scores = scores if ok is None else computed_here(jnp.where(ok, scores, -jnp.inf))
    if static.mask.mask_mod is not None:
        scores, q_tile, warpgroup, head = computed_here(scores, q_tile, warpgroup, head)
        mask_mod = static.mask.mask_mod
        places = _TilePlaces.of(rows, warpgroup, head)

        def kept(columns: slice, part: jax.Array) -> tuple[jax.Array]:
            seen = places.part(q_tile, columns).apply(mask_mod)
            return (jnp.where(seen, part, -jnp.inf),)

        (scores,) = by_parts(kept, scores)
        scores = computed_here(scores)
    blocks = rows.refs.operands.blocks
    if blocks is not None:
        # The addresses are computed here, not before, and kept by no register until now.
        scores, q_tile, warpgroup, head = computed_here(scores, q_tile, warpgroup, head)
        kv_part = rows.item.recompute_place().tile * (static.config.block_kv // WARPGROUP_ROWS)
        parts = static.config.block_q // WARPGROUP_ROWS
        seen = [blocks.seen(head, q_tile * parts + i, kv_part + warpgroup) for i in range(parts)]
        scores = jnp.where(columns_seen(scores.shape, seen), scores, -jnp.inf)
    return scores


def dropout_factors(
    rows: KeyRows, warpgroup: Any, q_tile: Any, head: Any, shape: tuple[int, ...]
) -> jax.Array | None:
    """What dropout multiplies the weights of a tile by; None if nothing is dropped.

    By products of these the compiler adds nothing. Where it selects between weights and 0, it first
    rounds the weights, to 16 bits, and then takes pairs of them apart.
    """
    numbers, dropout = rows.refs.operands.dropout, rows.static.spec.dropout
    if numbers is None or dropout is None:
        return None
    config = rows.static.config
    queries = pl.ds(q_tile * config.block_q, config.block_q)
    first = rows.item.tile * config.block_kv + warpgroup * WARPGROUP_ROWS
    of_queries = numbers.load_rows(rows.item.batch_row, head, queries, COLUMNS)
    of_keys = numbers.load_columns(pl.ds(first, WARPGROUP_ROWS), ROWS)
    kept = dropout.kept(along_columns(of_queries, shape), along_rows(of_keys, shape))
    return jnp.where(kept, constant(shape, dropout.unit, TILE), 0.0)


def logit_gradients(
    rows: KeyRows, weights: jax.Array, dp: jax.Array, delta: jax.Array
) -> jax.Array:
    """Gradients with respect to the logits; times the scale if it is part of dS.

    Args:
      rows: the keys.
      weights: float32, ``2^(score - lse)``.
      dp: float32, ``v dO^T``.
      delta: float32 ``[block_q]``, times the scale if it is part of dS.
    """
    dp = dp * rows.static.spec.score.scale if rows.static.scale_in_ds else dp
    return weights * (dp - along_columns(delta, weights.shape))


def score_gradients(
    rows: KeyRows,
    warpgroup: Any,
    q_tile: Any,
    head: Any,
    weights: jax.Array,
    ds: jax.Array,
    lse: jax.Array,
) -> jax.Array:
    """dS: gradients with respect to the scaled products, before the soft cap.

    Not where a function of the caller's has a slope, with which it is made of other weights.

    Args:
      rows: the keys.
      warpgroup: the number of the warpgroup, computed anew in this step.
      q_tile: which queries.
      head: which query head.
      weights: float32, ``2^(score - lse)``.
      ds: float32, of :func:`logit_gradients`.
      lse: float32, in base 2, over the tile.
    """
    score = rows.static.spec.score
    if score.logits_soft_cap is None:
        return ds
    # The capped scores are recovered from the weights: there are no registers to keep them in.
    # Where a weight is 0 the result is any number, which does no harm, because dS is 0.
    capped = jnp.log2(jnp.maximum(weights, _LEAST_WEIGHT)) + lse
    if rows.static.has_bias:
        positions = tile_positions(rows, warpgroup, q_tile, weights.shape)
        bias = score.bias(*positions, rows.per_head_of(head), LOG2_E)
        assert bias is not None
        capped = capped - bias
    capped = capped * (1 / (score.raw_factor * LOG2_E))
    return score.through_cap(jnp.clip(capped, -1, 1), ds)
