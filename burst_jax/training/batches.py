"""From rows of token ids to a batch: shifted, padded and permuted on the host, then placed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from burst_jax.layout import Layout, pad_to_layout, to_layout
from burst_jax.sharding import AxisNames, flat_names, token_spec
from pallas_kernels.arrays import as_int32

Batch = dict[str, Any]

# Meshes, and whether rows are a process's own, whose first batches were compared.
_COMPARED: set[tuple[Any, bool]] = set()


def make_batch(
    rows: np.ndarray,
    *,
    layout: Layout = "contiguous",
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
    multiple_of: int = 1,
) -> Batch:
    """Makes a next-token batch from rows of T + 1 tokens.

    Targets are shifted first, while a token's neighbour is still beside it. Then everything is
    padded to a length that the layout can split, and permuted together::

        rows      a b c d e          inputs   a b c d     targets  b c d e
        zigzag, 2 shards             inputs   a d b c     targets  b e c d

    Args:
      rows: integers ``[B, T + 1]``.
      layout: order of the tokens, see :func:`burst_jax.to_layout`.
      num_shards: shards of the ring, see :func:`burst_jax.positions`.
      segment_ids: integers ``[B, T + 1]``, 0 for padding; None is one segment per row, no padding.
        Count documents from 1: where another library counts them from 0, add 1, or each row's
        first document would be padding, which nothing attends to and no loss counts.
      multiple_of: as in :func:`burst_jax.pad_to_layout`: with a ``head_parallel_axis`` the devices
        on the ring and on that axis together.

    Returns:
      A dict of NumPy arrays ``[B, T_padded]`` in ``layout``:

      - ``inputs``, ``targets``: int32.
      - ``positions``: int32, the index in the row (RoPE needs differences only, so it need not
        restart with a segment).
      - ``segment_ids``: int32, 0 for padding; None if there is no padding and none were given.
      - ``weights``: float32, 1 where the target counts: the token and its target are of the same
        segment, and it is not 0.

    Raises:
      ValueError: rows of another rank or dtype or shorter than 2, segment ids of another shape or
        dtype, an unknown layout.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ValueError(f"rows has shape {rows.shape}: it needs [B, T + 1] with T at least 1")
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows has dtype {rows.dtype}: token ids are integers")
    if segment_ids is not None:
        if segment_ids.shape != rows.shape:
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape}, rows {rows.shape}: they must be equal"
            )
        segment_ids = as_int32("segment_ids", segment_ids)
    batch_size, length = rows.shape[0], rows.shape[1] - 1
    weights = np.ones((batch_size, length), np.float32)
    segments = None
    if segment_ids is not None:
        segments, next_segments = segment_ids[:, :-1], segment_ids[:, 1:]
        weights = ((segments == next_segments) & (segments != 0)).astype(np.float32)
    batch = {
        "inputs": rows[:, :-1].astype(np.int32),
        "targets": rows[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length)),
        "weights": weights,
    }
    batch, padded_segments = pad_to_layout(
        batch, layout, num_shards, segments, multiple_of=multiple_of
    )
    if segments is not None or padded_segments.shape[1] != length:
        batch["segment_ids"] = padded_segments
    batch = to_layout(batch, layout, num_shards)
    batch.setdefault("segment_ids", None)
    return batch


def place_batch(
    batch: Batch,
    mesh: Mesh,
    *,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    process_local: bool = False,
) -> Batch:
    """Puts a batch of ``[B, T]`` host arrays onto the mesh, every device its own tokens only.

    With several processes there are two ways to have a batch, and ``process_local`` says which::

        2 processes of 4 devices, mesh ("data", "seq") of (2, 4), batch_axis="data", B = 4 rows

                        process 0 passes    process 1 passes
        False           rows 0 1 2 3        rows 0 1 2 3        each copies its devices' part
        True            rows 0 1            rows 2 3            a loader per process

    A row is always passed whole, all T tokens of it, because its layout was made of the whole row.
    So processes whose devices share rows (the seq axis goes through both) pass the same rows in
    both ways.

    Passing the wrong kind would train on rows that nobody meant. So with several processes the
    first call for a mesh and a ``process_local`` compares a hash of the batches. That is a
    collective of a few bytes: every process that has devices of the mesh must make this call, in
    the same order among its other programs (not in a loader's thread while a step is started), and
    it waits for the work that the devices have in hand. Later calls compare nothing, so they may
    come from any thread.

    Args:
      batch: of :func:`make_batch`, or any pytree of arrays ``[B, T]``.
      mesh: the mesh to put them on.
      seq_axis: mesh axis, or axes, of T; :func:`make_batch`'s ``num_shards`` is the ring's size.
      batch_axis: mesh axis, or axes, of B, or None.
      process_local: False: every process passes the same whole batch. True: every process passes
        the rows that its own devices hold, in the order of the mesh; B is their sum.

    Returns:
      The batch as global ``jax.Array``, ``[B, T]``.

    Raises:
      ValueError: arrays that are not all ``[B, T]``, B or T that the mesh axes do not divide, or
        processes whose batches do not fit together.
    """
    sharding = NamedSharding(mesh, token_spec(batch_axis, seq_axis))
    row_axes, token_axes = flat_names(batch_axis), flat_names(seq_axis)
    row_shards, token_shards = (
        math.prod(mesh.shape[axis] for axis in axes) for axes in (row_axes, token_axes)
    )
    of_process = _row_shards_by_process(sharding, row_shards, token_shards)
    mine = of_process.get(jax.process_index(), ())
    if process_local and not mine:
        raise ValueError(
            f"process_local is True, but process {jax.process_index()} has no device of the mesh: "
            "only processes with devices of the mesh have rows of their own"
        )
    split = len(mine) if process_local else row_shards
    several = len(of_process) > 1
    hint = several and not process_local
    wrong = _wrong_shape(batch, split, row_axes, token_shards, token_axes, hint)
    if mine and several and (mesh, process_local) not in _COMPARED:
        # Before this process raises on its own, or the others would wait for it forever.
        _check_processes(mesh, batch, wrong, split, of_process, process_local)
        _COMPARED.add((mesh, process_local))
    if wrong is not None:
        raise ValueError(wrong)

    def place(x: np.ndarray) -> jax.Array:
        if process_local:
            whole = x.shape[0] // split * row_shards, x.shape[1]
            return jax.make_array_from_process_local_data(sharding, x, whole)
        return jax.make_array_from_callback(
            x.shape, sharding, lambda index: x[index], dtype=x.dtype
        )

    return jax.tree.map(place, batch)


