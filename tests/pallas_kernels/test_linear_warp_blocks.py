"""Products of a warp's tokens, thread by thread, against NumPy's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import interpreted_linear
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import warpgroup_threads

from pallas_kernels.linear import inverse
from pallas_kernels.linear.sm90 import warp_blocks

BF16 = ml_dtypes.bfloat16


class Value:
    """A register of all threads, ``[128]`` or ``[128, 2]``; arrays keep it as one element."""

    def __init__(self, x):
        self.x, self.type = np.asarray(x), np.asarray(x).dtype


def raw(value):
    return value.x if isinstance(value, Value) else value


def select(condition, x, y):
    condition, x, y = map(raw, (condition, x, y))
    return Value(np.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y))


def of_tile(x):
    """The fragment of ``[64, columns]``: registers [groups of 8 columns, rows that are 8 apart]."""
    thread = np.arange(128)
    row, column = 16 * (thread // 32) + thread % 32 // 4, thread % 4 * 2
    registers = np.empty((x.shape[1] // 8, 2), object)
    for (group, half), _ in np.ndenumerate(registers):
        pair = [x[row + 8 * half, 8 * group + column + i] for i in range(2)]
        registers[group, half] = Value(np.stack(pair, 1))
    return SimpleNamespace(registers=registers)


def to_tile(fragment):
    """Undoes :func:`of_tile`."""
    registers = fragment.registers.reshape(-1, 2)
    thread = np.arange(128)
    row, column = 16 * (thread // 32) + thread % 32 // 4, thread % 4 * 2
    result = np.zeros((64, 8 * len(registers)), registers[0, 0].x.dtype)
    for (group, half), register in np.ndenumerate(registers):
        for i in range(2):
            result[row + 8 * half, 8 * group + column + i] = register.x[:, i]
    return result


@pytest.fixture
def memory():
    """Shared memory, and the modules that generate code replaced."""
    threads = warpgroup_threads.Warpgroup(np.zeros(2 * 8192, np.uint8))
    modules: dict[str, Any] = threads.modules()
    given = modules["arith"]
    names = "cmpi", "addi", "muli", "xori", "andi", "divui"
    arith = SimpleNamespace(
        CmpIPredicate=given.CmpIPredicate, select=select, shrui=np.right_shift,
        **{name: getattr(given, name) for name in names},
    )  # fmt: skip
    vector = SimpleNamespace(
        from_elements=lambda kind, each: Value(np.stack([raw(x) for x in each], 1)),
        broadcast=lambda kind, x: Value(np.stack([raw(x)] * 2, 1)),
        bitcast=lambda kind, x: Value(np.ascontiguousarray(x.x).view(np.uint32)),
    )
    ir = SimpleNamespace(
        F32Type=modules["ir"].F32Type, IntegerType=modules["ir"].IntegerType,
        BF16Type=SimpleNamespace(get=lambda: BF16),
        VectorType=mock.Mock(
            side_effect=lambda kind: SimpleNamespace(element_type=kind), get=lambda *x: x[1]
        ),
    )  # fmt: skip
    utils = SimpleNamespace(
        c=lambda value, kind: np.full(128, value, kind), warp_barrier=lambda: None,
        bitcast=lambda x, kind: Value(np.ascontiguousarray(raw(x)).view(kind).reshape(128, 2)),
    )  # fmt: skip
    replaced = {
        "arith": arith, "vector": vector, "ir": ir, "utils": utils,
        "element": lambda register, i: Value(register.x[:, i]),
        "assembly": lambda result, operands, *rest: inverse.assembly(
            result, [raw(x) for x in operands], *rest
        ),
        "FragmentedArray": lambda _registers, _layout, _is_signed: SimpleNamespace(
            registers=_registers
        ),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(inverse, **modules))
        stack.enter_context(mock.patch.multiple(warp_blocks, **replaced))
        yield threads.memory


def drawn(*shape, dtype=BF16):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_products(memory):
    x, y, acc = drawn(64, 64), drawn(2, 64, 64)[1], drawn(64, 16, dtype=np.float32)
    got = to_tile(warp_blocks._products(None, *map(of_tile, (x, y, acc))))
    want = interpreted_linear.products(*map(jnp.asarray, (x, y, acc)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", BF16)])
def test_sums(memory, kind, dtype):
    values, weights = drawn(2, 64, 64, dtype=dtype), drawn(2, 64, 16, dtype=dtype)
    memory[:] = np.concatenate([warpgroup_threads.swizzled(x) for x in values])
    places = np.zeros(128, np.int64), np.full(128, 8192, np.int64)
    terms = [x for pair in zip(map(of_tile, weights), places, strict=True) for x in pair]
    got = to_tile(warp_blocks._sums(kind, None, *terms))
    arrays = zip(map(jnp.asarray, weights), map(jnp.asarray, values), strict=True)
    np.testing.assert_allclose(got, interpreted_linear.sums(*arrays), rtol=1e-5, atol=1e-4)


def test_blocks_of_warps(memory):
    x, other, small = drawn(64, 64), drawn(2, 64, 64)[1], drawn(64, 16, dtype=np.float16)
    memory[:8192] = warpgroup_threads.swizzled(x)
    full = {(0, 1), (3, 2), (2, 0)}
    one, two = jnp.asarray(x), jnp.asarray(other)
    wide, bits = small.astype(np.float32), sum(1 << (4 * row + column) for row, column in full)
    for got, want in (
        (warp_blocks._own(None, np.zeros(128, np.int64)), interpreted_linear.own(one)),
        (warp_blocks._spread(None, of_tile(wide)), interpreted_linear.spread(jnp.asarray(wide))),
        (warp_blocks._with_blocks(bits, 0.5, None, of_tile(small)),
         interpreted_linear.with_blocks(jnp.asarray(small), full, 0.5)),
        (warp_blocks._pairs_of_level(2, None, of_tile(x), of_tile(other)),
         interpreted_linear.pairs(one, 32, two)),
        (warp_blocks._pairs_of_level(1, None, of_tile(x)), interpreted_linear.pairs(one, 16)),
        (warp_blocks._later_rows(2, False, None, of_tile(x)),
         interpreted_linear.later_rows(one, 32)),
        (warp_blocks._later_rows(1, True, None, of_tile(x)),
         interpreted_linear.later_rows(one, 16, earlier=True)),
    ):  # fmt: skip
        np.testing.assert_array_equal(to_tile(got), np.asarray(want))
