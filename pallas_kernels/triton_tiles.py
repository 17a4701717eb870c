"""What the bodies of the Triton kernels share: masked loads, masks, the walk over tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import triton_lowering
from pallas_kernels.scores import allowed
from pallas_kernels.spec import AttentionSpec


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


def half(ref: Any, index: int) -> Any:
    """The first or the second ``[rows, lanes]`` tile of a packed pair's reference.

    A load or store takes an array as an index, no Python number, and gives the slices beside it
    starts of JAX's default integer dtype, int64 under ``jax_enable_x64``. Interpret mode wants all
    of them to be of one dtype, so the index has the default one too.
    """
    return ref.at[jnp.asarray(index, int), :, :]


def column(x: jax.Array | None) -> jax.Array | None:
    """``[rows]`` to ``[rows, 1]``."""
    return None if x is None else x[:, None]


def row(x: jax.Array | None) -> jax.Array | None:
    """``[columns]`` to ``[1, columns]``."""
    return None if x is None else x[None, :]


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
    """``(table, tokens, the rest)`` of references that start as Operands.add_tokens has them."""
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


def over_tiles(
    table: Any, visit: Callable[[bool, Any, Any, Any], Any], state: Any, heads: int = 1
) -> Any:
    """Runs ``visit(masked, head, tile, state)`` for every head over the tiles in the bounds table.

    First those before and behind the full ones, then the full ones, all heads in one loop each: two
    loops without loops around them hold fewer values alive and keep their load pipelines running.
    Heads vary fastest: that division is by a constant.
    """
    first, full_first, full_end, end = (table[c] for c in range(4))
    before = full_first - first

    def masked_tile(t):
        return jnp.where(t < before, first + t, full_end + (t - before))

    def loop(masked, count, tile, state):
        def step(t, state):
            if heads == 1:
                return visit(masked, jnp.int32(0), tile(t), state)
            j, head = lax.div(t, jnp.int32(heads)), lax.rem(t, jnp.int32(heads))
            return visit(masked, head, tile(j), state)

        return lax.fori_loop(jnp.int32(0), heads * count, step, state)

    state = loop(True, before + (end - full_end), masked_tile, state)
    return loop(False, full_end - full_first, lambda t: full_first + t, state)
