"""The sm80 kernels on a CPU: Pallas's interpreter, with what it has no rules for replaced.

Copies, matrix products, barriers and atomic additions are replaced by plain operations, so this
shows the kernels' data flow and numerics. With JAX 0.12 a race between the warpgroups of a CTA, or
between CTAs, is an error: vector clocks order accesses by barriers alone. A copy is a write by
its warpgroup when it is started, so a read that does not wait for its own warpgroup's copy is not
found. Register layouts are not shown: every array is whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any
from unittest import mock

import interpreted_callbacks
import interpreted_linear
import jax
import jax.numpy as jnp
from interpreted import with_counters
from jax import lax
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import inverse
from pallas_kernels.mosaic import fragments, launch, scores, transfers
from pallas_kernels.mosaic.sm80 import instructions, online_softmax, warp_operations
from pallas_kernels.mosaic.sm80.configs import WARPS


def _nothing() -> None:
    pass


def _copy_whole(source: Any, target: Any) -> None:
    target[...] = source[...]


def _copy(source: Any, target: Any) -> None:
    if len(target.shape) > 1:
        _copy_whole(source, target)
    else:  # All warpgroups write the same values, which is a race of no consequence.
        first = lax.axis_index(launch.WARPGROUP_AXIS) == 0
        pl.when(first)(lambda: _copy_whole(source, target))


def _store(ref: Any, value: jax.Array) -> None:
    ref[...] = value


def _store_first_rows(ref: Any, x: jax.Array, fragments: Any) -> None:
    del fragments
    ref[...] = x[: ref.shape[0]]


def _load(ref: Any, *args: Any, **kwargs: Any) -> jax.Array:
    del args, kwargs
    return ref[...]


def _mma(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return acc + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))


def _product_in_columns(acc: Any, left: Any, right: Any, first: int, fragments: Any) -> jax.Array:
    del fragments
    added = jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))
    after = acc.shape[1] - first - right.shape[1]
    return acc + jnp.pad(added, ((0, 0), (first, after)))


def _in_register_order(x: jax.Array, fragments: Any) -> jax.Array:
    """What :func:`instructions.from_register_order` undoes."""
    m_warps = fragments.m_warps
    n_warps = WARPS // m_warps
    repeats = x.shape[0] // (16 * m_warps), x.shape[1] // (8 * n_warps)
    x = x.reshape(repeats[0], m_warps, 2, 8, repeats[1], n_warps, 4, 2)
    return x.transpose(0, 4, 2, 7, 1, 5, 3, 6).reshape(-1, 128)


def _add_in_register_order(ref: Any, x: jax.Array, fragments: Any) -> None:
    ref[...] += _in_register_order(x, fragments)


def _add_in_fixed_point(ref: Any, x: jax.Array, fragments: Any) -> None:
    """Low and high halves, with the carry."""
    x = jnp.round(_in_register_order(x, fragments))
    high = jnp.floor(x / 2.0**32)
    low = (x - high * 2.0**32).astype(jnp.uint32)
    old = ref[..., 0].astype(jnp.uint32)
    total = old + low
    carry = (total < old).astype(jnp.int32)
    ref[..., 0] = total.astype(jnp.int32)
    ref[..., 1] += high.astype(jnp.int32) + carry


def _add_sum(ref: Any, x: jax.Array, fragments: Any) -> None:
    del fragments
    ref[...] += jnp.sum(x) * jnp.eye(1, WARPS)[0]


_ATOMICS = _add_in_register_order, _add_in_fixed_point, _add_sum
_INSTRUCTIONS = {
    "copy": _copy,
    "wait_for_copies": _nothing,
    "load": _load,
    "load_matrix": _load,
    "load_vector": _load,
    "store": _store,
    "store_first_rows": _store_first_rows,
    "as_left_operand": lambda x, fragments: x,
    "as_result": lambda x, fragments: x,
    "product_in_columns": _product_in_columns,
    "store_by_quads": _store_first_rows,
    "add_to_row_parts": lambda total, x, fragments: total + x.sum(1),
    "row_parts_of": lambda total: total,
    "sum_row_parts": lambda total, fragments: total,
    "add_in_register_order": _add_in_register_order,
    "add_in_fixed_point": _add_in_fixed_point,
    "add_sum": _add_sum,
}


def _copy_rows(source: Any, target: Any, first: Any, count: Any = None) -> None:
    """Zeros where the source ends, or after so many rows."""
    rows, length = target.shape[0], source.shape[0]
    index = first + jnp.arange(rows, dtype=jnp.int32)
    exists = (index < (length if count is None else first + count)).reshape(
        -1, *[1] * (len(target.shape) - 1)
    )
    target[...] = jnp.where(exists, source[...][jnp.minimum(index, length - 1)], 0)


def _store_rows(source: Any, target: Any, begin: Any, end: Any) -> None:
    """Row by row, as rows after the last need not exist."""
    begin, end = (jnp.clip(row, 0, source.shape[0]) for row in (begin, end))

    @pl.loop(begin, end)
    def _(row):
        target[row] = source[row]


def _copy_numbers(sources: Any, targets: Any, first: Any) -> None:
    for source, target in zip(sources, targets, strict=True):
        _copy_rows(source, target, first)


def _by_group(x: jax.Array, row_warps: int) -> jax.Array:
    """``[M, N]`` as ``[row tiles, groups, rows of a group, N]``."""
    return x.reshape(-1, WARPS // row_warps, 16 * row_warps, *x.shape[1:])


def _product(acc: Any, left: Any, right: Any, row_warps: int) -> jax.Array:
    """Each group of warps with its own keys."""
    right = right[...].reshape(WARPS // row_warps, -1, right.shape[-1])
    left = _by_group(left, row_warps).astype(jnp.float32)
    made = jnp.einsum("tgmk,gkn->tgmn", left, right.astype(jnp.float32))
    return acc + made.reshape(acc.shape)


def _transposed_product(acc: Any, left: Any, right: Any, row_warps: int) -> jax.Array:
    right = right[...].reshape(WARPS // row_warps, -1, right.shape[-1])
    left = _by_group(left, row_warps).astype(jnp.float32)
    made = jnp.einsum("tgmk,gnk->tgmn", left, right.astype(jnp.float32))
    return acc + made.reshape(acc.shape)


def _of_own_keys(ref: Any, fragments: Any, rows: int, row_warps: int) -> jax.Array:
    del fragments
    groups = WARPS // row_warps
    x = ref[...].reshape(1, groups, 1, -1)
    shape = rows // (WARPS * 16), groups, 16 * row_warps, x.shape[-1]
    return jnp.broadcast_to(x, shape).reshape(rows, -1)


def _merge_groups(m: Any, total: Any, acc: Any, memory: Any, row_warps: int) -> Any:
    del memory
    m, total, acc = (_by_group(x, row_warps) for x in (m, total, acc))
    highest = m.max(1, keepdims=True)
    factor = jnp.exp2(m - highest)
    total = jnp.broadcast_to((factor * total).sum(1, keepdims=True), m.shape)
    acc = (factor[..., None] * acc).sum(1)
    parts = warp_operations.pieces(acc.shape[-1], row_warps)
    acc = jnp.moveaxis(acc.reshape(*acc.shape[:-1], parts, -1), -2, 1)
    acc = jnp.concatenate([acc] * (m.shape[1] // parts), 1)
    highest = jnp.broadcast_to(highest, m.shape)
    return highest.reshape(-1), total.reshape(-1), acc.reshape(-1, acc.shape[-1])


_WARP_OPERATIONS = {
    "copy_matrix": _copy_rows,
    "copy_numbers": _copy_numbers,
    "commit_copies": _nothing,
    "wait_for_copies": lambda pending, row_warps: None,
    "product": _product,
    "transposed_product": _transposed_product,
    "of_own_keys": _of_own_keys,
    "merge_groups": _merge_groups,
}


def _rescale_rows(x: Any, factors: Any, *, tile: Any, rows: Any) -> Any:
    del tile, rows
    return x * factors[:, None]


_PALLAS = {
    "mma": _mma,
    "load": _load,
    "layout_cast": lambda x, layout: x,
    "broadcasted_iota": lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis),
}


# Barriers of a step of the backward's loops with one stage, numbered as they are traced.
_BARRIERS_OF_A_STEP = 3


def _kernel(without_barrier: int | None, detect_races: bool, body: Any, **options: Any) -> Any:
    """``plgpu.kernel``, interpreted; a barrier in memory stands for the CTA's own."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    names = "cta_barrier", "wait_for_copies_of_cta"
    # No vector is copied by several warpgroups there.
    by_own = {"copy": _copy_whole} if "gated_delta_rule" in options["kernel_name"] else {}
    if options["num_threads"] == 1:

        def alone(*refs: Any) -> None:
            replaced: Any = dict.fromkeys(names, _nothing) | by_own
            with mock.patch.multiple(instructions, **replaced):
                body(*refs)

        return _real_kernel(alone, interpret=params, **options)
    barrier = plgpu.Barrier(num_arrivals=options["num_threads"])

    def with_barrier(*refs: Any, cta_barrier: Any) -> None:
        numbers = itertools.count()

        def wait() -> None:
            if next(numbers) % _BARRIERS_OF_A_STEP == without_barrier:
                return
            plgpu.barrier_arrive(cta_barrier)
            plgpu.barrier_wait(cta_barrier)

        replaced: Any = dict.fromkeys(names, wait) | by_own
        with mock.patch.multiple(instructions, **replaced):
            body(*refs)

    scratch = {"cta_barrier": barrier}
    return _real_kernel(with_barrier, interpret=params, scratch_types=scratch, **options)


