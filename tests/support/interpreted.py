"""The sm90 kernels on a CPU: JAX's Mosaic GPU interpreter, with the rules these kernels need added.

The interpreter (``jax/_src/pallas/mosaic_gpu/interpret``) runs every warpgroup of a CTA as a
thread, one CTA after the other, and finds data races by vector clocks. Added here:

- asynchronous matrix products, also with the left operand in registers: a product reads its
  operands and updates its accumulator when its warpgroup waits for it, not before, and overwriting
  an operand earlier is a race;
- copies to global memory that add, and copies with a predicate;
- multicast copies to all CTAs of a cluster, of which each copies its part;
- a CTA may not exit while another CTA of its cluster still arrives at its barriers;
- the kernels' own instructions: fetching a work-tile index, counting results and waiting for a
  count, a proxy fence, a fused multiply-add;
- a barrier wait that never completes is an error.

It does not show races between the threads of one warpgroup, register layouts, and late effects of
TMA: copies complete at once (but a read that does not wait for one is a race). It depends on
private names of JAX 0.12.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any, NamedTuple
from unittest import mock

import interpreted_callbacks
import interpreted_linear
import interpreted_rows
import jax
import numpy as np
from jax import lax
from jax._src import callback, source_info_util
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    interpret_pallas_call,
    jaxpr_interpret,
    shared_memory,
)
from jax._src.state import primitives as state_primitives
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import inverse
from pallas_kernels.mosaic import flags, fragments, tile_scheduler, transfers
from pallas_kernels.mosaic.sm90 import instructions, padding

_TOKEN = gpu_callbacks.TOKEN_SHAPE_DTYPE
# Clocks that asynchronous copies and products use in turn. A race between two of one is missed.
_CLOCKS = 97
_DEVICES = 8


class _Place(NamedTuple):
    """Elements of a buffer."""

    key: Any
    access: Any

    @classmethod
    def of(cls, key: Any, transforms: Any) -> _Place:
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


class _Product(NamedTuple):
    """An issued matrix product ``acc += a @ b``; ``a`` is in memory or an array."""

    acc: _Place
    a: Any
    b: _Place
    clock: Any

    def finish(self, thread: Any) -> None:
        """Computes it, and orders the warpgroup's later operations after its reads."""
        a = self.a.read(thread) if isinstance(self.a, _Place) else self.a
        product = a.astype(np.float32) @ self.b.read(thread).astype(np.float32)
        self.acc.write(thread, self.acc.read(thread) + product)
        if self.clock is not None:
            with _memory().lock:
                _memory().clocks[thread].update(self.clock)


class _Memory(shared_memory.GPUSharedMemory):
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


class _Impatient(threading.Condition):
    """A condition whose waits time out."""

    patience = 0.0  # Set by :func:`interpreted`.

    def wait(self, timeout=None):
        if not super().wait(self.patience):
            raise TimeoutError
        return True


