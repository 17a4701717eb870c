"""Tile configs of the sm90 kernels: what fits a Hopper SM's shared memory and registers.

Every shipped config fits in 227 KiB. Tests compile them all and find no register spilled in a loop
over tiles up to head dim 128; EXPERIMENTS.md names the programs that spill once per work tile, or
in a loop for wider heads, and how the fastest were found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.device import num_sms
from pallas_kernels.mosaic.fragments import swizzle_lanes
from pallas_kernels.mosaic.sm90.backward_forms import (
    NARROW,
    OWN_KEYS,
    SHARED_KEYS,
    SPLIT,
    BackwardForm,
)
from pallas_kernels.spec import Tiles

# Rows of a warpgroup's wgmma: queries in the forward kernel, keys in the backward.
WARPGROUP_ROWS = 64
# Consumer warpgroups of the backward kernel. Their keys make one tile.
BACKWARD_WARPGROUPS = 2
SHARED_MEMORY = 227 * 1024
# (registers of a consumer thread, of a producer thread), by number of consumer warpgroups. A CTA
# has 64 K registers. The producer only starts copies, and gives most of its share to the consumers.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# Since this version JAX assembles Mosaic kernels with nvJitLink, as relocatable code, in which
# ``setmaxnreg`` has no effect: all warpgroups of a kernel get the same number of registers.
EQUAL_REGISTERS_SINCE = (0, 12)
# Queries of the backward kernel's larger tiles: 64 for each consumer warpgroup.
LARGE_BLOCK_Q = BACKWARD_WARPGROUPS * WARPGROUP_ROWS
# Keys of the forward kernel's tiles where values have more than 160 lanes, if registers allow it.
LARGE_WIDE_BLOCK_KV = 112
# With so many lanes of a float32 o at a time there is room for all lanes of a rounded one.
_ROOM_FOR_ALL = 64
# The widest heads for which the backward kernel has registers for the derivatives of a score_mod.
MAX_DERIVATIVE_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a kernel is tiled; :mod:`pallas_kernels.mosaic.sm90.shared_memory` computes its size.

    Attributes:
      block_q: queries per tile. Forward: 64 for each of two or three consumer warpgroups.
      block_kv: keys per tile, a multiple of 16. Backward: those of the form.
      stages: pipeline stages of the side that is looped over.
      do_stages: pipeline stages of dO in the backward kernel; None: as many as of q.
      v_stages: pipeline stages of V in the forward kernel; None: as many as of K.
      cluster: CTAs per cluster of the forward kernel, 1 or 2. They work on neighboring query tiles
        in lockstep and share their KV tiles: each copies its part of a tile into the shared memory
        of both (TMA multicast). The KV tiles are then those that either of them needs, so under a
        causal mask the earlier one visits a few that are fully masked.
      split_softmax: forward: whether the exponentials of a step are computed for one half of the
        rows after the other (:mod:`pallas_kernels.mosaic.sm90.online_softmax`). In between a
        consumer waits for the product with the previous tile's values, so the first half is rounded
        while the exponentials of the second are computed. Up to head dim 128 it gains with three
        stages of V only.
      producer_warpgroup: whether a warpgroup of its own starts the copies, and leaves most of its
        registers to the consumers where it can. If not, consumers start them while their products
        run, and all warpgroups have the same number of registers; cluster must be 1.
      form: backward: how the consumer warpgroups share the work on a tile
        (:mod:`pallas_kernels.mosaic.sm90.backward_forms`).
    """

    block_q: int
    block_kv: int
    stages: int
    do_stages: int | None = None
    v_stages: int | None = dataclasses.field(default=None, kw_only=True)
    cluster: int = dataclasses.field(default=1, kw_only=True)
    split_softmax: bool = dataclasses.field(default=False, kw_only=True)
    producer_warpgroup: bool = dataclasses.field(default=True, kw_only=True)
    form: BackwardForm = dataclasses.field(default=NARROW, kw_only=True)

    def __post_init__(self):
        for name, unit in (("block_q", 64), ("block_kv", 16)):
            size = getattr(self, name)
            if size < 64 or size % unit:
                raise ValueError(f"{name} is {size}: it must be 64 or more, a multiple of {unit}")
        for name in ("stages", "do_stages", "v_stages"):
            stages = getattr(self, name)
            fewest = self.form.fewest_do_stages if name == "do_stages" else 2
            if stages is not None and stages < fewest:
                raise ValueError(f"{name} is {stages}: it must be {fewest} or more")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster is {self.cluster}: it must be 1 or 2")
        if self.cluster > 1 and not self.producer_warpgroup:
            raise ValueError(
                f"cluster is {self.cluster}: without a producer warpgroup it must be 1"
            )
        if not (self.form.has_inline_copies or self.producer_warpgroup):
            raise ValueError(f"form is {self.form}: it needs a producer warpgroup")
        if self.form is NARROW:
            return  # The forward kernel's tiles have other sizes.
        for name, size in (("block_q", WARPGROUP_ROWS), ("block_kv", self.form.block_kv)):
            if getattr(self, name) != size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: where form is {self.form} it must be {size}"
                )

    @property
    def sums_early(self) -> bool:
        """Forward: whether the first half's weights are summed before the wait for ``p v``.

        With 112 keys the assembler would otherwise compute all exponentials after the wait.
        """
        return self.split_softmax and self.block_kv == LARGE_WIDE_BLOCK_KV

    @property
    def dq_by_rows(self) -> bool:
        """Backward: whether a warpgroup computes dQ of half a tile's queries; else half its lanes.

        Only so does dQ leave in register order: where it is half the lanes, that gains nothing.
        """
        return self.block_q == LARGE_BLOCK_Q

    @property
    def ds_buffers(self) -> int:
        """Buffers for dS of the backward kernel.

        Either consumer warpgroup may run almost a whole step ahead of the other: with three
        buffers, or with two and a barrier that tells when both have read one. If they work on the
        same keys, every step waits for both.
        """
        return 2 if self.dq_by_rows else self.form.ds_buffers

    @property
    def tiles(self) -> Tiles:
        """The tile sizes that bounds depend on; the queries are those of a whole cluster."""
        return Tiles(self.block_q * self.cluster, self.block_kv)


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """How the kernel for grouped matrix products is tiled.

    Attributes:
      block_m: rows of the result per tile, 64 for each consumer warpgroup.
      block_n: columns per tile.
      stages: pipeline stages, of 64 elements along the contracted axis.
    """

    block_m: int
    block_n: int
    stages: int

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.block_m // WARPGROUP_ROWS


