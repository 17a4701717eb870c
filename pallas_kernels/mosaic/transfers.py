"""Threads' parts of transfers between matrices in global and in swizzled shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import (
    FragmentedArray,
    tiled_copy_smem_gmem_layout,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.fragments import swizzle_lanes


def matrix_transforms(lanes: int, itemsize: int) -> tuple[Any, Any]:
    """Swizzled tiles of shared memory, as wgmma, TMA and ldmatrix read them."""
    step = swizzle_lanes(lanes, itemsize)
    return plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(step * itemsize)


def global_pointer(ref: Any) -> Any:
    """A pointer to an array in global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def matrix_transfers(far: Any, near: Any) -> Iterator[tuple[Any, Any, Any, int]]:
    """What a thread of a warpgroup transfers of a 16-bit matrix, each by one instruction.

    Args:
      far: in global memory.
      near: in swizzled shared memory.

    Yields:
      Pointers to shared and to global memory, the row, and the number of bytes.
    """
    shape, i32 = ir.MemRefType(far.type), ir.IntegerType.get_signless(32)
    tile_rows, tile_columns, _, width = ir.MemRefType(near.type).shape
    row_stride, column_stride = shape.get_strides_and_offset()[0]
    layout = tiled_copy_smem_gmem_layout(tile_rows, tile_columns, 2 * width, 16)
    places = layout.lane_indices(), layout.warp_indices()

    def of_thread(strides: tuple[int, int]) -> Any:
        steps = [utils.c(x, i32) for x in layout.tiling.tile_strides(strides)[2:]]
        return arith.addi(*(utils.dyn_dot(place, steps) for place in places))

    first_row = of_thread((1, 0))
    base = utils.getelementptr(
        global_pointer(far), [of_thread((row_stride, column_stride))], shape.element_type
    )
    transfers = FragmentedArray.transfer_tiled(
        near, 2 * width, layout, tuple(shape.shape), optimized=False
    )
    for _, _, index_of, pointer in transfers:
        row, column = index_of()
        distance = row * row_stride + column * column_stride
        address = utils.getelementptr(base, [distance], shape.element_type)
        yield pointer, address, arith.addi(first_row, utils.c(row, i32)), 2 * layout.vector_length


def store_matrix(source: Any, target: Any) -> None:
    """Writes a matrix to global memory; see :func:`store_rows`."""
    types = plgpu.RefType(matrix_transforms(source.shape[1], 2)), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=types)
    def store(_, source, target):
        for near, far, _, size in matrix_transfers(target, source):
            llvm.store(_words_at(near, size), far, alignment=size)

    store(source, target)


def _words_at(pointer: Any, size: int) -> Any:
    kind = ir.VectorType.get((size // 4,), ir.IntegerType.get_signless(32))
    return llvm.load(kind, pointer, alignment=size)


def store_rows(source: Any, target: Any, begin: Any, end: Any) -> None:
    """Writes some rows of a matrix to global memory.

    Kernels call it as an attribute of this module, so that tests can replace it.

    Args:
      source: 16-bit ``[rows, lanes]`` in swizzled shared memory. All threads of the warpgroup must
        have written their part.
      target: the same shape in global memory. Other rows need not exist.
      begin: int32 scalar, first row to write.
      end: int32 scalar, row after the last one.
    """
    types = (
        plgpu.RefType(matrix_transforms(source.shape[1], 2)),
        plgpu.RefType(),
        plgpu.Layout.WG_SPLAT(()),
        plgpu.Layout.WG_SPLAT(()),
    )

    @plgpu.inline_mgpu(arg_types=types)
    def store(_, source, target, begin, end):
        compare = arith.CmpIPredicate
        for near, far, row, size in matrix_transfers(target, source):
            after = arith.cmpi(compare.sge, row, begin.registers.item())
            before = arith.cmpi(compare.slt, row, end.registers.item())
            value = _words_at(near, size)
            with mgpu.when(arith.andi(after, before)):
                llvm.store(value, far, alignment=size)

    store(source, target, begin, end)
