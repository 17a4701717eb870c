"""From token sequences to a sharded batch: shift, pad and permute on the host, then place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burst_jax.attention.arguments import WindowSize
from burst_jax.attention.validation import check_array, to_int32
from burst_jax.errors import MAX_BATCH, check_integer
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.permutation import pad_to_layout
from burst_jax.layouts.tables import DocumentTables, document_tables
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    check_axes,
    check_has_devices,
    flat_names,
    token_spec,
)
from burst_jax.parallel.processes import gather_json
from burst_jax.parallel.rules import ShardingRules, check_rules
from burst_jax.training.compare_batches import check_processes
from pallas_kernels.arrays import as_int32


class Batch[Array: (np.ndarray, jax.Array)](TypedDict):
    """A next-token batch: see :func:`make_batch`.

    Each entry is ``[B, T]`` in a layout's order, but for ``prefix_lengths``.

    ``Batch[np.ndarray]`` is on the host, ``Batch[jax.Array]`` on a mesh.

    Attributes:
      inputs: int32 token ids.
      targets: int32, the token id that follows each input.
      positions: int32, index of each token in its sequence.
      weights: float32, 1 where the target counts in the loss, else 0. The loss is the weighted
        mean, so you may change them.
      segment_ids: int32, 0 for padding; None if there is no padding and one segment per sequence.
      prefix_lengths: int32 ``[B]``, tokens of each sequence that all of its tokens attend to;
        missing without prefixes.
      document_tables: of a balanced layout, see :class:`burst_jax.layouts.DocumentTables`; missing
        in others.
    """

    inputs: Array
    targets: Array
    positions: Array
    weights: Array
    segment_ids: Array | None
    prefix_lengths: NotRequired[Array | None]
    document_tables: NotRequired[DocumentTables | None]


# Each (mesh, process_local) for which place_batch has compared the processes' batches.
_COMPARED: set[tuple[Mesh, bool]] = set()


@overload
def make_batch(
    rows: np.ndarray,
    *,
    layout: Literal["balanced"],
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
    prefix_lengths: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    multiple_of: int = 1,
    local_window_sizes: Sequence[WindowSize] = (None,),
    linear_attention: bool = False,
    process_local: bool = False,
) -> tuple[str, Batch[np.ndarray]]: ...


@overload
def make_batch(
    rows: np.ndarray,
    *,
    layout: LayoutLike = "contiguous",
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
    prefix_lengths: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    multiple_of: int = 1,
    local_window_sizes: Sequence[WindowSize] = (None,),
    linear_attention: bool = False,
    process_local: bool = False,
) -> Batch[np.ndarray]: ...


def make_batch(
    rows: np.ndarray,
    *,
    layout: LayoutLike = "contiguous",
    num_shards: int = 1,
    segment_ids: np.ndarray | None = None,
    prefix_lengths: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    multiple_of: int = 1,
    local_window_sizes: Sequence[WindowSize] = (None,),
    linear_attention: bool = False,
    process_local: bool = False,
) -> Batch[np.ndarray] | tuple[str, Batch[np.ndarray]]:
    """Makes a next-token batch from sequences of T + 1 tokens.

    Targets are shifted first, in natural order. Then all arrays are padded to a length that the
    layout supports, and permuted together::

        rows      a b c d e          inputs   a b c d     targets  b c d e
        zigzag, 2 shards             inputs   a d b c     targets  b e c d

    The layout ``"balanced"`` places every document by itself: short documents are whole on one
    device, long ones are split over all, so that all devices have the same work. The documents
    determine the layout, ``"balanced:z"``, so it is returned with the batch. z is the number of
    tokens per shard that devices gather, the largest that a sequence of the batch needs: one of at
    most six (:func:`burst_jax.layouts.zone_sizes`). Each is another layout of the model, so another
    program to compile::

        layout, batch = make_batch(rows, layout="balanced", num_shards=4, segment_ids=segment_ids)
        params, opt_state, metrics = train_step_of[layout](params, opt_state, place_batch(...))

    Args:
      rows: integers ``[B, T + 1]``, the sequences.
      layout: sequence permutation, see :func:`burst_jax.to_layout`; ``"balanced"``; or
        ``"balanced:z"``, for documents that fit in the gathered zone of another batch.
      num_shards: number of shards on the ring: the devices of ``seq_axis``, without those of a
        ``ulysses_axis`` or of batch axes.
      segment_ids: integers ``[B, T + 1]``, 0 for padding; None is one segment per sequence and no
        padding. Count documents from 1. If another library counts them from 0, add 1; otherwise
        each sequence's first document is padding, which nothing attends to and no loss counts.
      prefix_lengths: integers ``[B]``: the first tokens of each sequence are visible to all of its
        tokens (prefix LM). None is no prefix.
      weights: numbers ``[B, T + 1]``: the weight in the loss of predicting each token of ``rows``,
        like 0 in prompts; the first column is not used. None is 1.
      multiple_of: a second number that must divide the padded length, as in
        :func:`burst_jax.pad_to_layout`; with a ``ulysses_axis``, the number of devices on the ring
        and that axis together.
      local_window_sizes: the windows of the model's layers, for the tables of a balanced batch, as
        :attr:`burst_jax.models.DecoderConfig.local_window_sizes`: each as the attention's
        ``local_window_size``. Default: full causal attention alone. Other layouts have no tables.
      linear_attention: whether the model has linear-attention layers, which need tables of a
        balanced batch, too: :attr:`burst_jax.models.DecoderConfig.has_linear_attention`.
      process_local: whether every process passes only its own sequences, as in
        :func:`place_batch`. All devices run one program, so z of ``"balanced"`` then is the largest
        that a process needs, by a small collective (and so is the number of runs in the tables of
        linear attention): make the call on the main thread of all
        processes. Every other layout is the same on all of them.

    Returns:
      The batch; for the layout ``"balanced"`` the pair ``(layout, batch)``, with ``layout``
      ``"balanced:z"`` for the model. The batch is a dict of NumPy arrays, ``[B, T_padded]`` in the
      layout but for the last:

      - ``inputs``, ``targets``: int32.
      - ``positions``: int32, the index in the sequence. It does not restart with a segment, because
        RoPE depends only on differences of positions.
      - ``segment_ids``: int32, 0 for padding; None without padding and without ``segment_ids``. In
        a balanced layout documents have new ids, and there are always some.
      - ``weights``: float32, the argument of this name where the target and its input are in the
        same segment other than 0 and the target is not in the prefix, which its input attends to;
        else 0.
      - ``prefix_lengths``: int32 ``[B]``, if it is given.
      - ``document_tables``: in a balanced layout, :class:`burst_jax.layouts.DocumentTables` of
        causal attention with each of ``local_window_sizes``, and of linear attention.

    Raises:
      ValueError: ``rows`` has another rank or dtype, no row, fewer than 2 tokens, or ids that are
        negative or exceed int32; another argument has a wrong shape or dtype, or a prefix a
        negative length; the layout is unknown, or its gathered zone is too small for the documents.
      NotImplementedError: ``prefix_lengths`` with a balanced layout.
    """
    given = parse_layout(layout)
    rows, segment_ids = _check_sequences(rows, segment_ids)
    batch_size, length = rows.shape[0], rows.shape[1] - 1
    counts, segments = np.ones((batch_size, length), bool), None
    if prefix_lengths is not None:
        prefix_lengths = check_array(
            "prefix_lengths", np.asarray(prefix_lengths), {"B": batch_size}
        )
        if prefix_lengths.min() < 0:
            raise ValueError(
                f"prefix_lengths holds {prefix_lengths.min()}: a prefix has 0 tokens or more"
            )
        counts = np.arange(1, length + 1) >= prefix_lengths[:, None]
    if segment_ids is not None:
        segments, next_segments = segment_ids[:, :-1], segment_ids[:, 1:]
        counts = counts & (segments == next_segments) & (segments != 0)
    arrays: dict[str, np.ndarray] = {
        "inputs": rows[:, :-1].astype(np.int32),
        "targets": rows[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length)),
        "weights": np.where(counts, _target_weights(weights, rows.shape), np.float32(0)),
    }
    arrays, padded_segments = pad_to_layout(
        arrays, given, num_shards, segments, multiple_of=multiple_of
    )
    needed = segments is not None or padded_segments.shape[1] != length
    batch: Any = {**arrays, "segment_ids": np.asarray(padded_segments) if needed else None}
    if prefix_lengths is not None:
        batch["prefix_lengths"] = prefix_lengths
    agree = _largest_of_processes if process_local else int
    found, placed = given.place(batch, num_shards, agree)
    made: Any = placed
    if not found.is_fixed:
        own, n = (made["segment_ids"], made["positions"]), num_shards
        made["document_tables"] = document_tables(
            found, *own, n, local_window_sizes=local_window_sizes,
            linear_attention=linear_attention, agree=agree,
        )  # fmt: skip
    return made if found == given else (found.name, made)


def _largest_of_processes(own: int) -> int:
    return max(gather_json(own))


def _check_sequences(rows: Any, segment_ids: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """``rows`` and ``segment_ids`` of :func:`make_batch`, int32."""
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise ValueError(
            f"rows has shape {rows.shape}: it needs [B, T + 1] with B and T at least 1"
        )
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows has dtype {rows.dtype}: token ids are integers")
    rows = as_int32("rows", rows)
    if rows.min(initial=0) < 0:
        raise ValueError(
            f"rows holds token id {rows.min()}: ids count from 0; for padding use any id and "
            "segment id 0"
        )
    if segment_ids is None:
        return rows, None
    segment_ids = np.asarray(segment_ids)
    if segment_ids.shape != rows.shape:
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape}, rows {rows.shape}: they must be equal"
        )
    return rows, to_int32("segment_ids", segment_ids, "id")


def _target_weights(weights: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The argument ``weights`` of :func:`make_batch` by targets, float32 ``[B, T]``."""
    if weights is None:
        weights = np.ones(shape, np.float32)
    weights = np.asarray(weights)
    if weights.shape != shape or weights.dtype.kind not in "biuf":
        raise ValueError(
            f"weights has shape {weights.shape} and dtype {weights.dtype}: it needs one number "
            f"per token of rows, {shape}, of which the first column is not used"
        )
    weights = weights[:, 1:].astype(np.float32)
    if not np.isfinite(weights).all() or weights.min(initial=0) < 0:
        raise ValueError("weights holds a number that is negative or not finite")
    return weights


