"""Detects RoPE positions that contradict the layout, a mistake that changes every score.

RoPE takes positions from the caller; the ring's masks and ALiBi slopes take them from the layout.
If a caller permutes the tokens and passes an ``arange``, or does not permute them at all, the loss
still falls, but the model is trained on text in the wrong order. In the zigzag and striped layouts
right positions descend at least once between shards::

    zigzag, 2 shards     token order     0 1 6 7 | 2 3 4 5
    positions            right           0 1 6 7 | 2 3 4 5
                         an arange       0 1 2 3 | 4 5 6 7

Three rules detect wrong positions:

- Positions ascend along the array within every segment, although inside one of the segments the
  layout goes back to an earlier token (from 7 to 2 in the example). Then an earlier token of the
  segment has a larger position than a later one.
- In a sequence with segment ids, a token's position is smaller than that of the preceding token of
  its segment in the text, and larger by exactly one than that of the preceding token in the array.
  Such positions were counted along the array. This rule also detects an ``arange`` in packed
  sequences, where segments mostly end where the layout goes back, which the first rule needs.
  Positions that restart inside a segment pass: the first one after a restart is not larger by one
  than the position before it in the array.

- A segment of a sequence with segment ids has each position of a range once, and not in ascending
  order. That is a document that a balanced layout splits, in the order of its shards. A traced call
  compares a few tokens: it finds a segment that another one interrupts in the text, and whose
  positions are smaller after the interruption than before it.

A fourth rule needs the values of whole sequences, so it applies outside of ``jit`` only: positions
that are exactly those of another layout, or of another number of shards, belong to a batch that was
made for another mesh.

All other positions pass: they may restart with a document, start anywhere, repeat, or skip values.
A sequence whose documents are so short that the layout goes back inside none of them passes with
any positions. Without a mask that depends on positions (causal, window) and without ALiBi slopes
the order of the tokens does not change the result, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.attention.arguments import (
    POSITION_READERS,
    AttentionArguments,
    AttentionOptions,
)
from burst_jax.attention.validation import check_array, check_is_array
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import layout_of, parse_layout
from burst_jax.parallel.mesh import (
    axes_size,
    flat_names,
    inside_shard_map,
    reshard_explicit,
    resolve_mesh,
    sequence_axes,
    token_spec,
)
from pallas_kernels.arrays import as_int32

Array = jax.Array | np.ndarray
# At most this many seams between blocks of the layout are checked in a traced call.
_MOST_SEAMS = 4


def check_positions(
    x: jax.Array, positions: Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
    """``x``, with NaN in the sequences whose positions contradict the layout.

    RoPE takes positions from the model, and masks take them from the layout. With an ``arange`` for
    tokens in the zigzag layout the loss still falls, but the model learns text in the wrong order.
    :class:`burst_jax.BurstAttention` and :class:`burst_jax.models.Decoder` check this. A model that
    calls :func:`burst_jax.burst_attention` itself can check it once, where it makes its RoPE::

        options = dict(mesh=mesh, layout="zigzag", is_causal=True)
        x = burst_jax.check_positions(x, positions, **options)
        ...
        out = burst_jax.burst_attention(query, key, value, **options)

    Outside of ``jit``, and for NumPy arrays, wrong positions raise. In a traced call only the
    devices know the values: the sequence becomes NaN, and its loss at the first step. That takes
    one all-reduce of a few integers per sequence. Positions may restart with a document, start
    anywhere, repeat or skip values. Nothing is checked in balanced layouts, in which the attention
    takes the same positions, nor without a mask or slopes that read positions.

    Args:
      x: ``[B, T, ...]``, anything that the loss depends on: hidden states, or the query.
      positions: integers ``[B, T]`` or ``[T]``, those that RoPE gets, in the layout's order.
      **options: the keyword arguments of the :func:`burst_jax.burst_attention` call, its segment
        ids included. Inside a ``shard_map`` ``seq_axis`` is the ``axis_name`` of
        :func:`burst_jax.ring_attention`, and arrays are one device's.

    Returns:
      ``x``, of the same shape and dtype.

    Raises:
      ValueError: known positions contradict the layout, or arrays have other shapes or dtypes.
      TypeError: an unknown keyword.
    """
    arguments = AttentionArguments.of(check_positions, options)
    parse_layout(arguments.layout)
    check_is_array("x", x, "an array [B, T, ...]")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}: it must be [B, T, ...]")
    check_is_array("positions", positions, "an int32 array")
    if tuple(positions.shape) not in (tuple(x.shape[:2]), tuple(x.shape[1:2])):
        raise ValueError(
            f"positions has shape {positions.shape}, x {x.shape}: it must be [B, T] or [T]"
        )
    positions = as_int32("positions", positions)
    ids = arguments.query_segment_ids
    if ids is not None:
        sizes = {"B": x.shape[0], "T": x.shape[1]}
        ids = check_array("query_segment_ids", ids, sizes)
    return reject_wrong_order(x, positions, ids, options)


def reject_wrong_order(
    x: jax.Array, positions: Array, segment_ids: Array | None, options: Mapping[str, Any]
) -> jax.Array:
    """``x``, with NaN in the sequences whose positions contradict the layout.

    If the values of positions and segment ids are known (NumPy arrays, or JAX arrays outside of
    ``jit``), such positions raise instead. In a traced call only the devices know the values, and a
    device cannot raise: the NaN makes the loss NaN at the first step. A traced call applies the
    second rule to a few tokens: those at the ends of each device's shard and of each block of the
    layout, and the third to the last segment of each device's shard. It costs one all-reduce over
    the sequence axes, of a dozen integers per sequence and device.

    Inside a ``shard_map`` over the sequence axes all arrays are one device's, and none is known.

    Args:
      x: ``[B, T, ...]``, computed with the positions.
      positions: integers ``[B, T]`` or ``[T]``, in the layout's order.
      segment_ids: integers ``[B, T]``, 0 for padding, or None.
      options: keyword arguments of ``burst_attention``, which has checked them.

    Returns:
      The same shape in the dtype of ``x``.

    Raises:
      ValueError: known positions contradict the layout.
    """
    layout = parse_layout(options.get("layout", "contiguous"))
    given = (options.get(name) for name in POSITION_READERS)
    if all(value is None or value is False for value in given):
        return x
    if not layout.goes_back:  # Or the attention takes the same positions.
        reject_other_layout(positions, options)
        return x
    mesh = resolve_mesh(options.get("mesh"))
    ring, tokens = flat_names(options.get("seq_axis", "seq")), sequence_axes(options)
    n, shards = axes_size(mesh, ring), axes_size(mesh, tokens)
    inside = inside_shard_map(tokens)
    length = x.shape[1] * (shards if inside else 1)
    in_layout = layout.fixed_positions(length, n)
    falls = np.diff(in_layout) < 0
    if not falls.any():
        return x
    if not inside and _known(positions) and (segment_ids is None or _known(segment_ids)):
        segments = np.ones((1, length), np.int32) if segment_ids is None else segment_ids
        given, segments = np.atleast_2d(positions), np.asarray(segments)
        wrong = _contradict(given, segments, falls)
        if segment_ids is not None:
            everything = _Samples(in_layout[None], all_of_them=True)
            wrong = wrong | _goes_back(given, segments, everything)
            wrong |= _is_permuted(given, segments, in_layout)
        if wrong.any():
            raise ValueError(
                f"positions of row {int(wrong.argmax())} are in another order than its tokens, "
                f"which are in the {layout} layout over {n} shards (an arange?): pass "
                f"burst_jax.positions({layout!r}, {length}, {n}), or permute what you have with "
                f"to_layout(..., {layout!r}, {n}), as make_batch does; tokens too"
            )
        reject_other_layout(positions, options)
        return x
    between = falls[length // shards - 1 :: length // shards]
    samples = None
    if segment_ids is not None:
        samples = _Samples(in_layout.reshape(shards, -1))
    positions = jnp.atleast_2d(as_int32("positions", positions))
    segments = jnp.ones((1, x.shape[1]), jnp.int32)
    if segment_ids is not None:
        segments = as_int32("segment_ids", segment_ids)

    def on_device(positions: jax.Array, segments: jax.Array) -> jax.Array:
        if samples is None:
            return _contradict_across(positions, segments, between, tokens, None)
        text = _text_here(layout, positions.shape[1], n, ring, options.get("ulysses_axis"))
        last = _LastSegment.of(positions, segments, text)
        return _contradict_across(positions, segments, between, tokens, samples, last)

    if inside:
        return _marked(x, on_device(positions, segments))
    # A single row of positions or segment ids is shared by all sequences and not sharded.
    arrays, batch = (positions, segments), options.get("batch_axis")
    specs = [
        token_spec(batch if array.shape[0] == x.shape[0] else None, tokens) for array in arrays
    ]
    split = (reshard_explicit(a, mesh, spec) for a, spec in zip(arrays, specs, strict=True))
    rows = batch if any(array.shape[0] == x.shape[0] for array in arrays) else None

    check = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=jax.P(rows))
    return _marked(x, check(*split))


def reject_other_layout(positions: Array, options: Mapping[str, Any]) -> None:
    """Raises if positions are those of another layout, or of another number of shards.

    Values that this process cannot read, as under ``jit``, are not checked.

    Args:
      positions: integers ``[B, T]`` or ``[T]``.
      options: keyword arguments of ``burst_attention``, which has checked them.

    Raises:
      ValueError: the positions of a sequence are those of another order.
    """
    if inside_shard_map(sequence_axes(options)) or not _known(positions):
        return
    layout = parse_layout(options.get("layout", "contiguous"))
    n = axes_size(resolve_mesh(options.get("mesh")), flat_names(options.get("seq_axis", "seq")))
    given = np.atleast_2d(np.asarray(positions))
    length = given.shape[1]
    if layout.padded_length(length, n) != length:
        return  # The attention raises.
    in_layout = layout.positions(length, n)
    if in_layout is None:
        return  # The attention takes these positions.
    others = (given != in_layout).any(1)
    count = np.arange(length)
    for row in np.flatnonzero(others):
        if (np.sort(given[row]) != count).any():
            continue
        found = layout_of(given[row])
        if found is not None:
            raise ValueError(
                f"positions of row {row} are those of the {found[0]} layout over {found[1]} "
                f"shards, and the tokens are in the {layout} layout over {n}: make the batch and "
                "the model with the same layout and number of shards"
            )


def _marked(x: jax.Array, wrong: jax.Array) -> jax.Array:
    """``x`` ``[B, T, ...]``, NaN in the sequences that are ``wrong``, bool ``[B]`` or ``[1]``."""
    wrong = lax.expand_dims(wrong, range(1, x.ndim))
    return jnp.where(wrong, jnp.asarray(jnp.nan, x.dtype), x)


def _known(array: Array) -> bool:
    """Whether this process can read the array's values."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _pairs(positions: Array, segments: Array) -> tuple[Array, Array]:
    """For each pair of neighbours in the array: same segment, and ascending positions?

    Both results are bool ``[rows, T - 1]``.
    """
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return same, positions[:, 1:] > positions[:, :-1]


