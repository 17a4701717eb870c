"""``(I + A)^-1`` of a chunk by one warpgroup, in float16 products of 16 x 16 blocks.

``|X_ri| <= beta_r``, so X and all block inverses on the way to it fit float16, which has 8 times
bfloat16's precision; powers of A would not stay bounded. Blocks are doubled,
``X <- X - [X A X]`` in the pairs of blocks of a level: each warp inverts its block of the diagonal
in registers, then blocks of 32 and of 64 go through shared memory. That takes 32 mma.sync of a
warp where full products would take 320, and no zero block is multiplied. Both kernel families use
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.linear.chunks import CHUNK
from pallas_kernels.mosaic.transfers import matrix_transforms

_BLOCK = 16
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def invert(a: Any, x: Any) -> None:
    """Writes ``(I + a)^-1`` to ``x``. Ends with a barrier of the warpgroup.

    Kernels call it as an attribute of this module, so that tests can replace it.

    Args:
      a: float16 ``[64, 64]`` in shared memory, swizzled by 128 bytes, strictly lower triangular.
        All threads must have written their part.
      x: the same shape and kind.
    """
    transforms = plgpu.RefType(matrix_transforms(CHUNK, 2))
    plgpu.inline_mgpu(arg_types=(transforms, transforms))(_invert)(a, x)


def _invert(_, a, x):
    lane, warp = lane_and_warp()
    a, x = Matrix(a, lane), Matrix(x, lane)
    own = arith.muli(warp, _i32(_BLOCK))
    left = _inverted_diagonal(a, lane, own)
    x.put(own, own, left)
    for block in range(1, CHUNK // _BLOCK):
        with mgpu.when(_below(warp, block)):
            x.put(own, _i32(_BLOCK * block), [_i32(0)] * 4)
    utils.warpgroup_barrier()
    # Blocks of 32: the second and the fourth warp have the rows of -X A X.
    odd = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(warp, _i32(2)), _i32(1))
    with mgpu.when(odd):
        before = arith.subi(own, _i32(_BLOCK))
        y = _packed(_product(left, a.right(own, before)))
        x.put(own, before, _packed(_product(y, x.right(before, before)), negative=True))
    utils.warpgroup_barrier()
    # The block of 64: the last two warps.
    at = [_i32(_BLOCK * i) for i in range(4)]
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, warp, _i32(2))):
        rows = [x.left(own, at[i]) for i in (2, 3)]
        y = [
            _packed(_product(rows[1], a.right(at[3], c), _product(rows[0], a.right(at[2], c))))
            for c in at[:2]
        ]
        second = _product(y[1], x.right(at[1], at[1]))
        first = _product(y[1], x.right(at[1], at[0]), _product(y[0], x.right(at[0], at[0])))
        x.put(own, at[0], _packed(first, negative=True))
        x.put(own, at[1], _packed(second, negative=True))
    utils.warpgroup_barrier()


def _inverted_diagonal(a: Matrix, lane: Any, own: Any) -> list[Any]:
    """The inverse of the warp's block of the diagonal, as a left operand."""
    equal, at_least = arith.CmpIPredicate.eq, arith.CmpIPredicate.uge
    # The highest bit in which row and column of an element differ names its level.
    apart = []
    for i in range(8):
        row = arith.addi(arith.divui(lane, _i32(4)), _i32(8 * (i % 4 // 2)))
        pair = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
        apart.append(arith.xori(row, arith.addi(pair, _i32(i % 2 + 8 * (i // 4)))))
    zero, one = _f32(0.0), _f32(1.0)
    right = a.right(own, own)
    inverse = []
    for distance, element in zip(apart, _unpacked(a.left(own, own)), strict=True):
        pairs = arith.cmpi(equal, distance, _i32(1))
        value = arith.select(pairs, arith.negf(element), zero)
        inverse.append(arith.select(arith.cmpi(equal, distance, _i32(0)), one, value))
    for size in (2, 4, 8):
        left = _packed(inverse)
        product = _product(_packed(_product(left, right)), [_transposed(x) for x in left])
        for i, distance in enumerate(apart):
            enough = arith.cmpi(at_least, distance, _i32(size))
            changes = arith.andi(enough, _below(distance, 2 * size))
            inverse[i] = arith.select(changes, arith.subf(inverse[i], product[i]), inverse[i])
    return _packed(inverse)


class Matrix:
    """A float16 ``[64, 64]`` in swizzled shared memory, read and written in blocks of 16 x 16."""

    def __init__(self, ref: Any, lane: Any):
        self._base = llvm.ptrtoint(_words(), utils.memref_ptr(ref))
        self._lane = lane

    def left(self, row: Any, column: Any) -> list[Any]:
        """A block as a left operand of mma."""
        return self._load(row, column, "")

    def right(self, row: Any, column: Any) -> list[Any]:
        """A block as two right operands of 8 columns."""
        return self._load(row, column, ".trans")

    def put(self, row: Any, column: Any, registers: Sequence[Any]) -> None:
        """Writes a left operand's four registers."""
        row = arith.addi(row, arith.divui(self._lane, _i32(4)))
        eighth = arith.divui(column, _i32(8))
        within = arith.muli(arith.remui(self._lane, _i32(4)), _i32(4))
        for i, register in enumerate(registers):
            at = self._address(arith.addi(row, _i32(8 * (i % 2))), arith.addi(eighth, _i32(i // 2)))
            assembly(
                ir.Type.parse("!llvm.void"), [arith.addi(at, within), register],
                "st.shared.b32 [$0], $1;", "r,r", effects=True,
            )  # fmt: skip

    def _load(self, row: Any, column: Any, kind: str) -> list[Any]:
        row = arith.addi(row, arith.remui(self._lane, _i32(16)))
        eighth = arith.divui(column, _i32(8))
        eighth = arith.addi(eighth, arith.divui(self._lane, _i32(16)))
        text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        at = self._address(row, eighth)
        got = assembly(struct_of(_words(), 4), [at], text, "=r,=r,=r,=r,r", effects=True)
        return parts_of(got, _words(), 4)

    def _address(self, row: Any, eighth: Any) -> Any:
        """Of 8 elements of a row."""
        swizzled = arith.xori(eighth, arith.remui(row, _i32(8)))
        offset = arith.addi(arith.muli(row, _i32(128)), arith.muli(swizzled, _i32(16)))
        return arith.addi(self._base, offset)


def _product(
    left: Sequence[Any], right: Sequence[Any], acc: Sequence[Any] | None = None
) -> list[Any]:
    """``acc + left right`` of 16 x 16 blocks: of both halves of the columns four float32."""
    f32, results = ir.F32Type.get(), []
    acc = [_f32(0.0)] * 8 if acc is None else acc
    for half in range(2):
        operands = [*left, *right[2 * half : 2 * half + 2], *acc[4 * half : 4 * half + 4]]
        got = assembly(struct_of(f32, 4), operands, _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
        results += parts_of(got, f32, 4)
    return results


def _packed(x: Sequence[Any], negative: bool = False) -> list[Any]:
    """A product, or minus it, as a left operand."""
    if negative:
        x = [arith.negf(element) for element in x]
    text = "cvt.rn.f16x2.f32 $0, $1, $2;"
    return [assembly(_words(), [x[i + 1], x[i]], text, "=r,f,f") for i in (0, 2, 4, 6)]


def _unpacked(registers: Sequence[Any]) -> list[Any]:
    f16, results = ir.F16Type.get(), []
    for register in registers:
        pair = utils.bitcast(register, ir.VectorType.get((2,), f16))
        for i in range(2):
            element = vector.extract(pair, dynamic_position=[], static_position=[i])
            results.append(arith.extf(ir.F32Type.get(), element))
    return results


def _transposed(register: Any) -> Any:
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return assembly(_words(), [register], text, "=r,r")


def lane_and_warp() -> tuple[Any, Any]:
    """Index of the thread in its warp, and of the warp in its warpgroup."""
    lane = arith.remui(utils.thread_idx(), _i32(32))
    return lane, arith.remui(utils.warp_idx(sync=False), _i32(4))


def _below(value: Any, limit: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, value, _i32(limit))


def _words() -> Any:
    return ir.IntegerType.get_signless(32)


def _i32(value: int) -> Any:
    return utils.c(value, _words())


def _f32(value: float) -> Any:
    return utils.c(value, ir.F32Type.get())


def struct_of(kind: Any, count: int) -> Any:
    """The type of several results of an instruction."""
    return llvm.StructType.get_literal([kind] * count)


def parts_of(value: Any, kind: Any, count: int) -> list[Any]:
    """An instruction's results."""
    return [llvm.extractvalue(kind, value, [i]) for i in range(count)]


def assembly(result: Any, operands: Any, text: str, constraints: str, effects=False) -> Any:
    """An instruction of the assembler."""
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=effects)
