"""Register layouts of wgmma, warp specialization, dQ in register order, stores of dS."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.mosaic.fragments import optimization_barrier, swizzle_lanes
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS
from pallas_kernels.mosaic.sm90.configs import REGISTERS, WARPGROUP_ROWS, moves_registers
from pallas_kernels.mosaic.transfers import matrix_transforms

# A tile of scores in a warpgroup's registers, and vectors along its rows and its columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())
_WARPS = 4
_WARP_THREADS = 32


class _Layouts(NamedTuple):
    """The three as :class:`pallas_kernels.mosaic.scores.ScoreTile` needs them."""

    tile: Any = TILE
    rows: Any = ROWS
    columns: Any = COLUMNS


LAYOUTS = _Layouts()


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


def specialize_warpgroups(
    consumers: int, consume: Callable[[Any], None], produce: Callable[[], None] | None
) -> None:
    """Runs ``consume(warpgroup)`` on the first ``consumers`` warpgroups, ``produce()`` on the last.

    Registers move from the producer warpgroup to the consumers (``setmaxnreg``), if they can. With
    ``produce`` None, all warpgroups are consumers.
    """
    warpgroup = lax.axis_index(WARPGROUP_AXIS)
    if produce is None:
        consume(warpgroup)
        return
    consumer_registers, producer_registers = REGISTERS[consumers]

    @pl.when(warpgroup == consumers)
    def _():
        if moves_registers():
            plgpu.set_max_registers(producer_registers, action="decrease")
        produce()

    @pl.when(warpgroup < consumers)
    def _():
        if moves_registers():
            plgpu.set_max_registers(consumer_registers, action="increase")
        consume(warpgroup)


def fresh_zeros(shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros in the layout :data:`TILE`, for an accumulator.

    Their instruction stays where it is. Without branches between it and a product, ptxas lets the
    product start from zero. LLVM moves a constant to the beginning of a loop, and copies it to
    every register of an accumulator.
    """
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), TILE)
    return plgpu.inline_mgpu(return_type=result)(functools.partial(_fresh_zeros, shape))()


def _fresh_zeros(shape, _):
    zero: Any = llvm.inline_asm(ir.F32Type.get(), [], "mov.b32 $0, 0;", "=f", has_side_effects=True)
    return FragmentedArray.splat(zero, shape, WGMMA_LAYOUT)


def start_product(acc: Any, a: jax.Array, b: Any) -> Callable[[], jax.Array]:
    """Starts ``acc += a b``. The result waits for it, and for all products before it.

    ``plgpu.wgmma`` contracts as many rows of ``b`` at a time as its swizzled tiles have lanes. If
    they are no multiple of that, the instructions are issued here. Kernels call it as an attribute
    of this module, so that tests can replace it.

    Args:
      acc: accumulator, float32 ``[64, n]``.
      a: bfloat16 or float16 ``[64, k]``, in the layout :data:`TILE`; k is a multiple of 16.
      b: swizzled shared memory ``[k, n]``, of the same dtype.
    """
    rows, columns = b.shape
    if rows % swizzle_lanes(columns, 2) == 0:
        plgpu.wgmma(acc, a, b)
        return functools.partial(plgpu.wgmma_accumulator_load, acc)
    tile = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, columns), jnp.dtype(jnp.float32), TILE)
    types = TILE, TILE, plgpu.RefType(matrix_transforms(columns, 2))
    start = plgpu.inline_mgpu(arg_types=types, return_type=tile)(_start_product)
    started = start(plgpu.wgmma_accumulator_load(acc, wait_n=None), a, b)

    def wait() -> jax.Array:
        plgpu.wgmma_wait(0)
        return optimization_barrier(started)

    return wait


def _start_product(_, acc, a, b):
    i64, step = ir.IntegerType.get_signless(64), 16
    (rows, columns), dtype = mma_utils.tiled_memref_shape(b)
    described: Any = mma_utils.create_descriptor(
        b, swizzle=2 * swizzle_lanes(columns, 2), group_size=(step, columns), logical_k_major=True
    )
    (place, (_, (stride,))), *_ = described
    a, acc = wgmma_fence(a), WGMMAAccumulator.from_registers(acc, sync=False)
    registers = acc._value.registers.copy()
    next_rows = utils.c(mma_utils.encode_addr(stride), i64)
    for row in range(0, rows, step):
        registers = wgmma_m64(
            registers, a[:, row : row + step], place, n=columns,
            # The width of a, and not how b is swizzled, which the descriptor specifies.
            swizzle=2 * step, a_element_type=dtype, b_element_type=dtype, a_transpose=None,
            a_k_stride=None, b_transpose=True, b_k_stride=stride,
        )  # fmt: skip
        place = llvm.add(place, next_rows, overflow_flags=llvm.IntegerOverflowFlags.none)
    utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
    started = FragmentedArray(_registers=registers, _layout=acc._value.layout, _is_signed=None)
    return started.to_layout(acc._original_layout)


