"""Backward local attention on Ampere: dQ, dK and dV from one pass over the scores.

One CTA per (batch index, key/value head, KV tile) loops over the query tiles within its bounds, for
every query head that shares the key/value head. Each of its two warpgroups w owns half of the keys,
and accumulates their dK and dV in registers::

    S_w = Q K_w^T    dP_w = dO V_w^T          2 x 2 warps; P_w and dS_w go to shared memory
    dV_w += P_w^T dO    dK_w += dS_w^T Q      left operand by transposed ldmatrix
    dQ += dS K                                each warpgroup computes a part of dQ, over all keys

dQ is accumulated in global memory by atomic additions, in register order (see
:func:`pallas_kernels.mosaic.sm80.instructions.add_in_register_order`), so its last bits differ from
run to run. A transpose at the end makes it row-major. Where gradients must be bitwise reproducible,
dQ is accumulated in fixed point (:mod:`pallas_kernels.mosaic.fixed_point`): sums of integers
do not depend on the order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.arrays import depending_on, gradient_dtype
from pallas_kernels.backend import Dkv
from pallas_kernels.bounds import key_bounds
from pallas_kernels.inputs import AttentionInputs, PerHead
from pallas_kernels.mosaic import fixed_point
from pallas_kernels.mosaic.dq import DqSum
from pallas_kernels.mosaic.fragments import i32, swizzle_lanes
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.scores import ScoreTile
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.configs import (
    BACKWARD_M_WARPS,
    BACKWARD_WARPGROUPS,
    SHARED_MEMORY,
    WARPS,
    BackwardConfig,
    backward_config,
)
from pallas_kernels.mosaic.sm80.dq import backward_static
from pallas_kernels.mosaic.sm80.inputs import (
    BackwardArrays,
    BackwardResults,
    Sm80Static,
    attention_arrays,
    rows_of_heads,
    stats_by_tile,
)
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.spec import AttentionSpec


class _Sums(NamedTuple):
    """What a warpgroup accumulates: float32 ``[keys, H]`` and ``[keys, Hv]``."""

    dk: jax.Array
    dv: jax.Array


def backward(
    inputs: AttentionInputs,
    bounds: Any,
    dq: DqSum,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: BackwardConfig | None = None,
    shared_memory: int = SHARED_MEMORY,
) -> tuple[DqSum, Dkv, PerHead]:
    """``add`` of a :class:`pallas_kernels.backend.DqAccumulator`.

    ``config`` None is the default for ``shared_memory``.
    """
    static = backward_static(inputs, spec, config, shared_memory)
    do, _ = inputs.cotangents()
    stats = stats_by_tile(static, inputs)
    arrays = BackwardArrays(
        attention_arrays(static, inputs, bounds),
        rows_of_heads(do, static.padded_q_length),
        stats,
        None if dq.bound is None else fixed_point.factor_64(dq.bound),
    )
    by_warp = static.batch, static.heads, static.kv_tiles, BACKWARD_WARPGROUPS, WARPS
    results = launch(
        functools.partial(_kernel, static, dkv is not None),
        "burst_backward",
        grid={"batch": static.batch, "heads": static.kv_heads, "tiles": static.kv_tiles},
        warpgroups=BACKWARD_WARPGROUPS,
        semantics=plgpu.LoweringSemantics.Lane,
        inputs=arrays,
        results=BackwardResults(
            dq.values,
            *_dkv_results(static, dkv, gradient_dtype(dkv, out_dtype)),
            {
                name: depending_on(jnp.zeros(by_warp, jnp.float32), stats)
                for name in spec.score.differentiated
            },
        ),
        memory=_memory(static),
    )
    dk, dv = (
        x[:, : static.kv_length].reshape(*like.shape)
        for x, like in ((results.dk, inputs.kv.k), (results.dv, inputs.kv.v))
    )
    per_head = {name: x.sum((0, 2, 3, 4)) for name, x in results.per_head.items()}
    return dq._replace(values=results.dq), (dk, dv), per_head


def backward_bounds(
    inputs: AttentionInputs,
    *,
    spec: AttentionSpec,
    config: BackwardConfig | None = None,
    shared_memory: int = SHARED_MEMORY,
) -> jax.Array:
    """The tile bounds that :func:`backward` reads with the same options."""
    config = config or backward_config(inputs.head_dim, inputs.value_dim, shared_memory)
    blocks = inputs.shared.block_mask
    return key_bounds(spec.mask, inputs.query, inputs.kv, config.tiles, blocks, inputs.groups)


def _dkv_results(
    static: Sm80Static[BackwardConfig], dkv: Dkv | None, dtype: DTypeLike
) -> tuple[Any, Any]:
    """The given dK and dV, to be added to, or the shapes and dtypes of new ones."""
    length = static.padded_kv_length
    if dkv is not None:
        dk, dv = dkv
        return rows_of_heads(dk, length), rows_of_heads(dv, length)
    dims = static.head_dim, static.value_dim
    shapes = ((static.batch, length, static.kv_heads * dim) for dim in dims)
    dk, dv = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    return dk, dv


def _memory(static: Sm80Static[BackwardConfig]) -> dict[str, Any]:
    """Shared memory of a CTA."""
    config, dtype = static.config, static.dtype
    stages, keys = config.stages, config.keys
    weights = BACKWARD_WARPGROUPS, config.block_q, keys
    return {
        "k": instructions.tiled_memory((config.block_kv, static.head_dim), dtype),
        "v": instructions.tiled_memory((config.block_kv, static.value_dim), dtype),
        "q": instructions.tiled_memory((stages, config.block_q, static.head_dim), dtype),
        "do": instructions.tiled_memory((stages, config.block_q, static.value_dim), dtype),
        "p": instructions.tiled_memory(weights, dtype),
        "ds": instructions.tiled_memory(weights, dtype),
        "stats": plgpu.SMEM((stages, 2 * config.block_q), jnp.float32),
    }


def _kernel(
    static: Sm80Static[BackwardConfig],
    adds_dkv: bool,
    arrays: BackwardArrays,
    results: BackwardResults,
    memory: Any,
) -> None:
    """One warpgroup of one CTA. ``adds_dkv``: dK and dV are added to those in the results."""
    cta = _Cta.of(static, arrays, results, memory)
    tiles, groups = cta.tiles, i32(static.groups)

    @pl.when(tiles.total > 0)
    def _():
        first = _QueryTile(tiles.tile(i32(0)), i32(0))
        cta.copy_keys()
        cta.copy_queries(first, i32(0))
        cta.copy_do(first, i32(0))

    sums = _Sums(
        cta.fragments.zeros((static.config.keys, static.head_dim)),
        cta.fragments.zeros((static.config.keys, static.value_dim)),
    )
    if static.skips_masks:
        # Tiles that need a mask come first, for all query heads, then all others.
        full_first = _QueryTile(tiles.full_tile(i32(0)), i32(0))
        sums = cta.run_loop(sums, i32(0), tiles.masked, tiles.masked_tile, full_first, masked=True)
        before = tiles.masked * groups
        sums = cta.run_loop(sums, before, tiles.full, tiles.full_tile, None, masked=False)
    else:  # The same code for both.
        sums = cta.run_loop(sums, i32(0), tiles.total, tiles.tile, None, masked=True)
    instructions.wait_for_copies()
    # Keys that no query attends to add nothing, but new arrays must be written.
    if adds_dkv:
        pl.when(tiles.total > 0)(lambda: cta.write(sums, adds=True))
    else:
        cta.write(sums, adds=False)


class _QueryTile(NamedTuple):
    """The query tile of a loop step, of a query head that shares the CTA's key/value head.

    Attributes:
      index: index of the tile.
      member: index of the query head within the key/value head's group.
    """

    index: Any
    member: Any


class _Cta(NamedTuple):
    """One warpgroup of a CTA, and its part of the CTA's work.

    Attributes:
      static: static parameters of the call.
      arrays: references to what is read.
      results: references to what is written.
      memory: shared memory by name.
      fragments: register layouts.
      warpgroup: index of the warpgroup.
      batch: batch index.
      kv_head: key/value head.
      kv_tile: KV tile.
      tiles: query tiles to visit.
    """

    static: Sm80Static[BackwardConfig]
    arrays: BackwardArrays
    results: BackwardResults
    memory: Any
    fragments: instructions.Fragments
    warpgroup: Any
    batch: Any
    kv_head: Any
    kv_tile: Any
    tiles: TileIterator

    @classmethod
    def of(
        cls,
        static: Sm80Static[BackwardConfig],
        arrays: BackwardArrays,
        results: BackwardResults,
        memory: Any,
    ) -> _Cta:
        """The warpgroup of the current grid indices."""
        batch, kv_head, kv_tile = (lax.axis_index(name) for name in ("batch", "heads", "tiles"))
        bounds = arrays.attention.bounds
        tiles = TileIterator(bounds, batch, kv_head, kv_tile, static.q_tiles - 1)
        fragments = instructions.Fragments.of(static.dtype, BACKWARD_M_WARPS)
        places = lax.axis_index(WARPGROUP_AXIS), batch, kv_head, kv_tile, tiles
        return cls(static, arrays, results, memory, fragments, *places)

    @property
    def own_keys(self) -> Any:
        """The slice of the warpgroup's keys and values within the CTA's."""
        return pl.ds(self.warpgroup * self.static.config.keys, self.static.config.keys)

    def head(self, q_tile: _QueryTile) -> Any:
        """The query head of a step."""
        if self.static.groups == 1:
            return self.kv_head
        return self.kv_head * self.static.groups + q_tile.member

    def copy_keys(self) -> None:
        """Starts the copies of keys and values; each warpgroup copies its own."""
        config, attention = self.static.config, self.arrays.attention
        keys = pl.ds(self.kv_tile * config.block_kv + self.warpgroup * config.keys, config.keys)
        for name, source, dim in (
            ("k", attention.k, self.static.head_dim),
            ("v", attention.v, self.static.value_dim),
        ):
            part = source.at[self.batch, keys, pl.ds(self.kv_head * dim, dim)]
            instructions.copy(part, self.memory[name].at[self.own_keys])

    def copy_queries(self, q_tile: _QueryTile, stage: Any) -> None:
        """Starts the copies of a step's queries and stats."""
        self._copy_rows(self.arrays.attention.q, "q", self.static.head_dim, q_tile, stage)
        # Both warpgroups copy all stats: a half may have fewer elements than there are threads.
        stats = self.arrays.stats.at[self.batch, self.head(q_tile), q_tile.index]
        instructions.copy(stats, self.memory["stats"].at[stage])

    def copy_do(self, q_tile: _QueryTile, stage: Any) -> None:
        """Starts the copy of a step's dO."""
        self._copy_rows(self.arrays.do, "do", self.static.value_dim, q_tile, stage)

    def _copy_rows(self, source: Any, name: str, dim: int, q_tile: _QueryTile, stage: Any) -> None:
        """Starts the copy of the warpgroup's half of a query tile."""
        block_q = self.static.config.block_q
        rows = block_q // BACKWARD_WARPGROUPS
        first = self.warpgroup * rows
        queries = pl.ds(q_tile.index * block_q + first, rows)
        source = source.at[self.batch, queries, pl.ds(self.head(q_tile) * dim, dim)]
        instructions.copy(source, self.memory[name].at[stage, pl.ds(first, rows)])

    def run_loop(
        self, sums: _Sums, before: Any, count: Any, tile_of: Any, after: Any, *, masked: bool
    ) -> _Sums:
        """Loops over ``count`` tiles of every query head.

        Args:
          sums: the sums over previous steps.
          before: number of previous steps.
          count: number of tiles.
          tile_of: ``index -> tile``.
          after: what to prefetch in the last step; None if no step follows.
          masked: whether some of the tiles' scores may be masked.
        """
        groups = i32(self.static.groups)

        def body(step, state):
            index, member, sums = state
            following, wraps = index + 1, index + 1 == count
            if self.static.groups > 1:
                following = jnp.where(wraps, 0, following)
                next_member = member + wraps.astype(jnp.int32)
                is_last = next_member == groups
                next_member = jnp.where(is_last, 0, next_member)
            else:
                next_member, is_last = member, wraps
            upcoming = _QueryTile(tile_of(following), next_member)
            if after is not None:
                upcoming = _QueryTile(jnp.where(is_last, after.index, upcoming.index), next_member)
            q_tile = _QueryTile(tile_of(index), member)
            sums = self.run_step(sums, before + step, q_tile, upcoming, masked=masked)
            return following, next_member, sums

        state = i32(0), i32(0), sums
        return lax.fori_loop(0, count * groups, body, state)[2]

    def run_step(
        self, sums: _Sums, step: Any, q_tile: _QueryTile, upcoming: _QueryTile, *, masked: bool
    ) -> _Sums:
        """One step of the loop, on a query tile that is being copied.

        Args:
          sums: the sums over previous steps.
          step: number of previous steps.
          q_tile: the query tile.
          upcoming: the query tile to copy next.
          masked: whether some of the tile's scores may be masked.
        """
        static, fragments, memory = self.static, self.fragments, self.memory
        stages = static.config.stages
        stage = lax.rem(step, i32(stages)) if stages > 1 else i32(0)
        instructions.wait_for_copies_of_cta()
        if stages > 1:
            self.copy_queries(upcoming, i32(1) - stage)
            self.copy_do(upcoming, i32(1) - stage)
        # Loaded early to hide the latency.
        scale = self.arrays.dq_scale
        scale = None if scale is None else scale[self.batch, self.head(q_tile)]
        self._make_weights(q_tile, stage, masked=masked)
        instructions.cta_barrier()
        own = self.warpgroup

        def transposed(name):
            left = memory[name].at[own].transpose((1, 0))
            return instructions.load_matrix(left, fragments.lhs)

        def rows(name):
            return instructions.load_matrix(memory[name].at[stage], fragments.rhs)

        dv = plgpu.mma(sums.dv, transposed("p"), rows("do"))
        self._add_dq(q_tile, scale)
        dk = plgpu.mma(sums.dk, transposed("ds"), rows("q"))
        if stages == 1:
            instructions.cta_barrier()
            self.copy_queries(upcoming, stage)
            self.copy_do(upcoming, stage)
        return _Sums(dk, dv)

    def _make_weights(self, q_tile: _QueryTile, stage: Any, *, masked: bool) -> None:
        """Writes P, after dropout, and dS of the warpgroup's keys to shared memory."""
        static, fragments, memory = self.static, self.fragments, self.memory
        config = static.config
        shape = config.block_q, config.keys
        products = instructions.transposed_product(
            fragments,
            fragments.zeros(shape),
            memory["q"].at[stage],
            memory["k"].at[self.own_keys],
            swizzle_lanes(static.head_dim, 2),
        )
        tile = ScoreTile(
            static,
            self.arrays.attention.scores,
            fragments,
            shape,
            self.batch,
            self.head(q_tile),
            q_tile.index * config.block_q,
            self.kv_tile * config.block_kv + self.warpgroup * config.keys,
        )
        raw = tile.raw(products)
        scores = tile.scores(raw, masked=masked)
        lse, delta = (
            memory["stats"].at[stage, pl.ds(first, config.block_q)] for first in (0, config.block_q)
        )
        lse, excess = instructions.load_vector(lse, fragments.rows), tile.excess()
        lse = fragments.along_rows(lse if excess is None else lse + excess, shape)
        p = jnp.exp2(scores * static.base_2_factor - lse)
        p = plgpu.layout_cast(p, fragments.tile)
        factors = tile.dropout_factors()
        used = p if factors is None else p * factors
        memory["p"].at[self.warpgroup][...] = used.astype(static.dtype)
        delta = fragments.along_rows(instructions.load_vector(delta, fragments.rows), shape)
        # Without dropout the accumulator starts from -delta, so the product is dP - delta.
        dp = instructions.transposed_product(
            fragments,
            fragments.zeros(shape) if factors is not None else -delta,
            memory["do"].at[stage],
            memory["v"].at[self.own_keys],
            swizzle_lanes(static.value_dim, 2),
        )
        if factors is not None:
            again = tile.dropout_factors()
            assert again is not None
            dp = dp * again - delta
        ds = p * dp
        for name, part in tile.per_head_gradients(ds).items():
            place = self.batch, self.head(q_tile), self.kv_tile, self.warpgroup
            part = plgpu.layout_cast(part, fragments.tile)
            instructions.add_sum(self.results.per_head[name].at[place], part, fragments)
        ds = plgpu.layout_cast(tile.product_gradients(raw, p, ds), fragments.tile)
        memory["ds"].at[self.warpgroup][...] = ds.astype(static.dtype)

    def _add_dq(self, q_tile: _QueryTile, scale: Any) -> None:
        """Adds the warpgroup's part of a tile's dQ, over all keys of the CTA, to global memory.

        ``scale``: of dQ in fixed point; None if it is float32.
        """
        config, fragments, memory = self.static.config, self.fragments, self.memory
        queries, lanes = config.dq_part(self.static.head_dim)
        dq = fragments.zeros((queries, lanes))
        for part in range(BACKWARD_WARPGROUPS):
            ds, k = memory["ds"].at[part], memory["k"].at[pl.ds(part * config.keys, config.keys)]
            if queries < config.block_q:
                ds = memory["ds"].at[part, pl.ds(self.warpgroup * queries, queries)]
            else:
                keys = pl.ds(part * config.keys, config.keys)
                k = memory["k"].at[keys, pl.ds(self.warpgroup * lanes, lanes)]
            ds = instructions.load_matrix(ds, fragments.lhs)
            dq = plgpu.mma(dq, ds, instructions.load_matrix(k, fragments.rhs))
        place = self.batch, self.head(q_tile), q_tile.index, self.warpgroup
        add = instructions.add_in_register_order
        if scale is not None:
            dq, add = dq * scale, instructions.add_in_fixed_point
        add(self.results.dq.at[place], dq, fragments)

    def write(self, sums: _Sums, *, adds: bool) -> None:
        """Writes the warpgroup's dK and dV, or adds them to those in the results."""
        config = self.static.config
        first = self.kv_tile * config.block_kv + self.warpgroup * config.keys
        keys = pl.ds(first, config.keys)
        dk = sums.dk * self.static.spec.score.scale
        for target, value in ((self.results.dk, dk), (self.results.dv, sums.dv)):
            dim = value.shape[1]
            place = target.at[self.batch, keys, pl.ds(self.kv_head * dim, dim)]
            if adds:
                value = value + instructions.load(place, self.fragments.tile)
            instructions.store(place, value.astype(target.dtype))
