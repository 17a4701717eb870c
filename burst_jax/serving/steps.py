"""The two compiled programs of serving: prefill of a prompt chunk, and decoding of one token."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.layers.gated_delta_net import DeltaNetState, GatedDeltaNet
from burst_jax.parallel.mesh import axes_size, mesh_with_devices
from burst_jax.serving.cache import (
    EMPTY,
    Cache,
    CacheCapacity,
    KeyValues,
    PromptPosition,
    SlotMetadata,
    TokenPosition,
    write_ring_buffer,
    write_token,
)
from burst_jax.serving.decode_attention import decode_attention
from burst_jax.serving.delta_net_step import delta_net_step
from burst_jax.serving.model import ServedModel
from burst_jax.serving.prompt_attention import Chunk, Slots, prompt_attention

# Options of a layer that decoding reads.
_SCORE_OPTIONS = ("scale", "logits_soft_cap", "sink_logits", "implementation")


class Steps:
    """The programs of one model and one cache size.

    Attributes:
      capacities: the distinct capacities of the layers with keys and values.
      capacity_of: the index of the capacity of each of these layers, by the layer's index.
      specs: a :class:`Cache` with the ``PartitionSpec`` of each of its arrays.
      prefill: :meth:`_prefill`, compiled.
      decode: :meth:`_decode`, compiled.
    """

    def __init__(self, model: ServedModel, batch: int, length: int) -> None:
        self.model, self.batch = model, batch
        self.mesh = mesh_with_devices(model.shardings.mesh)
        self.axes = model.shardings.token_axes
        self.devices = axes_size(self.mesh, self.axes)
        self.capacities: list[CacheCapacity] = []
        self.capacity_of: dict[int, int] = {}
        for index, kind in enumerate(model.config.layer_kinds):
            if kind.mixer != "attention":
                continue
            capacity = CacheCapacity.of(kind.window, length, self.devices)
            if capacity not in self.capacities:
                self.capacities.append(capacity)
            self.capacity_of[index] = self.capacities.index(capacity)
        batch_axes, token_axes = model.data_axes
        tensor_axes = model.shardings.tensor_axes or None
        heads: Any = P(batch_axes, token_axes, tensor_axes)
        # Every device of a sequence has its heads' states, and the taps' inputs of their features.
        state: Any = P(batch_axes, tensor_axes)
        tail: Any = P(batch_axes, None, tensor_axes)
        of_mixer = {
            "attention": KeyValues(heads, heads),
            "delta_net": DeltaNetState(state, tail, tail, tail),
        }
        slots: Any = P(token_axes), P(batch_axes, token_axes)
        lengths: Any = P(batch_axes)
        self.specs: Any = Cache(
            tuple(of_mixer[kind.mixer] for kind in model.config.layer_kinds),
            (SlotMetadata(*slots),) * len(self.capacities),
            lengths,
        )
        self.prefill = jax.jit(self._prefill, static_argnums=0, donate_argnums=2)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    @property
    def token_spec(self) -> P:
        """The spec of ``[B, T]``."""
        return P(*self.model.data_axes)

    @property
    def _layer_shapes(self) -> tuple[Any, ...]:
        """What each layer keeps, with a ``jax.ShapeDtypeStruct`` for each array."""
        config, model = self.model.config, self.model

        def of_layer(index: int) -> KeyValues | DeltaNetState:
            if index not in self.capacity_of:
                return model.initial_state(index, self.batch)
            slots = self.capacities[self.capacity_of[index]].slots * self.devices
            shape = self.batch, slots, model.heads
            keys, values = (
                jax.ShapeDtypeStruct((*shape, features), config.dtype)
                for features in (config.head_dim, config.value_head_dim)
            )
            return KeyValues(keys, values)  # pyrefly: ignore (shapes in place of arrays)

        return tuple(map(of_layer, range(config.num_layers)))

    @property
    def layer_bytes(self) -> int:
        """Bytes of what all layers keep, on each device."""
        arrays = jax.tree.leaves(self._layer_shapes), jax.tree.leaves(self.specs.layers)
        return sum(
            math.prod(NamedSharding(self.mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
            for x, spec in zip(*arrays, strict=True)
        )

    def allocate(self) -> Cache:
        """An empty cache."""
        batch = self.batch

        def empty_slots(capacity: CacheCapacity) -> SlotMetadata:
            slots = capacity.slots * self.devices
            positions = jnp.full((slots,), EMPTY, jnp.int32)
            return SlotMetadata(positions, jnp.zeros((batch, slots), jnp.int32))

        def empty() -> Cache:
            layers = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._layer_shapes)
            slots = tuple(map(empty_slots, self.capacities))
            return Cache(layers, slots, jnp.zeros((batch,), jnp.int32))

        shardings = jax.tree.map(partial(NamedSharding, self.mesh), self.specs)
        return jax.jit(empty, out_shardings=shardings)()

    def _mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _prefill(
        self, reach: int, weights: Any, cache: Cache, *arrays: Any
    ) -> tuple[Cache, jax.Array]:
        """Writes a prompt chunk to the cache.

        Args:
          reach: number of slots of each device to read, at least those in use afterwards; 0 if the
            cache was empty before.
          weights: the model's ``leaves``.
          cache: donated.
          *arrays: int32 ``[B, T]`` token ids in the ring's layout; int32 ``[B, T]``, 0 for padding;
            int32 ``[T]``, the cache position of each token; the :class:`PromptPosition`.

        Returns:
          ``(cache, logits)``, float32 ``[B, V]`` of the last token.
        """
        batch, tokens = self.model.data_axes
        of_arrays = P(batch, tokens), P(batch, tokens), P(tokens), P()
        in_specs = self.model.leaf_specs, self.specs, *of_arrays
        run = self._mapped(partial(self._prefill_here, reach), in_specs, (self.specs, P()))
        return run(weights, cache, *arrays)

    def _prefill_here(
        self,
        reach: int,
        weights: Any,
        cache: Cache,
        tokens: jax.Array,
        present: jax.Array,
        cache_positions: jax.Array,
        position: PromptPosition,
    ) -> tuple[Cache, jax.Array]:
        """One device's shard of a prompt chunk."""
        weights = self.model.unflatten(weights)
        last = lax.pmax(cache_positions.max(), self.axes) if self.axes else cache_positions.max()
        first = lax.pmin(cache_positions.min(), self.axes) if self.axes else cache_positions.min()
        added = _total(present.sum(1), self.axes)
        # Padding precedes a sequence's first token, so the number of its tokens in the chunk before
        # each one is the number of cache positions minus padding.
        padding = last - first + 1 - added
        preceding = jnp.maximum(cache_positions - first - padding[:, None], 0)
        positions = cache.lengths[:, None] + preceding
        lengths = cache.lengths + added

        def write(capacity: CacheCapacity, old: jax.Array, new: jax.Array) -> jax.Array:
            """An array ``[B, C, ...]`` with the chunk's ``[B, T, ...]`` written to it."""
            if capacity.is_ring_buffer:
                ends = position.first, last
                return write_ring_buffer(capacity, old, new, cache_positions, ends, self.axes)
            return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position.used, 1)

        chunk = Chunk(cache_positions, present)
        slots = [
            SlotMetadata(
                write(capacity, old.cache_positions[None], cache_positions[None])[0],
                write(capacity, old.present, present),
            )
            for capacity, old in zip(self.capacities, cache.slots, strict=True)
        ]

        def attend(
            index: int,
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            axis: Any,
            **options: Any,
        ) -> tuple[jax.Array, KeyValues]:
            number, old = self.capacity_of[index], cache.layers[index]
            capacity, window = self.capacities[number], self.model.config.layer_kinds[index].window
            new = KeyValues(*(write(capacity, *x) for x in zip(old, (key, value), strict=True)))
            of_layer = Slots(capacity, window, reach, cache.slots[number], slots[number])
            given = query, KeyValues(key, value), axis, chunk, of_layer, old, new
            return prompt_attention(*given, **options), new

        def recur(
            index: int, layer: GatedDeltaNet, x: jax.Array, present: jax.Array | None
        ) -> tuple[jax.Array, DeltaNetState]:
            return layer.prefill(x, present, cache.layers[index])

        hidden, layers = self.model.hidden(
            weights, tokens, positions, position.longest, present,
            {"attention": attend, "delta_net": recur}, gather=True,
        )  # fmt: skip
        index = jnp.argmax(cache_positions == last)
        mine = (cache_positions[index] == last).astype(hidden.dtype)
        last_hidden = _total(hidden[:, index] * mine, self.axes)
        logits = self._gather_batch(self.model.logits(weights, last_hidden))
        return Cache(tuple(layers), tuple(slots), lengths), logits

    def _decode(
        self, weights: Any, cache: Cache, *arrays: Any
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Writes one token per sequence to the cache.

        Args:
          weights: the model's ``leaves``.
          cache: donated.
          *arrays: int32 ``[B]``, the tokens; int32 ``[B + 4]``: for each sequence 1, or 0 if it has
            ended, so that its token is not stored, and the :class:`TokenPosition`. Both replicated.

        Returns:
          ``(cache, logits, numbers)``, float32 ``[B, V]`` of the next token, and the second array
          of the next step, if no sequence ends and the longest still runs: the host needs longer to
          copy it to the device than to launch several kernels.
        """
        in_specs = self.model.leaf_specs, self.specs, P(), P()
        run = self._mapped(self._decode_here, in_specs, (self.specs, P(), P()))
        return run(weights, cache, *arrays)

    def _decode_here(
        self,
        weights: Any,
        cache: Cache,
        tokens: jax.Array,
        numbers: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """One device's shard of a decoding step."""
        weights = self.model.unflatten(weights)
        present, position = numbers[: self.batch], TokenPosition(*numbers[self.batch :])
        following = jnp.concatenate([present, jnp.stack(position.following(self.devices))])
        batch = cache.lengths.shape[0]
        batch_axes = self.model.shardings.batch_axes
        first = lax.axis_index(batch_axes) * batch if batch_axes else 0
        tokens, present = (lax.dynamic_slice_in_dim(x, first, batch) for x in (tokens, present))
        me = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        targets = [
            capacity.slot(position.cache_position) if capacity.is_ring_buffer else position[1:3]
            for capacity in self.capacities
        ]
        slots = [
            SlotMetadata(
                write_token(old.cache_positions, position.cache_position, slot, device == me),
                write_token(old.present, present, slot, device == me),
            )
            for (device, slot), old in zip(targets, cache.slots, strict=True)
        ]

        def attend(
            index: int,
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            axis: Any,
            **options: Any,
        ) -> tuple[jax.Array, KeyValues]:
            del axis
            number, old = self.capacity_of[index], cache.layers[index]
            device, slot = targets[number]
            new = KeyValues(
                *(
                    write_token(x, token[:, 0], slot, device == me)
                    for x, token in zip(old, (key, value), strict=True)
                )
            )
            capacity = self.capacities[number]
            out = decode_attention(
                query, *new, slots[number], position.cache_position,
                jnp.int32(capacity.slots) if capacity.is_ring_buffer else position.slot + 1,
                self.axes, window=self.model.config.layer_kinds[index].window,
                **{name: options.get(name) for name in _SCORE_OPTIONS},
            )  # fmt: skip
            return out, new

        def recur(
            index: int, layer: GatedDeltaNet, x: jax.Array, _: None
        ) -> tuple[jax.Array, DeltaNetState]:
            out, after = delta_net_step(layer, x[:, 0], cache.layers[index], present)
            return out[:, None], after

        hidden, layers = self.model.hidden(
            weights, tokens[:, None], cache.lengths[:, None], position.longest, None,
            {"attention": attend, "delta_net": recur}, gather=False,
        )  # fmt: skip
        logits = self._gather_batch(self.model.logits(weights, hidden[:, 0]))
        return Cache(tuple(layers), tuple(slots), cache.lengths + present), logits, following

    def _gather_batch(self, logits: jax.Array) -> jax.Array:
        """Logits of the whole batch, replicated: sampling does not depend on the mesh."""
        axes = self.model.shardings.batch_axes
        return lax.all_gather(logits, axes, axis=0, tiled=True) if axes else logits

    def put(self, array: Any, *spec: Any) -> jax.Array:
        """An array placed on the mesh."""
        return jax.device_put(array, NamedSharding(self.mesh, P(*spec)))


def _total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x
