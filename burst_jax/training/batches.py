"""From rows of token ids to a batch: shifted, padded, permuted on the host, put onto a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypedDict

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from burst_jax.errors import check_integer
from burst_jax.layouts.permutation import Layout, pad_to_layout, to_layout
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    check_axes,
    check_has_devices,
    flat_names,
    token_spec,
)
from burst_jax.parallel.rules import ShardingRules, check_rules
from pallas_kernels.arrays import as_int32


class Batch[Array: (np.ndarray, jax.Array)](TypedDict):
    """A next-token batch in the order of a layout, each entry ``[B, T]``: see :func:`make_batch`.

    ``Batch[np.ndarray]`` is on the host, ``Batch[jax.Array]`` on a mesh.

    Attributes:
      inputs: int32, token ids.
      targets: int32, the token id that follows each input.
      positions: int32, index of each token in its row.
      weights: float32, 1 where the target counts in the loss, else 0. Change them as you like: the
        loss is the weighted mean.
      segment_ids: int32, 0 for padding; None if there is no padding and one segment a row.
    """

    inputs: Array
    targets: Array
    positions: Array
    weights: Array
    segment_ids: Array | None


# Each (mesh, process_local) for which place_batch has compared the processes' batches.
_COMPARED: set[tuple[Mesh, bool]] = set()


def make_batch(
    rows: np.ndarray,
    *,
    layout: Layout = "contiguous",
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
    multiple_of: int = 1,
) -> Batch[np.ndarray]:
    """Makes a next-token batch from rows of T + 1 tokens.

    Targets are shifted first, while the next token still stands beside each token. Then all arrays
    are padded to a length that the layout can split, and permuted together::

        rows      a b c d e          inputs   a b c d     targets  b c d e
        zigzag, 2 shards             inputs   a d b c     targets  b e c d

    Args:
      rows: integers ``[B, T + 1]``.
      layout: order of the tokens, see :func:`burst_jax.to_layout`.
      num_shards: number of shards on the ring, see :func:`burst_jax.positions`.
      segment_ids: integers ``[B, T + 1]``, 0 for padding; None is one segment per row, no padding.
        Count documents from 1. Where another library counts them from 0, add 1: otherwise each
        row's first document would be padding, which nothing attends to and no loss counts.
      multiple_of: a second number that must divide the padded length, as in
        :func:`burst_jax.pad_to_layout`; with a ``ulysses_axis`` it is the number of devices
        on the ring and on that axis together.

    Returns:
      A dict of NumPy arrays ``[B, T_padded]`` in ``layout``:

      - ``inputs``, ``targets``: int32.
      - ``positions``: int32, the index in the row. It does not restart with a segment, because RoPE
        depends on differences of positions only.
      - ``segment_ids``: int32, 0 for padding; None if there is no padding and no ``segment_ids``
        were given.
      - ``weights``: float32, 1 where the target counts, else 0. A target counts if it and its token
        are of one segment other than 0.

    Raises:
      ValueError: rows of another rank or dtype or shorter than 2, negative token ids or such that
        int32 cannot hold, segment ids of another shape or dtype, an unknown layout.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ValueError(f"rows has shape {rows.shape}: it needs [B, T + 1] with T at least 1")
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows has dtype {rows.dtype}: token ids are integers")
    rows = as_int32("rows", rows)
    if rows.min(initial=0) < 0:
        raise ValueError(
            f"rows holds token id {rows.min()}: ids count from 0; for padding use any id and "
            "segment id 0"
        )
    if segment_ids is not None:
        segment_ids = np.asarray(segment_ids)
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
    arrays: dict[str, np.ndarray] = {
        "inputs": rows[:, :-1].astype(np.int32),
        "targets": rows[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length)),
        "weights": weights,
    }
    arrays, padded_segments = pad_to_layout(
        arrays, layout, num_shards, segments, multiple_of=multiple_of
    )
    needed = segments is not None or padded_segments.shape[1] != length
    batch: Batch[np.ndarray] = {
        "inputs": arrays["inputs"],
        "targets": arrays["targets"],
        "positions": arrays["positions"],
        "weights": arrays["weights"],
        "segment_ids": np.asarray(padded_segments) if needed else None,
    }
    return to_layout(batch, layout, num_shards)


