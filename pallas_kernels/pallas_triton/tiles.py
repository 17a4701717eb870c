"""Shared code of the Triton kernels: masked loads, masks, the loop over tiles."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import Dropout
from pallas_kernels.elementwise import ScoreCoordinates, on_tiles
from pallas_kernels.inputs import GlobalIndices
from pallas_kernels.mask import Mask
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.score import Score


def in_range(start: jax.Array, block: int, length: int) -> jax.Array | None:
    """Which of ``block`` indices from ``start`` are inside ``length``; None if all always are."""
    if length % block == 0:
        return None
    return start + jnp.arange(block, dtype=jnp.int32) < length


def lanes_in(lanes: int, dim: int) -> jax.Array | None:
    """Which lanes are within the head dim; None if all are."""
    return None if lanes == dim else jnp.arange(lanes, dtype=jnp.int32) < dim


def tile_mask(rows: jax.Array | None, lanes: jax.Array | None) -> jax.Array | None:
    """The mask of a ``[rows, lanes]`` tile; None if it has no padding."""
    if rows is None:
        return None if lanes is None else lanes[None, :]
    return rows[:, None] if lanes is None else rows[:, None] & lanes[None, :]


def tile_masks(
    rows: jax.Array | None, lanes: tuple[jax.Array | None, jax.Array | None]
) -> tuple[jax.Array | None, jax.Array | None]:
    """:func:`tile_mask` with the lanes of q and k, and with those of v; ``lanes`` are both."""
    of_keys = tile_mask(rows, lanes[0])
    return of_keys, of_keys if lanes[1] is lanes[0] else tile_mask(rows, lanes[1])


def load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Loads a tile, 0 where masked: past its end an array's neighbor would be read."""
    if mask is None:
        return lowering.load(ref)
    return lowering.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def stat(ref: Any, which: int, *index: Any) -> Any:
    """A reference to lse (``which`` is 0) or delta (1), indexed further, from the stacked array.

    The index must be an array. The slices next to it get JAX's default integer dtype, int64 under
    ``jax_enable_x64``, and interpret mode requires one dtype, so the index has the default one.
    """
    return ref.at[(jnp.asarray(which, int), *(index or (slice(None),)))]


def as_column(x: jax.Array | None) -> jax.Array | None:
    """``[rows]`` to ``[rows, 1]``."""
    return None if x is None else x[:, None]


def as_row(x: jax.Array | None) -> jax.Array | None:
    """``[columns]`` to ``[1, columns]``."""
    return None if x is None else x[None, :]


class TileTokens(NamedTuple):
    """Tokens of one side of a tile, shaped to broadcast over its scores.

    Attributes:
      positions: int32; None where neither mask nor score read them.
      segment_ids: int32, or None.
      inside: which tokens are inside the array; None if all are.
      kv_bounds: of queries, ``kv_starts`` and ``kv_ends`` by name, those that there are.
    """

    positions: Any
    segment_ids: Any
    inside: jax.Array | None
    kv_bounds: dict[str, Any]


