"""Tiles that a ``mask_mod`` masks entirely or not at all, against every score."""

from __future__ import annotations

import functools

import functions
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
    return by_tile(seen)


def by_operation(mask_mod, q, k):
    """The same, one operation after the other, without compiling the function."""
    places = np.broadcast_arrays(*np.ix_(BATCH, HEADS, q, k))
    return by_tile(np.asarray(mask_mod(*map(jnp.asarray, places))))


def by_tile(seen):
    tiles = np.broadcast_to(seen, (2, 3, *seen.shape[-2:])).reshape(
        -1, seen.shape[-2] // BLOCK, BLOCK, seen.shape[-1] // BLOCK, BLOCK
    )
    return tiles.any((0, 2, 4)), tiles.all((0, 2, 4))


def ends(positions):
    tiles = positions.reshape(1, -1, BLOCK)
    return tiles.min(2), tiles.max(2)


def check(mask_mod, q, k, *, exact=False, dense=dense):
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
    staged = jax.jit(lambda: interval_arithmetic.tiles_of(mask_mod, q, k))()
    for results in (found, staged):
        assert not any(isinstance(x, np.ndarray) for x in results)
        np.testing.assert_array_equal(np.stack(results), np.stack(expected))


def drawn_tiles(rng, count, small=False):
    """Tokens of tiles: neighbors or not, near 0, in one place, or anywhere in int32."""
    tiles = []
    for _ in range(count):
        far = 0 if small else int(rng.choice((0, 0, 0, 1000, HUGE // 2)))
        first = int(rng.integers(-far, far + 1)) + int(rng.integers(-20, 21))
        step = int(rng.choice((1, 1, 1, 3, 40)))
        tiles.append(first + step * rng.permutation(BLOCK))
    return np.clip(np.concatenate(tiles), -HUGE - 1, HUGE).astype(np.int32)


TILES = 24
# Of neighbors these results are all numbers between the least and the largest, which must be found.
TIGHT = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min,
    "neg": lambda x, y: -x, "abs": lambda x, y: abs(x), "sign": lambda x, y: lax.sign(x),
    "not": lambda x, y: ~x, "clamp": lambda x, y: jnp.clip(x, -5, 7),
    "div": lambda x, y: lax.div(x, jnp.full_like(x, 7)),
    "shift": lambda x, y: lax.shift_right_arithmetic(x, jnp.full_like(x, 2)),
}  # fmt: skip
SOUND = {
    "select": lambda x, y: lax.select_n(x > y, x, y),
    "div by any": lambda x, y: lax.div(x, jnp.maximum(y, 1)),
    "floor_divide": lambda x, y: x // jnp.maximum(abs(y), 1),
    "rem by any": lambda x, y: lax.rem(x, jnp.maximum(y, 1)),
    "rem": lambda x, y: lax.rem(x, jnp.full_like(x, 11)),
    "remainder": lambda x, y: x % jnp.full_like(x, 11),
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "and of magnitudes": lambda x, y: abs(x) & abs(y),
    "shift_left": lambda x, y: lax.shift_left(x, y & 3),
    "shift by any": lambda x, y: lax.shift_right_arithmetic(x, y & 3),
    "logical": lambda x, y: lax.shift_right_logical(x, jnp.full_like(x, 3)),
}  # fmt: skip


def extremes(operation, q, k):
    """The least and the largest result in each tile, ``[query tiles, KV tiles]``."""
    x, y = np.broadcast_arrays(*np.ix_(q, k))
    of_tiles = np.asarray(operation(jnp.asarray(x), jnp.asarray(y))).astype(np.int64)
    of_tiles = of_tiles.reshape(len(q) // BLOCK, BLOCK, len(k) // BLOCK, BLOCK)
    return of_tiles.min((1, 3)), of_tiles.max((1, 3))


# What operations are applied to. A tile's first position has a range of its own, so that ranges of
# positions that grow together show few faults.
OPERANDS = (
    lambda q, k: (q, k),
    lambda q, k: (-q, k),
    lambda q, k: (q - k, lax.min(q + k, jnp.full_like(q, 9))),
)


@pytest.mark.parametrize("name", [*TIGHT, *SOUND])
def test_the_range_of_an_operation(name):
    """Compared with its own extremes in some tile, each result must be possible there."""
    rng = np.random.default_rng(len(name))
    for operands in OPERANDS:

        def operation(q, k, operands=operands):
            return (TIGHT | SOUND)[name](*operands(q, k))

        for small in (True, False):
            q, k = (drawn_tiles(rng, TILES, small) for _ in range(2))
            least, largest = extremes(operation, q, k)
            for at in rng.integers(TILES, size=(3, 2)):
                for bound in (least[tuple(at)], largest[tuple(at)]):
                    for compare in (lax.le, lax.gt):
                        number = np.int32(bound)
                        check_comparison(operation, compare, number, q, k, least, largest)


def check_comparison(operation, compare, number, q, k, least, largest):
    """``compare(operation(q, k), number)`` in every tile."""

    def mask_mod(batch, head, q, k):
        del batch, head
        result = operation(q, k)
        return compare(result, jnp.full_like(result, number))

    possible, full = (x[0] for x in interval_arithmetic.tiles_of(mask_mod, ends(q), ends(k)))
    some, every = least <= number, largest <= number
    if compare is lax.gt:
        some, every = ~every, ~some
    assert not (some & ~possible).any(), "a tile with an allowed score is left out"
    assert not (full & ~every).any(), "a tile with a masked score runs without its mask"


@pytest.mark.parametrize("name", TIGHT)
def test_ranges_are_tight(name):
    """Where numbers are small and neighbors, so that masks skip what they can."""
    operation = TIGHT[name]
    rng = np.random.default_rng(0)
    q, k = (
        np.concatenate([int(rng.integers(-60, 60)) + np.arange(BLOCK) for _ in range(TILES)])
        for _ in range(2)
    )
    q, k = q.astype(np.int32), k.astype(np.int32)
    least, largest = extremes(operation, q, k)
    for number in (-50, -7, 0, 1, 30, 400):
        expected = least <= number, largest <= number
        found = interval_arithmetic.tiles_of(
            lambda b, h, q, k, number=number: operation(q, k) <= number, ends(q), ends(k)
        )
        for some, tiles in zip(expected, found, strict=True):
            np.testing.assert_array_equal(tiles[0], some)


def test_bits_of_magnitudes_are_bounded():
    """``x & 15 < 16`` masks nothing: strided and blockwise masks need no mask arithmetic then."""
    q, k = (np.arange(64, dtype=np.int32) for _ in range(2))
    _, full = interval_arithmetic.tiles_of(lambda b, h, q, k: (q & 15) < 16, ends(q), ends(k))
    assert full.all()
    _, full = interval_arithmetic.tiles_of(lambda b, h, q, k: (q & k) <= 7, ends(q), ends(k))
    assert full[0, 0].all()  # of the first 8 queries
    assert full[0, :, 0].all()


@pytest.mark.parametrize("seed", range(8))
def test_tiles_of_drawn_functions(seed):
    """Of tiles in the orders of layouts, and anywhere."""
    rng, decided = np.random.default_rng(seed), 0
    for _ in range(100):
        mask_mod = functions.drawn(rng, rng.integers(1, 5), "bool")
        order = rng.integers(2 * len(POSITIONS))
        if order < len(POSITIONS):
            q, k = list(POSITIONS.values())[order]
        else:
            q, k = (drawn_tiles(rng, 8) for _ in range(2))
        possible, full = check(mask_mod, q, k, dense=by_operation)
        decided += (~possible | full).any()
    assert decided >= 20
