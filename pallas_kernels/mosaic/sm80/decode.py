"""Decode attention: few queries over many keys, on Ampere and newer GPUs.

One CTA per (batch index, key/value head, split of the keys): few queries have too few tiles to fill
a GPU, so the keys are split over its SMs, and the partial results are merged by log-sum-exp
(Flash-Decoding). The queries of all query heads that share a key/value head are the rows of the
products, so every key is read once. With up to 16 rows, each warp copies and processes its own
keys, and warps synchronize only at the end (:mod:`pallas_kernels.mosaic.sm80.warp_operations`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import softmax
from pallas_kernels.device import num_sms
from pallas_kernels.mosaic.fragments import i32, swizzle_lanes, tanh
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm80 import instructions, warp_operations
from pallas_kernels.mosaic.sm80.configs import MMA_ROWS, WARPS, WIDEST_HEAD_DIM, shared_memory_of
from pallas_kernels.mosaic.sm80.implementation import needs_ampere
from pallas_kernels.mosaic.sm80.online_softmax import OnlineSoftmax
from pallas_kernels.score import LOG2_E, Score

# A larger number of splits must save this fraction of the time, because their results are merged.
_WORTH_SPLITTING = 0.05
# Queries of larger head dims are read from shared memory for every tile.
_WIDEST_IN_REGISTERS = 128
# Greater than every position.
_NEVER = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is tiled.

    Attributes:
      row_warps: warps along the queries: 1, 2 or 4. The others are along the keys.
      row_tiles: tiles of 16 queries per warp.
      block_kv: keys per tile of the CTA.
      stages: pipeline stages of keys and values.
    """

    row_warps: int
    row_tiles: int = 1
    block_kv: int = 64
    stages: int = 2

    def __post_init__(self):
        if self.row_warps not in (1, 2, 4):
            raise ValueError(f"row_warps is {self.row_warps}: it must be 1, 2 or 4")
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"block_kv is {self.block_kv}: it must be a multiple of 64")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}: it must be at least 2")

    @property
    def rows(self) -> int:
        """Queries per CTA."""
        return MMA_ROWS * self.row_tiles * self.row_warps

    @property
    def groups(self) -> int:
        """Groups of warps with the same queries and different keys."""
        return WARPS // self.row_warps

    @property
    def fragment_rows(self) -> int:
        """Rows of all warps' fragments."""
        return MMA_ROWS * WARPS * self.row_tiles

    def shared_memory(self, head_dim: int, value_dim: int) -> int:
        """Bytes per CTA: keys, values, positions and presence of all stages; wide queries."""
        queries = 2 * self.fragment_rows * head_dim if head_dim > _WIDEST_IN_REGISTERS else 0
        return queries + self.stages * self.block_kv * (2 * (head_dim + value_dim) + 2 * 4)


def decode_config(rows: int, head_dim: int, value_dim: int) -> DecodeConfig:
    """The default tiles, for one CTA per SM; ``rows``: queries per key/value head."""
    wide = max(head_dim, value_dim) > _WIDEST_IN_REGISTERS
    if rows <= MMA_ROWS:
        return DecodeConfig(1, stages=2 if wide else 3)
    return DecodeConfig(2 if rows <= 2 * MMA_ROWS else 4, block_kv=64 if wide else 128, stages=2)


