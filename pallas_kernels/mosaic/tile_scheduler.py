"""Dynamic tile scheduler of the persistent kernels: how CTAs get work tiles.

:mod:`pallas_kernels.mosaic.work_tiles` has their order.

There is one CTA per SM. Its first work tile has the CTA's own index. The producer fetches the index
of the next one from an atomic counter in global memory as soon as it has started all copies for the
current one. So no SM idles while another has much left to do, even if another kernel, like one of
NCCL's, occupies some SMs. A work tile's first copies overlap with the epilogue of the previous one.

The producer is a warpgroup of its own, or the consumer warpgroups share its work.

Where CTAs form thread-block clusters, read "cluster" for "CTA" here, and "neighboring tiles, one
per CTA of the cluster" for "tile".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import i32, optimization_barrier, warpgroup_barrier
from pallas_kernels.mosaic.launch import CLUSTER_AXIS
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.mosaic.work_tiles import TileCoordinates, WorkTiles

# The axis over CTAs, or clusters of them.
CTA_AXIS = "cta"
# Slots in shared memory for fetched work-tile indices.
SLOTS = 2


class WorkTile(NamedTuple):
    """One work tile, as a warpgroup of the CTA sees it.

    Attributes:
      batch: batch index.
      head: head index.
      tile: tile index on the side that work is split over.
      iterator: the tiles of the other side to loop over.
      steps: number of loop steps.
      steps_before: number of steps of the CTA's earlier work tiles.
      recompute: returns ``batch``, ``head`` and ``tile`` computed again, for kernels without
        registers to keep them in.
      fetch_next: fetches the index of the next work tile. A consumer that is the producer calls it
        once, when it has started all copies of this one.
      start_next: waits for that index, and starts the next work tile's first copies. Without a
        producer warpgroup every consumer calls it once, after its last step.
    """

    batch: Any
    head: Any
    tile: Any
    iterator: TileIterator
    steps: Any
    steps_before: Any
    recompute: Callable[[], TileCoordinates]
    fetch_next: Callable[[], None]
    start_next: Callable[[], None]


class TileScheduler(NamedTuple):
    """Fetches work-tile indices from a global atomic counter for the warpgroups of a CTA.

    The producer of a CTA fetches an index into one of SLOTS slots in shared memory, where every
    consumer warpgroup of the CTA reads it.

    The CTAs of a cluster get the same indices. The first CTA fetches them into the slots of all.
    Barriers then belong to the cluster: ``fetched`` waits for the producers of all CTAs, and
    ``free`` for all warpgroups, because the other producers read the slots as well.

    Attributes:
      counter: int32 ``[1]`` or ``[2]`` in global memory, see :meth:`WorkTiles.counter`.
      fetched: barriers, one per slot: the slot holds an index.
      free: barriers, one per slot: all warpgroups have read the slot.
      slots: float32 array in shared memory that holds the slots: the number of indices that were
        fetched before, or with large groups -1 minus that. float32 is exact up to 2^24, more work
        tiles than fit a GPU's memory.
      first: index of the first slot in ``slots``.
      arrivals: arrivals that each of ``fetched`` waits for.
      cluster: CTAs per cluster.
      chooses_groups: whether groups may be large.
    """

    counter: Any
    fetched: Any
    free: Any
    slots: Any
    first: int = 0
    arrivals: int = 1
    cluster: int = 1
    chooses_groups: bool = False

    def release_slots(self, is_producer: bool) -> None:
        """Marks all slots as free; called before the first :meth:`wait`."""
        for slot in range(SLOTS):
            self.release(slot, is_producer)

    def fetch(self, slot: Any) -> None:
        """Fetches the next index into a slot. The producer does not wait for it here."""
        plgpu.barrier_wait(self.free.at[slot])
        target = self.slots.at[pl.ds(self.first + slot, 1)]
        if self.cluster == 1:
            (_fetch_with_order if self.chooses_groups else _fetch)(self.counter, target)
        else:
            _fetch_for_cluster(self.counter, target)
            # One thread arrives at a cluster's barrier for the whole warpgroup: here after the
            # thread that has fetched.
            warpgroup_barrier()
        for _ in range(self.arrivals):
            plgpu.barrier_arrive(self.fetched.at[slot])

    def wait(self, slot: Any) -> None:
        """Waits until a slot holds an index."""
        plgpu.barrier_wait(self.fetched.at[slot])

    def read(self, slot: Any) -> Any:
        """What is in a slot, after :meth:`wait`."""
        return self.slots[self.first + slot].astype(jnp.int32)

    def has_large_groups(self) -> Any:
        """Whether groups are large."""
        return self.counter[1] != 0

    def drain(self) -> None:
        """Waits until every CTA of the cluster has read the last indices.

        Other CTAs arrive at barriers in this CTA's shared memory, which is gone once it has exited.
        """
        for slot in range(SLOTS):
            plgpu.barrier_wait(self.free.at[slot])

    def release(self, slot: Any, is_producer: bool) -> None:
        """Marks a slot as read by this warpgroup."""
        if self.cluster > 1:
            warpgroup_barrier()
        elif is_producer:
            return  # The producer reads an index before it fetches the next one into the slot.
        plgpu.barrier_arrive(self.free.at[slot])


class InlineProducer(NamedTuple):
    """What a consumer warpgroup does in place of a producer warpgroup.

    Attributes:
      fetches: whether it fetches the indices of work tiles; one consumer must.
      start: starts its share of a work tile's first copies.
    """

    fetches: Any
    start: Callable[[WorkTile], None]


def for_each_work_tile(
    work_tiles: WorkTiles,
    scheduler: TileScheduler,
    iterator_of: Callable[[Any, Any, Any], TileIterator],
    run: Callable[[WorkTile], None],
    *,
    is_producer: bool,
    inline: InlineProducer | None = None,
    steps_per_tile: int = 1,
    skip_empty: bool,
    run_empty: Callable[[WorkTile], None] | None = None,
    empty_first: bool = False,
) -> Any:
    """Runs a CTA's work tiles one after the other; returns their total number of steps.

    Args:
      work_tiles: all work tiles of the kernel.
      scheduler: source of the next ones.
      iterator_of: ``(batch, head, tile) -> iterator``.
      run: processes one work tile.
      is_producer: whether this is the producer warpgroup.
      inline: this warpgroup's part of a producer, if there is no producer warpgroup.
      steps_per_tile: loop steps per tile of the iterator.
      skip_empty: skip work tiles whose iterator has no tile. Otherwise they run one step, in which
        every score is masked.
      run_empty: called for work tiles that are skipped.
      empty_first: whether the code of ``run_empty`` comes before that of ``run``. What it reads
        then needs no registers while a work tile is run.
    """

    # Registers are scarce: index_and_slot is the work-tile index times SLOTS, plus the slot of the
    # next index.
    def work_tile(index_and_slot, steps_before):
        coordinates = work_tiles.coordinates(lax.div(index_and_slot, i32(SLOTS)))
        iterator = iterator_of(*coordinates)
        batch, head, tile = _of_own_cta(work_tiles, coordinates)
        visited = iterator.total if skip_empty else jnp.maximum(iterator.total, 1)
        steps = visited * steps_per_tile

        def fetch_next():
            if not work_tiles.one_per_cta:
                scheduler.fetch(lax.rem(index_and_slot, i32(SLOTS)))

        def start_next():
            if inline is None or work_tiles.one_per_cta:
                return
            slot = lax.rem(index_and_slot, i32(SLOTS))
            scheduler.wait(slot)
            following = _next_index_and_slot(work_tiles, slot, scheduler.read(slot))
            pl.when(following < end)(lambda: start(following, steps_before + steps))

        recompute = functools.partial(_recompute_coordinates, work_tiles, index_and_slot)
        position = steps, steps_before, recompute
        return WorkTile(batch, head, tile, iterator, *position, fetch_next, start_next)

    def start(index_and_slot, steps_before):
        assert inline is not None
        work = work_tile(index_and_slot, steps_before)
        pl.when(work.steps > 0)(functools.partial(inline.start, work))

    def run_one(index_and_slot, steps_before):
        work = work_tile(index_and_slot, steps_before)
        calls = [(work.steps > 0, run)]
        if run_empty is not None:
            calls.insert(0 if empty_first else 1, (work.steps == 0, run_empty))
        for condition, call in calls:
            pl.when(condition)(functools.partial(call, work))
        return work

    def body(state):
        index_and_slot, steps_before = state
        slot = lax.rem(index_and_slot, i32(SLOTS))
        work = run_one(index_and_slot, steps_before)
        if inline is not None:
            pl.when(inline.fetches & (work.steps == 0))(work.fetch_next)
            pl.when(work.steps == 0)(work.start_next)
        elif is_producer:
            scheduler.fetch(slot)
        if inline is None:
            scheduler.wait(slot)
        fetched = scheduler.read(slot)
        scheduler.release(slot, is_producer)
        following = _next_index_and_slot(work_tiles, slot, fetched)
        return following, steps_before + work.steps

    end = work_tiles.count * SLOTS
    first = _first_index(work_tiles, scheduler) * SLOTS, i32(0)
    if inline is not None:
        start(*first)
    if work_tiles.one_per_cta:
        # Without a loop the state is constant and needs no registers.
        return run_one(*first).steps
    if not is_producer or work_tiles.cluster > 1:
        scheduler.release_slots(is_producer)
    _, steps = lax.while_loop(lambda state: state[0] < end, body, first)
    if work_tiles.cluster > 1 and is_producer:
        scheduler.drain()
    return steps


def _first_index(work_tiles: WorkTiles, scheduler: TileScheduler) -> Any:
    """The index of a CTA's first work tile."""
    index = lax.axis_index(CTA_AXIS)
    if not work_tiles.chooses_groups:
        return index
    return jnp.where(scheduler.has_large_groups(), work_tiles.in_large_groups(index), index)