def place_batch(
    batch: Any,
    mesh: Mesh,
    *,
    rules: ShardingRules | None = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    process_local: bool = False,
) -> Any:
    """Puts a batch of ``[B, T]`` host arrays onto the mesh: every device gets its own tokens only.

    With several processes there are two ways to pass a batch, and ``process_local`` says which::

        2 processes of 4 devices, mesh ("data", "seq") of (2, 4), batch_axis="data", B = 4 rows

                        process 0 passes    process 1 passes
        False           rows 0 1 2 3        rows 0 1 2 3        each copies its devices' part
        True            rows 0 1            rows 2 3            a loader per process

    A row is always passed whole, with all its T tokens, because its layout was made of the whole
    row. So processes whose devices share rows (the seq axis goes through both) pass the same rows
    in both ways.

    Passing a batch in the other way than ``process_local`` says would train on the wrong rows
    unnoticed. So with several processes the first call for a mesh and a value of ``process_local``
    compares a hash of the batches between processes. That is a collective of a few bytes: every
    process that has devices of the mesh must make this call, in the same order among its other
    programs (not in a loader's thread while a step is started), and it waits until the devices have
    finished the programs that they were given before. Later calls compare nothing, so they may come
    from any thread.

    Args:
      batch: what :func:`make_batch` returns, or any pytree of arrays ``[B, T]``.
      mesh: the mesh to put the arrays on.
      rules: the decoder's, which say both axes: leave ``seq_axis`` and ``batch_axis`` out.
      seq_axis: mesh axis, or axes, that T is split over, or None. With a ``ulysses_axis`` it
        includes that axis, which the ``num_shards`` of :func:`make_batch` does not count.
      batch_axis: mesh axis, or axes, that B is split over, or None.
      process_local: False: every process passes the same whole batch. True: every process passes
        the rows that its own devices hold, in the order of the mesh; B is the number of rows of all
        processes together.

    Returns:
      The batch with every array as a global ``jax.Array`` ``[B, T]``, in its dtype.

    Raises:
      ValueError: arrays that are not all ``[B, T]``, axes that the mesh lacks, B or T that they do
        not divide, axes beside ``rules``, or processes whose batches do not fit together.
    """
    mesh = check_has_devices(mesh)
    if rules is not None:
        _refuse_beside_rules(seq_axis=(seq_axis, "seq"), batch_axis=(batch_axis, None))
        check_rules(rules).check_mesh(mesh)
        seq_axis, batch_axis = rules.seq, rules.batch_axes
    check_axes(mesh, {"seq_axis": seq_axis, "batch_axis": batch_axis})
    sharding = NamedSharding(mesh, token_spec(batch_axis, seq_axis))
    row_axes, token_axes = flat_names(batch_axis), flat_names(seq_axis)
    row_shards, token_shards = axes_size(mesh, row_axes), axes_size(mesh, token_axes)
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


def rows_here(
    mesh: Mesh, batch: int, *, rules: ShardingRules | None = None, batch_axis: AxisNames = None
) -> list[int]:
    """Which rows of a batch the devices of this process hold, for a loader that makes these alone.

    Pass what it makes to :func:`place_batch` with ``process_local=True``. Processes whose devices
    share rows, because the sequence axis goes through both, get the same ones.

    Args:
      mesh: the mesh of the batch.
      batch: number of rows, on all devices together.
      rules: the decoder's, which say the axes: leave ``batch_axis`` out.
      batch_axis: mesh axis, or axes, that the rows are split over, or None.

    Returns:
      Row numbers, ascending.

    Raises:
      ValueError: the mesh lacks the axes, they do not divide the rows, or they are given beside
        ``rules``.
    """
    mesh, batch = check_has_devices(mesh), check_integer("batch", batch, 1)
    if rules is not None:
        _refuse_beside_rules(batch_axis=(batch_axis, None))
        check_rules(rules).check_mesh(mesh)
        batch_axis = rules.batch_axes
    check_axes(mesh, {"batch_axis": batch_axis})
    split = axes_size(mesh, batch_axis)
    if batch % split:
        raise ValueError(
            f"batch is {batch}: it must be a multiple of {split}, the size of mesh axes "
            f"{flat_names(batch_axis)}"
        )
    sharding = NamedSharding(mesh, PartitionSpec(batch_axis or None))
    parts = _row_shards_by_process(sharding, split)[jax.process_index()]
    rows = batch // split
    return [row for part in parts for row in range(part * rows, (part + 1) * rows)]


def _refuse_beside_rules(**given: tuple[AxisNames, AxisNames]) -> None:
    """Raises ValueError for an argument, given as (value, default), that rules say as well."""
    for name, (axes, default) in given.items():
        if axes != default:
            raise ValueError(f"{name} is {axes!r} beside rules: the rules say it; leave it out")


def _row_shards_by_process(
    sharding: NamedSharding, row_shards: int, token_shards: int | None = None
) -> dict[int, tuple[int, ...]]:
    """For each process the parts of B that its devices hold, out of ``row_shards`` parts."""
    shape = (row_shards,) if token_shards is None else (row_shards, token_shards)
    held: dict[int, set[int]] = {}
    for device, (rows, *_) in sharding.devices_indices_map(shape).items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(row_shards)))
    return {process: tuple(sorted(parts)) for process, parts in held.items()}


def _wrong_shape(
    batch: Any,
    split: int,
    row_axes: tuple[str, ...],
    token_shards: int,
    token_axes: tuple[str, ...],
    hint: bool,
) -> str | None:
    """What is wrong with the arrays' shapes, or None if nothing is.

    With ``hint`` the message about too few rows mentions ``process_local=True``.
    """
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
    batch: Any,
    wrong: str | None,
    split: int,
    of_process: dict[int, tuple[int, ...]],
    process_local: bool,
) -> None:
    """Raises on every process unless all processes' batches fit together.

    Every process tells the others two hashes, of its batch's form (names, dtypes, shapes and what
    is wrong with them) and of its contents.
    """
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


def _hash(parts: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """64 bits as uint32 ``[2]``, because JAX has no wider integers by default."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return np.frombuffer(digest.digest(), np.uint32)


def _of_all_devices(words: np.ndarray, mesh: Mesh) -> np.ndarray:
    """For every device of the mesh the ``words`` of its process, on all processes.

    ``multihost_utils.process_allgather`` would need every process of the program; this needs only
    the processes that have devices of the mesh.

    Args:
      words: uint32 ``[words]``, what this process tells.
      mesh: the mesh.

    Returns:
      uint32 ``[devices, words]``, in the order of the mesh's devices.
    """
    flat = Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(flat, spec) for spec in (PartitionSpec("all"), PartitionSpec()))
    shape = flat.size, words.size
    given = jax.make_array_from_callback(shape, split, lambda _: words[None])
    return np.asarray(jax.device_put(given, whole))
