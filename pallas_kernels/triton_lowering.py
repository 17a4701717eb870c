"""The one place that speaks to JAX's Triton lowering of Pallas.

JAX has deprecated that lowering in favour of Mosaic GPU, which has no attention for Ampere yet. A
successor replaces this file; kernels call nothing of ``jax.experimental.pallas.triton`` themselves.

JAX says so with a DeprecationWarning when a program is lowered. Python hides it by default; who
turns warnings into errors has to let "The Pallas Triton backend is deprecated" through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

load = plt.load
store = plt.store


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Tile matmul with a float32 result; float32 operands are not rounded to TF32."""
    precision = "highest" if a.dtype == jax.numpy.float32 else None
    return plt.dot(a, b, precision=precision)


def call(
    kernel: Callable[..., None],
    *operands: Any,
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
    )(*operands)
