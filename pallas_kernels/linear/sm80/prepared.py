"""What does not depend on the state, of every chunk in parallel: P and ``X beta``.

``P = decay q k^T``, and ``X = (I + A)^-1`` with ``A_ri = beta_r decay(i, r) k_r k_i`` below
the diagonal. A CTA of one warpgroup has a chunk of a head. Both products have the same right
operand. P takes more memory traffic this way and less shared-memory traffic in three scans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import inverse
from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, OUT, VECTORS
from pallas_kernels.linear.sm80.chunk_operands import (
    Vectors,
    along_rows,
    below_diagonal,
    loaded_left,
    loaded_right,
    matrix,
    numbers,
    tokens_of,
    transposed,
    widened,
    zeros,
)
from pallas_kernels.mosaic import fragments, transfers
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm80 import instructions

# A copy of float32 is a multiple of 128 elements: the vectors but for INTO.
FIRST, COPIED = OUT, (VECTORS - 1) * CHUNK


class _Inputs(NamedTuple):
    q: Any
    k: Any
    vectors: Any


class Chunks(NamedTuple):
    """Of all chunks, bfloat16 ``[B, N, T, 64]``.

    Attributes:
      p: ``decay q k^T``, lower triangular.
      x: ``X beta``, lower triangular.
    """

    p: Any
    x: Any


class ChunkMemory(NamedTuple):
    """Shared memory for a chunk.

    Attributes:
      q: ``[64, 128]``.
      k: ``[64, 128]``.
      a: float16 A.
      x: float16 X.
      p: P.
      scaled: ``X beta``.
    """

    q: Any
    k: Any
    a: Any
    x: Any
    p: Any
    scaled: Any


class _Memory(NamedTuple):
    """Shared memory of a launch of their own.

    Attributes:
      q: ``[64, 128]``; later P and ``X beta``.
      k: ``[64, 128]``.
      vectors: of the chunk, from :data:`FIRST` on.
      a: float16 A.
      x: float16 X.
    """

    q: Any
    k: Any
    vectors: Any
    a: Any
    x: Any


def compute(memory: ChunkMemory, vectors: Any, start_next: Callable[[], None]) -> None:
    """P and ``X beta`` of a chunk, from its q and k, in shared memory. Ends with a barrier.

    Args:
      memory: of the warpgroup.
      vectors: of the chunk, from :data:`FIRST` on, in shared memory.
      start_next: called when q and k have been read.
    """
    key_products, scores = zeros(), zeros()
    for first in range(0, HEAD_DIM, CHUNK):
        part = pl.ds(first, CHUNK)
        right = loaded_right(transposed(memory.k.at[:, part]))
        key_products = plgpu.mma(key_products, loaded_left(memory.k.at[:, part]), right)
        scores = plgpu.mma(scores, loaded_left(memory.q.at[:, part]), right)
    given = Vectors.shared(vectors, FIRST)
    decay = given.decay()
    a = below_diagonal(key_products * decay) * along_rows(given.rows(BETA))
    memory.a[...] = a.astype(jnp.float16)
    p = (scores * decay).astype(jnp.bfloat16)
    fragments.warpgroup_barrier()  # A is complete, and q has been read.
    start_next()
    memory.p[...] = p
    inverse.invert(memory.a, memory.x)
    x = widened(loaded_left(memory.x)) * given.columns(BETA)
    memory.scaled[...] = x.astype(jnp.bfloat16)
    fragments.warpgroup_barrier()


def chunks_of(q: jax.Array, k: jax.Array, vectors: jax.Array) -> Chunks:
    """P and ``X beta`` of all chunks.

    Args:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      vectors: :func:`pallas_kernels.linear.chunks.chunk_vectors`.
    """
    batch, heads, chunks, _ = vectors.shape
    groups = heads // k.shape[2]

    def kernel(given: _Inputs, results: Chunks, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        tokens, key_head = tokens_of(n), lax.div(h, i32(groups))
        instructions.copy(given.k.at[b, tokens, key_head], memory.k)
        instructions.copy(given.q.at[b, tokens, key_head], memory.q)
        instructions.copy(given.vectors.at[b, h, n, pl.ds(FIRST, COPIED)], memory.vectors)
        instructions.wait_for_copies()
        p, scaled = (memory.q.at[:, pl.ds(first, CHUNK)] for first in (0, CHUNK))
        own = ChunkMemory(memory.q, memory.k, memory.a, memory.x, p, scaled)
        compute(own, memory.vectors, lambda: None)
        transfers.store_matrix(p, results.p.at[b, h, tokens])
        transfers.store_matrix(scaled, results.x.at[b, h, tokens])

    made: Any = jax.ShapeDtypeStruct((batch, heads, chunks * CHUNK, CHUNK), jnp.bfloat16)
    memory = _Memory(
        q=matrix(CHUNK, HEAD_DIM),
        k=matrix(CHUNK, HEAD_DIM),
        vectors=numbers(COPIED),
        a=matrix(CHUNK, CHUNK, dtype=jnp.float16),
        x=matrix(CHUNK, CHUNK, dtype=jnp.float16),
    )
    return launch(
        kernel,
        "gated_delta_rule_chunks",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"chunk": chunks, "head": heads, "batch": batch},
        warpgroups=1,
        inputs=_Inputs(q, k, vectors),
        results=Chunks(made, made),
        memory=memory,
    )
