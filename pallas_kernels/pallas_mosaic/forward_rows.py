"""What a computing warpgroup of the forward kernel works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import ForwardRefs
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tiles import ROWS, i32
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
      per_head: of each per-head array that logits are made with, the number of the item's head.
    """

    static: ForwardStatic
    refs: ForwardRefs
    warpgroup: Any
    item: Item
    queries: Any
    tokens: SideTokens
    positions: jax.Array | None
    per_head: dict[str, Any]

    @classmethod
    def of(cls, static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, item: Item) -> QueryRows:
        """The warpgroup's queries of an item."""
        first = item.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
        queries = pl.ds(first, WARPGROUP_ROWS)
        tokens = refs.operands.q_tokens.load(item.batch_row, queries, ROWS)
        positions = tokens.positions.astype(jnp.float32) if static.bias_in_products else None
        per_head = {name: ref[item.head] for name, ref in refs.operands.per_head.items()}
        return cls(static, refs, warpgroup, item, queries, tokens, positions, per_head)

    def stage(self, step: Any) -> Any:
        """The stage that holds the keys of a step, or their values."""
        return lax.rem(self.item.steps_before + step, i32(self.static.config.stages))
