"""Operations of the decode kernel, whose warps copy and process different keys of a tile.

All matrices of a warpgroup have 16 rows per warp and row tile, as with four warps along the rows.
But the warps are split into groups. Warps of one group have different queries; each group has the
same queries as the others, and its own part of the tile's keys::

    row_warps 1    groups of one warp: 16 queries, each warp a fourth of the keys
    row_warps 2    warps 0, 1 and 2, 3: 32 queries, each group half of the keys
    row_warps 4    one group: 64 queries, all keys

Kernels call these functions as attributes of this module, so that tests can replace them and run
the kernels' data flow on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.mosaic.fragments import i32, swizzle_lanes
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.configs import MMA_DEPTH, WARPS

_LANES = 32
# A copy also prefetches the rest of its 128-byte line into L2.
_PREFETCH = ".L2::128B"
# Bytes of one cp.async instruction of a thread, and elements of 16 bits in them.
_CHUNK, _CHUNK_ELEMENTS = 16, 8
_SCALAR = plgpu.Layout.WG_SPLAT(())


def copy_matrix(source: Any, target: Any, first: Any, count: Any = None) -> None:
    """Starts cp.async copies of neighboring rows; each warp copies a fourth of them.

    Args:
      source: 16-bit ``[length, lanes]`` in global memory, rows any distance apart.
      target: ``[rows, lanes]`` in swizzled shared memory (:func:`instructions.tiled_memory`).
      first: int32 scalar, the first row, a multiple of ``rows`` unless there is a ``count``.
      count: int32 scalar, number of rows from the first one on; others become 0. None: all that the
        source has.
    """
    rows, lanes = target.shape
    length = source.shape[0]
    width = swizzle_lanes(lanes, 2)
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * 2)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), _SCALAR))
    def copy(_, source, target, valid):
        stride = ir.MemRefType(source.type).get_strides_and_offset()[0][0] * 2
        warp, lane = _warp_and_lane()
        # An instruction copies a tile's lanes of some rows: 128 bytes of 4, 64 of 8 or 32 of 16.
        chunks = width // _CHUNK_ELEMENTS
        rows_at_once = _LANES // chunks
        own_rows = rows // WARPS
        first = arith.muli(warp, _i32(own_rows))
        row, chunk = arith.divui(lane, _i32(chunks)), arith.remui(lane, _i32(chunks))
        given = arith.addi(arith.muli(arith.addi(first, row), _i32(stride)), _bytes(chunk))
        source = _offset(instructions.global_pointer(source), given)
        # Tiles are 8 rows, whose chunks are permuted; the permutation repeats after 8 rows.
        row_of_tiles = 8 * lanes * 2
        octets = arith.muli(arith.divui(first, _i32(8)), _i32(row_of_tiles))
        target = _offset(utils.memref_ptr(target), octets)
        period = max(1, 8 // rows_at_once)
        targets = []
        # With less than 8 rows, a warp may start in the middle of a tile.
        row_of_tile = arith.addi(row, arith.remui(first, _i32(8))) if own_rows % 8 else row
        for step in range(period):
            index = arith.addi(row_of_tile, _i32(step * rows_at_once))
            octet, in_octet = arith.divui(index, _i32(8)), arith.remui(index, _i32(8))
            place = arith.addi(arith.muli(in_octet, _i32(chunks)), chunk)
            permuted = arith.andi(arith.divui(place, _i32(8)), _i32(chunks - 1))
            place = _bytes(arith.xori(place, permuted))
            place = arith.addi(place, arith.muli(octet, _i32(row_of_tiles)))
            targets.append(_offset(target, place))
        for repeat in range(own_rows // rows_at_once):
            index = arith.addi(arith.addi(first, row), _i32(repeat * rows_at_once))
            size = None if count is None and not length % rows else _size(index, valid, _CHUNK)
            octet = repeat // period * max(8, rows_at_once) // 8
            for tile in range(lanes // width):
                _copy_async(
                    _offset(
                        targets[repeat % period],
                        _i32(octet * row_of_tiles + tile * 8 * width * 2),
                    ),
                    _offset(source, _i32(repeat * rows_at_once * stride + tile * width * 2)),
                    _CHUNK,
                    size,
                )

    valid = i32(length) - first if count is None else count
    copy(source.at[pl.ds(first, min(rows, length))], target, valid)


def copy_numbers(sources: tuple[Any, Any], targets: tuple[Any, Any], first: Any) -> None:
    """Starts the copies of a part of two int32 vectors; each warp copies a fourth of both.

    Args:
      sources: ``[length]`` in global memory.
      targets: ``[count]`` in shared memory.
      first: int32 scalar, the first index. Elements that the sources do not have become 0.
    """
    (length,), part = sources[0].shape, pl.ds(first, targets[0].shape[0])
    count = targets[0].shape[0] // WARPS
    types = ((plgpu.RefType(),) * 2,) * 2

    @plgpu.inline_mgpu(arg_types=(*types, _SCALAR))
    def copy(_, sources, targets, valid):
        source, target = (
            [instructions.global_pointer(x) for x in sources],
            [utils.memref_ptr(x) for x in targets],
        )
        warp, lane = _warp_and_lane()
        for repeat in range(2 * count // _LANES):
            index = arith.addi(lane, _i32(repeat * _LANES))
            second = arith.cmpi(arith.CmpIPredicate.uge, index, _i32(count))
            key = arith.addi(arith.muli(warp, _i32(count)), arith.remui(index, _i32(count)))
            place = arith.muli(key, _i32(4))
            to, given = (_offset(arith.select(second, x[1], x[0]), place) for x in (target, source))
            _copy_async(to, given, 4, _size(key, valid, 4))

    copy(tuple(source.at[part] for source in sources), targets, i32(length) - first)


def commit_copies() -> None:
    """Makes a group of the copies that each thread has started since the last group."""

    @plgpu.inline_mgpu()
    def commit(_):
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    commit()


def wait_for_copies(pending: int, row_warps: int) -> None:
    """Waits until each thread has at most ``pending`` groups of copies in flight.

    Then waits for the threads that share keys, so that they see each other's copies, and have read
    what is overwritten next.
    """

    @plgpu.inline_mgpu()
    def wait(_):
        utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)
        if row_warps == 1:
            utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)
        else:
            utils.warpgroup_barrier()

    wait()


def product(acc: jax.Array, left: jax.Array, right: Any, row_warps: int) -> jax.Array:
    """``acc + left right``, each group of warps with its own keys of ``right``.

    Args:
      acc: float32 ``[M, N]``.
      left: left operand ``[M, keys of a group]``.
      right: ``[keys, N]`` in shared memory.
      row_warps: warps per group.
    """
    fragments = instructions.Fragments.of(left.dtype, WARPS)
    right = _own_keys(right, row_warps)
    for first in range(0, right.shape[0], MMA_DEPTH):
        part = instructions.load_matrix(right.at[pl.ds(first, MMA_DEPTH)], fragments.rhs)
        acc = plgpu.mma(acc, left[:, first : first + MMA_DEPTH], part)
    return acc


def transposed_product(acc: jax.Array, left: jax.Array, right: Any, row_warps: int) -> jax.Array:
    """``acc + left right^T``: a group's result ``[M, keys of a group]``; see :func:`product`."""
    fragments = instructions.Fragments.of(left.dtype, WARPS)
    right = _own_keys(right, row_warps).transpose((1, 0))
    return plgpu.mma(acc, left, instructions.load_matrix(right, fragments.rhs))


