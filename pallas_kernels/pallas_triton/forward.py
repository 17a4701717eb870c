"""Forward local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch index, query head, query tile). It loops over the KV tiles within its bounds
with an online softmax in base 2, and finally merges with the incoming (o, lse), in place.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import softmax
from pallas_kernels.inputs import AttentionInputs, Carry
from pallas_kernels.merge import merge_weights
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.pallas_triton.configs import Build
from pallas_kernels.pallas_triton.launch import Arguments, TritonStatic
from pallas_kernels.pallas_triton.tiles import (
    SideRefs,
    as_column,
    as_row,
    dropped,
    in_range,
    load,
    over_tiles,
    score_mask,
    tile_mask,
    tile_masks,
)
from pallas_kernels.spec import AttentionSpec

# What the softmax starts with: an (o, lse) over other keys, a sink logit, or nothing.
_Start = Literal["carry", "sink", "nothing"]


def forward(
    inputs: AttentionInputs,
    bounds: jax.Array,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    build: Build,
    out_dtype: DTypeLike | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`."""
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    config = build.configs(inputs, spec).forward
    static = TritonStatic.of("queries", inputs, spec, config, build.interpret)
    block_q, groups = config.block_q, static.groups
    arguments = Arguments(static, inputs, bounds)
    query_block, o_block = (
        arguments.block((None, block_q, None, lanes), lambda b, h, i: (b, i, h, 0))
        for lanes in (static.lanes, static.value_lanes)
    )
    lse_block = arguments.stat_block()
    key_block, value_block = (
        arguments.block(
            (None, static.kv_length, None, lanes), lambda b, h, i: (b, 0, h // groups, 0)
        )
        for lanes in (static.lanes, static.value_lanes)
    )
    arguments.add(inputs.query.q, query_block)
    arguments.add(inputs.kv.k, key_block)
    arguments.add(inputs.kv.v, value_block)
    start: _Start = "nothing"
    if carry is not None:
        start = "carry"
        arguments.add(carry[0], o_block, result=0 if out_dtype == jnp.float32 else None)
        arguments.add(carry[1], lse_block, result=1)
    elif inputs.shared.sink_logits is not None:
        start = "sink"
        arguments.add(inputs.shared.sink_logits, arguments.per_head_block())
    batch, q_length, heads, _ = inputs.query.q.shape
    results = [
        (inputs.out_shape, out_dtype, o_block),
        ((batch, heads, q_length), jnp.float32, lse_block),
    ]
    return tuple(arguments.call(functools.partial(_kernel, start), "burst_forward", results))


def _kernel(
    start: _Start, static: TritonStatic, table, sides: SideRefs, q_ref, k_ref, v_ref, *refs
):
    *start_refs, o_ref, lse_ref = refs
    spec, interpret = static.spec, static.interpret
    block_q, block_kv = static.config.block_q, static.config.block_kv
    exp2 = functools.partial(lowering.exp2_affine, interpret=interpret)

    lanes_ok = lane_ok, value_lane_ok = static.lanes_inside()
    query_ok = in_range(static.grid.tile() * block_q, block_q, static.q_length)
    q_tile_ok, o_tile_ok = tile_masks(query_ok, lanes_ok)
    q = load(q_ref.at[:, :], q_tile_ok)
    if static.config.rows_in_registers:
        q = lowering.in_registers(q, interpret=interpret)
    # Queries past the end are never stored, so their scores need no mask.
    queries = sides.queries(slice(None), query_ok, as_column)._replace(inside=None)
    per_head = sides.per_head_of(jnp.int32(0))
    rows = sides.rows(slice(None), query_ok, as_column)
    table_rows = sides.table_rows(slice(None), query_ok)

    def key_tile(masked, _, j, state):
        # Invariant: m is the largest logit in base 2 so far, of the sink and of the tiles visited;
        # total is the sum of 2^(logit - m) over these logits, acc that of 2^(logit - m) v.
        acc, total, m = state
        tokens = pl.ds(j * block_kv, block_kv)
        key_ok = in_range(j * block_kv, block_kv, static.kv_length) if masked else None
        k = load(k_ref.at[tokens, :], tile_mask(key_ok, lane_ok))
        raw = spec.score.raw(lowering.dot(q, k.T))
        keys = sides.keys(tokens, key_ok, as_row, masked=masked)
        coordinates = sides.coordinates(jnp.int32(0), queries, keys)
        positions = queries.positions, keys.positions
        scores, factor = spec.score.in_base_2(raw, *positions, per_head, coordinates)
        if masked:
            by_blocks = static.by_blocks(sides, jnp.int32(0), table_rows, j)
            ok = score_mask(static.mask, queries, keys, by_blocks, coordinates)
            if ok is not None:
                scores = jnp.where(ok, scores, -jnp.inf)
        m_next = jnp.maximum(m, scores.max(-1) * factor)
        p = exp2(scores, factor, -m_next[:, None])
        shrink = exp2(m, 1.0, -m_next)
        total = total * shrink + p.sum(-1)
        v = load(v_ref.at[tokens, :], tile_mask(key_ok, value_lane_ok))
        kept = dropped(spec.dropout, rows, sides.columns(tokens, key_ok, as_row), p)
        acc = acc * shrink[:, None] + lowering.dot(kept.astype(v.dtype), v)
        return acc, total, m_next

    sink = None
    if start == "sink":
        (sink_ref,) = start_refs
        sink = lowering.load(sink_ref.at[jnp.int32(0)])
    m, total = softmax.start((block_q,), sink)
    state = jnp.zeros(o_ref.shape, jnp.float32), total, m
    acc, total, m = over_tiles(table, key_tile, state, listed=static.listed)
    divisor, lse = softmax.finish(m, total)
    if spec.dropout is not None:
        divisor /= spec.dropout.unit
    if start == "carry":
        o_in_ref, lse_in_ref = start_refs
        w_in, w_new, lse = merge_weights(load(lse_in_ref.at[:], query_ok), lse)
        o_in = load(o_in_ref.at[:, :], o_tile_ok)
        o = o_in * w_in[:, None] + acc * (w_new / divisor)[:, None]
    else:
        o = acc / divisor[:, None]
    lowering.store(o_ref.at[:, :], o.astype(o_ref.dtype), mask=o_tile_ok)
    lowering.store(lse_ref.at[:], lse, mask=query_ok)
