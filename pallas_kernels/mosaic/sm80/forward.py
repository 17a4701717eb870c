"""Forward local attention on Ampere: one CTA per (batch index, query head, query tile).

A CTA keeps a tile of queries in shared memory and loops over the KV tiles within its bounds. K and
V have one buffer each: a tile's V is copied during ``q k^T``, and the next tile's K during softmax
and ``p v``. Two CTAs on an SM overlap the rest. All warps are along the rows of the products, so
scores stay in registers from ``q k^T`` to ``p v``. Query tiles without a key copy nothing; where a
carry is updated in place, they leave it as it is.
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

from pallas_kernels import softmax
from pallas_kernels.arrays import pad_axis
from pallas_kernels.bounds import query_bounds
from pallas_kernels.inputs import AttentionInputs, Carry
from pallas_kernels.merge import merge_weights
from pallas_kernels.mosaic.fragments import along_rows, i32, swizzle_lanes
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.scores import ScoreTile
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.configs import WARPS, ForwardConfig, forward_config
from pallas_kernels.mosaic.sm80.inputs import (
    AttentionArrays,
    Sm80Static,
    attention_arrays,
    rows_of_heads,
)
from pallas_kernels.mosaic.sm80.online_softmax import OnlineSoftmax
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.spec import AttentionSpec


class ForwardResults(NamedTuple):
    """What the kernel writes; an incoming carry has the same form.

    Attributes:
      o: ``[B, T, N * Hv]``, T padded to whole tiles.
      lse: float32 ``[B, N, T]``.
    """

    o: Any
    lse: Any


class ForwardArrays(NamedTuple):
    """What the kernel reads.

    Attributes:
      attention: queries, keys, values, and the inputs of scores.
      sink: float32 ``[N]``, sink logits; None without, and with a carry, which includes them.
      carry: (o, lse) to merge with; None without a carry, and if it is updated in place.
    """

    attention: AttentionArrays
    sink: Any
    carry: ForwardResults | None


def forward(
    inputs: AttentionInputs,
    bounds: Any,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: ForwardConfig | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`; ``config`` None is the default."""
    config = config or forward_config(inputs.head_dim, inputs.value_dim)
    static = Sm80Static.of(inputs, spec, config)
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    length = static.padded_q_length
    arrays = ForwardArrays(
        attention_arrays(static, inputs, bounds),
        None if carry is not None else inputs.shared.sink_logits,
        None,
    )
    results = ForwardResults(
        jax.ShapeDtypeStruct((static.batch, length, static.heads * static.value_dim), out_dtype),
        jax.ShapeDtypeStruct((static.batch, static.heads, length), jnp.dtype(jnp.float32)),
    )
    in_place = False
    if carry is not None:
        given = ForwardResults(rows_of_heads(carry[0], length), pad_axis(carry[1], 2, length))
        in_place = carry[0].dtype == out_dtype
        if in_place:
            results = given
        else:
            arrays = arrays._replace(carry=given)
    o, lse = launch(
        functools.partial(_kernel, static, in_place),
        "burst_forward",
        grid={"batch": static.batch, "heads": static.heads, "tiles": static.q_tiles},
        warpgroups=1,
        semantics=plgpu.LoweringSemantics.Lane,
        inputs=arrays,
        results=results,
        memory={
            "q": instructions.tiled_memory((config.block_q, static.head_dim), static.dtype),
            "k": instructions.tiled_memory((config.block_kv, static.head_dim), static.dtype),
            "v": instructions.tiled_memory((config.block_kv, static.value_dim), static.dtype),
        },
    )
    o, lse = o[:, : static.q_length], lse[:, :, : static.q_length]
    return o.reshape(inputs.out_shape), lse


def forward_bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, config: ForwardConfig | None = None
) -> jax.Array:
    """The tile bounds that :func:`forward` reads with the same config."""
    tiles = (config or forward_config(inputs.head_dim, inputs.value_dim)).tiles
    return query_bounds(spec.mask, inputs.query, inputs.kv, tiles, inputs.shared.block_mask)


