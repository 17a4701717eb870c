"""Attention of a prompt chunk over itself and the cache, inside a ``shard_map``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from burst_jax.attention.api import ring_attention
from burst_jax.serving.cache import CacheCapacity, KeyValues, SlotMetadata

# Options that a layer passes for attention over whole sequences; replaced if the cache is read.
_SEQUENCE_OPTIONS = (
    "layout",
    "query_segment_ids",
    "key_value_segment_ids",
    "is_causal",
    "local_window_size",
)


class Chunk(NamedTuple):
    """This device's tokens of a prompt chunk.

    Attributes:
      cache_positions: int32 ``[T]``.
      present: int32 ``[B, T]``, 0 for padding.
    """

    cache_positions: jax.Array
    present: jax.Array


class Slots(NamedTuple):
    """The cache of one layer that a chunk reads and writes.

    Attributes:
      capacity: of the layer.
      window: of the layer.
      reach: number of slots of each device to read; 0 if the cache was empty before.
      before: metadata before the chunk is written.
      after: metadata with the chunk.
    """

    capacity: CacheCapacity
    window: int | None
    reach: int
    before: SlotMetadata
    after: SlotMetadata


def prompt_attention(
    query: jax.Array,
    chunk_keys: KeyValues,
    axis: Any,
    chunk: Chunk,
    slots: Slots,
    old: KeyValues,
    new: KeyValues,
    **options: Any,
) -> jax.Array:
    """``[B, T, N, Hv]``, attention by the ring, over the chunk alone if the cache was empty.

    Args:
      query: ``[B, T, N, H]``, this device's.
      chunk_keys: keys and values of the chunk.
      axis: the mesh axes of the sequence.
      chunk: the tokens.
      slots: metadata of the cache.
      old: this device's slots before the chunk is written.
      new: with the chunk.
      **options: of the layer, for attention over whole sequences.
    """
    key, value = chunk_keys
    if slots.reach == 0:
        return ring_attention(query, key, value, axis, **options)
    if slots.capacity.is_ring_buffer:
        # The chunk may have overwritten keys that its own first queries attend to.
        key, value = (jnp.concatenate(pair, 1) for pair in zip(old, chunk_keys, strict=True))
        at = jnp.concatenate([slots.before.cache_positions, chunk.cache_positions])
        ids = jnp.concatenate([slots.before.present, chunk.present], 1)
    else:
        key, value = (x[:, : slots.reach] for x in new)
        at, ids = slots.after.cache_positions[: slots.reach], slots.after.present[:, : slots.reach]
    for name in _SEQUENCE_OPTIONS:
        options.pop(name, None)
    return ring_attention(
        query, key, value, axis, is_causal=True,
        local_window_size=None if slots.window is None else (slots.window - 1, 0),
        query_positions=chunk.cache_positions, key_value_positions=at,
        query_segment_ids=chunk.present, key_value_segment_ids=ids, **options,
    )  # fmt: skip