def _contradict(positions: Array, segments: Array, falls: np.ndarray) -> Array:
    """The first rule: bool ``[rows]``, whether positions contradict the layout.

    ``falls`` is bool ``[T - 1]``: whether token i + 1 of the array is an earlier one than token i.
    """
    same, ascend = _pairs(positions, segments)
    return (ascend | ~same).all(1) & (same & falls).any(1)


class _Samples:
    """The tokens that the second rule is applied to, and their predecessors.

    Every device shares a few tokens of its shard with all devices. The rule can check a shared
    token if its predecessors in the text and in the array are shared, too. The shared tokens are
    numbered device by device.

    Attributes:
      shown: indices of the shared tokens in a device's shard: both ends, and both sides of each
        seam between blocks of the layout; or every index.
      tokens: numbers of the tokens that the rule can check, ``[checked]``.
      before_in_text: numbers of their predecessors in the text, ``[checked]``.
      before_in_array: numbers of their predecessors in the array, ``[checked]``.
    """

    def __init__(self, text: np.ndarray, *, all_of_them: bool = False) -> None:
        """``text`` ``[devices, tokens of a device]``: the index of each token in its text."""
        length = text.shape[1]
        # A seam is where the step to the next token is not the smallest step. Single-token stripes
        # have none. Stripes of several tokens can have thousands: a few suffice for an arange.
        steps = np.diff(text)
        seams = np.flatnonzero((steps != steps.min(initial=text.size)).any(0))
        seams = seams if seams.size <= _MOST_SEAMS else seams[:_MOST_SEAMS]
        shown = np.concatenate([[0, 1, length - 2, length - 1], seams, seams + 1])
        if all_of_them:
            shown = np.arange(length)
        self.shown = np.unique(shown.clip(0, length - 1))
        text_index = text[:, self.shown].reshape(-1)
        array_index = (np.arange(text.shape[0])[:, None] * length + self.shown).reshape(-1)
        in_text, known_text = _before(text_index)
        in_array, known_array = _before(array_index)
        self.tokens = np.flatnonzero(known_text & known_array)
        self.before_in_text, self.before_in_array = in_text[self.tokens], in_array[self.tokens]


