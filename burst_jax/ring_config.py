"""What is static about one ring, and what it hands to the local attention at each stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.layout import shard_positions
from burst_jax.route import Route, Stop, make_route
from pallas_kernels import AttentionSpec, Implementation, Tokens, resolve


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """Everything static about one ring.

    Attributes:
      axes: the ring's mesh axes, outermost first.
      sizes: theirs.
      head_axis: the mesh axis whose devices exchange tokens for heads, or None.
      kv_heads: K on one device, before any exchange.
      layout: the layout's name.
      spec: masks and scale.
      implementation: the local attention, as the caller named it.
      backward: the rotation, as the caller named it.
      platform: what the program is for.
      compute_capability: of the GPU, or None.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    head_axis: str | None
    kv_heads: int
    layout: str
    spec: AttentionSpec
    implementation: str | Implementation | None
    backward: str
    platform: str
    compute_capability: float | None

    def resolve(self, q: Any, kv: Any, *, backward: bool = False) -> Implementation:
        """The local attention for these arrays."""
        return resolve(
            self.implementation,
            platform=self.platform,
            compute_capability=self.compute_capability,
            q=q,
            kv=kv,
            backward=backward,
        )

    def route(self, q_length: int, kv_length: int, *, queries_travel: bool = False) -> Route:
        """The stops that shards of these lengths need."""
        return make_route(
            self.axes, self.sizes, self.layout, q_length, kv_length, self.spec, queries_travel
        )

    def tokens(self, route: Route, length: int, stop: Any, segment_ids: jax.Array | None) -> Tokens:
        """The tokens of the block that is here at ``stop``."""
        shard = route.source(stop)
        return Tokens(shard_positions(self.layout, length, route.size, shard), segment_ids)


def home(route: Route) -> Stop:
    """The stop at which every block is on its own device."""
    return (0,) * len(route.axes)


def bounds_by_stop(
    route: Route, segment_ids: jax.Array | None, bounds_of: Callable[[Any, Any], Any]
) -> Callable[[Stop, jax.Array | None], Any]:
    """``at(stop, segment_ids) -> bounds`` from ``bounds_of(stop, segment_ids) -> bounds``.

    Tables that depend on positions alone are made for all stops at once: one small kernel instead
    of several per step, and in an 8 x A100 program no table comes to lie where the next step's
    block could (with it, memory grew by a block from 12 devices on). Segment ids arrive with their
    block, so their tables are made as they land.
    """
    if segment_ids is not None or len(route.stops) == 1:
        return bounds_of
    stops = jnp.asarray(np.array(route.stops, np.int32))
    tables = jax.vmap(lambda stop: bounds_of(stop, None))(stops)

    def at(stop: Stop, segment_ids: jax.Array | None) -> Any:
        del segment_ids
        place = route.stops.index(stop)
        return jax.tree.map(lambda table: table[place], tables)

    return at
