"""Masks that arrays say: which keys each query sees as a range of positions, and which are padding.

Prefixes, ranges of the caller's own, windows whose size is traced, and all masks of queries whose
positions differ from row to row come to the same two numbers of every query at position ``p``:
it sees keys from ``key_starts`` up to, not including, ``key_ends``::

    local_window_size = (left, right), traced     p - left  ..  p + right + 1
    is_causal with prefix_lengths                           ..  max(p + 1, prefix)
    queries at other positions in each row:
        local_window_size = (left, right)         p - left  ..  p + right + 1
        is_causal                                           ..  p + 1
    key_starts, key_ends                          start     ..  end

The largest start and the smallest end count. Both travel with the queries, as segment ids do.
Tokens behind a row's length become padding, which is segment 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.block_mask import by_heads
from burst_jax.attention.positions import positions_of_keys, positions_of_queries, rows
from burst_jax.attention.validation import check_is_array, window_sides
from burst_jax.ring.request import Request
from pallas_kernels import (
    AttentionInputs,
    BlockMask,
    GlobalIndices,
    KVSide,
    QuerySide,
    SharedInputs,
)
from pallas_kernels.arrays import as_int32
from pallas_kernels.inputs import PerHead
from pallas_kernels.mask import end_of_keys_in_window, first_key_in_window

_INT32 = jnp.iinfo(jnp.int32)
_OF_QUERIES = ("key_starts", "key_ends")
# The name of each traced side of local_window_size among a call's arrays.
_SIDES = ("local_window_size[0]", "local_window_size[1]")


def check_key_ranges(
    query: jax.Array,
    is_causal: object,
    local_window_size: object,
    arrays: Mapping[str, Any],
    *,
    by_row: bool = False,
) -> dict[str, jax.Array]:
    """The arrays of a call that say which keys a query sees, those that are given, as int32.

    Args:
      query: ``[B, T, N, H]``.
      is_causal: the argument of this name.
      local_window_size: the argument of this name, whose traced sides become arrays.
      arrays: ``prefix_lengths``, ``query_seq_lengths``, ``key_value_seq_lengths``, ``key_starts``
        and ``key_ends`` by name, each an array or None.
      by_row: whether each row has queries at other positions. Then windows and causality become
        arrays, too.

    Raises:
      ValueError: one of them has another shape or dtype, or there is nothing that it lifts.
    """
    batch, length = tuple(query.shape[:2])
    checked = {}
    for name, array in arrays.items():
        if array is None:
            continue
        check_is_array(name, array, "an int32 array")
        checked[name] = _clipped(name, array)
        shapes: dict[str, tuple[Any, ...]] = {"[B]": (batch,)}
        if name in _OF_QUERIES:
            shapes = {"[B, T]": (batch, length), "[T]": (length,)}
        if tuple(array.shape) not in shapes.values():
            choices = " or ".join(f"{letters}, {shape}" for letters, shape in shapes.items())
            raise ValueError(f"{name} has shape {array.shape}: it must be {choices}")
    not_causal = isinstance(is_causal, (bool, np.bool_)) and not is_causal
    if "prefix_lengths" in checked and not_causal:
        raise ValueError(
            "prefix_lengths is given but is_causal is False, so there is no causality for it to "
            "lift: set is_causal=True, or leave prefix_lengths out"
        )
    left, right = window_sides(local_window_size)
    if not not_causal:
        # Prefixes have ends of their own, which say causality, too.
        right = 0 if by_row and "prefix_lengths" not in checked else None
    for name, side in zip(_SIDES, (left, right), strict=True):
        if isinstance(side, jax.Array):
            checked[name] = _clipped("local_window_size", side)
        elif by_row and side is not None:
            checked[name] = np.asarray(side, np.int32)
    return checked


def _clipped(name: str, x: Any) -> Any:
    """Integers as int32, those that it cannot hold as the nearest one that it can."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.int32:
        xp, limits = (jnp if isinstance(x, jax.Array) else np), jnp.iinfo(x.dtype)
        if limits.max > _INT32.max:
            x = xp.minimum(x, xp.asarray(_INT32.max, x.dtype))
        if limits.min < _INT32.min:
            x = xp.maximum(x, xp.asarray(_INT32.min, x.dtype))
    return as_int32(name, x)


