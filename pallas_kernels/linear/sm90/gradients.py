"""dQ, dK and the sums for the gradients of decay and beta, of every chunk in parallel.

With S the state before the chunk and dS the gradient of the one after it,
``dP = scale decay (dO U^T)``, ``E = -decay (dV U^T)`` below the diagonal,
``dQ = scale into (dO S^T) + dP K``, ``read = -into (dV S^T) + E K``,
``write = out (U dS^T) + dP^T Q + E^T K`` and ``dK = read + write``. One warpgroup has dQ, the
other dK. The gradients of decay and beta are row sums of products that exist anyway.

S is saved before every pair of chunks, dS after it. The other of the two that a chunk needs is
recomputed from the pair's other chunk, whose arrays its own CTA reads at about the same time, so
that they come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, OUT
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_columns,
    along_rows,
    decay,
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm90.instructions import TILE

# Row sums: q dq; k (read - write); k write of the later chunks' part; S dS in 64 parts; u dv.
QUERIES, KEYS, LATER_KEYS, STATES, UPDATES = range(5)
SUMS = 5


class GradientInputs(NamedTuple):
    """What the kernel reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      do: bfloat16 ``[B, T, N, 128]``, gradient of o.
      dv: the same.
      u: the same.
      states: bfloat16 ``[B, N, pairs * 128 columns, 128]``, before the pairs of chunks.
      dstates: the same, after them.
      vectors: of the chunks.
    """

    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any
    states: Any
    dstates: Any
    vectors: Any


class GradientResults(NamedTuple):
    """What it writes.

    Attributes:
      dq: bfloat16 ``[B, T, N, 128]``, of every value head.
      dk: the same.
      sums: float32 ``[B, N, chunks, SUMS, 64]``.
    """

    dq: Any
    dk: Any
    sums: Any


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      q: ``[64, 128]``, as all arrays of tokens.
      k: of the chunk.
      do: of the chunk; later dq.
      dv: of the chunk; later dk.
      u: of the chunk.
      states: ``[128, 128]``.
      dstates: the same.
      vectors: of the chunk, up to START.
      other_k: of the pair's other chunk.
      other_columns: its dV, or its U.
      other_q: of the pair's second chunk, if this is the first.
      other_do: the same.
      other_vectors: INTO and OUT of the other chunk.
      dp: ``[64, 64]``.
      e: the same.
      arrived: the chunk's arrays have been copied.
      other_arrived: K, columns and vectors of the other chunk have.
      second_arrived: Q and dO of the second chunk have.
      recomputed: each warpgroup has written its half of the recomputed state.
      dp_written: dP has been written.
    """

    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any
    states: Any
    dstates: Any
    vectors: Any
    other_k: Any
    other_columns: Any
    other_q: Any
    other_do: Any
    other_vectors: Any
    dp: Any
    e: Any
    arrived: Any
    other_arrived: Any
    second_arrived: Any
    recomputed: Any
    dp_written: Any


