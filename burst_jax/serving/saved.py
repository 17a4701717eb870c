"""A cache on the disk: written by orbax, checked when it is read, and packed anew for its mesh.

Every slot knows its place, and attention goes by places, so slots may be read in any order. Where
the cache is arranged in another way than the one that was saved (another number of devices, room
for more tokens), the slots of one array after the other are taken in the new order.
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

from burst_jax.parallel.mesh import axes_size
from burst_jax.serving.cache import EMPTY, Cache, Filled, Room, Slots
from burst_jax.serving.steps import Steps
from burst_jax.training import checkpoint_files as files
from burst_jax.training.checkpoints import CheckpointError, Checkpoints

# Fields of a DecoderConfig that say how a model is trained or stored, not what it computes.
_OF_TRAINING = ("remat", "remat_layers", "mlp_chunks", "param_dtype", "hf_config", "lora")


class Kept(NamedTuple):
    """A cache, and what the host knows of it.

    Attributes:
      cache: the arrays.
      filled: how far it is filled.
      lengths: ``[B]``, tokens of each row.
    """

    cache: Cache
    filled: Filled
    lengths: np.ndarray


def save(folder: str | Path, steps: Steps, kept: Kept) -> None:
    """Writes a cache into a folder; one that is there is removed when the new one is complete."""
    record = {
        "facts": _facts(steps),
        "rooms": [dataclasses.astuple(room) for room in steps.rooms],
        "room_of": steps.room_of,
        "heads": steps.model.heads,
        "filled": dataclasses.asdict(kept.filled),
        "lengths": kept.lengths.tolist(),
    }
    with Checkpoints(folder, keep=1) as there:
        latest = there.latest()
        if latest is not None:
            # What is in the folder is removed, so it must be no run's checkpoints.
            _record(there, latest)
        there.save(0 if latest is None else latest + 1, _arrays(kept.cache), record)


def load(folder: str | Path, steps: Steps, max_length: int, forget: Callable[[], None]) -> Kept:
    """Reads a cache.

    Args:
      folder: where :func:`save` has written one.
      steps: of the generator whose cache it will be.
      max_length: tokens of a row at most.
      forget: called when what is saved fits, before memory is taken for it.

    Raises:
      FileNotFoundError, ValueError, CheckpointError: see
        :meth:`burst_jax.serving.Generator.load_cache`.
    """
    there = Checkpoints(folder)
    step = there.latest()
    if step is None:
        raise FileNotFoundError(f"{there.folder} has no cache: Generator.save_cache writes one")
    saved = _record(there, step)
    record = saved.extra
    _refuse_other(there.folder, record, steps, max_length)
    packing = _Packing(steps, record, _read_slots(there, step, saved, steps))
    forget()
    return Kept(packing.read(there.folder / str(step), saved), packing.filled, packing.lengths)


def _record(there: Checkpoints, step: int) -> files.Record:
    """What says how a cache was saved.

    Raises:
      ValueError: what was saved is no cache.
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
            f"{there.folder} has checkpoints of something else: name a folder of this cache alone"
        )
    return saved


