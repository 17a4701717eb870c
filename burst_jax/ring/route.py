"""The route of a rotating block: which devices it visits, and in which order.

At each ring step every device holds one block. The step's offset is the distance of the block from
its own device along each mesh axis of the ring: at offset ``d`` device r holds the block of device
r - d. On one axis of n devices a block is sent to the next device after every step::

    n = 4        device 0   device 1   device 2   device 3
    step (0,)    block 0    block 1    block 2    block 3      the local block
    step (1,)    block 3    block 0    block 1    block 2
    step (2,)    block 2    block 3    block 0    block 1
    step (3,)    block 1    block 2    block 3    block 0

On two axes (outer, inner), of which the inner one has the faster interconnect, a block makes one
pass around the inner ring and then continues on the next outer device. The outer send does not wait
for the end of the pass: the device that held the block at the pass's first step sends it in chunks,
one during each step. So the outer interconnect is always busy, and every chunk overlaps with a
kernel::

    2 x 3     pass 0                          pass 1
    steps     (0,0) -> (0,1) -> (0,2)         (1,0) -> (1,1) -> (1,2)
    chunks    (0,0) ---1/3----2/3----3/3----> (1,0)

Gradients follow their block around every inner-ring pass. The last step of a pass holds the sum of
what the devices of the pass added. It is sent to the last step of the next pass while the block
makes that pass, and is added to the sum there. After the last step it returns to its own device. So
the outer interconnect carries one block and one gradient per pass, independent of the inner ring's
size. :mod:`burst_jax.ring.schedule` lists every step.

A step at which no query attends to a key of the block, on any device, is skipped (with a sliding
window, for example). One permute sends the block directly to the next step that is needed.
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
from burst_jax.ring.block_mask import AttentionChunks, Blocks, Runs, cut_runs
from pallas_kernels.mask import Mask

# Distance of a ring step's blocks from their own devices, along each axis of the ring.
Offset = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Route:
    """The offsets of the ring steps of a block, by inner-ring passes.

    Attributes:
      axes: the mesh axes, outermost first. Devices are numbered row-major over them, like the
        shards of a sequence that is sharded over ``P(axes)``. Empty for one device.
      sizes: number of devices on each axis.
      passes: the offsets of each pass. The first offset of all is the local block's.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    passes: tuple[tuple[Offset, ...], ...]

    @property
    def size(self) -> int:
        """n, devices on the ring."""
        return math.prod(self.sizes)

    @property
    def offsets(self) -> tuple[Offset, ...]:
        """The offsets of all ring steps in order."""
        return tuple(offset for each in self.passes for offset in each)

    @property
    def local(self) -> Offset:
        """The first offset, at which every block is on its own device."""
        return (0,) * len(self.axes)

    def source(self, offset: Offset | jax.Array) -> jax.Array | int:
        """Index of the device whose block this one holds at ``offset`` (or an int32 array)."""
        index: jax.Array | int = 0
        if self.size == 1:
            return index
        for i, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            # lax.rem does not convert a Python number to the dtype of its other operand, and under
            # jax_enable_x64 a Python int alone is int64.
            along_axis = lax.rem(lax.axis_index(axis) - offset[i] + size, np.int32(size))
            index = index * size + along_axis
        return index

    def gather(self, x: jax.Array) -> jax.Array:
        """The arrays of all devices of the ring, stacked by their index."""
        return lax.all_gather(x, self.axes)

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """The sum over the ring of ``x[i]`` ``[n, ...]``, i being this device's index."""
        return lax.psum_scatter(x, self.axes)

    def maximum(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum over the devices of the ring."""
        return lax.pmax(x, self.axes)

    def send[Tree](self, tree: Tree, start: Offset, end: Offset) -> Tree:
        """Sends a pytree from the holder of its block at ``start`` to the holder at ``end``."""
        if start == end:
            return tree
        coordinates = np.stack(np.unravel_index(np.arange(self.size), self.sizes), 1)
        moved = (coordinates + np.subtract(end, start)) % self.sizes
        return self.permute(tree, np.ravel_multi_index(tuple(moved.T), self.sizes))

    def permute[Tree](self, tree: Tree, targets: np.ndarray) -> Tree:
        """Sends a pytree from each device r of the ring to device ``targets[r]``, all different."""
        # JAX accepts the axes of a permute only in the mesh's order, and numbers devices in it.
        mesh_order = jax.sharding.get_abstract_mesh().axis_names
        order = sorted(range(len(self.axes)), key=lambda i: mesh_order.index(self.axes[i]))
        axes = tuple(self.axes[i] for i in order)
        sizes = tuple(self.sizes[i] for i in order)

        def by_mesh(devices: np.ndarray) -> list[int]:
            along = np.unravel_index(devices, self.sizes)
            return np.ravel_multi_index(tuple(along[i] for i in order), sizes).tolist()

        pairs = sorted(zip(by_mesh(np.arange(self.size)), by_mesh(targets), strict=True))
        return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


class ChunkedSend[Tree]:
    """A pytree that is sent in flat chunks, as equal as possible, one after the other.

    Attributes:
      arrays: the chunks that are still to be sent, and those that have been received.
    """

    def __init__(self, tree: Tree, count: int):
        def chunk(x: jax.Array, index: int) -> jax.Array:
            ends = (x.size * index // count, x.size * (index + 1) // count)
            return lax.slice(x.reshape(-1), ends[:1], ends[1:])

        chunks = [tree]
        if count > 1:
            chunks = [jax.tree.map(lambda x, i=i: chunk(x, i), tree) for i in range(count)]
        self._like = tree
        self.arrays: tuple[list[Any], list[Any]] = chunks, []

    def send(self, route: Route, start: Offset, end: Offset) -> None:
        """Sends the next chunk."""
        (chunk, *waiting), received = self.arrays
        self.arrays = waiting, [*received, route.send(chunk, start, end)]

    def received(self) -> Tree:
        """The pytree, once all chunks have been received."""
        waiting, received = self.arrays
        assert not waiting
        if len(received) == 1:
            return received[0]
        return jax.tree.map(
            lambda x, *parts: jnp.concatenate(parts).reshape(x.shape), self._like, *received
        )


class AllowedScores(NamedTuple):
    """The scores that a mask allows between the runs of two shards, on each of n devices.

    On device r, token i of query run a attends to token j of key run b where
    ``low[r, a, b] <= i - j <= high[r, a, b]``.

    Attributes:
      low: int64 ``[n, query runs, key runs]``.
      high: the same; less than ``low`` where no score is allowed.
      q_counts: int64 ``[n, query runs, 1]``, the tokens of each run.
      kv_counts: int64 ``[n, 1, key runs]``.
    """

    low: np.ndarray
    high: np.ndarray
    q_counts: np.ndarray
    kv_counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class RingMask:
    """Which scores a mask allows on each device at each ring step. It determines the route.

    Segment ids and traced block-sparse tables are unknown before a program runs, so they mask
    nothing here.

    Attributes:
      ring_sizes: number of devices on each axis of the ring, outermost first.
      layout: the sequence permutation.
      q_length: queries per shard.
      kv_length: keys per shard.
      mask: the mask by positions.
      rotates_query: whether queries rotate and keys are stationary, or the reverse.
      query_offset: global position of the first query of the sequence.
      blocks: a block-sparse mask whose table is static, or attention chunks, or None.
    """

    ring_sizes: tuple[int, ...]
    layout: Layout
    q_length: int
    kv_length: int
    mask: Mask
    rotates_query: bool = False
    query_offset: int = 0
    blocks: Blocks | AttentionChunks | None = None

    @property
    def size(self) -> int:
        """n: devices on the ring, each with one shard of the queries and one of the keys."""
        return math.prod(self.ring_sizes)

    def allowed(self, offset: Offset) -> AllowedScores:
        """The allowed scores of the ring step at ``offset``, on every device.

        A shard consists of runs of equally spaced tokens
        (:func:`burst_jax.layouts.permutation.shard_runs`), split here at the edges of the blocks of
        a block-sparse mask.
        """
        devices = sources = np.arange(self.size)
        if offset:
            sizes = np.array(self.ring_sizes)[:, None]
            started = np.array(np.unravel_index(devices, self.ring_sizes))
            started = started - np.array(offset)[:, None]
            sources = np.ravel_multi_index(tuple(started % sizes), self.ring_sizes)
        q_shards, kv_shards = (sources, devices) if self.rotates_query else (devices, sources)
        block_sizes = (None, None)
        if self.blocks is not None:
            block_sizes = self.blocks.q_block, self.blocks.kv_block
        # Striped tokens form runs along or across stripes; this selects fewer pairs of runs.
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
        # A query's position minus a key's is base + stride * (i - j), with i - j between
        # -(kv_count - 1) and q_count - 1. The mask allows differences from -right to left.
        base = q.starts[:, :, None] - kv.starts[:, None, :]
        q_counts, kv_counts = q.counts[:, :, None], kv.counts[:, None, :]
        low, high = (np.broadcast_to(x, base.shape) for x in (1 - kv_counts, q_counts - 1))
        low, high = self.mask.shards(base, stride, low, high)
        if self.blocks is not None:
            high = np.where(self.blocks.allows(q, kv), high, low - 1)
        return AllowedScores(low, high, q_counts, kv_counts)

    def needs(self, offset: Offset) -> bool:
        """Whether on some device a query attends to a key of the ring step at ``offset``.

        The local block's step is always needed: a route starts there.
        """
        if not any(offset) or not (self.mask.reads_positions or self.blocks is not None):
            return True
        low, high, *_ = self.allowed(offset)
        return bool((low <= high).any())


@functools.lru_cache
def make_route(axes: tuple[str, ...], mask: RingMask) -> Route:
    """The route on a ring over ``axes``, without the steps at which no query attends to a key."""
    sizes = mask.ring_sizes
    inner = sizes[-1] if sizes else 1
    passes = []
    for outer in range(mask.size // inner):
        offsets = ((outer, i)[-len(sizes) :] if sizes else () for i in range(inner))
        if needed := tuple(offset for offset in offsets if mask.needs(offset)):
            passes.append(needed)
    return Route(axes, sizes, tuple(passes))


def scores_per_step(route: Route, mask: RingMask) -> dict[Offset, tuple[float, float]]:
    """Allowed scores of each ring step, per batch element and head: ``(max, mean)`` over devices.

    The busiest device determines the time of a step: the others wait for what it sends.

    Args:
      route: the route of the rotating side.
      mask: the mask for the same rotating side. Segment ids mask nothing here.
    """
    scores = {}
    for offset in route.offsets:
        low, high, *counts = mask.allowed(offset)
        pairs = _pairs_up_to(high, *counts) - _pairs_up_to(low - 1, *counts)
        by_device = np.where(low <= high, pairs, 0).sum((1, 2), dtype=np.float64)
        scores[offset] = float(by_device.max()), float(by_device.mean())
    return scores


def _pairs_up_to(bound: np.ndarray, q_count: np.ndarray, kv_count: np.ndarray) -> np.ndarray:
    """Number of pairs (i, j) with ``i < q_count``, ``j < kv_count`` and ``i - j <= bound``."""

    def queries_up_to(x: np.ndarray) -> np.ndarray:
        """The sum of ``clip(u, 0, q_count)`` over all u up to x."""
        inside = np.clip(x, 0, q_count)
        return inside * (inside + 1) // 2 + np.maximum(x - q_count, 0) * q_count

    # Key j has clip(bound + j + 1, 0, q_count) such queries.
    return queries_up_to(bound + kv_count) - queries_up_to(bound)
