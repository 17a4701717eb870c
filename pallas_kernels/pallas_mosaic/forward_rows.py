"""What a computing warpgroup of the forward kernel works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import ForwardRefs
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import ROWS, i32, meet, multiply_add
from pallas_kernels.pallas_mosaic.tokens import SideTokens


class QueryRows(NamedTuple):
    """The 64 queries of an item that one warpgroup computes: the rows of its tiles of scores.

    Attributes:
      static: what is static about the call.
      refs: the kernel's references.
      warpgroup: number of the warpgroup.
      item: the item.
      queries: slice of the query axis.
      tokens: positions and segment ids of the queries, in registers along the rows of a tile.
      positions: float32 ``[64]``, positions of the queries; None unless the products of queries and
        keys start from the bias.
      line: ``(slope, start)`` of the bias over the scale, a scalar and float32 ``[64]``, see
        :meth:`pallas_kernels.score.Score.bias_line`; None unless products start from a line.
      per_head: of each per-head array that logits are made with, the number of the item's head.
      dropout: int32 ``[64]``, the numbers of the queries; None if nothing is dropped.
    """

    static: ForwardStatic
    refs: ForwardRefs
    warpgroup: Any
    item: Item
    queries: Any
    tokens: SideTokens
    positions: jax.Array | None
    line: tuple[jax.Array, jax.Array] | None
    per_head: dict[str, Any]
    dropout: jax.Array | None

    @classmethod
    def of(cls, static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, item: Item) -> QueryRows:
        """The warpgroup's queries of an item."""
        first = item.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
        queries = pl.ds(first, WARPGROUP_ROWS)
        tokens = refs.operands.q_tokens.load(item.batch_row, queries, ROWS)
        per_head = {name: ref[item.head] for name, ref in refs.operands.per_head.items()}
        positions = line = dropout = None
        if refs.operands.dropout is not None:
            place = item.batch_row, item.head, queries
            dropout = refs.operands.dropout.load_rows(*place, ROWS)
        if static.bias_in_products:
            positions = tokens.positions.astype(jnp.float32)
            if static.bias_is_line:
                score = static.spec.score
                line = score.bias_line(positions, per_head, unit=1 / score.raw_factor)
        logits_of = positions, line, per_head
        return cls(static, refs, warpgroup, item, queries, tokens, *logits_of, dropout)

    def excess(self) -> jax.Array | None:
        """float32 ``[64]``: by how much scores in base 2 are too large; None if by nothing.

        It is what the line of the bias is at the queries' own positions.
        """
        if self.line is None:
            return None
        slope, start = self.line
        assert self.positions is not None
        at_query = multiply_add(slope, self.positions, start, ROWS)
        return at_query * self.static.base_2_factor

    def free_stage(self, free: Any, stage: Any) -> None:
        """Says at one of the barriers ``free`` that this warpgroup has read what is in a stage."""
        if self.static.config.cluster > 1:
            # At a cluster's barrier one thread arrives for the whole warpgroup.
            meet()
        plgpu.barrier_arrive(free.at[stage])

    def stage(self, step: Any) -> Any:
        """The stage that holds the keys of a step, or their values."""
        return lax.rem(self.item.steps_before + step, i32(self.static.config.stages))
