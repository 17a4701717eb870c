"""Positions and segment ids in the Mosaic GPU kernels, and the mask of a tile of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.inputs import QuerySide, Side
from pallas_kernels.mask import Mask


class SideTokens(NamedTuple):
    """What masks and bias read of one side: all in device memory, or a tile's in registers.

    Attributes:
      positions: int32 ``[length]``; None if neither mask nor bias needs them.
      segment_ids: int32 ``[B, length]``, of a tile ``[length]``; None if there are none.
      kv_starts: of queries, int32 ``[B or 1, length]``, of a tile ``[length]``; None without.
      kv_ends: the same.
    """

    positions: Any = None
    segment_ids: Any = None
    kv_starts: Any = None
    kv_ends: Any = None

    @classmethod
    def padded(cls, side: Side, block: int, known: bool = False) -> SideTokens:
        """Arrays padded to whole tiles of ``block`` tokens. Segment 0 hides the padding.

        ``known``: behind the last token come copies of its position, for functions that may be
        undefined at others.
        """
        assert side.positions is not None
        length = -(-side.positions.shape[0] // block) * block
        by_row = side.kv_bounds if isinstance(side, QuerySide) else {}
        if side.segment_ids is not None:
            by_row["segment_ids"] = side.segment_ids
        by_row = {name: pad_axis(x, 1, length) for name, x in by_row.items()}
        extra = length - side.positions.shape[0]
        if known and extra:
            return cls(jnp.pad(side.positions, (0, extra), mode="edge"), **by_row)
        return cls(pad_axis(side.positions, 0, length), **by_row)

    def load(self, batch_row: Any, tokens: Any, layout: Any) -> SideTokens:
        """Those of ``tokens``, a slice of the length, in registers."""

        def loaded(ref: Any) -> Any:
            if ref is None:
                return None
            if len(ref.shape) == 2:
                ref = ref.at[batch_row if ref.shape[0] != 1 else 0]
            return plgpu.load(ref.at[tokens], layout=layout, optimized=False)

        return SideTokens(*map(loaded, self))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
        return all(x is None for x in self)

    def only(self, *names: str) -> SideTokens:
        """These fields alone."""
        return SideTokens(**{name: getattr(self, name) for name in names})


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
    q_positions, q_ids, starts, ends = (None if x is None else q_along(x, shape) for x in q)
    k_positions, k_ids, *_ = (None if x is None else k_along(x, shape) for x in k)
    return mask.allowed(q_positions, k_positions, q_ids, k_ids, starts, ends)
