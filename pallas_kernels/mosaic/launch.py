"""Launches Mosaic GPU kernels: pytrees of arrays become the same pytrees of references.

Arrays are padded where a kernel does not support their head dims or lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis, unvary, vary, varying_axes
from pallas_kernels.backend import Dkv, HalfDkv, Implementation
from pallas_kernels.inputs import AttentionInputs, Carry, PerHead

# The axis over the warpgroups of a CTA, and the axis over the CTAs of a thread-block cluster.
WARPGROUP_AXIS = "warpgroup"
CLUSTER_AXIS = "cluster"

# ``(H, Hv) -> (H, Hv)`` of the arrays that a kernel runs on.
HeadDims = Callable[[int, int], tuple[int, int]]


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
      grid: number of CTAs, or of clusters, by axis name. Those that follow each other in the last
        axis start next to each other.
      warpgroups: warpgroups per CTA.
      cluster: CTAs per thread-block cluster.
      inputs: pytree of arrays to read.
      results: pytree to write: a ``ShapeDtypeStruct`` allocates a new array, an array is updated in
        place.
      memory: pytree of shared-memory and barrier descriptions.
      counter: int32 array that the kernel updates; None without one.

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
    counters = [] if counter is None else [jax.new_ref(unvary(counter))]

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
    # With references among the arguments JAX drops the marks of results.
    return jax.tree.unflatten(results_tree, vary(finished, axis_type.varying))


def with_padding(
    implementation: Implementation,
    forward_dims: HeadDims,
    backward_dims: HeadDims,
    tokens: int = 1,
) -> Implementation:
    """``implementation``, run on arrays that are padded with zeros.

    Padded lanes change no result. Padded tokens have no position: kernels mask keys past the last
    position (:class:`pallas_kernels.mosaic.static.KernelStatic`).

    Args:
      implementation: supports the padded arrays.
      forward_dims: the padded head dims of the forward kernel.
      backward_dims: those of the backward kernel.
      tokens: padded lengths are multiples of it.
    """
    accumulator = implementation.dq_accumulator
    backward_kernel = implementation.backward if accumulator is None else accumulator.add
    assert backward_kernel is not None

    def padded(x: jax.Array, lanes: int) -> jax.Array:
        """``[B, T, N, H]``, with so many lanes."""
        return pad_axis(pad_axis(x, 1, -(-x.shape[1] // tokens) * tokens), -1, lanes)

    def padded_inputs(inputs: AttentionInputs, dims_of: HeadDims) -> AttentionInputs:
        head_dim, value_dim = dims_of(inputs.head_dim, inputs.value_dim)
        query, kv = inputs.query._replace(q=padded(inputs.query.q, head_dim)), inputs.kv
        if query.do is not None:
            query = query._replace(do=padded(query.do, value_dim))
        length = query.q.shape[1]
        if query.stats is not None and length != inputs.q_length:
            lse, delta = query.stats
            # The weights of a query without keys are 0.
            stats = pad_axis(lse, 2, length, -jnp.inf), pad_axis(delta, 2, length)
            query = query._replace(stats=jnp.stack(stats))
        kv = kv._replace(k=padded(kv.k, head_dim), v=padded(kv.v, value_dim))
        return inputs._replace(query=query, kv=kv)

    def forward(
        inputs: AttentionInputs, bounds: Any, carry: Carry | None = None, **options: Any
    ) -> Carry:
        given = padded_inputs(inputs, forward_dims)
        if carry is not None:
            carry = padded(carry[0], given.value_dim), carry[1]
        o, lse = implementation.forward(given, bounds, carry, **options)
        return _cut(o, inputs.q_length, inputs.value_dim), lse

    def add(
        inputs: AttentionInputs, bounds: Any, dq: Any, dkv: Dkv | None = None, **options: Any
    ) -> tuple[Any, Dkv, PerHead]:
        """The backward kernel; dQ remains padded."""
        given = padded_inputs(inputs, backward_dims)
        if dkv is not None:
            dims = given.head_dim, given.value_dim
            dkv = _of_same_kind(dkv, *(padded(x, dim) for x, dim in zip(dkv, dims, strict=True)))
        dq, made, per_head = backward_kernel(given, bounds, dq, dkv, **options)
        like = inputs.kv.k, inputs.kv.v
        cut = (_cut(x, *y.shape[1::2]) for x, y in zip(made, like, strict=True))
        return dq, _of_same_kind(made, *cut), per_head

    def backward(
        inputs: AttentionInputs,
        bounds: Any,
        dq: jax.Array | None = None,
        dkv: Dkv | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Dkv, PerHead]:
        if dq is not None:
            dq = padded(dq, backward_dims(inputs.head_dim, inputs.value_dim)[0])
        made, dkv, per_head = add(inputs, bounds, dq, dkv, **options)
        return _cut(made, inputs.q_length, inputs.head_dim), dkv, per_head

    def forward_bounds(inputs: AttentionInputs, **options: Any) -> Any:
        return implementation.forward_bounds(padded_inputs(inputs, forward_dims), **options)

    def backward_bounds(inputs: AttentionInputs, **options: Any) -> Any:
        return implementation.backward_bounds(padded_inputs(inputs, backward_dims), **options)

    def split_backward(bounds: Any, inputs: AttentionInputs, **options: Any) -> tuple[Any, Any]:
        split = implementation.split_backward
        assert split is not None
        return split(bounds, padded_inputs(inputs, backward_dims), **options)

    if accumulator is not None:
        zeros, finish = accumulator.zeros, accumulator.finish

        def padded_zeros(inputs: AttentionInputs, bounds: Any, **options: Any) -> Any:
            return zeros(padded_inputs(inputs, backward_dims), bounds, **options)

        def cut_finish(dq: Any, inputs: AttentionInputs, **options: Any) -> jax.Array:
            made = finish(dq, padded_inputs(inputs, backward_dims), **options)
            return _cut(made, inputs.q_length, inputs.head_dim)

        accumulator = dataclasses.replace(
            accumulator, zeros=padded_zeros, add=add, finish=cut_finish
        )
    return dataclasses.replace(
        implementation,
        forward=forward,
        backward=backward if accumulator is None else accumulator.backward,
        dq_accumulator=accumulator,
        forward_bounds=forward_bounds,
        backward_bounds=backward_bounds,
        split_backward=None if implementation.split_backward is None else split_backward,
    )


def _of_same_kind(dkv: Dkv, dk: jax.Array, dv: jax.Array) -> Dkv:
    """dK and dV, of which as much is set as of ``dkv``."""
    return HalfDkv(dk, dv) if isinstance(dkv, HalfDkv) else (dk, dv)


def multiples_of_16(*dims: int) -> tuple[int, int]:
    """Head dims rounded up to multiples of 16, the depth of one matrix instruction."""
    head_dim, value_dim = (-(-dim // 16) * 16 for dim in dims)
    return head_dim, value_dim


def _cut(x: jax.Array, length: int, lanes: int) -> jax.Array:
    """The part of ``[B, T, N, H]`` that is not padding."""
    return x[:, :length, :, :lanes]
