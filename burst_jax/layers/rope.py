"""Rotary position embedding (RoPE) from explicit positions, accurate for millions of tokens.

Sequences are permuted here, so a token's position is an input and differs from its index. ``Rope``
is the published embedding with frequencies ``f_i = theta ** (-2 i / H)``: feature pair i of H / 2
is rotated by ``position * f_i`` radians. The others extend a model's context by lower frequencies:

    LinearRope      all divided by one factor
    DynamicRope     a larger base for longer batches ("dynamic NTK")
    Llama3Rope      low frequencies divided by a factor, high ones unchanged, a ramp between
    YarnRope        the same with another ramp, and a factor on cosines and sines
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.errors import check_bool, check_positive, shown
from pallas_kernels.arrays import as_int32

# A position is split as high * 2**LOW_BITS + low, see rope_table.
LOW_BITS = 12


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE as published (Su et al. 2021): ``f_i = theta ** (-2 i / H)``.

    Attributes:
      theta: the base; the longest wavelength is just below ``2 pi theta`` tokens.
      fraction: share of a head's features that are rotated, the first ones, from 0 to 1. H is then
        their number, ``int(fraction * head_dim)``. 0 is no RoPE (NoPE).

    Raises:
      ValueError: theta is not positive and finite, or fraction is not from 0 to 1.
    """

    theta: float = 10000.0
    fraction: float = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "fraction" and value is not None and not isinstance(value, bool):
                check_positive(f"{type(self).__name__}'s {field.name}", value)
        real = isinstance(self.fraction, numbers.Real) and not isinstance(self.fraction, bool)
        if not (real and 0 <= self.fraction <= 1):
            raise ValueError(
                f"{type(self).__name__}'s fraction is {shown(self.fraction)}: it must be from 0, "
                "no RoPE, to 1, RoPE of all head features"
            )

    def rotated(self, head_dim: int) -> int:
        """Number of features of a head that are rotated.

        Raises:
          ValueError: it is odd.
        """
        count = int(head_dim * self.fraction)
        if count % 2:
            given = f"head_dim is {head_dim}"
            if self.fraction != 1:
                given += f", and RoPE's fraction {self.fraction}, {count} features"
            raise ValueError(f"{given}: RoPE rotates pairs, so it must be even")
        return count

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines; its square is a factor on the attention logits."""
        return 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """``f``, float64 ``[H/2]``."""
        return self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@dataclasses.dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023): ``f_i / factor``.

    Attributes:
      factor: ratio of the new to the original context length.
    """

    factor: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """``f / factor``, float64 ``[H/2]``."""
        return super().frequencies(head_dim) / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicRope(Rope):
    """Frequencies that depend on the longest sequence of the batch ("dynamic NTK").

    ::

        s = max(1, factor * length / max_positions - (factor - 1))
        f_i * s ** (-2 i / (H - 2))

    ``length`` is the largest position in the batch plus 1, without padding. As in transformers, a
    sequence's result therefore depends on the others of its batch. The length is known at run time
    only, so angles are float32 products with errors near ``1e-7 * position`` rad.

    Attributes:
      factor: growth of the base with the length.
      max_positions: length up to which frequencies are unchanged.
    """

    factor: float = 1.0
    max_positions: int = 2048

    def slowdown(self, head_dim: int, length: jax.Array) -> jax.Array:
        """``s ** (-2 i / (H - 2))``, float32 ``[H/2]``, for a batch of this length."""
        exponent = -np.arange(0, head_dim, 2, dtype=np.float64) / max(head_dim - 2, 1)
        length = jnp.maximum(length, self.max_positions).astype(jnp.float32)
        stretch = (self.factor / self.max_positions) * length - (self.factor - 1)
        return jnp.exp(jnp.asarray(exponent, jnp.float32) * jnp.log(stretch))


@dataclasses.dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: wavelengths ``w = 2 pi / f_i`` beyond the old context are stretched.

    ::

        old / w < low_freq_factor                f_i / factor
        old / w > high_freq_factor               f_i
        between, r = (old / w - low_freq_factor) / (high_freq_factor - low_freq_factor)
                                                 (1 - r) * f_i / factor + r * f_i

    Attributes:
      factor: divisor of low frequencies.
      low_freq_factor: rotations within the old context below which a frequency is low.
      high_freq_factor: rotations above which it is high.
      old_positions: length of the old context, ``old``.

    Raises:
      ValueError: a number that is not positive, or a high factor not above the low one.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_positions: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"Llama3Rope's high_freq_factor is {self.high_freq_factor}, low_freq_factor "
                f"{self.low_freq_factor}: the high one must be larger"
            )

    def frequencies(self, head_dim: int) -> np.ndarray:
        """As above, float64 ``[H/2]``."""
        plain = super().frequencies(head_dim)
        rotations = self.old_positions * plain / (2 * math.pi)
        ramp = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unchanged = np.clip(ramp, 0, 1)
        return (1 - unchanged) * plain / self.factor + unchanged * plain


