"""Gradients of every chunk in parallel, with a decay per key channel.

With S the state before the chunk, dS the gradient of the one after it, D the decays from token to
token, and dP and E the gradients of products of queries and keys, and of keys,

    dP = scale dO U^T on and below the diagonal,      E = -dV U^T below it,
    dq_r = scale into_r (dO S^T)_r + sum_i dP_ri D_ri k_i,
    read_r = -into_r (dV S^T)_r + sum_i E_ri D_ri k_i,
    write_i = out_i (U dS^T)_i + sum_r dP_ri D_ri q_r + sum_r E_ri D_ri k_r,    dK = read + write.

The sums go by levels of :mod:`pallas_kernels.linear.sm90.channel_decays`. At each of them a token
is either a row or a column: ``factor ((E + E^T) (factor K) + dP^T (factor Q))`` is part of read for
the one and of write for the other.

The gradient of the log decays from the chunk's start is ``q dq + k (read - write)``, of each token
and channel, and in the last token also the sum of ``k out (U dS^T)`` over all tokens, and of
``through S dS`` over all values. That of a token's log decay sums over the tokens from it on, of
which two add the opposite of each other: it is that of the products' rounded operands, for which
they cancel exactly. With strong decays little else is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.backend import Gradients, Inputs
from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, LOG, OUT, START, VECTORS
from pallas_kernels.linear.families import beta_gradient, sum_groups
from pallas_kernels.linear.families import transposed as transposed_state
from pallas_kernels.linear.kernel_parts import GradientInputs
from pallas_kernels.linear.sm90 import channel_decays as decays
from pallas_kernels.linear.sm90 import warp_blocks
from pallas_kernels.linear.sm90.channel_decays import CHANNELS, HALVES
from pallas_kernels.linear.sm90.chunk_operands import (
    SQUARE,
    accumulator,
    along_columns,
    along_rows,
    index,
    loaded,
    matrix,
    numbers,
    product,
    transposed,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm90.instructions import TILE


class _Inputs(NamedTuple):
    """What the kernel reads, with a state and a gradient of every chunk."""

    arrays: GradientInputs
    log_decay: Any


class _Results(NamedTuple):
    """What it writes.

    Attributes:
      dq: bfloat16 ``[B, T, N, 128]``, of every value head.
      dk: the same.
      log_decay: float32, the same shape.
      updates: sums of u dv, float32 ``[B, N, chunks, 64]``.
    """

    dq: Any
    dk: Any
    log_decay: Any
    updates: Any


class _Memory(NamedTuple):
    """Shared memory and barriers. A warpgroup has half of the key channels.

    Attributes:
      q: ``[2, 64, 64]``, by half of the channels.
      k: the same.
      logs: the same, float16.
      scaled: ``[4, 64, 64]``: of each half two matrices, for scaled keys and queries, and results.
      values: ``[3, 64, 128]``: dO, dV and U.
      states: ``[2, 128, 64]``, by half of the channels.
      dstates: the same.
      scores: ``[3, 64, 64]``: dP, its transpose, and ``E + E^T``.
      vectors: of the chunk.
      through: ``[2, 64]``, by half of the channels.
      end: ``[2, 64]``, what the last token's gradient has in addition.
      arrived: all but the states have been copied.
      states_arrived: the states have been.
      scores_written: by both warpgroups.
    """

    q: Any
    k: Any
    logs: Any
    scaled: Any
    values: Any
    states: Any
    dstates: Any
    scores: Any
    vectors: Any
    through: Any
    end: Any
    arrived: Any
    states_arrived: Any
    scores_written: Any


DO, DV, U = range(3)
DP, DP_TRANSPOSED, E = range(3)


def gradients_of(
    inputs: Inputs,
    vectors: jax.Array,
    do: jax.Array,
    scanned: tuple[jax.Array, ...],
    scale: float,
) -> Gradients:
    """All gradients.

    Args:
      inputs: of the forward pass.
      vectors: of the chunks, with log decays of 0.
      do: gradient of the output, bfloat16; 0 in padding.
      scanned: U, the states before all chunks, dV, the gradients of the states after all chunks,
        and that of the first state, transposed, from the backward pass's scans.
      scale: of q k.
    """
    u, states, dv, dstates, first = scanned
    arrays = GradientInputs(inputs.q, inputs.k, do, dv, u, states, dstates, vectors)
    dq, dk, log_decay, updates = _gradients(_Inputs(arrays, inputs.log_decay), scale)
    dq, dk = (sum_groups(x, inputs.k.shape[2]) for x in (dq, dk))
    beta = beta_gradient(vectors, updates)
    return Gradients(dq, dk, dv, log_decay, beta, transposed_state(first))


def _gradients(given: _Inputs, scale: float) -> _Results:
    batch, heads, chunks, _ = given.arrays.vectors.shape
    groups = heads // given.arrays.k.shape[2]

    def kernel(given: _Inputs, results: _Results, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        half, tokens = lax.axis_index(WARPGROUP_AXIS), pl.ds(n * CHUNK, CHUNK)
        pl.when(half == 0)(lambda: _start_copies(given.arrays, memory, b, h, groups, n))
        channels = pl.ds(half * CHANNELS, CHANNELS)
        log_decay = given.log_decay.at[b, tokens, h, channels]
        log_decay = plgpu.load(log_decay, layout=TILE, optimized=False)
        memory.logs.at[half][...] = decays.rounded_logs(log_decay)
        proxy_fence()
        warpgroup_barrier()
        plgpu.barrier_wait(memory.arrived)
        pl.when(half == 0)(lambda: _score_gradient(scale, memory))
        pl.when(half == 1)(lambda: _key_products_gradient(memory, results.updates.at[b, h, n]))
        plgpu.barrier_arrive(memory.scores_written)
        plgpu.barrier_wait(memory.states_arrived)
        targets = [ref.at[b, tokens, h, channels] for ref in results[:3]]
        _channel_gradients(scale, memory, half, targets)

    by_token = jax.ShapeDtypeStruct(given.arrays.do.shape, jnp.bfloat16)
    log_decay = jax.ShapeDtypeStruct(given.arrays.do.shape, jnp.float32)
    updates = jax.ShapeDtypeStruct((batch, heads, chunks, CHUNK), jnp.float32)
    halves = matrix(HALVES, CHUNK, CHANNELS)
    return launch(
        kernel,
        "gated_delta_rule_channel_gradients",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "chunk": chunks, "head": heads},
        warpgroups=HALVES,
        inputs=given,
        results=_Results(by_token, by_token, log_decay, updates),
        memory=_Memory(
            q=halves,
            k=halves,
            logs=matrix(HALVES, CHUNK, CHANNELS, dtype=jnp.float16),
            scaled=matrix(2 * HALVES, CHUNK, CHANNELS),
            values=matrix(3, CHUNK, HEAD_DIM),
            states=matrix(HALVES, HEAD_DIM, CHANNELS),
            dstates=matrix(HALVES, HEAD_DIM, CHANNELS),
            scores=matrix(3, CHUNK, CHUNK),
            vectors=numbers(VECTORS * CHUNK),
            through=numbers(HALVES, CHANNELS),
            end=numbers(HALVES, CHANNELS),
            arrived=plgpu.Barrier(num_arrivals=2 * HALVES + 5),
            states_arrived=plgpu.Barrier(num_arrivals=2 * HALVES),
            scores_written=plgpu.Barrier(num_arrivals=2),
        ),
    )


def _start_copies(
    given: GradientInputs, memory: _Memory, b: Any, h: Any, groups: int, n: Any
) -> None:
    tokens, key_head = pl.ds(n * CHUNK, CHUNK), lax.div(h, i32(groups))
    columns = pl.ds(n * HEAD_DIM, HEAD_DIM)
    for i, source in enumerate((given.do, given.dv, given.u)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h], memory.values.at[i], memory.arrived)
    # One copy has at most 256 numbers.
    for part in (pl.ds(INTO, LOG), pl.ds(LOG, VECTORS * CHUNK - LOG)):
        source = given.vectors.at[b, h, n, part]
        plgpu.copy_gmem_to_smem(source, memory.vectors.at[part], memory.arrived)
    for half in range(HALVES):
        channels = pl.ds(half * CHANNELS, CHANNELS)
        for source, target in ((given.q, memory.q), (given.k, memory.k)):
            source = source.at[b, tokens, key_head, channels]
            plgpu.copy_gmem_to_smem(source, target.at[half], memory.arrived)
    for half in range(HALVES):
        channels = pl.ds(half * CHANNELS, CHANNELS)
        for source, target in ((given.states, memory.states), (given.dstates, memory.dstates)):
            source = source.at[b, h, columns, channels]
            plgpu.copy_gmem_to_smem(source, target.at[half], memory.states_arrived)


def _score_gradient(scale: float, memory: _Memory) -> None:
    """Writes dP and its transpose."""
    do, u = memory.values.at[DO], memory.values.at[U]
    row, column = index(0), index(1)
    _write(memory, DP, product(do, transposed(u)) * scale, (column <= row) & _same(memory, 0))
    of_columns = product(u, transposed(do)) * scale
    _write(memory, DP_TRANSPOSED, of_columns, (row <= column) & _same(memory, 1))


def _key_products_gradient(memory: _Memory, updates: Any) -> None:
    """Writes ``E + E^T``, and the sums of u dv."""
    dv, u = memory.values.at[DV], memory.values.at[U]
    updates[...] = jnp.sum(loaded(dv) * loaded(u), axis=1)
    row, column = index(0), index(1)
    lower = jnp.where(_same(memory, 0) & (column < row), -product(dv, transposed(u)), 0.0)
    lower = lax.optimization_barrier(lower)
    upper = -product(u, transposed(dv))
    _write(memory, E, jnp.where(row < column, upper, lower), (column < row) | _same(memory, 1))


def _same(memory: _Memory, axis: int) -> jax.Array:
    """Whether the other axis's token is in the document of this one's, or later."""
    along = along_columns if axis else along_rows
    return index(1 - axis).astype(jnp.float32) >= along(memory.vectors, START)


def _write(memory: _Memory, which: int, x: jax.Array, exists: jax.Array) -> None:
    memory.scores[which] = jnp.where(exists, x, 0.0).astype(jnp.bfloat16)


def _channel_gradients(scale: float, memory: _Memory, half: Any, targets: list[Any]) -> None:
    """A warpgroup's channels of all gradients."""
    q, k, logs = (ref.at[half] for ref in (memory.q, memory.k, memory.logs))
    vectors, values = memory.vectors, memory.values
    states, dstates = memory.states.at[half], memory.dstates.at[half]
    into = decays.factors(decays.from_start(), logs) * along_rows(vectors, INTO)
    warp_blocks.store_last_row(memory.through.at[half], into)
    dq = product(values.at[DO], states) * (into * scale)
    read = product(values.at[DV], states) * -into
    out = decays.factors(decays.to_end(), logs) * along_rows(vectors, OUT)
    write = product(values.at[U], dstates) * out
    _end_gradient(memory, half, write * loaded(k))
    plgpu.barrier_wait(memory.scores_written)
    sums = dq, read + write, dq * loaded(q) + (read - write) * loaded(k)
    sums = _add_warp_levels(memory, half, sums)
    for size in (warp_blocks.TOKENS, 2 * warp_blocks.TOKENS):
        sums = lax.optimization_barrier(_add_level(memory, half, size, sums))
    dq, dk, dlog = sums
    _send(memory, half, dq, dk, targets[:2])
    _log_decay_gradient(memory, half, dlog, targets[2])


