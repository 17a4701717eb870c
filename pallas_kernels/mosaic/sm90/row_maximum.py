"""The forward kernel's m of each row, which is raised only where scores exceed it by a margin.

Most tiles raise nothing, so whether one does must be cheap to find out. Positive float32 numbers
are in the order of their bits as int32, and below these are all negative ones. So an integer
maximum, which an instruction computes of three numbers, and one of floats of two, tells whether any
score exceeds a positive limit, and no thread needs to know the others' scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.fragments import where_any
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE
from pallas_kernels.mosaic.sm90.row_halves import SCALAR, element, like, with_rows
from pallas_kernels.softmax import MARGIN

# The largest 1 / factor, which float32 holds.
_LARGEST_INVERSE = 1e38


def raised(m: jax.Array, scores: jax.Array, factor: float) -> jax.Array:
    """``m``, or the largest of a row's scores times ``factor`` where it exceeds m + ``MARGIN``.

    A warp in which none does looks at no maximum. That it knows by the limits of scores, ``(m +
    MARGIN) / factor``, if they are positive; where one is negative, it computes the maximum.

    Args:
      m: float32 ``[64]``.
      scores: float32 ``[64, columns]``.
      factor: a positive number.
    """
    types = ROWS, TILE, SCALAR, SCALAR
    inverse = min(1 / factor, _LARGEST_INVERSE)
    run = plgpu.inline_mgpu(arg_types=types, return_type=like(m, ROWS))
    return run(_raised)(m, scores, jnp.float32(factor), jnp.float32(inverse))


def _raised(_, m, scores, factor, inverse):
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    margin = arith.constant(f32, ir.FloatAttr.get(f32, MARGIN))
    zero = arith.constant(i32, 0)
    old = [element(register, 0) for register in m.registers.flat]
    above = [arith.addf(value, margin) for value in old]
    # [groups of 8 columns, 2 rows], each register with two columns.
    by_row, conditions = scores.registers.reshape(-1, 2), []
    for row, least in enumerate(above):
        limit = arith.bitcast(i32, arith.mulf(least, inverse.registers.item()))
        bits = [arith.bitcast(i32, element(x, i)) for x in by_row[:, row] for i in range(2)]
        # Two maxima at a time, so that one need not wait for the one before.
        largest = arith.maxsi(*(functools.reduce(arith.maxsi, bits[i::2]) for i in range(2)))
        conditions.append(arith.cmpi(arith.CmpIPredicate.sgt, largest, limit))
        conditions.append(arith.cmpi(arith.CmpIPredicate.slt, limit, zero))

    def changed():
        highest = scores.reduce("max", 1).registers.flat
        highest = [arith.mulf(element(x, 0), factor.registers.item()) for x in highest]
        for value, least, score in zip(old, above, highest, strict=True):
            exceeds = arith.cmpf(arith.CmpFPredicate.OGT, score, least)
            yield arith.select(exceeds, score, value)

    return with_rows(m, where_any(conditions, changed, old))
