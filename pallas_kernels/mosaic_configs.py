"""Tile configs of the Mosaic GPU kernels: what fits in a Hopper GPU's shared memory and registers.

Every entry fits in 227 KiB. Tests compile them all and find no register spilled; EXPERIMENTS.md
names the few programs that were seen to spill, and says how the fastest were found.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.spec import Tiles

# A warpgroup's matrix instruction takes 64 rows, of queries (forward) or of keys (backward).
WARPGROUP_ROWS = 64
SHARED_MEMORY = 227 * 1024
# A block of threads has 64 K registers. The warpgroup that only starts copies gives most of its
# share to those that compute: (computing, copying), by how many compute.
REGISTERS = {2: (240, 24), 3: (160, 32)}


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a kernel is cut up.

    Attributes:
      block_q: queries a tile. Forward: 64 for every warpgroup that computes, two or three.
      block_kv: keys a tile. Backward: 128, 64 for either of two warpgroups.
      stages: how many tiles of the side that is walked over are in shared memory or arriving.
      do_stages: the same for dO of the backward kernel; None is as many as of q.
    """

    block_q: int
    block_kv: int
    stages: int
    do_stages: int | None = None

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size < 64 or size % 64:
                raise ValueError(f"{name} is {size}: it must be a multiple of 64")
        for name in ("stages", "do_stages"):
            stages = getattr(self, name)
            if stages is not None and stages < 2:
                raise ValueError(f"{name} is {stages}: it must be 2 or more")

    @property
    def tiles(self) -> Tiles:
        """The part that tile bounds depend on."""
        return Tiles(self.block_q, self.block_kv)

    def forward_memory(self, head_dim: int, wide: bool, carried: bool) -> int:
        """Bytes of shared memory that the forward kernel takes.

        ``wide``: o is float32; ``carried``: there is a float32 o to merge with.
        """
        tiles = [self.block_q * head_dim * 2, *(self.stages * self.block_kv * head_dim * 2,) * 2]
        tiles.append(self.block_q * out_chunk(head_dim, wide) * (4 if wide else 2))
        if carried and not wide:
            tiles.append(self.block_q * chunk(head_dim) * 4)
        return _aligned(*tiles, self.block_q * 4, SLOTS * 4) + _barriers(self.stages)

    def backward_memory(self, head_dim: int) -> int:
        """Bytes of shared memory that the backward kernel takes."""
        do_stages = self.do_stages or self.stages
        tile = self.block_q * head_dim * 2
        stats = ((self.stages + do_stages) * self.block_q + 2 * self.stages + SLOTS) * 4
        arrays = (
            *(self.block_kv * head_dim * 2,) * 2,
            self.stages * tile,
            do_stages * tile,
            DS_BUFFERS * self.block_kv * self.block_q * 2,
            self.block_q * head_dim * 4,
            stats,
        )
        return _aligned(*arrays) + _barriers(self.stages)


def _aligned(*sizes: int) -> int:
    """Bytes of arrays that each begin at a multiple of a KiB."""
    return sum(-(-size // 1024) * 1024 for size in sizes)


def _barriers(stages: int) -> int:
    """Bytes of a kernel's barriers, at most."""
    return 96 + 16 * SLOTS + 32 * stages


# How many numbers of items may be on their way from the warpgroup that takes them to the others.
SLOTS = 2
# Three, so that either warpgroup of the backward kernel may run almost a whole step ahead.
DS_BUFFERS = 3


def lane_tile(lanes: int, itemsize: int) -> int:
    """How many of ``lanes`` are side by side in a swizzled tile: 128, 64 or 32 bytes."""
    for size in (128, 64, 32):
        if lanes * itemsize % size == 0:
            return size // itemsize
    raise ValueError(f"{lanes} lanes of {itemsize} bytes are no multiple of 32 bytes")


def chunk(head_dim: int) -> int:
    """How many lanes of a float32 tile of o go through shared memory at a time, 64 at most.

    Above 128 lanes 32 at most: then a chunk of the rounded result has room beside it.
    """
    step, most = lane_tile(head_dim, 2), 64 if head_dim <= 128 else 32
    step = min(step, most)
    return max(c for c in range(step, most + 1, step) if head_dim % c == 0)


def out_chunk(head_dim: int, wide: bool) -> int:
    """How many lanes of the result are written at a time; ``wide``: in float32."""
    if wide:
        return chunk(head_dim)
    return head_dim if head_dim <= 128 else chunk(head_dim)


def forward_config(head_dim: int, soft_cap: bool = False) -> MosaicConfig:
    """The forward kernel's tiles. A soft cap takes registers that three warpgroups do not have."""
    if head_dim <= 64 and not soft_cap:
        return MosaicConfig(192, 128, 2)
    if head_dim <= 128:
        return MosaicConfig(128, 128, 2)
    return MosaicConfig(128, 64, 2)


def backward_config(head_dim: int) -> MosaicConfig:
    """The backward kernel's tiles."""
    if head_dim <= 96:
        return MosaicConfig(64, 128, 3)
    return MosaicConfig(64, 128, 3, do_stages=2)
