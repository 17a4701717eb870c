"""Fragments, the arrays in a warpgroup's registers: broadcasts, arithmetic, barriers and fences.

Functions that depend on a register layout take it as an argument, so every kernel family can use
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, scf, vector

from pallas_kernels.score import LOG2_E


def i32(x: Any) -> jax.Array:
    """An int32 scalar: Python ints would be int64 where x64 is on."""
    return jnp.asarray(x, jnp.int32)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 fragment filled with ``value``."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts ``[rows]`` to ``[rows, columns]``."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts ``[columns]`` to ``[rows, columns]``."""
    return lax.broadcast_in_dim(x, shape, [1])


def swizzle_lanes(lanes: int, itemsize: int) -> int:
    """Width in elements of a swizzled shared-memory tile for rows of ``lanes`` elements.

    The widest of 128, 64 and 32 bytes that divides a row.
    """
    for size in (128, 64, 32):
        if lanes * itemsize % size == 0:
            return size // itemsize
    raise ValueError(f"{lanes} lanes of {itemsize} bytes are no multiple of 32 bytes")


def tanh(x: jax.Array, factor: float = 1.0) -> jax.Array:
    """``tanh(factor x)`` to float32 accuracy. The GPU's ``tanh.approx`` has 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(tanh_exponent(x, factor)))


def tanh_exponent(x: jax.Array, factor: float) -> jax.Array:
    """y with ``tanh(factor x) = 1 - 2 / (1 + 2^y)``."""
    # An infinite constant would turn a product of 0 into NaN.
    return x * max(-(2.0**127), min(2 * LOG2_E * factor, 2.0**127))


def fma(x: jax.Array, y: jax.Array, z: jax.Array, layout: Any) -> jax.Array:
    """Fused multiply-add ``x y + z``, rounded once: exact wherever float32 can hold the result.

    Args:
      x: float32 scalar.
      y: float32, in ``layout``.
      z: float32, shape and layout of ``y``.
      layout: register layout, also of the result.
    """
    result = plgpu.ShapeDtypeStruct(y.shape, jnp.dtype(jnp.float32), layout)
    types = plgpu.Layout.WG_SPLAT(()), layout, layout
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(_fma)(x, y, z)


def _fma(_, x, y, z):
    return y._pointwise(lambda y, z, x: math.fma(x, y, z), z, x)


def rounded_to_int32(x: jax.Array, layout: Any) -> jax.Array:
    """The nearest int32 of each element of ``x``; ``astype`` would round towards zero.

    Args:
      x: float32, in ``layout``.
      layout: register layout, also of the result.
    """
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32), layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_rounded_to_int32)(x)


def _rounded_to_int32(_, x):
    i32 = ir.IntegerType.get_signless(32)
    registers = np.empty(x.registers.shape, dtype=object)
    for index, register in np.ndenumerate(x.registers):
        kind = ir.VectorType(register.type)
        made: Any = llvm.mlir_undef(ir.VectorType.get(kind.shape, i32))
        for i in range(kind.shape[0]):
            element = vector.extract(register, dynamic_position=[], static_position=[i])
            rounded: Any = llvm.inline_asm(
                i32, [element], "cvt.rni.s32.f32 $0, $1;", "=r,f", has_side_effects=False
            )
            made = vector.insert(rounded, made, dynamic_position=[], static_position=[i])
        registers[index] = made
    return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)


def rescale_rows(x: jax.Array, factors: jax.Array, *, tile: Any, rows: Any) -> jax.Array:
    """Multiplies the rows of ``x``; a warp whose factors are all 1 skips the multiplication.

    Args:
      x: float32 ``[rows, columns]``.
      factors: float32 ``[rows]``.
      tile: register layout of ``x``.
      rows: register layout of ``factors``.
    """
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), tile)
    return plgpu.inline_mgpu(arg_types=(tile, rows), return_type=result)(_rescale_rows)(x, factors)


def _rescale_rows(_, x, factors):
    f32 = ir.F32Type.get()
    one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
    differ = []
    for register in factors.registers.flat:
        for i in range(ir.VectorType(register.type).shape[0]):
            factor = vector.extract(register, dynamic_position=[], static_position=[i])
            differ.append(arith.cmpf(arith.CmpFPredicate.UNE, factor, one))

    def rescaled():
        return (x * factors.broadcast_in_dim(x.shape, (0,), x.layout)).registers.flat

    results = np.empty(x.registers.shape, dtype=object)
    results.flat[:] = where_any(differ, rescaled, x.registers.flat)
    return FragmentedArray(_registers=results, _layout=x.layout, _is_signed=None)


def where_any(
    conditions: Iterable[Any], changed: Callable[[], Iterable[Any]], unchanged: Iterable[Any]
) -> list[Any]:
    """MLIR values: a warp computes ``changed()`` if a condition holds in any of its threads."""
    whole_warp = arith.constant(ir.IntegerType.get_signless(32), -1)
    any_holds = nvvm.vote_sync(whole_warp, functools.reduce(arith.ori, conditions), "any")
    unchanged = list(unchanged)
    branch = scf.IfOp(any_holds, [value.type for value in unchanged], has_else=True)
    then, otherwise = branch.then_block, branch.else_block
    assert otherwise is not None
    with ir.InsertionPoint(then):
        scf.yield_(list(changed()))
    with ir.InsertionPoint(otherwise):
        scf.yield_(unchanged)
    return list(branch.results)


def optimization_barrier(*values: Any) -> Any:
    """Returns ``values``, arrays or tuples of them, unchanged.

    The compiler moves no computation of them across this point.

    Everything derived from a result is computed after it. Passing a value through again saves
    registers: values derived from it are recomputed afterwards instead of being kept alive.
    """
    results = lax.optimization_barrier(values)
    return results[0] if len(results) == 1 else results


@plgpu.inline_mgpu()
def proxy_fence(_):
    """Orders every thread's reads of shared memory before later TMA writes to the same memory.

    An mbarrier alone does not order the generic proxy and the async proxy. This is
    ``plgpu.commit_smem()`` without its warpgroup barrier, for mbarriers at which every thread
    arrives by itself.
    """
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


@plgpu.inline_mgpu()
def warpgroup_barrier(_):
    """Waits for all threads of the warpgroup."""
    utils.warpgroup_barrier()
