"""Tile configs of the Mosaic GPU kernels: what a Hopper GPU's memory and registers have room for.

Every entry fits in 227 KiB. Tests compile them all and find no register spilled; EXPERIMENTS.md
names the few programs that were seen to spill, and says how the fastest were found.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.spec import Tiles

# A warpgroup's matrix instruction takes 64 rows, of queries (forward) or of keys (backward).
WARPGROUP_ROWS = 64
# Two warpgroups compute in the backward kernel: their keys make one tile.
BACKWARD_WARPGROUPS = 2
SHARED_MEMORY = 227 * 1024
# (registers of a computing thread, of a copying thread), by how many warpgroups compute. A block of
# threads has 64 K registers. The warpgroup that only starts copies gives most of its share to the
# warpgroups that compute.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# How many tickets (tickets.py) may be on their way from the copying warpgroup to the others.
SLOTS = 2
# How many tiles of dS the backward kernel keeps: three, so that either warpgroup may run almost a
# whole step ahead of the other.
DS_BUFFERS = 3

# The axis over the programs of a cluster.
CLUSTER_AXIS = "cluster"

# The widest heads for which the backward kernel has registers for the slopes of a tile's scores.
SLOPED_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a kernel is cut up. :mod:`pallas_kernels.pallas_mosaic.memory` says what memory it takes.

    Attributes:
      block_q: queries a tile. Forward: 64 for every warpgroup that computes, two or three.
      block_kv: keys a tile. Backward: 128, 64 for either of two warpgroups.
      stages: how many tiles of the side that is walked over are in shared memory or arriving.
      do_stages: how many tiles of dO the backward kernel has there; None is as many as of q.
      cluster: how many forward programs, 1 or 2, work on neighbouring tiles of queries in step and
        share their key tiles: each copies its part of a tile into the memory of both. Tiles of keys
        are then those that one of them needs, so under a causal mask the earlier one visits a
        few in which nothing counts.
    """

    block_q: int
    block_kv: int
    stages: int
    do_stages: int | None = None
    cluster: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size < 64 or size % 64:
                raise ValueError(f"{name} is {size}: it must be a multiple of 64")
        for name in ("stages", "do_stages"):
            stages = getattr(self, name)
            if stages is not None and stages < 2:
                raise ValueError(f"{name} is {stages}: it must be 2 or more")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster is {self.cluster}: it must be 1 or 2")

    @property
    def tiles(self) -> Tiles:
        """The part that tile bounds depend on: the queries are those of a whole cluster."""
        return Tiles(self.block_q * self.cluster, self.block_kv)


def forward_config(head_dim: int, needs_registers: bool = False) -> MosaicConfig:
    """The forward kernel's tiles; ``head_dim`` is the larger one of H and Hv.

    ``needs_registers``: there is something that takes registers which three warpgroups do not have:
    dropout, a soft cap, a bias that is added to the scores, or a bias beside segment ids or a
    window.
    """
    if head_dim <= 64 and not needs_registers:
        return MosaicConfig(192, 128, 2)
    if head_dim <= 128:
        return MosaicConfig(128, 128, 2)
    return MosaicConfig(128, 64, 2)


def forward_cluster(head_dim: int, is_causal: bool, length: int) -> int:
    """How many forward programs share key tiles, where positions alone decide what counts.

    Sharing takes bytes from the L2 cache, which matters where products fill a multiprocessor. Two
    programs also wait for each other: under a causal mask that is worth it for long sequences.

    Args:
      head_dim: the larger one of H and Hv.
      is_causal: whether items have unequal work; else every query sees every key.
      length: of queries or of keys, whichever is shorter.
    """
    if is_causal:
        return 2 if head_dim > 64 and length >= 16384 else 1
    return 2 if 96 < head_dim <= 128 and length >= 4096 else 1


def backward_config(head_dim: int) -> MosaicConfig:
    """The backward kernel's tiles; ``head_dim`` is the larger one of H and Hv."""
    if head_dim <= 96:
        return MosaicConfig(64, 128, 3)
    return MosaicConfig(64, 128, 3, do_stages=2)


def forward_loops(config: MosaicConfig, has_segments: bool) -> bool:
    """Whether a forward program has registers for a loop over items.

    Three warpgroups have none left where there are segment ids, or ranges of keys, which
    ``has_segments`` stands for, too.
    """
    return config.block_q < 3 * WARPGROUP_ROWS or not has_segments


def backward_loops(head_dim: int, has_segments: bool, needs_registers: bool) -> bool:
    """Whether a backward program has registers for a loop over items.

    Programs of wide heads have none left where there are segment ids or ranges of keys (which
    ``has_segments`` stands for, too), or where ``needs_registers``: a soft cap, a bias or dropout.
    """
    return head_dim <= 96 or not (has_segments or needs_registers)


def swizzle_lanes(lanes: int, itemsize: int) -> int:
    """How many of ``lanes`` are side by side in a swizzled tile: 128, 64 or 32 bytes."""
    for size in (128, 64, 32):
        if lanes * itemsize % size == 0:
            return size // itemsize
    raise ValueError(f"{lanes} lanes of {itemsize} bytes are no multiple of 32 bytes")


def float32_lanes(value_dim: int) -> int:
    """How many lanes of a float32 tile of o go through shared memory at a time, 64 at most.

    Where values have a head dim above 128 it is 32 at most, which leaves room for a part of the
    rounded result.
    """
    step, most = swizzle_lanes(value_dim, 2), 64 if value_dim <= 128 else 32
    step = min(step, most)
    return max(c for c in range(step, most + 1, step) if value_dim % c == 0)


def result_lanes(value_dim: int, float32: bool) -> int:
    """How many lanes of the result are written at a time, in float32 or rounded."""
    if float32:
        return float32_lanes(value_dim)
    return value_dim if value_dim <= 128 else float32_lanes(value_dim)