def _end_gradient(memory: _Memory, half: Any, of_tokens: jax.Array) -> None:
    """Writes what the last token's gradient has in addition.

    Args:
      memory: shared memory.
      half: of the channels.
      of_tokens: ``k out (U dS^T)``.
    """
    states, dstates = memory.states.at[half], memory.dstates.at[half]
    of_values = sum(
        loaded(states.at[part]) * loaded(dstates.at[part])
        for part in (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK))
    )
    warpgroup_barrier()  # The row of through has been written.
    through = along_columns(memory.through.at[half], 0)
    ones = jnp.full(SQUARE, 1.0, jnp.bfloat16)
    ones = plgpu.layout_cast(ones, TILE)
    end = _sums_of_rows(memory, half, ones, of_tokens + of_values * through)
    warp_blocks.store_last_row(memory.end.at[half], end)


def _sums_of_rows(memory: _Memory, half: Any, weights: jax.Array, x: jax.Array) -> jax.Array:
    """``weights x``, with 16 bits of x: two products of bfloat16.

    The weights go through shared memory, where states have been read. As constants in registers,
    ptxas before CUDA 13.3 gives some of them to the second product alone.
    """
    buffers = [memory.scaled.at[2 * half + i] for i in range(2)]
    of_weights = memory.states.at[half].at[pl.ds(0, CHUNK)]
    large = x.astype(jnp.bfloat16)
    warpgroup_barrier()  # What other threads read here they have read.
    buffers[0][...] = large
    buffers[1][...] = (x - large.astype(jnp.float32)).astype(jnp.bfloat16)
    of_weights[...] = weights
    proxy_fence()
    warpgroup_barrier()

    def run(acc: Any) -> jax.Array:
        for buffer in buffers:
            plgpu.wgmma(acc, of_weights, buffer)
        return plgpu.wgmma_accumulator_load(acc)

    return pl.run_scoped(run, accumulator(CHANNELS))


