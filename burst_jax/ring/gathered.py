"""Attention in a balanced layout: local for whole documents, over gathered keys for split ones.

A ring over the zones (:mod:`burst_jax.ring.zone`) would run many short kernels, each of which reads
and writes results in float32. So every device gathers the zones of all devices at once; if they
have more than ``MOST_SHARDS`` times the tokens of a shard, a slice of every zone at a time
(:func:`burst_jax.layouts.tables.zone_slices`).
Sorted by document and position the keys of a slice are one sequence, of which each query attends to
one range. There are two independent attentions::

    tokens of whole documents    local attention over the shard
    tokens of split documents    queries of this device's zone, keys of all zones, sorted

No query has keys in both, so their results are not merged. With two slices the kernels, and what
is sent meanwhile, are::

    forward     whole documents             all-gather of K and V of slice 0
                split documents, slice 0    all-gather of K and V of slice 1
                split documents, slice 1

    backward    delta, zeros, tile bounds   all-gather of K and V of slice 0
                split documents, slice 0    all-gather of K and V of slice 1
                split documents, slice 1    reduce-scatter of gradients of slice 0
                whole documents             reduce-scatter of gradients of slice 1

Gradients are sent in float32, so the bytes are those of a ring that rotates K and V. (Permutes in
place of one all-gather would not overlap: XLA runs all but four of them one after the other.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.tables import MaskTables, needs_own_ranges, zone_slices
from burst_jax.ring.local import Gradients
from burst_jax.ring.padding import with_zeros
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Route
from burst_jax.ring.schedule import step_name
from burst_jax.ring.zone import (
    LAST,
    Order,
    Shard,
    indices,
    key_limits,
    tokens_from,
    without_mask,
    without_order,
    zone_of,
)
from pallas_kernels import AttentionInputs, Implementation, QuerySide, vary, varying_axes
from pallas_kernels.backend import Dkv
from pallas_kernels.inputs import Carry, PerHead


def zeroes_padding(
    request: Request, implementation: Implementation, inputs: AttentionInputs, *, backward: bool
) -> bool:
    """Whether a pass replaces what arrays hold in padding by zeros; else its caller must.

    The kernels of whole documents do if they can, by segment ids, which per-query KV bounds
    replace. Those of split documents get bounds: what they read of padding is zeroed before.
    """
    mask = request.spec.mask
    has_ids = not needs_own_ranges(mask.left, mask.right)
    return has_ids and implementation.zeroes_padding(request.spec, inputs, backward=backward)


def _sends(request: Request) -> bool:
    """Whether devices need tokens of other shards."""
    return bool(zone_of(request)) and request.ring_size > 1


class _Found(NamedTuple):
    """Where the tokens of split documents are.

    Attributes:
      is_split: bool ``[B, z]``, whether a token of this device's zone is of a split document.
      orders: of each slice int32 ``[B, n slice]``, the index of each sorted token among those of
        all zones; None where it is computed from ``ranks``.
      ranks: of each slice int32 ``[B, n slice]``, the place of each token among the sorted ones.
      ranges: of each slice ``(starts, ends)`` int32 ``[B, z]``, the sorted keys of each query.
      contradicts: bool ``[B]``, whether the layout is that of another placement.
    """

    is_split: jax.Array
    orders: list[jax.Array] | None
    ranks: list[jax.Array]
    ranges: list[tuple[jax.Array, ...]]
    contradicts: jax.Array


def _given(shard: Shard, tables: MaskTables, slices: list[slice], n: int) -> _Found:
    """What the batch's tables hold for this device."""
    assert shard.contradicts is not None
    ranges = tables.kv_ranges[..., shard.outside :]
    orders, ranks = (
        [tables.gather_order[:, i, n * part.start : n * part.stop] for part in slices]
        for i in range(2)
    )
    return _Found(
        tables.is_split[:, shard.outside :],
        orders,
        ranks,
        [(ranges[:, i, 0], ranges[:, i, 1]) for i in range(len(slices))],
        shard.contradicts,
    )