def place_batch(
    batch: Any,
    mesh: Mesh,
    *,
    rules: ShardingRules | None = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    process_local: bool = False,
) -> Any:
    """Shards host arrays ``[B, T]`` and ``[B]`` over the mesh; each device gets its own tokens.

    With several processes, ``process_local`` selects what each one passes::

        2 processes of 4 devices, mesh ("data", "seq") of (2, 4), batch_axis="data", B = 4

                        process 0 passes       process 1 passes
        False           sequences 0 1 2 3      sequences 0 1 2 3      each keeps its devices' part
        True            sequences 0 1          sequences 2 3          one loader per process

    Sequences are passed whole, because the layout permutes the whole sequence. Processes that hold
    parts of the same sequences pass the same arrays in both modes.

    The wrong mode would silently train on the wrong sequences. So with several processes the first
    call for each mesh and ``process_local`` compares hashes of the batches, in a small collective:
    every process with devices of the mesh must make this call, in the same order relative to its
    other programs, not in a loader thread. Later calls may come from any thread.

    Args:
      batch: a batch of :func:`make_batch`, or any pytree of arrays ``[B, T]`` and ``[B]``, and of
        :class:`burst_jax.layouts.DocumentTables`.
      mesh: mesh of the result.
      rules: the decoder's sharding rules, which define both axes; then leave ``seq_axis`` and
        ``batch_axis`` out.
      seq_axis: mesh axis, or axes, that shard T, or None. With a ``ulysses_axis`` it includes that
        axis, which the ``num_shards`` of :func:`make_batch` does not count.
      batch_axis: mesh axis, or axes, that shard B, or None.
      process_local: False: every process passes the same whole batch. True: every process passes
        the sequences that its own devices hold, in mesh order; B is the total over processes.

    Returns:
      The batch with every array as a global ``jax.Array`` of the same dtype.

    Raises:
      ValueError: arrays that are not ``[B, T]`` or ``[B]``, axes that the mesh lacks or that do not
        divide B or T, axes in addition to ``rules``, or processes whose batches do not fit
        together.
    """
    mesh = check_has_devices(mesh)
    if rules is not None:
        _check_rules(mesh, rules, seq_axis=(seq_axis, "seq"), batch_axis=(batch_axis, None))
        seq_axis, batch_axis = rules.seq, rules.batch_axes
    check_axes(mesh, {"seq_axis": seq_axis, "batch_axis": batch_axis})
    sharding = NamedSharding(mesh, token_spec(batch_axis, seq_axis))
    batch_axes, token_axes = flat_names(batch_axis), flat_names(seq_axis)
    batch_shards, token_shards = axes_size(mesh, batch_axes), axes_size(mesh, token_axes)
    held = _batch_shards_by_process(sharding, batch_shards, token_shards)
    own = held.get(jax.process_index(), ())
    if process_local and not own:
        raise ValueError(
            f"process_local is True, but process {jax.process_index()} has no device of the mesh: "
            "only processes with devices of the mesh have sequences of their own"
        )
    shards = len(own) if process_local else batch_shards
    several = len(held) > 1
    hint = several and not process_local
    error = _shape_error(batch, shards, batch_axes, token_shards, token_axes, hint)
    if own and several and (mesh, process_local) not in _COMPARED:
        # Before this process raises on its own, or the others would wait for it forever.
        check_processes(mesh, batch, error, shards, held, process_local)
        _COMPARED.add((mesh, process_local))
    if error is not None:
        raise ValueError(error)

    def place(x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        own = NamedSharding(mesh, spec)
        if process_local:
            shape = x.shape[0] // shards * batch_shards, *x.shape[1:]
            return jax.make_array_from_process_local_data(own, x, shape)
        return jax.make_array_from_callback(x.shape, own, lambda index: x[index], dtype=x.dtype)

    return jax.tree.map(place, batch, batch_specs(batch, batch_axis, seq_axis))


def batch_specs(batch: Any, batch_axis: AxisNames, seq_axis: AxisNames) -> Any:
    """The sharding of each array of a batch, as :func:`place_batch` shards it."""
    spec = token_spec(batch_axis, seq_axis)

    def of_leaf(x: Any) -> Any:
        return x.specs(batch_axis, seq_axis) if _is_tables(x) else PartitionSpec(*spec[: x.ndim])

    return jax.tree.map(of_leaf, batch, is_leaf=_is_tables)


def _is_tables(x: Any) -> bool:
    return isinstance(x, DocumentTables)


def rows_here(
    mesh: Mesh, batch: int, *, rules: ShardingRules | None = None, batch_axis: AxisNames = None
) -> list[int]:
    """Batch indices that this process' devices hold, for a loader that makes only these.

    Pass the loader's batches to :func:`place_batch` with ``process_local=True``. If the sequence
    axis spans processes, those processes get the same indices.

    Args:
      mesh: mesh of the batch.
      batch: global batch size, at most 1,048,576.
      rules: the decoder's sharding rules, which define the axes; then leave ``batch_axis`` out.
      batch_axis: mesh axis, or axes, that shard B, or None.

    Returns:
      Batch indices, ascending.

    Raises:
      ValueError: the mesh lacks the axes, they do not divide the batch, or ``batch_axis`` is given
        in addition to ``rules``.
    """
    mesh, batch = check_has_devices(mesh), check_integer("batch", batch, 1, MAX_BATCH)
    if rules is not None:
        _check_rules(mesh, rules, batch_axis=(batch_axis, None))
        batch_axis = rules.batch_axes
    check_axes(mesh, {"batch_axis": batch_axis})
    shards = axes_size(mesh, batch_axis)
    if batch % shards:
        raise ValueError(
            f"batch is {batch}: it must be a multiple of {shards}, the size of mesh axes "
            f"{flat_names(batch_axis)}"
        )
    sharding = NamedSharding(mesh, PartitionSpec(batch_axis or None))
    own = _batch_shards_by_process(sharding, shards)[jax.process_index()]
    size = batch // shards
    return [index for shard in own for index in range(shard * size, (shard + 1) * size)]


def _check_rules(mesh: Mesh, rules: Any, **given: tuple[AxisNames, AxisNames]) -> None:
    """Also raises ValueError for arguments, given as (value, default), that rules define."""
    for name, (axes, default) in given.items():
        if axes != default:
            raise ValueError(
                f"{name} is {axes!r} in addition to rules, which define it: leave it out"
            )
    check_rules(rules).check_mesh(mesh)


def _batch_shards_by_process(
    sharding: NamedSharding, batch_shards: int, token_shards: int | None = None
) -> dict[int, tuple[int, ...]]:
    """Process index -> which of the ``batch_shards`` shards of B its devices hold."""
    shape = (batch_shards,) if token_shards is None else (batch_shards, token_shards)
    held: dict[int, set[int]] = {}
    for device, (shards, *_) in sharding.devices_indices_map(shape).items():
        held.setdefault(device.process_index, set()).update(range(*shards.indices(batch_shards)))
    return {process: tuple(sorted(shards)) for process, shards in held.items()}


def _shape_error(
    batch: Any,
    shards: int,
    batch_axes: tuple[str, ...],
    token_shards: int,
    token_axes: tuple[str, ...],
    hint: bool,
) -> str | None:
    """Message about arrays of wrong shapes, or None; ``hint`` mentions ``process_local=True``."""
    nodes = jax.tree.leaves(batch, is_leaf=_is_tables)
    leaves = [x.checksums[:, 0] if _is_tables(x) else x for x in nodes]
    for leaf in leaves:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(kind, str) or np.dtype(kind).kind not in "biufV":
            return f"batch holds a leaf of {kind}: it must hold arrays of numbers"
    shapes = {np.shape(leaf) for leaf in leaves}
    of_tokens = {shape for shape in shapes if len(shape) != 1}
    if len(of_tokens) != 1 or not all(len(x) == 2 and shapes <= {x, x[:1]} for x in of_tokens):
        return (
            f"batch has arrays of shapes {sorted(shapes)}: they must all have one shape [B, T], or "
            "[B] (prefix_lengths)"
        )
    ((size, length),) = of_tokens
    if length % token_shards:
        return (
            f"batch has length T {length}: it must be a multiple of {token_shards}, the size of "
            f"mesh axes {token_axes}; make_batch(..., multiple_of={token_shards}) pads to it, "
            "and its num_shards stays the ring's size"
        )
    if size % shards:
        return (
            f"batch has {size} sequences: use a multiple of {shards}, the shards of mesh axes "
            f"{batch_axes}" + "; sequences of this process alone need process_local=True" * hint
        )
    return None
