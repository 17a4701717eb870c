"""The ring of a balanced layout: whole documents need none, and split ones a part of every shard.

In a balanced layout (:mod:`burst_jax.layouts.balanced`) most documents are whole on one shard. The
pieces of the others are in the ring zone, the last z tokens of every shard. So the attention is one
call on each device's own shard, and a ring whose further steps see zones alone::

    step (0,)       queries: the shard        keys: the shard
    step (d,)       queries: its zone         keys: the zone of the device at distance d

On its own shard a query's keys are those of its document at or before it, in index order. In
another device's zone they are one range of indices, because a shard's tokens are sorted by document
and position: :func:`kv_ranges` finds it by a search, and kernels get it as per-query KV bounds.
Positions are places in the layout for kernels, ``shard * length + index``.

The first step's calls:

- Forward: one for the queries outside the zone, whose results are rounded as they are written, and
  one for the zone, whose float32 results the ring continues.
- Backward: one with all of the shard's queries and keys, in the two halves that a ring's local step
  always has. The gradients of the zone's ring are added to its own.

Zones that are small enough are not rotated: :mod:`burst_jax.ring.gathered`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.ring.local import Gradients, added_up, bounds_of_parts, dq_accumulator, swap
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Offset, Route
from burst_jax.ring.schedule import Part
from pallas_kernels import AttentionInputs, AttentionSpec, Implementation
from pallas_kernels.backend import Dkv
from pallas_kernels.inputs import Carry, Side
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
        ids = jnp.where(self.segment_ids == 0, LAST, self.segment_ids).reshape(-1)
        places = self.positions.reshape(-1)
        first = np.arange(ids.size, step=length, dtype=np.int32).reshape(*lead, 1)
        own, bounds = segment_ids[..., None], positions[..., None]
        count = jnp.zeros(jnp.broadcast_shapes(positions.shape, first.shape), jnp.int32)
        # A digit of the result per kernel: a bisection would be a kernel per bit.
        for shift in reversed(range(0, length.bit_length(), _DIGIT)):
            steps = np.arange(1, 1 << _DIGIT, dtype=np.int32) << np.int32(shift)
            tried = count[..., None] + steps
            index = first[..., None] + jnp.clip(tried, 1, length) - 1
            segment, position = (x.at[index].get(mode="promise_in_bounds") for x in (ids, places))
            before = (segment < own) | ((segment == own) & (position < bounds))
            count += (before & (tried <= length)).sum(-1, dtype=jnp.int32) << np.int32(shift)
        return count


def key_limits(mask: Mask, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first position that each query attends to in its document, and the exclusive end."""
    low, high = jnp.full_like(positions, _INT32.min), jnp.full_like(positions, LAST)
    if mask.left is not None:
        low = first_key_in_window(positions, mask.left)
    if mask.right is not None:
        high = end_of_keys_in_window(positions, mask.right)
    return low, high


def kv_ranges(mask: Mask, query: Order, kv: Order) -> tuple[jax.Array, jax.Array]:
    """First index and exclusive end of each query's keys; both 0 for padding.

    Both are int32 ``[..., B, queries]``. ``kv`` is sorted by document and position.
    """
    ids, positions = query
    limits = jnp.stack(key_limits(mask, positions))
    starts, ends = jnp.where(ids == 0, 0, kv.count_before(ids, limits))
    return starts, ends


