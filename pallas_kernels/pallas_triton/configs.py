"""Tile configs of the Triton kernels.

Every entry fits its GPU's shared memory and spills no register, also where gradients are added in
place; tests compile them all. The Hopper entries were measured on an H200. The A100 entries, and
those for keys that are wider than values, were derived from compiled kernels. EXPERIMENTS.md has
both.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.block_mask import BlockMask
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.spec import AttentionSpec, Tiles


def padded_lanes(dim: int) -> int:
    """The head dim rounded up to a power of two, which Triton requires; padding loads as zero."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How a kernel is tiled.

    Attributes:
      block_q: queries per tile.
      block_kv: keys per tile.
      num_warps: warps per program.
      num_stages: pipeline stages of the side that is looped over.
      rows_in_registers: keep the program's own rows (q, and dO for dQ) in registers instead of
        shared memory; a Hopper instruction reads them from either.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    rows_in_registers: bool = False

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

    def shared_memory(
        self, kernel: str, head_dim: int, itemsize: int, value_dim: int | None = None
    ) -> int:
        """Upper bound on the bytes of shared memory of a program's tiles.

        ``num_stages`` tiles of the two arrays that are looped over, and the program's own tiles: q
        for "forward", q and dO for "dq", k and v for "dkv". Triton adds up to 2 KiB of positions
        and statistics, and on Ampere uses one stage less. ``value_dim``: of v and dO; None is
        ``head_dim``.
        """
        row = padded_lanes(head_dim) * itemsize
        both = row + padded_lanes(head_dim if value_dim is None else value_dim) * itemsize
        looped = self.block_q if kernel == "dkv" else self.block_kv
        own = {
            "forward": self.block_q * row,
            "dq": self.block_q * both,
            "dkv": self.block_kv * both,
        }[kernel]
        own = 0 if self.rows_in_registers else own
        return looped * self.num_stages * both + own


class TritonConfigs(NamedTuple):
    """One config per kernel."""

    forward: TritonConfig
    dq: TritonConfig
    dkv: TritonConfig


class _Entry(NamedTuple):
    """Configs for head dims up to ``head_dim``, of values up to ``value_dim``; None is the same.

    ``fast`` is for whole tiles without segment ids, soft cap, bias, dropout or user functions. All
    of these take registers: where ``fast`` spills with them, ``general`` does not. Packed documents
    are short, which suits smaller tiles anyway. Where ``general`` has no registers either,
    ``kv_bounds`` is for KV bounds and for block-sparse masks that scores are tested by, and
    ``functions`` for user functions.
    """

    head_dim: int
    fast: tuple
    general: tuple | None = None
    value_dim: int | None = None
    kv_bounds: tuple | None = None
    functions: tuple | None = None

    def fits(self, head_dim: int, value_dim: int) -> bool:
        """Whether the entry is for these head dims."""
        most = self.head_dim if self.value_dim is None else self.value_dim
        return head_dim <= self.head_dim and value_dim <= most


_Table = dict[tuple[str, int], list[_Entry]]

# Keyed by kernel and bytes per element; entries are (block_q, block_kv, num_warps, num_stages).
_ANY: _Table = {
    ("forward", 2): [
        _Entry(64, (128, 64, 8, 3)),
        _Entry(128, (128, 32, 8, 3)),
        _Entry(256, (32, 32, 4, 2)),
    ],
    ("dq", 2): [_Entry(128, (64, 64, 8, 2)), _Entry(256, (32, 32, 8, 2))],
    ("dkv", 2): [_Entry(128, (64, 32, 8, 2)), _Entry(256, (32, 32, 8, 2))],
    ("forward", 4): [
        _Entry(64, (64, 32, 8, 2)),
        _Entry(128, (32, 16, 8, 2)),
        _Entry(256, (16, 32, 8, 1)),
    ],
    ("dq", 4): [
        _Entry(64, (32, 32, 4, 1)),
        _Entry(128, (32, 32, 8, 1)),
        _Entry(256, (16, 16, 8, 1)),
    ],
    ("dkv", 4): [
        _Entry(64, (32, 32, 8, 1)),
        _Entry(128, (16, 16, 8, 1)),
        _Entry(256, (16, 16, 8, 1)),
    ],
}

# The more rows a warp owns, the less often it reads a tile from shared memory (ldmatrix, 128 bytes
# a clock). On an A100 that, not the tensor cores, is the nearest limit.
_A100: _Table = {
    **_ANY,
    ("forward", 2): [
        _Entry(64, (128, 64, 4, 3), (128, 64, 8, 3)),
        _Entry(128, (128, 64, 8, 3), (128, 32, 8, 3)),
        _Entry(256, (128, 64, 8, 2), (128, 32, 8, 3), value_dim=128),
        _Entry(256, (64, 64, 8, 2), (64, 32, 8, 2)),
    ],
    ("dq", 2): [
        _Entry(64, (128, 32, 4, 3), (128, 64, 8, 3)),
        _Entry(128, (64, 64, 4, 2), (64, 64, 8, 2)),
        _Entry(256, (64, 64, 8, 2), (64, 32, 8, 2), value_dim=128),
        _Entry(256, (64, 32, 8, 2)),
    ],
    ("dkv", 2): [
        _Entry(64, (64, 64, 4, 3), (64, 32, 4, 3)),
        _Entry(128, (64, 32, 4, 2), (64, 64, 8, 2)),
        _Entry(256, (64, 64, 8, 2), (32, 64, 8, 2), value_dim=128),
        _Entry(256, (32, 64, 8, 2)),
    ],
}

