"""The layouts that have one order for all sequences: contiguous, zigzag and striped.

A layout permutes the tokens and does nothing else. It splits ``length`` tokens over ``n`` shards of
``c = length // n`` tokens each; shard ``r`` holds, in index order:

========== ================================= ====================
contiguous block ``r``                       ``length % n == 0``
zigzag     half-blocks ``r`` and ``2n-1-r``  ``length % 2n == 0``
striped    tokens ``r, r+n, r+2n, ...``      ``length % n == 0``
striped:k  stripes ``r, r+n, r+2n, ...``     ``length % kn == 0``
           of k tokens each
========== ================================= ====================

Four shards, 16 tokens::

             contiguous      zigzag          striped         striped:2
    shard 0   0  1  2  3     0  1  14 15     0 4 8  12       0 1 8  9
    shard 1   4  5  6  7     2  3  12 13     1 5 9  13       2 3 10 11
    shard 2   8  9  10 11    4  5  10 11     2 6 10 14       4 5 12 13
    shard 3   12 13 14 15    6  7  8  9      3 7 11 15       6 7 14 15

Positions ascend within every shard, so the tokens of a tile have nearby positions, and the local
kernels skip nearly every tile that is fully masked.

Under a causal mask a contiguous ring leaves the first shard idle most of the time. Zigzag gives
every shard the same work at every step. Striped (Brandon et al. 2023, Striped Attention, section 3)
gives every shard the same work up to one diagonal of the scores. Stripes of 64 or 128 tokens, like
TransformerEngine's, keep whole tiles together, so that fewer tiles need masking; the work of two
shards differs by k diagonals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, override

import jax
import numpy as np
from jax.typing import ArrayLike

from burst_jax.errors import check_integer
from burst_jax.layouts.layout import FirstHalf, Layout, namespace_and_index


@dataclasses.dataclass(frozen=True, repr=False)
class Contiguous(Layout):
    """Shard r holds block r: natural order."""

    in_natural_order: ClassVar[bool] = True

    @property
    @override
    def name(self) -> str:
        return "contiguous"

    @override
    def block_shards(self, shard_length: int, num_shards: int) -> tuple[int, np.ndarray]:
        return shard_length, np.arange(num_shards)

    @override
    def shard_positions(self, shard_length: int, num_shards: int, shard: ArrayLike) -> jax.Array:
        _, shard, index = namespace_and_index(shard_length, shard)
        return shard * shard_length + index

    @override
    def reorder(self, x: Any, num_shards: int, axis: int, xp: Any, *, inverse: bool) -> Any:
        return x

    @override
    def first_half(self, shard_length: int, num_shards: int) -> FirstHalf:
        if self.lacks_first_half(num_shards) is not None:
            return super().first_half(shard_length, num_shards)
        return FirstHalf(-(-shard_length // 2), (self,))

    @override
    def lacks_first_half(self, num_shards: int) -> str | None:
        if num_shards == 1:
            return None
        return (
            f"layout is {self!r} over {num_shards} devices, and half of them hold the first half "
            "of the sequence: no device would save half of the attention's results"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Zigzag(Layout):
    """Shard r of n holds the half-blocks r and 2n-1-r."""

    @property
    @override
    def name(self) -> str:
        return "zigzag"

    @property
    @override
    def unit(self) -> int:
        return 2

    @override
    def block_shards(self, shard_length: int, num_shards: int) -> tuple[int, np.ndarray]:
        shard = np.arange(num_shards)
        return shard_length // 2, np.concatenate([shard, shard[::-1]])

    @override
    def shard_positions(self, shard_length: int, num_shards: int, shard: ArrayLike) -> jax.Array:
        xp, shard, index = namespace_and_index(shard_length, shard)
        half = shard_length // 2
        # The second half-block, 2n-1-r, starts where index - half would be 0.
        start = xp.where(index < half, shard * half, (2 * num_shards - 1 - shard) * half - half)
        return start + index

    @override
    def reorder(self, x: Any, num_shards: int, axis: int, xp: Any, *, inverse: bool) -> Any:
        # Reshapes, flips and transposes instead of a gather: XLA fuses them into one copy.
        shape, n = x.shape, num_shards
        lead, tail = shape[:axis], shape[axis + 1 :]
        leading = (slice(None),) * axis
        if inverse:  # [n, (low, high), half] to low halves in order, then high halves reversed.
            pairs = xp.reshape(x, (*lead, n, 2, -1, *tail))
            low, high = pairs[(*leading, slice(None), 0)], pairs[(*leading, slice(None), 1)]
            return xp.concatenate([low, xp.flip(high, axis)], axis).reshape(shape)
        halves = xp.reshape(x, (*lead, 2 * n, -1, *tail))
        low, high = halves[(*leading, slice(0, n))], halves[(*leading, slice(n, None))]
        return xp.stack([low, xp.flip(high, axis)], axis + 1).reshape(shape)

    @override
    def first_half(self, shard_length: int, num_shards: int) -> FirstHalf:
        # The low half-blocks, in contiguous order.
        return FirstHalf(shard_length // 2, (Contiguous(), self))

    @override
    def lacks_first_half(self, num_shards: int) -> str | None:
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class Striped(Layout):
    """Shard r of n holds the stripes r, r + n, r + 2n, ...

    Attributes:
      stripe: tokens of a stripe.
    """

    stripe: int = 1

    def __post_init__(self) -> None:
        check_integer("stripe", self.stripe, 1)

    @property
    @override
    def name(self) -> str:
        return "striped" if self.stripe == 1 else f"striped:{self.stripe}"

    @property
    @override
    def unit(self) -> int:
        return self.stripe

    @override
    def block_shards(self, shard_length: int, num_shards: int) -> tuple[int, np.ndarray]:
        return self.stripe, np.arange(num_shards)

    @override
    def shard_positions(self, shard_length: int, num_shards: int, shard: ArrayLike) -> jax.Array:
        _, shard, index = namespace_and_index(shard_length, shard)
        stripe = self.stripe
        return stripe * shard + index + (num_shards - 1) * stripe * (index // stripe)

    @override
    def progressions(
        self, shard_lengths: Sequence[int], num_shards: int, blocks: Sequence[int | None]
    ) -> list[tuple[np.ndarray, int, int]]:
        # Along stripes, or across them with one token of each. Of a block of b tokens a shard has
        # b / (n stripe) along and at most ``stripe`` across; this selects fewer pairs of them.
        n, stripe = num_shards, self.stripe
        every = (n * length for length in shard_lengths)
        of_blocks = (min(block or most, most) for block, most in zip(blocks, every, strict=True))
        across = (n * stripe**2) ** 2 <= math.prod(of_blocks)
        if not across:
            return super().progressions(shard_lengths, num_shards, blocks)
        starts = stripe * np.arange(n)[:, None] + np.arange(stripe)
        return [(starts, n * stripe, length // stripe) for length in shard_lengths]

    @override
    def run_in_blocks(self, shard_length: int, num_shards: int, block: int) -> int:
        if block % (num_shards * self.stripe) == 0:
            return block // num_shards
        return super().run_in_blocks(shard_length, num_shards, block)

    @override
    def reorder(self, x: Any, num_shards: int, axis: int, xp: Any, *, inverse: bool) -> Any:
        shape, n, stripe = x.shape, num_shards, self.stripe
        rows = (n, -1, stripe) if inverse else (-1, n, stripe)
        split = xp.reshape(x, (*shape[:axis], *rows, *shape[axis + 1 :]))
        return xp.swapaxes(split, axis, axis + 1).reshape(shape)

    @override
    def first_half(self, shard_length: int, num_shards: int) -> FirstHalf:
        # Up to a whole stripe: stripes are recomputed whole.
        tokens = -(-shard_length // (2 * self.stripe)) * self.stripe
        return FirstHalf(tokens, (self,))

    @override
    def lacks_first_half(self, num_shards: int) -> str | None:
        return None
