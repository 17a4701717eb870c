"""The user's batch: its sequence dimension, its layout, its place on a mesh, its segment ids."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import LAYOUTS, LayoutLike, layout_of, parse_layout
from burst_jax.layouts.tables import DocumentTables
from burst_jax.parallel.mesh import axes_size

_POSITIONS = ("position", "pos_id")
_SEGMENTS = ("segment", "seg_id", "doc")
_WEIGHTS = ("weight", "loss_mask", "mask")


def path_name(path: Any) -> str:
    """A path of a pytree as text: "layers.0.attention.query.kernel"."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    while len(parts) > 1 and parts[-1] in ("value", "raw_value"):
        parts.pop()
    return ".".join(parts)


def group_of(name: str) -> str:
    """The module of a parameter: its path, also "layer0/query", without a last part in letters."""
    found = re.fullmatch(r"(.+)[./]([^./]*[^./0-9][^./]*)", name)
    return found[1] if found else name


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf of a pytree."""
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The batch size B and the length T of a batch."""

    batch: int
    length: int

    def dimension(self, shape: tuple[int, ...]) -> int | None:
        """The sequence dimension of an array of this shape; None if it has none."""
        if len(shape) >= 2:
            return 1 if shape[1] == self.length else None
        return 0 if shape == (self.length,) and self.length != self.batch else None


def sizes_of(batch: Any, num_shards: int, layout: Layout) -> Sizes:
    """B and T of a batch in natural order.

    Raises:
      ValueError: there is no array ``[B, T, ...]``, the layout cannot split T, or positions show
        that the batch is permuted already.
    """
    named = named_leaves(batch)
    for name, x in named:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(
                f"batch has {name or 'a leaf'}, of type {type(x).__name__}: it must be a pytree of "
                "arrays"
            )
    shapes = [x.shape[:2] for _, x in named if len(x.shape) >= 2]
    if not shapes:
        raise ValueError(
            "batch has no array of shape [B, T, ...]: pass tokens and targets as [B, T], in "
            "natural order"
        )
    length = collections.Counter(shape[1] for shape in shapes).most_common(1)[0][0]
    sizes = Sizes(max(shape[0] for shape in shapes if shape[1] == length), length)
    if length % (num_shards * layout.unit) == 1:
        raise ValueError(
            f"batch has length {length}, one more than the {layout} layout over {num_shards} "
            "shards can split: shift first, inputs tokens[:, :-1] and targets tokens[:, 1:], or "
            "use burst_jax.training.make_batch(tokens)"
        )
    layout.check_length(length, num_shards, "the length of batch")
    for name, x in named:
        if _is_named(name, _POSITIONS) and sizes.dimension(x.shape) is not None:
            for row in np.atleast_2d(np.asarray(x)):
                found = layout_of(row)
                if found is not None and not found[0].in_natural_order:
                    raise ValueError(
                        f"batch has {name} in the {found[0]} order over {found[1]} shards: pass "
                        "the batch in natural order, compare permutes it"
                    )
    return sizes


def of_loader(batch: Any, layout: LayoutLike, num_shards: int) -> tuple[Any, Any]:
    """The batch in natural order, and what a loader returns for the layout; None without one.

    Raises:
      ValueError: a loader's two batches have other arrays, or of other shapes.
    """
    if not callable(batch):
        return batch, None
    natural, own = (
        _without_tables(batch(*given)) for given in (("contiguous", 1), (layout, num_shards))
    )
    one, two = ({name: np.shape(x) for name, x in named_leaves(tree)} for tree in (natural, own))
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            raise ValueError(
                f"{name} has shape {one.get(name)} in batch('contiguous', 1) and {two.get(name)} "
                f"in batch({layout!r}, {num_shards}): it must return the same arrays, of one "
                "length, in two orders"
            )
    return natural, own


def _without_tables(batch: Any) -> Any:
    """A loader's batch without document tables, which belong to its layout alone.

    Without them attention searches for what they hold.
    """
    if not isinstance(batch, Mapping):
        return batch
    return {name: x for name, x in batch.items() if not isinstance(x, DocumentTables)}


def natural_index(sizes: Sizes) -> np.ndarray:
    """``[1, T]``: the index of each token in natural order."""
    return np.arange(sizes.length)[None]


