"""Products of the 16 tokens that a warp has of a chunk, in its registers.

A warp has 16 rows of a ``[64, n]`` fragment. Its registers are a left operand of mma.sync, and also
the right operand that is their transpose, so that products of two fragments need no shared memory
and no barrier.
``[64, 16]`` has a row of each token, and a column of each token of the row's warp.

Kernels call these functions as attributes of this module, so that tests can replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.linear.chunks import CHUNK
from pallas_kernels.linear.inverse import Matrix, assembly, lane_and_warp, parts_of, struct_of
from pallas_kernels.mosaic.sm90.instructions import TILE, element
from pallas_kernels.mosaic.transfers import matrix_transforms

# Tokens of a warp.
TOKENS = 16


def products(x: jax.Array, y: jax.Array, acc: jax.Array) -> jax.Array:
    """``acc + x y^T`` of the tokens of each warp, float32 ``[64, 16]``.

    Args:
      x: bfloat16 ``[64, channels]``.
      y: the same.
      acc: float32 ``[64, 16]``.
    """
    run = plgpu.inline_mgpu(arg_types=(TILE, TILE, TILE), return_type=_result(TOKENS))
    return run(_products)(x, y, acc)


def _products(_, x, y, acc):
    # [groups of 16 channels, 4]: registers of 2 channels: of two rows that are 8 apart, then of
    # the same rows 8 channels later.
    rows, columns = (_words(each).reshape(-1, 4) for each in (x, y))
    sums = acc.registers.reshape(2, 2)  # [8 columns, rows that are 8 apart]
    results = np.empty((2, 2), dtype=object)
    for half in range(2):
        found = [element(sums[half, i], j) for i in range(2) for j in range(2)]
        for left, right in zip(rows, columns, strict=True):
            found = _mma("bf16", left, right[half::2], found)
        results[half] = _pairs(found)
    return _fragment(results, acc.registers.shape)


def sums(*terms: tuple[jax.Array, Any]) -> jax.Array:
    """Sum of ``weights values`` of the tokens of each warp, float32 ``[64, 64]``.

    Args:
      terms: weights, float16 or bfloat16 ``[64, 16]``, and values, ``[64, 64]`` of the same dtype
        in shared memory, swizzled by 128 bytes. Each warp reads the rows that it has written.
    """
    matrix = plgpu.RefType(matrix_transforms(CHUNK, 2))
    types, arguments = (TILE, matrix) * len(terms), [x for term in terms for x in term]
    kind = {"float16": "f16", "bfloat16": "bf16"}[jnp.dtype(terms[0][0].dtype).name]
    run = functools.partial(_sums, kind)
    return plgpu.inline_mgpu(arg_types=types, return_type=_result(CHUNK))(run)(*arguments)


def _sums(kind, _, *arguments):
    lane, warp = lane_and_warp()
    row, zeros = arith.muli(warp, _i32(TOKENS)), [utils.c(0.0, ir.F32Type.get())] * 4
    weights = [_words(x).reshape(4) for x in arguments[::2]]
    values = [Matrix(x, lane) for x in arguments[1::2]]
    results = np.empty((CHUNK // 8, 2), dtype=object)
    utils.warp_barrier()
    for column in range(0, CHUNK, 16):
        found = [zeros, zeros]
        for left, matrix in zip(weights, values, strict=True):
            right = matrix.right(row, _i32(column))
            for half in range(2):
                found[half] = _mma(kind, left, right[2 * half : 2 * half + 2], found[half])
        for half in range(2):
            results[column // 8 + half] = _pairs(found[half])
    utils.warp_barrier()
    return _fragment(results)


def own(x: Any) -> jax.Array:
    """The block of each warp's own tokens, bfloat16 ``[64, 16]``.

    Args:
      x: bfloat16 ``[64, 64]`` in shared memory, swizzled by 128 bytes.
    """
    transforms = plgpu.RefType(matrix_transforms(CHUNK, 2))
    result = plgpu.ShapeDtypeStruct((CHUNK, TOKENS), jnp.dtype(jnp.bfloat16), TILE)
    return plgpu.inline_mgpu(arg_types=(transforms,), return_type=result)(_own)(x)


def _own(_, x):
    lane, warp = lane_and_warp()
    matrix, at = Matrix(x, lane), arith.muli(warp, _i32(TOKENS))
    words = matrix.left(at, at)
    kind = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((2, 2), dtype=object)
    registers.flat[:] = [utils.bitcast(word, kind) for word in words]
    return _fragment(registers)


def spread(x: jax.Array) -> jax.Array:
    """``[64, 64]`` with the ``[16, 16]`` of each warp of ``[64, 16]`` on the diagonal, else 0."""
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=_result(CHUNK))(_spread)(x)


def _spread(_, x):
    _, warp = lane_and_warp()
    given, zero = x.registers.reshape(2, 2), utils.c(0.0, ir.F32Type.get())
    zeros = vector.broadcast(given[0, 0].type, zero)
    results = np.empty((CHUNK // 8, 2), dtype=object)
    for group in range(CHUNK // 8):
        own = arith.cmpi(arith.CmpIPredicate.eq, warp, _i32(group // 2))
        for i in range(2):
            results[group, i] = arith.select(own, given[group % 2, i], zeros)
    return _fragment(results)


def with_blocks(own: jax.Array, full: Collection[tuple[int, int]], value: float) -> jax.Array:
    """``[64, 64]`` of constants, of the columns of a warp's own tokens and of other warps'.

    Args:
      own: float16 ``[64, 16]``.
      full: pairs of a warp of rows and one of columns, whose ``[16, 16]`` are ``value``; others
        are 0.
      value: see full.
    """
    result = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.dtype(jnp.float16), TILE)
    bits = sum(1 << (4 * row + column) for row, column in full)
    run = functools.partial(_with_blocks, bits, value)
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=result)(run)(own)


def _with_blocks(bits, value, _, own):
    _, warp = lane_and_warp()
    given, results = own.registers.reshape(-1), np.empty((4, own.registers.size), dtype=object)
    kind, equal = given[0].type, arith.CmpIPredicate.eq
    of_warp = arith.shrui(_i32(bits), arith.muli(warp, _i32(4)))
    zeros, values = (
        vector.broadcast(kind, utils.c(x, ir.VectorType(kind).element_type)) for x in (0.0, value)
    )
    for block in range(4):
        is_own = arith.cmpi(equal, warp, _i32(block))
        bit = arith.andi(of_warp, _i32(1 << block))
        elsewhere = arith.select(arith.cmpi(equal, bit, _i32(0)), zeros, values)
        results[block] = [arith.select(is_own, register, elsewhere) for register in given]
    return _fragment(results.reshape(-1, 2))


def pairs(x: jax.Array, size: int, other: jax.Array | None = None) -> jax.Array:
    """x where the highest bit in which row and column differ is that of ``size``, 16 or 32.

    A warp's columns of 16 are all of this level, or none is, and a select needs no index of its
    own.

    Args:
      x: ``[64, 64]``, float32 or bfloat16.
      size: half of the blocks of a level of pairs.
      other: elsewhere, of the same dtype; None is 0.
    """
    arguments = (x,) if other is None else (x, other)
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), TILE)
    run = functools.partial(_pairs_of_level, size // TOKENS)
    types = (TILE,) * len(arguments)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(run)(*arguments)


def _pairs_of_level(size, _, x, other=None):
    _, warp = lane_and_warp()
    given, results = x.registers.reshape(4, -1), np.empty((4, x.registers.size // 4), dtype=object)
    others = None if other is None else other.registers.reshape(4, -1)
    for block in range(4):
        apart = arith.xori(warp, _i32(block))
        within = arith.cmpi(arith.CmpIPredicate.eq, arith.divui(apart, _i32(size)), _i32(1))
        for i, register in enumerate(given[block]):
            kind = ir.VectorType(register.type)
            if others is None:
                zero = utils.c(0.0, kind.element_type)
                elsewhere = vector.broadcast(kind, zero)
            else:
                elsewhere = others[block, i]
            results[block, i] = arith.select(within, register, elsewhere)
    return _fragment(results.reshape(x.registers.shape), x.registers.shape)


def later_rows(x: jax.Array, first: int, *, earlier: bool = False) -> jax.Array:
    """Zeros instead of the rows before ``first``, or from it on.

    Args:
      x: bfloat16 ``[64, 64]``.
      first: a multiple of 16: a warp's rows stay, or none does.
      earlier: whether the earlier rows stay.
    """
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), TILE)
    run = functools.partial(_later_rows, first // TOKENS, earlier)
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=result)(run)(x)


def _later_rows(first, earlier, _, x):
    _, warp = lane_and_warp()
    kind = arith.CmpIPredicate.ult if earlier else arith.CmpIPredicate.uge
    stays = arith.cmpi(kind, warp, _i32(first))
    zero = utils.c(0.0, ir.VectorType(x.registers.flat[0].type).element_type)
    zeros = vector.broadcast(x.registers.flat[0].type, zero)
    results = np.empty(x.registers.shape, dtype=object)
    results.flat[:] = [arith.select(stays, register, zeros) for register in x.registers.flat]
    return _fragment(results, x.registers.shape)


def store_last_row(target: Any, x: jax.Array) -> None:
    """Stores the row of a chunk's last token.

    Args:
      target: float32 ``[64]`` in shared memory.
      x: float32 ``[64, 64]``.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))(_store_last_row)(target, x)