class _Barrier(shared_memory.Barrier):
    """A barrier that reports deadlocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cv = _Impatient()

    def wait(self, thread, logging_info=None):
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            where = "an unknown place"
            if logging_info is not None and logging_info.source_info is not None:
                where = source_info_util.summarize(logging_info.source_info)
            raise TimeoutError(
                f"deadlock: {thread} waited {_Impatient.patience} s for {self} at {where}"
            ) from None


class _AddingCopy(gpu_callbacks.AsyncCopySmemToGmemTask):
    """An atomic copy that adds to global memory."""

    def __call__(self, tma_thread_id):
        memory = _memory()
        self.pre_read(tma_thread_id, memory)
        source = _Place(self.src_allocation_key, self.src_access)
        added = source.read(self.thread)
        if memory.detect_races:
            assert self.clock is not None
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, added, shape)
        if inside is not None:
            target = _Place(self.dst_allocation_key, inside[0])
            with memory.atomic:
                target.write(self.thread, target.read(self.thread) + inside[1])
        self.post_write(tma_thread_id, memory)


class _ClusterBarrier(shared_memory.ClusterBarrier):
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


class _CopyOfPart(gpu_callbacks.AsyncCopyGmemToSmemTask):
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
def _start_product(*, token, thread, acc, a, b, source_info):
    memory, clock = _memory(), None
    acc, b = _Place.of(*acc), _Place.of(*b)
    a = _Place.of(*a) if isinstance(a, tuple) else np.asarray(a)
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        for read in (a, b):
            if isinstance(read, _Place):
                gpu_callbacks.get_races().check_read(
                    thread, clock.async_smem_clock.copy(), *read, source_info=source_info
                )
    memory.started[thread].append(_Product(acc, a, b, clock))
    return token


@gpu_callbacks.fail_on_exception
def _wait_for_products(*, token, thread, wait_n, source_info):
    del source_info
    started = _memory().started[thread]
    while wait_n is not None and len(started) > wait_n:
        started.popleft().finish(thread)
    return token


@gpu_callbacks.fail_on_exception
def _load_accumulator(*, token, thread, acc, wait_n, source_info):
    _wait_for_products(token=token, thread=thread, wait_n=wait_n, source_info=source_info)
    return token, _Place.of(acc, ()).read(thread)


@gpu_callbacks.fail_on_exception
def _store_accumulator(*, token, thread, acc, value, source_info):
    del source_info
    _Place.of(acc, ()).write(thread, np.asarray(value))
    return token


@gpu_callbacks.fail_on_exception
def _add_to_gmem(*, token, thread, mesh_location, source, target, source_info):
    source, target = _Place.of(*source), _Place.of(*target)
    copy = _AddingCopy(
        mesh_location, thread, *source, *target, source_info,
        _memory().incr_clock(thread) if _memory().detect_races else None,
    )  # fmt: skip
    _memory().execute_async_task(copy)
    return token


@gpu_callbacks.fail_on_exception
def _copy_part_to_all(
    *, token, mesh_location, thread, src_allocation_key_as_array, src_transforms,
    dst_allocation_key_as_array, dst_transforms, barrier_allocation_key_as_array, source_info,
):  # fmt: skip
    memory = _memory()
    ctas = memory.num_blocks_per_cluster
    source = _Place.of(src_allocation_key_as_array, src_transforms)
    target = _Place.of(dst_allocation_key_as_array, dst_transforms)
    barrier = shared_memory.HostAllocationKey.from_array(barrier_allocation_key_as_array)
    for cta in range(ctas):
        # The same memory of another CTA.
        key, barrier_key = (dataclasses.replace(key, block_id=cta) for key in (target.key, barrier))
        _wait_until_allocated(key, barrier_key)
        parts = [_part_of(place.access, thread.block_id, ctas) for place in (source, target)]
        copy = _CopyOfPart(
            (key, target.access), mesh_location, thread, source.key, parts[0], key, parts[1],
            barrier_key, source_info,
            memory.incr_clock(thread) if memory.detect_races else None,
        )  # fmt: skip
        memory.execute_async_task(copy)
    return token


@gpu_callbacks.fail_on_exception
def _fetch_index(*, token, thread, counter, slot, source_info):
    memory, counter, slot = _memory(), _Place.of(*counter), _Place.of(*slot)
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
def _count(*, token, thread, counters, index, source_info):
    del source_info
    memory, counters = _memory(), _Place.of(*counters)
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
def _check_count(*, token, thread, counters, index, least, source_info):
    del source_info
    memory, counters = _memory(), _Place.of(*counters)
    counted = counters.read(thread)
    # CTAs run one after the other: those that count have ended.
    assert counted[int(index)] >= int(least), f"{thread} waits for {index} forever: {counted}"
    if memory.detect_races:
        with memory.lock:
            memory.clocks[thread].update(memory.counted[counters.key, int(index)])
    return token


def _fma(x, y, z):
    """``x y + z``, rounded once: the product of two float32 is exact in float64."""
    x, y, z = (np.asarray(value, np.float64) for value in (x, y, z))
    return (x * y + z).astype(np.float32)


def _call(interpreter, eqn, function, token, results=_TOKEN, **kwargs):
    """Runs a callback in place of an equation."""
    run = functools.partial(function, source_info=eqn.source_info)
    return callback.io_callback(run, results, token=token, thread=interpreter.thread, **kwargs)


class _Interpreter(jaxpr_interpret.JaxprInterpreter):
    """Runs the equations of a kernel, as one of its warpgroups."""

    def interpret(self, jaxpr, token, *args):
        eqns = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is primitives.wgmma_wait_p:
                # Otherwise ignored.
                params = {"products": eqn.params["n"]}
                eqn = eqn.replace(primitive=primitives.wait_smem_to_gmem_p, params=params)
            elif eqn.primitive is primitives.wgmma_accumulator_store_p:
                # Handled as any other store.
                whole = {"tree": jax.tree.structure(())}
                eqn = eqn.replace(primitive=state_primitives.swap_p, params=whole)
            eqns.append(eqn)
        return super().interpret(jaxpr.replace(eqns=eqns), token, *args)

    def _interpret_swap_p(self, eqn, token, get_invals):
        if not isinstance(eqn.invars[0].aval, gpu_core.WGMMAAbstractAccumulatorRef):
            return super()._interpret_swap_p(eqn, token, get_invals)
        acc, value = get_invals()
        return _call(self, eqn, _store_accumulator, token, acc=acc, value=value), value

    def _interpret_wgmma_ref_p(self, eqn, token, get_invals):
        names = "acc", "a", "b"
        trees = [eqn.params[f"{n}_transforms_tree"] or jax.tree.structure([]) for n in names]
        values, leaves = get_invals()[:3], get_invals()[3:]
        transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
        operands: dict[str, Any] = {
            n: (x, tuple(t)) for n, x, t in zip(names, values, transforms, strict=True)
        }
        if not isinstance(eqn.invars[1].aval, state_types.AbstractRef):
            operands["a"] = values[1]
        return _call(self, eqn, _start_product, token, **operands), []

    def _interpret_wait_smem_to_gmem_p(self, eqn, token, *args, **kwargs):
        if "products" not in eqn.params:
            return super()._interpret_wait_smem_to_gmem_p(eqn, token, *args, **kwargs)
        return _call(self, eqn, _wait_for_products, token, wait_n=eqn.params["products"]), []

    def _interpret_wgmma_accumulator_deref_p(self, eqn, token, get_invals):
        load = functools.partial(_load_accumulator, wait_n=eqn.params["wait_n"])
        results = _TOKEN, eqn.outvars[0].aval
        return _call(self, eqn, load, token, results, acc=get_invals()[0])

    def _interpret_copy_gmem_to_smem_p(self, eqn, token, get_invals):
        copy = super()._interpret_copy_gmem_to_smem_p
        if eqn.params["collective_axes"] is None:
            return copy(eqn, token, get_invals)
        with mock.patch.object(gpu_callbacks, "copy_gmem_to_smem", _copy_part_to_all):
            return copy(eqn, token, get_invals)

    def _interpret_copy_smem_to_gmem_p(
        self, eqn, token, src, dst, *flat_args, src_transforms_treedef, dst_transforms_treedef,
        has_user_predicate, **params,
    ):  # fmt: skip
        trees = src_transforms_treedef, dst_transforms_treedef
        if has_user_predicate:
            *flat_args, predicate = flat_args
        else:
            predicate = True

        def add(token):
            transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), flat_args)
            source, target = zip((src, dst), transforms, strict=True)
            where = {"mesh_location": self.mesh_location, "source": source, "target": target}
            return _call(self, eqn, _add_to_gmem, token, **where)

        def write(token):
            return super(_Interpreter, self)._interpret_copy_smem_to_gmem_p(
                eqn, token, src, dst, *flat_args, src_transforms_treedef=trees[0],
                dst_transforms_treedef=trees[1], has_user_predicate=False, **params,
            )[0]  # fmt: skip

        assert params["reduction_op"] in (None, "add"), params["reduction_op"]
        copy = write if params["reduction_op"] is None else add
        return lax.cond(predicate, copy, lambda token: token, token), []

    def _interpret_inline_mgpu_p(self, eqn, token, get_invals):
        function = eqn.params["mgpu_fn"]
        name = function.__module__, function.__qualname__
        if name == (fragments.__name__, "proxy_fence"):
            where = {"mesh_location": self.mesh_location}
            return _call(self, eqn, gpu_callbacks.commit_smem, token, **where), []
        if name == (fragments.__name__, "warpgroup_barrier"):
            return token, []  # A warpgroup is one thread here.
        if name == (fragments.__name__, "_fma"):
            return token, [jax.pure_callback(_fma, eqn.outvars[0].aval, *get_invals())]
        if name == (fragments.__name__, "_rounded_to_int32"):
            (x,) = get_invals()
            return token, [lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(np.int32)]
        if name[0] in interpreted_rows.MODULES:
            return token, [interpreted_rows.RULES[name[1]](*get_invals())]
        if name[0] == flags.__name__:
            counters, *values = get_invals()
            run = {"count": _count, "wait_for": _check_count}[name[1].partition(".")[0]]
            named = dict(zip(("index", "least"), values, strict=False))
            return _call(self, eqn, run, token, counters=(counters, ()), **named), []
        fetches = "_fetch", "_fetch_with_order", "_fetch_for_cluster"
        assert name in [(tile_scheduler.__name__, fetch) for fetch in fetches], (
            f"{function} has no rule here"
        )
        counter, slot, *leaves = get_invals()
        transforms = eqn.params["pytree_ref_transforms"].unflatten(leaves)
        counter, slot = zip((counter, slot), transforms, strict=True)
        return _call(self, eqn, _fetch_index, token, counter=counter, slot=slot), []


@contextlib.contextmanager
def with_counters():
    """Counters in global memory (:mod:`flags`) have rules inside, as all of Hopper's operations."""
    with (
        mock.patch.object(jaxpr_interpret, "JaxprInterpreter", _Interpreter),
        mock.patch.object(shared_memory, "GPUSharedMemory", _Memory),
    ):
        yield


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True, patience: float = 120.0):
    """Kernels that are traced and run inside are interpreted.

    Args:
      detect_races: whether a race is an error.
      patience: seconds after which a wait at a barrier is a deadlock, which is an error.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races, num_tma_threads_per_device=_CLOCKS)
    patch = mock.patch.object
    with (
        interpreted_callbacks.with_numpy(),
        patch(_Impatient, "patience", patience),
        patch(instructions, "add_in_register_order", interpreted_rows.add_in_register_order),
        patch(instructions, "store_left_operand", interpreted_rows.store_left_operand),
        patch(instructions, "store_transposed", interpreted_rows.store_transposed),
        patch(instructions, "fresh_zeros", interpreted_rows.fresh_zeros),
        patch(instructions, "start_product", interpreted_rows.start_product),
        patch(padding, "zero_rows", interpreted_rows.zero_rows),
        patch(inverse, "invert", interpreted_linear.invert),
        patch(transfers, "store_rows", interpreted_rows.store_rows),
        with_counters(),
        patch(shared_memory, "Barrier", _Barrier),
        patch(shared_memory, "ClusterBarrier", _ClusterBarrier),
        plgpu.force_gpu_interpret_mode(params),
    ):
        try:
            yield
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
