"""What one local attention computes, apart from its arrays: scale, window, soft cap, and tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention: hashable, so that it can key a jit cache.

    A query at position ``p`` sees the keys at ``p - left .. p + right``; causal attention is
    ``right = 0``. Positions decide, never indices, so one spec serves every layout.

    Attributes:
      scale: factor on the dot products.
      left: how far back a query sees, in tokens; None is no limit.
      right: how far ahead a query sees, in tokens; None is no limit.
      logits_soft_cap: c of ``c * tanh(logits / c)``, applied after the scale; None is no cap.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    logits_soft_cap: float | None = None

    def __post_init__(self):
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}: it must be a finite number")
        for side in ("left", "right"):
            reach = getattr(self, side)
            if reach is not None and not 0 <= reach < 2**31:
                raise ValueError(
                    f"the window's {side} is {reach}: it must be from 0 to 2**31 - 1, or None"
                )
        cap = self.logits_soft_cap
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap is {cap}: it must be positive and finite, or None")


class Tokens(NamedTuple):
    """Which tokens one side of a local attention holds, in index order.

    Attributes:
      positions: int32 ``[length]``, each token's place in the whole sequence. Ascending positions
        give the tightest tile bounds; any order is right.
      segment_ids: int32 ``[B, length]`` or None. A query sees keys of its own segment only, and
        segment 0 is padding: it sees nothing and is seen by nothing.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How many query and key tokens one tile of scores spans."""

    block_q: int
    block_kv: int

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