def _store_last_row(_, target, x):
    f32, (lane, warp) = ir.F32Type.get(), lane_and_warp()
    # The last four threads of the last warp hold two columns each of every 8.
    pair = arith.muli(arith.andi(lane, _i32(3)), _i32(2))
    base = utils.getelementptr(utils.memref_ptr(target), [pair], f32)
    holds = arith.cmpi(
        arith.CmpIPredicate.uge, arith.addi(arith.muli(warp, _i32(32)), lane), _i32(124)
    )
    with utils.when(holds):
        for group, (_, register) in enumerate(x.registers.reshape(-1, 2)):
            for i in range(2):
                place = utils.getelementptr(base, [8 * group + i], f32)
                llvm.store(element(register, i), place)


def _result(columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(jnp.float32), TILE)


def _fragment(registers: Any, shape: Any = None) -> Any:
    """From registers ``[groups of 8 columns, rows that are 8 apart]``."""
    columns = 8 * len(registers)
    shape = TILE.to_mgpu().registers_shape((CHUNK, columns)) if shape is None else shape
    layout = TILE.to_mgpu()
    return FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)


def _pairs(numbers: Sequence[Any]) -> list[Any]:
    """Registers of the four numbers of a product."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    return [vector.from_elements(kind, list(numbers[i : i + 2])) for i in (0, 2)]


def _words(x: Any) -> Any:
    """Registers of two 16-bit elements as numbers."""
    words = np.empty(x.registers.shape, dtype=object)
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    for place, register in np.ndenumerate(x.registers):
        words[place] = element(vector.bitcast(one, register), 0)
    return words


def _mma(kind: str, left: Any, right: Any, acc: Any) -> list[Any]:
    f32 = ir.F32Type.get()
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [*left, *right, *acc]
    made = assembly(struct_of(f32, 4), operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return parts_of(made, f32, 4)


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
