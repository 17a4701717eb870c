"""What the scans read of every chunk with a decay per key channel, in parallel.

``into Q``, ``into K`` and ``out K``, with the decays from the chunk's start and to its end;
``through``, the decay of the state through the chunk; ``X beta`` and P, with
``X = (I + A)^-1``, ``A_ri = beta_r k_r D_ri k_i`` below the diagonal, ``P_ri = q_r D_ri k_i``, and
D_ri the decays from token i to token r. A CTA of one warpgroup has a chunk of a value head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, LOG, OUT, START, VECTORS
from pallas_kernels.linear.sm90 import channel_decays as decays
from pallas_kernels.linear.sm90 import warp_blocks
from pallas_kernels.linear.sm90.channel_decays import CHANNELS, HALVES
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_rows,
    index,
    loaded,
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.linear.sm90.inverses import invert
from pallas_kernels.mosaic.fragments import constant, i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm90.instructions import TILE


class ChannelOperands(NamedTuple):
    """What the kernel writes.

    Attributes:
      q_into: bfloat16 ``[B, T, N, 128]``.
      k_into: the same.
      k_out: the same.
      through: float32 ``[B, N, chunks, 128]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
      p: P, the same shape.
    """

    q_into: Any
    k_into: Any
    k_out: Any
    through: Any
    x: Any
    p: Any


class _Inputs(NamedTuple):
    q: Any
    k: Any
    log_decay: Any
    vectors: Any


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      q: ``[2, 64, 64]``, by half of the channels.
      k: the same.
      logs: the same, float16.
      staged: the same, for results and for scaled keys.
      vectors: of the chunk.
      through: ``[128]``.
      a: float16 A.
      x: float16 X.
      squares: ``[2, 64, 64]``: X beta and P.
      arrived: q, k and the vectors have been copied.
    """

    q: Any
    k: Any
    logs: Any
    staged: Any
    vectors: Any
    through: Any
    a: Any
    x: Any
    squares: Any
    arrived: Any


def channel_operands(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, vectors: jax.Array
) -> ChannelOperands:
    """Runs the kernel.

    Args:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      log_decay: ``[B, T, N, 128]``, 0 in padding.
      vectors: :func:`pallas_kernels.linear.chunks.chunk_vectors` of log decays of 0, which has the
        documents and beta.
    """
    batch, heads, chunks, _ = vectors.shape
    groups = heads // k.shape[2]

    def kernel(given: _Inputs, results: ChannelOperands, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        tokens, key_head = pl.ds(n * CHUNK, CHUNK), lax.div(h, i32(groups))
        for half in range(HALVES):
            channels = pl.ds(half * CHANNELS, CHANNELS)
            for source, target in ((given.q, memory.q), (given.k, memory.k)):
                source = source.at[b, tokens, key_head, channels]
                plgpu.copy_gmem_to_smem(source, target.at[half], memory.arrived)
        # One copy has at most 256 numbers.
        for part in (pl.ds(INTO, LOG), pl.ds(LOG, VECTORS * CHUNK - LOG)):
            source = given.vectors.at[b, h, n, part]
            plgpu.copy_gmem_to_smem(source, memory.vectors.at[part], memory.arrived)
        for half in range(HALVES):
            channels = pl.ds(half * CHANNELS, CHANNELS)
            source = given.log_decay.at[b, tokens, h, channels]
            log_decay = plgpu.load(source, layout=TILE, optimized=False)
            memory.logs[half] = decays.rounded_logs(log_decay)
        proxy_fence()
        warpgroup_barrier()
        plgpu.barrier_wait(memory.arrived)

        def targets(half):
            channels = pl.ds(half * CHANNELS, CHANNELS)
            return [ref.at[b, tokens, h, channels] for ref in results[:3]]

        _scaled_rows(memory, targets)
        plgpu.copy_smem_to_gmem(memory.through, results.through.at[b, h, n])
        _scores(memory)
        invert(
            memory.a,
            memory.x,
            memory.vectors.at[pl.ds(LOG, VECTORS * CHUNK - LOG)],
            memory.squares.at[0],
        )
        proxy_fence()
        warpgroup_barrier()
        plgpu.copy_smem_to_gmem(memory.squares.at[0], results.x.at[b, h, tokens])
        plgpu.copy_smem_to_gmem(memory.squares.at[1], results.p.at[b, h, tokens])
        plgpu.wait_smem_to_gmem(0)

    rows = jax.ShapeDtypeStruct((batch, chunks * CHUNK, heads, HEAD_DIM), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, CHUNK), jnp.bfloat16)
    through = jax.ShapeDtypeStruct((batch, heads, chunks, HEAD_DIM), jnp.float32)
    halves = matrix(HALVES, CHUNK, CHANNELS)
    return launch(
        kernel,
        "gated_delta_rule_channel_operands",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "chunk": chunks, "head": heads},
        warpgroups=1,
        inputs=_Inputs(q, k, log_decay, vectors),
        results=ChannelOperands(rows, rows, rows, through, square, square),
        memory=_Memory(
            q=halves,
            k=halves,
            logs=matrix(HALVES, CHUNK, CHANNELS, dtype=jnp.float16),
            staged=halves,
            vectors=numbers(VECTORS * CHUNK),
            through=numbers(HEAD_DIM),
            a=matrix(CHUNK, CHUNK, dtype=jnp.float16),
            x=matrix(CHUNK, CHUNK, dtype=jnp.float16),
            squares=matrix(2, CHUNK, CHUNK),
            arrived=plgpu.Barrier(num_arrivals=2 * HALVES + 2),
        ),
    )


