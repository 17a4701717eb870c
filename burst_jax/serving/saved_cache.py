"""A KV cache on disk: written by orbax, verified when it is read, and rearranged for its mesh.

Every slot has its cache position, which attention uses, so slots may be in any order. If the new
cache is arranged differently (another number of devices, a larger capacity), the slots of one array
at a time are gathered in the new order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.errors import first_of, printable, shown
from burst_jax.parallel.mesh import axes_size
from burst_jax.serving.cache import EMPTY, Cache, FillState, SlotMetadata
from burst_jax.serving.cache_record import CacheRecord
from burst_jax.serving.steps import Steps
from burst_jax.training import checkpoint_files as files
from burst_jax.training.checkpoints import CheckpointError, Checkpoints

# Fields of a DecoderConfig that do not change what the model computes.
_TRAINING_FIELDS = ("remat", "remat_layers", "mlp_chunks", "param_dtype", "hf_config", "lora")


class CacheState(NamedTuple):
    """A cache and its host state.

    Attributes:
      cache: the arrays.
      filled: how far it is filled.
      lengths: ``[B]``, tokens of each sequence.
    """

    cache: Cache
    filled: FillState
    lengths: np.ndarray


def save(folder: str | Path, steps: Steps, state: CacheState) -> None:
    """Writes a cache to a folder; an older one is removed when the new one is complete."""
    record = CacheRecord(
        _facts(steps), steps.capacities, steps.capacity_of, steps.model.heads, state.filled,
        state.lengths.tolist(),
    ).as_json()  # fmt: skip
    with Checkpoints(folder, keep=1) as there:
        latest = there.latest()
        if latest is not None:
            # It will be removed, so it must not be a training run's checkpoint.
            _record(there, latest)
        there.save(0 if latest is None else latest + 1, _arrays(state.cache), record)


def load(
    folder: str | Path, steps: Steps, max_length: int, forget: Callable[[], None]
) -> CacheState:
    """Reads a cache.

    Args:
      folder: where :func:`save` has written one.
      steps: of the generator that will use it.
      max_length: maximum tokens per sequence.
      forget: called when the saved cache is known to fit, before memory is allocated for it.

    Raises:
      FileNotFoundError, ValueError, CheckpointError: see
        :meth:`burst_jax.serving.Generator.load_cache`.
    """
    there = Checkpoints(folder)
    step = there.latest()
    if step is None:
        raise FileNotFoundError(f"{there.folder} has no cache: Generator.save_cache writes one")
    saved = _record(there, step)
    where = printable(there.folder / str(step) / files.RECORD)
    record = CacheRecord.parse(where, saved.extra)
    _check_same_model(there.folder, record, steps, max_length)
    record.check_arrays(where, saved, steps.model.config.head_dim)
    slots = _read_slots(there, step, saved, record, steps)
    record.check_slots(where, slots)
    arrangement = _Arrangement(steps, record, slots)
    forget()
    return CacheState(
        arrangement.read(there.folder / str(step), saved), arrangement.filled, arrangement.lengths
    )


def _record(there: Checkpoints, step: int) -> files.Record:
    """The record that was saved with a cache.

    Raises:
      ValueError: the checkpoint is not a cache.
      CheckpointError: it cannot be read.
    """
    try:
        saved = files.read_record(there.folder / str(step))
    except files.Damage as damage:
        raise CheckpointError(
            f"the cache in {there.folder} is damaged: {damage}. Use another folder, or remove it"
        ) from None
    if not isinstance(saved.extra, dict) or "facts" not in saved.extra:
        raise ValueError(
            f"{there.folder} has checkpoints that are not a cache: use a folder for this cache only"
        )
    return saved


def _read_slots(
    there: Checkpoints, step: int, saved: files.Record, record: CacheRecord, steps: Steps
) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(positions, present)`` of each saved capacity. All files are checked for damage."""
    whole = NamedSharding(steps.mesh, P())
    abstract = [
        [
            jax.ShapeDtypeStruct(*saved.arrays[f"slots.{capacity}.{part}"], sharding=whole)
            for part in range(2)
        ]
        for capacity in range(len(record.capacities))
    ]
    found = there.restore({"slots": abstract}, step, partial=True)
    assert found is not None
    return [
        (np.asarray(positions), np.asarray(present)) for positions, present in found.state["slots"]
    ]