def ordered(
    batch: Any, sizes: Sizes, layout: Layout, num_shards: int, names: Mapping[str, int]
) -> tuple[Any, np.ndarray]:
    """The batch in natural order for a layout, and for each slot of the layout its token's index.

    The index is ``[1, T]``, or ``[B, T]`` if sequences differ in their order. Then the documents of
    the batch determine it, and the layout gives them new ids. Both programs get them, so that their
    values can be compared. Slots that the layout would pad get the batch's own tokens of segment 0,
    so that it is a permutation of all tokens; their position is 0, as in :func:`make_batch`.

    Args:
      batch: in natural order.
      sizes: of the batch.
      layout: the layout.
      num_shards: number of shards.
      names: leaves that attention got as segment ids, and the id that means padding to it.

    Raises:
      ValueError: the batch has no segment ids, arrays ``[T]``, or documents for another zone.
      NotImplementedError: padding is not segment 0.
    """
    index = layout.positions(sizes.length, num_shards)
    if index is not None:
        return batch, index[None]
    for name, x in named_leaves(batch):
        if len(x.shape) == 1 and sizes.dimension(x.shape) == 0:
            raise ValueError(
                f"batch has {name} of shape {x.shape}, and layout is {layout!r}, in which each "
                f"sequence has an order of its own: make it {(sizes.batch, sizes.length)}"
            )
    found = segment_ids_of(batch, sizes, names)
    if found is None:
        raise ValueError(
            f"layout is {layout!r}, which places documents, and batch has no segment ids: add "
            'integers [B, T] as "segment_ids" (all 1 for one document per sequence) and pass them '
            "to attention"
        )
    ids = found[1]
    if padding_id := names.get(found[0], 0):
        raise NotImplementedError(
            f"layout is {layout!r}, which gives documents new ids, and attention got padding_id "
            f"{padding_id}: mark padding by 0, as make_batch does, and leave padding_id out"
        )
    _, order, new_ids = layout.order_of(ids, num_shards)
    renumbered = np.zeros(ids.shape, np.int32)
    for row, new, source, one in zip(order, renumbered, ids, new_ids, strict=True):
        full = row >= 0
        new[row[full]] = one[full]
        row[~full] = np.flatnonzero(source == 0)

    def with_new_ids(path: Any, x: Any) -> np.ndarray:
        x, name = np.asarray(x), path_name(path)
        if x.shape == ids.shape and np.array_equal(x, ids) and x.dtype.kind in "iu":
            return renumbered.astype(x.dtype)
        if _is_named(name, _POSITIONS) and x.shape == ids.shape:
            return np.where(ids == 0, 0, x).astype(x.dtype)
        return x

    return jax.tree_util.tree_map_with_path(with_new_ids, batch), order


def wrong_order(
    own: Any, wanted: Any, natural: Any, sizes: Sizes, layout: Layout, num_shards: int,
    segment_names: Mapping[str, int],
) -> list[str]:  # fmt: skip
    """A sentence about the arrays of a loader's batch that are not in the layout, if there are.

    Args:
      own: the loader's batch for the layout; None without a loader.
      wanted: what it should be.
      natural: the loader's batch in natural order.
      sizes: of the batch.
      layout: the layout.
      num_shards: number of shards.
      segment_names: of the arrays that attention gets as segment ids, with its padding's id.
    """
    if own is None:
        return []
    is_padding, index = None, layout.positions(sizes.length, num_shards)
    if index is None and (found := segment_ids_of(wanted, sizes, segment_names)):
        is_padding = found[1] == 0  # A loader may put anything there.
    names = _unlike(own, wanted, is_padding)
    if not names:
        return []
    call = f"batch({layout!r}, {num_shards})"
    for other in dict.fromkeys((layout, *map(parse_layout, LAYOUTS))):
        for n in range(1, sizes.length // other.unit + 1):
            if sizes.length % (n * other.unit):
                continue
            index = other.positions(sizes.length, n)
            if index is not None and not _unlike(own, in_layout(natural, sizes, index[None])):
                order = "natural order" if n == 1 else f"the {other} layout over {n} shards"
                return [
                    f"{call} returns arrays in {order}: pass layout={layout!r} and "
                    f"num_shards={num_shards}, its arguments, to make_batch or to_layout"
                ]
    return [
        f"{call} has {', '.join(names)} in another order than the layout, or with other values "
        "than in natural order: permute all arrays together, with burst_jax.to_layout, after "
        "targets are shifted"
    ]


def _unlike(batch: Any, other: Any, ignored: np.ndarray | None = None) -> list[str]:
    """Names of the arrays that differ between two batches, except at ``ignored`` positions."""

    def same(x: Any, y: np.ndarray) -> bool:
        x = np.asarray(x)
        if ignored is None or x.shape[:2] != ignored.shape:
            return np.array_equal(x, y)
        return np.array_equal(x[~ignored], y[~ignored])

    pairs = zip(named_leaves(batch), jax.tree.leaves(other), strict=True)
    return [name for (name, x), y in pairs if not same(x, y)]


def in_layout(batch: Any, sizes: Sizes, index: np.ndarray) -> Any:
    """The batch in a layout: every array with a sequence dimension is permuted along it.

    ``index`` is ``[1, T]``, or ``[B, T]`` if sequences differ in their order.
    """

    def permute(x: Any) -> np.ndarray:
        x, axis = np.asarray(x), sizes.dimension(x.shape)
        if axis is None:
            return x
        if len(index) == 1:
            return np.take(x, index[0], axis)
        return np.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)

    return jax.tree.map(permute, batch)


