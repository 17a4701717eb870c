"""What the sm90 interpreter's operations do to a kernel's memory: products, copies, counters.

Callbacks are called like those of JAX's own interpreter; :mod:`interpreted` has the equations that
call them.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    shared_memory,
)


class Place(NamedTuple):
    """Elements of a buffer."""

    key: Any
    access: Any

    @classmethod
    def of(cls, key: Any, transforms: Any) -> Place:
        """From a callback's reference arguments."""
        key = shared_memory.HostAllocationKey.from_array(key)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return cls(key, _memory().access(key, transforms))

    def read(self, thread: Any) -> np.ndarray:
        """The elements."""
        values, *_ = _memory().get_buffer_content(*self, thread)
        assert values is not None, f"{self} is out of bounds"
        return values

    def write(self, thread: Any, values: np.ndarray) -> None:
        """Changes the elements."""
        _memory().store_buffer_content(*self, values, thread)


class Product(NamedTuple):
    """An issued matrix product ``acc += a @ b``; ``a`` is in memory or an array."""

    acc: Place
    a: Any
    b: Place
    clock: Any

    def finish(self, thread: Any) -> None:
        """Computes it, and orders the warpgroup's later operations after its reads."""
        a = self.a.read(thread) if isinstance(self.a, Place) else self.a
        product = a.astype(np.float32) @ self.b.read(thread).astype(np.float32)
        self.acc.write(thread, self.acc.read(thread) + product)
        if self.clock is not None:
            with _memory().lock:
                _memory().clocks[thread].update(self.clock)


class Memory(shared_memory.GPUSharedMemory):
    """Also keeps each warpgroup's issued matrix products."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.started = collections.defaultdict(collections.deque)
        # Held during an atomic read-modify-write of global memory.
        self.atomic = threading.Lock()
        # By place of a counter: what was done before it was last increased.
        self.counted = {}
        # Parts of a multicast tile that have arrived: by barrier and place, then by the CTA that
        # copied them.
        self.parts = collections.defaultdict(dict)

    def kernel_thread_finished(self, thread):
        super().kernel_thread_finished(thread)
        if self.started[thread]:
            raise ValueError(f"{thread} ended without waiting for {self.started[thread]}")


def _memory() -> Any:
    return gpu_callbacks._get_shared_memory()


class Impatient(threading.Condition):
    """A condition whose waits time out."""

    patience = 0.0  # Set by :func:`interpreted`.

    def wait(self, timeout=None):
        if not super().wait(self.patience):
            raise TimeoutError
        return True


class Barrier(shared_memory.Barrier):
    """A barrier that reports deadlocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cv = Impatient()

    def wait(self, thread, logging_info=None):
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            where = "an unknown place"
            if logging_info is not None and logging_info.source_info is not None:
                where = source_info_util.summarize(logging_info.source_info)
            raise TimeoutError(
                f"deadlock: {thread} waited {Impatient.patience} s for {self} at {where}"
            ) from None


class AddingCopy(gpu_callbacks.AsyncCopySmemToGmemTask):
    """An atomic copy that adds to global memory."""

    def __call__(self, tma_thread_id):
        memory = _memory()
        self.pre_read(tma_thread_id, memory)
        source = Place(self.src_allocation_key, self.src_access)
        added = source.read(self.thread)
        if memory.detect_races:
            assert self.clock is not None
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, added, shape)
        if inside is not None:
            target = Place(self.dst_allocation_key, inside[0])
            with memory.atomic:
                target.write(self.thread, target.read(self.thread) + inside[1])
        self.post_write(tma_thread_id, memory)


class ClusterBarrier(shared_memory.ClusterBarrier):
    """A cluster barrier; an arrival after its CTA has exited is an error."""

    def deallocate(self):
        super().deallocate()
        if not self.has_zero_ref_count():
            return
        for barrier in self.barriers:
            seen = max(barrier.last_observed_phase_by_thread.values(), default=0)
            if seen != barrier.phase:
                raise ValueError(
                    f"a CTA may exit before the last arrival at {barrier}: it has waited "
                    f"{seen} times, and all have arrived {barrier.phase} times"
                )


class CopyOfPart(gpu_callbacks.AsyncCopyGmemToSmemTask):
    """Copies one CTA's part of a tile to the shared memory of one CTA of the cluster."""

    def __init__(self, tile, *args):
        super().__init__(*args)
        self.tile = str(tile)

    def post_write(self, tma_thread_id, shared_memory):
        source, parts = self.thread.block_id, shared_memory.parts[id(self.barrier), self.tile]
        with shared_memory.atomic:
            assert source not in parts, f"{self.thread} overwrites a tile that is not complete"
            parts[source] = self.clock.copy() if self.clock is not None else None
            if len(parts) < shared_memory.num_blocks_per_cluster:
                return
            clock, *others = parts.values()
            for other in others:
                if clock is not None:
                    clock.update(other)
            parts.clear()
        self.barrier.arrive(self.thread, clock, self.logging_info)


def _wait_until_allocated(*keys: Any) -> None:
    """Waits until another CTA of the cluster has started, as all CTAs of a cluster do on a GPU."""
    memory = _memory()
    while True:
        memory.check_failed()
        with memory.lock:
            if all(key in memory.mem for key in keys):
                return
        time.sleep(0.001)


