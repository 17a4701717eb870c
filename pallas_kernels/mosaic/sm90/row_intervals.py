"""A mask by one interval of columns per row, which reads no token's position or segment id.

Every thread has elements of two rows of a tile, at columns ``8 g + 2 t + e``: g counts groups of 8
columns, t is the thread's place among the four that share a row, and e is 0 or 1. Its elements of a
row are at most 32, and the interval's are neighbors among them: two masks of bits make one word,
whose bits the assembler moves into predicates seven at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.document_bounds import (
    INTERVAL_NUMBERS,
    INTERVAL_SIZE,
    DocumentBounds,
    query_intervals,
)
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.sm90.backward_forms import WIDEST_NARROW_HEAD_DIM
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS, MosaicConfig
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE, element, like
from pallas_kernels.mosaic.sm90.static import needs_registers
from pallas_kernels.spec import AttentionSpec

# Queries of all heads, from which on intervals gain more than the launches that compute them.
LEAST_ROWS_WITH_INTERVALS = 2**18
# Keys per head, up to which they gain more than comparing each chunk of 64 with every part of the
# queries. By count, from one measured length: 16,384 keys with 32 heads, each compared.
_MOST_KEYS_PER_HEAD = 64 * 2048


class RowIntervals(NamedTuple):
    """The intervals of one warpgroup's rows of a tile of scores.

    Rows are queries and intervals of keys in the forward pass, the other way round in the backward.

    Attributes:
      table: reference to ``intervals`` of :class:`pallas_kernels.document_bounds.DocumentBounds`.
      batch: batch index.
      tile: tile index.
      part: the part of the tile, the warpgroup's rows.
      numbers: of the part, in registers; None: loaded where they are read.
    """

    table: Any
    batch: Any
    tile: Any
    part: Any
    numbers: tuple[Any, ...] | None = None

    def loaded(self) -> RowIntervals:
        """With numbers whose loads start here."""
        return self._replace(numbers=self._all_numbers())

    def mask(
        self, scores: jax.Array, first_column: Any, otherwise: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Scores, -inf outside of the rows' intervals.

        Args:
          scores: float32 ``[64, columns]``.
          first_column: index of the first column.
          otherwise: masks them where the rows have no intervals.
        """
        by_interval = functools.partial(self.mask_by_interval, first_column=first_column)
        return lax.cond(self.exist(), by_interval, otherwise, scores)

    def exist(self) -> Any:
        """Whether the rows have intervals."""
        return self._number(1) >= 0

    def begin_at(self, column: Any) -> Any:
        """Whether the rows have intervals, none of which has a column before this one."""
        start, end, first_start, _, *changes, split = self._all_numbers()
        first = jnp.maximum(start, first_start)
        second = jnp.maximum(start + changes[0], first_start + changes[2] + split)
        second = jnp.where(split < WARPGROUP_ROWS, second, first)
        return (end >= 0) & (jnp.minimum(first, second) >= column)

    def mask_by_interval(self, scores: jax.Array, first_column: Any) -> jax.Array:
        """:meth:`mask` for rows that have intervals."""
        start, end, first_start, first_end, *changes, split = self._all_numbers()
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)
        # 1 from the second document's first row on.
        second = jnp.clip(row - (split - 1), 0, 1)

        def columns(x: Any, change: Any) -> jax.Array:
            return second * change + (x - first_column)

        first = jnp.maximum(columns(start, changes[0]), columns(first_start, changes[2]) + row)
        last = jnp.minimum(columns(end, changes[1]), columns(first_end, changes[3]) + row)
        return between(scores, first, last)

    def _all_numbers(self) -> tuple[Any, ...]:
        return tuple(map(self._number, range(INTERVAL_NUMBERS)))

    def _number(self, index: int) -> Any:
        if self.numbers is not None:
            return self.numbers[index]
        batch = self.batch if self.table.shape[0] != 1 else i32(0)
        return self.table[(batch, self.tile, self.part * INTERVAL_SIZE + index)]


def tile_ranges(bounds: Any) -> Any:
    """The tile bounds alone."""
    return bounds.ranges if isinstance(bounds, DocumentBounds) else bounds