@dataclasses.dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): a linear ramp over feature pairs, and larger cosines and sines.

    The pair that makes ``r`` rotations in the old context has the (real) index
    ``i(r) = H log(old / (2 pi r)) / (2 log(theta))``. Pairs up to ``i(beta_fast)`` keep their
    frequency, pairs from ``i(beta_slow)`` on have it divided by ``factor``, with a linear ramp
    between.

    Attributes:
      factor: divisor of low frequencies.
      old_positions: length of the old context, ``old``.
      beta_fast: rotations above which a frequency is unchanged.
      beta_slow: rotations below which it is divided by ``factor``.
      attention_factor: factor on cosines and sines; None is ``0.1 log(factor) + 1``, or with both
        ``mscale`` and ``mscale_all_dim`` the quotient of ``0.1 mscale log(factor) + 1`` for each.
      mscale: see ``attention_factor``.
      mscale_all_dim: see ``attention_factor``.
      truncate: whether the ends of the ramp are rounded outwards to whole pairs.

    Raises:
      ValueError: a number that is not positive and finite, a theta of 1, or a truncate that is no
        bool.
    """

    factor: float = 4.0
    old_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta == 1:
            raise ValueError("YarnRope's theta is 1: all frequencies are equal; use a larger one")
        check_bool("YarnRope's truncate", self.truncate)

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor

        def scaled(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scaled(self.mscale) / scaled(self.mscale_all_dim)
        return scaled(1.0)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """As above, float64 ``[H/2]``."""
        plain = super().frequencies(head_dim)

        def pair(rotations: float) -> float:
            log = math.log(self.old_positions / (rotations * 2 * math.pi))
            return head_dim * log / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # As in transformers: a ramp of length 0 is a step.
        slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return slow * plain / self.factor + (1 - slow) * plain


class RopeTable(NamedTuple):
    """Cosines and sines of every token's angles.

    Attributes:
      cos: float32 ``[B or 1, T, H/2]``.
      sin: float32 ``[B or 1, T, H/2]``.
    """

    cos: jax.Array
    sin: jax.Array


def rope_table(
    positions: jax.Array | np.ndarray,
    head_dim: int,
    theta: float | Rope = 10000.0,
    *,
    length: jax.Array | None = None,
) -> RopeTable:
    """Cosines and sines of ``angle[t, i] = positions[t] * f_i``. Compute it once for all layers.

    A float32 product would be wrong by 0.03 rad at a million tokens. So each position is split as
    ``4096 high + low``, and the angle is a sum of two parts with a small rounding error each; the
    angle of 4096 tokens is reduced modulo 2 pi in float64 beforehand. The error stays below 2e-3
    rad for positions under 2^24. :class:`DynamicRope` is the exception, see there.

    Args:
      positions: integers ``[B, T]``, or ``[T]`` for the same positions in every sequence; values
        must fit in int32.
      head_dim: number of features of a head, H, even.
      theta: the base, or a :class:`Rope`. Default: 10000.
      length: int32 scalar for :class:`DynamicRope`: the largest position of the whole batch plus 1;
        None is that of ``positions``.

    Returns:
      The table, float32 ``[B, T, H/2]``, or ``[1, T, H/2]`` for positions ``[T]``; fewer columns if
      :attr:`Rope.fraction` is below 1.

    Raises:
      ValueError: positions of another rank or dtype, an odd head_dim, theta not positive.
    """
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions has shape {positions.shape}: pass int32 [B, T] or [T]")
    tokens = jnp.asarray(as_int32("positions", positions))
    if not isinstance(theta, Rope):
        if not theta > 0:
            raise ValueError(f"theta is {theta}: it must be positive")
        theta = Rope(theta)
    if head_dim < 1:
        raise ValueError(f"head_dim is {head_dim}: it must be 1 or more")
    head_dim = theta.rotated(head_dim)
    if tokens.ndim == 1:
        tokens = tokens[None]
    frequency = theta.frequencies(head_dim)

    def cos_sin(count: jax.Array, angle: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of ``count`` ``[B, T]`` times ``angle`` ``[H/2]``."""
        angles = count.astype(jnp.float32)[..., None] * jnp.asarray(angle, jnp.float32)
        return jnp.cos(angles), jnp.sin(angles)

    if isinstance(theta, DynamicRope):
        length = jnp.max(tokens) + 1 if length is None else length
        slowdown = theta.slowdown(head_dim, length)
        return RopeTable(*cos_sin(tokens, jnp.asarray(frequency, jnp.float32) * slowdown))
    high_angle = frequency * 2**LOW_BITS
    high_angle -= 2 * np.pi * np.round(high_angle / (2 * np.pi))
    cos_high, sin_high = cos_sin(tokens >> LOW_BITS, high_angle)
    cos_low, sin_low = cos_sin(tokens & (2**LOW_BITS - 1), frequency)
    cos, sin = cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low
    if theta.magnitude == 1:
        return RopeTable(cos, sin)
    return RopeTable(cos * theta.magnitude, sin * theta.magnitude)


def apply_rope(x: jax.Array, table: RopeTable) -> jax.Array:
    """Rotates the pairs ``(x[i], x[i + R/2])`` of every head (Su et al. 2021, section 3.2).

    R is H, or with :attr:`Rope.fraction` fewer: the features after the first R do not change.

    Args:
      x: ``[B, T, N, H]``, any floating dtype; the rotation is computed in float32.
      table: of :func:`rope_table`, for T positions in B sequences, or in one for all; with R / 2
        columns.

    Returns:
      ``x`` rotated, ``[B, T, N, H]`` in its dtype.

    Raises:
      ValueError: the table has another T or B than ``x``, or more features.
    """
    batch, length, half = table.cos.shape
    if x.shape[1] != length or batch not in (1, x.shape[0]) or x.shape[3] < 2 * half:
        raise ValueError(
            f"x has shape {x.shape}, but positions cover {batch} sequences of {length} tokens "
            f"with {2 * half} features of a head: pass one position per token"
        )
    if not half:
        return x
    if 2 * half < x.shape[3]:
        rotated, others = jnp.split(x, [2 * half], axis=-1)
        return jnp.concatenate([apply_rope(rotated, table), others], axis=-1)
    cos, sin = table.cos[:, :, None, :], table.sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
