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

import contextlib
import functools
from typing import Any
from unittest import mock

import interpreted_callbacks
import interpreted_linear
import interpreted_operations as operations
import interpreted_rows
import jax
import numpy as np
from jax import lax
from jax._src import callback
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
from pallas_kernels.linear.sm90 import warp_blocks
from pallas_kernels.mosaic import flags, fragments, tile_scheduler, transfers
from pallas_kernels.mosaic.sm90 import instructions, padding

_TOKEN = gpu_callbacks.TOKEN_SHAPE_DTYPE
# Clocks that asynchronous copies and products use in turn. A race between two of one is missed.
_CLOCKS = 97


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
        return _call(self, eqn, operations.store_accumulator, token, acc=acc, value=value), value

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
        return _call(self, eqn, operations.start_product, token, **operands), []

    def _interpret_wait_smem_to_gmem_p(self, eqn, token, *args, **kwargs):
        if "products" not in eqn.params:
            return super()._interpret_wait_smem_to_gmem_p(eqn, token, *args, **kwargs)
        return _call(
            self, eqn, operations.wait_for_products, token, wait_n=eqn.params["products"]
        ), []

    def _interpret_wgmma_accumulator_deref_p(self, eqn, token, get_invals):
        load = functools.partial(operations.load_accumulator, wait_n=eqn.params["wait_n"])
        results = _TOKEN, eqn.outvars[0].aval
        return _call(self, eqn, load, token, results, acc=get_invals()[0])

    def _interpret_copy_gmem_to_smem_p(self, eqn, token, get_invals):
        copy = super()._interpret_copy_gmem_to_smem_p
        if eqn.params["collective_axes"] is None:
            return copy(eqn, token, get_invals)
        with mock.patch.object(gpu_callbacks, "copy_gmem_to_smem", operations.copy_part_to_all):
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
            return _call(self, eqn, operations.add_to_gmem, token, **where)

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
            return token, [jax.pure_callback(operations.fma, eqn.outvars[0].aval, *get_invals())]
        if name == (fragments.__name__, "_rounded_to_int32"):
            (x,) = get_invals()
            return token, [lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(np.int32)]
        if name[0] in interpreted_rows.MODULES:
            return token, [interpreted_rows.RULES[name[1]](*get_invals())]
        if name[0] == flags.__name__:
            counters, *values = get_invals()
            rules = {"count": operations.count, "wait_for": operations.check_count}
            run = rules[name[1].partition(".")[0]]
            named = dict(zip(("index", "least"), values, strict=False))
            return _call(self, eqn, run, token, counters=(counters, ()), **named), []
        fetches = "_fetch", "_fetch_with_order", "_fetch_for_cluster"
        assert name in [(tile_scheduler.__name__, fetch) for fetch in fetches], (
            f"{function} has no rule here"
        )
        counter, slot, *leaves = get_invals()
        transforms = eqn.params["pytree_ref_transforms"].unflatten(leaves)
        counter, slot = zip((counter, slot), transforms, strict=True)
        return _call(self, eqn, operations.fetch_index, token, counter=counter, slot=slot), []


@contextlib.contextmanager
def with_counters():
    """Counters in global memory (:mod:`flags`) have rules inside, as all of Hopper's operations."""
    with (
        mock.patch.object(jaxpr_interpret, "JaxprInterpreter", _Interpreter),
        mock.patch.object(shared_memory, "GPUSharedMemory", operations.Memory),
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
        patch(operations.Impatient, "patience", patience),
        patch(instructions, "add_in_register_order", interpreted_rows.add_in_register_order),
        patch(instructions, "store_left_operand", interpreted_rows.store_left_operand),
        patch(instructions, "store_transposed", interpreted_rows.store_transposed),
        patch(instructions, "fresh_zeros", interpreted_rows.fresh_zeros),
        patch(instructions, "start_product", interpreted_rows.start_product),
        patch(padding, "zero_rows", interpreted_rows.zero_rows),
        patch(inverse, "invert", interpreted_linear.invert),
        mock.patch.multiple(warp_blocks, **interpreted_linear.WARP_BLOCKS),
        patch(transfers, "store_rows", interpreted_rows.store_rows),
        with_counters(),
        patch(shared_memory, "Barrier", operations.Barrier),
        patch(shared_memory, "ClusterBarrier", operations.ClusterBarrier),
        plgpu.force_gpu_interpret_mode(params),
    ):
        try:
            yield
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
