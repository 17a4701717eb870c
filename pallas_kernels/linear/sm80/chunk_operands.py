"""Chunks in shared memory and in a warpgroup's registers, and products with them.

All four warps are along the rows of every product: a warp owns 16 rows of 64. A result, rounded, is
then the left operand of the next product without a move of registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, LOG, START, decay_of
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.configs import MMA_DEPTH, WARPS

FRAGMENTS = instructions.Fragments.of(jnp.bfloat16, WARPS)
_SQUARE = CHUNK, CHUNK


def matrix(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Description of swizzled shared memory."""
    return instructions.tiled_memory(shape, dtype)


def numbers(*shape: int) -> Any:
    """Description of float32 shared memory."""
    return plgpu.SMEM(shape, jnp.float32)


def tokens_of(chunk: Any) -> Any:
    """The tokens of a chunk."""
    return pl.ds(chunk * CHUNK, CHUNK)


def transposed(ref: Any) -> Any:
    """The transpose of a matrix in memory."""
    return ref.transpose((1, 0))


def zeros(columns: int = CHUNK) -> jax.Array:
    """An accumulator of 64 rows."""
    return FRAGMENTS.zeros((CHUNK, columns))


def left_operand(x: jax.Array) -> jax.Array:
    """A result, rounded, as a left operand."""
    return instructions.as_left_operand(x.astype(jnp.bfloat16), FRAGMENTS)


def loaded_left(ref: Any) -> jax.Array:
    """A left operand in shared memory."""
    return instructions.load_matrix(ref, FRAGMENTS.lhs)


def loaded_right(ref: Any) -> jax.Array:
    """A right operand in shared memory."""
    return instructions.load_matrix(ref, FRAGMENTS.rhs)


def widened(left: jax.Array) -> jax.Array:
    """A left operand as a float32 result."""
    return instructions.as_result(left, FRAGMENTS).astype(jnp.float32)


def product(acc: jax.Array, left: jax.Array, right: Any) -> jax.Array:
    """``acc + left right``; ``right`` is in shared memory."""
    return plgpu.mma(acc, left, loaded_right(right))


def lower_product(acc: jax.Array, left: jax.Array, lower: Any) -> jax.Array:
    """``acc + left L``, L lower triangular ``[64, 64]`` in shared memory: 20 of 32 mma a warp."""
    right = loaded_right(lower)
    for first in range(0, CHUNK, MMA_DEPTH):
        after = first + MMA_DEPTH
        part = right[first:after, :after]
        acc = instructions.product_in_columns(acc, left[:, first:after], part, 0, FRAGMENTS)
    return acc


def lower_transposed_product(acc: jax.Array, left: jax.Array, lower: Any) -> jax.Array:
    """``acc + left L^T``; see :func:`lower_product`."""
    right = loaded_right(transposed(lower))
    for first in range(0, CHUNK, MMA_DEPTH):
        after = first + MMA_DEPTH
        part = right[first:after, first:]
        acc = instructions.product_in_columns(acc, left[:, first:after], part, first, FRAGMENTS)
    return acc


def along_rows(x: jax.Array, columns: int = CHUNK) -> jax.Array:
    """Broadcasts a vector to ``[64, columns]``: one number of each row."""
    return FRAGMENTS.along_rows(x, (CHUNK, columns))


def along_columns(x: jax.Array) -> jax.Array:
    """Broadcasts a vector to ``[64, 64]``: one number of each column."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, _SQUARE, (1,)), FRAGMENTS.tile)


class Vectors(NamedTuple):
    """A chunk's vectors in memory.

    Attributes:
      ref: those from ``first`` on.
      first: where they start in :mod:`pallas_kernels.linear.chunks`'s order.
      load: loads a part of them in a register layout.
    """

    ref: Any
    first: int
    load: Callable[[Any, Any], jax.Array]

    @classmethod
    def shared(cls, ref: Any, first: int) -> Vectors:
        """In shared memory."""
        return cls(ref, first, lambda ref, layout: instructions.load_vector(ref, layout))

    @classmethod
    def in_global(cls, ref: Any) -> Vectors:
        """All of them, in global memory."""
        return cls(ref, 0, lambda ref, layout: instructions.load(ref, layout))

    def rows(self, which: int) -> jax.Array:
        """A vector with one number of each row."""
        return self._loaded(which, FRAGMENTS.rows)

    def columns(self, which: int) -> jax.Array:
        """A vector with one number of each column, broadcast to ``[64, 64]``."""
        return along_columns(self._loaded(which, FRAGMENTS.columns))

    def _loaded(self, which: int, layout: Any) -> jax.Array:
        return self.load(self.ref.at[pl.ds(which - self.first, CHUNK)], layout)

    def decay(self) -> jax.Array:
        """:func:`decay_of`, from token i (column) to token r (row)."""
        log = along_rows(self.rows(LOG)), self.columns(LOG)
        return decay_of(*log, along_rows(self.rows(START)), index(0), index(1))


def index(axis: int) -> jax.Array:
    """The row or the column of each element of ``[64, 64]``."""
    return plgpu.broadcasted_iota(jnp.int32, _SQUARE, axis, layout=FRAGMENTS.tile)


def below_diagonal(x: jax.Array) -> jax.Array:
    """``x`` with zeros on the diagonal and above."""
    return jnp.where(index(1) < index(0), x, 0.0)
