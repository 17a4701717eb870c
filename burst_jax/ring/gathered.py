"""Small ring zones are gathered instead of rotated: split documents are then one sequence.

A ring over small zones runs many short kernels. If the zones of all devices together have at most
:data:`MOST_SHARDS` times the tokens of a shard, every device gets all of them at once. Sorted by
document and position their keys are one sequence, of which each query attends to one range, and the
attention is two independent ones::

    tokens of whole documents    local attention over the shard
    tokens of split documents    queries of this device's zone, keys of all zones, sorted

No query has keys in both, so nothing is merged, and results are rounded as they are written.
Kernels, and what is sent meanwhile::

    forward     whole documents                all-gather of K and V of the zones
                split documents

    backward    whole documents, first half    all-gather of K and V of the zones
                split documents
                whole documents, second half   reduce-scatter of their gradients, in float32

The bytes are those of a ring that rotates K and V. (As many permutes at once are not overlapped:
XLA runs all but four of them one after the other.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.ring.local import Gradients, bounds_of_parts
from burst_jax.ring.request import Request
from burst_jax.ring.schedule import step_name
from burst_jax.ring.zone import (
    LAST,
    Order,
    Shard,
    key_limits,
    tokens_from,
    without_mask,
    without_order,
)
from pallas_kernels import AttentionInputs, Implementation, QuerySide, vary, varying_axes
from pallas_kernels.backend import Dkv
from pallas_kernels.inputs import Carry, PerHead

# The zones of all devices are gathered if they have at most as many tokens as this many shards.
MOST_SHARDS = 4


def gathers(request: Request, length: int) -> bool:
    """Whether the zones of a balanced layout are gathered, on shards of this length.

    Queries that the caller wants to rotate are rotated.
    """
    zone, n = request.zone, request.ring_size
    if not zone or n == 1 or request.rotation == "rotate_query":
        return False
    return zone < length and n * zone <= MOST_SHARDS * length


class _Documents:
    """Both attentions of a device.

    Attributes:
      whole: inputs of the attention over whole documents.
      split: inputs of that over split documents, with this device's zone instead of all keys.
      specs: of ``whole`` and of ``split``.
      shard: this device's shard.
      route: the ring.
      is_split: bool ``[B, z]``: which tokens of this device's zone are of split documents.
    """

    def __init__(self, request: Request, inputs: AttentionInputs):
        assert request.zone is not None
        zone, self.route = request.zone, request.route(request.zone, request.zone)
        self.shard = shard = Shard(request, self.route, inputs)
        own = Order.of(inputs.query, shard.outside)
        everyone = self.route.gather(jnp.stack(own))
        ids, positions = own
        low, high = key_limits(request.spec.mask, positions)
        first, last = jnp.full_like(positions, -LAST), jnp.full_like(positions, LAST)
        bounds = jnp.stack([first, last, positions, low, high])
        zones = Order(everyone[:, 0], everyone[:, 1])
        counts = zones.count_before(jnp.where(ids == 0, LAST, ids), bounds)
        document = counts[1] - counts[0]
        here = document[jnp.asarray(self.route.source(self.route.local))]
        self.is_split = (ids != 0) & (document.sum(0) > here)
        _, _, rank, starts, ends = counts.sum(1)
        starts, ends = (jnp.where(self.is_split, x, 0) for x in (starts, ends))
        self._rank = _one_sequence(self.route.gather(rank))
        index = jnp.broadcast_to(jnp.arange(self._rank.shape[1], dtype=jnp.int32), self._rank.shape)
        # Padding comes last, where nothing attends to it.
        self._order = jax.vmap(lambda rank, i: jnp.zeros_like(i).at[rank].set(i))(self._rank, index)
        local = jnp.pad(~self.is_split, ((0, 0), (shard.outside, 0)), constant_values=True)
        self.whole = shard.of_queries(local)
        query: QuerySide = without_order(tokens_from(inputs.query, shard.outside))
        places: Any = np.arange(zone, dtype=np.int32)
        query = query._replace(positions=places, kv_starts=starts, kv_ends=ends)
        kv = without_order(tokens_from(inputs.kv, shard.outside))
        self.split = AttentionInputs(query, kv, inputs.shared)
        self.specs = shard.spec, without_mask(request.spec)

    def gather(self) -> tuple[jax.Array, jax.Array]:
        """K and V of all zones, ``[n, B, z, K, H]``."""
        return self.route.gather(self.split.kv.k), self.route.gather(self.split.kv.v)

    def with_keys(self, zones: tuple[jax.Array, jax.Array]) -> AttentionInputs:
        """``split`` with the keys of all zones, sorted by document."""
        k, v = (jax.vmap(lambda x, i: x[i])(_one_sequence(x), self._order) for x in zones)
        places: Any = np.arange(k.shape[1], dtype=np.int32)
        return self.split._replace(kv=self.split.kv._replace(k=k, v=v, positions=places))

    def by_zone(self, x: jax.Array) -> jax.Array:
        """A gradient of sorted keys, of each zone: ``[n, B, z, K, H]``."""
        unsorted = jax.vmap(lambda x, rank: x[rank])(x, self._rank)
        batch, tokens, *rest = x.shape
        shape = batch, self.route.size, tokens // self.route.size, *rest
        return jnp.moveaxis(unsorted.reshape(shape), 1, 0)

    def combined(self, whole: Carry, split: Carry) -> Carry:
        """Out and lse of the shard."""
        first, is_split = self.shard.outside, self.is_split
        out = jnp.where(is_split[:, :, None, None], split[0], whole[0][:, first:])
        lse = jnp.where(is_split[:, None], split[1], whole[1][:, :, first:])
        return self.shard.with_results_of_zone(whole, (out, lse))


def forward(request: Request, implementation: Implementation, inputs: AttentionInputs) -> Carry:
    """As :func:`burst_jax.ring.forward.forward`."""
    documents, dtype = _Documents(request, inputs), inputs.query.q.dtype
    of_whole, of_split = documents.specs

    def run(inputs: AttentionInputs, spec: Any) -> Carry:
        bounds = implementation.forward_bounds(inputs, spec=spec)
        return implementation.forward(inputs, bounds, None, spec=spec, out_dtype=dtype)

    with jax.named_scope(step_name("forward", 0)):
        zones, whole = documents.gather(), run(documents.whole, of_whole)
        zones, whole = lax.optimization_barrier((zones, whole))
    with jax.named_scope(step_name("forward", 1)):
        split = run(documents.with_keys(zones), of_split)
        results = documents.combined(whole, split)
    out, lse = (lax.optimization_barrier(x) for x in results)
    return vary((out, lse), varying_axes(inputs))


def backward(
    request: Request, implementation: Implementation, inputs: AttentionInputs
) -> tuple[jax.Array, Dkv, PerHead]:
    """As :func:`burst_jax.ring.backward.backward`."""
    documents = _Documents(request, inputs)
    of_whole, of_split = documents.specs
    whole = Gradients(implementation, of_whole, implementation.dq_accumulator, None)
    split = Gradients(implementation, of_split, implementation.dq_accumulator, None)
    bounds = implementation.backward_bounds(documents.whole, spec=of_whole)
    parts = bounds_of_parts(implementation, bounds)
    with jax.named_scope(step_name("backward", 0)):
        zones, results = (
            documents.gather(),
            whole(documents.whole, parts.get("first", bounds), None, None),
        )
        zones, results = lax.optimization_barrier((zones, results))
    with jax.named_scope(step_name("backward", 1)):
        gathered = documents.with_keys(zones)
        bounds = implementation.backward_bounds(gathered, spec=of_split)
        dq, dkv = split(gathered, bounds, None, None)
        dq, sums = split.dq(dq, gathered), tuple(map(documents.by_zone, dkv))
        dq, sums, results = lax.optimization_barrier((dq, sums, results))
    with jax.named_scope(step_name("backward", 2)):
        zone = tuple(map(documents.route.scatter_sum, sums))
        if "second" in parts:
            results = whole(documents.whole, parts["second"], *results)
        zone, results = lax.optimization_barrier((zone, results))
    dq_whole, (dk, dv) = whole.dq(results[0], documents.whole), results[1]
    add_zone = documents.shard.add_zone
    return add_zone(dq_whole, dq), (add_zone(dk, zone[0]), add_zone(dv, zone[1])), {}


def _one_sequence(x: jax.Array) -> jax.Array:
    """``[n, B, z, ...]`` as ``[B, n z, ...]``."""
    n, batch, zone, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, n * zone, *rest)
