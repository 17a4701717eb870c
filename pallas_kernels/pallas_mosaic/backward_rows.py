"""What a computing warpgroup of the backward kernel works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_mosaic.configs import WARPGROUP_ROWS
from pallas_kernels.pallas_mosaic.items import Item
from pallas_kernels.pallas_mosaic.operands import BackwardRefs
from pallas_kernels.pallas_mosaic.static import BackwardStatic
from pallas_kernels.pallas_mosaic.tiles import ROWS, i32
from pallas_kernels.pallas_mosaic.tokens import SideTokens


class KeyRows(NamedTuple):
    """The 64 keys of an item that one warpgroup computes: the rows of its tiles of scores.

    Steps are counted over all items of a program.

    Attributes:
      static: what is static about the call.
      refs: the kernel's references.
      warpgroup: number of the warpgroup.
      item: the item.
      end: the step behind the item's last one.
      tokens: positions and segment ids of the keys, in registers along the rows of a tile; None if
        there are no registers to keep them in.
      outside: what :meth:`outside_scores` returns; None if it is not needed, or made in every step.
    """

    static: BackwardStatic
    refs: BackwardRefs
    warpgroup: Any
    item: Item
    end: Any
    tokens: SideTokens | None
    outside: jax.Array | None

    @classmethod
    def of(cls, static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, item: Item) -> KeyRows:
        """The warpgroup's keys of an item."""
        end = item.steps_before + item.steps
        rows = cls(static, refs, warpgroup, item, end, None, None)
        # Beside a bias, dropout or a function there are no registers to keep them in.
        others = static.spec.dropout is not None or static.spec.calls_functions
        if not static.has_bias and not others:
            rows = rows._replace(tokens=rows.load_tokens(warpgroup))
        # Made once; but with a soft cap or a function anew in every step, which leaves the
        # registers to these.
        score = static.spec.score
        plain = score.logits_soft_cap is None and score.score_mod is None
        if static.keys_are_cut_off and plain:
            rows = rows._replace(outside=rows.outside_scores(warpgroup))
        return rows

    def load_tokens(self, warpgroup: Any) -> SideTokens:
        """Positions and segment ids of the keys, kept since the item began or loaded now."""
        if self.tokens is not None:
            return self.tokens
        first = self.item.tile * self.static.config.block_kv + warpgroup * WARPGROUP_ROWS
        keys = pl.ds(first, WARPGROUP_ROWS)
        return self.refs.operands.kv_tokens.load(self.item.batch_row, keys, ROWS)

    def outside_scores(self, warpgroup: Any) -> jax.Array:
        """float32 ``[64]``, to be added to the scores of every key: -inf beyond the last key.

        Keys beyond the last one are zeros. Their scores would be 0, whose weight 2^-lse is no
        weight of the softmax and may overflow.
        """
        static = self.static
        index = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)
        first = self.item.tile * static.config.block_kv + warpgroup * WARPGROUP_ROWS
        return jnp.where(index < static.kv_length - first, 0.0, -jnp.inf)

    def per_head_of(self, head: Any) -> dict[str, Any]:
        """Of each per-head array that logits are made with, a query head's number."""
        return {name: ref[head] for name, ref in self.refs.operands.per_head.items()}

    def stage(self, step: Any) -> Any:
        """The stage that holds the queries of a step."""
        return lax.rem(step, i32(self.static.stages))

    def do_stage(self, step: Any) -> Any:
        """The stage that holds dO of a step."""
        return lax.rem(step, i32(self.static.do_stages))