def _next_index_and_slot(work_tiles: WorkTiles, slot: Any, fetched: Any) -> Any:
    """The next work tile's index times SLOTS, plus the slot after this one."""
    index = work_tiles.ctas + fetched
    if work_tiles.chooses_groups:
        in_large = work_tiles.in_large_groups(work_tiles.ctas - 1 - fetched)
        index = jnp.where(fetched < 0, in_large, index)
    return index * SLOTS + lax.rem(slot + 1, i32(SLOTS))


def _recompute_coordinates(work_tiles: WorkTiles, index_and_slot: Any) -> TileCoordinates:
    """A work tile's coordinates, computed where they are used instead of kept in registers."""
    index = lax.div(optimization_barrier(index_and_slot), i32(SLOTS))
    return _of_own_cta(work_tiles, work_tiles.coordinates(index))


def _of_own_cta(work_tiles: WorkTiles, coordinates: TileCoordinates) -> TileCoordinates:
    """The coordinates of this CTA's tile, from those of its cluster."""
    if work_tiles.cluster == 1:
        return coordinates
    tile = coordinates.tile * work_tiles.cluster + lax.axis_index(CLUSTER_AXIS)
    return coordinates._replace(tile=tile)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _fetch(_, counter, slot):
    """``slot[0] = counter[0]++``, by one thread."""
    # A thread of the warpgroup's second warp: the first warp starts the copies, which would wait
    # for the counter.
    utils.inline_ptx(
        """{
        .reg .pred elected;
        .reg .b32 thread, fetched;
        .reg .f32 index;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 elected, thread, 32;
        @elected atom.relaxed.gpu.global.add.u32 fetched, [$0], 1;
        @elected cvt.rn.f32.u32 index, fetched;
        @elected st.shared.f32 [$1], index;
        }""",
        utils.memref_ptr(counter),
        utils.memref_ptr(slot),
        has_side_effects=True,
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _fetch_with_order(_, counter, slot):
    """The same, and -1 minus the index if ``counter[1]``."""
    utils.inline_ptx(
        """{
        .reg .pred elected, large;
        .reg .b32 thread, fetched, flag;
        .reg .f32 index;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 elected, thread, 32;
        @elected ld.global.u32 flag, [$0 + 4];
        @elected atom.relaxed.gpu.global.add.u32 fetched, [$0], 1;
        setp.ne.and.u32 large, flag, 0, elected;
        @large not.b32 fetched, fetched;
        @elected cvt.rn.f32.s32 index, fetched;
        @elected st.shared.f32 [$1], index;
        }""",
        utils.memref_ptr(counter),
        utils.memref_ptr(slot),
        has_side_effects=True,
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _fetch_for_cluster(_, counter, slot):
    """``slot[0] = counter[0]++``, in the slots of two CTAs, by one thread of the first one."""
    utils.inline_ptx(
        """{
        .reg .pred elected;
        .reg .b32 thread, rank, fetched, peer;
        .reg .f32 index;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        mov.u32 rank, %cluster_ctarank;
        setp.eq.u32 elected, rank, 0;
        setp.eq.and.u32 elected, thread, 32, elected;
        @elected atom.relaxed.gpu.global.add.u32 fetched, [$0], 1;
        @elected cvt.rn.f32.u32 index, fetched;
        @elected st.shared.f32 [$1], index;
        @elected mapa.shared::cluster.u32 peer, $1, 1;
        @elected st.shared::cluster.f32 [peer], index;
        @elected fence.acq_rel.cluster;
        }""",
        utils.memref_ptr(counter),
        utils.memref_ptr(slot),
        has_side_effects=True,
    )