class _Arrangement:
    """Maps the slots of a saved cache to those of a generator's cache.

    Args:
      steps: of the generator.
      record: what was saved with the arrays.
      slots: for each saved capacity ``(cache positions [C], present [B, C])``.

    Attributes:
      filled: how far the cache will be filled.
      lengths: tokens of each sequence.

    Raises:
      ValueError: the saved cache does not fit.
    """

    def __init__(
        self, steps: Steps, record: CacheRecord, slots: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self._steps, self._saved, self._capacity_of = steps, slots, record.capacity_of
        self._heads = record.heads
        self.filled: FillState = record.filled
        self.lengths = np.asarray(record.lengths, np.int64)
        arranged = record.capacities, self._capacity_of, self._heads
        self._same = arranged == (steps.capacities, steps.capacity_of, steps.model.heads)
        self._slots = (
            slots if self._same else [self._arrange(i) for i in range(len(steps.capacities))]
        )

    def _arrange(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """``(positions, present)`` of a capacity of the new cache."""
        capacity = self._steps.capacities[number]
        pairs = zip(self._capacity_of, self._steps.capacity_of, strict=True)
        # Layers that had a ring buffer may share a capacity with others here.
        sources = [self._saved[old] for old in sorted({old for old, new in pairs if new == number})]
        held = [present.any(0) for _, present in sources]
        positions = np.unique(
            np.concatenate([found[kept] for (found, _), kept in zip(sources, held, strict=True)])
        )
        total = capacity.slots * capacity.devices
        if capacity.is_ring_buffer:
            positions = positions[positions >= self.filled.next_position - total]
            device, slot = capacity.slot(positions)
        else:
            device, slot = np.arange(len(positions)) % capacity.devices, np.arange(len(positions))
            slot //= capacity.devices
            used = -(-len(positions) // capacity.devices)
            if used > capacity.slots:
                raise ValueError(
                    f"the saved cache needs {used} slots on each device, and this one has "
                    f"{capacity.slots}: make a Generator whose max_length is larger by "
                    f"{(used - capacity.slots) * capacity.devices}"
                )
            self.filled = dataclasses.replace(self.filled, used=used, generated=0)
        index = device * capacity.slots + slot
        new_positions = np.full(total, EMPTY, np.int32)
        new_present = np.zeros((self._steps.batch, total), np.int32)
        new_positions[index] = positions
        for (found, present), kept in zip(sources, held, strict=True):
            at = np.searchsorted(positions, found)
            kept = kept & (at < len(positions))
            kept[kept] = positions[at[kept]] == found[kept]
            new_present[:, index[at[kept]]] = present[:, kept]
        return new_positions, new_present

    def _index(self, old: int, new: int) -> np.ndarray:
        """For each new slot the index of its old slot, or one after the last for an empty slot."""
        found, present = self._saved[old]
        positions, _ = self._slots[new]
        slot_of = np.full(self.filled.next_position + 1, len(found), np.int32)
        held = np.flatnonzero(present.any(0))
        slot_of[found[held]] = held
        return slot_of[np.minimum(positions, self.filled.next_position)]

    def read(self, folder: Path, saved: files.Record) -> Cache:
        """The cache. One layer of the saved cache is in memory at a time."""
        steps = self._steps
        pairs = list(zip(self._capacity_of, steps.capacity_of, strict=True))
        indices = {} if self._same else {pair: self._index(*pair) for pair in set(pairs)}

        def arrays(kind: str) -> tuple[jax.Array, ...]:
            read = partial(self._read, folder, saved)
            return tuple(
                read(f"{kind}.{layer}", spec, indices.get(pair))
                for layer, (spec, pair) in enumerate(zip(steps.specs.keys, pairs, strict=True))
            )

        specs = steps.specs
        slots = [
            SlotMetadata(
                steps.put(positions, *spec.cache_positions), steps.put(present, *spec.present)
            )
            for (positions, present), spec in zip(self._slots, specs.slots, strict=True)
        ]
        lengths = steps.put(self.lengths.astype(np.int32), *specs.lengths)
        return Cache(arrays("keys"), arrays("values"), tuple(slots), lengths)

    def _read(
        self, folder: Path, saved: files.Record, name: str, spec: P, index: np.ndarray | None
    ) -> jax.Array:
        """One layer's keys or values, rearranged by ``index`` unless it is None."""
        steps = self._steps

        def stored(mesh: Mesh, spec: P) -> jax.Array:
            sharding = NamedSharding(mesh, spec)
            wanted = jax.ShapeDtypeStruct(*saved.arrays[name], sharding=sharding)
            return files.restore_arrays(folder, {name: wanted})[name]

        if index is None:
            return stored(steps.mesh, spec)
        # Over Auto axes XLA can partition the gather, whatever the generator's axis types are.
        mesh = Mesh(steps.mesh.devices, steps.mesh.axis_names)
        shape, _ = saved.arrays[name]
        dividing = [
            axes if size % axes_size(mesh, axes) == 0 else None
            for size, axes in zip(shape, spec, strict=False)
        ]
        array = stored(mesh, P(*dividing))
        # With more devices on the tensor axes than key heads, heads are copied.
        own, heads = steps.model.config.num_kv_heads, steps.model.heads
        of_heads = np.arange(heads) // (heads // own) * (self._heads // own)
        new = _take(NamedSharding(mesh, spec), array, index, of_heads)
        return jax.device_put(new, NamedSharding(steps.mesh, spec))


@partial(jax.jit, static_argnums=0)
def _take(sharding: NamedSharding, array: jax.Array, slots: Any, heads: Any) -> jax.Array:
    """Slots and heads of ``[B, C, K, H]`` by index; zero for an index after the last slot."""
    array = jnp.take(array, slots, axis=1, mode="fill", fill_value=0)
    return lax.with_sharding_constraint(jnp.take(array, heads, axis=2), sharding)


def _arrays(cache: Cache) -> dict[str, Any]:
    """The arrays of a cache that are saved; the lengths are in the record."""
    slots = [[each.cache_positions, each.present] for each in cache.slots]
    return {"keys": list(cache.keys), "values": list(cache.values), "slots": slots}


def _facts(steps: Steps) -> dict[str, Any]:
    """Everything but the mesh that the values in a cache depend on."""
    config = steps.model.config
    fields = {
        field.name: repr(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _TRAINING_FIELDS
    }
    return fields | {
        "dtype": jnp.dtype(config.dtype).name,
        "scale": repr(steps.model.scale),
        "batch": steps.batch,
        "sum of the weights' bits": int(_sum_of_bits(steps.model.weights)),
    }


@jax.jit
def _sum_of_bits(weights: Any) -> jax.Array:
    """A checksum of the weights, independent of their sharding."""
    total = jnp.uint32(0)
    for index, weight in enumerate(jax.tree.leaves(weights)):
        unsigned = jnp.dtype(f"uint{8 * weight.dtype.itemsize}")
        bits = lax.bitcast_convert_type(weight, unsigned).astype(jnp.uint32)
        total += jnp.uint32(2 * index + 1) * bits.sum(dtype=jnp.uint32)
    return total


def _check_same_model(folder: Path, record: CacheRecord, steps: Steps, max_length: int) -> None:
    """Raises ValueError unless the saved cache is of this model, and short enough."""
    saved, own = record.facts, _facts(steps)
    lines = [
        f"{name} is {shown(saved.get(name))} there and {shown(own.get(name))} here"
        for name in dict.fromkeys([*saved, *own])
        if saved.get(name) != own.get(name)
    ]
    if lines:
        raise ValueError(
            f"the cache in {printable(folder)} is of another model or batch: {first_of(lines)}. "
            "Load it into a Generator of the same weights, config and batch, or generate without "
            "extend"
        )
    if len(record.capacity_of) != len(steps.capacity_of) or len(record.lengths) != steps.batch:
        raise ValueError(
            f"the cache in {printable(folder)} is damaged: capacity_of has "
            f"{len(record.capacity_of)} layers and lengths {len(record.lengths)} sequences, the "
            f"model {len(steps.capacity_of)} and {steps.batch}"
        )
    if record.heads % steps.model.config.num_kv_heads:
        raise ValueError(
            f"the cache in {printable(folder)} is damaged: heads is {record.heads}, and the model "
            f"has {steps.model.config.num_kv_heads} key heads"
        )
    longest = max(record.lengths)
    if longest > max_length:
        raise ValueError(
            f"the cache in {folder} has a sequence of {longest} tokens, and max_length is "
            f"{max_length}: make a Generator with a larger max_length"
        )
