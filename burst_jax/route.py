"""The way of a travelling block: which devices it visits, in which order, by how many hops.

A stop is how far a block has come: its distance from the device it started on, along every mesh
axis of the ring. At a stop ``d`` device r holds the block of device r - d. Over one axis of n
devices a block moves on by one device a step::

    n = 4        device 0   device 1   device 2   device 3
    stop (0,)    block 0    block 1    block 2    block 3
    stop (1,)    block 3    block 0    block 1    block 2
    stop (2,)    block 2    block 3    block 0    block 1
    stop (3,)    block 1    block 2    block 3    block 0

Over two axes (outer, inner), links between the inner ones fast, it makes a turn of the inner ring
at every outer stop. To the next outer device it goes straight from the stop that begins a turn, a
whole turn ahead: cut into pieces, one of which leaves at every step of the turn, so that the outer
links are busy all the time and each piece lies beside a kernel wherever the compiler puts it::

    2 x 3     turn 0                          turn 1
    stops     (0,0) -> (0,1) -> (0,2)         (1,0) -> (1,1) -> (1,2)
    ahead     (0,0) ---1/3----2/3----3/3----> (1,0)

A gradient follows its block around every turn. Where a turn ends it has the sum of all that the
turn's devices gave; that goes from the end of one turn to the end of the next while the block
makes its turn, is added there, and the last stop sends it home. So the outer links carry one
block and one gradient a turn, whatever the inner ring's size.

Stops that no device needs, because no query there sees a key of the block (a window), are not made:
the block goes on to the next needed one by a single permute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layout import shard_runs
from pallas_kernels import AttentionSpec

Stop = tuple[int, ...]


class Hops(NamedTuple):
    """How often a travelling array is sent on.

    Attributes:
      data: times that a block is, by every device.
      gradient: times that its gradient is.
      outer_data: of ``data``, those along the outer axis of a two-level ring.
      outer_gradient: of ``gradient``, likewise.
    """

    data: int
    gradient: int
    outer_data: int
    outer_gradient: int


@dataclasses.dataclass(frozen=True)
class Route:
    """The stops of a block on a ring, by turns.

    Attributes:
      axes: the mesh axes, outermost first; devices count row-major over them, as a sequence that is
        split over ``P(axes)`` does; without any there is one device.
      sizes: theirs.
      turns: the stops of each turn; the first of all is where the block starts.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    turns: tuple[tuple[Stop, ...], ...]

    @property
    def size(self) -> int:
        """n, devices on the ring."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Of all turns."""
        return tuple(stop for turn in self.turns for stop in turn)

    @property
    def hops(self) -> Hops:
        """How often a block and its gradient are sent on."""
        return count_hops(len(turn) for turn in self.turns)

    def source(self, stop: Any) -> Any:
        """Index of the device whose block is here at ``stop``, a Stop or an int32 array of one."""
        index: Any = 0
        for place, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            # lax.rem converts no Python number to its other operand's dtype, and under
            # jax_enable_x64 a Python int alone is int64.
            place_here = lax.rem(lax.axis_index(axis) - stop[place] + size, np.int32(size))
            index = index * size + place_here
        return index

    def move(self, tree: Any, start: Stop, end: Stop) -> Any:
        """Sends every array of a pytree from where a block is at ``start`` to where at ``end``."""
        if start == end:
            return tree
        by = [(after - before) for before, after in zip(start, end, strict=True)]
        devices = np.indices(self.sizes).reshape(len(self.sizes), -1).T
        targets = np.ravel_multi_index(tuple(((devices + by) % self.sizes).T), self.sizes)
        pairs = list(enumerate(targets.tolist()))
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree)


