"""The only module that calls ``jax.experimental.pallas.triton``.

JAX has deprecated that lowering in favor of Mosaic GPU, and emits a DeprecationWarning at lowering,
which Python hides by default. Where warnings are errors, ignore "The Pallas Triton backend is
deprecated".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

load = plt.load
store = plt.store


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Tile matmul with a float32 result; float32 operands are not rounded to TF32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


def exp2_affine(x: jax.Array, factor: float, offset: jax.Array, *, interpret: bool) -> jax.Array:
    """``2^(factor x + offset)`` elementwise, float32; ``offset`` broadcasts against ``x``.

    Two instructions, an FMA and ``ex2``. Compiled by XLA it is six, because XLA neither contracts
    the multiply-add nor flushes subnormal results to zero.
    """
    if interpret:
        return jnp.exp2(x * factor + offset)
    bits = struct.pack(">f", factor).hex().upper()
    (result,) = plt.elementwise_inline_asm(
        "{ .reg .f32 t; fma.rn.f32 t, $1, 0f" + bits + ", $2; ex2.approx.ftz.f32 $0, t; }",
        args=[x, jnp.broadcast_to(offset, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def in_registers(tile: jax.Array, *, interpret: bool) -> jax.Array:
    """The same ``[rows, lanes]`` tile, kept in registers as a matmul's left operand.

    On Hopper, Triton reads a loaded left operand from shared memory again for every product, which
    is as much traffic as a 64 x 64 tile's right operand. It keeps results of products in registers,
    so this multiplies by the identity: exact, once per program.
    """
    if interpret:
        return tile
    lanes = tile.shape[1]
    index = [jax.lax.broadcasted_iota(jnp.int32, (lanes, lanes), axis) for axis in (0, 1)]
    return dot(tile, (index[0] == index[1]).astype(tile.dtype)).astype(tile.dtype)


def call(
    kernel: Callable[..., None],
    *arrays: Any,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    input_output_aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """Runs a Pallas kernel through Triton, or in interpret mode on any platform."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(*arrays)