def with_intervals(
    bounds: Any, inputs: AttentionInputs, spec: AttentionSpec, config: MosaicConfig
) -> Any:
    """The forward's tile bounds, as :class:`DocumentBounds` where its kernel reads intervals."""
    consumers = config.block_q // WARPGROUP_ROWS
    if consumers != 2 or config.cluster != 1 or not _intervals_gain(inputs, spec, config):
        return bounds
    masked = spec.mask, inputs.query, inputs.kv
    return DocumentBounds(bounds, query_intervals(*masked, WARPGROUP_ROWS, consumers))


def with_key_intervals(
    bounds: Any, inputs: AttentionInputs, spec: AttentionSpec, config: MosaicConfig
) -> Any:
    """The backward's tile bounds, with intervals of queries where its kernel reads them.

    Not measured for head dims up to 96.
    """
    widest = max(inputs.head_dim, inputs.value_dim)
    if widest <= 96 or not _intervals_gain(inputs, spec, config):
        return bounds
    # Rows are keys there.
    rows: Any = inputs.kv
    columns: Any = inputs.query
    parts = WARPGROUP_ROWS, config.block_kv // WARPGROUP_ROWS
    return DocumentBounds(bounds, query_intervals(spec.mask.exchanged, rows, columns, *parts))


def _intervals_gain(inputs: AttentionInputs, spec: AttentionSpec, config: MosaicConfig) -> bool:
    """Whether a kernel that masks by intervals is faster.

    Segment ids and windows make intervals. Next to other masks or terms of the scores, and in wide
    heads, there may be no registers for them. They gain nothing at head dim 64, and with few rows,
    or many keys for few heads, less than it takes to compute them. Not measured without a producer
    warpgroup.
    """
    if not inputs.has_segments or inputs.has_kv_bounds or inputs.shared.block_mask is not None:
        return False
    if needs_registers(spec, inputs.has_bias) or not config.producer_warpgroup:
        return False
    batch, length, heads, _ = inputs.query.q.shape
    fits = max(inputs.head_dim, inputs.value_dim) <= WIDEST_NARROW_HEAD_DIM
    fits = fits and inputs.kv_length <= _MOST_KEYS_PER_HEAD * heads
    return fits and batch * length * heads >= LEAST_ROWS_WITH_INTERVALS


def between(scores: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """``scores``, -inf in the columns before ``start`` and from ``end`` on.

    Args:
      scores: float32 ``[64, columns]``, at most 128 columns.
      start: int32 ``[64]``.
      end: int32 ``[64]``.
    """
    run = plgpu.inline_mgpu(arg_types=(TILE, ROWS, ROWS), return_type=like(scores, TILE))
    return run(_between)(scores, start, end)


def _between(_, scores, start, end):
    i32_type, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    masked = arith.constant(f32, ir.FloatAttr.get(f32, -np.inf))

    def number(value: int) -> Any:
        return arith.constant(i32_type, value)

    thread: Any = llvm.inline_asm(i32_type, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=False)
    first = arith.shli(arith.andi(thread, number(3)), number(1))

    def before(column: Any) -> Any:
        """Ones for the thread's elements before a column."""
        offset = arith.subi(column, first)
        in_group = arith.minsi(arith.andi(offset, number(7)), number(2))
        groups = arith.shli(arith.shrsi(offset, number(3)), number(1))
        count = arith.maxsi(arith.addi(groups, in_group), number(0))
        return llvm.inline_asm(
            i32_type, [count], "bmsk.clamp.b32 $0, 0, $1;", "=r,r", has_side_effects=False
        )

    registers = scores.registers.copy().reshape(-1, 2)
    bounds = zip(start.registers.flat, end.registers.flat, strict=True)
    for row, (row_start, row_end) in enumerate(bounds):
        ones = number(-1)
        outside = arith.xori(before(element(row_start, 0)), ones)
        word = arith.andi(before(element(row_end, 0)), outside)
        for group, register in enumerate(registers[:, row]):
            for column in range(2):
                bit = number(1 << (2 * group + column) if 2 * group + column < 31 else -(2**31))
                kept = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(word, bit), number(0))
                value = arith.select(kept, element(register, column), masked)
                register = vector.insert(
                    value, register, dynamic_position=[], static_position=[column]
                )
            registers[group, row] = register
    registers = registers.reshape(scores.registers.shape)
    return FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=None)
