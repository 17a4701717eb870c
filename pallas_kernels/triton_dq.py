"""dQ of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, query head, query tile); it walks the key tiles inside its bounds and
adds ``scale ds k`` to the incoming dQ, in place.
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


def backward_dq(
    qdo: Pair,
    kv: Pair,
    stats: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    dq: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    config: TritonConfig,
    interpret: bool = False,
) -> jax.Array:
    """The dQ half of :class:`pallas_kernels.local_attention.Backward`.

    ``bounds`` are :func:`pallas_kernels.bounds.query_bounds` for the config's tiles.
    """
    batch, q_length, heads, dim = half_shape(qdo)
    kv_length, kv_heads = half_shape(kv)[1:3]
    groups = heads // kv_heads
    block_q, lanes = config.block_q, padded_lanes(dim)

    def query_tile(b, h, i):
        return b, i, h, 0

    q_block = pl.BlockSpec((None, block_q, None, lanes), query_tile)
    operands, in_specs = token_blocks(
        bounds, q_tokens, kv_tokens, q_block=block_q, kv_block=None, tile=lambda b, h, i: (b, i)
    )
    for pair, block, index in (
        (qdo, (None, block_q, None, lanes), query_tile),
        (kv, (None, kv_length, None, lanes), lambda b, h, i: (b, 0, h // groups, 0)),
        (stats, (None, None, block_q), lambda b, h, i: (b, h, i)),
    ):
        pair_operands, pair_specs = pair_blocks(pair, block, index)
        operands += pair_operands
        in_specs += pair_specs
    aliases = {}
    if dq is not None:
        aliases = {len(operands): 0}
        operands.append(dq)
        in_specs.append(q_block)
    kernel = functools.partial(
        _kernel,
        spec=spec,
        config=config,
        q_length=q_length,
        kv_length=kv_length,
        dim=dim,
        segments=q_tokens.segment_ids is not None,
        added=dq is not None,
    )
    (result,) = triton_lowering.call(
        kernel,
        *operands,
        name="burst_dq",
        grid=(batch, heads, -(-q_length // block_q)),
        in_specs=in_specs,
        out_specs=[q_block],
        out_shape=[float32_like(operands, (batch, q_length, heads, dim))],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        input_output_aliases=aliases,
        interpret=interpret,
    )
    return result


def _kernel(*refs, spec, config, q_length, kv_length, dim, segments, added):
    table, tokens, refs = split_tokens(refs, segments)
    q_ref, do_ref, k_ref, v_ref, lse_ref, delta_ref, *refs = refs
    *dq_in_ref, dq_ref = refs
    block_q, block_kv = config.block_q, config.block_kv

    lane_ok = lanes_in(q_ref.shape[-1], dim)
    row_ok = in_range(pl.program_id(2) * block_q, block_q, q_length)
    q_tile_ok = both(row_ok, lane_ok)
    q, do = load(q_ref.at[:, :], q_tile_ok), load(do_ref.at[:, :], q_tile_ok)
    lse_log2 = load(lse_ref.at[:], row_ok) * LOG2_E
    delta = load(delta_ref.at[:], row_ok)
    q_pos, q_seg = tokens.queries(slice(None), row_ok)

    def key_tile(masked, j, dq):
        keys = pl.ds(j * block_kv, block_kv)
        key_ok = in_range(j * block_kv, block_kv, kv_length) if masked else None
        k = load(k_ref.at[keys, :], both(key_ok, lane_ok))
        v = load(v_ref.at[keys, :], both(key_ok, lane_ok))
        scores = scaled_log2(spec, triton_lowering.dot(q, k.T))
        p = jnp.exp2(scores - lse_log2[:, None])
        if masked:
            k_pos, k_seg = tokens.keys(keys, key_ok)
            inside = None if key_ok is None else key_ok[None, :]
            ok = score_mask(spec, q_pos[:, None], k_pos[None, :], column(q_seg), row(k_seg), inside)
            if ok is not None:
                p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
        dp = triton_lowering.dot(do, v.T)
        ds = products_slope(spec, scores, p * (dp - delta[:, None]))
        return dq + triton_lowering.dot(ds.astype(k.dtype), k)

    first, full_first, full_end, end = (table[c] for c in range(4))
    dq = jnp.zeros(q_ref.shape, jnp.float32)
    dq = lax.fori_loop(first, full_first, functools.partial(key_tile, True), dq)
    dq = lax.fori_loop(full_first, full_end, functools.partial(key_tile, False), dq)
    dq = lax.fori_loop(full_end, end, functools.partial(key_tile, True), dq)
    dq *= spec.scale
    if added:
        dq += load(dq_in_ref[0].at[:, :], q_tile_ok)
    triton_lowering.store(dq_ref.at[:, :], dq, mask=q_tile_ok)
