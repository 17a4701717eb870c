"""Forward local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, query head, query tile). It walks the key tiles inside its bounds with
an online softmax in base 2, and merges the incoming (o, lse) in its epilogue, in place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, half_dtype, half_shape
from pallas_kernels.merge import merge_weights
from pallas_kernels.scores import LOG2_E, log2_factor, raw_scores
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

# Finite, so that a row with nothing allowed yet never computes -inf - -inf.
_FLOOR = -1e30


def forward(
    q: jax.Array,
    kv: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    carry: tuple[jax.Array, jax.Array] | None = None,
    *,
    spec: AttentionSpec,
    config: TritonConfig,
    out_dtype: Any = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Forward`."""
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    known = Known.of("queries", q.shape, half_shape(kv), spec, config, interpret)
    block_q, lanes, groups = config.block_q, known.lanes, known.groups
    operands = Operands(known)
    rows = operands.block((None, block_q, None, lanes), lambda b, h, i: (b, i, h, 0))
    stats = operands.block((None, None, block_q), lambda b, h, i: (b, h, i))
    operands.add_tokens(bounds, q_tokens, kv_tokens, q_block=block_q, kv_block=None)
    operands.add(q, rows)
    all_keys = (None, known.kv_length, None, lanes)
    operands.add_pair(kv, all_keys, lambda b, h, i: (b, 0, h // groups, 0))
    if carry is not None:
        operands.add(carry[0], rows, result=0 if out_dtype == jnp.float32 else None)
        operands.add(carry[1], stats, result=1)
    batch, q_length, heads, _ = q.shape
    results = [(q.shape, out_dtype, rows), ((batch, heads, q_length), jnp.float32, stats)]
    return tuple(operands.call(_kernel, "burst_forward", results))


def unsupported(q: jax.Array, kv: Pair) -> str | None:
    """Why this kernel cannot take these arrays, or None if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or q.dtype != half_dtype(kv):
        return f"query is {q.dtype} and key {half_dtype(kv)}; it takes bfloat16, float16 or float32"
    if q.shape[-1] > 256:
        return f"the head dim is {q.shape[-1]}; it takes 256 at most"
    return None


def _kernel(known: Known, table, tokens, q_ref, k_ref, v_ref, *refs):
    *carry_refs, o_ref, lse_ref = refs
    spec, interpret = known.spec, known.interpret
    block_q, block_kv = known.config.block_q, known.config.block_kv
    factor = log2_factor(spec)
    exp2 = functools.partial(triton_lowering.exp2_affine, interpret=interpret)

    lane_ok = lanes_in(known.lanes, known.dim)
    row_ok = in_range(known.programs.tile() * block_q, block_q, known.q_length)
    q_tile_ok = both(row_ok, lane_ok)
    q = load(q_ref.at[:, :], q_tile_ok)
    if known.config.rows_in_registers:
        q = triton_lowering.in_registers(q, interpret=interpret)
    q_pos, q_seg = tokens.queries(slice(None), row_ok)

    def key_tile(masked, _, j, state):
        # Invariant: acc and total are sums over the tiles visited of 2^(factor scores - m).
        acc, total, m = state
        keys = pl.ds(j * block_kv, block_kv)
        key_ok = in_range(j * block_kv, block_kv, known.kv_length) if masked else None
        k = load(k_ref.at[keys, :], both(key_ok, lane_ok))
        scores = raw_scores(spec, triton_lowering.dot(q, k.T))
        if masked:
            k_pos, k_seg = tokens.keys(keys, key_ok)
            ok = score_mask(
                spec, q_pos[:, None], k_pos[None, :], column(q_seg), row(k_seg), row(key_ok)
            )
            if ok is not None:
                scores = jnp.where(ok, scores, -jnp.inf)
        m_next = jnp.maximum(m, scores.max(-1) * factor)
        p = exp2(scores, factor, -m_next[:, None])
        shrink = exp2(m, 1.0, -m_next)
        total = total * shrink + p.sum(-1)
        v = load(v_ref.at[keys, :], both(key_ok, lane_ok))
        acc = acc * shrink[:, None] + triton_lowering.dot(p.astype(v.dtype), v)
        return acc, total, m_next

    acc, total, m = over_tiles(
        table,
        key_tile,
        (
            jnp.zeros(q_ref.shape, jnp.float32),
            jnp.zeros((block_q,), jnp.float32),
            jnp.full((block_q,), _FLOOR, jnp.float32),
        ),
    )
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, m / LOG2_E + jnp.log(total))
    if carry_refs:
        o_in_ref, lse_in_ref = carry_refs
        w_in, w_new, lse = merge_weights(load(lse_in_ref.at[:], row_ok), lse)
        o_in = load(o_in_ref.at[:, :], q_tile_ok)
        o = o_in * w_in[:, None] + acc * (w_new / total)[:, None]
    else:
        o = acc / total[:, None]
    triton_lowering.store(o_ref.at[:, :], o.astype(o_ref.dtype), mask=q_tile_ok)
    triton_lowering.store(lse_ref.at[:], lse, mask=row_ok)
