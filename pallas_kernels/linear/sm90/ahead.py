"""The forward scan of few heads, with X beta and P computed in the same launch, ahead of it.

A scan of N heads has 2 N CTAs, each for the whole launch. The SMs that are left compute X beta and
P of all heads' chunks, in the order of the chunks, and count them in global memory; the scan waits
for a chunk's before it copies them. They are read soon after, from L2, and the products of P do
not take the tensor cores of an SM that a scan waits for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import num_sms
from pallas_kernels.linear.chunks import BETA, CHUNK, LOG, START, VECTORS
from pallas_kernels.linear.kernel_parts import PARTS, Mode, Place, Share
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_rows,
    decay,
    index,
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.linear.sm90.inverses import invert
from pallas_kernels.linear.sm90.pipeline import CLUSTER, WARPGROUPS, cta_index
from pallas_kernels.linear.sm90.scan import ScanInputs, ScanMemory, scan_cta
from pallas_kernels.mosaic import flags
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch

# Vectors of a chunk that X beta and P need: LOG to BETA.
_USED = VECTORS * CHUNK - LOG


class ForwardResults(NamedTuple):
    """What the launch writes.

    Attributes:
      o: bfloat16 ``[B, T, N, 128]``.
      last: the last state, transposed, float32 ``[B, N, 128, 128]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
      p: P, the same shape.
    """

    o: Any
    last: Any
    x: Any
    p: Any


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      scan: of the scan; each warpgroup that computes X and P uses one stage of its matrices.
      vectors: ``[WARPGROUPS * 2, 192]``: of this chunk and the next one of each warpgroup.
      a: float16 A of each warpgroup.
      x: float16 X of each warpgroup.
      arrived: by warpgroup: q, k and the vectors have been copied.
    """

    scan: ScanMemory
    vectors: Any
    a: Any
    x: Any
    arrived: Any


def spare_clusters(chains: int) -> int:
    """Number of clusters that scans of this many heads leave free on the GPU that is traced for."""
    return num_sms() // CLUSTER - chains * PARTS // CLUSTER


def forward_with_inverses(given: ScanInputs, scale: float) -> ForwardResults:
    """Runs the scan for outputs, and all that it needs.

    Args:
      given: its inputs; X and P are None.
      scale: of q k.
    """
    batch, heads, chunks, _ = given.vectors.shape
    groups, chains = heads // given.k.shape[2], batch * heads * PARTS // CLUSTER
    spare = max(1, spare_clusters(batch * heads))

    def kernel(given: ScanInputs, results: ForwardResults, memory: _Memory, counters: Any) -> None:
        cluster = lax.axis_index("cluster_index")

        # These clusters come first in the grid, so that they run when a scan waits for them.
        @pl.when(cluster < spare)
        def _():
            first = cta_index(cluster) * WARPGROUPS + lax.axis_index(WARPGROUP_AXIS)
            share = Share(first, spare * CLUSTER * WARPGROUPS, batch, heads, chunks)
            _compute_chunks(share, groups, scale, given, results, memory, counters)

        @pl.when(cluster >= spare)
        def _():
            chain, clusters = cluster - spare, heads * PARTS // CLUSTER
            b = lax.div(chain, i32(clusters))
            place = Place.of(cta_index(lax.rem(chain, i32(clusters))), PARTS, groups, b)

            def wait(step):
                flags.wait_for(counters, step, i32(batch * heads), by_tma=True)

            inputs = given._replace(x=results.x, p=results.p)
            scan_cta(
                Mode.OUTPUT, scale, place, inputs, results.o, None, results.last, memory.scan, wait
            )

    square = jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, CHUNK), jnp.bfloat16)
    # Zeros that are no constant: a copy of one may not be shared by calls, nor kept for one.
    counters = (given.vectors[0, 0, :, START] < 0).astype(jnp.int32)
    return launch(
        kernel,
        "gated_delta_rule_forward",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"cluster_index": spare + chains},
        warpgroups=WARPGROUPS,
        cluster=CLUSTER,
        inputs=given,
        results=ForwardResults(
            jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(given.start.shape, jnp.float32),
            square,
            square,
        ),
        memory=_Memory(
            scan=ScanMemory.of(Mode.OUTPUT, scores=False),
            vectors=numbers(WARPGROUPS * 2, _USED),
            a=matrix(WARPGROUPS, CHUNK, CHUNK, dtype=jnp.float16),
            x=matrix(WARPGROUPS, CHUNK, CHUNK, dtype=jnp.float16),
            arrived=plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS),
        ),
        counter=counters,
    )


def _compute_chunks(
    share: Share,
    groups: int,
    scale: float,
    given: ScanInputs,
    results: ForwardResults,
    memory: _Memory,
    counters: Any,
) -> None:
    """A warpgroup's share of X beta and P.

    The next chunk is copied during the inversion; a chunk is counted during the next one, when its
    results have been copied.
    """
    own, steps = lax.axis_index(WARPGROUP_AXIS), share.steps
    q, k, p, scaled = (
        ref.at[own] for ref in (memory.scan.q, memory.scan.k, memory.scan.p, memory.scan.x)
    )
    a, x, arrived = memory.a.at[own], memory.x.at[own], memory.arrived.at[own]

    def place_of(step):
        """Batch index, head, and tokens."""
        b, h, n = share.place(step)
        return b, h, pl.ds(n * CHUNK, CHUNK)

    def vectors_of(step):
        return memory.vectors.at[own * 2 + lax.rem(step, i32(2))]

    def start(step):
        b, h, tokens = place_of(step)
        key_head = lax.div(h, i32(groups))
        vectors = given.vectors.at[b, h, share.place(step)[2], pl.ds(LOG, _USED)]
        plgpu.copy_gmem_to_smem(given.k.at[b, tokens, key_head], k, arrived)
        plgpu.copy_gmem_to_smem(vectors, vectors_of(step), arrived)
        plgpu.copy_gmem_to_smem(given.q.at[b, tokens, key_head], q, arrived)

    def count(step):
        flags.count(counters, share.place(step)[2], by_tma=True)

    pl.when(steps > 0)(lambda: start(i32(0)))

    @pl.loop(0, steps)
    def _(step):
        vectors = vectors_of(step)
        plgpu.barrier_wait(arrived)

        def products(kk_acc, qk_acc):
            plgpu.wgmma(kk_acc, k, transposed(k))
            plgpu.wgmma(qk_acc, q, transposed(k))
            decays = decay(vectors, LOG)
            kk = plgpu.wgmma_accumulator_load(kk_acc, wait_n=1)
            below = jnp.where(index(1) < index(0), decays, 0.0)
            a[...] = (kk * below * along_rows(vectors, BETA - LOG)).astype(jnp.float16)
            scores = plgpu.wgmma_accumulator_load(qk_acc) * (decays * scale)
            # Nothing reads q and k any more, nor the last chunk's results.
            plgpu.wait_smem_to_gmem(0)
            pl.when(step > 0)(lambda: count(step - 1))
            pl.when(step + 1 < steps)(lambda: start(step + 1))
            p[...] = scores.astype(jnp.bfloat16)

        pl.run_scoped(products, accumulator(), accumulator())
        invert(a, x, vectors, scaled)
        proxy_fence()
        warpgroup_barrier()
        b, h, tokens = place_of(step)
        plgpu.copy_smem_to_gmem(scaled, results.x.at[b, h, tokens])
        plgpu.copy_smem_to_gmem(p, results.p.at[b, h, tokens])

    plgpu.wait_smem_to_gmem(0)
    pl.when(steps > 0)(lambda: count(steps - 1))
