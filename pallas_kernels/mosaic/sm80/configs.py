"""Tile configs of the sm80 kernels, and their shared memory."""

from __future__ import annotations

import dataclasses

from pallas_kernels.mosaic.fragments import swizzle_lanes
from pallas_kernels.spec import Tiles

# Maximum shared memory of one CTA on an A100, in bytes (163 KiB). An SM has 164 KiB, and each
# resident CTA uses 1 KiB more than it requests. Later data-center GPUs have more.
SHARED_MEMORY, _RESERVED = 166_912, 1024
# The same of smaller GPUs (99 KiB), and their compute capabilities: A10, A40 and RTX 30, L4, L40
# and RTX 40, RTX 50.
SMALL_SHARED_MEMORY = 101_376
_SMALL = (8.6, 8.9, 12.0, 12.1)
# Rows of the accumulator of one mma.sync instruction (m16n8k16), and the depth of its products.
MMA_ROWS, MMA_DEPTH = 16, 16
WARPS = 4
WIDEST_HEAD_DIM = 256
# Warpgroups of a backward CTA. Each owns half of the tile's keys.
BACKWARD_WARPGROUPS = 2
# Number of a warpgroup's warps along the rows of every product; the others are along its columns.
BACKWARD_M_WARPS = 2

_ITEMSIZE = 2


def _multiple(name: str, size: int, of: int) -> None:
    if size < of or size % of:
        raise ValueError(f"{name} is {size}: it must be a multiple of {of}")


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel, of one warpgroup, is tiled.

    Attributes:
      block_q: queries per CTA, split evenly over its warps, a multiple of 16 for each.
      block_kv: keys per KV tile.
    """

    block_q: int
    block_kv: int

    def __post_init__(self):
        _multiple("block_q", self.block_q, MMA_ROWS * WARPS)
        # Each warp copies at least 8 rows.
        _multiple("block_kv", self.block_kv, 8 * WARPS)

    @property
    def tiles(self) -> Tiles:
        """What bounds depend on."""
        return Tiles(self.block_q, self.block_kv)

    def shared_memory(self, head_dim: int, value_dim: int) -> int:
        """Bytes per CTA: one tile each of queries, keys and values."""
        return _ITEMSIZE * (self.block_q * head_dim + self.block_kv * (head_dim + value_dim))


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernel is tiled.

    Attributes:
      block_q: queries per query tile.
      block_kv: keys per CTA, half of them for each warpgroup.
      stages: pipeline stages of queries and dO; 2 prefetches the next tile.
    """

    block_q: int
    block_kv: int
    stages: int = 2

    def __post_init__(self):
        # dq_part may give a warpgroup half of the queries, for 2 x 2 warps.
        _multiple("block_q", self.block_q, 2 * BACKWARD_M_WARPS * MMA_ROWS)
        _multiple("block_kv", self.block_kv, BACKWARD_WARPGROUPS * BACKWARD_M_WARPS * MMA_ROWS)
        if self.stages not in (1, 2):
            raise ValueError(f"stages is {self.stages}: it must be 1 or 2")

    @property
    def tiles(self) -> Tiles:
        """What bounds depend on."""
        return Tiles(self.block_q, self.block_kv)

    @property
    def keys(self) -> int:
        """Keys per warpgroup."""
        return self.block_kv // BACKWARD_WARPGROUPS

    def shared_memory(self, head_dim: int, value_dim: int) -> int:
        """Bytes per CTA: keys and values; queries, dO and stats of all stages; P and dS."""
        both = head_dim + value_dim
        walked = self.stages * self.block_q * (both * _ITEMSIZE + 2 * 4)
        weights = 2 * self.block_q * self.block_kv * _ITEMSIZE
        return self.block_kv * both * _ITEMSIZE + walked + weights

    def dq_part(self, head_dim: int) -> tuple[int, int]:
        """``(queries, lanes)`` of the part of a query tile's dQ that one warpgroup computes.

        It is half of the lanes, so that the warps share more of their operands, or half of the
        queries if half of the lanes is not a multiple of the swizzled tile's width.
        """
        half = head_dim // BACKWARD_WARPGROUPS
        if half % swizzle_lanes(head_dim, _ITEMSIZE) == 0:
            return self.block_q, half
        return self.block_q // BACKWARD_WARPGROUPS, head_dim


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """How the kernel for grouped matrix products, of one warpgroup, is tiled.

    Attributes:
      block_m: rows of the result per CTA.
      block_n: columns per CTA.
      stages: pipeline stages.
      depth: elements of the contracted axis per stage.
    """

    block_m: int
    block_n: int
    stages: int
    depth: int = 32


def grouped_config(rows: int, columns: int) -> GroupedConfig:
    """The shipped config of grouped matrix products: an A100's SM holds two CTAs.

    Args:
      rows: multiple of the tiles' rows.
      columns: multiple of the tiles' columns.
    """
    block_m, block_n = (64 if size % 128 else 128 for size in (rows, columns))
    return GroupedConfig(block_m, block_n, 4)


def shared_memory_of(compute_capability: float) -> int:
    """Maximum shared memory of one CTA, in bytes, that the kernels may use."""
    return SMALL_SHARED_MEMORY if compute_capability in _SMALL else SHARED_MEMORY


# Forward tiles by the widest value head dim for which a warpgroup has registers.
_FORWARD = (
    (96, ForwardConfig(128, 64)),
    (128, ForwardConfig(128, 32)),
    (256, ForwardConfig(64, 32)),
)


def forward_config(head_dim: int, value_dim: int) -> ForwardConfig:
    """The forward kernel's default tiles: the first of which an A100's SM holds two CTAs."""
    for widest, config in _FORWARD:
        needed = 2 * (config.shared_memory(head_dim, value_dim) + _RESERVED)
        if value_dim <= widest and needed <= SHARED_MEMORY + _RESERVED:
            break
    return config


def backward_config(
    head_dim: int, value_dim: int, shared_memory: int = SHARED_MEMORY
) -> BackwardConfig:
    """The backward kernel's default tiles: the largest that fit, or else the smallest."""
    widest = max(head_dim, value_dim)
    smallest = BackwardConfig(64, 64, stages=1)
    tiles = [BackwardConfig(64, 64)]
    if widest <= 128:
        tiles = [BackwardConfig(64, 128), *tiles]
    if widest <= 64:
        tiles = [BackwardConfig(128, 128), *tiles]
    fitting = (x for x in tiles if x.shared_memory(head_dim, value_dim) <= shared_memory)
    return next(fitting, smallest)
