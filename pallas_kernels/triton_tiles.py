"""What the Triton kernels share: blocks of paired arrays, masked loads, base-2 scores."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, varying_axes
from pallas_kernels.scores import allowed
from pallas_kernels.spec import AttentionSpec, Tokens

LOG2_E = math.log2(math.e)


def padded_lanes(dim: int) -> int:
    """Triton's tensors are powers of two; loads beyond the head dim are masked to zero."""
    return max(16, pl.next_power_of_2(dim))


def pair_blocks(pair: Pair, block: tuple[int | None, ...], index: Any) -> tuple[tuple, list]:
    """Operands and blocks for both arrays of a pair.

    A packed pair is passed twice, each operand seeing its own half: no slice, no copy.
    """
    if isinstance(pair, tuple):
        return pair, [pl.BlockSpec(block, index)] * 2

    def spec(half):
        return pl.BlockSpec((None, *block), lambda *ids: (half, *index(*ids)))

    return (pair, pair), [spec(0), spec(1)]


def float32_like(operands: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A float32 result that varies over the mesh axes that any operand varies over."""
    kind = jax.typeof(jax.tree.leaves(operands)[0]).manual_axis_type
    kind = kind.update(varying=varying_axes(operands))
    return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=kind)


def in_range(start: jax.Array, block: int, length: int) -> jax.Array | None:
    """Which of ``block`` indices from ``start`` are inside ``length``; None if all always are."""
    if length % block == 0:
        return None
    return start + jnp.arange(block, dtype=jnp.int32) < length


def lanes_in(lanes: int, dim: int) -> jax.Array | None:
    """Which lanes belong to the head dim; None if all do."""
    return None if lanes == dim else jnp.arange(lanes, dtype=jnp.int32) < dim


def both(rows: jax.Array | None, lanes: jax.Array | None) -> jax.Array | None:
    """The mask of a ``[rows, lanes]`` tile; None where nothing is cut off."""
    if rows is None:
        return None if lanes is None else lanes[None, :]
    return rows[:, None] if lanes is None else rows[:, None] & lanes[None, :]


def load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Loads a tile, 0 where masked: beyond an array's end a GPU reads its neighbour."""
    if mask is None:
        return triton_lowering.load(ref)
    return triton_lowering.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def scaled_log2(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    """Scores times log2(e), so that the softmax needs exp2 alone."""
    if spec.logits_soft_cap is None:
        return products * (spec.scale * LOG2_E)
    cap = spec.logits_soft_cap
    return jnp.tanh(products * (spec.scale / cap)) * (cap * LOG2_E)


def products_slope(spec: AttentionSpec, scores_log2: jax.Array, ds: jax.Array) -> jax.Array:
    """Gradient with respect to the scaled products: times the soft cap's slope, if there is one."""
    if spec.logits_soft_cap is None:
        return ds
    tanh = scores_log2 * (1 / (spec.logits_soft_cap * LOG2_E))
    return ds * (1 - tanh * tanh)


def column(x: jax.Array | None) -> jax.Array | None:
    """``[rows]`` to ``[rows, 1]``."""
    return None if x is None else x[:, None]


def row(x: jax.Array | None) -> jax.Array | None:
    """``[columns]`` to ``[1, columns]``."""
    return None if x is None else x[None, :]


def token_blocks(
    bounds: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    *,
    q_block: int | None,
    kv_block: int | None,
    tile: Any,
) -> tuple[list, list]:
    """Operands and blocks of the bounds table, the positions and the segment ids, in this order.

    Args:
      bounds: int32 ``[1 or B, tiles, 4]``.
      q_tokens: the queries' tokens.
      kv_tokens: the keys' tokens.
      q_block: queries per program, None for all of them.
      kv_block: keys per program, None for all of them.
      tile: ``grid indices -> (batch row, tile)`` of the side that programs are split over.
    """
    per_row = bounds.shape[0] != 1

    def table(*ids):
        b, i = tile(*ids)
        return (b if per_row else 0), i, 0

    operands: list = [bounds]
    specs = [pl.BlockSpec((None, None, 4), table)]
    sides = ((q_tokens, q_block), (kv_tokens, kv_block))
    for tokens, block in sides:
        size = tokens.positions.shape[0] if block is None else block
        index = (lambda *ids: (0,)) if block is None else (lambda *ids: (tile(*ids)[1],))
        operands.append(tokens.positions)
        specs.append(pl.BlockSpec((size,), index))
    for tokens, block in sides:
        if tokens.segment_ids is None:
            continue
        size = tokens.positions.shape[0] if block is None else block
        index = (lambda *ids: (tile(*ids)[0], 0)) if block is None else tile
        operands.append(tokens.segment_ids)
        specs.append(pl.BlockSpec((None, size), index))
    return operands, specs


class TokenRefs(NamedTuple):
    """A kernel's references to positions and segment ids of both sides."""

    q_pos: Any
    kv_pos: Any
    q_seg: Any
    kv_seg: Any

    def queries(self, at: Any, inside: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Positions and segment ids of some queries; 0 where not inside."""
        return _tokens(self.q_pos, self.q_seg, at, inside)

    def keys(self, at: Any, inside: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Positions and segment ids of some keys; 0 where not inside."""
        return _tokens(self.kv_pos, self.kv_seg, at, inside)


def _tokens(pos: Any, seg: Any, at: Any, inside: jax.Array | None) -> Any:
    return load(pos.at[at], inside), None if seg is None else load(seg.at[at], inside)


def split_tokens(refs: tuple, segments: bool) -> tuple[Any, TokenRefs, list]:
    """``(table, tokens, the rest)`` of a kernel's references that start as token_blocks says."""
    table, q_pos, kv_pos, *rest = refs
    if not segments:
        return table, TokenRefs(q_pos, kv_pos, None, None), rest
    q_seg, kv_seg, *rest = rest
    return table, TokenRefs(q_pos, kv_pos, q_seg, kv_seg), rest


def score_mask(
    spec: AttentionSpec,
    q_pos: jax.Array,
    k_pos: jax.Array,
    q_seg: jax.Array | None,
    k_seg: jax.Array | None,
    inside: jax.Array | None,
) -> jax.Array | None:
    """Which scores of a tile count; ``inside`` cuts off a ragged tile's tail. None if all do."""
    mask = allowed(spec, q_pos, k_pos, q_seg, k_seg)
    if inside is None:
        return mask
    return inside if mask is None else mask & inside