class SideRefs(NamedTuple):
    """References to the inputs of scores apart from q and k.

    Attributes:
      q_positions: int32 positions of the queries.
      kv_positions: int32 positions of the keys.
      q_segment_ids: int32 segment ids of the queries, or None.
      kv_segment_ids: int32 segment ids of the keys, or None.
      kv_bounds: int32, KV bounds of the queries by name.
      per_head: per-head parameters of logits, of the program's query heads.
      dropout_rows: int32, dropout hashes of the queries; None without dropout.
      dropout_columns: int32, dropout hashes of the keys; None without dropout.
      block_rows: int32, the row of each query in the block-sparse mask; None if scores are not
        tested by it.
      block_words: int32, the mask of the program's heads, packed (:class:`BlockWords`), or None.
      indices: global batch index and query head indices; None without user functions.
    """

    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    kv_bounds: dict[str, Any]
    per_head: dict[str, Any]
    dropout_rows: Any = None
    dropout_columns: Any = None
    block_rows: Any = None
    block_words: Any = None
    indices: GlobalIndices | None = None

    def queries(self, which: Any, inside: Any, shaped: Any, *, masked: bool = True) -> TileTokens:
        """The tokens of some queries.

        Args:
          which: slice of the query axis.
          inside: which of them are inside the array; the others are loaded as 0.
          shaped: :func:`as_column` or :func:`as_row`, the queries' axis of a tile of scores.
          masked: whether the tile needs a mask. If not, only a bias and user functions read the
            tokens.
        """
        refs = self.q_positions, self.q_segment_ids, self.kv_bounds
        return self._tokens(refs, which, inside, shaped, masked)

    def keys(self, which: Any, inside: Any, shaped: Any, *, masked: bool = True) -> TileTokens:
        """The tokens of some keys, as :meth:`queries`."""
        refs = self.kv_positions, self.kv_segment_ids, {}
        return self._tokens(refs, which, inside, shaped, masked)

    def _tokens(
        self, refs: tuple, which: Any, inside: Any, shaped: Any, masked: bool
    ) -> TileTokens:
        positions, segment_ids, kv_bounds = refs
        reads_positions = bool(self.per_head) or self.indices is not None
        if not masked and not reads_positions:
            return TileTokens(None, None, None, {})

        def loaded(ref: Any) -> Any:
            return None if ref is None else shaped(load(ref.at[which], inside))

        # KV bounds include the window, so only a bias or a user function reads query positions.
        read = None if kv_bounds and not reads_positions else positions
        ranges = {name: loaded(ref) for name, ref in kv_bounds.items()}
        return TileTokens(loaded(read), loaded(segment_ids), shaped(inside), ranges)

    def rows(self, which: Any, inside: Any, shaped: Any) -> Any:
        """Dropout hashes of some queries; None without dropout."""
        if self.dropout_rows is None:
            return None
        return shaped(load(self.dropout_rows.at[which], inside))

    def columns(self, which: Any, inside: Any, shaped: Any) -> Any:
        """Dropout hashes of some keys; None without dropout."""
        if self.dropout_columns is None:
            return None
        return shaped(load(self.dropout_columns.at[which], inside))

    def table_rows(self, which: Any, inside: Any) -> Any:
        """Rows of some queries in the block-sparse mask; None if scores are not tested by it."""
        return None if self.block_rows is None else load(self.block_rows.at[which], inside)

    def coordinates(
        self, head: Any, queries: TileTokens, keys: TileTokens
    ) -> ScoreCoordinates | None:
        """Coordinates of a tile's scores; None without user functions."""
        if self.indices is None:
            return None
        batch, heads = self.indices
        numbers = lowering.load(batch.at[jnp.int32(0)]), lowering.load(heads.at[head])
        run = functools.partial(on_tiles, replaced={})
        return ScoreCoordinates(*numbers, queries.positions, keys.positions, run)

    def per_head_of(self, head: Any) -> dict[str, jax.Array]:
        """The per-head parameters of one of the program's query heads."""
        return {name: lowering.load(ref.at[head]) for name, ref in self.per_head.items()}


def split_sides(
    refs: tuple,
    has_segments: bool,
    range_names: tuple[str, ...],
    names: tuple[str, ...],
    has_dropout: bool,
    has_blocks: bool = False,
    has_functions: bool = False,
) -> tuple[Any, SideRefs, list]:
    """``(table, sides, the rest)`` of a kernel's references, which launch.Arguments has ordered."""
    table, q_positions, kv_positions, *rest = refs
    q_ids = kv_ids = None
    if has_segments:
        q_ids, kv_ids, *rest = rest
    named = dict(zip((*range_names, *names), rest, strict=False))
    ranges, per_head = ({name: named[name] for name in of} for of in (range_names, names))
    rest = rest[len(named) :]
    rows = columns = None
    if has_dropout:
        rows, columns, *rest = rest
    blocks = ()
    if has_blocks:
        *blocks, rest = *rest[:2], rest[2:]
    indices = None
    if has_functions:
        indices, rest = GlobalIndices(*rest[:2]), rest[2:]
    numbers = rows, columns, *blocks
    of_tokens = q_positions, kv_positions, q_ids, kv_ids, ranges, per_head
    sides = SideRefs(*of_tokens, *numbers, indices=indices)
    return table, sides, rest


