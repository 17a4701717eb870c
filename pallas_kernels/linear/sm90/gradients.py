"""dQ, dK and the sums for the gradients of decay and beta, of every chunk in parallel.

With S the state before the chunk and dS the gradient of the one after it,
``dP = scale decay (dO U^T)``, ``E = -decay (dV U^T)`` below the diagonal,
``dQ = scale into (dO S^T) + dP K``, ``read = -into (dV S^T) + E K``,
``write = out (U dS^T) + dP^T Q + E^T K`` and ``dK = read + write``. One warpgroup has dQ, the
other dK. The gradients of decay and beta are row sums of products that exist anyway.

S is saved before every pair of chunks, dS after it. The two chunks of a pair are those of a
thread-block cluster. The other of the two states that a chunk needs is recomputed from the pair's
other chunk, so that most arrays are read by both CTAs: each copies half of them to both.
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
from pallas_kernels.linear.families import KEYS, LATER_KEYS, QUERIES, STATES, SUMS, UPDATES
from pallas_kernels.linear.kernel_parts import GradientInputs, GradientResults
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_columns,
    along_rows,
    decay,
    loaded,
    matrix,
    numbers,
    product,
    transposed,
)
from pallas_kernels.linear.sm90.scan import pairs_of
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import CLUSTER_AXIS, WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm90.instructions import TILE

# Arrays of tokens in shared memory: those of both CTAs, and first of those of one.
FIRST_K, FIRST_U, SECOND_K, SECOND_DV, SECOND_Q, SECOND_DO, OWN = range(7)


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      tokens: ``[9, 64, 128]``.
      states: ``[128, 128]``.
      dstates: the same.
      vectors: of the chunk, up to START.
      other_vectors: INTO and OUT of the other chunk.
      dp: ``[64, 64]``.
      e: the same.
      tokens_arrived: both CTAs' arrays of tokens and the vectors have been copied.
      own_arrived: of each array of one CTA.
      states_arrived: both states have been.
      recomputed: each warpgroup has written its half of the recomputed state.
      dp_written: dP has been written.
    """

    tokens: Any
    states: Any
    dstates: Any
    vectors: Any
    other_vectors: Any
    dp: Any
    e: Any
    tokens_arrived: Any
    own_arrived: Any
    states_arrived: Any
    recomputed: Any
    dp_written: Any


class _Chunk(NamedTuple):
    """A CTA's chunk.

    Attributes:
      exists: False for the second chunk of a last pair that has one: its results are not written.
      q: in shared memory, as the next ones.
      k: of the chunk.
      do: of the chunk; later dq.
      dv: of the chunk; later dk.
      u: of the chunk.
    """

    exists: Any
    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any


def gradients(given: GradientInputs, scale: float) -> GradientResults:
    """Runs the kernel: a CTA has a chunk of a head."""
    batch, heads, chunks, _ = given.vectors.shape
    groups = heads // given.k.shape[2]

    def kernel(given: GradientInputs, results: GradientResults, memory: _Memory) -> None:
        pair, h, b = (lax.axis_index(name) for name in ("pair", "head", "batch"))
        warpgroup, is_second = lax.axis_index(WARPGROUP_AXIS), lax.axis_index(CLUSTER_AXIS) == 1
        first, second = 2 * pair, jnp.minimum(2 * pair + 1, chunks - 1)
        has_second = second > first
        n = jnp.where(is_second, second, first)
        pl.when(warpgroup == 0)(lambda: _start_copies(given, memory, b, h, groups, first, second))

        def buffer(of_first, of_second):
            return memory.tokens.at[jnp.where(is_second, i32(of_second), i32(of_first))]

        chunk = _Chunk(
            exists=~is_second | has_second,
            q=buffer(OWN, SECOND_Q),
            k=buffer(FIRST_K, SECOND_K),
            do=buffer(OWN + 1, SECOND_DO),
            dv=buffer(OWN + 2, SECOND_DV),
            u=buffer(FIRST_U, OWN),
        )
        plgpu.barrier_wait(memory.tokens_arrived)
        plgpu.barrier_wait(memory.own_arrived.at[0])

        @pl.when(~is_second)
        def _():
            plgpu.barrier_wait(memory.own_arrived.at[1])
            plgpu.barrier_wait(memory.own_arrived.at[2])

        # Computed while the states arrive.
        pl.when(warpgroup == 0)(lambda: _score_gradient(scale, memory, chunk))
        pl.when(warpgroup == 1)(lambda: _key_products_gradient(memory, chunk))
        plgpu.barrier_wait(memory.states_arrived)
        columns = pl.ds(warpgroup * CHUNK, CHUNK)
        pl.when(is_second)(lambda: _recompute_state(memory, columns))
        pl.when(~is_second & has_second)(lambda: _recompute_gradient(scale, memory, columns))
        plgpu.barrier_arrive(memory.recomputed)
        plgpu.barrier_wait(memory.recomputed)
        tokens = pl.ds(n * CHUNK, CHUNK)
        sums = results.sums.at[b, h, n]
        dq, dk = (ref.at[b, tokens, h] for ref in (results.dq, results.dk))
        pl.when(warpgroup == 0)(lambda: _query_gradient(scale, memory, chunk, dq, sums))
        pl.when(warpgroup == 1)(lambda: _key_gradient(memory, chunk, dk, sums))

    by_token = jax.ShapeDtypeStruct(given.do.shape, jnp.bfloat16)
    sums = jax.ShapeDtypeStruct((batch, heads, chunks, SUMS, CHUNK), jnp.float32)
    return launch(
        kernel,
        "gated_delta_rule_gradients",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "pair": pairs_of(chunks), "head": heads},
        warpgroups=2,
        cluster=2,
        inputs=given,
        results=GradientResults(by_token, by_token, sums),
        memory=_memory(),
    )


