"""dQ, dK and the sums for the gradients of decay and beta, of every chunk in parallel.

With S the state before the chunk and dS the gradient of the one after it,
``dP = scale decay (dO U^T)``, ``E = -decay (dV U^T)`` below the diagonal,
``dQ = scale into (dO S^T) + dP K``, ``read = -into (dV S^T) + E K``,
``write = out (U dS^T) + dP^T Q + E^T K`` and ``dK = read + write``. One warpgroup has dQ, the
other dK. The gradients of decay and beta are row sums of products that exist anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, OUT
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
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
      states: bfloat16 ``[B, N, chunks * 128 columns, 128]``, before the chunks.
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
    """Shared memory and barriers: the inputs, dP, E; they have been copied; dP has been written."""

    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any
    states: Any
    dstates: Any
    vectors: Any
    dp: Any
    e: Any
    arrived: Any
    dp_written: Any


def gradients(given: GradientInputs, scale: float) -> GradientResults:
    """Runs the kernel: a CTA has a chunk of a head."""
    batch, heads, chunks, _ = given.vectors.shape
    groups = heads // given.k.shape[2]

    def kernel(given: GradientInputs, results: GradientResults, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        tokens, key_head = pl.ds(n * CHUNK, CHUNK), lax.div(h, i32(groups))
        saved = pl.ds(n * HEAD_DIM, HEAD_DIM)
        warpgroup = lax.axis_index(WARPGROUP_AXIS)

        @pl.when(warpgroup == 0)
        def _():
            for source, target in (
                (given.do.at[b, tokens, h], memory.do),
                (given.u.at[b, tokens, h], memory.u),
                (given.vectors.at[b, h, n, pl.ds(INTO, BETA)], memory.vectors),
                (given.dv.at[b, tokens, h], memory.dv),
                (given.states.at[b, h, saved], memory.states),
                (given.k.at[b, tokens, key_head], memory.k),
                (given.q.at[b, tokens, key_head], memory.q),
                (given.dstates.at[b, h, saved], memory.dstates),
            ):
                plgpu.copy_gmem_to_smem(source, target, memory.arrived)

        plgpu.barrier_wait(memory.arrived)
        sums = results.sums.at[b, h, n]
        dq, dk = (ref.at[b, tokens, h] for ref in (results.dq, results.dk))
        pl.when(warpgroup == 0)(lambda: _query_gradient(scale, memory, dq, sums))
        pl.when(warpgroup == 1)(lambda: _key_gradient(memory, dk, sums))

    square = matrix(CHUNK, CHUNK)
    tokens = matrix(CHUNK, HEAD_DIM)
    memory = _Memory(
        *[tokens] * 5,
        states=matrix(HEAD_DIM, HEAD_DIM),
        dstates=matrix(HEAD_DIM, HEAD_DIM),
        vectors=numbers(BETA),
        dp=square,
        e=square,
        arrived=plgpu.Barrier(num_arrivals=8),
        dp_written=plgpu.Barrier(num_arrivals=1),
    )
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
        memory=memory,
    )


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
