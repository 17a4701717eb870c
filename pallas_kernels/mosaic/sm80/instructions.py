"""The instructions of the sm80 kernels: register layouts, copies, barriers, reductions.

Kernels call all GPU-only operations as attributes of this module, so that tests can replace them
and run the kernels' data flow on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import (
    FragmentedArray,
    WGStridedFragLayout,
)
from jax.experimental.mosaic.gpu.mma import mma
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.mosaic.sm80.configs import WARPS
from pallas_kernels.mosaic.transfers import global_pointer, matrix_transfers, matrix_transforms

# Threads that share a row of an accumulator, if all warps are along the rows.
_THREADS_OF_ROW = 4


class Fragments(NamedTuple):
    """Register layouts of a warpgroup's matrix products, and of vectors along their results.

    Attributes:
      m_warps: warps along the rows of the result; the others are along its columns.
      lhs: left operand ``[M, K]``.
      rhs: right operand ``[K, N]``.
      tile: result ``[M, N]``, float32, or rounded before it becomes a left operand.
      rows: ``[M]``, one value per row of a result.
      columns: ``[N]``, one value per column of a result.
    """

    m_warps: int
    lhs: Any
    rhs: Any
    tile: Any
    rows: Any
    columns: Any

    @classmethod
    def of(cls, dtype: DTypeLike, m_warps: int) -> Fragments:
        """The layouts for operands of a 16-bit dtype."""
        layout = plgpu.Layout
        tile = layout.MMA_ACC(dtype, m_warps=m_warps)
        return cls(
            m_warps,
            layout.MMA_LHS(dtype, m_warps=m_warps),
            layout.MMA_RHS(dtype, m_warps=m_warps),
            tile,
            tile.reduce(1),
            tile.reduce(0),
        )

    def along_rows(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts ``[M]`` over a result of this shape."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), self.tile)

    def zeros(self, shape: tuple[int, int]) -> jax.Array:
        """A float32 accumulator of zeros."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.tile)


def tiled_memory(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Swizzled shared memory for 16-bit matrices, which ldmatrix reads without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=matrix_transforms(shape[-1], 2))


def copy(source: Any, target: Any) -> None:
    """Starts cp.async copies from global to shared memory by all threads of the warpgroup.

    From Hopper on ``plgpu.copy_gmem_to_smem`` would use TMA, and need barriers.

    Args:
      source: 16-bit ``[rows, lanes]``, or a float32 vector.
      target: the same shape; a matrix is :func:`tiled_memory`.
    """
    transforms = () if len(target.shape) == 1 else matrix_transforms(target.shape[1], 2)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))
    def start(_, source, target):
        transfers = matrix_transfers if transforms else _vector_transfers
        for to, given, _, size in transfers(source, target):
            kind = nvvm.LoadCacheModifierKind.CG if size == 16 else nvvm.LoadCacheModifierKind.CA
            nvvm.cp_async_shared_global(to, given, size, kind)

    start(source, target)


def _vector_transfers(source: Any, target: Any) -> Iterator[tuple[Any, Any, None, int]]:
    """Like :func:`matrix_transfers`, for a float32 vector."""
    layout = WGStridedFragLayout.from_shaped_type(target.type)
    assert layout is not None
    f32 = ir.F32Type.get()
    for index in layout.linear_thread_idxs():
        index = arith.index_castui(ir.IntegerType.get_signless(32), index)
        to, given = (
            utils.getelementptr(base, [index], f32)
            for base in (utils.memref_ptr(target), global_pointer(source))
        )
        yield to, given, None, layout.vec_size * 4


@plgpu.inline_mgpu()
def wait_for_copies(_):
    """Waits for all copies of the warpgroup's threads, then for the threads themselves."""
    utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)
    utils.warpgroup_barrier()


@plgpu.inline_mgpu()
def wait_for_copies_of_cta(_):
    """Waits for all copies of the CTA's threads, then for the threads themselves."""
    utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)
    utils.inline_ptx("bar.sync 0;", has_side_effects=True)