_real_kernel = plgpu.kernel


def _but_atomics(check: Any) -> Any:
    """A race detector's check that is not made where the kernels add atomically."""

    def checked(*args: Any, source_info: Any = None) -> None:
        place = "" if source_info is None else source_info_util.summarize(source_info)
        if not any(f"({function.__name__})" in place for function in _ATOMICS):
            check(*args, source_info=source_info)

    return checked


@contextlib.contextmanager
def interpreted(without_barrier: int | None = None, *, detect_races: bool = True):
    """Kernels that are traced inside run on the CPU.

    Not on several devices at once: their interpreted kernels wait for each other's threads.

    ``without_barrier``: a barrier of every step to leave out, where a step has three.
    ``detect_races``: programs must then run inside, too.
    """
    kernel = functools.partial(_kernel, without_barrier, detect_races)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interpreted_callbacks.with_numpy())
        for name, replacement in _INSTRUCTIONS.items():
            stack.enter_context(mock.patch.object(instructions, name, replacement))
        stack.enter_context(mock.patch.object(transfers, "store_rows", _store_rows))
        stack.enter_context(mock.patch.object(transfers, "store_matrix", _copy_whole))
        stack.enter_context(mock.patch.object(fragments, "warpgroup_barrier", _nothing))
        stack.enter_context(mock.patch.object(inverse, "invert", interpreted_linear.invert))
        for name, replacement in _WARP_OPERATIONS.items():
            stack.enter_context(mock.patch.object(warp_operations, name, replacement))
        stack.enter_context(mock.patch.object(online_softmax, "rescale_rows", _rescale_rows))
        stack.enter_context(mock.patch.object(scores, "fma", lambda x, y, z, layout: x * y + z))
        for name, replacement in _PALLAS.items():
            stack.enter_context(mock.patch.object(plgpu, name, replacement))
        stack.enter_context(mock.patch.object(launch.plgpu, "kernel", kernel))
        stack.enter_context(with_counters())
        for name in ("check_read", "check_write"):
            check = _but_atomics(getattr(GPURaceDetectionState, name))
            stack.enter_context(mock.patch.object(GPURaceDetectionState, name, check))
        # A race leaves the interpreter's memory as it was.
        stack.callback(interpret_pallas_call.reset_gpu_interpret_mode_state)
        yield
