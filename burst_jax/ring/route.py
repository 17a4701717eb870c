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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.layout import Layout
from burst_jax.ring.block_mask import ONE_BLOCK, AttentionChunks, Blocks, cut_runs
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

    def source_on(self, device: int, offset: Offset | jax.Array) -> int:
        """:meth:`source` on a device whose index is known while tracing."""
        if self.size == 1:
            return 0
        here = np.array(np.unravel_index(device, self.sizes))
        return int(
            np.ravel_multi_index(tuple((here - np.asarray(offset)) % self.sizes), self.sizes)
        )

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

    @property
    def excludes_scores(self) -> bool:
        """Whether any scores are known to be masked before a program runs."""
        return self.mask.reads_positions or self.blocks is not None

    def shards(self, offset: Offset) -> tuple[np.ndarray, np.ndarray]:
        """The shards of the queries and of the keys that each device holds at ``offset``."""
        devices = sources = np.arange(self.size)
        if offset:
            sizes = np.array(self.ring_sizes)[:, None]
            started = np.array(np.unravel_index(devices, self.ring_sizes))
            started = started - np.array(offset)[:, None]
            sources = np.ravel_multi_index(tuple(started % sizes), self.ring_sizes)
        return (sources, devices) if self.rotates_query else (devices, sources)


class AllowedScores:
    """How many scores a ring's mask allows on each device at each ring step.

    A shard consists of runs of equally spaced tokens (``Layout.progressions``), split at the
    edges of the blocks of a block-sparse mask. Scores are counted for pairs of runs whose blocks
    attend to each other, so time and memory grow with the tokens, not with their square.
    """

    def __init__(self, ring: RingMask):
        n, lengths, blocks = ring.size, (ring.q_length, ring.kv_length), ring.blocks
        sizes = (None, None) if blocks is None else (blocks.q_block, blocks.kv_block)
        (q_start, self._stride, q_count), (kv_start, _, kv_count) = ring.layout.progressions(
            lengths, n, sizes
        )
        self._mask = ring.mask
        self._q = cut_runs(q_start + ring.query_offset, self._stride, q_count, sizes[0])
        self._kv = cut_runs(kv_start, self._stride, kv_count, sizes[1])
        pairs = ONE_BLOCK if blocks is None else blocks.pairs(ring.mask, self._q, n)
        self._blocks = 1 + int(max(self._kv.blocks.max(), pairs.columns.max(initial=0)))
        self._full = None
        if pairs.full is not None:
            self._full = pairs.full, self._kv.tokens(pairs.full.shape)
        # Each run of queries with the blocks of keys that it may attend to.
        rows = self._q.blocks
        self._runs, at = _expanded(pairs.starts[rows], pairs.starts[rows + 1])
        self._columns = pairs.columns[at]

    def by_device(self, q_shards: np.ndarray, kv_shards: np.ndarray) -> np.ndarray:
        """float64 ``[n]``: allowed scores of each device, whose shards of the queries and keys are
        those of :meth:`RingMask.shards`.
        """
        holder = np.argsort(q_shards)
        runs, counts = self._runs, np.zeros(len(holder))
        keys = self._kv.shards * self._blocks + self._kv.blocks
        wanted = kv_shards[holder][self._q.shards[runs]] * self._blocks + self._columns
        pairs, kv = _expanded(*(np.searchsorted(keys, wanted, side) for side in ("left", "right")))
        q = runs[pairs]
        # A query's position minus a key's is base + stride * (i - j), with i - j between
        # -(kv_count - 1) and q_count - 1. The mask allows differences from -right to left.
        base, of = self._q.starts[q] - self._kv.starts[kv], (self._q.counts[q], self._kv.counts[kv])
        low, high = self._mask.shards(base, self._stride, 1 - of[1], of[0] - 1)
        allowed = np.where(low <= high, _pairs_up_to(high, *of) - _pairs_up_to(low - 1, *of), 0)
        counts += np.bincount(holder[self._q.shards[q]], allowed, len(holder))
        if self._full is not None:
            queries, keys = self._full
            counts += (queries[q_shards] * keys[kv_shards]).sum(1)
        return counts


@functools.lru_cache(maxsize=1)
def _allowed_scores(ring: RingMask) -> AllowedScores:
    return AllowedScores(ring)


def allowed_scores(ring: RingMask) -> AllowedScores:
    """The counts for a mask, the same for both rotations; the latest ones are cached.

    A route and its scores are computed one after the other, and so are both rotations.
    """
    return _allowed_scores(dataclasses.replace(ring, rotates_query=False))


def _expanded(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(i, j)`` of all j from ``begins[i]`` to ``ends[i] - 1``, for every i in order."""
    counts = ends - begins
    i = np.repeat(np.arange(len(counts)), counts)
    return i, np.arange(len(i)) + np.repeat(begins - np.cumsum(counts) + counts, counts)


@functools.lru_cache
def make_route(axes: tuple[str, ...], mask: RingMask) -> Route:
    """The route on a ring over ``axes``, without the steps at which no query attends to a key."""
    sizes = mask.ring_sizes
    inner = sizes[-1] if sizes else 1
    scores = allowed_scores(mask) if mask.excludes_scores and mask.size > 1 else None

    def needs(offset: Offset) -> bool:
        # A route starts at the local block.
        if scores is None or not any(offset):
            return True
        return bool(scores.by_device(*mask.shards(offset)).any())

    passes = []
    for outer in range(mask.size // inner):
        offsets = ((outer, i)[-len(sizes) :] if sizes else () for i in range(inner))
        if needed := tuple(filter(needs, offsets)):
            passes.append(needed)
    return Route(axes, sizes, tuple(passes))


def scores_per_step(route: Route, mask: RingMask) -> dict[Offset, tuple[float, float]]:
    """Allowed scores of each ring step, per batch element and head: ``(max, mean)`` over devices.

    The busiest device determines the time of a step: the others wait for what it sends.

    Args:
      route: the route of the rotating side.
      mask: the mask for the same rotating side. Segment ids mask nothing here.
    """
    scores = allowed_scores(mask)
    by_device = {offset: scores.by_device(*mask.shards(offset)) for offset in route.offsets}
    return {offset: (float(each.max()), float(each.mean())) for offset, each in by_device.items()}


def _pairs_up_to(bound: np.ndarray, q_count: np.ndarray, kv_count: np.ndarray) -> np.ndarray:
    """Number of pairs (i, j) with ``i < q_count``, ``j < kv_count`` and ``i - j <= bound``."""

    def queries_up_to(x: np.ndarray) -> np.ndarray:
        """The sum of ``clip(u, 0, q_count)`` over all u up to x."""
        inside = np.clip(x, 0, q_count)
        return inside * (inside + 1) // 2 + np.maximum(x - q_count, 0) * q_count

    # Key j has clip(bound + j + 1, 0, q_count) such queries.
    return queries_up_to(bound + kv_count) - queries_up_to(bound)