def of_own_keys(
    ref: Any, fragments: instructions.Fragments, rows: int, row_warps: int
) -> jax.Array:
    """A group's part of a vector over keys, along the columns of ``[rows, keys of a group]``."""
    x = instructions.load_vector(_own_keys(ref, row_warps), fragments.columns)
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,)), fragments.tile)


def _own_keys(ref: Any, row_warps: int) -> Any:
    """The part of a reference to keys that belongs to the warp's group."""
    if row_warps == WARPS:
        return ref
    keys = ref.shape[0] * row_warps // WARPS

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), _SCALAR))
    def warp_index(_):
        return FragmentedArray.splat(_warp_and_lane()[0], (), is_signed=True)

    group = lax.div(warp_index(), i32(row_warps))
    return ref.at[pl.ds(group * keys, keys)]


def pieces(value_dim: int, row_warps: int) -> int:
    """Number of parts of the lanes that :func:`merge_groups` splits the sums into."""
    return math.gcd(value_dim // 8, WARPS // row_warps)


def merge_groups(
    m: jax.Array, total: jax.Array, acc: jax.Array, memory: Any, row_warps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the softmax of the groups, which have the same queries and different keys.

    Args:
      m: float32 ``[M]``, what weights are relative to, in base 2.
      total: float32 ``[M]``, sums of weights.
      acc: float32 ``[M, N]``, sums of weights times values.
      memory: shared memory, no longer needed, of 2 KiB per row tile and 256 N bytes.
      row_warps: warps per group.

    Returns:
      ``(m, total, part)``: m and total of all keys, equal in all groups, and the sums of a part of
      the lanes, ``[M, N / pieces]``: group g has part ``g % pieces``.
    """
    groups = WARPS // row_warps
    fragments = instructions.Fragments.of(jnp.bfloat16, WARPS)
    parts = pieces(acc.shape[1], row_warps)
    f32 = jnp.dtype(jnp.float32)
    vectors = plgpu.ShapeDtypeStruct(m.shape, f32, fragments.rows)
    part = plgpu.ShapeDtypeStruct((acc.shape[0], acc.shape[1] // parts), f32, fragments.tile)
    width = swizzle_lanes(memory.shape[-1], 2)
    tiled = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * 2)

    @plgpu.inline_mgpu(
        arg_types=(fragments.rows, fragments.rows, fragments.tile, plgpu.RefType(tiled)),
        return_type=(vectors, vectors, part),
    )
    def merge(_, m, total, acc, memory):
        exchange = _Exchange(utils.memref_ptr(memory), groups, row_warps)
        m, total, factors = exchange.merge_stats(m, total)
        return m, total, exchange.merge_sums(acc, factors, parts)

    return merge(m, total, acc, memory)


class _Exchange:
    """Exchanges registers between the groups of warps through shared memory.

    A thread has the same rows and columns as the threads of its lane in the other groups' warps.
    """

    def __init__(self, memory: Any, groups: int, row_warps: int) -> None:
        self._memory, self._groups, self._row_warps = memory, groups, row_warps
        self._warp, self._lane = _warp_and_lane()
        self._group = arith.divui(self._warp, _i32(row_warps))
        self._stats_bytes = 0

    def _partners(self) -> list[Any]:
        """The warps with the same queries, one of each group."""
        first = arith.remui(self._warp, _i32(self._row_warps))
        return [arith.addi(first, _i32(g * self._row_warps)) for g in range(self._groups)]

    def merge_stats(self, m: Any, total: Any) -> tuple[Any, Any, list[Any]]:
        """Merged m and total, and by row the factor of the warp's own sums."""
        own = [_first_element(r) for x in (m, total) for r in x.registers.flat]
        self._stats_bytes = WARPS * len(own) * _LANES * 4
        count = len(own) // 2

        def place(warp, index):
            line = arith.addi(arith.muli(warp, _i32(len(own))), _i32(index))
            word = arith.addi(arith.muli(line, _i32(_LANES)), self._lane)
            return _offset(self._memory, arith.muli(word, _i32(4)))

        # All warps have read what the memory held before.
        utils.warpgroup_barrier()
        for index, value in enumerate(own):
            llvm.store(value, place(self._warp, index))
        utils.warpgroup_barrier()
        f32 = ir.F32Type.get()
        all_m, all_totals = (
            [[llvm.load(f32, place(warp, offset + i)) for i in range(count)] for warp in partners]
            for offset, partners in ((0, self._partners()), (count, self._partners()))
        )
        merged, totals, factors = [], [], []
        for i in range(count):
            highest = all_m[0][i]
            for other in all_m[1:]:
                highest = arith.maximumf(highest, other[i])
            sums = None
            for of_group, part in zip(all_m, all_totals, strict=True):
                term = arith.mulf(part[i], _exp2(arith.subf(of_group[i], highest)))
                sums = term if sums is None else arith.addf(sums, term)
            merged.append(highest)
            totals.append(sums)
            factors.append(_exp2(arith.subf(own[i], highest)))
        return _with_registers(m, merged), _with_registers(total, totals), factors

    def merge_sums(self, acc: Any, factors: list[Any], parts: int) -> Any:
        """The sums of the group's part of the lanes."""
        # [row tile, 8 columns, row half]: a thread has two rows of every 16.
        row_tiles = len(factors) // 2
        by_row = acc.registers.reshape(row_tiles, parts, -1, 2)
        results = np.empty(by_row.shape[:1] + by_row.shape[2:], dtype=object)
        own_part = arith.remui(self._group, _i32(parts))
        compact = parts == self._groups
        slots = parts - 1 if compact else parts

        def place(warp, slot, index):
            line = arith.addi(arith.muli(warp, _i32(slots)), slot)
            line = arith.addi(arith.muli(line, _i32(results[0].size)), _i32(index))
            word = arith.addi(arith.muli(line, _i32(_LANES)), self._lane)
            place = arith.addi(arith.muli(word, _i32(8)), _i32(self._stats_bytes))
            return _offset(self._memory, place)

        def slot_of(part, group):
            """A group's slot for a part. With a part per group, its own part needs no slot."""
            if not compact:
                return part
            after = arith.cmpi(arith.CmpIPredicate.ugt, part, group)
            return arith.select(after, arith.subi(part, _i32(1)), part)

        for row_tile in range(row_tiles):
            scaled = np.empty(by_row.shape[1:], dtype=object)
            for (part, column, half), register in np.ndenumerate(by_row[row_tile]):
                factor = vector.broadcast(register.type, factors[2 * row_tile + half])
                scaled[part, column, half] = arith.mulf(register, factor)
            if row_tile:
                utils.warpgroup_barrier()
            for part in range(parts):
                foreign = arith.cmpi(arith.CmpIPredicate.ne, own_part, _i32(part))
                with utils.when(foreign if compact else _true()):
                    slot = slot_of(_i32(part), self._group)
                    for index, value in enumerate(scaled[part].flat):
                        llvm.store(value, place(self._warp, slot, index))
            utils.warpgroup_barrier()
            sums = scaled[0]
            for part in range(1, parts):
                here = arith.cmpi(arith.CmpIPredicate.eq, own_part, _i32(part))
                chosen = np.empty(sums.shape, dtype=object)
                for index in np.ndindex(sums.shape):
                    chosen[index] = arith.select(here, scaled[part][index], sums[index])
                sums = chosen
            for group, warp in enumerate(self._partners()):
                other = arith.cmpi(arith.CmpIPredicate.ne, self._group, _i32(group))
                slot = slot_of(own_part, _i32(group))
                for index, value in enumerate(sums.flat):
                    # The own group's sums are in registers, and its slot holds another part.
                    given = llvm.load(value.type, place(warp, slot, index))
                    zero = arith.constant(value.type, _zeros(value.type))
                    given = arith.select(other, given, zero)
                    sums.flat[index] = arith.addf(value, given)
            results[row_tile] = sums
        shape = acc.shape[0], acc.shape[1] // parts
        registers = results.reshape(acc.layout.registers_shape(shape))
        return FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _bytes(chunk: Any) -> Any:
    return arith.muli(chunk, _i32(_CHUNK))


def _true() -> Any:
    return utils.c(1, ir.IntegerType.get_signless(1))


def _zeros(kind: Any) -> Any:
    return ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(ir.F32Type.get(), 0.0))


def _exp2(x: Any) -> Any:
    return mlir_math.exp2(x, fastmath=arith.FastMathFlags.afn)


def _first_element(register: Any) -> Any:
    """The value of a register of a vector along rows."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _with_registers(like: Any, values: list[Any]) -> Any:
    """A vector along rows with these values, in the layout of ``like``."""
    registers = np.empty(like.registers.shape, dtype=object)
    for index, old in enumerate(like.registers.flat):
        vectors = isinstance(old.type, ir.VectorType)
        registers.flat[index] = (
            vector.broadcast(old.type, values[index]) if vectors else values[index]
        )
    return FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _warp_and_lane() -> tuple[Any, Any]:
    """The thread's warp within the warpgroup, and its lane."""
    thread = utils.thread_idx()
    warp = arith.remui(utils.warp_idx(), _i32(WARPS))
    return warp, arith.remui(thread, _i32(_LANES))


def _offset(pointer: Any, offset: Any) -> Any:
    """A pointer plus a number of bytes."""
    return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _size(index: Any, valid: Any, size: int) -> Any:
    """Bytes to copy of an element: all or none."""
    exists = arith.cmpi(arith.CmpIPredicate.slt, index, valid.registers.item())
    return arith.select(exists, _i32(size), _i32(0))


def _copy_async(target: Any, source: Any, size: int, valid_size: Any | None) -> None:
    """One cp.async instruction; bytes after ``valid_size`` become 0."""
    level = "cg" if size == _CHUNK else "ca"
    ptx = f"cp.async.{level}.shared.global{_PREFETCH} [$0], [$1], {size}"
    arguments, constraints = [target, source], "r,l"
    i32 = ir.IntegerType.get_signless(32)
    arguments[0] = llvm.ptrtoint(i32, target)
    if valid_size is not None:
        ptx, constraints = f"{ptx}, $2", "r,l,r"
        arguments.append(valid_size)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), arguments, f"{ptx};", constraints, has_side_effects=True
    )
