"""Attention of few queries over many keys as a Pallas kernel, lowered by Triton.

One program per (batch row, key head, part of the keys): few queries have too few tiles to fill a
GPU, so the keys are split over its multiprocessors, and the partial results are merged by
log-sum-exp afterwards (Flash-Decoding). All query heads of a key head, of all queries, are the rows
of one tile, so that every key is read once.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import softmax
from pallas_kernels.device import multiprocessors
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.pallas_triton.configs import padded_lanes
from pallas_kernels.pallas_triton.tiles import in_range, lanes_in, load, tile_mask
from pallas_kernels.score import LOG2_E

# Triton's products have 16 rows at least.
_LEAST_ROWS = 16
# Of each multiprocessor: more of them wait for those that are in the way, fewer read too little.
_PROGRAMS = 2
# Later than every place.
_NEVER = jnp.iinfo(jnp.int32).max


def partial_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    places: jax.Array,
    present: jax.Array,
    last: jax.Array,
    used: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
    block_kv: int = 64,
    num_warps: int | None = None,
    num_stages: int = 3,
    compute_capability: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over each part of the keys, not yet divided by the sum of its weights.

    Args:
      query: ``[B, T, N, H]``, of the places ``last - T + 1`` to ``last``; its tiles are made
        for T N / K up to 64, and more spill registers.
      keys: ``[B, C, K, H]``.
      values: ``[B, C, K, Hv]``.
      places: int32 ``[C]``, of each key; a query sees the keys of its own place and before it.
      present: int32 ``[B, C]``, 0 for keys that a row does not have.
      last: int32 scalar.
      used: int32 scalar: keys from this index on hold nothing (``present`` is 0); whole tiles of
        them are not read.
      scale: multiplies logits.
      logits_soft_cap: ``cap tanh(logit / cap)``, or None.
      window: number of places that a query sees, its own included; None is all.
      splits: number of parts; None is as many as give every multiprocessor two programs.
      block_kv: keys of a tile.
      num_warps: warps of a program; None is as many as hold its sums without spills.
      num_stages: tiles in shared memory or arriving.
      compute_capability: of the GPU that it is for; None is one that fits any.
      interpret: run it on any platform, slowly.

    Returns:
      ``(out, most, total)`` with a first axis of parts: float32 ``[parts, B, T, N, Hv]``,
      ``[parts, B, T, N]`` the largest logit and ``[parts, B, T, N]`` the sum of
      ``exp(logit - most)``, 0 where a part has no key that is seen.
    """
    assert math.isfinite(scale)
    batch, length, heads, dim = query.shape
    capacity, kv_heads = keys.shape[1:3]
    value_dim = values.shape[3]
    groups = heads // kv_heads
    count = length * groups
    if splits is None:
        splits = max(1, _PROGRAMS * multiprocessors() // (batch * kv_heads))
    rows = max(_LEAST_ROWS, 1 << (count - 1).bit_length())
    if num_warps is None:
        # Four warps of Hopper make one product of 64 rows together. An A100's four spill there.
        num_warps = 4 if rows < 64 or compute_capability == 9.0 else 8
    lanes, value_lanes = padded_lanes(dim), padded_lanes(value_dim)
    tiled = query.reshape(batch, length, kv_heads, groups, dim).swapaxes(1, 2)
    tiled = tiled.reshape(batch, kv_heads, count, dim)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, rows - count), (0, 0)))
    place_of = last - length + 1 + jnp.arange(rows, dtype=jnp.int32) // groups
    numbers = jnp.reshape(used, (1,)).astype(jnp.int32)

    exp2 = functools.partial(lowering.exp2_affine, interpret=interpret)

    def kernel(numbers_ref, place_ref, q_ref, k_ref, v_ref, places_ref, present_ref, *outs):
        lane_ok, value_lane_ok = lanes_in(lanes, dim), lanes_in(value_lanes, value_dim)
        q = load(q_ref.at[:, :], tile_mask(None, lane_ok))
        q_place = place_ref[:][:, None]
        filled = numbers_ref[0]
        tiles = pl.cdiv(pl.cdiv(filled, block_kv), splits)
        first = pl.program_id(0) * tiles
        stop = jnp.minimum(first + tiles, pl.cdiv(filled, block_kv))

        def tile(j, state):
            out, most, total = state
            at = pl.ds(j * block_kv, block_kv)
            key_ok = in_range(j * block_kv, block_kv, capacity)
            k = load(k_ref.at[at, :], tile_mask(key_ok, lane_ok))
            v = load(v_ref.at[at, :], tile_mask(key_ok, value_lane_ok))
            # A key that is not there comes after all queries: one comparison for each score.
            there = load(present_ref.at[at], key_ok) > 0
            k_place = jnp.where(there, load(places_ref.at[at], key_ok), _NEVER)[None, :]
            seen = k_place <= q_place
            if window is not None:
                seen &= k_place > q_place - window
            scores, factor = lowering.dot(q, k.T), scale * LOG2_E
            if logits_soft_cap:
                scores = jnp.tanh(scores * (scale / logits_soft_cap))
                factor = logits_soft_cap * LOG2_E
            elif scale < 0:
                scores, factor = -scores, -factor
            scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(most, scores.max(1) * factor)
            p = exp2(scores, factor, -higher[:, None])
            less = exp2(most, 1.0, -higher)
            out = out * less[:, None] + lowering.dot(p.astype(v.dtype), v)
            return out, higher, total * less + p.sum(1)

        most, total = softmax.start((rows,), None)
        state = jnp.zeros((rows, value_lanes), jnp.float32), most, total
        out, most, total = lax.fori_loop(first, stop, tile, state)
        out_ref, most_ref, total_ref = outs
        lowering.store(out_ref.at[:, :], out, mask=tile_mask(None, value_lane_ok))
        lowering.store(most_ref.at[:], most / LOG2_E)
        lowering.store(total_ref.at[:], total)

    def of_part(*block):
        return pl.BlockSpec(
            (None, None, None, *block), lambda i, h, b: (i, b, h, *[0] * len(block))
        )

    def of_head(count, width):
        return pl.BlockSpec((None, count, None, width), lambda i, h, b: (b, 0, h, 0))

    shape = (splits, batch, kv_heads, rows)
    out, most, total = lowering.call(
        kernel,
        numbers,
        place_of,
        tiled,
        keys,
        values,
        places,
        present,
        name="burst_decode",
        grid=(splits, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, h, b: (0,)),
            pl.BlockSpec((rows,), lambda i, h, b: (0,)),
            pl.BlockSpec((None, None, rows, lanes), lambda i, h, b: (b, h, 0, 0)),
            of_head(capacity, lanes),
            of_head(capacity, value_lanes),
            pl.BlockSpec((capacity,), lambda i, h, b: (0,)),
            pl.BlockSpec((None, capacity), lambda i, h, b: (b, 0)),
        ],
        out_specs=[of_part(rows, value_lanes), of_part(rows), of_part(rows)],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )

    def untiled(x):
        x = x[:, :, :, :count].reshape(splits, batch, kv_heads, length, groups, *x.shape[4:])
        return jnp.moveaxis(x, 3, 2).reshape(splits, batch, length, heads, *x.shape[5:])

    return untiled(out), untiled(most), untiled(total)
