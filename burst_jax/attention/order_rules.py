"""The rules that detect positions in another order than their tokens'.

In the zigzag and striped layouts right positions descend at least once between shards::

    zigzag, 2 shards     token order     0 1 6 7 | 2 3 4 5
    positions            right           0 1 6 7 | 2 3 4 5
                         an arange       0 1 2 3 | 4 5 6 7

Below, "the text" is the sequence in natural order, "the array" its tokens in the layout's order.
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
- A segment has each position of a range once, and not in ascending order. That is a batch that was
  permuted into another layout, or a document that a balanced layout splits. Without segment ids the
  whole sequence is the segment, and its positions must also ascend within every shard, as they do
  in every layout. A traced call examines the last segment of each device's shard, which is where
  layouts put the end of a sequence and split documents.

All other positions pass: they may restart with a document, start anywhere, repeat, or skip values.
The first two rules pass a sequence whose documents are so short that the layout goes back inside
none of them, and they find nothing in the contiguous layout, which never goes back.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.layout import Layout

Array = jax.Array | np.ndarray
# At most this many seams between blocks of the layout are checked in a traced call.
_MOST_SEAMS = 4
_INT32 = np.iinfo(np.int32)


def _pairs(positions: Array, segments: Array) -> tuple[Array, Array]:
    """For each pair of neighbours in the array: same segment, and ascending positions?

    Both results are bool ``[rows, T - 1]``.
    """
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return same, positions[:, 1:] > positions[:, :-1]


def contradict(positions: Array, segments: Array, falls: np.ndarray) -> Array:
    """The first rule: bool ``[rows]``, whether positions contradict the layout.

    ``falls`` is bool ``[T - 1]``: whether token i + 1 of the array is an earlier one than token i.
    """
    same, ascend = _pairs(positions, segments)
    return (ascend | ~same).all(1) & (same & falls).any(1)


class Samples:
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


def goes_back(positions: Array, segments: Array, samples: Samples) -> Array:
    """The second rule: bool ``[rows]``, whether a token was counted along the array.

    ``positions`` and ``segments`` are ``[rows, shared tokens]``.
    """
    here, before = positions[:, samples.tokens], positions[:, samples.before_in_text]
    segment = segments[:, samples.tokens]
    same = (segment == segments[:, samples.before_in_text]) & (segment != 0)
    counted = here == positions[:, samples.before_in_array] + 1
    return (same & (here < before) & counted).any(1)


def is_permuted(positions: np.ndarray, segments: np.ndarray, text: np.ndarray) -> np.ndarray:
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


def text_here(
    layout: Layout, length: int, n: int, ring: tuple[str, ...], ulysses_axis: str | None
) -> jax.Array:
    """int32 ``[length]``: index of each of this device's tokens in its text."""
    size = 1 if ulysses_axis is None else lax.axis_size(ulysses_axis)
    text = layout.shard_positions(length * size, n, lax.axis_index(ring))
    if ulysses_axis is None:
        return text
    return lax.dynamic_slice_in_dim(text, lax.axis_index(ulysses_axis) * length, length)


