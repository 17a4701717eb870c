"""One device's part of a balanced layout: its shard, and the order of its tokens.

In a balanced layout (:mod:`burst_jax.layouts.balanced`) most documents are whole on one shard. The
pieces of split documents are in the gathered zone, the last z tokens of every shard.

On its own shard a query's keys are those of its document at or before it, in index order. A shard's
tokens are sorted by document and position, so in any part of a shard a query's keys are one range
of indices: :meth:`Order.count_before` finds it by a search, and kernels get it as per-query KV
bounds. The positions that kernels get are indices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.checksums import checksums
from burst_jax.layouts.tables import MaskTables, needs_own_ranges
from burst_jax.ring.request import Request
from pallas_kernels import AttentionInputs, AttentionSpec
from pallas_kernels.inputs import Side
from pallas_kernels.mask import Mask, end_of_keys_in_window, first_key_in_window

_INT32 = np.iinfo(np.int32)
LAST = np.int32(_INT32.max)
# Bits per digit of a search: 15 values are tried at once.
_DIGIT = 4


class Order(NamedTuple):
    """Where each token is in its document.

    Attributes:
      segment_ids: int32 ``[..., B, tokens]``, 0 for padding.
      positions: int32, the same shape.
    """

    segment_ids: jax.Array
    positions: jax.Array

    @classmethod
    def of(cls, side: Side, first: int = 0) -> Order:
        """That of a side's tokens from index ``first`` on."""
        assert side.segment_ids is not None
        assert side.positions is not None
        return cls(side.segment_ids[:, first:], side.positions[:, first:])

    def is_unsorted(self) -> jax.Array:
        """Bool ``[..., B]``, whether :meth:`count_before` would be wrong.

        Tokens must be sorted by document and position, with padding at the end.
        """
        keys = _sort_keys(self.segment_ids)
        here, following = keys[..., :-1], keys[..., 1:]
        back = (following == here) & (self.segment_ids[..., 1:] != 0)
        back &= self.positions[..., 1:] < self.positions[..., :-1]
        return ((following < here) | back).any(-1)

    def count_before(self, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """How many of these tokens, sorted by document and position, come before each given one.

        Args:
          segment_ids: int32 ``[..., B, queries]``; leading axes broadcast.
          positions: int32 ``[bounds, ..., B, queries]``.

        Returns:
          int32 ``[bounds, ..., B, queries]``.
        """
        *lead, length = self.positions.shape
        missing = range(1, 1 + max(0, len(lead) - positions.ndim + 2))
        positions = lax.expand_dims(positions, missing)
        # Padding is at the end of a shard. One index: XLA would make an array of several.
        keys, places = _sort_keys(self.segment_ids).reshape(-1), self.positions.reshape(-1)
        first = np.arange(keys.size, step=length, dtype=np.int32).reshape(*lead, 1)
        own, bounds = _sort_keys(segment_ids)[..., None], positions[..., None]
        count = jnp.zeros(jnp.broadcast_shapes(positions.shape, first.shape), jnp.int32)
        # A digit of the result per kernel: a bisection would be a kernel per bit.
        for shift in reversed(range(0, length.bit_length(), _DIGIT)):
            steps = np.arange(1, 1 << _DIGIT, dtype=np.int32) << np.int32(shift)
            tried = count[..., None] + steps
            index = first[..., None] + jnp.clip(tried, 1, length) - 1
            segment, position = (x.at[index].get(mode="promise_in_bounds") for x in (keys, places))
            before = (segment < own) | ((segment == own) & (position < bounds))
            count += (before & (tried <= length)).sum(-1, dtype=jnp.int32) << np.int32(shift)
        return count


def _sort_keys(segment_ids: jax.Array) -> jax.Array:
    """uint32, ascending with the ids 1 to 2^31 - 1; that of padding, 0, is larger than all."""
    return lax.bitcast_convert_type(segment_ids - 1, jnp.uint32)


def key_limits(mask: Mask, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first position that each query attends to in its document, and the exclusive end."""
    low, high = jnp.full_like(positions, _INT32.min), jnp.full_like(positions, LAST)
    if mask.left is not None:
        low = first_key_in_window(positions, mask.left)
    if mask.right is not None:
        high = end_of_keys_in_window(positions, mask.right)
    return low, high


def _kv_ranges(mask: Mask, query: Order, kv: Order) -> tuple[jax.Array, jax.Array]:
    """First index and exclusive end of each query's keys; both 0 for padding.

    Both are int32 ``[..., B, queries]``. ``kv`` is sorted by document and position.
    """
    ids, positions = query
    limits = jnp.stack(key_limits(mask, positions))
    starts, ends = jnp.where(ids == 0, 0, kv.count_before(ids, limits))
    return starts, ends


class Shard:
    """One device's inputs in a balanced layout, for kernels on its own shard.

    Attributes:
      inputs: with indices as positions, and the masks of :attr:`spec`.
      spec: the call's, with the mask that is left for kernels.
      outside: number of the shard's tokens outside of its zone.
      tables: the batch's tables, or None: then the shard is searched.
      contradicts: bool ``[B]``, whether tokens are in another order than that of a placement, or
        tables are those of others; None if the attention does not depend on it.
    """

    def __init__(self, request: Request, inputs: AttentionInputs):
        length, mask = inputs.q_length, request.spec.mask
        self.tables: MaskTables | None = inputs.shared.caller
        inputs = inputs._replace(shared=inputs.shared._replace(caller=None))
        self.outside = length - zone_of(request)
        query = inputs.query._replace(positions=indices(length))
        kv = inputs.kv._replace(positions=indices(length))
        self.spec = request.spec
        order = Order.of(inputs.query)
        self.contradicts: jax.Array | None = None
        if self.tables is not None:
            route = request.route(length, length)
            self.contradicts = _is_of_others(self.tables, order, route.source(route.local))
        if needs_own_ranges(mask.left, mask.right):
            if self.tables is not None:
                starts, ends = self.tables.own_ranges[:, 0], self.tables.own_ranges[:, 1]
            else:
                starts, ends = _kv_ranges(mask, order, Order.of(inputs.kv))
                self.contradicts = order.is_unsorted()
            query = query._replace(segment_ids=None, kv_starts=starts, kv_ends=ends)
            kv = kv._replace(segment_ids=None)
            self.spec = without_mask(request.spec)
        self.inputs = inputs._replace(query=query, kv=kv)

    def of_queries(self, these: Any) -> AttentionInputs:
        """The inputs; queries where ``these``, bool ``[B or 1, c]``, is False attend to nothing."""
        query = self.inputs.query
        if query.segment_ids is not None:
            query = query._replace(segment_ids=jnp.where(these, query.segment_ids, 0))
        else:
            starts, ends = query.kv_bounds["kv_starts"], query.kv_bounds["kv_ends"]
            query = query._replace(kv_ends=jnp.where(these, ends, starts))
        return self.inputs._replace(query=query)

    def add_zone(self, gradient: jax.Array, zone: jax.Array) -> jax.Array:
        """A gradient ``[B, c, ...]``, with one of the zone added."""
        widths = [(0, 0)] * gradient.ndim
        widths[1] = self.outside, 0
        return gradient + jnp.pad(zone, widths)


def _is_of_others(tables: MaskTables, order: Order, here: jax.Array | int) -> jax.Array:
    """Bool ``[B]``, whether the tables belong to other tokens than those of device ``here``."""
    own = lax.dynamic_index_in_dim(tables.checksums, jnp.asarray(here, jnp.int32), 1, False)
    return checksums(*order, jnp) != own


def zone_of(request: Request) -> int:
    """Tokens of every shard in the gathered zone."""
    return request.layout.known_zone


def indices(length: int) -> Any:
    """int32 ``[length]``, known while tracing."""
    return np.arange(length, dtype=np.int32)


def without_mask(spec: AttentionSpec) -> AttentionSpec:
    """A spec whose mask the KV bounds include."""
    return dataclasses.replace(spec, mask=Mask())


def tokens_from(side: Any, first: int) -> Any:
    """A side's tokens from index ``first`` on."""
    arrays = {
        name: x[first:] if x.ndim == 1 else x[:, first:]
        for name, x in side._asdict().items()
        if x is not None and name != "stats"
    }
    if getattr(side, "stats", None) is not None:
        arrays["stats"] = side.stats[..., first:]
    return type(side)(**arrays)


def without_order(side: Any) -> Any:
    """A side without the arrays of its tokens' order."""
    return side._replace(positions=None, segment_ids=None)
