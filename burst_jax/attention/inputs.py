"""Converts a call's arrays to one device's inputs: positions, segment ids and per-query KV bounds.

Prefixes, the caller's bounds, attention chunks, windows with traced sizes, and all masks of queries
whose positions differ between sequences are reduced to two values per query. A query at position
``p`` attends to keys at positions ``kv_start <= p_k < kv_end``, the largest start and the smallest
end of::

    local_window_size = (left, right), traced     p - left  ..  p + right + 1
    attention_chunk_size = C              p // C * C        ..  p // C * C + C
    is_causal with prefix_lengths                           ..  max(p + 1, prefix)
    query positions that differ between sequences:
        local_window_size = (left, right)         p - left  ..  p + right + 1
        is_causal                                           ..  p + 1
    key_starts, key_ends                          start     ..  end

Tokens beyond a sequence's length become padding, which is segment 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.attention.document_tables import tables_of
from burst_jax.attention.validation import PER_HEAD, WINDOW_SIDES
from burst_jax.layouts.layout import AttentionPass
from burst_jax.ring.request import Request
from pallas_kernels import (
    AttentionInputs,
    BlockMask,
    GlobalIndices,
    KVSide,
    QuerySide,
    SharedInputs,
)
from pallas_kernels.mask import end_of_keys_in_window, first_key_in_window


def shard_inputs(request: Request, arrays: Mapping[str, jax.Array]) -> AttentionInputs:
    """One device's inputs of local attention, before the Ulysses all-to-all and the ring.

    Args:
      request: the static part of the call.
      arrays: this device's shards by name: ``arrays`` and ``derived`` of
        :class:`burst_jax.attention.call.Call`.
    """
    return _INPUTS[request.layout.attention_pass](request, arrays)


def _ring_inputs(request: Request, arrays: Mapping[str, jax.Array]) -> AttentionInputs:
    """Inputs whose positions are the layout's, or one array of all sequences."""
    query, key = arrays["query"], arrays["key"]
    own_q, own_kv = _query_positions(request, arrays), arrays.get("key_value_positions")
    own_kv = None if own_kv is None else own_kv[None]

    def q_positions() -> jax.Array:
        """int32 ``[B or 1, T]``."""
        return request.positions_here(query.shape[1])[None] if own_q is None else own_q

    def kv_positions() -> jax.Array:
        """int32 ``[1, S]``."""
        return request.positions_here(key.shape[1])[None] if own_kv is None else own_kv

    q_ids, kv_ids = _segment_ids(arrays, q_positions, kv_positions)
    kv_starts, kv_ends = _kv_bounds(request, arrays, q_positions)
    query_side = QuerySide(
        query,
        # Only KV bounds read positions that differ between sequences.
        own_q[0] if own_q is not None and own_q.shape[0] == 1 else None,
        q_ids,
        kv_starts=kv_starts,
        kv_ends=kv_ends,
    )
    kv_side = KVSide(key, arrays["value"], arrays.get("key_value_positions"), kv_ids)
    return AttentionInputs(query_side, kv_side, _shared_inputs(request, arrays))


def _shared_inputs(request: Request, arrays: Mapping[str, jax.Array]) -> SharedInputs:
    """What the ring never sends."""
    indices = None
    if "batch_indices" in arrays:
        indices = GlobalIndices(arrays["batch_indices"], arrays["head_indices"])
    return SharedInputs(
        dropout_seeds=arrays.get("dropout_seeds"),
        block_mask=_block_mask(request, arrays.get("block_mask")),
        indices=indices,
        caller=tables_of(arrays),
    ).with_per_head({name: arrays[name] for name in PER_HEAD if name in arrays})