def moves_registers() -> bool:
    """Whether a producer warpgroup's registers go to the consumers with the installed JAX."""
    return jax.__version_info__ < EQUAL_REGISTERS_SINCE


def for_this_jax(config: MosaicConfig) -> MosaicConfig:
    """The config without a producer warpgroup, if the installed JAX moves no registers.

    Nor has it clusters: a consumer that starts copies would wait for those of another CTA.
    """
    if moves_registers():
        return config
    return dataclasses.replace(config, producer_warpgroup=False, cluster=1)


def can_zero_padding(config: MosaicConfig | None = None) -> bool:
    """Whether kernels of the config write zeros in padding; None is any shipped one.

    Consumers that start copies do not wait for them, and what is copied for a whole cluster has
    arrived only when all copies have. With segment ids no shipped config has clusters.
    """
    if config is None:
        return moves_registers()
    # A thread of the producer warpgroup writes the zeros of one row.
    return config.producer_warpgroup and config.cluster == 1 and config.block_kv <= 128


def forward_config(
    head_dim: int, value_dim: int | None = None, needs_registers: bool = False
) -> MosaicConfig:
    """The shipped forward config.

    Args:
      head_dim: H.
      value_dim: Hv; None is H.
      needs_registers: whether the call has something that three consumer warpgroups, or more than
        64 keys of wide heads, have no registers for: dropout, a soft cap, a user function, KV
        bounds, a block-sparse mask, a bias that is added to the scores, or a bias together with
        segment ids or a window.
    """
    value_dim = head_dim if value_dim is None else value_dim
    widest = max(head_dim, value_dim)
    if widest <= 64 and not needs_registers:
        return MosaicConfig(192, 128, 3)
    if widest <= 128:
        return MosaicConfig(128, 128, 2)
    if widest > 192:
        return MosaicConfig(128, 64, 2)
    if value_dim <= 128:
        # Without a producer warpgroup a third stage of values gains more than larger tiles.
        return MosaicConfig(128, 128 if moves_registers() else 96, 2)
    if needs_registers:
        return MosaicConfig(128, 64, 2)
    if not moves_registers():
        return MosaicConfig(128, 96, 2)
    return MosaicConfig(128, 128 if widest <= 160 else LARGE_WIDE_BLOCK_KV, 2)


