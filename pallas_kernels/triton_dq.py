"""dQ of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, query head, query tile); it walks the key tiles inside its bounds and
adds ``scale ds k`` to the incoming dQ, in place.
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
    in_range,
    lanes_in,
    load,
    over_tiles,
    row,
    score_mask,
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
    known = Known.of("queries", half_shape(qdo), half_shape(kv), spec, config, interpret)
    block_q, lanes, groups = config.block_q, known.lanes, known.groups
    operands = Operands(known)
    rows, of_rows = (None, block_q, None, lanes), lambda b, h, i: (b, i, h, 0)
    operands.add_tokens(bounds, q_tokens, kv_tokens, q_block=block_q, kv_block=None)
    operands.add_pair(qdo, rows, of_rows)
    all_keys = (None, known.kv_length, None, lanes)
    operands.add_pair(kv, all_keys, lambda b, h, i: (b, 0, h // groups, 0))
    operands.add_pair(stats, (None, None, block_q), lambda b, h, i: (b, h, i))
    dq_block = operands.block(rows, of_rows)
    if dq is not None:
        operands.add(dq, dq_block, result=0)
    return operands.call(_kernel, "burst_dq", [(half_shape(qdo), jnp.float32, dq_block)])[0]


def _kernel(known: Known, table, tokens, q_ref, do_ref, k_ref, v_ref, lse_ref, delta_ref, *refs):
    *dq_in_ref, dq_ref = refs
    spec, interpret = known.spec, known.interpret
    block_q, block_kv = known.config.block_q, known.config.block_kv
    factor = log2_factor(spec)

    lane_ok = lanes_in(known.lanes, known.dim)
    row_ok = in_range(known.programs.tile() * block_q, block_q, known.q_length)
    q_tile_ok = both(row_ok, lane_ok)
    q, do = load(q_ref.at[:, :], q_tile_ok), load(do_ref.at[:, :], q_tile_ok)
    if known.config.rows_in_registers:
        q, do = (triton_lowering.in_registers(x, interpret=interpret) for x in (q, do))
    shift = load(lse_ref.at[:], row_ok) * -LOG2_E
    delta = load(delta_ref.at[:], row_ok)
    q_pos, q_seg = tokens.queries(slice(None), row_ok)

    def key_tile(masked, _, j, dq):
        keys = pl.ds(j * block_kv, block_kv)
        key_ok = in_range(j * block_kv, block_kv, known.kv_length) if masked else None
        k = load(k_ref.at[keys, :], both(key_ok, lane_ok))
        v = load(v_ref.at[keys, :], both(key_ok, lane_ok))
        scores = raw_scores(spec, triton_lowering.dot(q, k.T))
        p = triton_lowering.exp2_affine(scores, factor, shift[:, None], interpret=interpret)
        if masked:
            k_pos, k_seg = tokens.keys(keys, key_ok)
            ok = score_mask(
                spec, q_pos[:, None], k_pos[None, :], column(q_seg), row(k_seg), row(key_ok)
            )
            if ok is not None:
                p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
        dp = triton_lowering.dot(do, v.T)
        ds = products_slope(spec, scores, p * (dp - delta[:, None]))
        return dq + triton_lowering.dot(ds.astype(k.dtype), k)

    dq = over_tiles(table, key_tile, jnp.zeros(q_ref.shape, jnp.float32)) * spec.scale
    if dq_in_ref:
        dq += load(dq_in_ref[0].at[:, :], q_tile_ok)
    triton_lowering.store(dq_ref.at[:, :], dq, mask=q_tile_ok)