def inputs_of(
    request: Request,
    arrays: Mapping[str, jax.Array],
    per_head: PerHead,
    seeds: jax.Array | None,
    indices: GlobalIndices | None,
) -> AttentionInputs:
    """The inputs of a call on one device.

    Args:
      request: what the call asks for.
      arrays: this device's query, key and value, segment ids, block mask, and what
        :func:`check_key_ranges` returned, by name.
      per_head: the per-head parameters, by name.
      seeds: dropout seeds, or None.
      indices: global batch and head indices, where a ``score_mod`` or ``mask_mod`` reads them.
    """
    blocks, table = request.blocks, by_heads(arrays.get("block_mask"))
    block_mask = None
    if blocks is not None and table is not None:
        block_mask = BlockMask(table, blocks.q_block, blocks.kv_block)
    shared = SharedInputs(dropout_seeds=seeds, block_mask=block_mask, indices=indices)
    return AttentionInputs(*_sides_of(request, arrays), shared.with_per_head(per_head))


def _sides_of(request: Request, arrays: Mapping[str, jax.Array]) -> tuple[QuerySide, KVSide]:
    """Both sides of a call on one device, with what masks read of them."""
    query, key = arrays["query"], arrays["key"]
    own, own_of_keys = positions_of_queries(request, arrays), positions_of_keys(arrays)

    def positions() -> jax.Array:
        """Positions ``[B or 1, T]`` of the queries."""
        return request.positions_here(query.shape[1])[None] if own is None else own

    def positions_of_key() -> jax.Array:
        here = request.positions_here
        return here(key.shape[1])[None] if own_of_keys is None else own_of_keys

    q_ids, kv_ids = _segment_ids(arrays, positions, positions_of_key)
    return (
        QuerySide(
            query,
            # Where positions differ from row to row, KV bounds are all that reads them.
            positions=own[0] if own is not None and own.shape[0] == 1 else None,
            segment_ids=q_ids,
            kv_starts=_key_starts(arrays, positions),
            kv_ends=_key_ends(arrays, positions),
        ),
        KVSide(key, arrays["value"], None if own_of_keys is None else own_of_keys[0], kv_ids),
    )


def _segment_ids(
    arrays: Mapping[str, jax.Array],
    q_positions: Callable[[], jax.Array],
    kv_positions: Callable[[], jax.Array],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids of both sides; behind a row's length they are 0, padding."""
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


def _key_starts(
    arrays: Mapping[str, jax.Array], positions: Callable[[], jax.Array]
) -> jax.Array | None:
    """Where the keys start that each query sees, ``[B or 1, T]``; None if they start at 0."""
    starts = []
    if "key_starts" in arrays:
        starts.append(rows(arrays["key_starts"]))
    if _SIDES[0] in arrays:
        starts.append(first_key_in_window(positions(), arrays[_SIDES[0]]))
    return functools.reduce(jnp.maximum, starts) if starts else None


def _key_ends(
    arrays: Mapping[str, jax.Array], positions: Callable[[], jax.Array]
) -> jax.Array | None:
    """Where the keys end that each query sees, ``[B or 1, T]``; None if the sequence ends them."""
    ends = []
    if "key_ends" in arrays:
        ends.append(rows(arrays["key_ends"]))
    if _SIDES[1] in arrays:
        ends.append(end_of_keys_in_window(positions(), arrays[_SIDES[1]]))
    if "prefix_lengths" in arrays:
        ends.append(jnp.maximum(positions() + 1, arrays["prefix_lengths"][:, None]))
    return functools.reduce(jnp.minimum, ends) if ends else None