def forward_cluster(head_dim: int, is_causal: bool, length: int) -> int:
    """CTAs per cluster of the forward kernel, for masks that depend on positions only.

    Sharing KV tiles saves L2 traffic, which matters where matrix products keep an SM busy. The two
    CTAs also wait for each other: with a causal mask it pays for long sequences, above head dim 160
    for none.

    Args:
      head_dim: the larger of H and Hv.
      is_causal: whether work tiles are unequal; if not, every query attends to every key.
      length: the smaller of T and S.
    """
    if is_causal:
        return 2 if 64 < head_dim <= 160 and length >= 16384 else 1
    return 2 if 96 < head_dim <= 160 and length >= 4096 else 1


def plain_forward_config(
    config: MosaicConfig, head_dim: int, is_causal: bool, length: int
) -> MosaicConfig:
    """The shipped forward config of calls without a window, masks by arrays, or a bias.

    Where registers do not move, two consumers and a producer have 168 each. That is enough for
    smaller tiles, which gain in some calls, as the consumers start no copies.

    Args:
      config: of :func:`forward_config`.
      head_dim: the larger of H and Hv.
      is_causal: whether work tiles are unequal; if not, every query attends to every key.
      length: the smaller of T and S.
    """
    if moves_registers():
        cluster = forward_cluster(head_dim, is_causal, length)
        return dataclasses.replace(config, cluster=cluster)
    if is_causal and head_dim <= 64:
        return MosaicConfig(128, 128, 3)
    if not is_causal and 96 < head_dim <= 128:
        return MosaicConfig(128, 96, 3)
    return for_this_jax(config)


def softmax_split(head_dim: int, needs_registers: bool) -> dict[str, Any] | None:
    """The change of a forward config that computes exponentials by halves of the rows.

    Args:
      head_dim: the larger of H and Hv.
      needs_registers: whether the call has dropout, a soft cap, a bias or a user function.

    Returns:
      None where it gains nothing. Else it gains if it fits in shared memory.
    """
    if 96 < head_dim <= 128:
        # Values need a third stage to be free earlier, between two halves of a softmax.
        return {"split_softmax": True, "v_stages": 3}
    gains = 128 < head_dim <= 192 and not needs_registers
    return {"split_softmax": True} if gains else None


def backward_config(head_dim: int, small: bool = False) -> MosaicConfig:
    """The shipped backward config.

    Args:
      head_dim: the larger of H and Hv.
      small: whether tiles are small for small head dims, too. Tiles of 128 queries need registers
        that dropout, a soft cap, a user function or a bias takes.
    """
    if head_dim <= 64 and not small:
        return MosaicConfig(LARGE_BLOCK_Q, 128, 3, do_stages=2)
    if head_dim <= 96:
        return MosaicConfig(64, 128, 3)
    return MosaicConfig(64, 128, 3, do_stages=2)