def store_left_operand(target: Any, x: jax.Array) -> None:
    """Stores a tile that is also a product's left operand in registers.

    Each instruction stores four registers in a row, those of 16 columns. Mosaic's own store takes
    those of 32 columns of every other row, so it copies them to other registers.

    Args:
      target: shared memory ``[64, 64]``, swizzled by 128 bytes.
      x: bfloat16 or float16, of the same shape, in the layout :data:`TILE`.
    """
    transforms = plgpu.RefType(matrix_transforms(64, 2))
    plgpu.inline_mgpu(arg_types=(transforms, TILE))(_store_left_operand)(target, x)


def _store_left_operand(_, target, x):
    i32, byte = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
    thread = arith.remui(utils.thread_idx(), utils.c(_WARP_THREADS, i32))
    warp = arith.remui(utils.warp_idx(sync=False), utils.c(_WARPS, i32))
    # A thread gives the address of 16 bytes, 8 columns of a row: first of 16 rows, then of the same
    # rows in the next 8 columns.
    row = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.andi(thread, utils.c(15, i32)))
    columns = arith.shrui(thread, utils.c(4, i32))
    swizzled = arith.xori(columns, arith.andi(thread, utils.c(7, i32)))
    first = arith.addi(arith.muli(row, utils.c(128, i32)), arith.muli(swizzled, utils.c(16, i32)))
    one = ir.VectorType.get((1,), i32)
    # [groups of 16 columns, 4]: registers of two columns.
    for index, piece in enumerate(x.registers.reshape(-1, 4)):
        numbers = [
            vector.extract(vector.bitcast(one, x), dynamic_position=[], static_position=[0])
            for x in piece
        ]
        place = arith.xori(first, utils.c(32 * index, i32))
        address = utils.getelementptr(utils.memref_ptr(target), [place], byte)
        utils.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
            llvm.ptrtoint(i32, address), *numbers, has_side_effects=True,
        )  # fmt: skip


def store_transposed(target: Any, x: jax.Array, lane: int) -> None:
    """Stores the transpose of a tile, without bank conflicts.

    Args:
      target: shared memory ``[columns, lanes]``, swizzled in tiles of 32 lanes.
      x: ``[64, columns]`` of 16 or 32 bits, in the layout :data:`TILE`.
      lane: of the first row, a multiple of 32. Rows that are no lane of the target are not stored.
    """
    transforms = plgpu.RefType(matrix_transforms(32, jnp.dtype(x.dtype).itemsize))
    store = functools.partial(_store_transposed, lane)
    plgpu.inline_mgpu(arg_types=(transforms, TILE))(store)(target, x)


def _store_transposed(lane, _, target, x):
    i32, tiles = ir.IntegerType.get_signless(32), ir.MemRefType(target.type)
    # Of tiles of 8 rows and 32 lanes. A warp holds 16 rows of x, half of the lanes of a tile.
    row_stride, lane_stride, *_ = tiles.get_strides_and_offset()[0]
    thread = arith.remui(utils.thread_idx(), utils.c(_WARP_THREADS, i32))
    warp = arith.remui(utils.warp_idx(sync=False), utils.c(_WARPS, i32))
    tile = arith.addi(arith.shrui(warp, utils.c(1, i32)), utils.c(lane // 32, i32))
    start = arith.muli(tile, utils.c(lane_stride, i32))
    half = arith.andi(warp, utils.c(1, i32))
    # [groups of 8 columns, 2]: registers of two columns in two rows that are 8 apart.
    registers = x.registers.reshape(-1, 2)
    store = (
        _store_halves_transposed if utils.bitwidth(x.mlir_dtype) == 16 else _store_words_transposed
    )
    # Unsigned: no negative tile either.
    inside = arith.cmpi(arith.CmpIPredicate.ult, tile, utils.c(tiles.shape[1], i32))
    with utils.when(inside):
        store(utils.memref_ptr(target), start, row_stride, thread, half, registers)


def _store_words_transposed(base, start, row_stride, thread, half, registers):
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.addi(arith.muli(half, utils.c(16, i32)), arith.shrui(thread, utils.c(2, i32)))
    pair = arith.muli(arith.andi(thread, utils.c(3, i32)), utils.c(2, i32))
    for i, part in itertools.product(range(2), range(2)):
        row = arith.addi(pair, utils.c(i, i32))
        # Each row of a tile has its groups of 4 lanes in another order.
        place = arith.addi(lane, utils.c(8 * part, i32))
        place = arith.xori(place, arith.muli(row, utils.c(4, i32)))
        place = arith.addi(place, arith.muli(row, utils.c(32, i32)))
        place = arith.addi(place, start)
        for group, register in enumerate(registers[:, part]):
            number = vector.extract(register, dynamic_position=[], static_position=[i])
            at = arith.addi(place, utils.c(row_stride * group, i32))
            llvm.store(number, utils.getelementptr(base, [at], number.type))


def _store_halves_transposed(base, start, row_stride, thread, half, registers):
    i32 = ir.IntegerType.get_signless(32)
    one, dtype = ir.VectorType.get((1,), i32), ir.VectorType(registers[0, 0].type).element_type
    # A thread gives the address of 8 lanes of a row: of 8 rows, of the next 8 lanes, and of the
    # next 8 rows.
    row, matrix = arith.andi(thread, utils.c(7, i32)), arith.shrui(thread, utils.c(3, i32))
    lanes = arith.addi(arith.muli(half, utils.c(2, i32)), arith.andi(matrix, utils.c(1, i32)))
    # Every other row of a tile has its groups of 8 lanes in another order.
    lanes = arith.xori(lanes, arith.shrui(row, utils.c(1, i32)))
    place = arith.addi(arith.muli(row, utils.c(32, i32)), arith.muli(lanes, utils.c(8, i32)))
    group = arith.muli(arith.shrui(matrix, utils.c(1, i32)), utils.c(row_stride, i32))
    place = arith.addi(arith.addi(place, group), start)
    for index in range(0, len(registers), 2):
        numbers = [
            vector.extract(vector.bitcast(one, x), dynamic_position=[], static_position=[0])
            for x in registers[index : index + 2].flat
        ]
        at = arith.addi(place, utils.c(row_stride * index, i32))
        utils.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
            llvm.ptrtoint(i32, utils.getelementptr(base, [at], dtype)), *numbers,
            has_side_effects=True,
        )  # fmt: skip


def add_in_register_order(target: Any, staging: Any, x: jax.Array, tile: Any) -> None:
    """Starts the addition of 64 rows to global memory, in the order in which threads hold them.

    A thread holds four numbers in a row, of two lanes in each of two rows that are 8 apart. A
    128-bit store without bank conflicts takes them as they are, and what a warp stores is
    contiguous. Each warp starts its own copy when its previous one has read the memory, and waits
    for no other warp. :func:`from_register_order` undoes the order.

    Args:
      target: global memory of the size of ``x``.
      staging: the warpgroup's shared memory, of the same size: swizzled for rows of its lanes. Its
        shape does not matter. No copies but those of earlier calls may be reading it.
      x: float32 or int32 ``[64, lanes]``.
      tile: int32 scalar; nothing is added if it is negative.
    """
    transforms = plgpu.RefType(matrix_transforms(staging.shape[-1], 4))
    types = plgpu.RefType(), transforms, TILE, plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=types)(_add_in_register_order)(target, staging, x, tile)


