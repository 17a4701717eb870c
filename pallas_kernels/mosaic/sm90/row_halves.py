"""A softmax whose exponentials are computed for one half of the rows after the other.

Every thread has elements of two rows of a tile that are 8 apart. A half is the first or the second
of these. Sums over a row are kept by thread: the four that share a row have different parts of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE

# Threads that share a row of a tile.
THREADS_OF_ROW = 4
SCALAR = plgpu.Layout.WG_SPLAT(())


def like(x: jax.Array, layout: Any) -> Any:
    """The type of a float32 result of ``x``'s shape."""
    return plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout)


def element(register: Any, index: int) -> Any:
    """A register's element, an MLIR value."""
    return vector.extract(register, dynamic_position=[], static_position=[index])


def with_rows(example: Any, values: Iterable[Any]) -> Any:
    """A fragment with the layout of ``example`` and one value per register."""
    registers = np.empty(example.registers.shape, dtype=object)
    for index, (register, value) in enumerate(zip(example.registers.flat, values, strict=True)):
        registers.flat[index] = vector.broadcast(register.type, value)
    return FragmentedArray(_registers=registers, _layout=example.layout, _is_signed=None)


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


def add_parts_of_half(total: jax.Array, x: jax.Array, half: int) -> jax.Array:
    """:func:`add_parts` in half of the rows; the others' totals are unchanged."""
    add = _add_parts_of_second if half else _add_parts_of_first
    return plgpu.inline_mgpu(arg_types=(ROWS, TILE), return_type=like(total, ROWS))(add)(total, x)


def sum_parts(total: jax.Array) -> jax.Array:
    """The rows' sums, float32 ``[64]``, from those of each thread."""
    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=like(total, ROWS))(_sum_parts)(total)


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
    return _with_sums(total, x, (0, 1))


def _add_parts_of_first(_, total, x):
    return _with_sums(total, x, (0,))


def _add_parts_of_second(_, total, x):
    return _with_sums(total, x, (1,))


def _with_sums(total, x, rows):
    by_row, sums = x.registers.reshape(-1, 2), []
    for row, register in enumerate(total.registers.flat):
        value = element(register, 0)
        if row in rows:
            # Two sums at a time, so that an addition need not wait for the one before.
            columns = [[element(register, i) for register in by_row[:, row]] for i in range(2)]
            part = arith.addf(*(functools.reduce(arith.addf, column) for column in columns))
            value = arith.addf(value, part)
        sums.append(value)
    return with_rows(total, sums)


def _sum_parts(_, total):
    sums = []
    for register in total.registers.flat:
        value = element(register, 0)
        for distance in (1, 2):
            value = arith.addf(value, utils.shfl_bfly(value, distance))
        sums.append(value)
    return with_rows(total, sums)
