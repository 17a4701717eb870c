"""dK and dV of local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch index, key/value head, KV tile). It loops over the query tiles within its
bounds for every query head that shares the key/value head, so that GQA needs no second sum, and
adds to the incoming dK and dV, in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.arrays import gradient_dtype
from pallas_kernels.backend import Dkv
from pallas_kernels.inputs import AttentionInputs
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


def backward_dkv(
    inputs: AttentionInputs,
    bounds: tuple[jax.Array, jax.Array],
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    build: Build,
    out_dtype: DTypeLike | None = None,
) -> Dkv:
    """The dK, dV half of :class:`pallas_kernels.backend.BackwardFunction`.

    The second of the pair ``bounds`` is this kernel's (:func:`pallas_kernels.bounds.key_bounds`).
    """
    config = build.configs(inputs, spec).dkv
    do, stats = inputs.cotangents()
    static = TritonStatic.of("keys", inputs, spec, config, build.interpret)
    q_length, groups = static.q_length, static.groups
    arguments = Arguments(static, inputs, bounds[1])
    query_block, do_block = (
        arguments.block((None, q_length, groups, lanes), lambda b, h, j: (b, 0, h, 0))
        for lanes in (static.lanes, static.value_lanes)
    )
    kv_blocks = key_block, value_block = tuple(
        arguments.block((None, config.block_kv, None, lanes), lambda b, h, j: (b, j, h, 0))
        for lanes in (static.lanes, static.value_lanes)
    )
    for array, block in (
        (inputs.query.q, query_block),
        (do, do_block),
        (inputs.kv.k, key_block),
        (inputs.kv.v, value_block),
        (stats, arguments.block((2, None, groups, q_length), lambda b, h, j: (0, b, h, 0))),
    ):
        arguments.add(array, block)
    if dkv is not None:
        for result, (gradient, block) in enumerate(zip(dkv, kv_blocks, strict=True)):
            arguments.add(gradient, block, result=result)
    results = [
        (x.shape, gradient_dtype(dkv, out_dtype), block)
        for x, block in zip((inputs.kv.k, inputs.kv.v), kv_blocks, strict=True)
    ]
    return tuple(arguments.call(_kernel, "burst_dkv", results))


def _kernel(
    static: TritonStatic, table, sides: SideRefs, q_ref, do_ref, k_ref, v_ref, stats_ref, *refs
):
    *dkv_in_refs, dk_ref, dv_ref = refs
    spec, interpret = static.spec, static.interpret
    block_q, block_kv = static.config.block_q, static.config.block_kv

    lanes_ok = lane_ok, value_lane_ok = static.lanes_inside()
    tile = static.grid.tile()
    key_ok = in_range(tile * block_kv, block_kv, static.kv_length)
    k_tile_ok, v_tile_ok = tile_masks(key_ok, lanes_ok)
    k, v = load(k_ref.at[:, :], k_tile_ok), load(v_ref.at[:, :], v_tile_ok)
    keys = sides.keys(slice(None), key_ok, as_column)
    columns = sides.columns(slice(None), key_ok, as_column)
    unit = 1.0 if spec.dropout is None else spec.dropout.unit

    def query_tile(masked, h, i, sums):
        # Scores are transposed, [keys, queries]: dK and dV need no transposed operand.
        dk, dv = sums
        tokens = pl.ds(i * block_q, block_q)
        query_ok = in_range(i * block_q, block_q, static.q_length) if masked else None
        q = load(q_ref.at[tokens, h, :], tile_mask(query_ok, lane_ok))
        do = load(do_ref.at[tokens, h, :], tile_mask(query_ok, value_lane_ok))
        shift = load(stat(stats_ref, 0, h, tokens), query_ok) * -LOG2_E
        # Both products are issued before the exponentials, to overlap with them.
        raw = spec.score.raw(lowering.dot(k, q.T))
        queries = sides.queries(tokens, query_ok, as_row, masked=masked)
        positions = queries.positions, keys.positions
        coordinates = sides.coordinates(h, queries, keys)
        scores, factor = spec.score.in_base_2(raw, *positions, sides.per_head_of(h), coordinates)
        dp = lowering.dot(v, do.T)
        p = weights(spec.score, scores, factor, shift[None, :], interpret=interpret)
        if masked:
            table_rows = sides.table_rows(tokens, query_ok)
            by_blocks = static.by_blocks(sides, h, table_rows, tile)
            ok = score_mask(static.mask, queries, keys, by_blocks, coordinates)
            if ok is not None:
                p = jnp.where(ok, p, 0.0)  # Also where lse is -inf and exp2 is inf.
        delta = load(stat(stats_ref, 1, h, tokens), query_ok)
        rows = sides.rows((h, tokens), query_ok, as_row)
        dp = dropped(spec.dropout, rows, columns, dp if unit == 1 else dp * unit)
        ds = spec.score.to_products(raw, p, p * (dp - delta[None, :]), coordinates)
        kept = dropped(spec.dropout, rows, columns, p)
        dv += lowering.dot(kept.astype(do.dtype), do)
        return dk + lowering.dot(ds.astype(q.dtype), q), dv

    dk, dv = jnp.zeros(k_ref.shape, jnp.float32), jnp.zeros(v_ref.shape, jnp.float32)
    if dkv_in_refs:
        # dV starts from the incoming dV. dK cannot, because its scale is applied at the end. Adding
        # both at the end would take more registers than there are.
        dv = load(dkv_in_refs[1].at[:, :], v_tile_ok)
        dv = dv if unit == 1 else dv / unit
    dk, dv = over_tiles(table, query_tile, (dk, dv), static.groups, listed=static.listed)
    dv = dv if unit == 1 else dv * unit
    lowering.store(dv_ref.at[:, :], dv.astype(dv_ref.dtype), mask=v_tile_ok)
    dk *= spec.score.scale
    if dkv_in_refs:
        dk += load(dkv_in_refs[0].at[:, :], k_tile_ok)
    lowering.store(dk_ref.at[:, :], dk.astype(dk_ref.dtype), mask=k_tile_ok)