def _add_in_register_order(_, target, staging, x, tile):
    i32, dtype = ir.IntegerType.get_signless(32), x.mlir_dtype
    # [groups of 8 lanes * 2, 2]: registers of two lanes in two rows that are 8 apart.
    pieces = x.registers.reshape(-1, 2)
    of_warp = 4 * _WARP_THREADS * len(pieces)
    warp = arith.remui(utils.warp_idx(sync=True), utils.c(_WARPS, i32))
    thread = arith.remui(utils.thread_idx(), utils.c(_WARP_THREADS, i32))
    first = arith.muli(warp, utils.c(of_warp, i32))
    source = utils.getelementptr(utils.memref_ptr(staging), [first], dtype)
    nvvm.cp_async_bulk_wait_group(0, read=True)
    utils.warp_barrier()
    of_thread = utils.getelementptr(source, [arith.muli(thread, utils.c(4, i32))], dtype)
    for index, piece in enumerate(pieces):
        numbers = [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for register in piece
            for i in range(2)
        ]
        place = utils.getelementptr(of_thread, [4 * _WARP_THREADS * index], dtype)
        four = vector.from_elements(ir.VectorType.get((4,), dtype), numbers)
        llvm.store(four, place, alignment=16)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
    utils.warp_barrier()
    one_thread = utils.single_thread_predicate(utils.ThreadSubset.WARP)
    exists = arith.cmpi(arith.CmpIPredicate.sge, tile.registers.item(), utils.c(0, i32))
    kind = "f32" if isinstance(dtype, ir.F32Type) else "s32"
    utils.inline_ptx(
        f"@$2 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} "
        f"[$0], [$1], {4 * of_warp};",
        utils.getelementptr(utils.memref_ptr(target), [first], dtype),
        source,
        arith.andi(one_thread, exists),
        has_side_effects=True,
    )
    nvvm.cp_async_bulk_commit_group()


def from_register_order(x: jax.Array, lanes: int) -> jax.Array:
    """``[..., 64, lanes]`` from ``[..., any, other]``, :func:`add_in_register_order`'s targets."""
    *lead, _, _ = x.shape
    # [warp, group of 8 lanes, row of 8, pair of lanes, half of 16 rows, lane of a pair]
    x = x.reshape(*lead, _WARPS, lanes // 8, 8, 4, 2, 2)
    order = *range(len(lead)), *(len(lead) + axis for axis in (0, 2, 1, 3, 4))
    # One half after the other: XLA's code for the transpose of both takes 12 times as long.
    halves = [x[..., half, :].transpose(order) for half in range(2)]
    return jnp.stack(halves, len(lead) + 1).reshape(*lead, 16 * _WARPS, lanes)
