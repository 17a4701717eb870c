"""``X beta`` of every chunk, in parallel: it does not depend on the state.

``X = (I + A)^-1``, ``A_ri = beta_r decay(i, r) k_r k_i`` below the diagonal. A CTA of one warpgroup
has a chunk of a head.
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
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm90.instructions import TILE


class _Inputs(NamedTuple):
    k: Any
    vectors: Any
    first: Any


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      k: ``[64, 128]``.
      vectors: of the chunk, from LOG on.
      a: float16 A.
      x: float16 X.
      scaled: X beta.
      arrived: k and the vectors have been copied.
    """

    k: Any
    vectors: Any
    a: Any
    x: Any
    scaled: Any
    arrived: Any


def invert(a: Any, x: Any, vectors: Any, scaled: Any) -> None:
    """Writes X beta.

    Args:
      a: float16 A, of which each thread has written its part.
      x: for float16 X.
      vectors: of the chunk, from LOG on.
      scaled: for X beta.
    """
    warpgroup_barrier()  # A is complete.
    inverse.invert(a, x)
    inverses = plgpu.load(x, layout=TILE).astype(jnp.float32)
    scaled[...] = (inverses * along_columns(vectors, BETA - LOG)).astype(jnp.bfloat16)


def inverses(
    k: jax.Array,
    vectors: jax.Array,
    first: jax.Array | None = None,
    later: jax.Array | None = None,
) -> jax.Array:
    """X beta, bfloat16 ``[B, N, T, 64]``.

    Args:
      k: bfloat16 ``[B, T, K, 128]``.
      vectors: :func:`pallas_kernels.linear.chunks.chunk_vectors`.
      first: chunks before it are left out, int32 ``[B, N]``; None is 0.
      later: X beta from ``first`` on, to which the chunks that were left out are added in place.
    """
    batch, heads, chunks, _ = vectors.shape
    groups = heads // k.shape[2]

    def kernel(given: _Inputs, result: Any, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        if given.first is None:
            invert_chunk(n, h, b, given, result, memory)
        else:
            left_out = n < given.first[b, h]
            has = left_out if later is not None else jnp.logical_not(left_out)
            pl.when(has)(lambda: invert_chunk(n, h, b, given, result, memory))

    def invert_chunk(n: Any, h: Any, b: Any, given: _Inputs, result: Any, memory: _Memory) -> None:
        tokens, key_head = pl.ds(n * CHUNK, CHUNK), lax.div(h, i32(groups))
        for source, target in (
            (given.k.at[b, tokens, key_head], memory.k),
            (given.vectors.at[b, h, n, pl.ds(LOG, BETA + CHUNK - LOG)], memory.vectors),
        ):
            plgpu.copy_gmem_to_smem(source, target, memory.arrived)
        plgpu.barrier_wait(memory.arrived)

        def product(acc):
            plgpu.wgmma(acc, memory.k, transposed(memory.k))
            decays = decay(memory.vectors, LOG, strict=True)
            factors = decays * along_rows(memory.vectors, BETA - LOG)
            a = plgpu.wgmma_accumulator_load(acc) * factors
            memory.a[...] = a.astype(jnp.float16)

        pl.run_scoped(product, accumulator())
        invert(memory.a, memory.x, memory.vectors, memory.scaled)
        proxy_fence()
        warpgroup_barrier()
        plgpu.copy_smem_to_gmem(memory.scaled, result.at[b, h, tokens])
        plgpu.wait_smem_to_gmem(0)

    x: Any = jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, CHUNK), jnp.bfloat16)
    memory = _Memory(
        k=matrix(CHUNK, HEAD_DIM),
        vectors=numbers(VECTORS * CHUNK - LOG),
        a=matrix(CHUNK, CHUNK, dtype=jnp.float16),
        x=matrix(CHUNK, CHUNK, dtype=jnp.float16),
        scaled=matrix(CHUNK, CHUNK),
        arrived=plgpu.Barrier(num_arrivals=2),
    )
    return launch(
        kernel,
        "gated_delta_rule_inverses",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "chunk": chunks, "head": heads},
        warpgroups=1,
        inputs=_Inputs(k, vectors, first),
        results=x if later is None else later,
        memory=memory,
    )
