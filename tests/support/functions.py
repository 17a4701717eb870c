"""A ``score_mod`` and a ``mask_mod`` that read all arguments, and their dense equivalents."""

from __future__ import annotations

import dataclasses

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


FUNCTIONS = {"score_mod": score_mod, "mask_mod": mask_mod}


def called(kind):
    """The arguments that a case names: True for both functions, or the name of one."""
    return {name: function for name, function in FUNCTIONS.items() if kind in (True, name)}


def _grid(batch, heads, q_positions, kv_positions):
    """Index and position arguments, which broadcast to all scores ``[B, N, T, S]``."""
    b, h = (np.arange(count, dtype=np.int32) for count in (batch, heads))
    q, k = (np.asarray(x, np.int32) for x in (q_positions, kv_positions))
    return (
        b[:, None, None, None],
        h[None, :, None, None],
        q[None, None, :, None],
        k[None, None, None],
    )


@dataclasses.dataclass(frozen=True)
class _Modified:
    """``score_mod`` of all logits ``[B, N, T, S]``; hashable, so that programs are reused."""

    batch: int
    heads: int
    q_positions: tuple[int, ...]
    kv_positions: tuple[int, ...]

    def __call__(self, logits):
        grid = _grid(*dataclasses.astuple(self))
        return score_mod(logits, *(jnp.broadcast_to(x, logits.shape) for x in grid))


def on_all(batch, heads, q_positions, kv_positions):
    """``(function of all logits, mask)`` of dense attention, both ``[B, N, T, S]``."""
    grid = _grid(batch, heads, q_positions, kv_positions)
    shape = batch, heads, len(q_positions), len(kv_positions)
    places = (tuple(np.asarray(x).tolist()) for x in (q_positions, kv_positions))
    modified = _Modified(batch, heads, *places)
    return modified, np.broadcast_to(np.asarray(mask_mod(*grid)), shape)


def both(keep, other):
    """A dense mask ``[B or 1, T, S]`` or ``[B or 1, N, T, S]`` and one of the latter shape."""
    return (keep[:, None] if keep.ndim == 3 else keep) & other
