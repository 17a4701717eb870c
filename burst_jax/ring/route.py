"""The way of a travelling block: which devices it visits, and in which order.

A stop says how far a block has come: the distance from the device that it started on, along every
mesh axis of the ring. At a stop ``d`` device r holds the block of device r - d. On one axis of n
devices a block moves on by one device a step::

    n = 4        device 0   device 1   device 2   device 3
    stop (0,)    block 0    block 1    block 2    block 3
    stop (1,)    block 3    block 0    block 1    block 2
    stop (2,)    block 2    block 3    block 0    block 1
    stop (3,)    block 1    block 2    block 3    block 0

On two axes (outer, inner), of which the inner one has the fast links, a block makes a turn, a round
of the inner ring, and then goes to the next outer device for another turn. It need not wait for the
turn's end: it leaves from the stop that begins the turn. It is cut into pieces, one of which leaves
at every step of the turn. So the outer links are busy all the time, and each piece lies beside a
kernel wherever the compiler puts it::

    2 x 3     turn 0                          turn 1
    stops     (0,0) -> (0,1) -> (0,2)         (1,0) -> (1,1) -> (1,2)
    ahead     (0,0) ---1/3----2/3----3/3----> (1,0)

Gradients follow their block around every turn. At the last stop of a turn lies the sum of what the
turn's devices added. It goes to the last stop of the next turn while the block makes that turn, and
is added to the sum there. From the last stop of all it goes home. So the outer links carry one
block and one gradient a turn, whatever the inner ring's size. :mod:`burst_jax.ring.schedule` has
every step.

A stop at which no query sees a key of the block, on any device, is left out (a window does that).
The block goes on to the next stop that is needed by a single permute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.permutation import Layout, shard_runs, stripe_size
from burst_jax.ring.block_mask import Blocks, Runs, cut_runs
from pallas_kernels.mask import Mask

Stop = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Route:
    """The stops of a block on a ring, by turns.

    Attributes:
      axes: the mesh axes, outermost first. Devices count row-major over them, like the shards of a
        sequence that is split over ``P(axes)``. No axes: one device.
      sizes: how many devices each axis has.
      turns: the stops of each turn. The first stop of all is where the block starts.
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
        """The stops of all turns."""
        return tuple(stop for turn in self.turns for stop in turn)

    @property
    def home(self) -> Stop:
        """The first stop, at which every block is on its own device."""
        return (0,) * len(self.axes)

    def source(self, stop: Stop | jax.Array) -> jax.Array | int:
        """Index of the device whose block is here at ``stop``, a Stop or an int32 array of one."""
        index: jax.Array | int = 0
        for i, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            # lax.rem converts no Python number to its other operand's dtype, and under
            # jax_enable_x64 a Python int alone is int64.
            along_axis = lax.rem(lax.axis_index(axis) - stop[i] + size, np.int32(size))
            index = index * size + along_axis
        return index

    def move[Tree](self, tree: Tree, start: Stop, end: Stop) -> Tree:
        """Sends a pytree from where a block is at ``start`` to where it is at ``end``."""
        if start == end:
            return tree
        places = np.stack(np.unravel_index(np.arange(self.size), self.sizes), 1)
        moved = (places + np.subtract(end, start)) % self.sizes
        return self.send(tree, np.ravel_multi_index(tuple(moved.T), self.sizes))

    def send[Tree](self, tree: Tree, targets: np.ndarray) -> Tree:
        """Sends a pytree from each device r of the ring to device ``targets[r]``, all different."""
        # JAX takes the axes of a permute in the mesh's own order only, and numbers devices by it.
        mesh_order = jax.sharding.get_abstract_mesh().axis_names
        order = sorted(range(len(self.axes)), key=lambda i: mesh_order.index(self.axes[i]))
        axes = tuple(self.axes[i] for i in order)
        sizes = tuple(self.sizes[i] for i in order)

        def by_mesh(devices: np.ndarray) -> list[int]:
            along = np.unravel_index(devices, self.sizes)
            return np.ravel_multi_index(tuple(along[i] for i in order), sizes).tolist()

        pairs = sorted(zip(by_mesh(np.arange(self.size)), by_mesh(targets), strict=True))
        return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def cut[Tree](tree: Tree, count: int) -> list[Tree]:
    """Cuts every array of a pytree into flat pieces, as equal as can be: a list of pytrees."""
    if count == 1:
        return [tree]

    def piece(x: jax.Array, index: int) -> jax.Array:
        ends = (x.size * index // count, x.size * (index + 1) // count)
        return lax.slice(x.reshape(-1), ends[:1], ends[1:])

    return [jax.tree.map(lambda x, i=i: piece(x, i), tree) for i in range(count)]


def paste[Tree](pieces: list[Tree], like: Tree) -> Tree:
    """The inverse of :func:`cut`: ``like`` is a pytree with the shapes of the result."""
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda x, *parts: jnp.concatenate(parts).reshape(x.shape), like, *pieces)


class Pieces[Tree]:
    """A pytree that is sent in pieces, one after the other.

    Attributes:
      arrays: the pieces that are yet to go, and those that have landed.
    """

    def __init__(self, tree: Tree, count: int):
        self._like = tree
        self.arrays: tuple[list[Any], list[Any]] = cut(tree, count), []

    def move(self, route: Route, start: Stop, end: Stop) -> None:
        """Sends the next piece."""
        (piece, *waiting), landed = self.arrays
        self.arrays = waiting, [*landed, route.move(piece, start, end)]

    def whole(self) -> Tree:
        """The tree again, when all pieces have landed."""
        waiting, landed = self.arrays
        assert not waiting
        return paste(landed, self._like)