class _Documents:
    """Both attentions of a device: over whole and over split documents.

    Attributes:
      whole: inputs of the attention over whole documents.
      split: inputs of that over split documents, with the keys of this device's zone instead of a
        slice of all zones. It has the same arrays as the inputs of every slice, which determine how
        an implementation accumulates dQ.
      specs: of ``whole`` and of ``split``.
      shard: this device's shard.
      route: the ring.
      slices: the slices of a zone, of its tokens.
      parts: K and V of each slice of this device's zone, ``[B, slice, K, H]``.
    """

    def __init__(self, request: Request, inputs: AttentionInputs, *, zeroes_padding: bool):
        """``zeroes_padding``: whether padding may hold anything but zeros."""
        zone = zone_of(request)
        self.route = request.route(zone, zone)
        self.shard = shard = Shard(request, inputs)
        self.slices = zone_slices(zone, self.route.size, inputs.q_length)
        self._segment_ids = Order.of(inputs.query).segment_ids
        in_zone = AttentionInputs(
            tokens_from(inputs.query, shard.outside), tokens_from(inputs.kv, shard.outside)
        )
        if zeroes_padding:
            in_zone = with_zeros(in_zone)
        kv = without_order(in_zone.kv)
        self.parts = [(kv.k[:, part], kv.v[:, part]) for part in self.slices]
        if shard.tables is None:
            found = self._searched(request, inputs)
        else:
            found = _given(shard, shard.tables, self.slices, self.route.size)
        self._is_split, self._orders, self._ranks, self._ranges, self._contradicts = found
        local = jnp.pad(~self._is_split, ((0, 0), (shard.outside, 0)), constant_values=True)
        self.whole = shard.of_queries(local)
        starts, ends = self._ranges[0]
        query: QuerySide = without_order(in_zone.query)
        query = query._replace(positions=indices(zone), kv_starts=starts, kv_ends=ends)
        kv = kv._replace(positions=indices(zone))
        self.split = AttentionInputs(query, kv, shard.inputs.shared)
        self.specs = shard.spec, without_mask(request.spec)

    def _searched(self, request: Request, inputs: AttentionInputs) -> _Found:
        """What tables hold, by a search over the gathered segment ids and positions."""
        shard = self.shard
        own = Order.of(inputs.query, shard.outside)
        # Without the barrier XLA would combine this all-gather, which the first kernel waits for,
        # with that of K and V, which is sent during the kernel. The same holds for the one below.
        everyone, parts = lax.optimization_barrier((self.route.gather(jnp.stack(own)), self.parts))
        ids, positions = own
        low, high = key_limits(request.spec.mask, positions)
        first, last = jnp.full_like(positions, -LAST), jnp.full_like(positions, LAST)
        bounds = jnp.stack([first, last, positions, low, high])
        zones = Order(everyone[:, 0], everyone[:, 1])
        counts = zones.count_before(ids, bounds)
        document = counts[1] - counts[0]
        here = jnp.asarray(self.route.source(self.route.local), jnp.int32)
        is_split = (ids != 0) & (document.sum(0) > document[here])
        outside = self._segment_ids[:, : shard.outside]
        contradicts = self._is_outside(inputs, zones.segment_ids, here)
        contradicts |= _is_on_several_shards(self.route, outside, inputs.q_length)
        # A window searches all tokens of the shard.
        unsorted = shard.contradicts
        contradicts |= Order(*own).is_unsorted() if unsorted is None else unsorted
        # A slice is a range of a sorted zone.
        of_slices = [
            jnp.clip(counts[2:] - np.int32(part.start), 0, np.int32(part.stop - part.start)).sum(1)
            for part in self.slices
        ]
        ranks = [of[0, :, part] for of, part in zip(of_slices, self.slices, strict=True)]
        ranks = self.route.gather(jnp.concatenate(ranks, 1))
        ranks, self.parts = lax.optimization_barrier((ranks, parts))
        ranks = [_one_sequence(ranks[..., part]) for part in self.slices]
        ranges = [tuple(jnp.where(is_split, x, 0) for x in of[1:]) for of in of_slices]
        return _Found(is_split, None, ranks, ranges, contradicts)

    def _is_outside(self, inputs: AttentionInputs, zones: jax.Array, here: jax.Array) -> jax.Array:
        """Bool ``[B]``, whether a split document has tokens before this device's zone.

        If so, the layout is that of another placement. Split documents have the highest ids, so
        only the last document before the zone can be one; in the order of a fixed layout also those
        at the ends of its blocks. It is split if it is also in the zone of another device.
        """
        if not self.shard.outside:
            return jnp.zeros(inputs.query.q.shape[0], bool)
        ends = _block_ends(self._segment_ids[:, : self.shard.outside], inputs.q_length)
        others = indices(self.route.size)[:, None, None] != here
        same = (zones == ends[:, None, :, None]) & others & (ends != 0)[:, None, :, None]
        return same.any((0, 1, 3))

    def gather(self, parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, ...]:
        """The first of these slices of all zones, ``[n, B, slice, K, H]``; nothing of none."""
        return tuple(map(self.route.gather, parts[0])) if parts else ()

    def with_keys(self, index: int, zones: tuple[jax.Array, ...]) -> AttentionInputs:
        """``split`` with the keys of a slice of all zones, sorted by document."""
        if self._orders is not None:
            order = self._orders[index]
        else:
            rank = self._ranks[index]
            tokens = jnp.broadcast_to(jnp.arange(rank.shape[1], dtype=jnp.int32), rank.shape)
            # Padding comes last, where nothing attends to it.
            order = jax.vmap(lambda rank, i: jnp.zeros_like(i).at[rank].set(i))(rank, tokens)
        k, v = (jax.vmap(lambda x, i: x[i])(_one_sequence(x), order) for x in zones)
        starts, ends = self._ranges[index]
        query = self.split.query._replace(kv_starts=starts, kv_ends=ends)
        kv = self.split.kv._replace(k=k, v=v, positions=indices(k.shape[1]))
        return self.split._replace(query=query, kv=kv)

    def by_zone(self, index: int, x: jax.Array) -> jax.Array:
        """A gradient of a slice's sorted keys, of each zone: ``[n, B, slice, K, H]``."""
        unsorted = jax.vmap(lambda x, rank: x[rank])(x, self._ranks[index])
        batch, tokens, *rest = x.shape
        shape = batch, self.route.size, tokens // self.route.size, *rest
        return jnp.moveaxis(unsorted.reshape(shape), 1, 0)

    def combined(self, whole: Carry, split: Carry) -> Carry:
        """Out and lse of the shard; with NaN if the placement contradicts the layout."""
        # XLA reads and writes the zone's part alone only if both operations have one start index,
        # which is no constant: else it would read by a static slice, and copy the whole shard.
        first = lax.optimization_barrier(jnp.int32(self.shard.outside))

        def with_zone(x: jax.Array, of_split: jax.Array, axis: int, per_token: Any) -> jax.Array:
            zone = lax.dynamic_slice_in_dim(x, first, of_split.shape[axis], axis)
            zone = jnp.where(per_token(self._is_split), of_split, zone)
            return lax.dynamic_update_slice_in_dim(x, zone, first, axis)

        out = with_zone(whole[0], split[0], 1, lambda x: x[:, :, None, None])
        lse = with_zone(whole[1], split[1], 2, lambda x: x[:, None])
        return _nan_where(self._contradicts, self._segment_ids, (out, lse))


