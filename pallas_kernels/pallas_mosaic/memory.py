"""What the Mosaic GPU kernels keep in a multiprocessor's shared memory, and how much that is.

:class:`ForwardMemory` and :class:`BackwardMemory` are records of arrays and barriers. ``of`` makes
one of descriptions, from which the kernel's memory is allocated and ``nbytes`` is computed. Inside
the kernel the same record holds the references.
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

from pallas_kernels.pallas_mosaic.configs import (
    BACKWARD_WARPGROUPS,
    CLUSTER_AXIS,
    DS_BUFFERS,
    SLOTS,
    WARPGROUP_ROWS,
    MosaicConfig,
    float32_lanes,
    result_lanes,
    swizzle_lanes,
)


class ForwardMemory(NamedTuple):
    """Shared memory and barriers of the forward kernel.

    W is how many warpgroups compute. A stage is room for one tile of keys or of values. A barrier
    ``..._arrived`` says that a copy into the memory of this name has ended, a barrier ``..._free``
    that every warpgroup which reads the memory has done so.

    Programs of a cluster copy keys and values into each other's stages. So a stage is free only
    when the warpgroups of all of them have read theirs, and its barrier is one of the cluster.

    Attributes:
      q: ``[W, 64, H]``, the item's queries.
      k: ``[stages, block_kv, H]``.
      v: ``[stages, block_kv, Hv]``.
      out: ``[W, 64, result_lanes]``, lanes of o on their way to device memory.
      carry_o: float32 ``[W, 64, float32_lanes]``, lanes of the incoming o. None without a carry,
        and where o is float32: the incoming lanes then come to ``out``.
      lse: float32 ``[W, 64]``, of the carry, then of the result. With ``k_positions`` there is one
        row more, for ``ticket_slots``.
      tickets: float32 ``[SLOTS]``, for ``ticket_slots``; None with ``k_positions``.
      k_positions: float32 ``[stages, block_kv]``, positions of the keys in ``k``. None unless the
        products of queries and keys start from the bias.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    carry_o: Any
    lse: Any
    tickets: Any
    k_positions: Any
    q_arrived: Any
    q_free: Any
    k_arrived: Any
    v_arrived: Any
    k_free: Any
    v_free: Any
    lse_arrived: Any
    o_arrived: Any
    ticket_arrived: Any
    ticket_free: Any

    @classmethod
    def of(
        cls,
        config: MosaicConfig,
        head_dim: int,
        dtype: DTypeLike,
        out_dtype: DTypeLike,
        carried: bool,
        bias_in_products: bool = False,
        value_dim: int | None = None,
    ) -> ForwardMemory:
        """Descriptions.

        Args:
          config: the kernel's tiles.
          head_dim: H.
          dtype: of queries, keys and values.
          out_dtype: of the result o.
          carried: whether there is a float32 o to merge with.
          bias_in_products: whether the products of queries and keys start from the bias.
          value_dim: Hv; None is H.
        """
        value_dim = head_dim if value_dim is None else value_dim
        block_kv, stages = config.block_kv, config.stages
        warpgroups, rows = config.block_q // WARPGROUP_ROWS, WARPGROUP_ROWS
        float32 = jnp.dtype(out_dtype) == jnp.float32
        lanes, out_lanes = float32_lanes(value_dim), result_lanes(value_dim, float32)
        carry_o = None
        if carried and not float32:
            carry_o = _matrix((warpgroups, rows, lanes), jnp.float32)
        tickets, k_positions = plgpu.SMEM((SLOTS,), jnp.float32), None
        if bias_in_products:
            tickets, k_positions = None, plgpu.SMEM((stages, block_kv), jnp.float32)
        return cls(
            q=_matrix((warpgroups, rows, head_dim), dtype),
            k=_matrix((stages, block_kv, head_dim), dtype),
            v=_matrix((stages, block_kv, value_dim), dtype),
            out=_matrix((warpgroups, rows, out_lanes), out_dtype, lanes=lanes),
            carry_o=carry_o,
            lse=plgpu.SMEM((warpgroups + bias_in_products, rows), jnp.float32),
            tickets=tickets,
            k_positions=k_positions,
            q_arrived=plgpu.Barrier(num_barriers=warpgroups),
            q_free=plgpu.Barrier(num_barriers=warpgroups),
            # A copy of keys arrives, and one of their positions.
            k_arrived=plgpu.Barrier(num_arrivals=1 + bias_in_products, num_barriers=stages),
            v_arrived=plgpu.Barrier(num_barriers=stages),
            k_free=_in_cluster(config, warpgroups, stages),
            v_free=_in_cluster(config, warpgroups, stages),
            lse_arrived=plgpu.Barrier(num_barriers=warpgroups),
            o_arrived=plgpu.Barrier(num_barriers=warpgroups),
            ticket_arrived=_in_cluster(config, 1, SLOTS),
            # In a cluster copying warpgroups read tickets, too, that another one has drawn.
            ticket_free=_in_cluster(config, warpgroups + (config.cluster > 1), SLOTS),
        )

    @property
    def ticket_slots(self) -> Any:
        """An array that begins with the slots of a :class:`TicketCounter`.

        Each array begins at a multiple of a KiB. Beside the largest tiles there is room for two
        short ones, so the slots share lse's where positions take the other.
        """
        return self.lse.at[self.lse.shape[0] - 1] if self.tickets is None else self.tickets

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return _bytes_of(self)