@plgpu.inline_mgpu()
def cta_barrier(_):
    """Waits for all threads of the CTA, and orders their accesses to shared memory."""
    utils.inline_ptx("bar.sync 0;", has_side_effects=True)


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads a matrix or vector from global memory into registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def load_vector(ref: Any, layout: Any) -> jax.Array:
    """Loads a vector from shared memory into registers."""
    return plgpu.load(ref, layout=layout)


def load_matrix(ref: Any, layout: Any) -> jax.Array:
    """Loads an operand of a matrix product from swizzled shared memory, by ldmatrix."""
    return plgpu.load(ref, layout=layout)


def store(ref: Any, value: jax.Array) -> None:
    """Writes registers of any layout to global memory."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX before 0.12.
        ref[...] = value


def store_first_rows(ref: Any, x: jax.Array, fragments: Fragments) -> None:
    """Writes a result, without the rows that ``ref`` does not have, to global memory."""
    rows = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), fragments.tile))
    def write(_, ref, x):
        limit = utils.c(rows, ir.IndexType.get())
        indices = x.layout.thread_idxs(x.shape)
        for register, index in zip(x.registers.flat, indices, strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index[0], limit)):
                vector.store(register, ref, index)

    write(ref, x)


def transposed_product(
    fragments: Fragments, acc: jax.Array, left: Any, right: Any, lanes: int
) -> jax.Array:
    """``acc + left right^T``; operands ``[.., H]`` in shared memory, read ``lanes`` at a time."""
    for first in range(0, left.shape[1], lanes):
        part = pl.ds(first, lanes)
        a = load_matrix(left.at[:, part], fragments.lhs)
        b = load_matrix(right.at[:, part].transpose((1, 0)), fragments.rhs)
        acc = plgpu.mma(acc, a, b)
    return acc


def as_left_operand(x: jax.Array, fragments: Fragments) -> jax.Array:
    """A rounded result as the left operand of the next product, without moving registers.

    If all warps are along the rows, a warp's 16 x 16 fragment of a left operand is two neighboring
    16 x 8 fragments of a result.
    """
    assert fragments.m_warps == WARPS
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=fragments.lhs)

    @plgpu.inline_mgpu(arg_types=(fragments.tile,), return_type=result)
    def relabel(_, x):
        layout = fragments.lhs.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabel(x)


def as_result(x: jax.Array, fragments: Fragments) -> jax.Array:
    """Undoes :func:`as_left_operand`, also of an operand that was loaded."""
    assert fragments.m_warps == WARPS
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=fragments.tile)

    @plgpu.inline_mgpu(arg_types=(fragments.lhs,), return_type=result)
    def relabel(_, x):
        layout = fragments.tile.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabel(x)


def product_in_columns(
    acc: jax.Array, left: jax.Array, right: jax.Array, first: int, fragments: Fragments
) -> jax.Array:
    """``acc`` with ``left right`` added to the columns from ``first`` on.

    Args:
      acc: float32 ``[M, N]``.
      left: left operand ``[M, K]``.
      right: right operand ``[K, columns]``.
      first: the first column.
      fragments: their layouts.
    """
    result = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=fragments.tile)
    columns = slice(first, first + right.shape[1])
    types = fragments.tile, fragments.lhs, fragments.rhs

    @plgpu.inline_mgpu(arg_types=types, return_type=result)
    def multiply(_, acc, left, right):
        acc = acc.copy()
        acc[:, columns] = mma(acc[:, columns], left, right)
        return acc

    return multiply(acc, left, right)


def store_by_quads(ref: Any, x: jax.Array, fragments: Fragments) -> None:
    """Writes a rounded result to global memory, 16 bytes by each instruction of a thread.

    A thread has two columns of every eight. The four threads of a row exchange 4 x 4 registers, so
    that each has eight neighboring columns of 32.

    Args:
      ref: 16-bit ``[64, N]`` in global memory, N a multiple of 32.
      x: the same shape, all warps along the rows.
      fragments: its layouts.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), fragments.tile))(_store_by_quads)(ref, x)