def _read_slots(
    there: Checkpoints, step: int, saved: files.Record, steps: Steps
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The places and rows that each room has saved. All files are checked for damage."""
    whole = NamedSharding(steps.mesh, P())
    abstract = [
        [
            jax.ShapeDtypeStruct(*saved.arrays[f"slots.{room}.{part}"], sharding=whole)
            for part in range(2)
        ]
        for room in range(len(saved.extra["rooms"]))
    ]
    found = there.restore({"slots": abstract}, step, partial=True)
    assert found is not None
    return [(np.asarray(places), np.asarray(present)) for places, present in found.state["slots"]]


class _Packing:
    """Where each slot of a generator's cache comes from.

    Args:
      steps: of the generator.
      record: what was saved beside the arrays.
      slots: for each room that was saved ``(places [C], present [B, C])``.

    Attributes:
      filled: how far the cache will be filled.
      lengths: tokens of each row.

    Raises:
      ValueError: the cache has no room for what was saved.
    """

    def __init__(
        self, steps: Steps, record: dict[str, Any], slots: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self._steps, self._saved, self._room_of = steps, slots, record["room_of"]
        self._heads = record["heads"]
        self.filled = Filled(**record["filled"])
        self.lengths = np.asarray(record["lengths"], np.int64)
        arranged = [Room(*room) for room in record["rooms"]], self._room_of, self._heads
        self._same = arranged == (steps.rooms, steps.room_of, steps.model.heads)
        self._slots = slots if self._same else [self._arrange(i) for i in range(len(steps.rooms))]

    def _arrange(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """``(places, present)`` of a room of the new cache."""
        room = self._steps.rooms[number]
        pairs = zip(self._room_of, self._steps.room_of, strict=True)
        # Layers with a window may have had a ring buffer, and share a room with others here.
        sources = [self._saved[old] for old in sorted({old for old, new in pairs if new == number})]
        held = [present.any(0) for _, present in sources]
        places = np.unique(
            np.concatenate([found[kept] for (found, _), kept in zip(sources, held, strict=True)])
        )
        total = room.slots * room.devices
        if room.is_ring:
            places = places[places >= self.filled.place - total]
            device, slot = room.slot(places)
        else:
            device, slot = np.arange(len(places)) % room.devices, np.arange(len(places))
            slot //= room.devices
            self._use(-(-len(places) // room.devices), room)
        index = device * room.slots + slot
        new_places = np.full(total, EMPTY, np.int32)
        new_present = np.zeros((self._steps.rows, total), np.int32)
        new_places[index] = places
        for (found, present), kept in zip(sources, held, strict=True):
            at = np.searchsorted(places, found)
            kept = kept & (at < len(places))
            kept[kept] = places[at[kept]] == found[kept]
            new_present[:, index[at[kept]]] = present[:, kept]
        return new_places, new_present

    def _use(self, used: int, room: Room) -> None:
        if used > room.slots:
            raise ValueError(
                f"what is saved takes {used} slots on each device, and the cache has {room.slots}: "
                "make a Generator whose max_length is larger by "
                f"{(used - room.slots) * room.devices}"
            )
        self.filled = dataclasses.replace(self.filled, used=used, dealt=0)

    def _index(self, old: int, new: int) -> np.ndarray:
        """For each slot of a new room one of an old room's, or one behind the last if none is."""
        found, present = self._saved[old]
        places, _ = self._slots[new]
        slot_of = np.full(self.filled.place + 1, len(found), np.int32)
        held = np.flatnonzero(present.any(0))
        slot_of[found[held]] = held
        return slot_of[np.minimum(places, self.filled.place)]

    def read(self, folder: Path, saved: files.Record) -> Cache:
        """The cache. Beside it memory is taken for one layer that was saved."""
        steps = self._steps
        rooms = list(zip(self._room_of, steps.room_of, strict=True))
        indices = {} if self._same else {pair: self._index(*pair) for pair in set(rooms)}
        keys, values = [], []
        for layer, pair in enumerate(rooms):
            spec, index = steps.specs.keys[layer], indices.get(pair)
            for kind, arrays in (("keys", keys), ("values", values)):
                name = f"{kind}.{layer}"
                if index is None:
                    arrays.append(self._read(folder, saved, name, steps.mesh, spec))
                else:
                    arrays.append(self._read_anew(folder, saved, name, spec, index))
        specs = steps.specs
        slots = [
            Slots(steps.put(places, *spec.places), steps.put(present, *spec.present))
            for (places, present), spec in zip(self._slots, specs.slots, strict=True)
        ]
        lengths = steps.put(self.lengths.astype(np.int32), *specs.lengths)
        return Cache(tuple(keys), tuple(values), tuple(slots), lengths)

    @staticmethod
    def _read(folder: Path, saved: files.Record, name: str, mesh: Mesh, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        wanted = jax.ShapeDtypeStruct(*saved.arrays[name], sharding=sharding)
        return files.restore_arrays(folder, {name: wanted})[name]

    def _read_anew(
        self, folder: Path, saved: files.Record, name: str, spec: P, index: np.ndarray
    ) -> jax.Array:
        steps = self._steps
        # Over Auto axes XLA splits what takes the slots, whatever the generator's axes are.
        mesh = Mesh(steps.mesh.devices, steps.mesh.axis_names)
        shape, _ = saved.arrays[name]
        dividing = [
            axes if size % axes_size(mesh, axes) == 0 else None
            for size, axes in zip(shape, spec, strict=False)
        ]
        array = self._read(folder, saved, name, mesh, P(*dividing))
        # Where the tensor axes have more devices than there are key heads, heads are copied.
        own, heads = steps.model.config.num_kv_heads, steps.model.heads
        of_heads = np.arange(heads) // (heads // own) * (self._heads // own)
        new = _take(NamedSharding(mesh, spec), array, index, of_heads)
        return jax.device_put(new, NamedSharding(steps.mesh, spec))


@partial(jax.jit, static_argnums=0)
def _take(sharding: NamedSharding, array: jax.Array, slots: Any, heads: Any) -> jax.Array:
    """Slots and heads of ``[B, C, K, H]`` by index; zero for an index behind the last slot."""
    array = jnp.take(array, slots, axis=1, mode="fill", fill_value=0)
    return lax.with_sharding_constraint(jnp.take(array, heads, axis=2), sharding)


def _arrays(cache: Cache) -> dict[str, Any]:
    """The arrays of a cache that are written; the record has the lengths."""
    slots = [[each.places, each.present] for each in cache.slots]
    return {"keys": list(cache.keys), "values": list(cache.values), "slots": slots}


def _facts(steps: Steps) -> dict[str, Any]:
    """What the numbers in a cache depend on, whatever the mesh."""
    config = steps.model.config
    fields = {
        field.name: repr(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OF_TRAINING
        # Caches saved before the field existed lack it.
        and (field.name != "feed_forward" or config.feed_forward is not field.default)
    }
    return fields | {
        "dtype": jnp.dtype(config.dtype).name,
        "scale": repr(steps.model.scale),
        "batch": steps.rows,
        "sum of the weights' bits": int(_sum_of_bits(steps.model.weights)),
    }


@jax.jit
def _sum_of_bits(weights: Any) -> jax.Array:
    """A number that tells weights apart: a sum of integers, the same however they are split."""
    total = jnp.uint32(0)
    for index, weight in enumerate(jax.tree.leaves(weights)):
        unsigned = jnp.dtype(f"uint{8 * weight.dtype.itemsize}")
        bits = lax.bitcast_convert_type(weight, unsigned).astype(jnp.uint32)
        total += jnp.uint32(2 * index + 1) * bits.sum(dtype=jnp.uint32)
    return total


def _refuse_other(folder: Path, record: dict[str, Any], steps: Steps, max_length: int) -> None:
    """Raises ValueError unless what was saved is a cache of this model, and short enough."""
    saved, own = record["facts"], _facts(steps)
    lines = [
        f"{name} is {saved.get(name)} there and {own.get(name)} here"
        for name in dict.fromkeys([*saved, *own])
        if saved.get(name) != own.get(name)
    ]
    if lines:
        raise ValueError(
            f"the cache in {folder} is of another model or batch: {'; '.join(lines)}. Load it into "
            "a Generator of the same weights, config and batch, or generate without extend"
        )
    longest = max(record["lengths"])
    if longest > max_length:
        raise ValueError(
            f"the cache in {folder} has a row of {longest} tokens, and max_length is {max_length}: "
            "make a Generator with a larger max_length"
        )