def _part_of(access: Any, part: int, parts: int) -> Any:
    """The part of an access that one of several CTAs copies: a slice of the first axis."""
    ranges = list(access.range)
    axis = next(i for i, r in enumerate(ranges) if isinstance(r, slice))
    size, rest = divmod(ranges[axis].stop - ranges[axis].start, parts)
    assert not rest, f"{access} is not {parts} equal parts"
    start = ranges[axis].start + part * size
    ranges[axis] = slice(start, start + size, ranges[axis].step)
    return dataclasses.replace(access, range=tuple(ranges))


# Callbacks that run a kernel's operations, called like JAX's own.


@gpu_callbacks.fail_on_exception
def start_product(*, token, thread, acc, a, b, source_info):
    memory, clock = _memory(), None
    acc, b = Place.of(*acc), Place.of(*b)
    a = Place.of(*a) if isinstance(a, tuple) else np.asarray(a)
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        for read in (a, b):
            if isinstance(read, Place):
                gpu_callbacks.get_races().check_read(
                    thread, clock.async_smem_clock.copy(), *read, source_info=source_info
                )
    memory.started[thread].append(Product(acc, a, b, clock))
    return token


@gpu_callbacks.fail_on_exception
def wait_for_products(*, token, thread, wait_n, source_info):
    del source_info
    started = _memory().started[thread]
    while wait_n is not None and len(started) > wait_n:
        started.popleft().finish(thread)
    return token


@gpu_callbacks.fail_on_exception
def load_accumulator(*, token, thread, acc, wait_n, source_info):
    wait_for_products(token=token, thread=thread, wait_n=wait_n, source_info=source_info)
    return token, Place.of(acc, ()).read(thread)


@gpu_callbacks.fail_on_exception
def store_accumulator(*, token, thread, acc, value, source_info):
    del source_info
    Place.of(acc, ()).write(thread, np.asarray(value))
    return token


@gpu_callbacks.fail_on_exception
def add_to_gmem(*, token, thread, mesh_location, source, target, source_info):
    source, target = Place.of(*source), Place.of(*target)
    copy = AddingCopy(
        mesh_location, thread, *source, *target, source_info,
        _memory().incr_clock(thread) if _memory().detect_races else None,
    )  # fmt: skip
    _memory().execute_async_task(copy)
    return token


@gpu_callbacks.fail_on_exception
def copy_part_to_all(
    *, token, mesh_location, thread, src_allocation_key_as_array, src_transforms,
    dst_allocation_key_as_array, dst_transforms, barrier_allocation_key_as_array, source_info,
):  # fmt: skip
    memory = _memory()
    ctas = memory.num_blocks_per_cluster
    source = Place.of(src_allocation_key_as_array, src_transforms)
    target = Place.of(dst_allocation_key_as_array, dst_transforms)
    barrier = shared_memory.HostAllocationKey.from_array(barrier_allocation_key_as_array)
    for cta in range(ctas):
        # The same memory of another CTA.
        key, barrier_key = (dataclasses.replace(key, block_id=cta) for key in (target.key, barrier))
        _wait_until_allocated(key, barrier_key)
        parts = [_part_of(place.access, thread.block_id, ctas) for place in (source, target)]
        copy = CopyOfPart(
            (key, target.access), mesh_location, thread, source.key, parts[0], key, parts[1],
            barrier_key, source_info,
            memory.incr_clock(thread) if memory.detect_races else None,
        )  # fmt: skip
        memory.execute_async_task(copy)
    return token


@gpu_callbacks.fail_on_exception
def fetch_index(*, token, thread, counter, slot, source_info):
    memory, counter, slot = _memory(), Place.of(*counter), Place.of(*slot)
    if thread.block_id:
        return token  # The first CTA of a cluster fetches for all.
    with memory.atomic:
        index, *is_large = counter.read(thread)
        counter.write(thread, np.array([index + 1, *is_large], np.int32))
    fetched = np.array([-1 - index if is_large == [1] else index], np.float32)
    for cta in range(memory.num_blocks_per_cluster):
        theirs = slot._replace(key=dataclasses.replace(slot.key, block_id=cta))
        if memory.detect_races:
            clock = memory.incr_clock(thread).generic_clock
            gpu_callbacks.get_races().check_write(thread, clock, *theirs, source_info=source_info)
        theirs.write(thread, fetched)
    return token


@gpu_callbacks.fail_on_exception
def count(*, token, thread, counters, index, source_info):
    del source_info
    memory, counters = _memory(), Place.of(*counters)
    with memory.atomic:
        counted = counters.read(thread).copy()
        counted[int(index)] += 1
        counters.write(thread, counted)
        if memory.detect_races:
            clock, key = memory.incr_clock(thread), (counters.key, int(index))
            if key in memory.counted:
                clock.update(memory.counted[key])
            memory.counted[key] = clock
    return token


@gpu_callbacks.fail_on_exception
def check_count(*, token, thread, counters, index, least, source_info):
    del source_info
    memory, counters = _memory(), Place.of(*counters)
    counted = counters.read(thread)
    # CTAs run one after the other: those that count have ended.
    assert counted[int(index)] >= int(least), f"{thread} waits for {index} forever: {counted}"
    if memory.detect_races:
        with memory.lock:
            memory.clocks[thread].update(memory.counted[counters.key, int(index)])
    return token


def fma(x, y, z):
    """``x y + z``, rounded once: the product of two float32 is exact in float64."""
    x, y, z = (np.asarray(value, np.float64) for value in (x, y, z))
    return (x * y + z).astype(np.float32)