def _store_by_quads(_, ref, x):
    i32 = ir.IntegerType.get_signless(32)
    kind = ir.MemRefType(ref.type)
    row_stride = kind.get_strides_and_offset()[0][0]

    def number(value: int) -> Any:
        return utils.c(value, i32)

    def is_set(value: Any, bit: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(value, number(bit)), number(0))

    thread = arith.remui(utils.thread_idx(), number(32 * WARPS))
    warp, lane = (f(thread, number(32)) for f in (arith.divui, arith.remui))
    row, quad = (f(lane, number(4)) for f in (arith.divui, arith.remui))
    row = arith.addi(arith.muli(warp, number(16)), row)
    start = arith.addi(arith.muli(row, number(row_stride)), arith.muli(quad, number(8)))
    base = utils.getelementptr(global_pointer(ref), [start], kind.element_type)
    high, odd = is_set(quad, 2), is_set(quad, 1)

    def exchanged(first: Any, second: Any, choice: Any, distance: int) -> tuple[Any, Any]:
        """Threads where ``choice`` is false give the second register for the partner's first."""
        got = utils.shfl_bfly(arith.select(choice, first, second), distance)
        return arith.select(choice, got, first), arith.select(choice, second, got)

    # [32 columns, 8 columns, 8 rows of 16]
    by_columns = x.registers.reshape(-1, 4, 2)
    for group, half in np.ndindex(by_columns.shape[0], 2):
        words = [utils.bitcast(register, i32) for register in by_columns[group, :, half]]
        words[0], words[2] = exchanged(words[0], words[2], high, 2)
        words[1], words[3] = exchanged(words[1], words[3], high, 2)
        words[0], words[1] = exchanged(words[0], words[1], odd, 1)
        words[2], words[3] = exchanged(words[2], words[3], odd, 1)
        at = utils.getelementptr(base, [8 * half * row_stride + 32 * group], kind.element_type)
        text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [at, *words], text, "l,r,r,r,r", has_side_effects=True
        )


def add_to_row_parts(total: jax.Array, x: jax.Array, fragments: Fragments) -> jax.Array:
    """Adds each thread's elements of a row of ``x`` to the thread's partial sum of the row.

    The sum over the threads that share a row is needed once, after the last tile: it is computed by
    :func:`sum_row_parts`.

    Args:
      total: float32 ``[M]``, partial sums that differ between the threads of a row.
      x: float32 ``[M, N]``.
      fragments: their layouts, all warps along the rows.
    """
    result = plgpu.ShapeDtypeStruct(total.shape, jnp.dtype(jnp.float32), layout=fragments.rows)

    @plgpu.inline_mgpu(arg_types=(fragments.rows, fragments.tile), return_type=result)
    def add(_, total, x):
        sums = [_elements(register)[0] for register in total.registers.flat]
        # A thread has two rows of every 16: registers are ordered [16 rows, 8 columns, row].
        by_row = x.registers.reshape(len(sums) // 2, -1, 2)
        made = np.empty(len(sums), dtype=object)
        for index, value in enumerate(sums):
            for register in by_row[index // 2, :, index % 2]:
                for element in _elements(register):
                    value = arith.addf(value, element)
            made[index] = value
        return _with_elements(total, made)

    return add(total, x)


def row_parts_of(total: jax.Array) -> jax.Array:
    """Equal partial sums, for the threads that share a row, whose sum is ``total``."""
    return total * (1 / _THREADS_OF_ROW)


def sum_row_parts(total: jax.Array, fragments: Fragments) -> jax.Array:
    """Sums the results of :func:`add_to_row_parts` over the four threads that share a row."""
    result = plgpu.ShapeDtypeStruct(total.shape, jnp.dtype(jnp.float32), layout=fragments.rows)

    @plgpu.inline_mgpu(arg_types=(fragments.rows,), return_type=result)
    def reduce(_, total):
        made = np.empty(total.registers.size, dtype=object)
        for index, register in enumerate(total.registers.flat):
            value = _elements(register)[0]
            for distance in (1, 2):
                value = arith.addf(value, utils.shfl_bfly(value, distance))
            made[index] = value
        return _with_elements(total, made)

    return reduce(total)


def _elements(register: Any) -> list[Any]:
    """The elements of a register that holds a vector, or the scalar that it holds."""
    if not isinstance(register.type, ir.VectorType):
        return [register]
    count = ir.VectorType(register.type).shape[0]
    return [
        vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(count)
    ]


def _with_elements(like: Any, values: np.ndarray) -> Any:
    """A fragment with one value per register, in the layout of ``like``."""
    registers = np.empty(like.registers.shape, dtype=object)
    for index, old in enumerate(like.registers.flat):
        value = values[index]
        if isinstance(old.type, ir.VectorType):
            value = vector.broadcast(old.type, value)
        registers.flat[index] = value
    return FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def add_in_register_order(ref: Any, x: jax.Array, fragments: Fragments) -> None:
    """Adds a result to global memory, register by register.

    Each instruction of a warp then covers 128 contiguous bytes; in row-major order it would cover
    halves of eight sectors. CTAs add in varying order, so the last bits of the sum vary.

    Args:
      ref: float32 ``[registers, 128 threads]`` in global memory.
      x: float32 ``[M, N]``.
      fragments: its layouts.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), fragments.tile))
    def add(_, ref, x):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        base = utils.getelementptr(utils.memref_ptr(ref), [thread], f32)
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), base)
        elements = (e for register in x.registers.flat for e in _elements(register))
        for index, element in enumerate(elements):
            _red_add(utils.getelementptr(base, [128 * index], f32), element)

    add(ref, x)


def add_in_fixed_point(ref: Any, x: jax.Array, fragments: Fragments) -> None:
    """Adds a result, rounded to integers, to 64-bit integers in global memory.

    The order is that of :func:`add_in_register_order`. Sums of integers are the same in any order.

    Args:
      ref: int32 ``[registers, 128 threads, 2]`` in global memory: low and high halves.
      x: float32 ``[M, N]``.
      fragments: its layouts.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), fragments.tile))
    def add(_, ref, x):
        i64, i32 = (ir.IntegerType.get_signless(bits) for bits in (64, 32))
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        base = utils.getelementptr(utils.memref_ptr(ref), [thread], i64)
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), base)
        elements = (e for register in x.registers.flat for e in _elements(register))
        for index, element in enumerate(elements):
            rounded: Any = llvm.inline_asm(
                i64, [element], "cvt.rni.s64.f32 $0, $1;", "=l,f", has_side_effects=False
            )
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [utils.getelementptr(base, [128 * index], i64), rounded],
                "red.relaxed.gpu.global.add.u64 [$0], $1;",
                "l,l",
                has_side_effects=True,
            )

    add(ref, x)