def cut(tree: Any, count: int) -> list[Any]:
    """Every array of a pytree in so many flat pieces, as equal as can be: a list of pytrees."""
    if count == 1:
        return [tree]

    def piece(x: jax.Array, place: int) -> jax.Array:
        ends = (x.size * place // count, x.size * (place + 1) // count)
        return lax.slice(x.reshape(-1), ends[:1], ends[1:])

    return [jax.tree.map(lambda x, i=i: piece(x, i), tree) for i in range(count)]


def paste(pieces: list[Any], like: Any) -> Any:
    """The inverse of :func:`cut`; ``like`` has the shapes."""
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda x, *parts: jnp.concatenate(parts).reshape(x.shape), like, *pieces)


def count_hops(turns: Any) -> Hops:
    """The hops of turns of so many stops each.

    A block: to every stop but the first. A gradient as often: what is made at home stays there, so
    it starts at the second stop; it goes with its block, from turn to turn, and in the end home.
    """
    turns = list(turns)
    outer = len(turns) - 1
    hops = sum(turns) - 1
    # Nothing comes out of a first turn without a second stop.
    crosses = outer + 1 - (turns[0] == 1) if outer else 0
    return Hops(hops, hops, outer, crosses)


@functools.lru_cache
def make_route(
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    layout: str,
    q_length: int,
    kv_length: int,
    spec: AttentionSpec,
    queries_travel: bool = False,
) -> Route:
    """The route on a ring over ``axes``, without the stops at which no query sees a key.

    Segment ids are not known here, so they leave no stop out.

    Args:
      axes: one mesh axis or two, outermost first; none is one device.
      sizes: theirs.
      layout: the layout's name.
      q_length: query tokens of one shard.
      kv_length: key tokens of one shard.
      spec: the masks.
      queries_travel: whether blocks of queries go around and keys stay, not the other way.
    """
    n = math.prod(sizes)
    offsets = score_offsets(sizes, layout, q_length, kv_length, spec, queries_travel)

    def needed(stop: Stop) -> bool:
        """Whether on some device a key of the block is where the mask lets a query see it."""
        if not any(stop) or (spec.left is None and spec.right is None):
            return True
        low, high = offsets(stop)
        return bool((low <= high).any())

    inner = sizes[-1] if sizes else 1
    turns = []
    for outer in range(n // inner):
        places = ((outer, i)[-len(sizes) :] if sizes else () for i in range(inner))
        if turn := tuple(stop for stop in places if needed(stop)):
            turns.append(turn)
    return Route(axes, sizes, tuple(turns))


def score_offsets(
    sizes: tuple[int, ...],
    layout: str,
    q_length: int,
    kv_length: int,
    spec: AttentionSpec,
    queries_travel: bool = False,
) -> Callable[[Stop], tuple[np.ndarray, np.ndarray]]:
    """``at(stop) -> (low, high)``: which scores the mask keeps at a stop, on every device.

    Shards are runs of tokens at equal distance. Of query run a and key run b on device r, token i
    sees token j where ``low[r, a, b] <= i - j <= high[r, a, b]``, int64 ``[n, runs, runs]``.
    """
    n = math.prod(sizes)
    devices = np.arange(n)
    q_start, stride, q_count = shard_runs(layout, q_length, n)
    kv_start, _, kv_count = shard_runs(layout, kv_length, n)

    def at(stop: Stop) -> tuple[np.ndarray, np.ndarray]:
        sources = devices
        if stop:
            places = np.array(np.unravel_index(devices, sizes)) - np.array(stop)[:, None]
            sources = np.ravel_multi_index(tuple(places % np.array(sizes)[:, None]), sizes)
        # Positions of queries minus positions of keys: base + stride * i, i from -(kv_count - 1) to
        # q_count - 1; the mask lets through those from -right to left.
        at_q, at_kv = (sources, devices) if queries_travel else (devices, sources)
        base = q_start[at_q][:, :, None] - kv_start[at_kv][:, None, :]
        low, high = np.full_like(base, 1 - kv_count), np.full_like(base, q_count - 1)
        if spec.right is not None:
            low = np.maximum(low, -((base + spec.right) // stride))
        if spec.left is not None:
            high = np.minimum(high, (spec.left - base) // stride)
        return low, high

    return at
