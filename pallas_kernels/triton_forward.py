"""Forward local attention as a Pallas kernel, lowered by Triton (Ampere and newer).

One program per (batch row, query head, query tile). It walks the key tiles inside its bounds with
an online softmax in base 2, and merges the incoming (o, lse) in its epilogue, in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, half_dtype, half_shape, varying_axes
from pallas_kernels.merge import merge_weights
from pallas_kernels.scores import allowed
from pallas_kernels.spec import AttentionSpec, Tiles, Tokens

_LOG2_E = math.log2(math.e)
# Finite, so that a row with nothing allowed yet never computes -inf - -inf.
_FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How a kernel is cut up: tile sizes, warps per program, and stages of the load pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}: Triton needs a power of two, 16 or more")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}: use 1, 2, 4, 8 or 16")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}: it must be 1 or more")

    @property
    def tiles(self) -> Tiles:
        """The part that tile bounds depend on."""
        return Tiles(self.block_q, self.block_kv)


def default_config(head_dim: int, dtype: jnp.dtype) -> TritonConfig:
    """Tiles that fit an A100's 163 KiB of shared memory and spill no register on A100 or H100.

    Not spilling is checked for ragged lengths too: at head dim 128, 128 x 64 spills for some.
    """
    if jnp.dtype(dtype).itemsize == 4:
        sizes = ((64, (32, 32, 8, 2)), (128, (32, 16, 8, 2)), (256, (16, 32, 8, 1)))
    else:
        sizes = ((64, (128, 64, 8, 3)), (128, (128, 32, 8, 3)), (256, (32, 32, 4, 2)))
    return next(TritonConfig(*config) for most, config in sizes if head_dim <= most)


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Implementation`."""
    batch, q_length, heads, dim = q.shape
    kv_length, kv_heads = half_shape(kv)[1:3]
    groups = heads // kv_heads
    block_q = config.block_q
    # Triton's tensors are powers of two; loads beyond the head dim are masked to zero.
    lanes = max(16, pl.next_power_of_2(dim))

    def tile_of_q(b, h, i):
        return b, i, h, 0

    q_block = pl.BlockSpec((None, block_q, None, lanes), tile_of_q)
    stat_block = pl.BlockSpec((None, None, block_q), lambda b, h, i: (b, h, i))
    kv_shape = (None, kv_length, None, lanes)
    if isinstance(kv, tuple):
        kv_operands = kv
        kv_blocks = [pl.BlockSpec(kv_shape, lambda b, h, i: (b, 0, h // groups, 0))] * 2
    else:
        # The packed array twice, each seeing its own half: no slice, no copy.
        kv_operands = (kv, kv)
        kv_blocks = [
            pl.BlockSpec((None, *kv_shape), lambda b, h, i, half=half: (half, b, 0, h // groups, 0))
            for half in (0, 1)
        ]
    per_row = bounds.shape[0] != 1
    operands = [bounds, q_tokens.positions, kv_tokens.positions, q, *kv_operands]
    in_specs = [
        pl.BlockSpec((None, None, 4), lambda b, h, i: (b if per_row else 0, i, 0)),
        pl.BlockSpec((block_q,), lambda b, h, i: (i,)),
        pl.BlockSpec((kv_length,), lambda b, h, i: (0,)),
        q_block,
        *kv_blocks,
    ]
    segments = q_tokens.segment_ids is not None
    if segments:
        operands += [q_tokens.segment_ids, kv_tokens.segment_ids]
        in_specs += [
            pl.BlockSpec((None, block_q), lambda b, h, i: (b, i)),
            pl.BlockSpec((None, kv_length), lambda b, h, i: (b, 0)),
        ]
    aliases = {}
    if carry is not None:
        aliases = {len(operands): 0, len(operands) + 1: 1}
        operands += carry
        in_specs += [q_block, stat_block]
    axes = varying_axes(operands)

    def out(shape):
        kind = jax.typeof(q).manual_axis_type.update(varying=axes)
        return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=kind)

    kernel = functools.partial(
        _kernel,
        spec=spec,
        config=config,
        q_length=q_length,
        kv_length=kv_length,
        dim=dim,
        segments=segments,
        carried=carry is not None,
    )
    return tuple(
        triton_lowering.call(
            kernel,
            *operands,
            name="burst_forward",
            grid=(batch, heads, -(-q_length // block_q)),
            in_specs=in_specs,
            out_specs=[q_block, stat_block],
            out_shape=[out(q.shape), out((batch, heads, q_length))],
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            input_output_aliases=aliases,
            interpret=interpret,
        )
    )


def unsupported(q: jax.Array, kv: Pair) -> str | None:
    """Why this kernel cannot take these arrays, or None if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or q.dtype != half_dtype(kv):
        return f"query is {q.dtype} and key {half_dtype(kv)}; it takes bfloat16, float16 or float32"
    if q.shape[-1] > 256:
        return f"the head dim is {q.shape[-1]}; it takes 256 at most"
    return None


def _kernel(*refs, spec, config, q_length, kv_length, dim, segments, carried):
    refs = iter(refs)
    table, q_pos_ref, k_pos_ref, q_ref, k_ref, v_ref = (next(refs) for _ in range(6))
    q_seg_ref, k_seg_ref = (next(refs), next(refs)) if segments else (None, None)
    carry_refs = (next(refs), next(refs)) if carried else None
    o_ref, lse_ref = refs
    block_q, block_kv = config.block_q, config.block_kv
    lanes = q_ref.shape[-1]

    lane_ok = None if lanes == dim else jnp.arange(lanes, dtype=jnp.int32) < dim
    row_ok = None
    if q_length % block_q:
        row = pl.program_id(2) * block_q + jnp.arange(block_q, dtype=jnp.int32)
        row_ok = row < q_length

    q_tile_ok = _both(row_ok, lane_ok)
    q = _load(q_ref.at[:, :], q_tile_ok)
    q_pos = _load(q_pos_ref.at[:], row_ok)[:, None]
    q_seg = None if q_seg_ref is None else _load(q_seg_ref.at[:], row_ok)[:, None]

    def key_tile(masked, j, state):
        # Invariant: acc and total are sums over the tiles before j of 2^(logits_log2 - m).
        acc, total, m = state
        keys = pl.ds(j * block_kv, block_kv)
        key_ok = None
        if masked and kv_length % block_kv:
            key_ok = j * block_kv + jnp.arange(block_kv, dtype=jnp.int32) < kv_length
        k = _load(k_ref.at[keys, :], _both(key_ok, lane_ok))
        logits_log2 = _logits_log2(spec, triton_lowering.dot(q, k.T))
        if masked:
            k_pos = _load(k_pos_ref.at[keys], key_ok)[None, :]
            k_seg = None if k_seg_ref is None else _load(k_seg_ref.at[keys], key_ok)[None, :]
            ok = allowed(spec, q_pos, k_pos, q_seg, k_seg)
            if key_ok is not None:
                ok = key_ok[None, :] if ok is None else ok & key_ok[None, :]
            if ok is not None:
                logits_log2 = jnp.where(ok, logits_log2, -jnp.inf)
        m_next = jnp.maximum(m, logits_log2.max(-1))
        p = jnp.exp2(logits_log2 - m_next[:, None])
        shrink = jnp.exp2(m - m_next)
        total = total * shrink + p.sum(-1)
        v = _load(v_ref.at[keys, :], _both(key_ok, lane_ok))
        acc = acc * shrink[:, None] + triton_lowering.dot(p.astype(v.dtype), v)
        return acc, total, m_next

    first, full_first, full_end, end = (table[c] for c in range(4))
    state = (
        jnp.zeros((block_q, lanes), jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        jnp.full((block_q,), _FLOOR, jnp.float32),
    )
    state = lax.fori_loop(first, full_first, functools.partial(key_tile, True), state)
    state = lax.fori_loop(full_first, full_end, functools.partial(key_tile, False), state)
    acc, total, m = lax.fori_loop(full_end, end, functools.partial(key_tile, True), state)

    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, m / _LOG2_E + jnp.log(total))
    if carry_refs is not None:
        o_in_ref, lse_in_ref = carry_refs
        w_in, w_new, lse = merge_weights(_load(lse_in_ref.at[:], row_ok), lse)
        o_in = _load(o_in_ref.at[:, :], q_tile_ok)
        o = o_in * w_in[:, None] + acc * (w_new / total)[:, None]
    else:
        o = acc / total[:, None]
    triton_lowering.store(o_ref.at[:, :], o, mask=q_tile_ok)
    triton_lowering.store(lse_ref.at[:], lse, mask=row_ok)


def _logits_log2(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    """Scores times log2(e), so that the softmax needs exp2 alone."""
    if spec.logits_soft_cap is None:
        return products * (spec.scale * _LOG2_E)
    cap = spec.logits_soft_cap
    return jnp.tanh(products * (spec.scale / cap)) * (cap * _LOG2_E)


def _both(rows: jax.Array | None, lanes: jax.Array | None) -> jax.Array | None:
    """The mask of a ``[rows, lanes]`` tile; None where nothing is cut off."""
    if rows is None:
        return None if lanes is None else lanes[None, :]
    return rows[:, None] if lanes is None else rows[:, None] & lanes[None, :]


def _load(ref, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return triton_lowering.load(ref)
    # Beyond an array's end a GPU reads its neighbour and interpret mode reads NaN: read 0 instead.
    other = jnp.zeros((), ref.dtype)
    return triton_lowering.load(ref, mask=mask, other=other)
