"""What kernels compute scores from, apart from ``q k^T``: in global memory and as fragments.

Positions, segment ids, per-query KV bounds, per-head parameters, dropout hashes, block-sparse
masks and global indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.dropout import column_hashes
from pallas_kernels.inputs import AttentionInputs, GlobalIndices, KVSide, QuerySide
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.spec import AttentionSpec, Tiles

# Blocks of a block-sparse mask must have a multiple of this many neighboring queries, and keys, so
# that the 64 rows of a warpgroup are in one block.
BLOCK_TOKENS = 64


def masks_by_tokens(inputs: AttentionInputs, spec: AttentionSpec) -> bool:
    """Whether positions, segment ids, KV bounds or a ``mask_mod`` may mask scores."""
    mask = spec.mask
    by_mask = mask.reads_positions or mask.mask_mod is not None
    return by_mask or inputs.has_segments or inputs.has_kv_bounds


def unsupported_inputs(inputs: AttentionInputs, *, most: int) -> str | None:
    """Why a kernel for head dims up to ``most`` does not support the inputs, or None if it does."""
    q, k = inputs.query.q, inputs.kv.k
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return (
            f"query is {q.dtype} and key {k.dtype}; it supports bfloat16 or float16: cast query, "
            "key and value (a RoPE may return float32)"
        )
    for what, dim in (("", inputs.head_dim), (" of values", inputs.value_dim)):
        if dim > most:
            return f"the head dim{what} is {dim}; it supports {most} at most"
    mask = inputs.shared.block_mask
    if mask is None or not mask.tests_scores(BLOCK_TOKENS, BLOCK_TOKENS):
        return None
    return (
        f"blocks of block_mask hold {mask.q_run} queries and {mask.kv_run} keys side by side on a "
        f"device; it supports multiples of {BLOCK_TOKENS}: use larger blocks"
    )


def load_tokens(ref: Any, tokens: Any, layout: Any) -> jax.Array:
    """Loads the values of some tokens from global memory into registers."""
    return plgpu.load(ref.at[tokens], layout=layout, optimized=False)


class TokenArrays(NamedTuple):
    """What masks and biases read of one side: whole arrays in global memory or a tile in registers.

    Attributes:
      positions: int32 ``[length]``; None if nothing reads them.
      segment_ids: int32 ``[B, length]``, or ``[length]`` of a tile; None without segments.
      kv_starts: int32 ``[B or 1, length]``, or ``[length]`` of a tile; None for keys, and without.
      kv_ends: the same.
    """

    positions: Any = None
    segment_ids: Any = None
    kv_starts: Any = None
    kv_ends: Any = None

    @classmethod
    def padded(cls, side: QuerySide | KVSide, block: int, repeat_last: bool = False) -> TokenArrays:
        """The arrays of a side, padded to whole tiles of ``block`` tokens; padding is segment 0.

        ``repeat_last``: whether to pad positions with the last one, because user functions may be
        undefined at others.
        """
        assert side.positions is not None
        length = -(-side.positions.shape[0] // block) * block
        by_batch = dict(side.kv_bounds) if isinstance(side, QuerySide) else {}
        if side.segment_ids is not None:
            by_batch["segment_ids"] = side.segment_ids
        by_batch = {name: pad_axis(x, 1, length) for name, x in by_batch.items()}
        extra = length - side.positions.shape[0]
        if repeat_last and extra:
            return cls(jnp.pad(side.positions, (0, extra), mode="edge"), **by_batch)
        return cls(pad_axis(side.positions, 0, length), **by_batch)

    def load(self, batch: Any, tokens: Any, layout: Any) -> TokenArrays:
        """Loads ``tokens``, a slice of the length, into registers."""

        def loaded(ref: Any) -> Any:
            if ref is None:
                return None
            if len(ref.shape) == 2:
                ref = ref.at[batch if ref.shape[0] != 1 else 0]
            return load_tokens(ref, tokens, layout)

        return TokenArrays(*map(loaded, self))

    def load_positions(self, tokens: Any, layout: Any) -> jax.Array:
        """Loads the positions of ``tokens`` alone."""
        return self.only("positions").load(None, tokens, layout).positions

    @property
    def is_empty(self) -> bool:
        """Whether every field is None."""
        return all(x is None for x in self)

    def only(self, *names: str) -> TokenArrays:
        """The arrays with only these fields; the others are None."""
        return TokenArrays(**{name: getattr(self, name) for name in names})


class DropoutHashes(NamedTuple):
    """Hashes that decide which weights are dropped (:mod:`pallas_kernels.dropout`).

    Attributes:
      queries: int32 ``[B, N, T]``.
      keys: int32 ``[S]``.
    """

    queries: Any
    keys: Any

    def of(self, batch: Any, head: Any) -> tuple[Any, Any]:
        """The hashes of a head's queries, and of its keys."""
        return self.queries.at[batch, head], self.keys


