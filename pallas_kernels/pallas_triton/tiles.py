"""What the bodies of the Triton kernels share: masked loads, masks, the walk over tiles."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import Dropout
from pallas_kernels.elementwise import Places, on_tiles
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
    """Which lanes belong to the head dim; None if all do."""
    return None if lanes == dim else jnp.arange(lanes, dtype=jnp.int32) < dim


def tile_mask(rows: jax.Array | None, lanes: jax.Array | None) -> jax.Array | None:
    """The mask of a ``[rows, lanes]`` tile; None where nothing is cut off."""
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
    """Loads a tile, 0 where masked: beyond an array's end a GPU reads its neighbour."""
    if mask is None:
        return lowering.load(ref)
    return lowering.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def stat(ref: Any, which: int, *index: Any) -> Any:
    """A reference to lse (``which`` is 0) or delta (1), indexed further, from one to both stacked.

    A load takes an array as an index, and no Python number. It gives the slices beside that index
    starts of JAX's default integer dtype, int64 under ``jax_enable_x64``. Interpret mode wants all
    of them to be of one dtype, so the index has the default one too.
    """
    return ref.at[(jnp.asarray(which, int), *(index or (slice(None),)))]


def as_column(x: jax.Array | None) -> jax.Array | None:
    """``[rows]`` to ``[rows, 1]``."""
    return None if x is None else x[:, None]


def as_row(x: jax.Array | None) -> jax.Array | None:
    """``[columns]`` to ``[1, columns]``."""
    return None if x is None else x[None, :]


class TileTokens(NamedTuple):
    """Positions and segment ids of one side of a tile, shaped to broadcast over its scores.

    Attributes:
      positions: int32; None where neither mask nor score read them.
      segment_ids: int32, or None.
      inside: which tokens are inside the array; None if all are.
      key_ranges: of queries, ``kv_starts`` and ``kv_ends`` by name, those that there are.
    """

    positions: Any
    segment_ids: Any
    inside: jax.Array | None
    key_ranges: dict[str, Any]