def place(
    batch: Any, sizes: Sizes, mesh: Mesh, batch_axes: tuple[str, ...], token_axes: tuple[str, ...]
) -> Any:
    """The batch on a mesh, B over ``batch_axes`` and T over ``token_axes``."""
    count = axes_size(mesh, batch_axes)
    if sizes.batch % count:
        raise ValueError(
            f"batch has {sizes.batch} sequences, which the {count} devices of the mesh axes "
            f"{', '.join(batch_axes)} do not divide: use a multiple of {count}"
        )

    def put(x: Any) -> jax.Array:
        axis = sizes.dimension(x.shape)
        spec: list[Any] = [None] * x.ndim
        if x.ndim and x.shape[0] == sizes.batch and axis != 0:
            spec[0] = batch_axes or None
        if axis is not None:
            spec[axis] = token_axes or None
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, batch)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Tokens of a batch in the segment that is padding.

    Attributes:
      name: the leaf with the segment ids.
      padding_id: the id of that segment.
      tokens: the share of all tokens that are in it, from 0 to 1.
      loss: the share of the loss weights that those tokens have; None if the batch has no weights.
      count: how many tokens are in it.
      counted_from_zero: whether it is segment 0 and looks like a document: it is at the start of
        sequences and has varied tokens.
    """

    name: str
    padding_id: int
    tokens: float
    loss: float | None
    count: int
    counted_from_zero: bool


def _by_token(batch: Any, sizes: Sizes) -> list[tuple[str, np.ndarray]]:
    """``(name, array)`` of the batch's arrays ``[B, T]``."""
    return [
        (name, np.asarray(x))
        for name, x in named_leaves(batch)
        if len(x.shape) == 2 and sizes.dimension(x.shape) is not None
    ]


def segment_ids_of(
    batch: Any, sizes: Sizes, names: Mapping[str, int]
) -> tuple[str, np.ndarray] | None:
    """The batch's segment ids and their name; ``names`` are leaves that attention got as ids."""
    found = (
        (name, x)
        for name, x in _by_token(batch, sizes)
        if (name in names or _is_named(name, _SEGMENTS)) and np.issubdtype(x.dtype, np.integer)
    )
    return next(found, None)


def segments_of(batch: Any, sizes: Sizes, names: Mapping[str, int]) -> Segments | None:
    """What the batch has of padding.

    ``names`` are leaves that attention got as segment ids, with the id that means padding to it.
    """
    arrays = _by_token(batch, sizes)
    found = segment_ids_of(batch, sizes, names)
    if found is None:
        return None
    name, ids = found
    padding_id = names.get(name, 0)
    padding = ids == padding_id
    weights = [np.asarray(x, np.float64) for n, x in arrays if n != name and _is_named(n, _WEIGHTS)]
    loss = None
    if weights and weights[0].shape == ids.shape and weights[0].sum():
        loss = float(weights[0][padding].sum() / weights[0].sum())
    # Padding at the start of a sequence has one token id, a document has many.
    tokens = [x for n, x in arrays if x.dtype.kind in "iu" and is_content(n, name)]
    first = np.logical_and.accumulate(padding, axis=1)
    varied = padding_id == 0 and any(
        len(np.unique(x[row, first[row]])) > 2 for x in tokens for row in range(len(ids))
    )
    return Segments(name, padding_id, float(padding.mean()), loss, int(padding.sum()), varied)


def is_content(name: str, segments: str) -> bool:
    """Whether an array has tokens or targets, and not positions, weights or segment ids."""
    others = (*_POSITIONS, *_WEIGHTS, *_SEGMENTS)
    return name != segments and not _is_named(name, others)


def other_padding(batch: Any, segments: Segments) -> Any:
    """The batch with other tokens and targets in padding, which no loss may depend on."""
    ids = next(np.asarray(x) for name, x in named_leaves(batch) if name == segments.name)
    padding = ids == segments.padding_id

    def change(path: Any, x: Any) -> np.ndarray:
        x = np.asarray(x)
        if x.shape[:2] != ids.shape or not is_content(path_name(path), segments.name):
            return x
        where = padding.reshape(*ids.shape, *[1] * (x.ndim - 2))
        values = np.unique(x) if x.dtype.kind in "iu" else np.asarray([0, 1], x.dtype)
        # Another value of the same array: the next larger one.
        index = np.searchsorted(values, x) + 1 if x.dtype.kind in "iu" else (x == 0).astype(int)
        return np.where(where, values[index % len(values)], x).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(change, batch)


def _is_named(name: str, parts: tuple[str, ...]) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    return any(part in last for part in parts)
