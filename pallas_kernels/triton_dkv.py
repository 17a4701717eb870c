"""dK and dV of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, key head, key tile). It walks the query tiles inside its bounds for
every query head that shares the key head, so that grouped queries need no second sum, and adds to
the incoming dK and dV, in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, half_shape
from pallas_kernels.scores import LOG2_E, log2_factor, products_slope, raw_scores
from pallas_kernels.spec import AttentionSpec, Tokens
from pallas_kernels.triton_configs import TritonConfig
from pallas_kernels.triton_operands import Known, Operands
from pallas_kernels.triton_tiles import (
    both,
    column,
    half,
    in_range,
    lanes_in,
    load,
    over_tiles,
    row,
    score_mask,
)


def backward_dkv(
    qdo: Pair,
    kv: Pair,
    stats: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    dkv: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    config: TritonConfig,
    interpret: bool = False,
) -> jax.Array:
    """The dK, dV half of :class:`pallas_kernels.local_attention.Backward`.

    ``bounds`` are :func:`pallas_kernels.bounds.key_bounds` for the config's tiles.
    """
    known = Known.of("keys", half_shape(qdo), half_shape(kv), spec, config, interpret)
    q_length, groups, block_kv, lanes = known.q_length, known.groups, config.block_kv, known.lanes
    operands = Operands(known)
    operands.add_tokens(bounds, q_tokens, kv_tokens, q_block=None, kv_block=block_kv)
    operands.add_pair(qdo, (None, q_length, groups, lanes), lambda b, h, j: (b, 0, h, 0))
    operands.add_pair(kv, (None, block_kv, None, lanes), lambda b, h, j: (b, j, h, 0))
    operands.add_pair(stats, (None, groups, q_length), lambda b, h, j: (b, h, 0))
    # dK and dV leave packed, as they travel.
    dkv_block = operands.block((2, None, block_kv, None, lanes), lambda b, h, j: (0, b, j, h, 0))
    if dkv is not None:
        operands.add(dkv, dkv_block, result=0)
    return operands.call(_kernel, "burst_dkv", [((2, *half_shape(kv)), jnp.float32, dkv_block)])[0]


def _kernel(known: Known, table, tokens, q_ref, do_ref, k_ref, v_ref, lse_ref, delta_ref, *refs):
    *dkv_in_ref, dkv_ref = refs
    spec, interpret = known.spec, known.interpret
    block_q, block_kv = known.config.block_q, known.config.block_kv
    factor = log2_factor(spec)

    lane_ok = lanes_in(known.lanes, known.dim)
    key_ok = in_range(known.programs.tile() * block_kv, block_kv, known.kv_length)
    kv_tile_ok = both(key_ok, lane_ok)
    k, v = load(k_ref.at[:, :], kv_tile_ok), load(v_ref.at[:, :], kv_tile_ok)
    k_pos, k_seg = tokens.keys(slice(None), key_ok)

    def query_tile(masked, h, i, sums):
        # Scores are transposed, [keys, queries]: dK and dV need no transposed operand.
        dk, dv = sums
        rows = pl.ds(i * block_q, block_q)
        row_ok = in_range(i * block_q, block_q, known.q_length) if masked else None
        q = load(q_ref.at[rows, h, :], both(row_ok, lane_ok))
        do = load(do_ref.at[rows, h, :], both(row_ok, lane_ok))
        shift = load(lse_ref.at[h, rows], row_ok) * -LOG2_E
        # Both products before the exponentials: the tensor cores work on while those run.
        scores = raw_scores(spec, triton_lowering.dot(k, q.T))
        dp = triton_lowering.dot(v, do.T)
        p = triton_lowering.exp2_affine(scores, factor, shift[None, :], interpret=interpret)
        if masked:
            q_pos, q_seg = tokens.queries(rows, row_ok)
            inside = row(row_ok) if key_ok is None else both(key_ok, row_ok)
            ok = score_mask(spec, q_pos[None, :], k_pos[:, None], row(q_seg), column(k_seg), inside)
            if ok is not None:
                p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
        delta = load(delta_ref.at[h, rows], row_ok)
        ds = products_slope(spec, scores, p * (dp - delta[None, :]))
        dv += triton_lowering.dot(p.astype(do.dtype), do)
        return dk + triton_lowering.dot(ds.astype(q.dtype), q), dv

    dk, dv = jnp.zeros(k_ref.shape, jnp.float32), jnp.zeros(k_ref.shape, jnp.float32)
    if dkv_in_ref:
        # Not added at the end like dK, whose scale comes last: both at once cost registers there.
        dv = load(half(dkv_in_ref[0], 1), kv_tile_ok)
    dk, dv = over_tiles(table, query_tile, (dk, dv), heads=known.groups)
    triton_lowering.store(half(dkv_ref, 1), dv, mask=kv_tile_ok)
    dk *= spec.scale
    if dkv_in_ref:
        dk += load(half(dkv_in_ref[0], 0), kv_tile_ok)
    triton_lowering.store(half(dkv_ref, 0), dk, mask=kv_tile_ok)
