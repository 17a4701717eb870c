"""Tiles that a ``mask_mod`` masks entirely or not at all, against every score."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import interval_arithmetic

BLOCK, HUGE = 8, 2**31 - 1
BATCH, HEADS = np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32)
POSITIONS = {
    "natural": (np.arange(64), np.arange(64)),
    "another shard": (np.arange(64), np.arange(128, 192)),
    "striped": (np.arange(1, 128, 2), np.arange(0, 192, 3)),
    "shuffled": (np.random.default_rng(0).permutation(64), np.arange(64)),
    "far": (np.arange(HUGE - 64, HUGE), np.linspace(0, HUGE, 64).astype(np.int64)),
}
# Functions whose tiles are known exactly, at least for ascending positions.
EXACT = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: abs(q - k) <= 20,
    "prefix": lambda b, h, q, k: (k < 13) | (q >= k),
    "documents": lambda b, h, q, k: q // 24 == k // 24,
    "blocks": lambda b, h, q, k: (q >> 4) == (k >> 4),
    "not later": lambda b, h, q, k: ~(q < k),
    "one of two": lambda b, h, q, k: (q > 30) ^ (k > 30),
    "all": lambda b, h, q, k: np.True_,
    "none": lambda b, h, q, k: k < 0,
}  # fmt: skip
OTHERS = {
    "heads": lambda b, h, q, k: jnp.where(h < 2, q - k < 16, q >= k),
    "sequences": lambda b, h, q, k: (q // 8 + b) % 2 == 0,
    "strided": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "hashed": lambda b, h, q, k: (q * 1000003 + k * 77777) % 7 < 3,
    "floats": lambda b, h, q, k: q.astype(jnp.float32) > k.astype(jnp.float32),
    "clipped": lambda b, h, q, k: jnp.clip(q - k, -5, 5) < 3,
    "shifted": lambda b, h, q, k: lax.shift_right_logical(q - k, jnp.int32(3)) < 4,
    "remainder": lambda b, h, q, k: lax.rem(q - k, jnp.int32(20)) < 15,
    "array": lambda b, h, q, k: jnp.array([1, 2, 3])[h] > q - k,
}


def dense(mask_mod, q, k):
    """``(possible, full)`` by every score."""
    run = jax.jit(jnp.vectorize(mask_mod))
    seen = np.asarray(run(BATCH[:, None, None, None], HEADS[:, None, None], q[:, None], k[None]))
    tiles = seen.reshape(-1, len(q) // BLOCK, BLOCK, len(k) // BLOCK, BLOCK)
    return tiles.any((0, 2, 4)), tiles.all((0, 2, 4))


def ends(positions):
    tiles = positions.reshape(1, -1, BLOCK)
    return tiles.min(2), tiles.max(2)


def check(mask_mod, q, k, *, exact=False):
    q, k = q.astype(np.int32), k.astype(np.int32)
    possible, full = interval_arithmetic.tiles_of(mask_mod, ends(q), ends(k))
    some, every = dense(mask_mod, q, k)
    assert not (some & ~possible).any(), "a tile with an allowed score is left out"
    assert not (full & ~every).any(), "a tile with a masked score runs without its mask"
    if exact:
        np.testing.assert_array_equal(possible[0], some)
        np.testing.assert_array_equal(full[0], every)
    return possible, full


@pytest.mark.parametrize("order", POSITIONS)
def test_tiles_of_common_masks(order):
    for mask_mod in EXACT.values():
        check(mask_mod, *POSITIONS[order], exact=order in ("natural", "another shard"))
    for mask_mod in OTHERS.values():
        check(mask_mod, *POSITIONS[order])


@pytest.mark.parametrize("name", ["documents", "heads", "hashed"])
def test_the_same_with_traced_positions(name, monkeypatch):
    """Also where a table is too large to compute it while tracing."""
    mask_mod = (EXACT | OTHERS)[name]
    q, k = (ends(x.astype(np.int32)) for x in POSITIONS["natural"])
    expected = interval_arithmetic.tiles_of(mask_mod, q, k)
    assert all(isinstance(x, np.ndarray) for x in expected)
    found = jax.jit(functools.partial(interval_arithmetic.tiles_of, mask_mod))(q, k)
    monkeypatch.setattr(interval_arithmetic, "_MOST_WHILE_TRACING", 0)
    for results in (found, interval_arithmetic.tiles_of(mask_mod, q, k)):
        assert not any(isinstance(x, np.ndarray) for x in results)
        np.testing.assert_array_equal(np.stack(results), np.stack(expected))


COMPARED = (lax.lt, lax.le, lax.gt, lax.ge, lax.eq, lax.ne)
LOGICAL = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.eq, lax.ne)
OF_ONE = (lax.neg, lax.abs, lax.sign, lax.bitwise_not)
OF_TWO = (
    *(lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.div, lax.rem, jnp.floor_divide),
    *(jnp.remainder, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor),
    *(lax.shift_right_arithmetic, lax.shift_right_logical, lax.shift_left),
)
NUMBERS = 0, 1, 2, 3, 7, 31, 64, 1000, 2**16 + 1, 2**30, HUGE


def drawn(rng, depth, kind):
    """A random function of the arguments, whose result is of this kind: "bool" or "int"."""

    def pick(choices):
        return choices[rng.integers(len(choices))]

    def parts(*kinds):
        return [drawn(rng, depth - 1, each) for each in kinds]

    if kind == "int" and (depth <= 0 or rng.random() < 0.2):
        index, number = rng.integers(6), jnp.int32(pick((-1, 1)) * pick(NUMBERS))
        return lambda *place: place[index] if index < 4 else number
    way = rng.random()
    if way < 0.1 and depth > 0:
        which, x, y = parts("bool", kind, kind)
        return lambda *place: jnp.where(which(*place), x(*place), y(*place))
    if way < 0.2:
        (x,) = parts("bool" if kind == "int" and way < 0.12 and depth > 0 else "int")
        if kind == "int" and way >= 0.12:
            function = pick(OF_ONE)
            return lambda *place: function(x(*place))
        return lambda *place: x(*place).astype(jnp.bool_ if kind == "bool" else jnp.int32)
    function, of = pick(OF_TWO), "int"
    if kind == "bool":
        of = pick(("int", "bool")) if depth > 1 else "int"
        function = pick(LOGICAL if of == "bool" else COMPARED)
    x, y = parts(of, of)
    return lambda *place: function(x(*place), y(*place))


@pytest.mark.parametrize("seed", range(5))
def test_tiles_of_drawn_functions(seed):
    rng, decided = np.random.default_rng(seed), 0
    for _ in range(20):
        mask_mod = drawn(rng, rng.integers(1, 5), "bool")
        order = list(POSITIONS)[rng.integers(len(POSITIONS))]
        possible, full = check(mask_mod, *POSITIONS[order])
        decided += (~possible | full).any()
    assert decided >= 3