def _kernel(
    static: Sm80Static[ForwardConfig],
    in_place: bool,
    arrays: ForwardArrays,
    results: ForwardResults,
    memory: Any,
) -> None:
    """One CTA. ``in_place``: the results hold the carry, and are updated."""
    if in_place:
        arrays = arrays._replace(carry=results)
    cta = _Cta.of(static, arrays, results, memory)
    tiles = cta.tiles
    state = cta.start()

    def run(state, count, tile_of, upcoming_of, *, masked):
        def step(index, state):
            tile, upcoming = tile_of(index), upcoming_of(index + 1)
            return cta.step(state, tile, upcoming, masked=masked)

        return lax.fori_loop(0, count, step, state)

    if static.skips_masks:
        state = run(state, tiles.masked, tiles.masked_tile, tiles.tile, masked=True)
        state = run(state, tiles.full, tiles.full_tile, tiles.full_tile, masked=False)
    else:  # The same code for both.
        state = run(state, tiles.total, tiles.tile, tiles.tile, masked=True)
    instructions.wait_for_copies()
    if in_place:
        pl.when(tiles.total > 0)(lambda: cta.finish(state))
    else:
        cta.finish(state)


class _Cta(NamedTuple):
    """One CTA, and its part of the work.

    Attributes:
      static: static parameters of the call.
      arrays: references to what is read.
      results: references to what is written.
      memory: shared memory by name.
      fragments: register layouts.
      batch: batch index.
      head: query head.
      kv_head: key/value head.
      tile: query tile.
      tiles: KV tiles to visit.
      line: the affine bias of the tile (:meth:`ScoreTile.affine_bias`).
    """

    static: Sm80Static[ForwardConfig]
    arrays: ForwardArrays
    results: ForwardResults
    memory: Any
    fragments: instructions.Fragments
    batch: Any
    head: Any
    kv_head: Any
    tile: Any
    tiles: TileIterator
    line: tuple[Any, Any] | None = None

    @classmethod
    def of(
        cls,
        static: Sm80Static[ForwardConfig],
        arrays: ForwardArrays,
        results: ForwardResults,
        memory: Any,
    ) -> _Cta:
        """The CTA of the current grid indices."""
        batch, head = (lax.axis_index(name) for name in ("batch", "heads"))
        # With ascending positions a causal mask gives the last tiles the most work: they go first.
        tile = i32(static.q_tiles - 1) - lax.axis_index("tiles")
        kv_head = head if static.groups == 1 else lax.div(head, i32(static.groups))
        bounds = arrays.attention.bounds
        tiles = TileIterator(bounds, batch, head, tile, static.kv_tiles - 1)
        fragments = instructions.Fragments.of(static.dtype, WARPS)
        places = batch, head, kv_head, tile, tiles
        cta = cls(static, arrays, results, memory, fragments, *places)
        return cta._replace(line=cta._score_tile(i32(0)).affine_bias())

    def copy_queries(self) -> None:
        """Starts the copy of the queries."""
        lanes = _lanes(self.head, self.static.head_dim)
        source = self.arrays.attention.q.at[self.batch, self._queries(), lanes]
        instructions.copy(source, self.memory["q"])

    def copy_keys(self, tile: Any) -> None:
        """Starts the copy of a tile of keys."""
        self._copy_part(self.arrays.attention.k, "k", tile, self.static.head_dim)

    def copy_values(self, tile: Any) -> None:
        """Starts the copy of a tile of values."""
        self._copy_part(self.arrays.attention.v, "v", tile, self.static.value_dim)

    def _copy_part(self, source: Any, name: str, tile: Any, lanes: int) -> None:
        block = self.static.config.block_kv
        keys = pl.ds(tile * block, block)
        source = source.at[self.batch, keys, _lanes(self.kv_head, lanes)]
        instructions.copy(source, self.memory[name])

    def _queries(self) -> Any:
        block = self.static.config.block_q
        return pl.ds(self.tile * block, block)

    def start(self) -> OnlineSoftmax:
        """The initial softmax state; starts the copies of the queries and the first tile's keys."""
        static, sinks = self.static, self.arrays.sink
        rows = static.config.block_q

        @pl.when(self.tiles.total > 0)
        def _():
            self.copy_queries()
            self.copy_keys(self.tiles.tile(i32(0)))

        m, total = softmax.start((rows,), None if sinks is None else sinks[self.head])
        m, total = (plgpu.layout_cast(x, self.fragments.rows) for x in (m, total))
        if sinks is not None:
            total = instructions.row_parts_of(total)
            if (excess := self._score_tile(i32(0)).excess()) is not None:
                m = m + excess
        return OnlineSoftmax(m, total, self.fragments.zeros((rows, static.value_dim)))

    def _products(self) -> jax.Array:
        """``q k^T`` of a tile, float32 ``[block_q, block_kv]``."""
        config, memory = self.static.config, self.memory
        return instructions.transposed_product(
            self.fragments,
            self.fragments.zeros((config.block_q, config.block_kv)),
            memory["q"],
            memory["k"],
            swizzle_lanes(self.static.head_dim, 2),
        )

    def step(
        self, state: OnlineSoftmax, tile: Any, upcoming: Any, *, masked: bool
    ) -> OnlineSoftmax:
        """One step of the KV loop, on a tile whose keys are being copied.

        Args:
          state: the softmax over the previous tiles.
          tile: index of the KV tile.
          upcoming: index of the next one, whose keys are prefetched.
          masked: whether some of the tile's scores may be masked.
        """
        static, fragments = self.static, self.fragments
        instructions.wait_for_copies()
        self.copy_values(tile)
        products = self._products()
        of_tile = self._score_tile(tile)
        scores = of_tile.scores(of_tile.raw(products), masked=masked)
        instructions.wait_for_copies()
        self.copy_keys(upcoming)
        weights, state = state.add(scores, static.base_2_factor, fragments)
        weights = of_tile.without_dropped(weights)
        weights = plgpu.layout_cast(weights.astype(static.dtype), fragments.tile)
        left = instructions.as_left_operand(weights, fragments)
        values = instructions.load_matrix(self.memory["v"], fragments.rhs)
        return state._replace(acc=plgpu.mma(state.acc, left, values))

    def _score_tile(self, tile: Any) -> ScoreTile:
        """The scores of the CTA's queries and a KV tile."""
        config = self.static.config
        return ScoreTile(
            self.static,
            self.arrays.attention.scores,
            self.fragments,
            (config.block_q, config.block_kv),
            self.batch,
            self.head,
            self.tile * config.block_q,
            tile * config.block_kv,
            self.line,
        )

    def finish(self, state: OnlineSoftmax) -> None:
        """Normalizes o, merges with the carry, and writes o and lse."""
        fragments, carry = self.fragments, self.arrays.carry
        total = instructions.sum_row_parts(state.total, fragments)
        excess = self._score_tile(i32(0)).excess()
        divisor, lse = softmax.finish(state.m if excess is None else state.m - excess, total)
        dropout = self.static.spec.dropout
        weight = (1.0 if dropout is None else dropout.unit) / divisor
        place = self.batch, self._queries(), _lanes(self.head, self.static.value_dim)
        row_place = self.batch, self.head, self._queries()
        acc = state.acc
        if carry is None:
            o = acc * along_rows(weight, acc.shape)
        else:
            old_lse = instructions.load(carry.lse.at[row_place], fragments.rows)
            old_weight, new_weight, lse = merge_weights(old_lse, lse)
            old = instructions.load(carry.o.at[place], fragments.tile).astype(jnp.float32)
            o = acc * along_rows(weight * new_weight, acc.shape)
            o = o + old * along_rows(old_weight, acc.shape)
        instructions.store(self.results.o.at[place], o.astype(self.results.o.dtype))
        instructions.store(self.results.lse.at[row_place], lse)


def _lanes(head: Any, dim: int) -> Any:
    """A head's lanes of ``[.., heads * dim]``."""
    return pl.ds(head * dim, dim)
