"""The forward scan of few heads, with X beta and P computed in the same launch, ahead of it.

A scan of N heads has 2 N CTAs, each alone on its SM for the whole launch. CTAs on the SMs that are
left compute X beta and P of all heads' chunks, in the order of the chunks, and count them in global
memory; the scan waits for a chunk's before it copies them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import num_sms
from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM, START
from pallas_kernels.linear.kernel_parts import PARTS, Mode, Place, Share
from pallas_kernels.linear.sm80.chunk_operands import matrix, numbers, tokens_of
from pallas_kernels.linear.sm80.prepared import COPIED, FIRST, ChunkMemory, Chunks, compute
from pallas_kernels.linear.sm80.scan import ScanInputs, ScanMemory, scan_cta
from pallas_kernels.mosaic import flags, fragments, transfers
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm80 import instructions

_WARPGROUPS = 2


class ForwardResults(NamedTuple):
    """What the launch writes.

    Attributes:
      o: bfloat16 ``[B, T, N, 128]``.
      last: the last state, transposed, float32 ``[B, N, 128, 128]``.
      chunks: P and X beta of all chunks.
    """

    o: Any
    last: Any
    chunks: Any


class _Memory(NamedTuple):
    """Shared memory of a CTA that computes X beta and P, by warpgroup.

    Attributes:
      chunk: ``[WARPGROUPS, ...]``.
      vectors: ``[WARPGROUPS * 2, 256]``: of this chunk and the next one of each warpgroup.
    """

    chunk: ChunkMemory
    vectors: Any


def spare_ctas(chains: int) -> int:
    """Number of CTAs that scans of this many heads leave free on the GPU that is traced for."""
    return num_sms() - chains * PARTS


def forward_with_chunks(given: ScanInputs, scale: float) -> ForwardResults:
    """Runs the scan for outputs, and all that it needs.

    Args:
      given: its inputs; X and P are None.
      scale: of q k.
    """
    batch, heads, chunks, _ = given.vectors.shape
    groups, spare = heads // given.k.shape[2], max(1, spare_ctas(batch * heads))

    def kernel(given: ScanInputs, results: ForwardResults, memory: Any, counters: Any) -> None:
        index = lax.axis_index("cta")
        # One CTA has either; together they are more than an A100's shared memory.
        of_scan, of_chunks = memory

        # These CTAs come first in the grid, so that they run when a scan waits for them.
        @pl.when(index < spare)
        def _():
            first = index * _WARPGROUPS + lax.axis_index(WARPGROUP_AXIS)
            share = Share(first, spare * _WARPGROUPS, batch, heads, chunks)
            _compute_chunks(share, groups, given, results.chunks, of_chunks, counters)

        @pl.when(index >= spare)
        def _():
            b = lax.div(index - spare, i32(heads * PARTS))
            own = lax.rem(index - spare, i32(heads * PARTS))
            place = Place.of(own, PARTS, groups, b)

            def wait(chunk):
                flags.wait_for(counters, chunk, i32(batch * heads), by_tma=False)

            inputs = given._replace(p=results.chunks.p, x=results.chunks.x)
            scan_cta(
                Mode.OUTPUT, scale, place, inputs, results.o, None, results.last, of_scan, wait
            )

    square: Any = jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, CHUNK), jnp.bfloat16)
    # Zeros that are no constant: a copy of one may not be shared by calls, nor kept for one.
    counters = (given.vectors[0, 0, :, START] < 0).astype(jnp.int32)
    pair = _WARPGROUPS, CHUNK
    of_chunks = _Memory(
        ChunkMemory(
            q=matrix(*pair, HEAD_DIM),
            k=matrix(*pair, HEAD_DIM),
            a=matrix(*pair, CHUNK, dtype=jnp.float16),
            x=matrix(*pair, CHUNK, dtype=jnp.float16),
            p=matrix(*pair, CHUNK),
            scaled=matrix(*pair, CHUNK),
        ),
        numbers(_WARPGROUPS * 2, COPIED),
    )
    return launch(
        kernel,
        "gated_delta_rule_forward",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"cta": spare + batch * heads * PARTS},
        warpgroups=_WARPGROUPS,
        inputs=given,
        results=ForwardResults(
            jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(given.start.shape, jnp.float32),
            Chunks(square, square),
        ),
        memory=plgpu.RefUnion(ScanMemory.of(Mode.OUTPUT), of_chunks),
        counter=counters,
    )


def _compute_chunks(
    share: Share, groups: int, given: ScanInputs, results: Chunks, memory: _Memory, counters: Any
) -> None:
    """A warpgroup's share of all chunks; the next one is copied during an inversion."""
    own = lax.axis_index(WARPGROUP_AXIS)
    chunk = ChunkMemory(*(ref.at[own] for ref in memory.chunk))

    def vectors_of(step):
        return memory.vectors.at[own * 2 + lax.rem(step, i32(2))]

    def start(step):
        b, h, n = share.place(step)
        tokens, key_head = tokens_of(n), lax.div(h, i32(groups))
        instructions.copy(given.k.at[b, tokens, key_head], chunk.k)
        instructions.copy(given.q.at[b, tokens, key_head], chunk.q)
        instructions.copy(given.vectors.at[b, h, n, pl.ds(FIRST, COPIED)], vectors_of(step))

    pl.when(share.steps > 0)(lambda: start(i32(0)))

    @pl.loop(0, share.steps)
    def _(step):
        instructions.wait_for_copies()
        following = step + 1

        def start_next():
            pl.when(following < share.steps)(lambda: start(following))

        compute(chunk, vectors_of(step), start_next)
        b, h, n = share.place(step)
        transfers.store_matrix(chunk.p, results.p.at[b, h, tokens_of(n)])
        transfers.store_matrix(chunk.scaled, results.x.at[b, h, tokens_of(n)])
        fragments.warpgroup_barrier()
        flags.count(counters, n, by_tma=False)