class LastSegment(NamedTuple):
    """The last segment of each row of a device's tokens, int32 ``[rows]`` each.

    Sums are modulo 2**32.

    Attributes:
      segment: its id; 0 if the row is padding.
      start: the position of its first token.
      end: the position of its last token.
      start_text: index of the first token in its text.
      end_text: index of the last token in its text.
      count: number of its tokens.
      total: the sum of their positions.
      squares: the sum of the squares of their positions.
    """

    segment: jax.Array
    start: jax.Array
    end: jax.Array
    start_text: jax.Array
    end_text: jax.Array
    count: jax.Array
    total: jax.Array
    squares: jax.Array

    @classmethod
    def of(cls, positions: jax.Array, segments: jax.Array, text: jax.Array) -> LastSegment:
        """That of int32 ``[rows, tokens]``."""
        rows = np.broadcast_shapes(positions.shape, segments.shape)
        positions, segments = jnp.broadcast_to(positions, rows), jnp.broadcast_to(segments, rows)
        index = jnp.arange(rows[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(segments != 0, index, 0), 1, keepdims=True)
        segment = jnp.take_along_axis(segments, last, 1)
        others = (segments != segment) & (index <= last)
        start = jnp.max(jnp.where(others, index, -1), 1, keepdims=True) + 1
        own = jnp.where((start <= index) & (index <= last), positions, 0)
        first, end = (jnp.take_along_axis(positions, at, 1)[:, 0] for at in (start, last))
        first_text, end_text = (text[at][:, 0] for at in (start, last))
        count = (last - start + 1)[:, 0]
        total, squares = (jnp.sum(x, 1, dtype=jnp.int32) for x in (own, own * own))
        return cls(segment[:, 0], first, end, first_text, end_text, count, total, squares)

    def contradicts(self) -> jax.Array:
        """The third rule on those of all devices, ``[devices, rows]``: bool ``[rows]``.

        The devices' parts of a segment are a range of positions, each of them once, if smallest,
        largest, number, sum and sum of squares are those of a range. Their order is wrong if a
        later token of the text has a smaller position; or, if their tokens are adjacent in the
        text, if an end of a part is elsewhere in the segment than its position.
        """
        same = (self.segment[:, None] == self.segment) & (self.segment != 0)

        def of_segment(x: jax.Array, reduce: Any, of_none: int) -> jax.Array:
            return reduce(jnp.where(same, x, jnp.int32(of_none)), axis=1)

        sum_ = functools.partial(jnp.sum, dtype=jnp.int32)
        first = of_segment(self.start, jnp.min, _INT32.max)
        first_text = of_segment(self.start_text, jnp.min, _INT32.max)
        steps = of_segment(self.end, jnp.max, _INT32.min) - first
        steps_text = of_segment(self.end_text, jnp.max, _INT32.min) - first_text
        count, total, squares = (
            of_segment(x, sum_, 0) for x in (self.count, self.total, self.squares)
        )
        # The sums of i and of 3 i**2 for i < count, without a product that is divided after it has
        # overflowed.
        of_range = (count // 2) * (count - 1 + count % 2)
        squares = squares - 2 * first * total + count * first * first
        is_range = (steps == count - 1) & (total - count * first == of_range)
        is_range &= 3 * squares == of_range * (2 * count - 1)
        back = (self.end_text[:, None] < self.start_text) & (self.end[:, None] > self.start)
        elsewhere = self.start - first != self.start_text - first_text
        elsewhere |= self.end - first != self.end_text - first_text
        wrong = (same & back).any(1) | ((steps_text == count - 1) & elsewhere)
        return (is_range & wrong & (self.segment != 0)).any(0)


def contradict_across(
    positions: jax.Array,
    segments: jax.Array,
    falls: np.ndarray,
    axes: tuple[str, ...],
    samples: Samples | None,
    last: LastSegment,
    of_whole: bool,
) -> jax.Array:
    """The rules on sequences sharded over mesh axes: bool ``[rows]``, equal on all devices.

    Inside a shard the layout always ascends. So each device checks whether its own positions
    ascend, and the tokens at the ends of shards show whether positions ascend between them.

    Args:
      positions: int32 ``[rows, tokens]``, the device's shard.
      segments: int32 ``[rows, tokens]``, the device's shard.
      falls: bool ``[devices - 1]``, whether the layout goes back between a shard and the next.
      axes: mesh axes that the sequences are sharded over.
      samples: the tokens that the second rule is applied to; None leaves it out.
      last: the device's last segments, for the third rule.
      of_whole: whether there are no segment ids: the whole sequence is one segment.
    """
    same, ascend = _pairs(positions, segments)
    descends = (same & ~ascend).any(1)
    rows = descends.shape[0]
    ends = np.array([0, -1])
    index = ends if samples is None else np.array([*ends, *samples.shown])
    shown = [jnp.broadcast_to(x[:, index].T, (index.size, rows)) for x in (positions, segments)]
    own = [jnp.broadcast_to(x, (1, rows)) for x in last]
    mine = jnp.concatenate([*shown, descends.astype(jnp.int32)[None], *own])
    here = jnp.arange(falls.size + 1, dtype=jnp.int32) == lax.axis_index(axes)
    every = lax.psum(jnp.where(here[:, None, None], mine, 0), axes)
    # Of all devices: [devices, shared tokens, rows]. The first two tokens are a shard's ends.
    count = index.size
    position, segment = every[:, :count], every[:, count : 2 * count]
    descends, own = every[:, 2 * count], every[:, 2 * count + 1 :]
    same = (segment[:-1, 1] == segment[1:, 0]) & (segment[1:, 0] != 0)
    ascend = position[1:, 0] > position[:-1, 1]
    inside = (descends == 0).all(0)
    wrong = (ascend | ~same).all(0) & inside & (same & falls[:, None]).any(0)
    permuted = LastSegment(*own.swapaxes(0, 1)).contradicts()
    wrong |= permuted & inside if of_whole else permuted
    if samples is None:
        return wrong
    position, segment = (x[:, 2:].reshape(-1, rows).T for x in (position, segment))
    return wrong | goes_back(position, segment, samples)