def _scaled_rows(memory: _Memory, targets: Any) -> None:
    """Starts the copies of all rows times decays from the chunk's start, or to its end.

    No state passes a document's beginning. Queries and keys times the first leave at once, through
    memory that X beta, P and A need later.
    """
    vectors = memory.vectors
    from_start, to_end = decays.from_start(), decays.to_end()
    for half in range(HALVES):
        q_target, k_target, out_target = targets(half)
        k = loaded(memory.k.at[half])
        into = decays.factors(from_start, memory.logs.at[half])
        into = into * along_rows(vectors, INTO)
        channels = pl.ds(half * CHANNELS, CHANNELS)
        warp_blocks.store_last_row(memory.through.at[channels], into)
        out = decays.factors(to_end, memory.logs.at[half]) * along_rows(vectors, OUT)
        rows = loaded(memory.q.at[half]) * into, k * into, k * out
        if half:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = memory.squares.at[0], memory.squares.at[1], memory.staged.at[0]
        for x, buffer in zip(rows, staged, strict=True):
            buffer[...] = x.astype(jnp.bfloat16)
        proxy_fence()
        warpgroup_barrier()
        for buffer, target in zip(staged, (q_target, k_target, out_target), strict=True):
            plgpu.copy_smem_to_gmem(buffer, target)


def _scores(memory: _Memory) -> None:
    """Writes A and P."""
    within = _warp_scores(memory)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    kk, qk = pl.run_scoped(
        lambda *accs: _block_scores(memory, within, accs), accumulator(), accumulator()
    )
    row, column = index(0), index(1)
    same = column.astype(jnp.float32) >= along_rows(memory.vectors, START)
    a = jnp.where(same & (column < row), kk * along_rows(memory.vectors, BETA), 0.0)
    memory.a[...] = a.astype(jnp.float16)
    memory.squares[1] = jnp.where(same & (column <= row), qk, 0.0).astype(jnp.bfloat16)


def _scaled(memory: _Memory, half: int, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and queries times the factors of a level."""
    return decays.scaled(memory.k.at[half], factors), decays.scaled(memory.q.at[half], factors)


def _warp_scores(memory: _Memory) -> tuple[jax.Array, jax.Array]:
    """Products of keys, and of queries and keys, of the tokens of each warp, ``[64, 16]``."""
    shape = CHUNK, warp_blocks.TOKENS
    own = zeros = constant(shape, 0.0, TILE)
    for half in range(HALVES):
        q, k = (plgpu.load(ref.at[half], layout=TILE) for ref in (memory.q, memory.k))
        own = warp_blocks.products(q, k, own)
    # A token's own key does not decay.
    qk = jnp.where(decays.warp_diagonal(), own, 0.0)

    # A loop, as the compiler would compute the factors of all levels at once, and spill them.
    def add(level: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        size, of_level = lax.shift_left(i32(1), level), (zeros, zeros)
        for half in range(HALVES):
            scaled = _scaled(memory, half, decays.warp_factors(size, memory.logs.at[half]))
            of_level = tuple(
                warp_blocks.products(x, scaled[0], acc)
                for x, acc in zip(scaled, of_level, strict=True)
            )
        is_pair = decays.warp_pairs(size)
        kk, qk = (jnp.where(is_pair, x, y) for x, y in zip(of_level, found, strict=True))
        return kk, qk

    return lax.fori_loop(i32(0), i32(decays.WARP_LEVELS), add, (zeros, qk))


def _block_scores(
    memory: _Memory, within: tuple[jax.Array, jax.Array], accs: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """The same of all tokens, from those of each warp.

    The last level is added to the others: its operands are 0 in all rows and columns but its own,
    so that the sums of both never have registers at the same time.
    """
    size = warp_blocks.TOKENS
    _add_products(memory, size, accs)
    for x, acc in zip(within, accs, strict=True):
        found = plgpu.wgmma_accumulator_load(acc)
        acc[...] = warp_blocks.pairs(found, size, warp_blocks.spread(x))
    _add_products(memory, 2 * size, accs, first=2 * size)
    kk, qk = (plgpu.wgmma_accumulator_load(acc) for acc in accs)
    return kk, qk


def _add_products(
    memory: _Memory, size: int, accs: tuple[Any, Any], first: int | None = None
) -> None:
    """Starts a level's products.

    Args:
      memory: shared memory.
      size: half of the level's blocks.
      accs: of keys, and of queries and keys.
      first: the first row of results; tokens before it are their columns. None if all are both.
    """
    weights = decays.to_boundary(size)
    for half in range(HALVES):
        scaled = memory.staged.at[half]
        k, q = _scaled(memory, half, decays.factors(weights, memory.logs.at[half]))
        columns, rows = k, (k, q)
        if first is not None:
            columns = warp_blocks.later_rows(k, first, earlier=True)
            rows = [warp_blocks.later_rows(x, first) for x in rows]
        scaled[...] = columns
        proxy_fence()
        warpgroup_barrier()
        for x, acc in zip(rows, accs, strict=True):
            plgpu.wgmma(acc, x, transposed(scaled))
