"""A ``score_mod`` and a ``mask_mod`` that read all arguments, and their dense equivalents."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


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


_COMPARED = (lax.lt, lax.le, lax.gt, lax.ge, lax.eq, lax.ne)
_LOGICAL = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.eq, lax.ne)
_OF_ONE = (lax.neg, lax.abs, lax.sign, lax.bitwise_not)
_OF_TWO = (
    *(lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.bitwise_and, lax.bitwise_or),
    lax.bitwise_xor,
)
_PARTIAL = (
    *(lax.div, lax.rem, jnp.floor_divide, jnp.remainder),
    *(lax.shift_right_arithmetic, lax.shift_right_logical, lax.shift_left),
)
_NUMBERS = 0, 1, 2, 3, 7, 31, 64, 1000, 2**16 + 1, 2**30, 2**31 - 1


def _defined(function):
    """The function, defined for every second argument: divisors from 1, shifts below 32."""
    if "shift" in function.__name__:
        return lambda x, y: function(x, y & jnp.full_like(y, 31))
    return lambda x, y: function(x, lax.max(y, jnp.full_like(y, 1)))


def drawn(rng, depth, kind, *, defined=False):
    """A random function of batch, head and positions, whose result is "bool" or "int".

    Its arguments are scalars or int32 arrays of one shape.

    Args:
      rng: NumPy's generator.
      depth: operations one after the other, at most.
      kind: "bool" or "int".
      defined: whether results are defined everywhere; else it may divide by 0.
    """

    def pick(choices):
        return choices[rng.integers(len(choices))]

    def parts(*kinds):
        return [drawn(rng, depth - 1, each, defined=defined) for each in kinds]

    if kind == "int" and (depth <= 0 or rng.random() < 0.2):
        index, number = rng.integers(6), pick((-1, 1)) * pick(_NUMBERS)
        return lambda *place: place[index] if index < 4 else jnp.full_like(place[0], number)
    way = rng.random()
    if way < 0.1 and depth > 0:
        which, x, y = parts("bool", kind, kind)
        return lambda *place: jnp.where(which(*place), x(*place), y(*place))
    if way < 0.2:
        (x,) = parts("bool" if kind == "int" and way < 0.12 and depth > 0 else "int")
        if kind == "int" and way >= 0.12:
            function = pick(_OF_ONE)
            return lambda *place: function(x(*place))
        return lambda *place: x(*place).astype(jnp.bool_ if kind == "bool" else jnp.int32)
    if way < 0.24 and kind == "bool" and depth > 0:
        (x,) = parts("bool")
        return lambda *place: ~x(*place)
    function, of = pick((*_OF_TWO, *_PARTIAL)), "int"
    if defined and function in _PARTIAL:
        function = _defined(function)
    if kind == "bool":
        of = pick(("int", "bool")) if depth > 1 else "int"
        function = pick(_LOGICAL if of == "bool" else _COMPARED)
    x, y = parts(of, of)
    return lambda *place: function(x(*place), y(*place))


@functools.lru_cache
def drawn_mask(seed):
    """A drawn ``mask_mod``, defined everywhere, of arguments that broadcast."""
    rng = np.random.default_rng(seed)
    function = drawn(rng, rng.integers(1, 4), "bool", defined=True)

    def mask_mod(*place):
        return function(*jnp.broadcast_arrays(*map(jnp.asarray, place)))

    return mask_mod


FUNCTIONS = {"score_mod": score_mod, "mask_mod": mask_mod}


def called(kind):
    """The arguments that a case names: "functions" for both, or the name of one.

    Others are "tile_mask" and "drawn" with a seed (:func:`drawn_mask`).
    """
    if (kind or "").startswith("drawn"):
        return {"mask_mod": drawn_mask(int(kind.removeprefix("drawn")))}
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
