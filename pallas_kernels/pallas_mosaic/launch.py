"""Runs a Mosaic GPU kernel: hands it references to its arrays, and each warpgroup its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import depending_on, unvary, varying_axes
from pallas_kernels.pallas_mosaic.configs import CLUSTER_AXIS, REGISTERS
from pallas_kernels.pallas_mosaic.items import Items
from pallas_kernels.pallas_mosaic.memory import BackwardMemory, ForwardMemory
from pallas_kernels.pallas_mosaic.operands import (
    BackwardOperands,
    BackwardResults,
    ForwardOperands,
    ForwardResults,
)


def call[Results: (ForwardResults, BackwardResults)](
    body: Callable[[Any, Any, Any, Any], None],
    name: str,
    *,
    items: Items,
    warpgroups: int,
    operands: ForwardOperands | BackwardOperands,
    results: Results,
    memory: ForwardMemory | BackwardMemory,
) -> Results:
    """Runs ``body(operands, results, memory, count)`` in every program; returns the results.

    The body's records hold references. ``count`` is that of
    :class:`pallas_kernels.pallas_mosaic.tickets.TicketCounter`, None if no program draws a ticket.

    Args:
      body: the kernel. :func:`pallas_kernels.pallas_mosaic.items.each_item` gives a program its
        items, :func:`split_warpgroups` gives each warpgroup its part in them.
      name: what profiles call it.
      items: what there is to do.
      warpgroups: how many compute; one more copies.
      operands: arrays that it reads.
      results: what it writes: a shape for a new array, an array to change in place.
      memory: descriptions of its shared memory and barriers.
    """
    inputs, operands_tree = jax.tree.flatten(operands)
    wanted, results_tree = jax.tree.flatten(results)
    axis_type = jax.typeof(operands.bounds).manual_axis_type
    axis_type = axis_type.update(varying=varying_axes(inputs))
    fresh = [
        jax.ShapeDtypeStruct(r.shape, r.dtype, manual_axis_type=axis_type)
        for r in wanted
        if isinstance(r, jax.ShapeDtypeStruct)
    ]
    # References that live within this call, so that XLA runs the kernel in place on the arrays they
    # hold. A reference may not be marked as varying from device to device.
    held = {i: jax.new_ref(unvary(r)) for i, r in enumerate(wanted) if isinstance(r, jax.Array)}
    counts = []
    if not items.one_each:
        counts = [jax.new_ref(depending_on(jnp.zeros((1,), jnp.int32), operands.q))]

    def entry(*refs):
        given, rest = refs[: len(inputs)], refs[len(inputs) :]
        count, rest = rest[: len(counts)], rest[len(counts) :]
        in_place, new = iter(rest[: len(held)]), iter(rest[len(held) :])
        outputs = [next(in_place if i in held else new) for i in range(len(wanted))]

        records = (
            jax.tree.unflatten(operands_tree, given),
            jax.tree.unflatten(results_tree, outputs),
        )
        pl.run_scoped(
            lambda scoped: body(*records, scoped, *(count or [None])), memory, collective_axes="wg"
        )

    cluster = (items.cluster,) if items.cluster > 1 else ()
    made = iter(
        plgpu.kernel(
            entry,
            out_type=fresh,
            grid=(items.programs,),
            grid_names=("programs",),
            cluster=cluster,
            cluster_names=(CLUSTER_AXIS,) * len(cluster),
            num_threads=warpgroups + 1,
            thread_name="wg",
            kernel_name=name,
            # Kernels order their accesses to shared memory by barriers of their own, and reduce
            # within warps only.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*inputs, *counts, *held.values())
    )
    finished = [held[i][...] if i in held else next(made) for i in range(len(wanted))]
    return jax.tree.unflatten(results_tree, finished)


def split_warpgroups(
    warpgroups: int, compute: Callable[[Any], None], copy: Callable[[], None]
) -> None:
    """Runs ``compute(warpgroup)`` on the first ``warpgroups`` and ``copy()`` on the last one."""
    warpgroup = jax.lax.axis_index("wg")
    computing, copying = REGISTERS[warpgroups]

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        copy()

    @pl.when(warpgroup < warpgroups)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        compute(warpgroup)
