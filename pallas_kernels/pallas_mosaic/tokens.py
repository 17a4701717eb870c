"""Positions and segment ids in the Mosaic GPU kernels, and the mask of a tile of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.mask import Mask
from pallas_kernels.operands import Tokens


class SideTokens(NamedTuple):
    """Positions and segment ids of one side: all in device memory, or a tile's in registers.

    Attributes:
      positions: int32 ``[length]``; None if neither mask nor bias needs them.
      segment_ids: int32 ``[B, length]``, of a tile ``[length]``; None if there are none.
    """

    positions: Any = None
    segment_ids: Any = None

    @classmethod
    def padded(cls, tokens: Tokens, block: int) -> SideTokens:
        """Arrays padded to whole tiles of ``block`` tokens. Segment 0 hides the padding."""
        length = -(-tokens.positions.shape[0] // block) * block
        positions = pad_axis(tokens.positions, 0, length)
        if tokens.segment_ids is None:
            return cls(positions)
        return cls(positions, pad_axis(tokens.segment_ids, 1, length))

    def load(self, batch_row: Any, tokens: Any, layout: Any) -> SideTokens:
        """Those of ``tokens``, a slice of the length, in registers."""
        if self.positions is None:
            return SideTokens()
        positions = plgpu.load(self.positions.at[tokens], layout=layout, optimized=False)
        if self.segment_ids is None:
            return SideTokens(positions)
        ids = plgpu.load(self.segment_ids.at[batch_row, tokens], layout=layout, optimized=False)
        return SideTokens(positions, ids)


def score_mask(
    mask: Mask,
    shape: tuple[int, ...],
    q: SideTokens,
    k: SideTokens,
    q_along: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    k_along: Callable[[jax.Array, tuple[int, ...]], jax.Array],
) -> jax.Array | None:
    """Which scores of a tile count; None if all do.

    Args:
      mask: says which distances are allowed.
      shape: the tile's.
      q: tokens of the tile's queries, in registers.
      k: tokens of the tile's keys, in registers.
      q_along: how queries lie, ``along_rows`` or ``along_columns``.
      k_along: how keys lie: the other one.
    """
    if q.positions is None:
        return None
    q_positions, q_ids = (None if x is None else q_along(x, shape) for x in q)
    k_positions, k_ids = (None if x is None else k_along(x, shape) for x in k)
    assert q_positions is not None
    assert k_positions is not None
    return mask.allowed(q_positions, k_positions, q_ids, k_ids)
