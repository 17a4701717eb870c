"""``DocumentTables``: what attention needs to know of a balanced batch's documents, from the host.

On each device the attention needs to know which tokens are of split documents, in which order the
keys of all gathered zones are sorted, and which range of them each query attends to
(:mod:`burst_jax.ring.gathered`). All of it follows from the batch's segment ids and positions and
is the same in every layer. It is computed once per batch here, in NumPy. Without the tables every
layer searches for the same numbers on the devices, in each pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from burst_jax.errors import check_integer, shown
from burst_jax.layouts.balanced_layout import Balanced
from burst_jax.layouts.checksums import checksums
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.run_tables import (
    RUN_DIMENSIONS,
    RunTables,
    is_on_several_shards,
    run_tables,
)
from burst_jax.parallel.mesh import AxisNames
from pallas_kernels.arrays import as_int32

# What is gathered at once, a slice of every zone, has at most as many tokens as this many shards.
MOST_SHARDS = 2
_INT32 = np.iinfo(np.int32)
# (left, right) of a mask: how many positions before and after a query's it attends to.
Sides = tuple[int | None, int | None]


class MaskTables(NamedTuple):
    """The tables of one mask: of all devices, or of one inside a ``shard_map``.

    B sequences, T tokens, n shards, s slices of the gathered zone, z its tokens per shard.

    Attributes:
      checksums: uint32 ``[B, n]``, of the segment ids and positions of every shard
        (:func:`checksums`).
      is_split: bool ``[B, T]``, whether the token's document is on several shards; None if the
        devices gather nothing.
      gather_order: int32 ``[B, 2, n z]``: slice after slice of all zones, the index of the token at
        each place of the sorted slice, and the place of each token; None with ``is_split``.
      kv_ranges: int32 ``[B, s, 2, T]``, the first key and the exclusive end of each query's keys in
        each sorted slice, 0 if its document is not split; None with ``is_split``.
      own_ranges: int32 ``[B, 2, T]``, the same for the keys of its own shard; None if kernels need
        no range there.
    """

    checksums: Any
    is_split: Any
    gather_order: Any
    kv_ranges: Any
    own_ranges: Any

    def with_tokens(self, function: Callable[[Any], Any]) -> Self:
        """The tables, with ``function`` applied to those of shape ``[..., T]``."""
        names = ("is_split", "kv_ranges", "own_ranges")
        changed = {name: jax.tree.map(function, getattr(self, name)) for name in names}
        return self._replace(**changed)


# The mesh dimensions of each table, in the letters of burst_jax.attention.validation.ARRAYS.
DIMENSIONS = {
    "checksums": "B n",
    "is_split": "B T",
    "gather_order": "B o z",
    "kv_ranges": "B s e T",
    "own_ranges": "B e T",
    **RUN_DIMENSIONS,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DocumentTables:
    """The tables of a batch, for the argument ``document_tables`` of attention and models.

    :func:`burst_jax.training.make_batch` makes them for a balanced layout, :func:`document_tables`
    for a loop of your own. They are a pytree of arrays whose first dimension is the batch, and a
    part of the batch: a sequence whose tables are those of other documents becomes NaN.

    Attributes:
      layout: the name of the layout, static.
      num_shards: n, static.
      masks: the names (:func:`mask_name`) of the masks that there are tables of, static.
      checksums: see :class:`MaskTables`, like all that follow.
      is_split: bool ``[B, T]``, or None.
      gather_order: int32 ``[B, 2, n z]``, or None.
      kv_ranges: of each mask by :func:`mask_name`; empty without a gathered zone.
      own_ranges: the same, for the masks that need one.
      run_checksums: see :class:`burst_jax.layouts.run_tables.RunTables`, like the next two; None
        unless they are requested, for linear attention.
      runs: int32 ``[B, 3, n R]``, or None.
      run_order: int32 ``[B, 3, n R]``, or None.
    """

    layout: str = dataclasses.field(metadata={"static": True})
    num_shards: int = dataclasses.field(metadata={"static": True})
    masks: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    checksums: Any
    is_split: Any
    gather_order: Any
    kv_ranges: dict[str, Any]
    own_ranges: dict[str, Any]
    run_checksums: Any = None
    runs: Any = None
    run_order: Any = None

    def of_mask(self, name: str) -> MaskTables:
        """The tables of one of :attr:`masks`."""
        return MaskTables(
            self.checksums,
            self.is_split,
            self.gather_order,
            self.kv_ranges.get(name),
            self.own_ranges.get(name),
        )

    def of_runs(self) -> RunTables | None:
        """The tables of linear attention; None if there are none."""
        if self.run_checksums is None:
            return None
        return RunTables(self.run_checksums, self.runs, self.run_order)

    def specs(self, batch_axis: AxisNames, seq_axis: AxisNames) -> DocumentTables:
        """The sharding of each table: the batch, and the tokens of those that have T."""
        axes = {"B": batch_axis or None, "T": seq_axis or None}

        def spec(path: Any, _: Any) -> PartitionSpec:
            return PartitionSpec(*map(axes.get, DIMENSIONS[path[0].name].split()))

        return jax.tree_util.tree_map_with_path(spec, self)


def zone_slices(zone: int, num_shards: int, shard_length: int) -> list[slice]:
    """The slices of every shard's gathered zone that devices gather one after the other."""
    count = min(zone, -(-num_shards * zone // (MOST_SHARDS * shard_length)))
    edges = [zone * i // count for i in range(count + 1)] if count else []
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def mask_name(left: int | None, right: int | None) -> str:
    """The name of a mask among tables: ":0" is causal, "511:0" a causal window."""
    return ":".join("" if side is None else str(side) for side in (left, right))


def needs_own_ranges(left: int | None, right: int | None) -> bool:
    """Whether kernels need per-query KV bounds on a shard, where positions are indices.

    The pieces of a document are farther apart in the sequence than in the shard, so indices do not
    show which keys are inside a window.
    """
    return left is not None or right not in (None, 0)


def document_tables(
    layout: LayoutLike,
    segment_ids: np.ndarray,
    positions: np.ndarray,
    num_shards: int,
    *,
    is_causal: bool = True,
    local_window_sizes: Sequence[Any] = (None,),
    linear_attention: bool = False,
    agree: Callable[[int], int] = int,
) -> DocumentTables:
    """The tables of a balanced batch, in NumPy.

    Args:
      layout: the layout of the batch, ``"balanced:z"``.
      segment_ids: integers ``[B, T]`` in the layout's order, 0 for padding, as the attention gets
        them.
      positions: integers ``[B, T]``, the same.
      num_shards: number of shards on the ring, n.
      is_causal: as of the attention.
      local_window_sizes: the windows of all layers, each an argument ``local_window_size`` of
        :func:`burst_jax.burst_attention`, without arrays. None at all for a model without softmax
        attention.
      linear_attention: whether there are tables for linear attention, too.
      agree: as of :meth:`burst_jax.layouts.Layout.order_of`, for the number of runs of a shard, on
        which the shape of the tables for linear attention depends.

    Returns:
      The :class:`DocumentTables`.

    Raises:
      ValueError: a fixed layout, arrays of another shape or dtype, or documents in another order
        than that of a placement with this gathered zone.
    """
    parsed = parse_layout(layout)
    if not isinstance(parsed, Balanced):
        raise ValueError(
            f"layout is {parsed!r}: only a balanced layout has document tables; leave them out"
        )
    n, zone = check_integer("num_shards", num_shards, 1), parsed.known_zone
    segment_ids, positions = np.asarray(segment_ids), np.asarray(positions)
    if segment_ids.ndim != 2 or not len(segment_ids) or positions.shape != segment_ids.shape:
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape}, positions {positions.shape}: both must be "
            "[B, T]"
        )
    ids = as_int32("segment_ids", segment_ids)
    positions = as_int32("positions", positions)
    parsed.check_length(ids.shape[1], n, "the length of segment_ids")
    if not isinstance(local_window_sizes, (list, tuple)):
        raise ValueError(
            f"local_window_sizes is {shown(local_window_sizes)}: it must be a list or a tuple of "
            "windows, those of all layers"
        )
    masks = [_sides(window, is_causal) for window in local_window_sizes]
    kernels = dict.fromkeys(mask for mask in masks if needs_own_ranges(*mask))
    slices = zone_slices(zone, n, ids.shape[1] // n) if n > 1 else []
    sequences = list(_rows(ids, positions))
    rows = [
        _tables_of_row(row, n, zone, slices, list(dict.fromkeys(masks)), list(kernels))
        for row in sequences
    ]
    _check_placed(parsed, [row["contradicts"] for row in rows])

    def stacked(name: str) -> Any:
        return jax.tree.map(lambda *x: np.stack(x), *(row[name] for row in rows))

    runs: RunTables | tuple[()] = ()
    if linear_attention:
        runs = run_tables(ids, np.stack([row.keys for row in sequences]), n, zone, agree)
    by_shard = (len(ids), n, -1)
    return DocumentTables(
        layout=parsed.name,
        num_shards=n,
        masks=tuple(sorted({mask_name(*mask) for mask in masks})),
        checksums=checksums(ids.reshape(by_shard), positions.reshape(by_shard), np),
        is_split=stacked("is_split") if slices else None,
        gather_order=stacked("gather_order") if slices else None,
        kv_ranges=stacked("kv_ranges"),
        own_ranges=stacked("own_ranges"),
        **(runs._asdict() if runs else {}),
    )


def _sides(window: Any, is_causal: bool) -> Sides:
    """``(left, right)`` of a mask."""
    left, right = window if isinstance(window, tuple) and len(window) == 2 else (window, window)
    for side in (left, right):
        is_int = isinstance(side, (int, np.integer)) and not isinstance(side, bool)
        if side is not None and not (is_int and 0 <= side < 2**31):
            raise ValueError(
                f"local_window_sizes holds {shown(window)}: each must be None, an int from 0 to "
                "2**31 - 1, or a pair (left, right) of them, as the attention's local_window_size"
            )
    return None if left is None else int(left), 0 if is_causal else right


class _Row(NamedTuple):
    """One sequence.

    Attributes:
      ids: int32 ``[T]``.
      positions: int32 ``[T]``.
      keys: int64 ``[T]``, sort keys (not keys of attention): ascending by document and position,
        with padding last.
    """

    ids: np.ndarray
    positions: np.ndarray
    keys: np.ndarray

    def key_at(self, positions: np.ndarray) -> np.ndarray:
        """The sort keys of other positions in the tokens' documents, clipped to int32."""
        return _keys(self.ids, np.clip(positions, _INT32.min, _INT32.max))

    def limits(self, mask: Sides) -> np.ndarray:
        """``[2, T]``: sort keys of the first position that each query attends to, and the end."""
        left, right = mask
        positions = self.positions.astype(np.int64)
        first = np.full_like(positions, _INT32.min) if left is None else positions - left
        end = np.full_like(positions, _INT32.max) if right is None else positions + right + 1
        return np.stack([self.key_at(first), self.key_at(end)])


def _rows(ids: np.ndarray, positions: np.ndarray) -> Iterable[_Row]:
    return (_Row(*row, _keys(*row)) for row in zip(ids, positions, strict=True))


def _keys(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    is_padding = ids == 0
    # Ids from 1 to 2^31 - 1, and padding after all of them.
    document = np.where(is_padding, _INT32.max, ids - 1).astype(np.int64)
    return (document << 32) + np.where(is_padding, 0, positions.astype(np.int64) - _INT32.min)


def _tables_of_row(
    row: _Row, n: int, zone: int, slices: list[slice], masks: list[Sides], own: list[Sides]
) -> dict[str, Any]:
    """The tables of one sequence, and whether it contradicts the layout."""
    by_shard = row.keys.reshape(n, -1)
    in_zone = np.arange(by_shard.shape[1]) >= by_shard.shape[1] - zone
    several = is_on_several_shards(row.ids, n)
    outside = (several.reshape(n, -1) & ~in_zone).any()
    is_split = several & bool(slices)
    limits = {mask: row.limits(mask)[:, is_split] for mask in masks if slices}
    order, places, ranges = [], [], {mask_name(*mask): [] for mask in masks if slices}
    for part in slices:
        keys = by_shard[:, in_zone][:, part].reshape(-1)
        ranked = np.argsort(keys, kind="stable")
        place = np.empty_like(ranked)
        place[ranked] = np.arange(len(ranked))
        order.append(ranked)
        places.append(place)
        for mask in masks:
            found = np.zeros((2, len(row.ids)), np.int32)
            found[:, is_split] = np.searchsorted(keys[ranked], limits[mask])
            ranges[mask_name(*mask)].append(found)
    return {
        "contradicts": bool(outside or (np.diff(by_shard, axis=1) < 0).any()),
        "is_split": is_split,
        "gather_order": _int32(map(np.concatenate, (order, places))) if slices else None,
        "kv_ranges": {name: _int32(found) for name, found in ranges.items()},
        "own_ranges": {mask_name(*mask): _own_ranges(row, by_shard, mask) for mask in own},
    }


def _int32(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.stack(list(arrays)).astype(np.int32)


def _own_ranges(row: _Row, by_shard: np.ndarray, mask: Sides) -> np.ndarray:
    """:attr:`MaskTables.own_ranges` of one sequence, int32 ``[2, T]``."""
    limits = row.limits(mask).reshape(2, *by_shard.shape).swapaxes(0, 1)
    found = [np.searchsorted(*each) for each in zip(by_shard, limits, strict=True)]
    return np.where(row.ids == 0, 0, np.concatenate(found, 1)).astype(np.int32)


def _check_placed(layout: Balanced, contradicts: list[bool]) -> None:
    """Raises ValueError if a sequence is not in the order of a placement."""
    if any(contradicts):
        raise ValueError(
            f"segment_ids and positions of row {contradicts.index(True)} are in another order than "
            f"that of layout {layout!r}: pass those of a batch of make_batch or balance_batch, "
            "with the layout that it returned and its num_shards"
        )