def gradients(given: GradientInputs, scale: float) -> GradientResults:
    """Runs the kernel: a CTA has a chunk of a head."""
    batch, heads, chunks, _ = given.vectors.shape
    groups = heads // given.k.shape[2]

    def kernel(given: GradientInputs, results: GradientResults, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        key_head, warpgroup = lax.div(h, i32(groups)), lax.axis_index(WARPGROUP_AXIS)
        is_second = lax.rem(n, i32(2)) == 1
        is_first = ~is_second & (n + 1 < chunks)

        def start(barrier, *copies):
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target, barrier)

        def copies_of_other(n, columns):
            tokens = pl.ds(n * CHUNK, CHUNK)
            start(
                memory.other_arrived,
                (columns.at[b, tokens, h], memory.other_columns),
                (given.k.at[b, tokens, key_head], memory.other_k),
                (given.vectors.at[b, h, n, pl.ds(INTO, 2 * CHUNK)], memory.other_vectors),
            )

        @pl.when(warpgroup == 0)
        def _():
            tokens = pl.ds(n * CHUNK, CHUNK)
            saved = pl.ds(lax.div(n, i32(2)) * HEAD_DIM, HEAD_DIM)
            start(
                memory.arrived,
                (given.states.at[b, h, saved], memory.states),
                (given.dstates.at[b, h, saved], memory.dstates),
            )
            pl.when(is_second)(lambda: copies_of_other(n - 1, given.u))

            @pl.when(is_first)
            def _():
                copies_of_other(n + 1, given.dv)
                tokens = pl.ds((n + 1) * CHUNK, CHUNK)
                start(
                    memory.second_arrived,
                    (given.do.at[b, tokens, h], memory.other_do),
                    (given.q.at[b, tokens, key_head], memory.other_q),
                )

            start(
                memory.arrived,
                (given.do.at[b, tokens, h], memory.do),
                (given.u.at[b, tokens, h], memory.u),
                (given.vectors.at[b, h, n, pl.ds(INTO, BETA)], memory.vectors),
                (given.dv.at[b, tokens, h], memory.dv),
                (given.k.at[b, tokens, key_head], memory.k),
                (given.q.at[b, tokens, key_head], memory.q),
            )

        plgpu.barrier_wait(memory.arrived)
        columns = pl.ds(warpgroup * CHUNK, CHUNK)
        pl.when(is_second)(lambda: _recompute_state(memory, columns))
        pl.when(is_first)(lambda: _recompute_gradient(scale, memory, columns))
        plgpu.barrier_arrive(memory.recomputed)
        plgpu.barrier_wait(memory.recomputed)
        tokens = pl.ds(n * CHUNK, CHUNK)
        sums = results.sums.at[b, h, n]
        dq, dk = (ref.at[b, tokens, h] for ref in (results.dq, results.dk))
        pl.when(warpgroup == 0)(lambda: _query_gradient(scale, memory, dq, sums))
        pl.when(warpgroup == 1)(lambda: _key_gradient(memory, dk, sums))

    by_token = jax.ShapeDtypeStruct(given.do.shape, jnp.bfloat16)
    sums = jax.ShapeDtypeStruct((batch, heads, chunks, SUMS, CHUNK), jnp.float32)
    return launch(
        kernel,
        "gated_delta_rule_gradients",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"chunk": chunks, "head": heads, "batch": batch},
        warpgroups=2,
        inputs=given,
        results=GradientResults(by_token, by_token, sums),
        memory=_memory(),
    )


def _memory() -> _Memory:
    """Descriptions."""
    square, tokens = matrix(CHUNK, CHUNK), matrix(CHUNK, HEAD_DIM)
    state = matrix(HEAD_DIM, HEAD_DIM)
    return _Memory(
        *[tokens] * 5,
        states=state,
        dstates=state,
        vectors=numbers(BETA),
        other_k=tokens,
        other_columns=tokens,
        other_q=tokens,
        other_do=tokens,
        other_vectors=numbers(2 * CHUNK),
        dp=square,
        e=square,
        arrived=plgpu.Barrier(num_arrivals=8),
        other_arrived=plgpu.Barrier(num_arrivals=3),
        second_arrived=plgpu.Barrier(num_arrivals=2),
        recomputed=plgpu.Barrier(num_arrivals=2),
        dp_written=plgpu.Barrier(num_arrivals=1),
    )


def _recompute_state(memory: _Memory, columns: Any) -> None:
    """Replaces S before the first chunk by that before the second, 64 columns of it."""
    plgpu.barrier_wait(memory.other_arrived)
    u = plgpu.load(transposed(memory.other_columns.at[:, columns]), layout=TILE)
    u = u.astype(jnp.float32) * along_columns(memory.other_vectors, OUT)
    _replace(memory, memory.states.at[columns], [(u, memory.other_k)])


