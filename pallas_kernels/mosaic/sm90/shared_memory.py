"""Shared memory and barriers of the sm90 kernels, and their size.

:class:`ForwardMemory` and :class:`BackwardMemory` are records of arrays and barriers. ``of`` makes
descriptions, from which the kernel's memory is allocated and ``nbytes`` is computed. Inside the
kernel the same record holds the references.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.mosaic.launch import CLUSTER_AXIS
from pallas_kernels.mosaic.sm90.configs import (
    BACKWARD_WARPGROUPS,
    SHARED_MEMORY,
    WARPGROUP_ROWS,
    MosaicConfig,
    float32_lanes,
    result_lanes,
    staging_lanes,
    staging_limits,
)
from pallas_kernels.mosaic.tile_scheduler import SLOTS
from pallas_kernels.mosaic.transfers import matrix_transforms


class ForwardMemory(NamedTuple):
    """Shared memory and barriers of the forward kernel.

    W is the number of consumer warpgroups. A barrier ``..._arrived`` completes when a copy into the
    memory of that name has ended, a barrier ``..._free`` when every warpgroup that reads the memory
    has done so.

    CTAs of a cluster copy keys and values into each other's stages. So a stage is free only when
    the consumers of all of them have read theirs, and its barrier is a cluster barrier.

    Attributes:
      q: ``[W, 64, H]``, the work tile's queries.
      k: ``[stages, block_kv, H]``.
      v: ``[v_stages, block_kv, Hv]``.
      out: ``[W, 64, result_lanes]``, staging buffer for o.
      carry_o: float32 ``[W, 64, float32_lanes]``, staging buffer for the incoming o. None without a
        carry, and where o has its dtype: ``out`` then serves for both.
      lse: float32 ``[W, 64]``, of the carry, then of the result. With ``k_positions`` it has one
        row more, for ``scheduler_slots``.
      slots: float32 ``[SLOTS]``, for ``scheduler_slots``; None with ``k_positions``.
      k_positions: float32 ``[stages, >= block_kv]``, positions of the keys in ``k``; None unless
        the accumulator of ``q k^T`` starts from the bias.
      padded_arrived: a tile with padding has been copied, and the producer may write zeros in it;
        None if it does not.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    carry_o: Any
    lse: Any
    slots: Any
    k_positions: Any
    q_arrived: Any
    q_free: Any
    k_arrived: Any
    v_arrived: Any
    k_free: Any
    v_free: Any
    lse_arrived: Any
    o_arrived: Any
    slot_fetched: Any
    slot_free: Any
    padded_arrived: Any

    @classmethod
    def of(
        cls,
        config: MosaicConfig,
        head_dim: int,
        dtype: DTypeLike,
        out_dtype: DTypeLike,
        carry_dtype: DTypeLike | None,
        bias_in_accumulator: bool = False,
        value_dim: int | None = None,
        zeroes_padding: bool = False,
    ) -> ForwardMemory:
        """Descriptions, with the widest staging buffers that fit.

        Args:
          config: tile sizes.
          head_dim: H.
          dtype: of queries, keys and values.
          out_dtype: of o.
          carry_dtype: of the o to merge with, float32 or that of o; None without one.
          bias_in_accumulator: whether the accumulator of ``q k^T`` starts from the bias.
          value_dim: Hv; None is H.
          zeroes_padding: whether the producer writes zeros in padding.
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = config, head_dim, dtype, out_dtype, carry_dtype, bias_in_accumulator, value_dim
        memories = [
            cls._of(*sizes, zeroes_padding, most_lanes) for most_lanes in staging_limits(value_dim)
        ]
        return next((x for x in memories if x.nbytes <= SHARED_MEMORY), memories[-1])

    @classmethod
    def _of(
        cls, config: MosaicConfig, head_dim: int, dtype: DTypeLike, out_dtype: DTypeLike,
        carry_dtype: DTypeLike | None, bias_in_accumulator: bool, value_dim: int,
        zeroes_padding: bool, most_lanes: int,
    ) -> ForwardMemory:  # fmt: skip
        block_kv, stages = config.block_kv, config.stages
        v_stages = config.v_stages or stages
        consumers, rows = config.block_q // WARPGROUP_ROWS, WARPGROUP_ROWS
        float32 = jnp.dtype(out_dtype) == jnp.float32
        lanes = float32_lanes(value_dim, most_lanes)
        out_lanes = result_lanes(value_dim, float32, most_lanes)
        carry_o = None
        if carry_dtype is not None and carry_dtype != out_dtype:
            carry_o = _matrix((consumers, rows, lanes), jnp.float32)
        slots, k_positions = plgpu.SMEM((SLOTS,), jnp.float32), None
        if bias_in_accumulator:
            # TMA writes to multiples of 128 bytes.
            stride = -(-block_kv // 32) * 32
            slots, k_positions = None, plgpu.SMEM((stages, stride), jnp.float32)
        return cls(
            q=_matrix((consumers, rows, head_dim), dtype),
            k=_matrix((stages, block_kv, head_dim), dtype),
            v=_matrix((v_stages, block_kv, value_dim), dtype),
            out=_matrix((consumers, rows, out_lanes), out_dtype, lanes=lanes),
            carry_o=carry_o,
            lse=plgpu.SMEM((consumers + bias_in_accumulator, rows), jnp.float32),
            slots=slots,
            k_positions=k_positions,
            q_arrived=plgpu.Barrier(num_barriers=consumers),
            q_free=plgpu.Barrier(num_barriers=consumers),
            # One arrival for the keys, and one for their positions.
            k_arrived=plgpu.Barrier(num_arrivals=1 + bias_in_accumulator, num_barriers=stages),
            v_arrived=plgpu.Barrier(num_barriers=v_stages),
            k_free=_cluster_barriers(config, consumers, stages),
            v_free=_cluster_barriers(config, consumers, v_stages),
            lse_arrived=plgpu.Barrier(num_barriers=consumers),
            o_arrived=plgpu.Barrier(num_barriers=consumers),
            slot_fetched=_cluster_barriers(config, 1, SLOTS),
            # In a cluster, producers also read the indices that another one has fetched.
            slot_free=_cluster_barriers(config, consumers + (config.cluster > 1), SLOTS),
            padded_arrived=plgpu.Barrier(num_barriers=1) if zeroes_padding else None,
        )

    @property
    def scheduler_slots(self) -> Any:
        """An array that begins with the slots of the tile scheduler.

        Each array is aligned to 1 KiB. The largest tiles leave room for two short arrays, so the
        slots share the array of lse if the positions take the other one.
        """
        return self.lse.at[self.lse.shape[0] - 1] if self.slots is None else self.slots

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return _bytes_of(self)


class BackwardMemory(NamedTuple):
    """Shared memory and barriers of the backward kernel.

    Attributes:
      k: ``[block_kv, H]``, the work tile's keys.
      v: ``[block_kv, Hv]``, the work tile's values.
      q: ``[stages, block_q, H]``.
      do: ``[do_stages, block_q, Hv]``.
      scratch: float32, all small per-query and per-key arrays (:class:`ScratchLayout`).
      ds: ``[ds_buffers, block_q / 64, block_kv, 64]``, dS as an operand of dQ's product, and of
        dK's unless it is in registers. ``[1, 1, 64, block_kv]`` if queries are rows.
      p: ``[1, block_kv, 64]``, weights for dV's product, if the form stores them; else None.
        Transposed like dS.
      staging: float32 ``[2, block_q, staging_lanes]``, by consumer warpgroup: gradients on their
        way to global memory; int32 if dQ is accumulated in fixed point. dQ in register order takes
        no notice of the shape. With three buffers, these take turns.
      barriers: all barriers (:class:`BackwardBarriers`).
    """

    k: Any
    v: Any
    q: Any
    do: Any
    scratch: Any
    ds: Any
    p: Any
    staging: Any
    barriers: Any

    @classmethod
    def of(
        cls,
        config: MosaicConfig,
        head_dim: int,
        dtype: DTypeLike,
        value_dim: int | None = None,
        in_fixed_point: bool = False,
        stages_dv_in_values: bool = False,
        zeroes_padding: bool = False,
    ) -> BackwardMemory:
        """Descriptions.

        Args:
          config: tile sizes.
          head_dim: H.
          dtype: of the inputs.
          value_dim: Hv; None is H.
          in_fixed_point: whether dQ is accumulated in fixed point.
          stages_dv_in_values: whether dV leaves through the memory of the values.
          zeroes_padding: whether the producer writes zeros in padding.
        """
        value_dim = head_dim if value_dim is None else value_dim
        form, block_q, block_kv, half = config.form, config.block_q, config.block_kv, head_dim // 2
        counts = BackwardBarriers.counts(config, stages_dv_in_values, zeroes_padding)
        scratch = ScratchLayout.of(config)
        # dQ's product may read half of K's lanes at a time. For small head dims K's swizzled tiles
        # are then half as wide; and both operands of a product must be tiled alike.
        lanes = form.tiled_lanes or (head_dim if config.dq_by_rows else half)
        value_lanes = form.tiled_lanes or value_dim
        tile = (WARPGROUP_ROWS, block_kv) if form.queries_are_rows else (block_kv, WARPGROUP_ROWS)
        ds_shape = config.ds_buffers, block_q // WARPGROUP_ROWS, *tile
        return cls(
            k=_matrix((block_kv, head_dim), dtype, lanes=lanes),
            v=_matrix((block_kv, value_dim), dtype, lanes=value_lanes),
            q=_matrix((scratch.stages, block_q, head_dim), dtype, lanes=lanes),
            do=_matrix((scratch.do_stages, block_q, value_dim), dtype, lanes=value_lanes),
            scratch=plgpu.SMEM((scratch.size,), jnp.float32),
            ds=_matrix(ds_shape, dtype, lanes=lanes),
            p=_matrix((1, *tile), dtype, lanes=lanes) if form.stores_p else None,
            staging=_matrix(
                (form.staging_buffers, block_q, staging_lanes(config, head_dim, value_dim)),
                jnp.int32 if in_fixed_point else jnp.float32,
            ),
            # Two arrivals each: two copies, or both consumer warpgroups.
            barriers=plgpu.Barrier(
                num_arrivals=BACKWARD_WARPGROUPS,
                num_barriers=sum(counts),
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return _bytes_of(self)


class BackwardBarriers(NamedTuple):
    """The backward kernel's barriers, all in one array.

    A thread keeps the phases of all barriers of an array in one register, and each further array
    takes a further register.

    Attributes:
      kv_arrived: the work tile's keys and values have been copied.
      kv_free: both consumers have read them for the last time. In the form SPLIT the one that
        accumulates dK waits for it, too: then dS has been read.
      ds_arrived: both consumers have written their dS of a step; in the form SPLIT, one has written
        it and the other may read it.
      q_arrived: by stage: queries and their lse have been copied.
      do_arrived: by stage: dO and its delta have been copied.
      q_free: by stage: both consumers have read the queries.
      do_free: by stage: both consumers have read dO.
      slot_fetched: by slot of the tile scheduler.
      slot_free: by slot of the tile scheduler.
      ds_free: with fewer than three dS buffers, both consumers have finished a product that reads
        one; none if one hands over P.
      p_arrived: one consumer has written a step's P and the other may read it, if one hands it
        over.
      v_free: if dV leaves through the memory of the values, it has left.
      padded_arrived: tiles with padding have been copied, and the producer may write zeros in
        them, if it does.
    """

    kv_arrived: Any
    kv_free: Any
    ds_arrived: Any
    q_arrived: Any
    do_arrived: Any
    q_free: Any
    do_free: Any
    slot_fetched: Any
    slot_free: Any
    ds_free: Any
    p_arrived: Any
    v_free: Any
    padded_arrived: Any

    @classmethod
    def counts(
        cls, config: MosaicConfig, stages_dv_in_values: bool, zeroes_padding: bool
    ) -> BackwardBarriers:
        """Number of barriers of each kind."""
        stages, do_stages = config.stages, config.do_stages or config.stages
        by_stage = stages, do_stages, stages, do_stages
        hands_over_p = config.form.hands_over_p
        ds_free = config.ds_buffers < 3 and not hands_over_p
        others = map(int, (ds_free, hands_over_p, stages_dv_in_values, zeroes_padding))
        return cls(1, 1, 1, *by_stage, SLOTS, SLOTS, *others)

    @classmethod
    def split(cls, array: Any, counts: BackwardBarriers) -> BackwardBarriers:
        """References to the barriers of each kind, from a reference to all of them."""
        ranges = [_BarrierRange(array, sum(counts[:i])) for i in range(len(counts))]
        return cls(*(single.at[0] for single in ranges[:3]), *ranges[3:])


class _BarrierRange:
    """Barriers of an array from number ``first`` on, indexed like an array of their own."""

    def __init__(self, array: Any, first: int):
        self._array, self._first = array, first

    @property
    def at(self) -> _BarrierRange:
        """Indexed like a reference's."""
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._array.at[self._first + index]