class SideRefs(NamedTuple):
    """References to what belongs to queries, keys and heads beside q, k and v.

    Attributes:
      q_positions: int32 positions of the queries.
      kv_positions: int32 positions of the keys.
      q_segment_ids: int32 segment ids of the queries, or None.
      kv_segment_ids: int32 segment ids of the keys, or None.
      key_ranges: int32 ``kv_starts`` and ``kv_ends`` of the queries, those that there are.
      per_head: the per-head arrays that logits are made with, one number for each query head of the
        program.
      dropout_rows: int32, the number of each query's row of weights; None without dropout.
      dropout_columns: int32, the number of each key's column of weights; None without dropout.
      block_rows: int32, the row of each query in the table of a mask by blocks; None where tiles
        are not tested by one.
      block_words: int32, the table of the program's heads, packed (:class:`BlockWords`), or None.
      numbering: int32, the number of the program's row of the batch and those of its query heads;
        None where no function of the caller's reads them.
    """

    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    key_ranges: dict[str, Any]
    per_head: dict[str, Any]
    dropout_rows: Any = None
    dropout_columns: Any = None
    block_rows: Any = None
    block_words: Any = None
    numbering: GlobalIndices | None = None

    def queries(self, which: Any, inside: Any, shaped: Any, *, masked: bool = True) -> TileTokens:
        """The tokens of some queries.

        Args:
          which: slice of the query axis.
          inside: which of them are inside the array; the others are loaded as 0.
          shaped: :func:`as_column` or :func:`as_row`, as the queries lie in a tile of scores.
          masked: whether the tile needs a mask. If not, only a bias of the logits and functions of
            the caller's read the tokens.
        """
        refs = self.q_positions, self.q_segment_ids, self.key_ranges
        return self._tokens(refs, which, inside, shaped, masked)

    def keys(self, which: Any, inside: Any, shaped: Any, *, masked: bool = True) -> TileTokens:
        """The tokens of some keys, as :meth:`queries`."""
        refs = self.kv_positions, self.kv_segment_ids, {}
        return self._tokens(refs, which, inside, shaped, masked)

    def _tokens(
        self, refs: tuple, which: Any, inside: Any, shaped: Any, masked: bool
    ) -> TileTokens:
        positions, segment_ids, key_ranges = refs
        reads_positions = bool(self.per_head) or self.numbering is not None
        if not masked and not reads_positions:
            return TileTokens(None, None, None, {})

        def loaded(ref: Any) -> Any:
            return None if ref is None else shaped(load(ref.at[which], inside))

        # Ranges stand for the positions of their queries, but where something else reads those.
        read = None if key_ranges and not reads_positions else positions
        ranges = {name: loaded(ref) for name, ref in key_ranges.items()}
        return TileTokens(loaded(read), loaded(segment_ids), shaped(inside), ranges)

    def rows(self, which: Any, inside: Any, shaped: Any) -> Any:
        """Dropout's numbers of some queries; None without dropout."""
        if self.dropout_rows is None:
            return None
        return shaped(load(self.dropout_rows.at[which], inside))

    def columns(self, which: Any, inside: Any, shaped: Any) -> Any:
        """Dropout's numbers of some keys; None without dropout."""
        if self.dropout_columns is None:
            return None
        return shaped(load(self.dropout_columns.at[which], inside))

    def table_rows(self, which: Any, inside: Any) -> Any:
        """The rows of some queries in the table of a mask by blocks; None without a test by it."""
        return None if self.block_rows is None else load(self.block_rows.at[which], inside)

    def places(self, head: Any, queries: TileTokens, keys: TileTokens) -> Places | None:
        """Where a tile's scores are, of one of the program's query heads; None if nobody asks."""
        if self.numbering is None:
            return None
        batch, heads = self.numbering
        numbers = lowering.load(batch.at[jnp.int32(0)]), lowering.load(heads.at[head])
        run = functools.partial(on_tiles, replaced={})
        return Places(*numbers, queries.positions, keys.positions, run)

    def per_head_of(self, head: Any) -> dict[str, jax.Array]:
        """Of each per-head array, the number of one of the program's query heads."""
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
    numbering = None
    if has_functions:
        numbering, rest = GlobalIndices(*rest[:2]), rest[2:]
    numbers = rows, columns, *blocks
    of_tokens = q_positions, kv_positions, q_ids, kv_ids, ranges, per_head
    sides = SideRefs(*of_tokens, *numbers, numbering=numbering)
    return table, sides, rest


def dropped(dropout: Dropout | None, rows: Any, columns: Any, x: jax.Array) -> jax.Array:
    """``x`` of a tile's scores, 0 where weights are dropped; all of it without dropout."""
    return x if dropout is None else jnp.where(dropout.kept(rows, columns), x, 0.0)


def weights(
    score: Score, scores: jax.Array, factor: float, shift: jax.Array, *, interpret: bool
) -> jax.Array:
    """``2^(factor score + shift)``, 0 where a function of the caller's has hidden the score."""
    p = lowering.exp2_affine(scores, factor, shift, interpret=interpret)
    # A row that sees no key has lse -inf, with which 2^(-inf - lse) is no number.
    return p if score.score_mod is None else jnp.where(scores == -jnp.inf, 0.0, p)


def score_mask(
    mask: Mask,
    q: TileTokens,
    kv: TileTokens,
    by_blocks: jax.Array | None = None,
    places: Places | None = None,
) -> jax.Array | None:
    """Which scores of a tile count, a ragged tile's tail cut off; None if all do.

    ``by_blocks``: those that a mask by blocks leaves; None if it leaves all. ``places``: where the
    scores are.
    """
    # Both cuts first: in another order the A100's tiles spill.
    cuts = [cut for cut in (kv.inside, q.inside) if cut is not None]
    inside = functools.reduce(operator.and_, cuts) if cuts else None
    ids = q.segment_ids, kv.segment_ids
    allowed = mask.allowed(q.positions, kv.positions, *ids, **q.key_ranges, places=places)
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

    One loop visits the tiles before and behind the full ones, for all heads, and a second loop the
    full ones. Two loops without loops around them hold fewer values alive and keep their load
    pipelines running. Heads vary fastest, so that the division is by a constant.

    ``listed``: the table is a list of tiles, and not a range (:mod:`pallas_kernels.bounds`).
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
