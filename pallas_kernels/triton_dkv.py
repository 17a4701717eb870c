"""dK and dV of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, key head, key tile). It walks the query tiles inside its bounds for
every query head that shares the key head, so that grouped queries need no second sum, and adds to
the incoming dK and dV, in place.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, half_shape
from pallas_kernels.spec import AttentionSpec, Tokens
from pallas_kernels.triton_configs import TritonConfig
from pallas_kernels.triton_tiles import (
    LOG2_E,
    both,
    column,
    float32_like,
    in_range,
    lanes_in,
    load,
    padded_lanes,
    pair_blocks,
    products_slope,
    row,
    scaled_log2,
    score_mask,
    split_tokens,
    token_blocks,
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
    batch, q_length, heads, dim = half_shape(qdo)
    kv_length, kv_heads = half_shape(kv)[1:3]
    groups = heads // kv_heads
    block_kv, lanes = config.block_kv, padded_lanes(dim)

    def key_tile(b, h, j):
        return b, j, h, 0

    # dK and dV leave packed, as they travel.
    dkv_block = pl.BlockSpec((2, None, block_kv, None, lanes), lambda b, h, j: (0, b, j, h, 0))
    operands, in_specs = token_blocks(
        bounds, q_tokens, kv_tokens, q_block=None, kv_block=block_kv, tile=lambda b, h, j: (b, j)
    )
    for pair, block, index in (
        (qdo, (None, q_length, groups, lanes), lambda b, h, j: (b, 0, h, 0)),
        (kv, (None, block_kv, None, lanes), key_tile),
        (stats, (None, groups, q_length), lambda b, h, j: (b, h, 0)),
    ):
        pair_operands, pair_specs = pair_blocks(pair, block, index)
        operands += pair_operands
        in_specs += pair_specs
    aliases = {}
    if dkv is not None:
        aliases = {len(operands): 0}
        operands.append(dkv)
        in_specs.append(dkv_block)
    kernel = functools.partial(
        _kernel,
        spec=spec,
        config=config,
        q_length=q_length,
        kv_length=kv_length,
        groups=groups,
        dim=dim,
        segments=q_tokens.segment_ids is not None,
        added=dkv is not None,
    )
    (result,) = triton_lowering.call(
        kernel,
        *operands,
        name="burst_dkv",
        grid=(batch, kv_heads, -(-kv_length // block_kv)),
        in_specs=in_specs,
        out_specs=[dkv_block],
        out_shape=[float32_like(operands, (2, batch, kv_length, kv_heads, dim))],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        input_output_aliases=aliases,
        interpret=interpret,
    )
    return result


def _kernel(*refs, spec, config, q_length, kv_length, groups, dim, segments, added):
    table, tokens, refs = split_tokens(refs, segments)
    q_ref, do_ref, k_ref, v_ref, lse_ref, delta_ref, *refs = refs
    *dkv_in_ref, dkv_ref = refs
    block_q, block_kv = config.block_q, config.block_kv

    lane_ok = lanes_in(k_ref.shape[-1], dim)
    key_ok = in_range(pl.program_id(2) * block_kv, block_kv, kv_length)
    kv_tile_ok = both(key_ok, lane_ok)
    k, v = load(k_ref.at[:, :], kv_tile_ok), load(v_ref.at[:, :], kv_tile_ok)
    k_pos, k_seg = tokens.keys(slice(None), key_ok)
    first, full_first, full_end, end = (table[c] for c in range(4))

    def query_head(h, sums):
        def query_tile(masked, i, sums):
            # Scores are transposed, [keys, queries]: dK and dV need no transposed operand.
            dk, dv = sums
            rows = pl.ds(i * block_q, block_q)
            row_ok = in_range(i * block_q, block_q, q_length) if masked else None
            q = load(q_ref.at[rows, h, :], both(row_ok, lane_ok))
            do = load(do_ref.at[rows, h, :], both(row_ok, lane_ok))
            lse_log2 = load(lse_ref.at[h, rows], row_ok) * LOG2_E
            delta = load(delta_ref.at[h, rows], row_ok)
            scores = scaled_log2(spec, triton_lowering.dot(k, q.T))
            p = jnp.exp2(scores - lse_log2[None, :])
            if masked:
                q_pos, q_seg = tokens.queries(rows, row_ok)
                inside = both(key_ok, row_ok)
                if row_ok is not None and key_ok is None:
                    inside = row_ok[None, :]
                ok = score_mask(
                    spec, q_pos[None, :], k_pos[:, None], row(q_seg), column(k_seg), inside
                )
                if ok is not None:
                    p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
            dv += triton_lowering.dot(p.astype(do.dtype), do)
            dp = triton_lowering.dot(v, do.T)
            ds = products_slope(spec, scores, p * (dp - delta[None, :]))
            return dk + triton_lowering.dot(ds.astype(q.dtype), q), dv

        sums = lax.fori_loop(first, full_first, functools.partial(query_tile, True), sums)
        sums = lax.fori_loop(full_first, full_end, functools.partial(query_tile, False), sums)
        return lax.fori_loop(full_end, end, functools.partial(query_tile, True), sums)

    zeros = jnp.zeros(k_ref.shape, jnp.float32)
    if groups == 1:
        dk, dv = query_head(jnp.int32(0), (zeros, zeros))
    else:
        head_0, heads = jnp.int32(0), jnp.int32(groups)
        dk, dv = lax.fori_loop(head_0, heads, query_head, (zeros, zeros))
    for half, total in ((jnp.int32(0), dk * spec.scale), (jnp.int32(1), dv)):
        if added:
            total += load(dkv_in_ref[0].at[half, :, :], kv_tile_ok)
        triton_lowering.store(dkv_ref.at[half, :, :], total, mask=kv_tile_ok)
