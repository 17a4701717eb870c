"""Launches an sm80 kernel: arrays become references, given results are updated in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import unvary, varying_axes

# The axis over the warpgroups of a CTA.
WARPGROUPS = "warpgroup"
GRID = ("batch", "heads", "tiles")


def compiles_for() -> tuple[int, int]:
    """The compute capability that Mosaic GPU compiles for, ``(major, minor)``.

    It is (9, 0) for a mesh of GPUs that this process does not have.
    """
    return utils._infer_arch()


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
      body: the kernel, traced with references in place of arrays.
      name: kernel name in profiles.
      grid: number of batch indices, of heads and of tiles.
      warpgroups: warpgroups per CTA.
      arrays: pytree of arrays to read.
      results: pytree to write: a ``ShapeDtypeStruct`` allocates a new array, an array is updated in
        place.
      memory: shared-memory descriptions by name.
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
    # References that live within this call, so that XLA updates the arrays they hold in place. A
    # reference may not be marked as varying from device to device.
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
            # The kernels place their own barriers.
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