def _before(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each entry the index of the entry smaller by one, and whether it exists."""
    order = np.argsort(numbers)
    found = order[np.searchsorted(numbers[order], numbers - 1)]
    return found, numbers[found] == numbers - 1


def _goes_back(positions: Array, segments: Array, samples: _Samples) -> Array:
    """The second rule: bool ``[rows]``, whether a token was counted along the array.

    ``positions`` and ``segments`` are ``[rows, shared tokens]``.
    """
    here, before = positions[:, samples.tokens], positions[:, samples.before_in_text]
    segment = segments[:, samples.tokens]
    same = (segment == segments[:, samples.before_in_text]) & (segment != 0)
    counted = here == positions[:, samples.before_in_array] + 1
    return (same & (here < before) & counted).any(1)


def _is_permuted(positions: np.ndarray, segments: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The third rule: bool ``[rows]``; ``text`` is the index of each token in its text."""
    order = np.argsort(text)
    shape = np.broadcast_shapes(positions.shape, segments.shape)
    # Differences of unsigned integers would wrap.
    signed = positions.astype(np.int64)
    places, ids = (np.broadcast_to(x, shape)[:, order] for x in (signed, segments))

    def of_row(places: np.ndarray, ids: np.ndarray) -> bool:
        by_segment = np.argsort(ids, kind="stable")[np.count_nonzero(ids == 0) :]
        each = np.split(places[by_segment], np.flatnonzero(np.diff(ids[by_segment])) + 1)
        return any((np.diff(x) < 0).any() and (np.diff(np.sort(x)) == 1).all() for x in each)

    return np.array([of_row(*row) for row in zip(places, ids, strict=True)])


def _text_here(
    layout: Layout, length: int, n: int, ring: tuple[str, ...], ulysses_axis: str | None
) -> jax.Array:
    """int32 ``[length]``: index of each of this device's tokens in its text."""
    size = 1 if ulysses_axis is None else lax.axis_size(ulysses_axis)
    text = layout.shard_positions(length * size, n, lax.axis_index(ring))
    if ulysses_axis is None:
        return text
    return lax.dynamic_slice_in_dim(text, lax.axis_index(ulysses_axis) * length, length)


class _LastSegment(NamedTuple):
    """The last segment of each row of a device's tokens, int32 ``[rows]`` each.

    Attributes:
      segment: its id; 0 if the row is padding.
      start: the position of its first token.
      end: the position of its last token.
      start_text: index of the first token in its text.
      end_text: index of the last token in its text.
      follows_another: 1 if the token before the first one in the text is another segment's.
    """

    segment: jax.Array
    start: jax.Array
    end: jax.Array
    start_text: jax.Array
    end_text: jax.Array
    follows_another: jax.Array

    @classmethod
    def of(cls, positions: jax.Array, segments: jax.Array, text: jax.Array) -> _LastSegment:
        """That of int32 ``[rows, tokens]``."""
        rows = np.broadcast_shapes(positions.shape, segments.shape)
        positions, segments = jnp.broadcast_to(positions, rows), jnp.broadcast_to(segments, rows)
        index = jnp.arange(rows[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(segments != 0, index, 0), 1, keepdims=True)
        segment = jnp.take_along_axis(segments, last, 1)
        others = (segments != segment) & (index <= last)
        start = jnp.max(jnp.where(others, index, -1), 1, keepdims=True) + 1
        before = jnp.maximum(start - 1, 0)
        follows = (start > 0) & (jnp.take_along_axis(segments, before, 1) != 0)
        follows &= text[start] - text[before] == 1
        ends = (jnp.take_along_axis(positions, at, 1) for at in (start, last))
        parts = segment, *ends, text[start], text[last], follows.astype(jnp.int32)
        return cls(*(part[:, 0] for part in parts))

    def contradicts(self) -> jax.Array:
        """The third rule on those of all devices, ``[devices, rows]``: bool ``[rows]``."""
        later = _LastSegment(*(x[:, None] for x in self))
        same = (self.segment == later.segment) & (later.segment != 0) & (later.follows_another == 1)
        back = (self.end_text < later.start_text) & (self.end > later.start)
        return (same & back).any((0, 1))


def _contradict_across(
    positions: jax.Array,
    segments: jax.Array,
    falls: np.ndarray,
    axes: tuple[str, ...],
    samples: _Samples | None,
    last: _LastSegment | None = None,
) -> jax.Array:
    """The rules on sequences sharded over mesh axes: bool ``[rows]``, equal on all devices.

    Inside a shard the layout always ascends. So each device checks whether its own positions
    ascend, and the tokens at the ends of shards show whether positions ascend between them.

    Args:
      positions: int32 ``[rows, tokens]``, the device's shard.
      segments: int32 ``[rows, tokens]``, the device's shard.
      falls: bool ``[devices - 1]``, whether the layout goes back between a shard and the next.
      axes: mesh axes that the sequences are sharded over.
      samples: the tokens that the second rule is applied to; None applies the first rule alone.
      last: the device's last segments, with ``samples``.
    """
    same, ascend = _pairs(positions, segments)
    descends = (same & ~ascend).any(1)
    rows = descends.shape[0]
    ends = np.array([0, -1])
    index = ends if samples is None else np.array([*ends, *samples.shown])
    shown = [jnp.broadcast_to(x[:, index].T, (index.size, rows)) for x in (positions, segments)]
    own = [] if last is None else [jnp.broadcast_to(x, (1, rows)) for x in last]
    mine = jnp.concatenate([*shown, descends.astype(jnp.int32)[None], *own])
    here = jnp.arange(falls.size + 1, dtype=jnp.int32) == lax.axis_index(axes)
    every = lax.psum(jnp.where(here[:, None, None], mine, 0), axes)
    # Of all devices: [devices, shared tokens, rows]. The first two tokens are a shard's ends.
    count = index.size
    position, segment = every[:, :count], every[:, count : 2 * count]
    descends, own = every[:, 2 * count], every[:, 2 * count + 1 :]
    same = (segment[:-1, 1] == segment[1:, 0]) & (segment[1:, 0] != 0)
    ascend = position[1:, 0] > position[:-1, 1]
    ordered = (ascend | ~same).all(0) & (descends == 0).all(0)
    wrong = ordered & (same & falls[:, None]).any(0)
    if samples is None or last is None:
        return wrong
    wrong |= _LastSegment(*own.swapaxes(0, 1)).contradicts()
    position, segment = (x[:, 2:].reshape(-1, rows).T for x in (position, segment))
    return wrong | _goes_back(position, segment, samples)
