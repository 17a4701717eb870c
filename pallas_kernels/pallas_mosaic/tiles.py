"""Tiles of scores in a warpgroup's registers: layouts, broadcasts, the place of a computation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, nvvm, scf, vector

from pallas_kernels.score import LOG2_E

# A tile of scores in a warpgroup's registers, and vectors along its rows and its columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def i32(x: Any) -> jax.Array:
    """An int32 scalar: Python ints would be int64 where x64 is on."""
    return jnp.asarray(x, jnp.int32)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``[rows]`` over a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``[columns]`` over a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def tanh(x: jax.Array) -> jax.Array:
    """To float32 accuracy; the GPU's own instruction has 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array, layout: Any) -> jax.Array:
    """``x y + z``, rounded once: exact wherever float32 can hold the result.

    Args:
      x: float32, a scalar.
      y: float32, in ``layout``.
      z: float32, in ``layout``, of y's shape.
      layout: that of the result, too.
    """
    result = plgpu.ShapeDtypeStruct(y.shape, jnp.dtype(jnp.float32), layout)
    types = plgpu.Layout.WG_SPLAT(()), layout, layout
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(_multiply_add)(x, y, z)


def _multiply_add(_, x, y, z):
    return y._pointwise(lambda y, z, x: math.fma(x, y, z), z, x)


def shrink_rows(x: jax.Array, factors: jax.Array) -> jax.Array:
    """``x``, its rows multiplied by ``factors``; a warp whose factors are all 1 leaves that out.

    Args:
      x: float32, in the layout ``TILE``.
      factors: float32 ``[rows]``, in the layout ``ROWS``.
    """
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), TILE)
    return plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=result)(_shrink_rows)(x, factors)


def _shrink_rows(_, x, factors):
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
    differ = []
    for register in factors.registers.flat:
        for i in range(ir.VectorType(register.type).shape[0]):
            factor = vector.extract(register, dynamic_position=[], static_position=[i])
            differ.append(arith.cmpf(arith.CmpFPredicate.UNE, factor, one))
    any_differs = functools.reduce(arith.ori, differ)
    whole_warp = arith.constant(i32, -1)
    any_differs = nvvm.vote_sync(whole_warp, any_differs, "any")
    registers = list(x.registers.flat)
    branch = scf.IfOp(any_differs, [register.type for register in registers], has_else=True)
    then, otherwise = branch.then_block, branch.else_block
    assert otherwise is not None
    with ir.InsertionPoint(then):
        shrunk = x * factors.broadcast_in_dim(x.shape, (0,), x.layout)
        scf.yield_(list(shrunk.registers.flat))
    with ir.InsertionPoint(otherwise):
        scf.yield_(registers)
    results = np.empty(x.registers.shape, dtype=object)
    results.flat[:] = list(branch.results)
    return FragmentedArray(_registers=results, _layout=x.layout, _is_signed=None)


def computed_here(*values: jax.Array) -> Any:
    """The same values, which the compiler can compute neither earlier nor later than here.

    What is derived from a result of this function is computed after it. So a kernel saves
    registers by passing a value through it again: what follows from the value is computed anew,
    and not kept since the value was first there.
    """
    computed = lax.optimization_barrier(values)
    return computed[0] if len(values) == 1 else computed


@plgpu.inline_mgpu()
def end_reads(_):
    """Ends every thread's loads from shared memory before a copy may overwrite what they read.

    A barrier alone does not order a thread's loads and the copy engine's writes. This is
    ``plgpu.commit_smem()`` without its wait for the other threads of the warpgroup: at the barrier
    behind it every thread arrives by itself.
    """
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


@plgpu.inline_mgpu()
def meet(_):
    """Waits until all threads of the warpgroup are here."""
    utils.warpgroup_barrier()
