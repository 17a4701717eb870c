"""What the scans need of every chunk and does not depend on the state, in parallel.

X beta, where ``X = (I + A)^-1``, A_ri = beta_r decay(i, r) k_r k_i below the diagonal; and
``P = scale decay q k^T``. A CTA of one warpgroup has a chunk of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import inverse
from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, LOG, VECTORS
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_columns,
    along_rows,
    decay,
    index,
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm90.instructions import TILE

# Where X beta and P are in the result.
X_LANES, P_LANES = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)


class _Inputs(NamedTuple):
    q: Any
    k: Any
    vectors: Any


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      q: ``[64, 128]``; later X beta and P.
      k: ``[64, 128]``.
      vectors: of the chunk, from LOG on.
      a: float16 A.
      x: float16 X.
      arrived: q, k and the vectors have been copied.
    """

    q: Any
    k: Any
    vectors: Any
    a: Any
    x: Any
    arrived: Any


def prepare(q: jax.Array, k: jax.Array, vectors: jax.Array, scale: float) -> jax.Array:
    """X beta and P, one next to the other, bfloat16 ``[B, N, T, 128]``.

    Args:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same shape.
      vectors: :func:`pallas_kernels.linear.chunks.chunk_vectors`.
      scale: of q k.
    """
    batch, heads, chunks, _ = vectors.shape
    groups = heads // k.shape[2]

    def kernel(given: _Inputs, result: Any, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        tokens, key_head = pl.ds(n * CHUNK, CHUNK), lax.div(h, i32(groups))
        for source, target in (
            (given.k.at[b, tokens, key_head], memory.k),
            (given.vectors.at[b, h, n, pl.ds(LOG, BETA + CHUNK - LOG)], memory.vectors),
            (given.q.at[b, tokens, key_head], memory.q),
        ):
            plgpu.copy_gmem_to_smem(source, target, memory.arrived)
        plgpu.barrier_wait(memory.arrived)

        def products(kk_acc, qk_acc):
            plgpu.wgmma(kk_acc, memory.k, transposed(memory.k))
            plgpu.wgmma(qk_acc, memory.q, transposed(memory.k))
            decays = decay(memory.vectors, LOG)
            kk = plgpu.wgmma_accumulator_load(kk_acc, wait_n=1)
            below = jnp.where(index(1) < index(0), decays, 0.0)
            a = kk * below * along_rows(memory.vectors, BETA - LOG)
            memory.a[...] = a.astype(jnp.float16)
            p = plgpu.wgmma_accumulator_load(qk_acc) * (decays * scale)
            warpgroup_barrier()  # A is complete, and nothing reads q any more.
            memory.q.at[:, P_LANES][...] = p.astype(jnp.bfloat16)

        pl.run_scoped(products, accumulator(), accumulator())
        inverse.invert(memory.a, memory.x)
        x = plgpu.load(memory.x, layout=TILE).astype(jnp.float32)
        x = x * along_columns(memory.vectors, BETA - LOG)
        memory.q.at[:, X_LANES][...] = x.astype(jnp.bfloat16)
        proxy_fence()
        warpgroup_barrier()
        plgpu.copy_smem_to_gmem(memory.q, result.at[b, h, tokens])
        plgpu.wait_smem_to_gmem(0)

    memory = _Memory(
        q=matrix(CHUNK, HEAD_DIM),
        k=matrix(CHUNK, HEAD_DIM),
        vectors=numbers(VECTORS * CHUNK - LOG),
        a=matrix(CHUNK, CHUNK, dtype=jnp.float16),
        x=matrix(CHUNK, CHUNK, dtype=jnp.float16),
        arrived=plgpu.Barrier(num_arrivals=3),
    )
    return launch(
        kernel,
        "gated_delta_rule_prepare",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"chunk": chunks, "head": heads, "batch": batch},
        warpgroups=1,
        inputs=_Inputs(q, k, vectors),
        results=jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, 2 * CHUNK), jnp.bfloat16),
        memory=memory,
    )