class Shard:
    """One device's inputs in a balanced layout, for the kernels of the first step.

    Attributes:
      inputs: with places as positions, and the masks of :attr:`spec`.
      spec: the call's, with the mask that is left for kernels.
      outside: number of the shard's tokens outside of its zone.
    """

    def __init__(self, request: Request, route: Route, inputs: AttentionInputs):
        assert request.zone is not None
        length, mask = inputs.q_length, request.spec.mask
        self.outside = length - request.zone
        places = request.layout_positions(route, length, route.local)
        query = inputs.query._replace(positions=places)
        kv = inputs.kv._replace(positions=places)
        self.spec = request.spec
        if mask.left is not None or mask.right not in (None, 0):
            # The pieces of a document are farther apart in the text than in the shard.
            ranges = kv_ranges(mask, Order.of(inputs.query), Order.of(inputs.kv))
            starts, ends = (x + places[0] for x in ranges)
            query = query._replace(segment_ids=None, kv_starts=starts, kv_ends=ends)
            kv = kv._replace(segment_ids=None)
            self.spec = without_mask(request.spec)
        self.inputs = inputs._replace(query=query, kv=kv)

    def without_zone(self) -> AttentionInputs:
        """The inputs, with queries of the zone that attend to nothing."""
        return self.of_queries(np.arange(self.inputs.q_length) < self.outside)

    def of_queries(self, these: Any) -> AttentionInputs:
        """The inputs, with other queries than these, bool ``[B or 1, c]``, attending to nothing."""
        query = self.inputs.query
        if query.segment_ids is not None:
            query = query._replace(segment_ids=jnp.where(these, query.segment_ids, 0))
        else:
            starts, ends = query.kv_bounds["kv_starts"], query.kv_bounds["kv_ends"]
            query = query._replace(kv_ends=jnp.where(these, ends, starts))
        return self.inputs._replace(query=query)

    def with_zone_alone(self) -> AttentionInputs:
        """The inputs, without the queries outside of the zone."""
        return self.inputs._replace(query=tokens_from(self.inputs.query, self.outside))

    def with_results_of_zone(self, results: Carry, zone: Carry) -> Carry:
        """Out and lse, with those of the zone written in place."""
        (out, lse), (zone_out, zone_lse) = results, zone
        return (
            lax.dynamic_update_slice_in_dim(out, zone_out, self.outside, 1),
            lax.dynamic_update_slice_in_dim(lse, zone_lse, self.outside, 2),
        )

    def add_zone(self, gradient: jax.Array, zone: jax.Array) -> jax.Array:
        """A gradient ``[B, c, ...]``, with one of the zone added."""
        widths = [(0, 0)] * gradient.ndim
        widths[1] = self.outside, 0
        return gradient + jnp.pad(zone, widths)


class _Steps:
    """The inputs of the ring steps after the first: zones, with per-query KV bounds.

    Attributes:
      spec: the call's, without the mask, which the bounds include.
      own: this device's zone of the side that is sent, without what is known of every zone.
    """

    def __init__(
        self, request: Request, route: Route, inputs: AttentionInputs, *, rotates_query: bool
    ):
        assert request.zone is not None
        self._route, self._rotates_query, self._shared = route, rotates_query, inputs.shared
        self.spec = without_mask(request.spec)
        length, zone = inputs.q_length, request.zone
        outside = length - zone
        zones = [without_order(tokens_from(side, outside)) for side in inputs[:2]]
        self._stationary, self.own = swap(not rotates_query, *zones)

        sides = swap(rotates_query, inputs.query, inputs.kv)
        theirs, ours = (Order.of(side, outside) for side in sides)
        # A few integers of all zones at once, and the tables of all steps from them: computed step
        # by step they would be several small kernels each.
        everyone = route.gather(jnp.stack(theirs))
        here, *others = (jnp.asarray(route.source(o), jnp.int32) for o in route.offsets)
        sources = jnp.stack(others)
        index = np.arange(outside, length, dtype=np.int32)
        order = Order(*(everyone[sources, i] for i in range(2)))
        starts, ends = kv_ranges(request.spec.mask, *swap(not rotates_query, ours, order))
        theirs, ours = np.int32(length) * sources[:, None] + index, np.int32(length) * here + index
        ours = jnp.broadcast_to(ours, theirs.shape)
        q_places, kv_places = swap(not rotates_query, ours, theirs)
        shift = kv_places[:, None, :1]
        self._arrays = q_places, kv_places, starts + shift, ends + shift

    def bounds(self, bounds_of: Any) -> list[Any]:
        """``bounds_of(inputs, spec=...)`` of every step after the first."""

        def of_step(*arrays: jax.Array) -> Any:
            return bounds_of(self._inputs(arrays, self.own), spec=self.spec)

        tables = jax.vmap(of_step)(*self._arrays)
        count = len(self._route.offsets) - 1
        return [jax.tree.map(lambda table, i=i: table[i], tables) for i in range(count)]

    def inputs(self, offset: Offset, block: Any) -> AttentionInputs:
        """The inputs of the step at ``offset``, at which this device has ``block``."""
        index = self.index(offset)
        return self._inputs(tuple(x[index] for x in self._arrays), block)

    def index(self, offset: Offset) -> int:
        """The step's index, from 0 for the one after the first."""
        return self._route.offsets.index(offset) - 1

    def _inputs(self, arrays: tuple[jax.Array, ...], block: Any) -> AttentionInputs:
        q_places, kv_places, starts, ends = arrays
        query, kv = swap(not self._rotates_query, self._stationary, block)
        query = query._replace(positions=q_places, kv_starts=starts, kv_ends=ends)
        return AttentionInputs(query, kv._replace(positions=kv_places), self._shared)