def _gathered_inputs(request: Request, arrays: Mapping[str, jax.Array]) -> AttentionInputs:
    """Inputs with the caller's positions and segment ids on both sides, which define documents."""
    batch, length = arrays["query"].shape[:2]
    q_order, kv_order = (
        jnp.broadcast_to(arrays[name], (batch, length))
        for name in ("query_positions", "key_value_positions")
    )
    query = QuerySide(arrays["query"], q_order, arrays["query_segment_ids"])
    kv = KVSide(arrays["key"], arrays["value"], kv_order, arrays["key_value_segment_ids"])
    return AttentionInputs(query, kv, _shared_inputs(request, arrays))


_INPUTS: dict[AttentionPass, Callable[..., AttentionInputs]] = {
    "ring": _ring_inputs,
    "gathered": _gathered_inputs,
}


def _query_positions(request: Request, arrays: Mapping[str, jax.Array]) -> jax.Array | None:
    """Global positions of this device's queries, int32 ``[B or 1, T]``; None: the layout's."""
    if "query_positions" in arrays:
        return jnp.atleast_2d(arrays["query_positions"])
    offset = arrays.get("query_offset", request.query_offset)
    if offset is None or (isinstance(offset, int) and offset == 0):
        return None
    in_layout = request.positions_here(arrays["query"].shape[1])[None]
    return in_layout + (offset if isinstance(offset, int) or not offset.ndim else offset[:, None])


def _block_mask(request: Request, table: jax.Array | None) -> BlockMask | None:
    """A block-sparse mask with a table bool ``[N or 1, rows, columns]``.

    A NumPy table is a constant of the program, and XLA's constant folding of the sums over a large
    table takes seconds. The barrier prevents it.
    """
    if table is None:
        return None
    assert request.blocks is not None
    table = lax.optimization_barrier(table if table.ndim == 3 else table[None])
    return BlockMask(table, request.blocks.q_block, request.blocks.kv_block)


def _segment_ids(
    arrays: Mapping[str, jax.Array],
    q_positions: Callable[[], jax.Array],
    kv_positions: Callable[[], jax.Array],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids of both sides, 0 (padding) beyond a sequence's length."""
    sides = (
        ("query", "query_segment_ids", "query_seq_lengths", q_positions),
        ("key", "key_value_segment_ids", "key_value_seq_lengths", kv_positions),
    )
    if not any(name in arrays for _, *names, _ in sides for name in names):
        return None, None

    def ids_of(
        side: str, ids_name: str, lengths_name: str, positions: Callable[[], jax.Array]
    ) -> jax.Array:
        batch, length = arrays[side].shape[:2]
        ids = arrays.get(ids_name)
        if ids is None:
            ids = jnp.ones((batch, length), jnp.int32)
        lengths = arrays.get(lengths_name)
        if lengths is None:
            return ids
        return jnp.where(positions() < lengths[:, None], ids, 0)

    q_ids, kv_ids = (ids_of(*of_side) for of_side in sides)
    return q_ids, kv_ids


def _kv_bounds(
    request: Request, arrays: Mapping[str, jax.Array], positions: Callable[[], jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Each query's first allowed key position and exclusive end; None without a bound.

    Both are int32 ``[B or 1, T]``.
    """
    starts = [jnp.atleast_2d(arrays["key_starts"])] if "key_starts" in arrays else []
    ends = [jnp.atleast_2d(arrays["key_ends"])] if "key_ends" in arrays else []
    if WINDOW_SIDES[0] in arrays:
        starts.append(first_key_in_window(positions(), arrays[WINDOW_SIDES[0]]))
    if WINDOW_SIDES[1] in arrays:
        ends.append(end_of_keys_in_window(positions(), arrays[WINDOW_SIDES[1]]))
    if "prefix_lengths" in arrays:
        ends.append(jnp.maximum(positions() + 1, arrays["prefix_lengths"][:, None]))
    if request.chunk_size is not None:
        size = jnp.int32(request.chunk_size)
        # Chunk 0 starts at position 0.
        starts.append(jnp.floor_divide(positions(), size) * size)
        if request.spec.mask.right != 0:
            ends.append(starts[-1] + size)
    start = functools.reduce(jnp.maximum, starts) if starts else None
    return start, functools.reduce(jnp.minimum, ends) if ends else None
