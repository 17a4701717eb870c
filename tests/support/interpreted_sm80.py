"""The sm80 kernels on a CPU: Pallas's interpreter, with what it has no rules for replaced.

Copies, matrix products, barriers and atomic additions are replaced by plain operations, so this
shows the kernels' data flow and numerics. Register layouts are not shown: every array is whole.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import launch
from pallas_kernels.mosaic.sm80 import forward, instructions
from pallas_kernels.mosaic.sm80.configs import WARPS


def _copy(source: Any, target: Any) -> None:
    target[...] = source[...]


def _store(ref: Any, value: jax.Array) -> None:
    ref[...] = value


def _load(ref: Any, *args: Any, **kwargs: Any) -> jax.Array:
    del args, kwargs
    return ref[...]


def _mma(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return acc + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))


def _add_in_register_order(ref: Any, x: jax.Array, fragments: Any) -> None:
    """What :func:`instructions.from_register_order` undoes."""
    m_warps = fragments.m_warps
    n_warps = WARPS // m_warps
    repeats = x.shape[0] // (16 * m_warps), x.shape[1] // (8 * n_warps)
    x = x.reshape(repeats[0], m_warps, 2, 8, repeats[1], n_warps, 4, 2)
    ref[...] += x.transpose(0, 4, 2, 7, 1, 5, 3, 6).reshape(-1, 128)


def _add_sum(ref: Any, x: jax.Array, fragments: Any) -> None:
    del fragments
    ref[...] += jnp.sum(x)[None]


_INSTRUCTIONS = {
    "copy": _copy,
    "wait_for_copies": lambda: None,
    "load": _load,
    "load_matrix": _load,
    "load_vector": _load,
    "store": _store,
    "as_left_operand": lambda x, fragments: x,
    "add_to_row_parts": lambda total, x, fragments: total + x.sum(1),
    "row_parts_of": lambda total: total,
    "sum_row_parts": lambda total, fragments: total,
    "add_in_register_order": _add_in_register_order,
    "add_sum": _add_sum,
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


def _kernel(body: Any, **options: Any) -> Any:
    """``plgpu.kernel``, interpreted; a barrier in memory stands for the CTA's own."""
    params = plgpu.InterpretGPUParams()
    if options["num_threads"] == 1:
        return _real_kernel(body, interpret=params, **options)
    barrier = plgpu.Barrier(num_arrivals=options["num_threads"])

    def with_barrier(*refs: Any, cta_barrier: Any) -> None:
        def wait() -> None:
            plgpu.barrier_arrive(cta_barrier)
            plgpu.barrier_wait(cta_barrier)

        names: Any = dict.fromkeys(("cta_barrier", "wait_for_copies_of_cta"), wait)
        with mock.patch.multiple(instructions, **names):
            body(*refs)

    scratch = {"cta_barrier": barrier}
    return _real_kernel(with_barrier, interpret=params, scratch_types=scratch, **options)


_real_kernel = plgpu.kernel


@contextlib.contextmanager
def interpreted():
    """Kernels that are traced inside run on the CPU."""
    with contextlib.ExitStack() as stack:
        for name, replacement in _INSTRUCTIONS.items():
            stack.enter_context(mock.patch.object(instructions, name, replacement))
        rescale = mock.patch.object(forward, "rescale_rows", _rescale_rows)
        stack.enter_context(rescale)
        for name, replacement in _PALLAS.items():
            stack.enter_context(mock.patch.object(plgpu, name, replacement))
        stack.enter_context(mock.patch.object(launch.plgpu, "kernel", _kernel))
        yield