class Kept(NamedTuple):
    """The scores that a mask keeps, on each of n devices, between the runs of two shards.

    On device r, token i of query run a sees token j of key run b where
    ``low[r, a, b] <= i - j <= high[r, a, b]``.

    Attributes:
      low: int64 ``[n, query runs, key runs]``.
      high: the same; below ``low`` where nothing is kept.
      q_counts: int64 ``[n, query runs, 1]``, the tokens of each run.
      kv_counts: int64 ``[n, 1, key runs]``.
    """

    low: np.ndarray
    high: np.ndarray
    q_counts: np.ndarray
    kv_counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunked attention: queries attend to keys of their own chunk of ``size`` positions.

    Attributes:
      size: positions per chunk.
    """

    size: int

    @property
    def q_block(self) -> int:
        """Positions of the queries' blocks."""
        return self.size

    @property
    def kv_block(self) -> int:
        """Positions of the keys' blocks."""
        return self.size

    def sees(self, q: Runs, kv: Runs) -> np.ndarray:
        """As :meth:`burst_jax.ring.block_mask.Blocks.sees`: runs of the same chunk."""
        some = (q.counts > 0)[:, :, None] & (kv.counts > 0)[:, None, :]
        return (q.blocks[:, :, None] == kv.blocks[:, None, :]) & some


@dataclasses.dataclass(frozen=True)
class RingMask:
    """Which scores a mask keeps on each device of a ring, at each stop: what a route depends on.

    Segment ids are not known before a program runs, so here they exclude nothing. Neither does a
    mask by blocks whose table is traced.

    Attributes:
      ring_sizes: how many devices each axis of the ring has, outermost first.
      layout: the order of the tokens.
      q_length: query tokens of one shard.
      kv_length: key tokens of one shard.
      mask: which keys a query sees, by their positions.
      queries_travel: whether blocks of queries go around and keys stay, not the other way.
      query_offset: what comes onto the queries' positions in the layout.
      blocks: a block-sparse mask whose table is static, or chunks, or None.
    """

    ring_sizes: tuple[int, ...]
    layout: Layout
    q_length: int
    kv_length: int
    mask: Mask
    queries_travel: bool = False
    query_offset: int = 0
    blocks: Blocks | Chunks | None = None

    @property
    def size(self) -> int:
        """n: devices on the ring, each with one shard of the queries and one of the keys."""
        return math.prod(self.ring_sizes)

    def kept(self, stop: Stop) -> Kept:
        """The scores that are kept at a stop, on every device.

        A shard consists of runs: tokens at equal distance from each other
        (:func:`burst_jax.layouts.permutation.shard_runs`), here cut where blocks of a mask by
        blocks end.
        """
        devices = sources = np.arange(self.size)
        if stop:
            sizes = np.array(self.ring_sizes)[:, None]
            started = np.array(np.unravel_index(devices, self.ring_sizes)) - np.array(stop)[:, None]
            sources = np.ravel_multi_index(tuple(started % sizes), self.ring_sizes)
        q_shards, kv_shards = (sources, devices) if self.queries_travel else (devices, sources)
        block_sizes = (None, None)
        if self.blocks is not None:
            block_sizes = self.blocks.q_block, self.blocks.kv_block
        # Of the two ways to see stripes as runs the one with fewer pairs of runs.
        stripe = stripe_size(self.layout) or 1
        across = stripe**4 <= self.q_length * self.kv_length
        runs_of = functools.partial(
            shard_runs, self.layout, num_shards=self.size, across_stripes=across
        )
        q_start, stride, q_count = runs_of(self.q_length)
        q_start = q_start + self.query_offset
        kv_start, _, kv_count = runs_of(self.kv_length)
        q, kv = (
            Runs(*(x[shards] for x in cut_runs(starts, stride, count, block)))
            for shards, starts, count, block in (
                (q_shards, q_start, q_count, block_sizes[0]),
                (kv_shards, kv_start, kv_count, block_sizes[1]),
            )
        )
        # A query's position minus a key's is base + stride * (i - j), where i - j lies between
        # -(kv_count - 1) and q_count - 1. The mask keeps differences from -right to left.
        base = q.starts[:, :, None] - kv.starts[:, None, :]
        q_counts, kv_counts = q.counts[:, :, None], kv.counts[:, None, :]
        low, high = (np.broadcast_to(x, base.shape) for x in (1 - kv_counts, q_counts - 1))
        low, high = self.mask.shards(base, stride, low, high)
        if self.blocks is not None:
            high = np.where(self.blocks.sees(q, kv), high, low - 1)
        return Kept(low, high, q_counts, kv_counts)

    def needs(self, stop: Stop) -> bool:
        """Whether on some device a query sees a key of the block that is there at a stop.

        The first stop is always needed: a route begins there.
        """
        if not any(stop) or not (self.mask.reads_positions or self.blocks is not None):
            return True
        low, high, *_ = self.kept(stop)
        return bool((low <= high).any())


@functools.lru_cache
def make_route(axes: tuple[str, ...], mask: RingMask) -> Route:
    """The route on a ring over ``axes``, without the stops at which no query sees a key.

    Args:
      axes: one mesh axis or two, outermost first; none is one device.
      mask: the mask, with what the devices along these axes hold.
    """
    sizes = mask.ring_sizes
    inner = sizes[-1] if sizes else 1
    turns = []
    for outer in range(mask.size // inner):
        stops = ((outer, i)[-len(sizes) :] if sizes else () for i in range(inner))
        if turn := tuple(stop for stop in stops if mask.needs(stop)):
            turns.append(turn)
    return Route(axes, sizes, tuple(turns))