class BackwardMemory(NamedTuple):
    """Shared memory and barriers of the backward kernel.

    A stage is room for one tile of queries (``stages``) or of dO (``do_stages``).

    Attributes:
      k: ``[block_kv, H]``, the item's keys.
      v: ``[block_kv, Hv]``, the item's values.
      q: ``[stages, block_q, H]``.
      do: ``[do_stages, block_q, Hv]``.
      scratch: one float32 array with single numbers of queries and keys, see
        :class:`ScratchLayout`.
      ds: ``[DS_BUFFERS, block_kv, block_q]``, dS for the product that makes dQ.
      outgoing: float32 ``[2, block_q, H / 2]``, by warpgroup: parts of gradients on their way to
        device memory.
      barriers: all barriers, see :class:`BackwardBarriers`.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    scratch: Any
    ds: Any
    outgoing: Any
    barriers: Any

    @classmethod
    def of(
        cls, config: MosaicConfig, head_dim: int, dtype: DTypeLike, value_dim: int | None = None
    ) -> BackwardMemory:
        """Descriptions, for inputs of ``dtype``; ``value_dim`` is Hv, None is H."""
        value_dim = head_dim if value_dim is None else value_dim
        block_q, block_kv, half = config.block_q, config.block_kv, head_dim // 2
        scratch = ScratchLayout.of(config)
        # dQ's product reads half of K's lanes at a time. Where the head dim is small, K's swizzled
        # tiles are therefore half as wide; and both operands of a product must be in equal tiles.
        return cls(
            k=_matrix((block_kv, head_dim), dtype, lanes=half),
            v=_matrix((block_kv, value_dim), dtype),
            q=_matrix((scratch.stages, block_q, head_dim), dtype, lanes=half),
            do=_matrix((scratch.do_stages, block_q, value_dim), dtype),
            scratch=plgpu.SMEM((scratch.size,), jnp.float32),
            ds=_matrix((DS_BUFFERS, block_kv, block_q), dtype, lanes=half),
            outgoing=_matrix((BACKWARD_WARPGROUPS, block_q, half), jnp.float32),
            # Two arrive at each: two copies, or both warpgroups.
            barriers=plgpu.Barrier(
                num_arrivals=BACKWARD_WARPGROUPS,
                num_barriers=sum(BackwardBarriers.counts(config)),
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return _bytes_of(self)


class BackwardBarriers(NamedTuple):
    """The backward kernel's barriers, which lie in one array.

    A thread keeps the phases of all barriers of an array in one register, and every further array
    takes a further register.

    Attributes:
      kv_arrived: the item's keys and values have been copied.
      kv_free: both warpgroups have read them for the last time.
      ds_arrived: both warpgroups have written their dS of a step.
      q_arrived: by stage: queries and their lse have been copied.
      do_arrived: by stage: dO and its delta have been copied.
      q_free: by stage: both warpgroups have read the queries.
      do_free: by stage: both warpgroups have read dO.
      ticket_arrived: by slot, see :class:`TicketCounter`.
      ticket_free: by slot, see :class:`TicketCounter`.
    """

    kv_arrived: Any
    kv_free: Any
    ds_arrived: Any
    q_arrived: Any
    do_arrived: Any
    q_free: Any
    do_free: Any
    ticket_arrived: Any
    ticket_free: Any

    @classmethod
    def counts(cls, config: MosaicConfig) -> BackwardBarriers:
        """How many barriers there are of every kind."""
        stages, do_stages = config.stages, config.do_stages or config.stages
        return cls(1, 1, 1, stages, do_stages, stages, do_stages, SLOTS, SLOTS)

    @classmethod
    def split(cls, array: Any, config: MosaicConfig) -> BackwardBarriers:
        """References to the barriers of every kind, from ``array``, a reference to all of them."""
        counts = cls.counts(config)
        ranges = [BarrierRange(array, sum(counts[:i])) for i in range(len(counts))]
        return cls(*(single.at[0] for single in ranges[:3]), *ranges[3:])


class BarrierRange:
    """Consecutive barriers of an array, used as a reference to an array of their own.

    Args:
      array: reference to all.
      first: number of the first barrier of the range.
    """

    def __init__(self, array: Any, first: int):
        self._array, self._first = array, first

    @property
    def at(self) -> BarrierRange:
        """To be indexed, as a reference's."""
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._array.at[self._first + index]


