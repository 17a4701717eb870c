"""dQ of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch index, query head, query tile). It loops over the KV tiles within its bounds
and adds ``scale ds k`` to the incoming dQ, in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.arrays import gradient_dtype
from pallas_kernels.inputs import AttentionInputs, PerHead
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
    stat,
    tile_mask,
    tile_masks,
    weights,
)
from pallas_kernels.score import LOG2_E
from pallas_kernels.spec import AttentionSpec


def backward_dq(
    inputs: AttentionInputs,
    bounds: tuple[jax.Array, jax.Array],
    dq: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    build: Build,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, PerHead]:
    """The dQ half of :class:`pallas_kernels.backend.BackwardFunction`.

    The first of the pair ``bounds`` is this kernel's (:func:`pallas_kernels.bounds.query_bounds`).
    """
    config = build.configs(inputs, spec).dq
    do, stats = inputs.cotangents()
    static = TritonStatic.of("queries", inputs, spec, config, build.interpret)
    block_q, groups = config.block_q, static.groups
    arguments = Arguments(static, inputs, bounds[0])
    query_block, do_block = (
        arguments.block((None, block_q, None, lanes), lambda b, h, i: (b, i, h, 0))
        for lanes in (static.lanes, static.value_lanes)
    )
    key_block, value_block = (
        arguments.block(
            (None, static.kv_length, None, lanes), lambda b, h, i: (b, 0, h // groups, 0)
        )
        for lanes in (static.lanes, static.value_lanes)
    )
    for array, block in (
        (inputs.query.q, query_block),
        (do, do_block),
        (inputs.kv.k, key_block),
        (inputs.kv.v, value_block),
        (stats, arguments.block((2, None, None, block_q), lambda b, h, i: (0, b, h, i))),
    ):
        arguments.add(array, block)
    if dq is not None:
        arguments.add(dq, query_block, result=0)
    # Gradients of a per-head parameter, [B, N, T], to be summed over B and T.
    per_head_sums = (
        stats.shape[1:],
        jnp.float32,
        arguments.stat_block(),
    )
    names = spec.score.differentiated
    dtype = gradient_dtype(dq, out_dtype)
    results = [(inputs.query.q.shape, dtype, query_block), *[per_head_sums] * len(names)]
    dq, *per_head = arguments.call(_kernel, "burst_dq", results)
    return dq, {name: x.sum((0, 2)) for name, x in zip(names, per_head, strict=True)}


def _kernel(
    static: TritonStatic, table, sides: SideRefs, q_ref, do_ref, k_ref, v_ref, stats_ref, *refs
):
    outputs = 1 + len(static.spec.score.differentiated)
    dq_in_refs, (dq_ref, *per_head_refs) = refs[:-outputs], refs[-outputs:]
    spec, interpret = static.spec, static.interpret
    block_q, block_kv = static.config.block_q, static.config.block_kv

    lanes_ok = lane_ok, value_lane_ok = static.lanes_inside()
    query_ok = in_range(static.grid.tile() * block_q, block_q, static.q_length)
    q_tile_ok, do_tile_ok = tile_masks(query_ok, lanes_ok)
    q, do = load(q_ref.at[:, :], q_tile_ok), load(do_ref.at[:, :], do_tile_ok)
    if static.config.rows_in_registers:
        q, do = (lowering.in_registers(x, interpret=interpret) for x in (q, do))
    lse, delta = (load(stat(stats_ref, which), query_ok) for which in (0, 1))
    shift = lse * -LOG2_E
    # Queries past the end are never stored, so their scores need no mask.
    queries = sides.queries(slice(None), query_ok, as_column)._replace(inside=None)
    per_head = sides.per_head_of(jnp.int32(0))
    rows = sides.rows(slice(None), query_ok, as_column)
    table_rows = sides.table_rows(slice(None), query_ok)

    def key_tile(masked, _, j, state):
        dq, per_head_sums = state
        tokens = pl.ds(j * block_kv, block_kv)
        key_ok = in_range(j * block_kv, block_kv, static.kv_length) if masked else None
        k = load(k_ref.at[tokens, :], tile_mask(key_ok, lane_ok))
        v = load(v_ref.at[tokens, :], tile_mask(key_ok, value_lane_ok))
        raw = spec.score.raw(lowering.dot(q, k.T))
        keys = sides.keys(tokens, key_ok, as_row, masked=masked)
        positions = queries.positions, keys.positions
        coordinates = sides.coordinates(jnp.int32(0), queries, keys)
        scores, factor = spec.score.in_base_2(raw, *positions, per_head, coordinates)
        p = weights(spec.score, scores, factor, shift[:, None], interpret=interpret)
        if masked:
            by_blocks = static.by_blocks(sides, jnp.int32(0), table_rows, j)
            ok = score_mask(static.mask, queries, keys, by_blocks, coordinates)
            if ok is not None:
                p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
        dp = lowering.dot(do, v.T)
        if spec.dropout is not None:
            dp *= spec.dropout.unit
        dp = dropped(spec.dropout, rows, sides.columns(tokens, key_ok, as_row), dp)
        ds = p * (dp - delta[:, None])
        parts = spec.score.per_head_gradients(ds, *positions)
        per_head_sums = {name: per_head_sums[name] + x.sum(-1) for name, x in parts.items()}
        ds = spec.score.to_products(raw, p, ds, coordinates)
        return dq + lowering.dot(ds.astype(k.dtype), k), per_head_sums

    per_head_sums = dict.fromkeys(spec.score.differentiated, jnp.zeros((block_q,), jnp.float32))
    state = jnp.zeros(q_ref.shape, jnp.float32), per_head_sums
    dq, per_head_sums = over_tiles(table, key_tile, state, listed=static.listed)
    for ref, by_query in zip(per_head_refs, per_head_sums.values(), strict=True):
        lowering.store(ref.at[:], by_query, mask=query_ok)
    dq *= spec.score.scale
    if dq_in_refs:
        dq += load(dq_in_refs[0].at[:, :], q_tile_ok)
    lowering.store(dq_ref.at[:, :], dq.astype(dq_ref.dtype), mask=q_tile_ok)
