"""The online softmax of a tile in registers, with as few instructions per score as possible.

From products to weights: the tanh of a soft cap, m of each row, exponentials, their sums, dropout.

- :func:`tanh`: four columns share a reciprocal. The unit that computes exponentials computes
  reciprocals as well, and limits a kernel with a soft cap.
- :func:`raised`: m is raised only where scores exceed it by a margin. Most tiles raise nothing, so
  whether one does must be cheap to find out. Positive float32 numbers are in the order of their
  bits as int32, and below these are all negative ones. So an integer maximum, which an instruction
  computes of three numbers, and one of floats of two, tells whether any score exceeds a positive
  limit, and no thread needs to know the others' scores.
- :func:`exp2_of_half` and what follows it: exponentials of one half of the rows after the other.
  Every thread has elements of two rows of a tile that are 8 apart. A half is the first or the
  second of these. Sums over a row are kept by thread: the four that share a row have different
  parts of it.
- :func:`without_dropped`: dropout, by halves as well.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.mosaic.fragments import tanh_exponent, where_any
from pallas_kernels.mosaic.sm90.instructions import (
    ROWS,
    SCALAR,
    TILE,
    element,
    like,
    with_rows,
)
from pallas_kernels.softmax import MARGIN

# From here on tanh is 1 in float32, and the product of four numbers 2^y + 1 still fits in it.
_LARGEST_EXPONENT = 30.0
# Fragments are sliced in units of so many columns.
_UNIT = 8
# The largest 1 / factor of a score, which float32 holds.
_LARGEST_INVERSE = 1e38
# Threads that share a row of a tile.
THREADS_OF_ROW = 4


def tanh(x: jax.Array, factor: float) -> jax.Array:
    """``tanh(factor x)`` with an absolute error of up to 4e-7; ``tanh.approx`` has 11 bits.

    It is ``1 - 2 / (1 + e^(2 factor x))``, with one reciprocal of the product of four denominators,
    or two, where the columns are no multiple of 32. Elements of a row that share it share a NaN,
    masked ones too. Products are NaN only if a query or a key is not finite.

    Args:
      x: float32 ``[64, columns]``; the columns are a multiple of 16.
      factor: of ``x``.
    """
    y = jnp.minimum(tanh_exponent(x, factor), _LARGEST_EXPONENT)
    count = 2 if x.shape[1] % (4 * _UNIT) else 4
    width = x.shape[1] // count
    numbers = [jnp.exp2(y[:, i * width : (i + 1) * width]) + 1 for i in range(count)]
    return jnp.concatenate([1 - 2 * each for each in _reciprocals(numbers)], 1)


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


def exp2_of_half(x: jax.Array, m: jax.Array, factor: float, half: int) -> jax.Array:
    """``2^(factor x - m)`` in half of the rows; the others' elements are unchanged.

    Args:
      x: float32 ``[64, columns]``.
      m: float32 ``[64]``.
      factor: of x.
      half: 0 or 1.
    """
    of_half = _exp2_of_second if half else _exp2_of_first
    run = plgpu.inline_mgpu(arg_types=(TILE, ROWS, SCALAR), return_type=like(x, TILE))
    return run(of_half)(x, m, jnp.float32(factor))


def known_after(m: jax.Array, acc: jax.Array) -> jax.Array:
    """``m``, float32 ``[64]``; that of the second half of the rows is known only after ``acc``.

    The assembler takes no notice of LLVM's barriers: it would compute the second half's
    exponentials before it waits for acc, a float32 tile. Here it cannot, as m seems to depend on
    acc: by bits that the third index of the CTA selects. It is 0, since the grid has one axis.
    """
    run = plgpu.inline_mgpu(arg_types=(ROWS, TILE), return_type=like(m, ROWS))
    return run(_known_after)(m, acc)


def add_parts(total: jax.Array, x: jax.Array) -> jax.Array:
    """``total``, float32 ``[64]``, and each thread's sums of its elements of ``x``'s rows."""
    run = plgpu.inline_mgpu(arg_types=(ROWS, TILE), return_type=like(total, ROWS))
    return run(_add_parts)(total, x)


def add_part(total: jax.Array, x: jax.Array, half: int) -> jax.Array:
    """:func:`add_parts` in half of the rows, 0 or 1."""
    run = plgpu.inline_mgpu(arg_types=(ROWS, TILE), return_type=like(total, ROWS))
    return run(_add_part_of_second if half else _add_part_of_first)(total, x)


def known_by_warp_after(condition: jax.Array, total: jax.Array) -> jax.Array:
    """``condition``, the same in all threads of a warp, known only after the first half's total.

    Without the vote the branch on it would seem to diverge, and uniform registers would be lost.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), SCALAR)
    run = plgpu.inline_mgpu(arg_types=(SCALAR, ROWS), return_type=result)
    return run(_known_by_warp_after)(condition.astype(jnp.int32), total) != 0