def _block_ends(segment_ids: jax.Array, length: int) -> jax.Array:
    """The largest id before the zone, and those at the ends of a shard or its halves: ``[5, B]``.

    Args:
      segment_ids: int32 ``[B, tokens]`` of a shard, without its zone.
      length: tokens of the shard, with its zone.
    """
    last = segment_ids.shape[1] - 1
    index = np.array([0, length // 2 - 1, length // 2, last]).clip(0, last)
    # Padding is at the end of a shard.
    return jnp.concatenate([segment_ids[:, index].T, segment_ids.max(1)[None]])


def _is_on_several_shards(route: Route, segment_ids: jax.Array, length: int) -> jax.Array:
    """Bool ``[B]``, whether a document has tokens on several shards outside of their zones.

    If so, the layout is that of another placement, or of no placement. Of several shards that have
    pieces, two have one of the same document as their last: split documents have the highest ids.
    In contiguous and zigzag order neighbouring blocks share a document that is at an end of both.

    Args:
      route: the ring.
      segment_ids: int32 ``[B, tokens]`` of this shard, without its zone.
      length: tokens of the shard, with its zone.
    """
    if not segment_ids.shape[1]:
        return jnp.zeros(segment_ids.shape[0], bool)
    ends = _block_ends(segment_ids, length)
    everyone = route.gather(ends)
    others = indices(route.size) != jnp.asarray(route.source(route.local), jnp.int32)
    same = (everyone[:, :, None] == ends) & (ends != 0) & others[:, None, None, None]
    return same.any((0, 1, 2))


def _nan_where(wrong: jax.Array, segment_ids: jax.Array, carry: Carry) -> Carry:
    """Out and lse with NaN in the last token of each sequence that is ``wrong``, bool ``[B]``.

    One token: XLA writes it in place, and would copy what it selects from.
    """
    out, lse = carry
    rows, tokens = jnp.arange(len(wrong)), segment_ids.shape[1]
    last = jnp.max(jnp.where(segment_ids != 0, indices(tokens), 0), 1)
    of_token, of_heads = out[rows, last], lse[rows, :, last]
    of_token = jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, out.dtype), of_token)
    of_heads = jnp.where(wrong[:, None], jnp.float32(jnp.nan), of_heads)
    return out.at[rows, last].set(of_token), lse.at[rows, :, last].set(of_heads)