class _Sum(NamedTuple):
    """A side's gradient on its own device.

    Attributes:
      shard: that of the first step, for the whole shard; None before it.
      zone: that of the other steps, for the zone; None before them.
    """

    shard: Any = None
    zone: Any = None


class ZoneForward:
    """The forward kernels in a balanced layout, like :class:`burst_jax.ring.local.LocalForward`.

    Attributes:
      route: the route of the zone's K and V.
      block: this device's own zone of K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, inputs: AttentionInputs):
        self.route = route = zone_route(request)
        self.block: Any = None
        self._shard, self._dtype = Shard(request, route, inputs), inputs.query.q.dtype
        self._bounds_of = implementation.forward_bounds
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        if len(route.offsets) > 1:
            self._steps = _Steps(request, route, inputs, rotates_query=False)
            self.block = self._steps.own
            self._bounds = self._steps.bounds(self._bounds_of)

    def __call__(self, offset: Offset, kv: Any, carry: Any, *, last: bool) -> Any:
        """The attention over these keys and the ``carry`` of earlier steps.

        Returns:
          ``(outside, zone)``, the out and lse of the shard's queries outside its zone, None if
          there are none, and those of its zone, float32. In the ``last`` step ``(out, lse)`` of
          the shard, out in the query's dtype.
        """
        if len(self.route.offsets) == 1:
            return self._on_shard(self._shard.inputs, self._dtype)
        if offset == self.route.local:
            outside = None
            if self._shard.outside:
                outside = self._on_shard(self._shard.without_zone(), self._dtype)
            return outside, self._on_shard(self._shard.with_zone_alone(), None)
        outside, zone = carry
        zone = self._forward(
            self._steps.inputs(offset, kv),
            self._bounds[self._steps.index(offset)],
            zone,
            spec=self._steps.spec,
            out_dtype=self._dtype if last else None,
        )
        if not last:
            return outside, zone
        if outside is None:
            return zone
        return self._shard.with_results_of_zone(outside, zone)

    def _on_shard(self, inputs: AttentionInputs, out_dtype: Any) -> Carry:
        spec = self._shard.spec
        bounds = self._bounds_of(inputs, spec=spec)
        return self._forward(inputs, bounds, None, spec=spec, out_dtype=out_dtype)


class ZoneBackward:
    """The backward kernels in a balanced layout, like :class:`burst_jax.ring.local.LocalBackward`.

    Attributes:
      route: the route of the rotating side's zone.
      rotating: this device's own zone of it.
      splits_local: whether the first step's work is done in two halves.
    """

    def __init__(
        self,
        request: Request,
        implementation: Implementation,
        inputs: AttentionInputs,
        rotation: Rotation,
    ):
        self._rotate_kv = rotate_kv = rotation == "rotate_kv"
        self.route = route = zone_route(request)
        self._shard = shard = Shard(request, route, inputs)
        whole = implementation.backward_bounds(shard.inputs, spec=shard.spec)
        alone = len(route.offsets) == 1
        self._shard_bounds = bounds_of_parts(implementation, whole, alone=alone)
        self.splits_local = "first" in self._shard_bounds
        out_dtype = inputs.query.q.dtype if alone and request.ulysses_axis is None else None
        accumulator = None if alone else implementation.dq_accumulator
        self._of_shard = Gradients(implementation, shard.spec, accumulator, out_dtype)
        self.rotating: Any = None
        if alone:
            return
        self._steps = steps = _Steps(request, route, inputs, rotates_query=not rotate_kv)
        self.rotating = steps.own
        self._bounds = steps.bounds(implementation.backward_bounds)
        self._any_step = steps.inputs(route.offsets[1], self.rotating)
        accumulator = dq_accumulator(
            implementation, steps.spec, self._any_step, self._bounds[0], route, rotate_kv
        )
        self._of_zone = Gradients(
            implementation, steps.spec, accumulator, None, maximum=route.maximum
        )

    def __call__(
        self, offset: Offset, part: Part, block: Any, stationary: Any, rotating: Any
    ) -> tuple[Any, Any]:
        """The gradients of the two sides so far, with those of a ring step added."""
        here = stationary or _Sum()
        if offset == self.route.local:
            own = rotating or _Sum()
            dq, dkv = swap(self._rotate_kv, here.shard, own.shard)
            dq, dkv = self._of_shard(self._shard.inputs, self._shard_bounds[part], dq, dkv)
            of_shard, of_own = swap(self._rotate_kv, dq, dkv)
            return here._replace(shard=of_shard), own._replace(shard=of_own)
        inputs, bounds = self._steps.inputs(offset, block), self._bounds[self._steps.index(offset)]
        dq, dkv = swap(self._rotate_kv, here.zone, rotating)
        of_zone, rotating = swap(self._rotate_kv, *self._of_zone(inputs, bounds, dq, dkv))
        return here._replace(zone=of_zone), rotating

    @property
    def per_head(self) -> dict[str, jax.Array]:
        """Partial gradients of per-head parameters: in this layout none are computed in kernels."""
        return self._of_shard.per_head

    def add(self, sums: list[Any]) -> Any:
        """The sum of partial gradients of the rotating side; the shard's own stays apart."""
        own = sums[0] if isinstance(sums[0], _Sum) else None
        total = added_up(sums[own is not None :])
        return total if own is None else own._replace(zone=total)

    def results(self, stationary: Any, rotating: Any) -> tuple[jax.Array, Dkv]:
        """``(dq, (dk, dv))`` of the shard from the gradients of the two sides after all steps."""
        if len(self.route.offsets) == 1:
            return swap(self._rotate_kv, stationary.shard, rotating.shard)
        (q_shard, kv_shard), (q_zone, kv_zone) = (
            swap(self._rotate_kv, *sides) for sides in zip(stationary, rotating, strict=True)
        )
        q_shard = self._of_shard.dq(q_shard, self._shard.inputs)
        q_zone = self._of_zone.dq(q_zone, self._any_step)

        add_zone = self._shard.add_zone
        return add_zone(q_shard, q_zone), jax.tree.map(add_zone, kv_shard, kv_zone)


def zone_route(request: Request) -> Route:
    """The route of zones: every device's, or without a zone the first step alone."""
    assert request.zone is not None
    route = request.route(request.zone, request.zone)
    return route if request.zone else dataclasses.replace(route, passes=((route.local,),))


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