_HOPPER: _Table = {
    **_ANY,
    ("forward", 2): [
        _Entry(
            64,
            fast=(128, 64, 4, 3, True),
            general=(128, 64, 4, 3),
            kv_bounds=(128, 64, 8, 3),
            functions=(128, 64, 8, 3),
        ),
        _Entry(128, (128, 64, 8, 3), (64, 64, 4, 3, True)),
        _Entry(256, (128, 64, 8, 3), (64, 64, 8, 2), value_dim=128),
        _Entry(256, (128, 64, 8, 2), (32, 32, 4, 2)),
    ],
    ("dq", 2): [
        _Entry(64, (128, 64, 8, 3)),
        _Entry(128, (64, 64, 4, 3, True), (128, 64, 8, 3)),
        _Entry(256, (64, 64, 8, 3), (64, 32, 8, 2), value_dim=128),
        _Entry(256, (128, 32, 8, 3), (64, 32, 8, 2)),
    ],
    ("dkv", 2): [
        _Entry(64, (64, 64, 4, 3), functions=(64, 64, 8, 3)),
        _Entry(128, (64, 64, 4, 2), (32, 64, 4, 3)),
        _Entry(256, (64, 64, 8, 2), (32, 64, 8, 2), value_dim=128),
        _Entry(256, (32, 64, 8, 3), (32, 32, 8, 2)),
    ],
    ("dkv", 4): [_Entry(64, (32, 32, 8, 1), (32, 16, 8, 1)), *_ANY["dkv", 4][1:]],
}

# Shared memory per program, of the smallest GPU that a table is for.
_TABLES: dict[float | None, _Table] = {None: _ANY, 8.0: _A100, 9.0: _HOPPER}
SHARED_MEMORY = {None: 99 * 1024, 8.0: 163 * 1024, 9.0: 227 * 1024}


def triton_configs(
    compute_capability: float | None,
    head_dim: int,
    dtype: DTypeLike,
    q_length: int,
    kv_length: int,
    spec: AttentionSpec,
    has_segments: bool,
    has_bias: bool = False,
    value_dim: int | None = None,
    has_kv_bounds: bool = False,
    block_mask: BlockMask | None = None,
    groups: int = 1,
) -> TritonConfigs:
    """The shipped configs for head dims up to 256; ``value_dim``: None is ``head_dim``.

    GPUs without a table get configs that fit every GPU since Ampere.
    """
    table = _TABLES.get(compute_capability, _ANY)
    itemsize = jnp.dtype(dtype).itemsize
    value_dim = head_dim if value_dim is None else value_dim

    def choose(kernel):
        entry = next(e for e in table[kernel, itemsize] if e.fits(head_dim, value_dim))
        fast = TritonConfig(*entry.fast)
        whole = q_length % fast.block_q == 0 and kv_length % fast.block_kv == 0
        plain = whole and not has_segments and spec.score.logits_soft_cap is None
        plain = plain and spec.dropout is None and not has_kv_bounds and not spec.calls_functions
        # On an A100 the fast tiles have registers for a bias; on Hopper not all of them have.
        plain = plain and (not has_bias or compute_capability == 8.0)
        together = groups if kernel == "dkv" else 1
        by_blocks = block_mask is not None and block_mask.tests_scores(
            fast.block_q, fast.block_kv, together
        )
        plain = plain and not by_blocks
        if spec.calls_functions and entry.functions is not None:
            return TritonConfig(*entry.functions)
        if (has_kv_bounds or by_blocks) and entry.kv_bounds is not None:
            return TritonConfig(*entry.kv_bounds)
        if plain or entry.general is None:
            return fast
        return TritonConfig(*entry.general)

    return TritonConfigs(choose("forward"), choose("dq"), choose("dkv"))


@dataclasses.dataclass(frozen=True)
class Build:
    """Options of the kernels.

    Attributes:
      fixed: configs for every call; None: from the table.
      compute_capability: selects the table, 8.0 for A100, 9.0 for H100; None: fits any GPU.
      interpret: run the kernels on any platform, slowly.
    """

    fixed: TritonConfigs | None
    compute_capability: float | None
    interpret: bool

    def configs(self, inputs: AttentionInputs, spec: AttentionSpec) -> TritonConfigs:
        """The configs for these inputs."""
        if self.fixed is not None:
            return self.fixed
        return triton_configs(
            self.compute_capability,
            inputs.head_dim,
            inputs.query.q.dtype,
            inputs.q_length,
            inputs.kv_length,
            spec,
            inputs.has_segments,
            inputs.has_bias,
            inputs.value_dim,
            inputs.has_kv_bounds,
            inputs.shared.block_mask,
            inputs.groups,
        )
