"""The cache of a batch: keys and values, sharded over the devices of a sequence, or states.

A cache position is an index along a batch of left-padded sequences, as ``cache_position`` in
transformers. Sequences of different lengths are aligned at their ends, so the next token of every
sequence has the same cache position. A slot holds the keys and values of one cache position, for
all sequences.

Layers without a window keep all of them. The keys and values of a prompt stay on the device that
computed them, in the order of the ring's layout, and fill the next slots of each device. Generated
tokens are distributed round-robin, so that the cache grows evenly::

    device 0    first shard of the prompt   | token 0 | token 2 | ...
    device 1    second shard of the prompt  | token 1 | token 3 | ...

Layers with a window keep its cache positions in a ring buffer, where a cache position determines
device and slot.

Linear-attention layers have no slots: their state has a fixed size
(:class:`burst_jax.layers.gated_delta_net.DeltaNetState`), and every device of a sequence has it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The cache position of an empty slot: larger than all others, so that no token attends to it.
EMPTY = 2**30 - 1
# Tokens of a sequence. With their padding, cache positions stay below EMPTY.
MAX_LENGTH = 2**29


@dataclasses.dataclass(frozen=True)
class CacheCapacity:
    """The slots of layers with the same window.

    Attributes:
      window: number of tokens that a token attends to, itself included; None is all.
      slots: slots per device.
      devices: number of devices that share a sequence.
    """

    window: int | None
    slots: int
    devices: int

    @classmethod
    def of(cls, window: int | None, length: int, devices: int) -> CacheCapacity:
        """The capacity for ``length`` cache positions, a ring buffer if the window is shorter."""
        if window is not None:
            slots = -(-window // devices)
            if slots * devices < length:
                return cls(window, slots, devices)
        return cls(None, -(-length // devices), devices)

    @property
    def is_ring_buffer(self) -> bool:
        """Whether the cache position determines the slot."""
        return self.window is not None

    def slot[T: (jax.Array, np.ndarray)](self, cache_position: T) -> tuple[T, T]:
        """``(device, slot)`` of a cache position in a ring buffer."""
        return cache_position % self.devices, cache_position // self.devices % self.slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMetadata:
    """Cache positions and validity of the slots of one :class:`CacheCapacity`.

    Attributes:
      cache_positions: int32 ``[C]``, that of each slot, EMPTY if it is empty.
      present: int32 ``[B, C]``, 1 where a sequence has a token in a slot, 0 elsewhere.
    """

    cache_positions: jax.Array
    present: jax.Array


class KeyValues(NamedTuple):
    """Keys and values of a layer.

    Attributes:
      keys: ``[B, C, K, H]``, C the slots of all devices together.
      values: ``[B, C, K, Hv]``.
    """

    keys: jax.Array
    values: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What all layers keep.

    Attributes:
      layers: of each layer :class:`KeyValues`, or with linear attention the ``DeltaNetState``.
      slots: metadata for each distinct capacity (``Steps.capacities``).
      lengths: int32 ``[B]``, number of tokens of each sequence.
    """

    layers: tuple[Any, ...]
    slots: tuple[SlotMetadata, ...]
    lengths: jax.Array


@dataclasses.dataclass
class FillState:
    """How far the cache is filled; host values.

    Attributes:
      next_position: the next cache position.
      used: filled slots of each device, in capacities without a window.
      generated: tokens distributed round-robin since the last prompt; as many tokens as there are
        devices fill one slot of each.
      holes: whether a sequence lacks a token after its first one.
    """

    next_position: int = 0
    used: int = 0
    generated: int = 0
    holes: bool = False


class PromptPosition(NamedTuple):
    """Write position of a prompt chunk, int32 scalars.

    Attributes:
      used: filled slots of each device, in capacities without a window.
      first: the first cache position that is not padding for all sequences.
      longest: tokens of the longest sequence, its whole prompt included.
    """

    used: Any
    first: Any
    longest: Any


class TokenPosition(NamedTuple):
    """Write position of a generated token, int32 scalars.

    Attributes:
      cache_position: the token's.
      device: the device that stores it, in capacities without a window.
      slot: its slot on that device.
      longest: tokens of the longest sequence, this one included.
    """

    cache_position: Any
    device: Any
    slot: Any
    longest: Any

    def following(self, devices: int) -> TokenPosition:
        """The next token's, over this number of devices, if the longest sequence still grows."""
        filled, device = divmod(self.device + 1, devices)
        return TokenPosition(self.cache_position + 1, device, self.slot + filled, self.longest + 1)


def write_token(array: jax.Array, token: jax.Array, slot: jax.Array, mine: jax.Array) -> jax.Array:
    """``array [B, C, ...]`` with ``token [B, ...]`` written to a slot, if the slot is ``mine``."""
    axis = min(1, token.ndim)
    old = jax.lax.dynamic_index_in_dim(array, slot, axis, keepdims=False)
    new = jnp.where(mine, token.astype(array.dtype), old)
    return jax.lax.dynamic_update_index_in_dim(array, new, slot, axis)


def write_ring_buffer(
    capacity: CacheCapacity,
    old: jax.Array,
    new: jax.Array,
    cache_positions: jax.Array,
    ends: tuple[jax.Array, jax.Array],
    axes: tuple[str, ...],
) -> jax.Array:
    """A ring buffer with the last tokens of a prompt written to it, inside a ``shard_map``.

    The tokens are in any layout. Each device writes its own into a buffer of all devices' slots,
    and a reduce-scatter of the buffers moves them to their devices.

    Args:
      capacity: of a ring buffer.
      old: ``[B, C, ...]``, this device's slots.
      new: ``[B, T, ...]``, this device's tokens.
      cache_positions: int32 ``[T]``, theirs.
      ends: int32 scalars: the prompt's first cache position that is not padding, and its last one.
      axes: the mesh axes that shard the tokens.
    """
    total = capacity.slots * capacity.devices
    device, slot = capacity.slot(cache_positions)
    kept = (cache_positions > ends[1] - total) & (cache_positions >= ends[0])
    index = jnp.where(kept, device * capacity.slots + slot, total)
    buffer = jnp.zeros((old.shape[0], total, *old.shape[2:]), old.dtype)
    buffer = buffer.at[:, index].set(new.astype(old.dtype), mode="drop")
    written = jnp.zeros((total,), jnp.int32).at[index].set(1, mode="drop")
    if axes:
        buffer = jax.lax.psum_scatter(buffer, axes, scatter_dimension=1, tiled=True)
        written = jax.lax.psum_scatter(written, axes, scatter_dimension=0, tiled=True)
    written = written.reshape(1, -1, *[1] * (old.ndim - 2)) > 0
    return jnp.where(written, buffer, old)
