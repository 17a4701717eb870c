"""The two programs of serving: one prompt into the cache, and one token from it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.attention.api import ring_attention
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import axes_size, mesh_with_devices
from burst_jax.serving.attention import decode_attention
from burst_jax.serving.cache import Cache, Room, Slots, empty_slots, keep_last, write_token
from burst_jax.serving.model import ServedModel, split_of

# What a layer passes to its attention that says how whole rows lie on a mesh.
_OF_ROWS = (
    "layout",
    "query_segment_ids",
    "key_value_segment_ids",
    "is_causal",
    "local_window_size",
)
# What decoding takes from a layer's options.
_OF_SCORES = ("scale", "logits_soft_cap", "sink_logits", "implementation")


class Into(NamedTuple):
    """Where a prompt's part goes, int32 scalars.

    Attributes:
      used: slots that each device has filled, in rooms without a window.
      first: the first place that is no padding of all rows.
      longest: tokens of the longest row, with its whole prompt.
    """

    used: Any
    first: Any
    longest: Any


class At(NamedTuple):
    """Where a generated token goes, int32 scalars.

    Attributes:
      place: the token's place.
      device: the device that keeps it, in rooms without a window.
      slot: its slot there.
      longest: tokens of the longest row, this one included.
    """

    place: Any
    device: Any
    slot: Any
    longest: Any


class Steps:
    """The programs of one model and one size of cache.

    Attributes:
      rooms: the rooms of the cache, by window.
      room_of: for each layer the index of its room.
    """

    def __init__(self, model: ServedModel, rows: int, capacity: int, layout: Layout) -> None:
        self.model, self.rows, self.layout = model, rows, layout
        self.mesh = mesh_with_devices(model.parts.mesh)
        self.axes = model.parts.token_axes
        self.devices = axes_size(self.mesh, self.axes)
        self.rooms: list[Room] = []
        self.room_of: list[int] = []
        for window in model.windows:
            room = Room.of(window, capacity, self.devices)
            if room not in self.rooms:
                self.rooms.append(room)
            self.room_of.append(self.rooms.index(room))
        self.specs = self._cache_specs()
        self._prefill = partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)(Steps._prefill_of)
        self._decode = partial(jax.jit, static_argnums=0, donate_argnums=2)(Steps._decode_of)

    def _cache_specs(self) -> Any:
        """How the arrays of a cache are split, as a cache of ``PartitionSpec``."""
        rows, tokens = split_of(self.model.parts)
        of_slots, of_rows, of_both = (P(tokens), P(rows), P(rows, tokens))
        heads: Any = (P(rows, tokens, self.model.parts.tensor_axes or None),) * len(self.room_of)
        slots: Any = [(of_slots, of_both)] * len(self.rooms)
        lengths: Any = of_rows
        return Cache(heads, heads, tuple(Slots(*each) for each in slots), lengths)

    def allocate(self) -> Cache:
        """An empty cache."""
        config, model = self.model.config, self.model
        rows = self.rows // axes_size(self.mesh, model.parts.batch_axes)
        heads = model.heads // axes_size(self.mesh, model.parts.tensor_axes)

        def local() -> Cache:
            def arrays() -> tuple[jax.Array, ...]:
                return tuple(
                    jnp.zeros((rows, self.rooms[i].slots, heads, config.head_dim), config.dtype)
                    for i in self.room_of
                )

            slots = tuple(empty_slots(room, rows) for room in self.rooms)
            return Cache(arrays(), arrays(), slots, jnp.zeros((rows,), jnp.int32))

        return jax.jit(self._mapped(local, (), self.specs))()

    def _mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def prefill(
        self,
        cache: Cache,
        tokens: jax.Array,
        present: jax.Array,
        places: jax.Array,
        into: Into,
        reach: int,
    ) -> tuple[Cache, jax.Array]:
        """A prompt's part into the cache.

        Args:
          cache: donated.
          tokens: int32 ``[B, T]`` in the order of the layout.
          present: int32 ``[B, T]``, 0 for padding.
          places: int32 ``[T]``, of each token.
          into: where it goes.
          reach: slots of each device that hold something afterwards, or some more; 0 if the cache
            held nothing before.

        Returns:
          ``(cache, logits)``, float32 ``[B, V]`` of the last place.
        """
        return self._prefill(self, reach, self.model.weights, cache, tokens, present, places, into)

    def _prefill_of(
        self,
        reach: int,
        weights: Any,
        cache: Cache,
        tokens: jax.Array,
        present: jax.Array,
        places: jax.Array,
        into: Into,
    ) -> tuple[Cache, jax.Array]:
        rows, split = split_of(self.model.parts)
        run = self._mapped(
            partial(self._prefill_here, reach),
            (self.model.specs, self.specs, P(rows, split), P(rows, split), P(split), P()),
            (self.specs, P()),
        )
        return run(weights, cache, tokens, present, places, into)

    def _prefill_here(
        self,
        reach: int,
        weights: Any,
        cache: Cache,
        tokens: jax.Array,
        present: jax.Array,
        places: jax.Array,
        into: Into,
    ) -> tuple[Cache, jax.Array]:
        """One device's part of a prompt."""
        last = lax.pmax(places.max(), self.axes) if self.axes else places.max()
        first = lax.pmin(places.min(), self.axes) if self.axes else places.min()
        # Places count from the start of the longest row; a row's own positions from its own.
        before = _count_before(present, places, first, last, self.axes)
        positions = cache.lengths[:, None] + before
        added = _total(present.sum(1), self.axes)
        lengths = cache.lengths + added
        slots = [
            self._slots_after(room, old, places, present, into, last)
            for room, old in zip(self.rooms, cache.slots, strict=True)
        ]

        def attend(
            index: int,
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            axis: Any,
            **options: Any,
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            room, number = self.rooms[self.room_of[index]], self.room_of[index]
            old = cache.keys[index], cache.values[index]
            keys, values = (
                self._after(room, before, new, places, into, last)
                for before, new in zip(old, (key, value), strict=True)
            )
            if reach == 0:
                return ring_attention(query, key, value, axis, **options), (keys, values)
            if room.is_ring:
                key, value = (
                    jnp.concatenate([kept, new], 1)
                    for kept, new in zip(old, (key, value), strict=True)
                )
                seen = cache.slots[number]
                at = jnp.concatenate([seen.places, places])
                ids = jnp.concatenate([seen.present, present], 1)
            else:
                key, value = keys[:, :reach], values[:, :reach]
                at, ids = slots[number].places[:reach], slots[number].present[:, :reach]
            for name in _OF_ROWS:
                options.pop(name, None)
            window = self.model.windows[index]
            out = ring_attention(
                query, key, value, axis, is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                query_positions=places, key_value_positions=at,
                query_segment_ids=present, key_value_segment_ids=ids, **options,
            )  # fmt: skip
            return out, (keys, values)

        hidden, stored = self.model.hidden(
            weights, tokens, positions, into.longest, present, attend, gather=True
        )
        index = jnp.argmax(places == last)
        mine = (places[index] == last).astype(hidden.dtype)
        at_last = _total(hidden[:, index] * mine, self.axes)
        logits = self._of_all_rows(self.model.logits(weights, at_last))
        keys, values = zip(*stored, strict=True)
        return Cache(keys, values, tuple(slots), lengths), logits

    def _after(
        self,
        room: Room,
        old: jax.Array,
        new: jax.Array,
        places: jax.Array,
        into: Into,
        last: jax.Array,
    ) -> jax.Array:
        """An array ``[B, C, ...]`` of a room with a prompt's tokens ``[B, T, ...]`` in it."""
        if room.is_ring:
            return keep_last(room, old, new, places, (into.first, last), self.axes)
        return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), into.used, 1)

    def _slots_after(
        self,
        room: Room,
        old: Slots,
        places: jax.Array,
        present: jax.Array,
        into: Into,
        last: jax.Array,
    ) -> Slots:
        """What a room's slots hold with a prompt's tokens in them."""
        of_rows = self._after(room, old.places[None], places[None], places, into, last)
        return Slots(of_rows[0], self._after(room, old.present, present, places, into, last))

    def decode(
        self, cache: Cache, tokens: jax.Array, present: jax.Array, at: At
    ) -> tuple[Cache, jax.Array]:
        """One token of every row into the cache.

        Args:
          cache: donated.
          tokens: int32 ``[B]``, whole on every device.
          present: int32 ``[B]``: 0 for a row that has ended, whose token is not kept.
          at: where it goes.

        Returns:
          ``(cache, logits)``, float32 ``[B, V]`` of what follows.
        """
        return self._decode(self, self.model.weights, cache, tokens, present, at)

    def _decode_of(
        self, weights: Any, cache: Cache, tokens: jax.Array, present: jax.Array, at: At
    ) -> tuple[Cache, jax.Array]:
        run = self._mapped(
            self._decode_here,
            (self.model.specs, self.specs, P(), P(), P()),
            (self.specs, P()),
        )
        return run(weights, cache, tokens, present, at)

    def _decode_here(
        self, weights: Any, cache: Cache, tokens: jax.Array, present: jax.Array, at: At
    ) -> tuple[Cache, jax.Array]:
        """One device's part of a step."""
        rows = cache.lengths.shape[0]
        batch_axes = self.model.parts.batch_axes
        first = lax.axis_index(batch_axes) * rows if batch_axes else 0
        tokens, present = (lax.dynamic_slice_in_dim(x, first, rows) for x in (tokens, present))
        me = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        homes = [room.slot(at.place) if room.is_ring else at[1:3] for room in self.rooms]
        slots = [
            Slots(
                write_token(old.places, at.place, slot, device == me),
                write_token(old.present, present, slot, device == me),
            )
            for (device, slot), old in zip(homes, cache.slots, strict=True)
        ]

        def attend(
            index: int,
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            axis: Any,
            **options: Any,
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            del axis
            number = self.room_of[index]
            device, slot = homes[number]
            keys = write_token(cache.keys[index], key[:, 0], slot, device == me)
            values = write_token(cache.values[index], value[:, 0], slot, device == me)
            room = self.rooms[number]
            out = decode_attention(
                query, keys, values, slots[number], at.place,
                jnp.int32(room.slots) if room.is_ring else at.slot + 1, self.axes,
                window=self.model.windows[index],
                **{name: options.get(name) for name in _OF_SCORES},
            )  # fmt: skip
            return out, (keys, values)

        hidden, stored = self.model.hidden(
            weights, tokens[:, None], cache.lengths[:, None], at.longest, None, attend, gather=False
        )
        logits = self._of_all_rows(self.model.logits(weights, hidden[:, 0]))
        lengths = cache.lengths + present
        keys, values = zip(*stored, strict=True)
        return Cache(keys, values, tuple(slots), lengths), logits

    def _of_all_rows(self, logits: jax.Array) -> jax.Array:
        """Logits of all rows, on every device: tokens are chosen alike on any mesh."""
        axes = self.model.parts.batch_axes
        return lax.all_gather(logits, axes, axis=0, tiled=True) if axes else logits

    def put(self, array: Any, *spec: Any) -> jax.Array:
        """An array on the mesh."""
        return jax.device_put(array, NamedSharding(self.mesh, P(*spec)))


def _total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _count_before(
    present: jax.Array, places: jax.Array, first: jax.Array, last: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """How many tokens of its row come before each token of a part of a prompt.

    Padding stands before a row's first token, so this is the place less the padding of the row.
    """
    padding = last - first + 1 - _total(present.sum(1), axes)
    return jnp.maximum(places - first - padding[:, None], 0)