@dataclasses.dataclass(frozen=True)
class ScratchLayout:
    """Where the parts of the backward kernel's scratch array begin.

    The array holds, in this order: lse of every stage, delta of every stage of dO, two numbers for
    every stage that say which query tile and which head it holds (exact up to 2^24), the slots of
    the ticket counter, and for every key a part of a per-head gradient on its way to device memory.
    It is one array, because each array begins at a multiple of a KiB.

    Attributes:
      block_q: queries a tile.
      stages: how many tiles of queries there is room for.
      do_stages: how many tiles of dO there is room for.
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
        """How many numbers there are."""
        return self._first_key + BACKWARD_WARPGROUPS * WARPGROUP_ROWS

    @property
    def _first_key(self) -> int:
        """Where the parts for keys begin: at a multiple of 128 bytes, as the copy engine asks.

        A copy from another address ends the program with a misaligned address.
        """
        step = 128 // 4
        return -(-(self.tickets + SLOTS) // step) * step

    def per_head_sums(self, warpgroup: Any) -> Any:
        """What goes to the per-head sums of a warpgroup's keys."""
        return pl.ds(self._first_key + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def tickets(self) -> int:
        """Where the slots of the ticket counter begin."""
        return self.tile_and_head(self.stages)[0]

    def lse(self, stage: Any) -> Any:
        """The lse of the queries of a stage."""
        return pl.ds(stage * self.block_q, self.block_q)

    def delta(self, do_stage: Any) -> Any:
        """The delta of the queries of a stage of dO."""
        return pl.ds((self.stages + do_stage) * self.block_q, self.block_q)

    def tile_and_head(self, stage: Any) -> tuple[Any, Any]:
        """The indices of the number of a stage's query tile, and of the number of its head."""
        first = (self.stages + self.do_stages) * self.block_q + 2 * stage
        return first, first + 1


def _matrix(shape: tuple[int, ...], dtype: DTypeLike, lanes: int | None = None) -> Any:
    """Shared memory in the order that matrix instructions and tensor copies agree on.

    ``lanes``: the widest slice of lanes that is taken of it, if not all.
    """
    itemsize = jnp.dtype(dtype).itemsize
    step = swizzle_lanes(shape[-1] if lanes is None else lanes, itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(step * itemsize)),
    )


def _in_cluster(config: MosaicConfig, arrivals: int, count: int) -> Any:
    """``count`` barriers, each with ``arrivals`` from every program of a cluster."""
    if config.cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    axes = (CLUSTER_AXIS,)
    return plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=arrivals, num_barriers=count)


def _bytes_of(memory: ForwardMemory | BackwardMemory) -> int:
    """Bytes of descriptions: arrays begin at multiples of a KiB, a barrier takes 8 bytes."""
    size = 0
    for field in jax.tree.leaves(memory):
        if isinstance(field, (plgpu.Barrier, plgpu.ClusterBarrier)):
            size += 8 * int(np.prod(field.num_barriers))
        else:
            size += -(-math.prod(field.shape) * jnp.dtype(field.dtype).itemsize // 1024) * 1024
    return size