def default_splits(ctas: int, sms: int) -> int:
    """Number of splits of the keys: few, but such that the SMs have equal work.

    One CTA per SM is enough to use all bandwidth, so the time is that of one split, times the
    number of CTAs that the busiest SM runs.

    Args:
      ctas: number of CTAs without splits.
      sms: number of SMs.
    """

    def time(splits: int) -> float:
        return -(-ctas * splits // sms) / splits

    best = 1
    for splits in range(1, 4 * -(-sms // ctas) + 1):
        if time(splits) < (1 - _WORTH_SPLITTING) * time(best):
            best = splits
    return best


# Where :func:`partial_attention` can run.
unavailable = needs_ampere


def unsupported(
    query: jax.Array, keys: jax.Array, values: jax.Array, compute_capability: float
) -> str | None:
    """Why :func:`partial_attention` cannot run these arrays, or None if it can."""
    dtypes = {query.dtype, keys.dtype, values.dtype}
    if len(dtypes) > 1 or query.dtype not in (jnp.bfloat16, jnp.float16):
        given = f"query is {query.dtype}, key {keys.dtype} and value {values.dtype}"
        return f"{given}; decoding supports all bfloat16 or all float16: cast them"
    dims = query.shape[-1], values.shape[-1]
    if any(dim % 16 or dim > WIDEST_HEAD_DIM for dim in dims):
        supported = f"multiples of 16 up to {WIDEST_HEAD_DIM}"
        return f"the head dims are {dims}; decoding supports {supported}: use such head dims"
    rows = query.shape[1] * query.shape[2] // keys.shape[2]
    needed = decode_config(rows, *dims).shared_memory(*dims)
    available = shared_memory_of(compute_capability)
    if needed > available:
        return f"decoding needs {needed} bytes of shared memory per CTA; this GPU has {available}"
    return None


class DecodeArrays(NamedTuple):
    """What the kernel reads.

    Attributes:
      used: int32 ``[1]``, number of keys to read.
      q: ``[B, K * row blocks, fragment rows, H]``.
      q_positions: int32 ``[row blocks, fragment rows]``.
      k: ``[B, C, K * H]``.
      v: ``[B, C, K * Hv]``.
      positions: int32 ``[C]``.
      present: int32 ``[B, C]``.
    """

    used: Any
    q: Any
    q_positions: Any
    k: Any
    v: Any
    positions: Any
    present: Any


class DecodeResults(NamedTuple):
    """What the kernel writes, for every split; float32.

    Attributes:
      out: ``[splits, B, K * row blocks, fragment rows, lanes of a part]``.
      m: ``[splits, B, K * row blocks, fragment rows]``.
      total: the same.
    """

    out: Any
    m: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class DecodeStatic:
    """Static parameters of a call.

    Attributes:
      config: tile sizes.
      score: how logits are computed.
      window: number of positions that a query attends to, its own included; None: unlimited.
      capacity: C.
      row_blocks: CTAs along the queries of a key/value head.
      dim: H.
      value_dim: Hv.
      dtype: of queries, keys and values.
      splits: splits of the keys.
    """

    config: DecodeConfig
    score: Score
    window: int | None
    capacity: int
    row_blocks: int
    dim: int
    value_dim: int
    dtype: np.dtype
    splits: int

    @property
    def parts(self) -> int:
        """Parts of the output's lanes, each of which a different group of warps writes."""
        return warp_operations.pieces(self.value_dim, self.config.row_warps)


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
    config: DecodeConfig | None = None,
    merge: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalized attention over each split of the keys.

    Args:
      query: ``[B, T, N, H]``, at positions ``last - T + 1`` to ``last``.
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
      splits: number of splits; None: about one CTA per SM.
      config: tile sizes; None is the default config.
      merge: ``(out, m, total) -> (out, m, total)`` of fewer splits, called on arrays
        ``[splits, .., lanes]`` and ``[splits, ..]`` in the kernel's order, before XLA changes it.

    Returns:
      ``(out, m, total)`` with a leading axis of splits: float32 ``[splits, B, T, N, Hv]``, the sum
      of ``exp(logit - m)`` times values; ``[splits, B, T, N]``, m, about the largest logit;
      ``[splits, B, T, N]``, the sum of ``exp(logit - m)``, 0 where a split has no key to attend to,
      NaN where m exceeds :data:`pallas_kernels.softmax.LARGEST`.
    """
    batch, length, heads, dim = query.shape
    capacity, kv_heads = keys.shape[1:3]
    value_dim, group = values.shape[3], heads // kv_heads
    count = length * group
    config = config or decode_config(count, dim, value_dim)
    row_blocks = -(-count // config.rows)
    if splits is None:
        splits = default_splits(batch * kv_heads * row_blocks, num_sms())
    static = DecodeStatic(
        config, Score(scale, logits_soft_cap), window, capacity, row_blocks, dim, value_dim,
        jnp.dtype(keys.dtype), splits,
    )  # fmt: skip
    rows = query.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2)
    rows = rows.reshape(batch, kv_heads, count, dim)
    padding = row_blocks * config.rows - count
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))).astype(keys.dtype)
    rows = rows.reshape(batch, kv_heads * row_blocks, config.rows, dim)
    places = last - length + 1 + jnp.arange(count + padding, dtype=jnp.int32) // group
    arrays = DecodeArrays(
        jnp.reshape(used, (1,)).astype(jnp.int32),
        _for_each_group(rows, config),
        _for_each_group(places.reshape(row_blocks, config.rows, 1), config)[..., 0],
        keys.reshape(batch, capacity, -1),
        values.reshape(batch, capacity, -1),
        positions,
        present,
    )
    shape = splits, batch, kv_heads * row_blocks, config.fragment_rows
    f32 = jnp.dtype(jnp.float32)
    results = launch(
        functools.partial(_kernel, static),
        "burst_decode",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "heads": kv_heads * row_blocks, "splits": splits},
        warpgroups=1,
        inputs=arrays,
        results=DecodeResults(
            jax.ShapeDtypeStruct((*shape, value_dim // static.parts), f32),
            jax.ShapeDtypeStruct(shape, f32),
            jax.ShapeDtypeStruct(shape, f32),
        ),
        memory=_memory(static),
    )

    def of_queries(x: jax.Array, parts: int) -> jax.Array:
        """``[splits, B, K * row blocks, fragment rows, lanes]`` as ``[splits, B, T, N, Hv]``."""
        tiles = config.row_tiles, config.groups, config.row_warps, MMA_ROWS
        x = x.reshape(-1, batch, kv_heads, row_blocks, *tiles, x.shape[-1] if x.ndim == 5 else 1)
        x = jnp.moveaxis(x[:, :, :, :, :, :parts], 5, 7)
        x = x.reshape(len(x), batch, kv_heads, row_blocks * config.rows, -1)
        x = x[:, :, :, :count].reshape(len(x), batch, kv_heads, length, group, -1)
        return jnp.moveaxis(x, 3, 2).reshape(len(x), batch, length, heads, -1)

    if merge is not None:
        results = DecodeResults(*merge(*results))
    m, total = (of_queries(x, 1)[..., 0] for x in (results.m, results.total))
    return of_queries(results.out, static.parts), m, total


def _for_each_group(x: jax.Array, config: DecodeConfig) -> jax.Array:
    """``[.., rows, lanes]`` as ``[.., fragment rows, lanes]``: each group of warps has all rows."""
    *lead, _, lanes = x.shape
    x = x.reshape(*lead, config.row_tiles, 1, config.row_warps * MMA_ROWS, lanes)
    x = jnp.broadcast_to(x, (*lead, config.row_tiles, config.groups, *x.shape[-2:]))
    return x.reshape(*lead, config.fragment_rows, lanes)


def _memory(static: DecodeStatic) -> dict[str, Any]:
    config = static.config
    tile = config.stages, config.block_kv
    memory = {
        "k": instructions.tiled_memory((*tile, static.dim), static.dtype),
        "v": instructions.tiled_memory((*tile, static.value_dim), static.dtype),
        "positions": plgpu.SMEM(tile, jnp.int32),
        "present": plgpu.SMEM(tile, jnp.int32),
    }
    if static.dim > _WIDEST_IN_REGISTERS:
        shape = config.fragment_rows, static.dim
        memory["q"] = instructions.tiled_memory(shape, static.dtype)
    return memory


def _kernel(
    static: DecodeStatic, arrays: DecodeArrays, results: DecodeResults, memory: Any
) -> None:
    """One CTA."""
    batch, head, split = (lax.axis_index(name) for name in ("batch", "heads", "splits"))
    cta = _Cta(static, arrays, memory, batch, head, instructions.Fragments.of(static.dtype, WARPS))
    tiles = lax.div(arrays.used[0] + i32(static.config.block_kv - 1), i32(static.config.block_kv))
    first = lax.div(split * tiles, i32(static.splits))
    end = lax.div((split + 1) * tiles, i32(static.splits))
    ahead = static.config.stages - 1
    for step in range(ahead):
        cta.copy(first + step, i32(step), end)
    q = instructions.load(arrays.q.at[batch, head], cta.fragments.lhs)
    if "q" in memory:
        memory["q"][...] = q
    row_block = lax.rem(head, i32(static.row_blocks))
    q_positions = instructions.load(arrays.q_positions.at[row_block], cta.fragments.rows)

    def step(tile, state):
        stage, state = state
        warp_operations.wait_for_copies(ahead - 1, static.config.row_warps)
        previous = jnp.where(stage == 0, ahead, stage - 1)
        cta.copy(tile + ahead, previous, end)
        state = cta.step(state, q, q_positions, stage)
        return jnp.where(stage == ahead, 0, stage + 1), state

    rows = (static.config.fragment_rows,)
    m, total = (plgpu.layout_cast(x, cta.fragments.rows) for x in softmax.start(rows, None))
    acc = cta.fragments.zeros((*rows, static.value_dim))
    _, state = lax.fori_loop(first, end, step, (i32(0), OnlineSoftmax(m, total, acc)))
    m, acc = state.m, state.acc
    total = instructions.sum_row_parts(state.total, cta.fragments)
    if static.config.groups > 1:
        larger = memory["k"] if static.dim >= static.value_dim else memory["v"]
        m, total, acc = warp_operations.merge_groups(m, total, acc, larger, static.config.row_warps)
    place = split, batch, head
    instructions.store(results.out.at[place], acc)
    instructions.store(results.m.at[place], m * (1 / LOG2_E))
    instructions.store(results.total.at[place], softmax.checked(m, total))


class _Cta(NamedTuple):
    """One CTA, and its part of the work.

    Attributes:
      static: static parameters of the call.
      arrays: references to what is read.
      memory: shared memory by name.
      batch: batch index.
      head: index of the key/value head and the row block.
      fragments: register layouts.
    """

    static: DecodeStatic
    arrays: DecodeArrays
    memory: Any
    batch: Any
    head: Any
    fragments: instructions.Fragments

    def copy(self, tile: Any, stage: Any, end: Any) -> None:
        """Starts the copies of a tile as one group, which is empty unless ``tile < end``."""
        static, arrays, memory = self.static, self.arrays, self.memory
        block = static.config.block_kv
        kv_head = lax.div(self.head, i32(static.row_blocks))

        @pl.when(tile < end)
        def start():
            first = tile * block
            for name, source, dim in (
                ("k", arrays.k, static.dim), ("v", arrays.v, static.value_dim)
            ):  # fmt: skip
                part = source.at[self.batch, :, pl.ds(kv_head * dim, dim)]
                warp_operations.copy_matrix(part, memory[name].at[stage], first)
            numbers = arrays.positions, arrays.present.at[self.batch]
            targets = memory["positions"].at[stage], memory["present"].at[stage]
            warp_operations.copy_numbers(numbers, targets, first)

        warp_operations.commit_copies()

    def step(
        self, state: OnlineSoftmax, q: jax.Array, q_positions: jax.Array, stage: Any
    ) -> OnlineSoftmax:
        """One step of the KV loop, on the tile in a stage."""
        static, fragments = self.static, self.fragments
        config, score = static.config, static.score
        k, v, positions, present = (
            self.memory[name].at[stage] for name in ("k", "v", "positions", "present")
        )
        shape = config.fragment_rows, config.block_kv // config.groups
        scores, width = fragments.zeros(shape), swizzle_lanes(static.dim, 2)
        for first in range(0, static.dim, width):
            lanes = pl.ds(first, width)
            if "q" in self.memory:
                left = instructions.load_matrix(self.memory["q"].at[:, lanes], fragments.lhs)
            else:
                left = q[:, first : first + width]
            scores = warp_operations.transposed_product(
                scores, left, k.at[:, lanes], config.row_warps
            )
        scores = score.raw(scores, tanh)
        k_positions, is_present = (
            warp_operations.of_own_keys(x, fragments, shape[0], config.row_warps)
            for x in (positions, present)
        )
        # An absent key gets a position after all queries: one comparison per score.
        k_positions = jnp.where(is_present > 0, k_positions, _NEVER)
        of_rows = fragments.along_rows(q_positions, shape)
        allowed = k_positions <= of_rows
        if static.window is not None:
            allowed = allowed & (k_positions > of_rows - static.window)
        scores = jnp.where(allowed, scores, -jnp.inf)
        weights, state = state.add(scores, score.base_2_factor, fragments)
        left = instructions.as_left_operand(weights.astype(static.dtype), fragments)
        acc = warp_operations.product(state.acc, left, v, config.row_warps)
        return state._replace(acc=acc)
