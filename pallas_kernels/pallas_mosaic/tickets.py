"""How a Mosaic GPU kernel's programs draw tickets for their next items from one counter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import SLOTS
from pallas_kernels.pallas_mosaic.tiles import meet


class TicketCounter(NamedTuple):
    """Counts the tickets that have been drawn, and hands each to the warpgroups of one program.

    A ticket is a number that no other program draws. It stands for one item of work. The copying
    warpgroup of a program draws a ticket and leaves it in one of SLOTS slots in shared memory,
    where every computing warpgroup of the program reads it.

    Programs of a cluster have the same tickets. The first one draws them and leaves each in the
    slots of all. The barriers are the cluster's then: ``arrived`` waits for the copying warpgroups
    of all programs, and ``free`` for all warpgroups, because the others' copying ones read, too.

    Attributes:
      count: int32 ``[1]`` in device memory: how many have been drawn by all programs.
      arrived: barriers, one a slot: a ticket is there.
      free: barriers, one a slot: all warpgroups that wait for the ticket have read it.
      slots: float32 array in shared memory that holds the slots. float32 is exact up to 2^24, which
        is more items than a GPU has memory for.
      first: where in ``slots`` the first slot is.
      arrivals: how many arrivals each of ``arrived`` waits for.
      cluster: how many programs a cluster has.
    """

    count: Any
    arrived: Any
    free: Any
    slots: Any
    first: int = 0
    arrivals: int = 1
    cluster: int = 1

    def offer_slots(self, draws: bool) -> None:
        """Says that all slots are free. Every warpgroup does that first; ``draws``: see read."""
        for slot in range(SLOTS):
            self._free(slot, draws)

    def draw(self, slot: Any) -> None:
        """Draws the next ticket into a slot. The copying warpgroup does not wait for it here."""
        plgpu.barrier_wait(self.free.at[slot])
        target = self.slots.at[pl.ds(self.first + slot, 1)]
        if self.cluster == 1:
            _draw(self.count, target)
        else:
            _draw_for_cluster(self.count, target)
            # At a cluster's barrier one thread arrives for the whole warpgroup: here after the one
            # that has drawn.
            meet()
        for _ in range(self.arrivals):
            plgpu.barrier_arrive(self.arrived.at[slot])

    def read(self, slot: Any, draws: bool) -> Any:
        """The ticket in a slot. ``draws``: whether this is the warpgroup that has drawn it."""
        plgpu.barrier_wait(self.arrived.at[slot])
        ticket = self.slots[self.first + slot].astype(jnp.int32)
        self._free(slot, draws)
        return ticket

    def await_last_reads(self) -> None:
        """Waits until the last tickets have been read, by other programs of the cluster, too.

        They say so at barriers in this program's memory, which is gone when it has ended.
        """
        for slot in range(SLOTS):
            plgpu.barrier_wait(self.free.at[slot])

    def _free(self, slot: Any, draws: bool) -> None:
        if self.cluster > 1:
            meet()
        elif draws:
            return  # It has read the ticket before it draws the next one.
        plgpu.barrier_arrive(self.free.at[slot])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _draw(_, count, slot):
    """``slot[0] = count[0]++``, by one thread."""
    # A thread of the warpgroup's second warp, because the first warp starts the copies, which would
    # wait for the counter.
    utils.inline_ptx(
        """{
        .reg .pred mine;
        .reg .b32 thread, count;
        .reg .f32 ticket;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 mine, thread, 32;
        @mine atom.relaxed.gpu.global.add.u32 count, [$0], 1;
        @mine cvt.rn.f32.u32 ticket, count;
        @mine st.shared.f32 [$1], ticket;
        }""",
        utils.memref_ptr(count),
        utils.memref_ptr(slot),
        has_side_effects=True,
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _draw_for_cluster(_, count, slot):
    """``slot[0] = count[0]++``, in the slots of two programs, by one thread of the first one."""
    utils.inline_ptx(
        """{
        .reg .pred mine;
        .reg .b32 thread, rank, count, theirs;
        .reg .f32 ticket;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        mov.u32 rank, %cluster_ctarank;
        setp.eq.u32 mine, rank, 0;
        setp.eq.and.u32 mine, thread, 32, mine;
        @mine atom.relaxed.gpu.global.add.u32 count, [$0], 1;
        @mine cvt.rn.f32.u32 ticket, count;
        @mine st.shared.f32 [$1], ticket;
        @mine mapa.shared::cluster.u32 theirs, $1, 1;
        @mine st.shared::cluster.f32 [theirs], ticket;
        @mine fence.acq_rel.cluster;
        }""",
        utils.memref_ptr(count),
        utils.memref_ptr(slot),
        has_side_effects=True,
    )
