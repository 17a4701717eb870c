"""The states that arrive at runs of tokens, from the maps of all of them, in one launch.

A CTA of one warpgroup has 64 rows of a head's transposed state, and applies one map after the
other: ``S' = S M + U``. Float32 operands of the products are three bfloat16 numbers each: of their
nine products the six that float32 resolves are added up, from the smallest on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM
from pallas_kernels.linear.kernel_parts import PARTS
from pallas_kernels.linear.sm90.chunk_operands import accumulator, matrix
from pallas_kernels.mosaic.fragments import constant, i32, proxy_fence, warpgroup_barrier
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm90.instructions import TILE

_PIECES = 3
# Which pieces of a state and of M are multiplied, the smallest products first.
_PRODUCTS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


class _Inputs(NamedTuple):
    rows: Any
    order: Any
    start: Any


def composed(
    rows: jax.Array, order: jax.Array, wanted: tuple[int, int], start: jax.Array | None = None
) -> jax.Array:
    """What arrives at some runs: all maps before each, applied to the first state in order.

    Args:
      rows: of the maps of all runs, those of U and below them those of M, float32
        ``[n, B, count, N, 2 * 128, 128]``.
      order: int32 ``[runs, 4]``, of each run of a sequence, in order, at least two: its place on
        the first and on the third axis of ``rows``, and on those of the result, -1 for a run that
        is not wanted. The last one's map is not read.
      wanted: lengths of the result's first and third axis.
      start: the first state, transposed, float32 ``[B, N, 128, 128]``; None is zeros.

    Returns:
      Float32 ``[wanted, B, wanted, N, 128, 128]``.
    """
    _, batch, _, heads, *_ = rows.shape
    runs = order.shape[0]

    def kernel(given: _Inputs, result: Any, pieces: Any) -> None:
        b, h, part = (lax.axis_index(name) for name in ("batch", "head", "part"))
        own = pl.ds(part * CHUNK, CHUNK)

        def put(index: Any, state: jax.Array) -> None:
            device, column = given.order[index, 2], given.order[index, 3]

            @pl.when(device >= 0)
            def _():
                result[device, b, column, h, own] = state

        def numbers(index: Any, rows: Any) -> jax.Array:
            device, column = given.order[index, 0], given.order[index, 1]
            source = given.rows.at[device, b, column, h, rows]
            return plgpu.load(source, layout=TILE, optimized=False)

        def step(index: Any, state: jax.Array) -> jax.Array:
            put(index, state)
            for half in range(PARTS):
                of_half = numbers(index, pl.ds(HEAD_DIM + half * CHUNK, CHUNK))
                for i, piece in enumerate(_split(of_half)):
                    pieces.at[i].at[pl.ds(half * CHUNK, CHUNK)][...] = piece
            proxy_fence()
            warpgroup_barrier()

            def products(acc: Any) -> jax.Array:
                # All are there before a product reads the first one's registers.
                left = lax.optimization_barrier(_split(state))
                for i, j in _PRODUCTS:
                    plgpu.wgmma(acc, left[i], pieces.at[j])
                return plgpu.wgmma_accumulator_load(acc)

            product = pl.run_scoped(products, accumulator(HEAD_DIM))
            warpgroup_barrier()  # All threads' products have read M.
            return product + numbers(index, own)

        if given.start is None:
            put(i32(0), constant((CHUNK, HEAD_DIM), 0.0, TILE))
            state, first = numbers(i32(0), own), 1
        else:
            state, first = plgpu.load(given.start.at[b, h, own], layout=TILE, optimized=False), 0
        state = lax.fori_loop(i32(first), i32(runs - 1), step, state)
        put(i32(runs - 1), state)

    shape = wanted[0], batch, wanted[1], heads, HEAD_DIM, HEAD_DIM
    result: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    return launch(
        kernel,
        "gated_delta_rule_composition",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "head": heads, "part": PARTS},
        warpgroups=1,
        inputs=_Inputs(rows, order, start),
        results=result,
        memory=matrix(_PIECES, HEAD_DIM, HEAD_DIM),
    )


def _split(x: jax.Array) -> tuple[jax.Array, ...]:
    """Three bfloat16 numbers of each float32 one, whose sum it is."""
    pieces = []
    for _ in range(_PIECES - 1):
        # Rounded as an integer: a conversion to bfloat16 and back has an eighth of the rate.
        bits = lax.bitcast_convert_type(x, jnp.int32)
        rounded = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
        pieces.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    pieces.append(x.astype(jnp.bfloat16))
    return tuple(pieces)