class BlockMaskEntries(NamedTuple):
    """A block-sparse mask in global memory, and which block a device's tokens are in.

    Attributes:
      table: int32 ``[N or 1, rows, columns]``, nonzero where queries attend to keys.
      q_rows: int32, the row of every BLOCK_TOKENS neighboring queries.
      kv_columns: int32, the column of every BLOCK_TOKENS neighboring keys.
    """

    table: Any
    q_rows: Any
    kv_columns: Any

    def allowed(self, head: Any, q_part: Any, kv_part: Any) -> jax.Array:
        """Whether a part of BLOCK_TOKENS queries attends to a part of BLOCK_TOKENS keys."""
        head = head if self.table.shape[0] > 1 else i32(0)
        return self.table[head, self.q_rows[q_part], self.kv_columns[kv_part]] != 0


class LinePositions(NamedTuple):
    """Positions in float32, relative to the first key's, for an affine bias or user functions.

    Attributes:
      q: ``[T]``, padded to whole tiles.
      kv: ``[S]``, the same.
    """

    q: Any
    kv: Any


class ScoreInputs(NamedTuple):
    """The inputs of scores, apart from queries and keys: arrays, or references inside a kernel.

    Attributes:
      q_tokens: the queries' arrays, padded to whole tiles; empty if nothing reads them.
      kv_tokens: the same for keys.
      per_head: the per-head parameters that logits are computed from, float32 ``[N]``, by name.
      dropout: None without dropout.
      blocks: None without a block-sparse mask.
      indices: global batch and head indices; None without user functions.
      line: None unless :meth:`with_line` was called, or user functions convert distances.
    """

    q_tokens: TokenArrays
    kv_tokens: TokenArrays
    per_head: dict[str, Any]
    dropout: DropoutHashes | None
    blocks: BlockMaskEntries | None
    indices: GlobalIndices | None
    line: LinePositions | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, spec: AttentionSpec, tiles: Tiles) -> ScoreInputs:
        """The arrays for kernels with these tiles."""
        lengths = _padded_lengths(inputs, tiles)
        dropout = None
        if inputs.shared.dropout_seeds is not None:
            keys = pad_axis(column_hashes(inputs.kv_positions), 0, lengths[1])
            dropout = DropoutHashes(pad_axis(inputs.dropout_rows, 2, lengths[0]), keys)
        scores = cls(
            *_token_arrays(inputs, spec, tiles), inputs.shared.score_parameters, dropout,
            _block_mask_entries(inputs, lengths), inputs.shared.indices,
        )  # fmt: skip
        return scores.with_line() if spec.converts_distances else scores

    def with_line(self) -> ScoreInputs:
        """With positions in float32: conversions in a kernel would cost instructions."""
        q, kv = self.q_tokens.positions, self.kv_tokens.positions
        return self._replace(
            line=LinePositions(*((x - kv[0]).astype(jnp.float32) for x in (q, kv)))
        )


def _padded_lengths(inputs: AttentionInputs, tiles: Tiles) -> tuple[int, int]:
    """T and S rounded up to whole tiles."""
    q_tiles, kv_tiles = -(-inputs.q_length // tiles.block_q), -(-inputs.kv_length // tiles.block_kv)
    return q_tiles * tiles.block_q, kv_tiles * tiles.block_kv


def _token_arrays(
    inputs: AttentionInputs, spec: AttentionSpec, tiles: Tiles
) -> tuple[TokenArrays, TokenArrays]:
    """Token arrays of the queries and of the keys; empty if nothing reads them."""
    calls_functions = spec.calls_functions
    if not (masks_by_tokens(inputs, spec) or inputs.has_bias or calls_functions):
        return TokenArrays(), TokenArrays()
    _, kv_bounds = inputs.folded(spec.mask)
    query = inputs.query._replace(**kv_bounds)
    q_tokens = TokenArrays.padded(query, tiles.block_q, calls_functions)
    if kv_bounds and not inputs.has_bias and not calls_functions:
        # KV bounds include the window, so nothing reads the queries' positions.
        q_tokens = q_tokens._replace(positions=None)
    return q_tokens, TokenArrays.padded(inputs.kv, tiles.block_kv, calls_functions)


def _block_mask_entries(
    inputs: AttentionInputs, lengths: tuple[int, int]
) -> BlockMaskEntries | None:
    mask = inputs.shared.block_mask
    if mask is None:
        return None
    rows = mask.rows(inputs.q_positions[::BLOCK_TOKENS])
    columns = mask.columns(inputs.kv_positions[::BLOCK_TOKENS])
    parts = (length // BLOCK_TOKENS for length in lengths)
    padded = (pad_axis(x, 0, count) for x, count in zip((rows, columns), parts, strict=True))
    return BlockMaskEntries(mask.table.astype(jnp.int32), *padded)