def _row_shards_by_process(
    sharding: NamedSharding, row_shards: int, token_shards: int
) -> dict[int, tuple[int, ...]]:
    """Which parts of B the devices of each process hold."""
    places = sharding.devices_indices_map((row_shards, token_shards))
    held: dict[int, set[int]] = {}
    for device, (rows, _) in places.items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(row_shards)))
    return {process: tuple(sorted(parts)) for process, parts in held.items()}


def _wrong_shape(
    batch: Batch,
    split: int,
    row_axes: tuple[str, ...],
    token_shards: int,
    token_axes: tuple[str, ...],
    hint: bool,
) -> str | None:
    """What is wrong with the arrays' shapes, or None; ``hint``: rows may be meant as local."""
    leaves = jax.tree.leaves(batch)
    for leaf in leaves:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(kind, str) or np.dtype(kind).kind not in "biufV":
            return f"batch holds a leaf of {kind}: it must hold arrays of numbers"
    shapes = {np.shape(leaf) for leaf in leaves}
    if len(shapes) != 1 or len(min(shapes)) != 2:
        return f"batch has arrays of shapes {sorted(shapes)}: they must all have one shape [B, T]"
    ((rows, length),) = shapes
    if length % token_shards:
        return (
            f"batch has length T {length}: it must be a multiple of {token_shards}, the size of "
            f"mesh axes {token_axes}; make_batch(..., multiple_of={token_shards}) pads to it, "
            "and its num_shards stays the ring's size"
        )
    if rows % split:
        return (
            f"batch has {rows} rows: they must be a multiple of {split}, the parts of mesh axes "
            f"{row_axes} that they are for"
            + "; rows that are this process's own need process_local=True"
            * hint
        )
    return None


def _check_processes(
    mesh: Mesh,
    batch: Batch,
    wrong: str | None,
    split: int,
    of_process: dict[int, tuple[int, ...]],
    process_local: bool,
) -> None:
    """Raises on every process unless all processes' batches fit together."""
    leaves, tree = jax.tree.flatten(batch)
    arrays = [np.asarray(leaf) for leaf in leaves]
    kinds = [(str(x.dtype), *(size / split for size in x.shape[:1]), x.shape[1:]) for x in arrays]
    form = repr((str(tree), kinds, wrong)).encode()
    contents = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays)
    words = np.concatenate([_hash([form]), _hash(contents)])
    said: dict[int, tuple[int, ...]] = {}
    for device, row in zip(mesh.devices.flat, _of_all_devices(words, mesh), strict=True):
        said[device.process_index] = tuple(row.tolist())
    if len({words[:2] for words in said.values()}) > 1:
        rows = "for each of its parts of the batch axis" if process_local else "as all others"
        raise ValueError(
            wrong
            or "batch has other names, dtypes or sizes on another process: every process must pass "
            f"arrays of the same kind, and as many rows {rows}; make segment_ids on all processes "
            "or on none, and pad to the same length"
        )
    for parts in of_process.values():
        same = [other for other in said if not process_local or of_process[other] == parts]
        if len({said[other] for other in same}) == 1:
            continue
        if process_local:
            raise ValueError(
                f"batch differs between processes {same}, whose devices hold parts of the same "
                "rows: pass the same rows on all of them, or lay the mesh out so that each "
                "process holds its rows alone (the seq axis inside a process)"
            )
        raise ValueError(
            f"batch differs between processes {sorted(said)}: every process must pass the same "
            "whole batch; for rows that are the process's own, pass process_local=True"
        )


def _hash(parts: Iterable[Any]) -> np.ndarray:
    """64 bits as uint32 ``[2]``: devices have no wider integers by default."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return np.frombuffer(digest.digest(), np.uint32)


def _of_all_devices(words: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Every device's process's words, ``[devices, words]``, in the mesh's order, on all processes.

    ``multihost_utils.process_allgather`` does it for all processes that there are; here only those
    with devices of this mesh take part.
    """
    flat = Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(flat, spec) for spec in (PartitionSpec("all"), PartitionSpec()))
    shape = flat.size, words.size
    given = jax.make_array_from_callback(shape, split, lambda _: words[None])
    return np.asarray(jax.device_put(given, whole))