def _add_warp_levels(
    memory: _Memory, half: Any, sums: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds what tokens of the same warp add to each other's gradients."""
    q, k, logs = (ref.at[half] for ref in (memory.q, memory.k, memory.logs))
    scaled_k, scaled_q = (memory.scaled.at[2 * half + i] for i in range(2))
    of_rows, of_columns, of_keys = (
        warp_blocks.own(memory.scores.at[i]) for i in (DP, DP_TRANSPOSED, E)
    )
    # A token's own key does not decay.
    own = jnp.where(decays.warp_diagonal(), of_rows, jnp.zeros_like(of_rows))
    own = jnp.sum(own.astype(jnp.float32), axis=1)
    own = plgpu.layout_cast(lax.broadcast_in_dim(own, SQUARE, (0,)), TILE)
    dq, dk, dlog = sums
    sums = dq + own * loaded(k), dk + own * loaded(q), dlog

    def add(level: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        size = lax.shift_left(i32(1), level)
        factors = decays.warp_factors(size, logs)
        for ref, buffer in ((k, scaled_k), (q, scaled_q)):
            buffer[...] = decays.scaled(ref, factors)
        pairs = decays.warp_pairs(size)
        rows, columns, keys = (
            jnp.where(pairs, x, jnp.zeros_like(x)) for x in (of_rows, of_columns, of_keys)
        )
        sums = _with_queries(sums, factors, scaled_q, warp_blocks.sums((rows, scaled_k)))
        key = warp_blocks.sums((keys, scaled_k), (columns, scaled_q))
        return _with_keys(sums, size, factors, scaled_k, key)

    warpgroup_barrier()  # All threads' products have read what is overwritten.
    return lax.fori_loop(i32(0), i32(decays.WARP_LEVELS), add, sums)


def _with_queries(
    sums: tuple[jax.Array, ...], factors: jax.Array, scaled: Any, query: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums with a level's part of dQ. Later products need not start before it is added."""
    dq, dk, dlog = sums
    dlog = dlog + query * loaded(scaled)
    return lax.optimization_barrier((dq + query * factors.astype(jnp.float32), dk, dlog))


def _with_keys(
    sums: tuple[jax.Array, ...], size: Any, factors: jax.Array, scaled: Any, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums with a level's part of dK: rows are read, columns written."""
    dq, dk, dlog = sums
    of_decays = key * loaded(scaled)
    is_row = (index(0) & size) != 0
    dlog = dlog + jnp.where(is_row, of_decays, -of_decays)
    return dq, dk + key * factors.astype(jnp.float32), dlog


def _add_level(
    memory: _Memory, half: Any, size: int, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a level of tokens of different warps."""
    q, k, logs = (ref.at[half] for ref in (memory.q, memory.k, memory.logs))
    scaled_k, scaled_q = (memory.scaled.at[2 * half + i] for i in range(2))
    factors = decays.factors(decays.to_boundary(size), logs).astype(jnp.bfloat16)
    factors = lax.optimization_barrier(factors)  # Half of the registers.
    warpgroup_barrier()  # All threads have read what is overwritten.
    for ref, buffer in ((k, scaled_k), (q, scaled_q)):
        buffer[...] = decays.scaled(ref, factors)
    proxy_fence()
    warpgroup_barrier()

    def of_level(which: int) -> jax.Array:
        return warp_blocks.pairs(plgpu.load(memory.scores.at[which], layout=TILE), size)

    def of_keys(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, of_level(E), scaled_k)
        plgpu.wgmma(acc, of_level(DP_TRANSPOSED), scaled_q)
        return plgpu.wgmma_accumulator_load(acc)

    sums = _with_queries(sums, factors, scaled_q, product(of_level(DP), scaled_k))
    key = pl.run_scoped(of_keys, accumulator(CHANNELS))
    return _with_keys(sums, size, factors, scaled_k, key)


def _send(memory: _Memory, half: Any, dq: jax.Array, dk: jax.Array, targets: list[Any]) -> None:
    """Writes dQ and dK, rounded, through memory that this warpgroup alone has read."""
    buffers = memory.q.at[half], memory.k.at[half]
    warpgroup_barrier()
    for x, buffer in zip((dq, dk), buffers, strict=True):
        buffer[...] = x.astype(jnp.bfloat16)
    proxy_fence()
    warpgroup_barrier()
    for buffer, target in zip(buffers, targets, strict=True):
        plgpu.copy_smem_to_gmem(buffer, target)


def _log_decay_gradient(memory: _Memory, half: Any, of_start: jax.Array, target: Any) -> None:
    """Writes the gradient of log decays, from that of log decays from the chunk's start."""
    weights = jnp.where(index(1) >= index(0), 1.0, 0.0).astype(jnp.bfloat16)
    total = _sums_of_rows(memory, half, weights, of_start)
    total = total + along_columns(memory.end.at[half], 0)
    # No decay applies to padding, whose beta is 0, nor to a document's first token.
    start, beta = along_rows(memory.vectors, START), along_rows(memory.vectors, BETA)
    begins = (start == index(0).astype(jnp.float32)) & (along_rows(memory.vectors, INTO) == 0)
    target[...] = jnp.where((beta == 0) | begins, 0.0, total)
    plgpu.wait_smem_to_gmem(0)
