"""Decode attention, few queries over many keys, as a Pallas kernel lowered by Triton.

One program per (batch index, key/value head, split of the keys): few queries have too few tiles to
fill a GPU, so the keys are split over its SMs, and the partial results are merged by log-sum-exp
(Flash-Decoding). All queries of all query heads of a key/value head are the rows of one tile, so
every key is read once.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import softmax
from pallas_kernels.device import num_sms
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.pallas_triton.configs import padded_lanes
from pallas_kernels.pallas_triton.tiles import in_range, lanes_in, load, tile_mask
from pallas_kernels.score import LOG2_E

# Minimum rows of a Triton product.
_MIN_ROWS = 16
# Programs per SM: more queue behind each other, fewer use too little bandwidth.
_PROGRAMS = 2
# Greater than every position.
_NEVER = jnp.iinfo(jnp.int32).max


def partial_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
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
    """Unnormalized attention over each split of the keys.

    Args:
      query: ``[B, T, N, H]``, at positions ``last - T + 1`` to ``last``. T N / K above 64 spills
        registers.
      keys: ``[B, C, K, H]``.
      values: ``[B, C, K, Hv]``.
      positions: int32 ``[C]``, of the keys; attention is causal.
      present: int32 ``[B, C]``, 0 for keys that a sequence does not have.
      last: int32 scalar, position of the last query.
      used: int32 scalar: keys from this index on are absent (``present`` is 0); whole tiles of
        them are not read.
      scale: factor on the logits.
      logits_soft_cap: ``cap tanh(logit / cap)``, or None.
      window: number of positions that a query attends to, including its own; None: unlimited.
      splits: number of splits; None: two programs per SM.
      block_kv: keys per tile.
      num_warps: warps per program; None: as many as the sums need without spills.
      num_stages: pipeline stages.
      compute_capability: of the target GPU; None: any.
      interpret: run on any platform, slowly.

    Returns:
      ``(out, m, total)`` with a leading axis of splits: float32 ``[splits, B, T, N, Hv]``, the sum
      of weights times values; ``[splits, B, T, N]``, the largest logit; ``[splits, B, T, N]``, the
      sum of ``exp(logit - m)``, 0 where a split has no key to attend to.
    """
    assert math.isfinite(scale)
    batch, length, heads, dim = query.shape
    capacity, kv_heads = keys.shape[1:3]
    value_dim = values.shape[3]
    groups = heads // kv_heads
    count = length * groups
    if splits is None:
        splits = max(1, _PROGRAMS * num_sms() // (batch * kv_heads))
    rows = max(_MIN_ROWS, 1 << (count - 1).bit_length())
    if num_warps is None:
        # Four warps of Hopper make one product of 64 rows together. An A100's four spill there.
        num_warps = 4 if rows < 64 or compute_capability == 9.0 else 8
    lanes, value_lanes = padded_lanes(dim), padded_lanes(value_dim)
    tiled = query.reshape(batch, length, kv_heads, groups, dim).swapaxes(1, 2)
    tiled = tiled.reshape(batch, kv_heads, count, dim)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, rows - count), (0, 0)))
    q_positions = last - length + 1 + jnp.arange(rows, dtype=jnp.int32) // groups
    used = jnp.reshape(used, (1,)).astype(jnp.int32)

    exp2 = functools.partial(lowering.exp2_affine, interpret=interpret)

    def kernel(used_ref, q_positions_ref, q_ref, k_ref, v_ref, positions_ref, present_ref, *outs):
        lane_ok, value_lane_ok = lanes_in(lanes, dim), lanes_in(value_lanes, value_dim)
        q = load(q_ref.at[:, :], tile_mask(None, lane_ok))
        q_position = q_positions_ref[:][:, None]
        filled = used_ref[0]
        tiles = pl.cdiv(pl.cdiv(filled, block_kv), splits)
        first = pl.program_id(0) * tiles
        end = jnp.minimum(first + tiles, pl.cdiv(filled, block_kv))

        def tile(j, state):
            out, m, total = state
            at = pl.ds(j * block_kv, block_kv)
            key_ok = in_range(j * block_kv, block_kv, capacity)
            k = load(k_ref.at[at, :], tile_mask(key_ok, lane_ok))
            v = load(v_ref.at[at, :], tile_mask(key_ok, value_lane_ok))
            # An absent key gets a position after all queries: one comparison per score.
            is_present = load(present_ref.at[at], key_ok) > 0
            k_position = jnp.where(is_present, load(positions_ref.at[at], key_ok), _NEVER)[None, :]
            seen = k_position <= q_position
            if window is not None:
                seen &= k_position > q_position - window
            scores, factor = lowering.dot(q, k.T), scale * LOG2_E
            if logits_soft_cap:
                scores = jnp.tanh(scores * (scale / logits_soft_cap))
                factor = logits_soft_cap * LOG2_E
            elif scale < 0:
                scores, factor = -scores, -factor
            scores = jnp.where(seen, scores, -jnp.inf)
            m_next = jnp.maximum(m, scores.max(1) * factor)
            p = exp2(scores, factor, -m_next[:, None])
            shrink = exp2(m, 1.0, -m_next)
            out = out * shrink[:, None] + lowering.dot(p.astype(v.dtype), v)
            return out, m_next, total * shrink + p.sum(1)

        m, total = softmax.start((rows,), None)
        state = jnp.zeros((rows, value_lanes), jnp.float32), m, total
        out, m, total = lax.fori_loop(first, end, tile, state)
        out_ref, m_ref, total_ref = outs
        lowering.store(out_ref.at[:, :], out, mask=tile_mask(None, value_lane_ok))
        lowering.store(m_ref.at[:], m / LOG2_E)
        lowering.store(total_ref.at[:], total)

    def split_block(*block):
        return pl.BlockSpec(
            (None, None, None, *block), lambda i, h, b: (i, b, h, *[0] * len(block))
        )

    def head_block(count, width):
        return pl.BlockSpec((None, count, None, width), lambda i, h, b: (b, 0, h, 0))

    shape = (splits, batch, kv_heads, rows)
    out, m, total = lowering.call(
        kernel,
        used,
        q_positions,
        tiled,
        keys,
        values,
        positions,
        present,
        name="burst_decode",
        grid=(splits, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, h, b: (0,)),
            pl.BlockSpec((rows,), lambda i, h, b: (0,)),
            pl.BlockSpec((None, None, rows, lanes), lambda i, h, b: (b, h, 0, 0)),
            head_block(capacity, lanes),
            head_block(capacity, value_lanes),
            pl.BlockSpec((capacity,), lambda i, h, b: (0,)),
            pl.BlockSpec((None, capacity), lambda i, h, b: (b, 0)),
        ],
        out_specs=[split_block(rows, value_lanes), split_block(rows), split_block(rows)],
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

    return untiled(out), untiled(m), untiled(total)
