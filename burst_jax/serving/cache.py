"""The cache of keys and values, split over the devices that share a row's tokens.

A row's tokens have places 0, 1, 2, ... in the order of the row. Rows of a batch that differ in
length begin at different places, so that they end at the same one: the next token of every row has
the same place. A slot holds the keys and values of one place, for all rows.

Layers without a window keep every place. A prompt's tokens stay on the device that computed them,
in the order of the ring's layout, and fill the next slots of each device. Generated tokens are
dealt to the devices one after the other, so that the cache grows evenly::

    device 0    first shard of the prompt   | token 0 | token 2 | ...
    device 1    second shard of the prompt  | token 1 | token 3 | ...

Layers with a window keep the places of the window in a ring buffer: the place alone says device and
slot.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# The place of a slot that holds nothing: after all others, so that no token sees it.
EMPTY = 2**30 - 1


@dataclasses.dataclass(frozen=True)
class Room:
    """Where the layers of one window keep their tokens.

    Attributes:
      window: number of places that a token sees, itself included; None is all.
      slots: slots of each device.
      devices: number of devices that share a row's tokens.
    """

    window: int | None
    slots: int
    devices: int

    @classmethod
    def of(cls, window: int | None, capacity: int, devices: int) -> Room:
        """The room of a window in a cache of ``capacity`` places."""
        if window is not None:
            slots = -(-window // devices)
            if slots * devices < capacity:
                return cls(window, slots, devices)
        return cls(None, -(-capacity // devices), devices)

    @property
    def is_ring(self) -> bool:
        """Whether the place alone says the slot."""
        return self.window is not None

    def slot[Places: (jax.Array, np.ndarray)](self, place: Places) -> tuple[Places, Places]:
        """``(device, slot)`` of a place in a ring buffer."""
        return place % self.devices, place // self.devices % self.slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["places", "present"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Slots:
    """What the slots of a room hold.

    Attributes:
      places: int32 ``[C]``, the place of each slot, EMPTY if it holds nothing.
      present: int32 ``[B, C]``, 1 where a row has a token in a slot, 0 elsewhere.
    """

    places: jax.Array
    present: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "slots", "lengths"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all layers.

    Attributes:
      keys: for each layer ``[B, C, K, H]``, C the slots of all devices together.
      values: for each layer ``[B, C, K, Hv]``.
      slots: of each room.
      lengths: int32 ``[B]``, number of tokens of each row.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    slots: tuple[Slots, ...]
    lengths: jax.Array


@dataclasses.dataclass
class Filled:
    """How far the cache is filled.

    Attributes:
      place: the next place.
      used: slots of each device that are filled, in rooms without a window.
      dealt: tokens dealt to the devices since the last prompt; those that share a slot's number
        take one slot of each device.
      holes: whether a row lacks a token at a place behind its first one.
    """

    place: int = 0
    used: int = 0
    dealt: int = 0
    holes: bool = False


def empty_slots(room: Room, rows: int) -> Slots:
    """One device's slots of a room, all empty."""
    places = jnp.full((room.slots,), EMPTY, jnp.int32)
    return Slots(places, jnp.zeros((rows, room.slots), jnp.int32))


def write_token(array: jax.Array, token: jax.Array, slot: jax.Array, mine: jax.Array) -> jax.Array:
    """``array [B, C, ...]`` with ``token [B, ...]`` in a slot, if the slot is ``mine``."""
    axis = min(1, token.ndim)
    old = jax.lax.dynamic_index_in_dim(array, slot, axis, keepdims=False)
    new = jnp.where(mine, token.astype(array.dtype), old)
    return jax.lax.dynamic_update_index_in_dim(array, new, slot, axis)


def keep_last(
    room: Room,
    old: jax.Array,
    new: jax.Array,
    places: jax.Array,
    ends: tuple[jax.Array, jax.Array],
    axes: tuple[str, ...],
) -> jax.Array:
    """A ring buffer's array after a prompt's tokens, inside a ``shard_map``.

    The tokens lie in any layout. Each device puts its own into a buffer of all devices' slots; the
    sum over devices, of which each gets its part, brings them to their slots.

    Args:
      room: of the layer, a ring buffer.
      old: ``[B, C, ...]``, this device's slots.
      new: ``[B, T, ...]``, this device's tokens.
      places: int32 ``[T]``, their places.
      ends: the prompt's first place that is no padding, and its last.
      axes: the mesh axes that split the tokens.
    """
    total = room.slots * room.devices
    device, slot = room.slot(places)
    kept = (places > ends[1] - total) & (places >= ends[0])
    index = jnp.where(kept, device * room.slots + slot, total)
    buffer = jnp.zeros((old.shape[0], total, *old.shape[2:]), old.dtype)
    buffer = buffer.at[:, index].set(new.astype(old.dtype), mode="drop")
    written = jnp.zeros((total,), jnp.int32).at[index].set(1, mode="drop")
    if axes:
        buffer = jax.lax.psum_scatter(buffer, axes, scatter_dimension=1, tiled=True)
        written = jax.lax.psum_scatter(written, axes, scatter_dimension=0, tiled=True)
    written = written.reshape(1, -1, *[1] * (old.ndim - 2)) > 0
    return jnp.where(written, buffer, old)
