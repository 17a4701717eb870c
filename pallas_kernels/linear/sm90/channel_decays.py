"""Decays per key channel within a chunk, by halves of blocks, in a warpgroup's registers.

From token i to a later token r a channel decays by exp(G_r - G_i), with G the log decays from the
chunk's start. exp(G_r) and exp(-G_i) by themselves would overflow. So a chunk is halved, and halved
again: the highest bit in which r and i differ is their level, which is that of the one block whose
later half has r and whose earlier half has i. Both decay towards the boundary between the halves,
i from its token and r from the boundary, by factors of at most 1:

    factor_t = exp(sum of log decays between the boundary and token t)

so a level's products are those of rows that are scaled once, ``(factor q) (factor k)^T``, of which
only the pairs of the level are read. The sums are products with matrices of zeros and ones, which
lose nothing where a weak decay follows a strong one.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM, LEAST_LOG_DECAY
from pallas_kernels.linear.sm90 import warp_blocks
from pallas_kernels.linear.sm90.chunk_operands import accumulator
from pallas_kernels.mosaic.sm90.instructions import TILE

LEVELS = int(math.log2(CHUNK))
# The pairs of as many levels are tokens of the same warp.
WARP_LEVELS = int(math.log2(warp_blocks.TOKENS))
# Key channels are computed in parts of as many.
CHANNELS = 64
HALVES = HEAD_DIM // CHANNELS
# Log decays are float16 numbers of 256ths of a binary digit: 11 bits, of magnitudes 2^-33 to 150.
_STEPS = 256.0


def rounded_logs(log_decay: jax.Array) -> jax.Array:
    """Float16 log decays, in 256ths of a binary digit."""
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
    return (log_decay * (_STEPS * math.log2(math.e))).astype(jnp.float16)


def factors(weights: jax.Array, logs: Any) -> jax.Array:
    """exp of sums of log decays, float32 ``[64, 64 channels]``.

    Args:
      weights: float16 ``[64, 64]``: which tokens each row sums.
      logs: :func:`rounded_logs` of all tokens, in shared memory.
    """

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, weights, logs)
        return jnp.exp2(plgpu.wgmma_accumulator_load(acc))

    return pl.run_scoped(run, accumulator(CHANNELS))


def from_start() -> jax.Array:
    """Weights of the tokens up to each row's, for the decay from the chunk's start."""
    row, column = _warp_indices()
    return warp_blocks.with_blocks(_weights(column <= row), _BEFORE, 1 / _STEPS)


def to_end() -> jax.Array:
    """Weights of the tokens after each row's, for the decay to the chunk's end."""
    row, column = _warp_indices()
    return warp_blocks.with_blocks(_weights(column > row), _AFTER, 1 / _STEPS)


def to_boundary(size: int) -> jax.Array:
    """Weights of the tokens between each row's and the boundary of its block.

    Args:
      size: half of the block's tokens, 16 or 32: a level of tokens of different warps.
    """
    row, column = _warp_indices()
    weights = _weights(jnp.where((_row() & size) != 0, column <= row, column > row))
    return warp_blocks.with_blocks(weights, _TO_BOUNDARY[size], 1 / _STEPS)


# (warp, warp of the tokens that its rows sum in addition to their own warp's)
_BEFORE = frozenset((w, v) for w in range(4) for v in range(w))
_AFTER = frozenset((v, w) for w, v in _BEFORE)
_TO_BOUNDARY: dict[int, frozenset[tuple[int, int]]] = {
    16: frozenset(),
    32: frozenset({(0, 1), (3, 2)}),
}


def warp_factors(size: Any, logs: Any) -> jax.Array:
    """:func:`factors` of a level whose blocks are of one warp."""
    row, column = _warp_indices()
    before = jnp.where((row & size) != 0, column <= row, column > row)
    weights = _weights(before & ((row ^ column) < size))
    return jnp.exp2(warp_blocks.sums((weights, logs)))


def warp_pairs(size: Any) -> jax.Array:
    """Whether row and column of ``[64, 16]``, tokens of one warp, are of this level."""
    row, column = _warp_indices()
    apart = row ^ column
    return (apart >= size) & (apart < 2 * size)


def warp_diagonal() -> jax.Array:
    """Whether the column of ``[64, 16]`` is the row's own token."""
    row, column = _warp_indices()
    return row == column


def _warp_indices() -> tuple[jax.Array, jax.Array]:
    column = plgpu.broadcasted_iota(jnp.int32, (CHUNK, warp_blocks.TOKENS), 1, layout=TILE)
    return _row() & (warp_blocks.TOKENS - 1), column


def _row() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, warp_blocks.TOKENS), 0, layout=TILE)


def _weights(are_summed: jax.Array) -> jax.Array:
    return jnp.where(are_summed, 1 / _STEPS, 0.0).astype(jnp.float16)


def scaled(rows: Any, factors: jax.Array) -> jax.Array:
    """Rows in shared memory times factors, bfloat16.

    The factors are rounded first: two products by one instruction, and no conversion.
    """
    return plgpu.load(rows, layout=TILE) * factors.astype(jnp.bfloat16)
