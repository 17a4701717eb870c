"""Tile configs of the Triton kernels.

Every entry fits an A100's 163 KiB of shared memory and spills no register on A100 or H100, with all
masks on and ragged lengths; tests compile them all. Speed comes second here: see EXPERIMENTS.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.spec import Tiles


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How a kernel is cut up: tile sizes, warps per program, and stages of the load pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}: Triton needs a power of two, 16 or more")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}: use 1, 2, 4, 8 or 16")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}: it must be 1 or more")

    @property
    def tiles(self) -> Tiles:
        """The part that tile bounds depend on."""
        return Tiles(self.block_q, self.block_kv)


# By the largest head dim that an entry serves: (block_q, block_kv, num_warps, num_stages).
_FORWARD = {
    2: {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (32, 32, 4, 2)},
    4: {64: (32, 32, 8, 2), 128: (32, 16, 8, 2), 256: (16, 32, 8, 1)},
}
_DQ = {
    2: {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2)},
    4: {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
}
_DKV = {
    2: {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
    4: {64: (16, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
}


def triton_forward_config(head_dim: int, dtype: Any) -> TritonConfig:
    """The forward's tiles for a head dim of 256 at most."""
    return _entry(_FORWARD, head_dim, dtype)


def triton_backward_configs(head_dim: int, dtype: Any) -> tuple[TritonConfig, TritonConfig]:
    """The tiles of dQ and of dK, dV for a head dim of 256 at most."""
    return _entry(_DQ, head_dim, dtype), _entry(_DKV, head_dim, dtype)


def _entry(table: dict[int, dict], head_dim: int, dtype: Any) -> TritonConfig:
    sizes = table[jnp.dtype(dtype).itemsize]
    return TritonConfig(*next(entry for most, entry in sizes.items() if head_dim <= most))
