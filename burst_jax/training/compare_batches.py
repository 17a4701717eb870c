"""Comparison of the batches that the processes of a run pass, by hashes in a collective."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def check_processes(
    mesh: Mesh,
    batch: Any,
    error: str | None,
    shards: int,
    held: dict[int, tuple[int, ...]],
    process_local: bool,
) -> None:
    """Raises on every process unless all processes' batches fit together.

    Each process sends two hashes: of the form of its batch (names, dtypes, shapes, shape error) and
    of its contents.
    """
    leaves, tree = jax.tree.flatten(batch)
    arrays = [np.asarray(leaf) for leaf in leaves]
    kinds = [(str(x.dtype), *(size / shards for size in x.shape[:1]), x.shape[1:]) for x in arrays]
    form = repr((str(tree), kinds, error)).encode()
    contents = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays)
    words = np.concatenate([_hash([form]), _hash(contents)])
    hashes: dict[int, tuple[int, ...]] = {}
    for device, row in zip(mesh.devices.flat, _gather_words(words, mesh), strict=True):
        hashes[device.process_index] = tuple(row.tolist())
    if len({words[:2] for words in hashes.values()}) > 1:
        count = "per shard of the batch axis" if process_local else "as all others"
        raise ValueError(
            error
            or "batch has other names, dtypes or sizes on another process: every process must pass "
            f"arrays of the same kind, and as many sequences {count}; make segment_ids on all "
            "processes or on none, and pad to the same length"
        )
    for own in held.values():
        same = [other for other in hashes if not process_local or held[other] == own]
        if len({hashes[other] for other in same}) == 1:
            continue
        if process_local:
            raise ValueError(
                f"batch differs between processes {same}, whose devices hold parts of the same "
                "sequences: pass the same sequences on all of them, or use a mesh whose seq axis "
                "is inside a process"
            )
        raise ValueError(
            f"batch differs between processes {sorted(hashes)}: every process must pass the same "
            "whole batch; if each passes its own sequences, use process_local=True"
        )


def _hash(parts: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """64 bits as uint32 ``[2]``, because JAX has no wider integers by default."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return np.frombuffer(digest.digest(), np.uint32)


def _gather_words(words: np.ndarray, mesh: Mesh) -> np.ndarray:
    """All-gather of each process' uint32 ``[words]`` to ``[devices, words]``, in mesh order.

    ``multihost_utils.process_allgather`` would need every process of the program; this needs only
    processes with devices of the mesh.
    """
    flat = Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(flat, spec) for spec in (PartitionSpec("all"), PartitionSpec()))
    shape = flat.size, words.size
    given = jax.make_array_from_callback(shape, split, lambda _: words[None])
    return np.asarray(jax.device_put(given, whole))