def wide_backward_config(head_dim: int, value_dim: int, small: bool = False) -> MosaicConfig:
    """The shipped backward config of head dims above 128.

    Registers hold dK and dV of 128 keys up to (192, 128), of 96 keys up to (192, 192), and of 64
    keys up to (256, 256).

    Args:
      head_dim: H.
      value_dim: Hv.
      small: whether tiles have 64 keys instead of 96: for block-sparse masks, whose entries are for
        64 keys, and for dropout, a soft cap, a bias or a user function, which take registers. So do
        copies that consumers start.
    """
    if SPLIT.supports(head_dim, value_dim) and moves_registers() and not small:
        return MosaicConfig(64, SPLIT.block_kv, 2, do_stages=1, form=SPLIT)
    form = OWN_KEYS if OWN_KEYS.supports(head_dim, value_dim) else SHARED_KEYS
    return MosaicConfig(64, form.block_kv, 2, form=form)


def forward_is_persistent(config: MosaicConfig, masks_by_arrays: bool) -> bool:
    """Whether a forward CTA has registers for a loop over work tiles.

    Three consumer warpgroups have none with segment ids, KV bounds or a block-sparse mask.
    """
    return config.block_q < 3 * WARPGROUP_ROWS or not masks_by_arrays


def backward_is_persistent(
    config: MosaicConfig, head_dim: int, masks_by_arrays: bool, needs_registers: bool
) -> bool:
    """Whether a backward CTA has registers for a loop over work tiles.

    Consumers of 128 queries that start copies have none: with such a loop the assembler keeps
    counters and addresses in vector registers, and spills.

    Wide heads leave none with segment ids, KV bounds or a block-sparse mask (``masks_by_arrays``),
    and none with a soft cap, a bias, dropout or a user function (``needs_registers``).
    """
    if config.dq_by_rows and not config.producer_warpgroup:
        return False
    form = config.form
    if not (form.is_persistent if config.producer_warpgroup else form.is_persistent_inline):
        return False
    return head_dim <= 96 or not (masks_by_arrays or needs_registers)


def grouped_config(row_tiles: int, columns: int) -> GroupedConfig:
    """The shipped config of grouped matrix products: the widest tiles that occupy all SMs.

    Args:
      row_tiles: number of tiles along the rows.
      columns: columns of the result.
    """
    widths = {256: 4, 128: 6, 64: 8}
    fitting = [n for n in widths if n <= columns]
    full = [n for n in fitting if row_tiles * -(-columns // n) >= num_sms()]
    block_n = (full or fitting[-1:])[0]
    return GroupedConfig(128, block_n, widths[block_n])


def dq_widths(config: MosaicConfig, head_dim: int) -> tuple[int, ...]:
    """Lanes of the backward products that make a consumer's part of dQ, one after the other.

    Next to dK and dV of wide heads there are no registers for a product of all of them.
    """
    if config.dq_by_rows:
        return (head_dim,)
    half = head_dim // 2
    if half <= config.form.whole_dq_lanes:
        return (half,)
    return tuple(min(64, half - first) for first in range(0, half, 64))


def staging_lanes(config: MosaicConfig, head_dim: int, value_dim: int) -> int:
    """Lanes that leave the backward kernel's staging buffer at a time: all, if there is room."""
    half = head_dim // 2
    if (head_dim, value_dim) in config.form.stages_half:
        return half
    return min(half, config.form.most_staged_lanes)


def staging_limits(value_dim: int) -> tuple[int, ...]:
    """Lanes of o that may go through shared memory at a time, the widest that fits first.

    With Hv above 128 at most 32, which leaves room for part of the rounded result.
    """
    return (_ROOM_FOR_ALL, 32, 16) if value_dim <= 128 else (32, 16)


def float32_lanes(value_dim: int, most: int) -> int:
    """Lanes of a float32 tile of o that go through shared memory at a time, at most ``most``."""
    step = min(swizzle_lanes(value_dim, 2), most)
    return max(c for c in range(step, most + 1, step) if value_dim % c == 0)


def result_lanes(value_dim: int, float32: bool, most: int) -> int:
    """Lanes of o that are written at a time, in float32 or rounded: all, if there is room."""
    whole = not float32 and most == _ROOM_FOR_ALL
    return value_dim if whole else float32_lanes(value_dim, most)