def dropped(dropout: Dropout | None, rows: Any, columns: Any, x: jax.Array) -> jax.Array:
    """``x``, which has a value per score of a tile, 0 where dropped."""
    return x if dropout is None else jnp.where(dropout.kept(rows, columns), x, 0.0)


def weights(
    score: Score, scores: jax.Array, factor: float, shift: jax.Array, *, interpret: bool
) -> jax.Array:
    """``2^(factor score + shift)``, 0 where a ``score_mod`` returned -inf."""
    p = lowering.exp2_affine(scores, factor, shift, interpret=interpret)
    # A query without keys has lse -inf, and 2^(-inf - lse) is NaN.
    return p if score.score_mod is None else jnp.where(scores == -jnp.inf, 0.0, p)


def score_mask(
    mask: Mask,
    q: TileTokens,
    kv: TileTokens,
    by_blocks: jax.Array | None = None,
    coordinates: ScoreCoordinates | None = None,
) -> jax.Array | None:
    """Which scores of a tile count, without a partial tile's padding; None if all do.

    ``by_blocks``: those that the block-sparse mask allows; None if it allows all.
    """
    # Both paddings first: in another order the A100's tiles spill.
    cuts = [cut for cut in (kv.inside, q.inside) if cut is not None]
    inside = functools.reduce(operator.and_, cuts) if cuts else None
    ids = q.segment_ids, kv.segment_ids
    allowed = mask.allowed(q.positions, kv.positions, *ids, **q.kv_bounds, coordinates=coordinates)
    tests = [test for test in (allowed, inside, by_blocks) if test is not None]
    return functools.reduce(operator.and_, tests) if tests else None


def over_tiles[State](
    table: Any,
    visit: Callable[[bool, Any, Any, State], State],
    state: State,
    heads: int = 1,
    *,
    listed: bool,
) -> State:
    """Runs ``visit(masked, head, tile, state)`` for every head over the tiles in the bounds table.

    One loop visits the tiles before and after the full ones, for all heads, and a second loop the
    full ones. Two loops that are not nested keep fewer values alive and their load pipelines
    running. Heads vary fastest, so that the division is by a constant.

    ``listed``: the table is a tile list instead of a range (:mod:`pallas_kernels.bounds`).
    """

    def step(masked, tile, t, state):
        if heads == 1:
            return visit(masked, jnp.int32(0), tile(t), state)
        j, head = lax.div(t, jnp.int32(heads)), lax.rem(t, jnp.int32(heads))
        return visit(masked, head, tile(j), state)

    for masked, count, tile in _listed(table) if listed else _in_range(table):
        body = functools.partial(step, masked, tile)
        state = lax.fori_loop(jnp.int32(0), heads * count, body, state)
    return state


def _in_range(table: Any) -> tuple[tuple[bool, Any, Callable[[Any], Any]], ...]:
    """``(masked, count, t -> tile)`` of both loops over a range of tiles."""
    first, full_first, full_end, end = (table[c] for c in range(4))
    before = full_first - first

    def masked_tile(t):
        return jnp.where(t < before, first + t, full_end + (t - before))

    def full_tile(t):
        return full_first + t

    return (
        (True, before + (end - full_end), masked_tile),
        (False, full_end - full_first, full_tile),
    )


def _listed(table: Any) -> tuple[tuple[bool, Any, Callable[[Any], Any]], ...]:
    """The same of a list."""
    masked, visited = table[0], table[1]
    return (
        (True, masked, lambda t: table[2 + t]),
        (False, visited - masked, lambda t: table[2 + masked + t]),
    )