@dataclasses.dataclass(frozen=True)
class ScratchLayout:
    """Offsets in the backward kernel's scratch array.

    In this order: lse per stage, delta per dO stage, two numbers per stage (the query tile and the
    head it holds, exact up to 2^24), the tile scheduler's slots, and per key a part of a per-head
    gradient on its way to global memory. It is one array, because arrays are aligned to 1 KiB.

    Attributes:
      block_q: queries per tile.
      stages: pipeline stages of queries.
      do_stages: pipeline stages of dO.
    """

    block_q: int
    stages: int
    do_stages: int

    @classmethod
    def of(cls, config: MosaicConfig) -> ScratchLayout:
        """For a config of the backward kernel."""
        return cls(config.block_q, config.stages, config.do_stages or config.stages)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._first_key + BACKWARD_WARPGROUPS * WARPGROUP_ROWS

    @property
    def _first_key(self) -> int:
        """Offset of the per-key parts: a multiple of 128 bytes, which bulk copies require.

        A copy from another address fails with "misaligned address".
        """
        step = 128 // 4
        return -(-(self.slots + SLOTS) // step) * step

    def per_head_sums(self, warpgroup: Any) -> Any:
        """Parts of the per-head gradients of a warpgroup's keys."""
        return pl.ds(self._first_key + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def slots(self) -> int:
        """Offset of the tile scheduler's slots."""
        return self.tile_and_head(self.stages)[0]

    def lse(self, stage: Any, first: Any = 0, count: int | None = None) -> Any:
        """lse of the queries of a stage; ``count`` of them, from ``first`` on, if it is given."""
        return pl.ds(stage * self.block_q + first, count or self.block_q)

    def delta(self, do_stage: Any, first: Any = 0, count: int | None = None) -> Any:
        """The same of delta and a dO stage."""
        return self.lse(self.stages + do_stage, first, count)

    def tile_and_head(self, stage: Any) -> tuple[Any, Any]:
        """Offsets of a stage's query tile index and head index."""
        first = (self.stages + self.do_stages) * self.block_q + 2 * stage
        return first, first + 1


def _matrix(shape: tuple[int, ...], dtype: DTypeLike, lanes: int | None = None) -> Any:
    """Swizzled shared memory for wgmma operands and TMA copies.

    ``lanes``: width of the widest slice that is read or written, if not whole rows.
    """
    lanes = shape[-1] if lanes is None else lanes
    transforms = matrix_transforms(lanes, jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _cluster_barriers(config: MosaicConfig, arrivals: int, count: int) -> Any:
    """``count`` barriers, each with ``arrivals`` from every CTA of a cluster."""
    if config.cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    axes = (CLUSTER_AXIS,)
    return plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=arrivals, num_barriers=count)


def _bytes_of(memory: ForwardMemory | BackwardMemory) -> int:
    """Bytes of descriptions: arrays are aligned to 1 KiB, a barrier takes 8 bytes."""
    size = 0
    for field in jax.tree.leaves(memory):
        if isinstance(field, (plgpu.Barrier, plgpu.ClusterBarrier)):
            size += 8 * int(np.prod(field.num_barriers))
        else:
            size += -(-math.prod(field.shape) * jnp.dtype(field.dtype).itemsize // 1024) * 1024
    return size