def add_sum(ref: Any, x: jax.Array, fragments: Fragments) -> None:
    """Adds each warp's sum of a result to the warp's element of ``ref``, float32 ``[WARPS]``."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), fragments.tile))
    def add(_, ref, x):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        elements = [e for register in x.registers.flat for e in _elements(register)]
        value = elements[0]
        for element in elements[1:]:
            value = arith.addf(value, element)
        for distance in (1, 2, 4, 8, 16):
            value = arith.addf(value, utils.shfl_bfly(value, distance))
        base = global_pointer(ref)
        thread = arith.remui(utils.thread_idx(), utils.c(32 * WARPS, i32))
        lane = arith.remui(thread, utils.c(32, i32))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, i32))
        with mgpu.when(first):
            warp = arith.divui(thread, utils.c(32, i32))
            _red_add(utils.getelementptr(base, [warp], f32), value)

    add(ref, x)


def _red_add(pointer: Any, value: Any) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [pointer, value],
        "red.relaxed.gpu.global.add.f32 [$0], $1;",
        "l,f",
        has_side_effects=True,
    )


def from_register_order(x: jax.Array, shape: tuple[int, int], m_warps: int) -> jax.Array:
    """Matrices ``[..., M, N]`` from :func:`add_in_register_order`'s ``[..., registers, 128]``."""
    rows, columns = shape
    n_warps = WARPS // m_warps
    repeats = rows // (16 * m_warps), columns // (8 * n_warps)
    # [row repeat, column repeat, half, pair, warp row, warp column, row of 8, column of 4]
    x = x.reshape(*x.shape[:-2], *repeats, 2, 2, m_warps, n_warps, 8, 4)
    lead = x.ndim - 8
    order = (0, 4, 2, 6, 1, 5, 7, 3)
    x = x.transpose(*range(lead), *(lead + axis for axis in order))
    return x.reshape(*x.shape[:lead], rows, columns)
