"""Chunks in shared memory and in a warpgroup's registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, LOG, START, decay_of
from pallas_kernels.mosaic.sm90.instructions import COLUMNS, ROWS, TILE
from pallas_kernels.mosaic.transfers import matrix_transforms

# A product's accumulator of a chunk's tokens or of 64 value columns by ``columns``.
SQUARE = CHUNK, CHUNK


def matrix(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Description of swizzled shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=matrix_transforms(shape[-1], 2))


def numbers(*shape: int) -> Any:
    """Description of float32 shared memory."""
    return plgpu.SMEM(shape, jnp.float32)


def accumulator(columns: int = CHUNK) -> Any:
    """Description of a float32 accumulator of 64 rows."""
    return plgpu.ACC((CHUNK, columns), jnp.float32)


def transposed(ref: Any) -> Any:
    """The transpose of a matrix in memory."""
    return ref.transpose((1, 0))


def loaded(ref: Any) -> jax.Array:
    """A matrix in shared memory, as float32."""
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)


def product(a: Any, b: Any, start: jax.Array | None = None) -> jax.Array:
    """``start + a b``, waited for."""

    def run(acc: Any) -> jax.Array:
        if start is not None:
            acc[...] = start
        plgpu.wgmma(acc, a, b)
        return plgpu.wgmma_accumulator_load(acc)

    return pl.run_scoped(run, accumulator(b.shape[1]))


def along_rows(vectors: Any, first: int, columns: int = CHUNK) -> jax.Array:
    """Broadcasts the vector at ``first`` to ``[64, columns]``: one number of each row."""
    x = plgpu.load(vectors.at[pl.ds(first, CHUNK)], layout=ROWS)
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (CHUNK, columns), (0,)), TILE)


def along_columns(vectors: Any, first: int, rows: int = CHUNK, columns: int = CHUNK) -> jax.Array:
    """Broadcasts the vector at ``first`` to ``[rows, columns]``: one number of each column."""
    x = plgpu.load(vectors.at[pl.ds(first, columns)], layout=COLUMNS)
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, columns), (1,)), TILE)


def index(axis: int) -> jax.Array:
    """The row or the column of each element of ``[64, 64]``."""
    return plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=TILE)


def decay(vectors: Any, offset: int = 0, *, strict: bool = False) -> jax.Array:
    """The decay from token i (column) to token r (row), where i is r or precedes it; else 0.

    It is 0 across the beginning of a document, too.

    Args:
      vectors: in shared memory.
      offset: where they start in :mod:`pallas_kernels.linear.chunks`'s order.
      strict: 0 for i = r.
    """
    log = along_rows(vectors, LOG - offset), along_columns(vectors, LOG - offset)
    first = along_rows(vectors, START - offset)
    return decay_of(*log, first, index(0), index(1), strict=strict)
