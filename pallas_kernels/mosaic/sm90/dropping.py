"""Dropout in the sm90 kernels: with as few instructions per score as possible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.mosaic.sm90.instructions import TILE
from pallas_kernels.mosaic.sm90.row_halves import SCALAR, element, like
from pallas_kernels.mosaic.sm90.static import BackwardStatic


def without_dropped(x: jax.Array, hashes: jax.Array, threshold: int, half: int) -> jax.Array:
    """``x``, 0 where hashes are below the threshold, in half of the rows.

    By PTX. LLVM would first round ``x`` to 16 bits, then take pairs apart and join them again: 82
    instructions more per step of a forward kernel.

    Args:
      x: float32 ``[64, columns]``.
      hashes: int32, of the same shape.
      threshold: an int32.
      half: 0 or 1 (:mod:`pallas_kernels.mosaic.sm90.row_halves`); the others are unchanged.
    """
    drop = _drop_in_second if half else _drop_in_first
    run = plgpu.inline_mgpu(arg_types=(TILE, TILE, SCALAR), return_type=like(x, TILE))
    return run(drop)(x, hashes, jnp.int32(threshold))


def _drop_in_first(_, x, hashes, threshold):
    return _drop(x, hashes, threshold, 0)


def _drop_in_second(_, x, hashes, threshold):
    return _drop(x, hashes, threshold, 1)


def _drop(x, hashes, threshold, half):
    f32, least = ir.F32Type.get(), threshold.registers.item()
    # [groups of 8 columns, 2 rows], each register with two columns.
    registers, of_hashes = (array.registers.copy().reshape(-1, 2) for array in (x, hashes))
    for index, register in enumerate(registers[:, half]):
        hashed = of_hashes[index, half]
        for column in range(2):
            weight: Any = llvm.inline_asm(
                f32, [element(register, column), element(hashed, column), least],
                "{ .reg .pred kept; setp.ge.s32 kept, $2, $3; selp.f32 $0, $1, 0f00000000, kept; }",
                "=f,f,r,r", has_side_effects=False,
            )  # fmt: skip
            register = vector.insert(
                weight, register, dynamic_position=[], static_position=[column]
            )
        registers[index, half] = register
    registers = registers.reshape(x.registers.shape)
    return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def factors_have_scale(static: BackwardStatic) -> bool:
    """Whether dropout's factors contain the score's scale, which dS then gets from them.

    Else a score would be multiplied by both. P is multiplied by the same factors, so dV is divided
    by the scale at the end. Far from 1 the scale could make weights underflow or overflow.
    """
    is_usual = 2**-40 <= abs(static.spec.score.scale) <= 2**40
    return static.spec.dropout is not None and static.scale_in_ds and is_usual


def unit(static: BackwardStatic) -> float | None:
    """Dropout's factor on the weights that are kept; None without dropout."""
    dropout = static.spec.dropout
    if dropout is None:
        return None
    return dropout.unit * (static.spec.score.scale if factors_have_scale(static) else 1.0)