def _memory() -> _Memory:
    """Descriptions."""
    square, state = matrix(CHUNK, CHUNK), matrix(HEAD_DIM, HEAD_DIM)
    return _Memory(
        tokens=matrix(OWN + 3, CHUNK, HEAD_DIM),
        states=state,
        dstates=state,
        vectors=numbers(BETA),
        other_vectors=numbers(2 * CHUNK),
        dp=square,
        e=square,
        tokens_arrived=plgpu.Barrier(num_arrivals=8),
        own_arrived=plgpu.Barrier(num_arrivals=1, num_barriers=3),
        states_arrived=plgpu.Barrier(num_arrivals=2),
        recomputed=plgpu.Barrier(num_arrivals=2),
        dp_written=plgpu.Barrier(num_arrivals=1),
    )


def _start_copies(
    given: GradientInputs, memory: _Memory, b: Any, h: Any, groups: int, first: Any, second: Any
) -> None:
    """Starts the copies of a CTA's inputs, and of its part of what both CTAs read."""
    is_second, key_head = lax.axis_index(CLUSTER_AXIS) == 1, lax.div(h, i32(groups))
    firsts, seconds = (pl.ds(n * CHUNK, CHUNK) for n in (first, second))

    def copy(source, target, barrier, **options):
        plgpu.copy_gmem_to_smem(source, target, barrier, **options)

    def copy_to_both(source, target, barrier):
        copy(source, target, barrier, collective_axes=CLUSTER_AXIS)

    @pl.when(~is_second)
    def _():
        for i, source in enumerate((
            given.q.at[b, firsts, key_head], given.do.at[b, firsts, h], given.dv.at[b, firsts, h]
        )):  # fmt: skip
            copy(source, memory.tokens.at[OWN + i], memory.own_arrived.at[i])

    @pl.when(is_second)
    def _():
        copy(given.u.at[b, seconds, h], memory.tokens.at[OWN], memory.own_arrived.at[0])

    for source, index in (
        (given.u.at[b, firsts, h], FIRST_U),
        (given.do.at[b, seconds, h], SECOND_DO),
        (given.dv.at[b, seconds, h], SECOND_DV),
        (given.k.at[b, firsts, key_head], FIRST_K),
        (given.k.at[b, seconds, key_head], SECOND_K),
        (given.q.at[b, seconds, key_head], SECOND_Q),
    ):
        copy_to_both(source, memory.tokens.at[index], memory.tokens_arrived)
    own, other = (jnp.where(is_second, *x) for x in ((second, first), (first, second)))
    vectors, others = pl.ds(INTO, BETA), pl.ds(INTO, 2 * CHUNK)
    copy(given.vectors.at[b, h, own, vectors], memory.vectors, memory.tokens_arrived)
    copy(given.vectors.at[b, h, other, others], memory.other_vectors, memory.tokens_arrived)
    saved = pl.ds(lax.div(first, i32(2)) * HEAD_DIM, HEAD_DIM)
    copy_to_both(given.states.at[b, h, saved], memory.states, memory.states_arrived)
    copy_to_both(given.dstates.at[b, h, saved], memory.dstates, memory.states_arrived)