def sum_parts(total: jax.Array) -> jax.Array:
    """The rows' sums, float32 ``[64]``, from those of each thread."""
    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=like(total, ROWS))(_sum_parts)(total)


def without_dropped(x: jax.Array, hashes: jax.Array, threshold: int, half: int) -> jax.Array:
    """``x``, 0 where hashes are below the threshold, in half of the rows.

    By PTX. LLVM would first round ``x`` to 16 bits, then take pairs apart and join them again: 82
    instructions more per step of a forward kernel.

    Args:
      x: float32 ``[64, columns]``.
      hashes: int32, of the same shape.
      threshold: an int32.
      half: 0 or 1; the others are unchanged.
    """
    drop = _drop_in_second if half else _drop_in_first
    run = plgpu.inline_mgpu(arg_types=(TILE, TILE, SCALAR), return_type=like(x, TILE))
    return run(drop)(x, hashes, jnp.int32(threshold))


def _reciprocals(numbers: list[jax.Array]) -> list[jax.Array]:
    """``1 / x`` of each of 1, 2 or 4 numbers, from one reciprocal of their product."""
    if len(numbers) == 1:
        return [1 / numbers[0]]
    products = [x * y for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    of_pairs = _reciprocals(products)
    return [of_pairs[i // 2] * numbers[i ^ 1] for i in range(len(numbers))]


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


def _exp2_of_first(_, x, m, factor):
    return _exp2(x, m, factor, 0)


def _exp2_of_second(_, x, m, factor):
    return _exp2(x, m, factor, 1)


def _exp2(x, m, factor, half):
    f32, minus_m = ir.F32Type.get(), arith.negf(element(m.registers.flat[half], 0))
    # [groups of 8 columns, 2 rows], each register with two columns.
    registers = x.registers.copy().reshape(-1, 2)
    for index, register in enumerate(registers[:, half]):
        for column in range(2):
            score = math.fma(element(register, column), factor.registers.item(), minus_m)
            weight: Any = llvm.inline_asm(
                f32, [score], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False
            )
            register = vector.insert(
                weight, register, dynamic_position=[], static_position=[column]
            )
        registers[index, half] = register
    registers = registers.reshape(x.registers.shape)
    return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _known_after(_, m, acc):
    first, second = (element(register, 0) for register in m.registers.flat)
    second = llvm.inline_asm(
        ir.F32Type.get(), [second, element(acc.registers.flat[-1], 1)],
        "{ .reg .b32 bits, m, acc; mov.u32 bits, %ctaid.z; mov.b32 m, $1; mov.b32 acc, $2; "
        "and.b32 bits, bits, acc; or.b32 m, m, bits; mov.b32 $0, m; }",
        "=f,f,f", has_side_effects=False,
    )  # fmt: skip
    return with_rows(m, [first, second])


def _add_parts(_, total, x):
    return _add(total, x, halves=(0, 1))


def _add_part_of_first(_, total, x):
    return _add(total, x, halves=(0,))


def _add_part_of_second(_, total, x):
    return _add(total, x, halves=(1,))


def _add(total, x, halves):
    by_row, sums = x.registers.reshape(-1, 2), []
    for row, register in enumerate(total.registers.flat):
        value = element(register, 0)
        if row in halves:
            # Two sums at a time, so that an addition need not wait for the one before.
            columns = [[element(register, i) for register in by_row[:, row]] for i in range(2)]
            part = arith.addf(*(functools.reduce(arith.addf, column) for column in columns))
            value = arith.addf(value, part)
        sums.append(value)
    return with_rows(total, sums)


def _known_by_warp_after(_, condition, total):
    i32 = ir.IntegerType.get_signless(32)
    value: Any = llvm.inline_asm(
        i32, [condition.registers.item(), element(total.registers.flat[0], 0)],
        "{ .reg .b32 bits, sum; .reg .pred p; mov.u32 bits, %ctaid.z; mov.b32 sum, $2; "
        "and.b32 bits, bits, sum; or.b32 bits, $1, bits; setp.ne.b32 p, bits, 0; "
        "vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r,f", has_side_effects=True,
    )  # fmt: skip
    return FragmentedArray(
        _registers=np.asarray(value, dtype=object), _layout=condition.layout, _is_signed=True
    )


def _sum_parts(_, total):
    sums = []
    for register in total.registers.flat:
        value = element(register, 0)
        for distance in (1, 2):
            value = arith.addf(value, utils.shfl_bfly(value, distance))
        sums.append(value)
    return with_rows(total, sums)


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
