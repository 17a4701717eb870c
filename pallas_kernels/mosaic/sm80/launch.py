"""Runs an sm80 kernel: arrays become references, given results are changed in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import unvary, varying_axes

# The axis over the warpgroups of a CTA.
WARPGROUPS = "warpgroup"
GRID = ("batch", "heads", "tiles")


def call[Results](
    body: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, int, int],
    warpgroups: int,
    arrays: Any,
    results: Results,
    memory: Mapping[str, Any],
) -> Results:
    """Runs ``body(arrays, results, memory)`` in every CTA and warpgroup; returns the results.

    Args:
      body: the kernel. Its records hold references, ``memory`` shared memory by name.
      name: what profiles show.
      grid: numbers of batch indices, heads and tiles.
      warpgroups: of a CTA.
      arrays: pytree of what is read.
      results: pytree of what is written: a shape for a new array, an array to change in place.
      memory: shared memory by name.
    """
    inputs, arrays_tree = jax.tree.flatten(arrays)
    wanted, results_tree = jax.tree.flatten(results)
    axis_type = jax.typeof(inputs[0]).manual_axis_type
    axis_type = axis_type.update(varying=varying_axes(inputs))
    fresh = [
        jax.ShapeDtypeStruct(r.shape, r.dtype, manual_axis_type=axis_type)
        for r in wanted
        if isinstance(r, jax.ShapeDtypeStruct)
    ]
    # References that live within this call, so that XLA runs the kernel in place on the arrays
    # they hold. A reference may not be marked as varying from device to device.
    held = {i: jax.new_ref(unvary(r)) for i, r in enumerate(wanted) if isinstance(r, jax.Array)}

    def entry(*refs, **scratch):
        given, rest = refs[: len(inputs)], refs[len(inputs) :]
        in_place, new = iter(rest[: len(held)]), iter(rest[len(held) :])
        outputs = [next(in_place if i in held else new) for i in range(len(wanted))]
        read = jax.tree.unflatten(arrays_tree, given)
        body(read, jax.tree.unflatten(results_tree, outputs), scratch)

    made = iter(
        plgpu.kernel(
            entry,
            out_type=fresh,
            grid=grid,
            grid_names=GRID,
            num_threads=warpgroups,
            thread_name=WARPGROUPS,
            kernel_name=name,
            scratch_types=dict(memory),
            # Kernels order their accesses to shared memory by barriers of their own.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
            ),
        )(*inputs, *held.values())
    )
    finished = [held[i][...] if i in held else next(made) for i in range(len(wanted))]
    return jax.tree.unflatten(results_tree, finished)