def forward(request: Request, implementation: Implementation, inputs: AttentionInputs) -> Carry:
    """As :func:`burst_jax.ring.forward.forward`."""
    dtype = inputs.query.q.dtype
    run_jitted = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))

    def run(inputs: AttentionInputs, carry: Carry | None, spec: Any, out_dtype: Any) -> Carry:
        bounds = implementation.forward_bounds(inputs, spec=spec)
        return run_jitted(inputs, bounds, carry, spec=spec, out_dtype=out_dtype)

    if not _sends(request):
        shard, length = Shard(request, inputs), inputs.q_length
        results = run(shard.inputs, None, shard.spec, dtype)
        ids, wrong = Order.of(inputs.query).segment_ids, shard.contradicts
        if request.ring_size > 1 and shard.tables is None:
            several = _is_on_several_shards(request.route(length, length), ids, length)
            wrong = several if wrong is None else several | wrong
        if wrong is None:
            return results
        return vary(_nan_where(wrong, ids, results), varying_axes(inputs))
    zeroes = zeroes_padding(request, implementation, inputs, backward=False)
    documents = _Documents(request, inputs, zeroes_padding=zeroes)
    of_whole, of_split = documents.specs
    # What is gathered later passes each step's barrier: XLA would gather it early.
    parts = documents.parts
    with jax.named_scope(step_name("forward", 0)):
        zones, whole = documents.gather(parts), run(documents.whole, None, of_whole, dtype)
        zones, parts, whole = lax.optimization_barrier((zones, parts[1:], whole))
    split: Any = None
    for index in range(len(documents.slices)):
        with jax.named_scope(step_name("forward", index + 1)):
            following = documents.gather(parts)
            keys = documents.with_keys(index, zones)
            split = run(keys, split, of_split, dtype if not parts else None)
            zones, parts, split = lax.optimization_barrier((following, parts[1:], split))
    out, lse = (lax.optimization_barrier(x) for x in documents.combined(whole, split))
    return vary((out, lse), varying_axes(inputs))


def backward(
    request: Request, implementation: Implementation, inputs: AttentionInputs, rotation: Rotation
) -> tuple[jax.Array, Dkv, PerHead]:
    """As :func:`burst_jax.ring.backward.backward`; nothing rotates."""
    del rotation
    if not _sends(request):
        return _backward_alone(request, implementation, inputs)
    zeroes = zeroes_padding(request, implementation, inputs, backward=True)
    documents = _Documents(request, inputs, zeroes_padding=zeroes)
    accumulator = implementation.dq_accumulator
    route, (of_whole, of_split) = documents.route, documents.specs
    split = Gradients(implementation, of_split, accumulator, None, maximum=route.maximum)
    parts, dq, sums, reduced = documents.parts, None, (), []
    with jax.named_scope(step_name("backward", 0)):
        zones, parts = lax.optimization_barrier((documents.gather(parts), parts[1:]))
    for index in range(len(documents.slices)):
        with jax.named_scope(step_name("backward", index + 1)):
            following, of_zone = documents.gather(parts), tuple(map(route.scatter_sum, sums))
            keys = documents.with_keys(index, zones)
            bounds = implementation.backward_bounds(keys, spec=of_split)
            # The sum of dQ must be able to hold what the keys of all slices add to it.
            dq = split.zeros(documents.split, bounds) if dq is None else dq
            dq, dkv = split(keys, bounds, dq, None)
            sums = tuple(documents.by_zone(index, x) for x in dkv)
            zones, parts, of_zone, sums, dq = lax.optimization_barrier(
                (following, parts[1:], of_zone, sums, dq)
            )
            reduced += [of_zone] if of_zone else []
    # Whole documents come last, because more is sent here than at the start, and all at once,
    # because one kernel takes less time than two.
    with jax.named_scope(step_name("backward", len(documents.slices) + 1)):
        whole, of_zone = documents.whole, tuple(map(route.scatter_sum, sums))
        bounds = implementation.backward_bounds(whole, spec=of_whole)
        gradients = Gradients(implementation, of_whole, accumulator, None)
        results = gradients(whole, bounds, None, None)
        reduced.append(of_zone)
        reduced, results = lax.optimization_barrier((reduced, results))
    dk, dv = (jnp.concatenate(slices, 1) for slices in zip(*reduced, strict=True))
    add_zone, (dk_whole, dv_whole) = documents.shard.add_zone, results[1]
    dq = add_zone(gradients.dq(results[0], whole), split.dq(dq, documents.split))
    return dq, (add_zone(dk_whole, dk), add_zone(dv_whole, dv)), {}


def _backward_alone(
    request: Request, implementation: Implementation, inputs: AttentionInputs
) -> tuple[jax.Array, Dkv, PerHead]:
    """:func:`backward` of a device that needs no other shard."""
    shard = Shard(request, inputs)
    bounds = implementation.backward_bounds(shard.inputs, spec=shard.spec)
    # A Ulysses axis may sum gradients of copied heads.
    out_dtype = inputs.query.q.dtype if request.ulysses_axis is None else None
    gradients = Gradients(implementation, shard.spec, None, out_dtype)
    return *gradients(shard.inputs, bounds, None, None), {}


def _one_sequence(x: jax.Array) -> jax.Array:
    """``[n, B, z, ...]`` as ``[B, n z, ...]``."""
    n, batch, zone, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, n * zone, *rest)
