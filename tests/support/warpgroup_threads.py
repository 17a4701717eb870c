"""Instructions of a warpgroup's 128 threads in NumPy, in place of MLIR: a value is an array of 128.

Enough for code that is written register by register: ldmatrix, stores, shuffles, mma.sync of
float16 and bfloat16, movmatrix and conversions. Threads run one instruction after the other, all at
once, so this does not show missing barriers; memory that was not written holds what the caller put
there.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np

_THREADS = np.arange(128)
_LANE, _WARP = _THREADS % 32, _THREADS // 32
_COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "ult": np.less, "uge": np.greater_equal}


def _halves(x, dtype=np.float16):
    return np.ascontiguousarray(x, np.uint32).view(dtype).reshape(128, 2)


class Warpgroup:
    """Memory, which threads are active, and the modules that generated code calls."""

    def __init__(self, memory):
        self.memory = memory
        self._active = [np.ones(128, bool)]

    def modules(self):
        """Names of a module that generates MLIR, and what replaces them."""
        same = lambda kind: kind  # noqa: E731
        arith = SimpleNamespace(
            CmpIPredicate=SimpleNamespace(eq="eq", ne="ne", ult="ult", uge="uge"),
            cmpi=lambda kind, x, y: _COMPARISONS[kind](x, y),
            addi=np.add, subi=np.subtract, muli=np.multiply, xori=np.bitwise_xor,
            remui=np.remainder, divui=np.floor_divide, andi=np.bitwise_and, select=np.where,
            negf=np.negative, subf=np.subtract, extf=lambda kind, x: x.astype(np.float32),
        )  # fmt: skip
        ir = SimpleNamespace(
            F32Type=SimpleNamespace(get=lambda: np.float32),
            F16Type=SimpleNamespace(get=lambda: np.float16),
            VectorType=SimpleNamespace(get=lambda *x: x),
            IntegerType=SimpleNamespace(get_signless=lambda bits: np.int64),
            Type=SimpleNamespace(parse=same),
            MemRefType=same,
        )
        utils = SimpleNamespace(
            c=lambda value, kind: np.full(128, value, kind),
            bitcast=lambda x, kind: x if kind is np.int64 else _halves(x),
            getelementptr=lambda base, index, size: base + size * index[0],
            shfl_bfly=lambda x, distance: x[_THREADS ^ distance],
            warpgroup_barrier=lambda: None,
            memref_ptr=same,
            thread_idx=lambda: _THREADS,
            warp_idx=lambda sync: _WARP,
        )
        llvm = SimpleNamespace(
            ptrtoint=lambda kind, x: x,
            inline_asm=self._instruction,
            StructType=SimpleNamespace(get_literal=same),
            extractvalue=lambda kind, x, index: x[index[0]],
        )
        vector = SimpleNamespace(
            extract=lambda x, dynamic_position, static_position: x[:, static_position[0]]
        )
        mgpu = SimpleNamespace(when=self._when)
        names = {"arith": arith, "ir": ir, "utils": utils, "llvm": llvm}
        return names | {"vector": vector, "mgpu": mgpu}

    @contextlib.contextmanager
    def _when(self, condition):
        self._active.append(self._active[-1] & condition)
        yield
        self._active.pop()

    def _instruction(self, result, operands, text, constraints, has_side_effects):
        del result, constraints, has_side_effects
        name = text.split(".")[0]
        return getattr(self, f"_{name}")(text, *operands)

    def _ldmatrix(self, text, address):
        registers = np.zeros((4, 128), np.uint32)
        for warp in np.flatnonzero(self._active[-1][::32]):
            for matrix in range(4):
                first = 32 * warp + 8 * matrix
                rows = [self.memory[x : x + 16].view(np.uint16) for x in address[first:][:8]]
                rows = np.stack(rows).T if ".trans" in text else np.stack(rows)
                words = np.ascontiguousarray(rows).view(np.uint32)
                registers[matrix, 32 * warp :][:32] = words.reshape(32)
        return registers

    def _st(self, text, address, *values):
        wide = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        assert text == ("st.shared.b32 [$0], $1;" if len(values) == 1 else wide)
        for thread in np.flatnonzero(self._active[-1]):
            words = np.array([value[thread] for value in values], np.uint32)
            self.memory[address[thread] :][: 4 * len(values)] = words.view(np.uint8)

    def _cvt(self, text, high, low):
        assert text == "cvt.rn.f16x2.f32 $0, $1, $2;"
        return np.stack([low, high], 1).astype(np.float16).view(np.uint32).reshape(128)

    def _movmatrix(self, text, x):
        assert text == "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        matrices = np.ascontiguousarray(x, np.uint32).view(np.uint16).reshape(4, 8, 8)
        turned = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        return turned.view(np.uint32).reshape(128)

    def _mma(self, text, *operands):
        prefix = "mma.sync.aligned.m16n8k16.row.col.f32."
        kind = text.removeprefix(prefix).split(" ")[0].removesuffix(".f32")
        dtype = {"f16.f16": np.float16, "bf16.bf16": ml_dtypes.bfloat16}[kind]
        a, b, c = operands[:4], operands[4:6], operands[6:]
        result = np.zeros((4, 128), np.float32)
        row, column = np.arange(32) // 4, np.arange(32) % 4 * 2
        for warp in range(4):
            own = slice(32 * warp, 32 * warp + 32)
            left, right, acc = (np.zeros(shape) for shape in ((16, 16), (16, 8), (16, 8)))
            for e in range(2):
                for i in range(4):
                    at = row + 8 * (i % 2), column + e + 8 * (i // 2)
                    left[at] = _halves(a[i], dtype)[own, e]
                for i in range(2):
                    right[column + e + 8 * i, row] = _halves(b[i], dtype)[own, e]
                    acc[row + 8 * i, column + e] = c[2 * i + e][own]
            product = left @ right + acc
            for e in range(2):
                for i in range(2):
                    result[2 * i + e, own] = product[row + 8 * i, column + e]
        return result


def swizzled(x):
    """Bytes of a 16-bit ``[64, 64]``, swizzled by 128 bytes."""
    eighths = x.reshape(64, 8, 8)
    order = np.arange(8)[None] ^ np.arange(64)[:, None] % 8
    return np.take_along_axis(eighths, order[..., None], 1).copy().view(np.uint8).reshape(-1)


def unswizzled(memory, dtype):
    """Undoes :func:`swizzled`."""
    return swizzled(memory.view(dtype).reshape(64, 64)).view(dtype).reshape(64, 64)