def _recompute_state(memory: _Memory, columns: Any) -> None:
    """Replaces S before the first chunk by that before the second, 64 columns of it."""
    u = plgpu.load(transposed(memory.tokens.at[FIRST_U, :, columns]), layout=TILE)
    u = u.astype(jnp.float32) * along_columns(memory.other_vectors, OUT)
    _replace(memory, memory.states.at[columns], [(u, memory.tokens.at[FIRST_K])])


def _recompute_gradient(scale: float, memory: _Memory, columns: Any) -> None:
    """Replaces dS after the second chunk by that after the first, 64 columns of it."""
    into = along_columns(memory.other_vectors, INTO)
    dv, do = (
        plgpu.load(transposed(memory.tokens.at[i, :, columns]), layout=TILE).astype(jnp.float32)
        for i in (SECOND_DV, SECOND_DO)
    )
    terms = (
        (dv * -into, memory.tokens.at[SECOND_K]),
        (do * (into * scale), memory.tokens.at[SECOND_Q]),
    )
    _replace(memory, memory.dstates.at[columns], terms)


def _replace(memory: _Memory, state: Any, terms: Sequence[tuple[jax.Array, Any]]) -> None:
    """Writes ``through state + sum of products`` over a state, transposed."""

    def run(acc):
        acc[...] = loaded(state) * memory.other_vectors[INTO + CHUNK - 1]
        for left, right in terms:
            plgpu.wgmma(acc, left.astype(jnp.bfloat16), right)
        state[...] = plgpu.wgmma_accumulator_load(acc).astype(jnp.bfloat16)
        proxy_fence()

    pl.run_scoped(run, accumulator(HEAD_DIM))


def _score_gradient(scale: float, memory: _Memory, chunk: _Chunk) -> None:
    """Writes dP."""
    decays = decay(memory.vectors) * scale
    memory.dp[...] = (product(chunk.do, transposed(chunk.u)) * decays).astype(jnp.bfloat16)
    proxy_fence()
    plgpu.barrier_arrive(memory.dp_written)


def _key_products_gradient(memory: _Memory, chunk: _Chunk) -> None:
    """Writes E."""
    decays = decay(memory.vectors, strict=True)
    memory.e[...] = (product(chunk.dv, transposed(chunk.u)) * -decays).astype(jnp.bfloat16)
    proxy_fence()
    warpgroup_barrier()


def _query_gradient(scale: float, memory: _Memory, chunk: _Chunk, dq: Any, sums: Any) -> None:
    y = product(chunk.do, memory.states) * (along_rows(memory.vectors, INTO, HEAD_DIM) * scale)
    plgpu.barrier_wait(memory.dp_written)
    y = product(memory.dp, chunk.k, y)
    queries = _row_sums(y * loaded(chunk.q))
    states = jnp.zeros((), jnp.float32)
    for half in (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)):
        states += _row_sums(loaded(memory.states.at[half]) * loaded(memory.dstates.at[half]))
    _send(chunk, y, chunk.do, dq, sums, {QUERIES: queries, STATES: states})


def _key_gradient(memory: _Memory, chunk: _Chunk, dk: Any, sums: Any) -> None:
    read = product(chunk.dv, memory.states) * -along_rows(memory.vectors, INTO, HEAD_DIM)
    read = product(memory.e, chunk.k, read)
    write = product(chunk.u, memory.dstates) * along_rows(memory.vectors, OUT, HEAD_DIM)
    later = _row_sums(write * loaded(chunk.k))
    write = product(transposed(memory.e), chunk.k, write)
    plgpu.barrier_wait(memory.dp_written)
    write = product(transposed(memory.dp), chunk.q, write)
    keys = _row_sums((read - write) * loaded(chunk.k))
    updates = _row_sums(loaded(chunk.dv) * loaded(chunk.u))
    rows = {LATER_KEYS: later, KEYS: keys, UPDATES: updates}
    _send(chunk, read + write, chunk.dv, dk, sums, rows)


def _row_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)


def _send(
    chunk: _Chunk, x: jax.Array, buffer: Any, target: Any, sums: Any, rows: dict[int, jax.Array]
) -> None:
    """Writes a result, rounded, through memory that this warpgroup alone has read, and sums."""
    warpgroup_barrier()
    buffer[...] = x.astype(jnp.bfloat16)
    proxy_fence()
    warpgroup_barrier()

    @pl.when(chunk.exists)
    def _():
        plgpu.copy_smem_to_gmem(buffer, target)
        for index, row in rows.items():
            sums[index] = row

    plgpu.wait_smem_to_gmem(0)