def _recompute_gradient(scale: float, memory: _Memory, columns: Any) -> None:
    """Replaces dS after the second chunk by that after the first, 64 columns of it."""
    plgpu.barrier_wait(memory.other_arrived)
    plgpu.barrier_wait(memory.second_arrived)
    into = along_columns(memory.other_vectors, INTO)
    dv, do = (
        plgpu.load(transposed(ref.at[:, columns]), layout=TILE).astype(jnp.float32)
        for ref in (memory.other_columns, memory.other_do)
    )
    terms = (dv * -into, memory.other_k), (do * (into * scale), memory.other_q)
    _replace(memory, memory.dstates.at[columns], terms)


def _replace(memory: _Memory, state: Any, terms: Sequence[tuple[jax.Array, Any]]) -> None:
    """Writes ``through state + sum of products`` over a state, transposed."""

    def run(acc):
        acc[...] = _loaded(state) * memory.other_vectors[INTO + CHUNK - 1]
        for left, right in terms:
            plgpu.wgmma(acc, left.astype(jnp.bfloat16), right)
        state[...] = plgpu.wgmma_accumulator_load(acc).astype(jnp.bfloat16)
        proxy_fence()

    pl.run_scoped(run, accumulator(HEAD_DIM))


def _query_gradient(scale: float, memory: _Memory, dq: Any, sums: Any) -> None:
    decays = decay(memory.vectors) * scale
    dp = (_product(memory.do, transposed(memory.u)) * decays).astype(jnp.bfloat16)
    memory.dp[...] = dp
    proxy_fence()
    plgpu.barrier_arrive(memory.dp_written)
    y = _product(memory.do, memory.states) * (along_rows(memory.vectors, INTO, HEAD_DIM) * scale)
    y = _product(dp, memory.k, y)
    sums[QUERIES] = _row_sums(y * _loaded(memory.q))
    _send(y, memory.do, dq)
    total = jnp.zeros((), jnp.float32)
    for half in (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)):
        total += _row_sums(_loaded(memory.states.at[half]) * _loaded(memory.dstates.at[half]))
    sums[STATES] = total
    plgpu.wait_smem_to_gmem(0)


def _key_gradient(memory: _Memory, dk: Any, sums: Any) -> None:
    decays = decay(memory.vectors, strict=True)
    e = (_product(memory.dv, transposed(memory.u)) * -decays).astype(jnp.bfloat16)
    memory.e[...] = e
    proxy_fence()
    warpgroup_barrier()
    read = _product(memory.dv, memory.states) * -along_rows(memory.vectors, INTO, HEAD_DIM)
    read = _product(e, memory.k, read)
    write = _product(memory.u, memory.dstates) * along_rows(memory.vectors, OUT, HEAD_DIM)
    sums[LATER_KEYS] = _row_sums(write * _loaded(memory.k))
    write = _product(transposed(memory.e), memory.k, write)
    plgpu.barrier_wait(memory.dp_written)
    write = _product(transposed(memory.dp), memory.q, write)
    sums[KEYS] = _row_sums((read - write) * _loaded(memory.k))
    sums[UPDATES] = _row_sums(_loaded(memory.dv) * _loaded(memory.u))
    _send(read + write, memory.dv, dk)
    plgpu.wait_smem_to_gmem(0)


def _product(a: Any, b: Any, start: jax.Array | None = None) -> jax.Array:
    """``start + a b``, waited for."""

    def run(acc):
        if start is not None:
            acc[...] = start
        plgpu.wgmma(acc, a, b)
        return plgpu.wgmma_accumulator_load(acc)

    return pl.run_scoped(run, accumulator(b.shape[1]))


def _loaded(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)


def _row_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)


def _send(x: jax.Array, buffer: Any, target: Any) -> None:
    """Starts the copy of a rounded result, through memory that this warpgroup alone has read."""
    warpgroup_barrier()
    buffer[...] = x.astype(jnp.bfloat16)
    proxy_fence()
    warpgroup_barrier()
    plgpu.copy_smem_to_gmem(buffer, target)
