"""Launches a Mosaic GPU kernel: pytrees of arrays become the same pytrees of references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import unvary, varying_axes

# The axis over the warpgroups of a CTA, and the axis over the CTAs of a thread-block cluster.
WARPGROUP_AXIS = "warpgroup"
CLUSTER_AXIS = "cluster"


def compiles_for() -> tuple[int, int]:
    """The compute capability that Mosaic GPU compiles for, ``(major, minor)``.

    It is (9, 0) for a mesh of GPUs that this process does not have.
    """
    return utils._infer_arch()


def launch[Results](
    kernel: Callable[..., None],
    name: str,
    *,
    semantics: plgpu.LoweringSemantics = plgpu.LoweringSemantics.Warpgroup,
    grid: Mapping[str, int],
    warpgroups: int,
    cluster: int = 1,
    inputs: Any,
    results: Results,
    memory: Any,
    counter: jax.Array | None = None,
) -> Results:
    """Runs ``kernel(inputs, results, memory)`` in every warpgroup of every CTA.

    Args:
      kernel: traced with references in place of arrays. If there is a ``counter``, it is the last
        argument.
      name: kernel name in profiles.
      semantics: whether the kernel's operations are a warpgroup's or, for mma.sync, a thread's.
      grid: number of CTAs, or of clusters, by axis name.
      warpgroups: warpgroups per CTA.
      cluster: CTAs per thread-block cluster.
      inputs: pytree of arrays to read.
      results: pytree to write: a ``ShapeDtypeStruct`` allocates a new array, an array is updated in
        place.
      memory: pytree of shared-memory and barrier descriptions.
      counter: int32 ``[1]``, a zero that the kernel updates; None without one.

    Returns:
      The results.
    """
    arrays, inputs_tree = jax.tree.flatten(inputs)
    wanted, results_tree = jax.tree.flatten(results)
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    axis_type = axis_type.update(varying=varying_axes(arrays))
    fresh = [
        jax.ShapeDtypeStruct(r.shape, r.dtype, manual_axis_type=axis_type)
        for r in wanted
        if isinstance(r, jax.ShapeDtypeStruct)
    ]
    # References that live within this call, so that XLA updates the arrays they hold in place. A
    # reference may not be marked as varying from device to device.
    held = {i: jax.new_ref(unvary(r)) for i, r in enumerate(wanted) if isinstance(r, jax.Array)}
    counters = [] if counter is None else [jax.new_ref(counter)]

    def entry(*refs):
        given, rest = refs[: len(arrays)], refs[len(arrays) :]
        counter_refs, rest = rest[: len(counters)], rest[len(counters) :]
        in_place, new = iter(rest[: len(held)]), iter(rest[len(held) :])
        outputs = [next(in_place if i in held else new) for i in range(len(wanted))]

        records = (
            jax.tree.unflatten(inputs_tree, given),
            jax.tree.unflatten(results_tree, outputs),
        )
        pl.run_scoped(
            lambda scoped: kernel(*records, scoped, *counter_refs),
            memory,
            collective_axes=WARPGROUP_AXIS,
        )

    clusters = (cluster,) if cluster > 1 else ()
    outputs = iter(
        plgpu.kernel(
            entry,
            out_type=fresh,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            cluster=clusters,
            cluster_names=(CLUSTER_AXIS,) * len(clusters),
            num_threads=warpgroups,
            thread_name=WARPGROUP_AXIS,
            kernel_name=name,
            # The kernels place their own barriers, and reduce within warps only.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
                lowering_semantics=semantics,
            ),
        )(*arrays, *counters, *held.values())
    )
    finished = [held[i][...] if i in held else next(outputs) for i in range(len(wanted))]
    return jax.tree.unflatten(results_tree, finished)
