"""The single definition of masks: per score, per tile of scores, and per pair of shards.

A new mask by positions adds one test to each of ``allowed``, ``tiles`` and ``shards`` of
:class:`Mask`, and its field to ``exchanged`` and ``reads_positions``. A mask that reads another
array, such as segment ids, also adds an input to every kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import interval_arithmetic
from pallas_kernels.elementwise import ScoreCoordinates

_INT32 = jnp.iinfo(jnp.int32)


class TileSummary(NamedTuple):
    """Per-tile statistics of tokens that masks need, arrays ``[R, tiles]`` or ``[1, tiles]``.

    Attributes:
      first: the smallest position.
      last: the largest position.
      whole: False for a partial last tile, whose tail must be masked.
      segment_low: the smallest segment id except padding; None without segments.
      segment_high: the largest one; below ``segment_low`` if the whole tile is padding.
      segment: the segment id of a tile with a single segment and no padding, else 0.
      padded: 1 where a tile holds padding, else 0; None without segments.
      earliest_start: the smallest ``kv_starts`` of the queries, except for queries with empty KV
        bounds; None without.
      latest_start: the largest ``kv_starts``, of all queries.
      earliest_end: the smallest ``kv_ends``, of all queries; None without.
      latest_end: the largest ``kv_ends``, except for queries with empty KV bounds.
    """

    first: jax.Array
    last: jax.Array
    whole: jax.Array
    segment_low: jax.Array | None
    segment_high: jax.Array | None
    segment: jax.Array | None
    padded: jax.Array | None = None
    earliest_start: jax.Array | None = None
    latest_start: jax.Array | None = None
    earliest_end: jax.Array | None = None
    latest_end: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query attends to. Hashable, so that it can be part of a jit cache key.

    A query at position ``p`` attends to keys at ``p - left .. p + right``; causal attention is
    ``right = 0``. Masks read positions, never indices, so one mask serves every layout. With
    segment ids, a query attends to keys of its own segment only, and padding neither attends nor is
    attended to. With per-query KV bounds, a query attends to keys at positions within its bounds
    only. A ``mask_mod`` masks further keys. All of these combine.

    Attributes:
      left: window size before the query, in tokens; None is unlimited.
      right: window size after the query, in tokens; None is unlimited.
      mask_mod: True where a query attends to a key (:mod:`pallas_kernels.elementwise`), hashed by
        identity; None masks nothing.
    """

    left: int | None = None
    right: int | None = None
    mask_mod: Callable[..., Any] | None = None

    def __post_init__(self):
        for side in ("left", "right"):
            tokens = getattr(self, side)
            if tokens is not None and not 0 <= tokens < 2**31:
                raise ValueError(
                    f"the window's {side} is {tokens}: it must be from 0 to 2**31 - 1, or None"
                )

    @property
    def reads_positions(self) -> bool:
        """Whether there is a window, which reads positions."""
        return self.left is not None or self.right is not None

    @property
    def exchanged(self) -> Mask:
        """The same mask with queries as keys and keys as queries; without a ``mask_mod``."""
        assert self.mask_mod is None
        return Mask(self.right, self.left)

    @property
    def hides_later_keys(self) -> bool:
        """Whether every unmasked key is at or before its query: causal attention."""
        return self.right == 0

    def allowed(
        self,
        q_positions: jax.Array | None,
        kv_positions: jax.Array | None,
        q_segment_ids: jax.Array | None = None,
        kv_segment_ids: jax.Array | None = None,
        kv_starts: jax.Array | None = None,
        kv_ends: jax.Array | None = None,
        coordinates: ScoreCoordinates | None = None,
    ) -> jax.Array | None:
        """True where a score is not masked; None if no score is masked.

        The queries' and the keys' arrays broadcast against each other (``[T, 1]`` and ``[1, S]``).
        Segment ids and KV bounds may have more leading axes than positions; the result then has
        them, too. Positions may be None where no test reads them. Only :attr:`mask_mod` reads
        ``coordinates``.

        Windows are compared with distances instead of added to positions, which could overflow
        int32.
        """
        tests = []
        if self.left is not None:
            assert q_positions is not None
            assert kv_positions is not None
            tests.append(q_positions - kv_positions <= self.left)
        if self.right is not None:
            assert q_positions is not None
            assert kv_positions is not None
            tests.append(kv_positions - q_positions <= self.right)
        if q_segment_ids is not None:
            assert kv_segment_ids is not None
            tests.append((q_segment_ids == kv_segment_ids) & (q_segment_ids != 0))
        if kv_starts is not None:
            assert kv_positions is not None
            tests.append(operator.ge(*_of_one_rank(kv_positions, kv_starts)))
        if kv_ends is not None:
            assert kv_positions is not None
            tests.append(operator.lt(*_of_one_rank(kv_positions, kv_ends)))
        if self.mask_mod is not None:
            assert coordinates is not None
            tests.append(coordinates.apply(self.mask_mod))
        return functools.reduce(both, tests) if tests else None

    def tiles(self, q: TileSummary, kv: TileSummary) -> tuple[jax.Array, jax.Array]:
        """``(possible, full)`` for every tile of scores, bool ``[R, q tiles, KV tiles]``.

        ``possible``: some score of the tile may be unmasked. ``full``: no score is masked.
        """

        def pair(q_tiles, kv_tiles):
            return q_tiles[:, :, None], kv_tiles[:, None, :]

        q_whole, kv_whole = pair(q.whole, kv.whole)
        full = q_whole & kv_whole
        possible = full | True
        q_first, kv_first = pair(q.first, kv.first)
        q_last, kv_last = pair(q.last, kv.last)
        if self.left is not None:
            possible = possible & (q_first - kv_last <= self.left)
            full = full & (q_last - kv_first <= self.left)
        if self.right is not None:
            possible = possible & (kv_first - q_last <= self.right)
            full = full & (kv_last - q_first <= self.right)
        if q.segment is not None:
            assert kv.segment is not None
            q_low, kv_low = pair(q.segment_low, kv.segment_low)
            q_high, kv_high = pair(q.segment_high, kv.segment_high)
            q_only, kv_only = pair(q.segment, kv.segment)
            # A tile of padding has low > high, so its range overlaps no other.
            possible = possible & (jnp.maximum(q_low, kv_low) <= jnp.minimum(q_high, kv_high))
            full = full & (q_only == kv_only) & (q_only != 0)
        if q.earliest_start is not None:
            assert q.latest_start is not None
            possible = possible & (kv_last >= q.earliest_start[:, :, None])
            full = full & (kv_first >= q.latest_start[:, :, None])
        if q.latest_end is not None:
            assert q.earliest_end is not None
            possible = possible & (kv_first < q.latest_end[:, :, None])
            full = full & (kv_last < q.earliest_end[:, :, None])
        if self.mask_mod is not None:
            ends = (q.first, q.last), (kv.first, kv.last)
            some, every = interval_arithmetic.tiles_of(self.mask_mod, *ends)
            possible, full = possible & some, full & every
        return possible, full

    def shards(
        self, base: np.ndarray, stride: int, low: np.ndarray, high: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which scores of two shards may be unmasked, so that a ring can skip hops.

        A query's position minus a key's is ``base + stride * i``, with i from ``low`` to ``high``.

        Returns:
          ``(low, high)``: the range of i that the mask allows; empty where low > high. Segment ids
          and KV bounds are not known at trace time, so they exclude nothing here.
        """
        if self.right is not None:
            low = np.maximum(low, -((base + self.right) // stride))
        if self.left is not None:
            high = np.minimum(high, (self.left - base) // stride)
        return low, high


def first_key_in_window(positions: jax.Array, left: jax.typing.ArrayLike) -> jax.Array:
    """``p - left``, int32 and saturating, for every position p."""
    least, most = jnp.maximum(positions, -1) - _INT32.max, jnp.minimum(positions, -1) - _INT32.min
    return positions - jnp.clip(jnp.int32(left), least, most)


def end_of_keys_in_window(positions: jax.Array, right: jax.typing.ArrayLike) -> jax.Array:
    """``p + right + 1``, int32 and saturating, for every position p."""
    after = positions + 1
    least, most = _INT32.min - jnp.minimum(after, 0), _INT32.max - jnp.maximum(after, 0)
    return after + jnp.clip(jnp.int32(right), least, most)


def both(mask: jax.Array, other: jax.Array) -> jax.Array:
    """``mask & other``, the one of lower rank broadcast over leading axes.

    Also works where ``jax_numpy_rank_promotion`` is "raise".
    """
    return operator.and_(*_of_one_rank(mask, other))


def _of_one_rank(x: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both arrays, the one of lower rank with leading axes of size 1 added."""
    if x.ndim > other.ndim:
        other = lax.expand_dims(other, range(x.ndim - other.ndim))
    elif x.ndim < other.ndim:
        x = lax.expand_dims(x, range(other.ndim - x.ndim))
    return x, other
