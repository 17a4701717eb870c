"""A ``score_mod`` and a ``mask_mod`` that read all arguments, and their dense equivalents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def score_mod(score, batch, head, q_position, kv_position):
    """Nonlinear, and different per sequence and head; its derivative is 0 for some scores."""

    def number(x):
        return x.astype(score.dtype)

    bent = jnp.where(score > 1.5, 1.5 + 0.5 * jnp.tanh(2 * (score - 1.5)), jnp.maximum(score, -2))
    away = number(jnp.abs(q_position - kv_position))
    return bent * (1 + 0.25 * number(head)) - 0.01 * away * number(1 + batch)


def mask_mod(batch, head, q_position, kv_position):
    """Masks two thirds of the keys, and all keys of some queries."""
    seen = (q_position + 2 * kv_position + batch + head) % 3 == 0
    return seen & (q_position % 11 != 5)


def tile_mask(batch, head, q_position, kv_position):
    """A ``mask_mod`` that masks whole blocks of 128 x 128 scores, and one query."""
    del batch, head
    return (q_position // 128 != kv_position // 128 + 1) & (q_position != 70)


FUNCTIONS = {"score_mod": score_mod, "mask_mod": mask_mod}


def called(kind):
    """The arguments that a case names: "functions" for both, "tile_mask", or the name of one."""
    if kind == "tile_mask":
        return {"mask_mod": tile_mask}
    return {name: function for name, function in FUNCTIONS.items() if kind in ("functions", name)}


def grid(batch, heads, q_positions, kv_positions):
    """Index and position arguments, which broadcast to all scores ``[B, N, T, S]``."""
    places = (np.asarray(x).astype(np.int32) for x in (q_positions, kv_positions))
    return np.ix_(*(np.arange(count, dtype=np.int32) for count in (batch, heads)), *places)


@dataclasses.dataclass(frozen=True)
class OfAll:
    """A ``score_mod`` of all logits ``[B, N, T, S]``; hashable, so that programs are reused."""

    function: Callable[..., Any]
    batch: int
    heads: int
    q_positions: tuple[int, ...]
    kv_positions: tuple[int, ...]

    def __call__(self, logits):
        indices = grid(self.batch, self.heads, self.q_positions, self.kv_positions)
        return self.function(logits, *(jnp.broadcast_to(x, logits.shape) for x in indices))
