"""Rotary position embedding from explicit positions, exact enough for millions of tokens.

Sequences here are permuted, so a token's position is an input and differs from its index.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.layers.rope_variants import DynamicRope, Rope
from pallas_kernels.arrays import as_int32

# A position is split as high * 2**LOW_BITS + low, see rope_table.
LOW_BITS = 12


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
    """The rotation of every token: ``angle[t, i] = positions[t] * theta ** (-2 i / H)``.

    Compute it once per step and share it between layers.

    A plain float32 product would be wrong by 0.03 rad at a million tokens. So each position is
    split as ``4096 high + low``, and the angle is the sum of two parts with a small rounding error
    each. The angle of 4096 tokens, the unit of the high part, is reduced modulo 2 pi in float64
    beforehand. The error stays below 2e-3 rad for all positions under 2^24. (Frequencies that
    depend on the batch, :class:`DynamicRope`'s, are not known beforehand: theirs is the plain
    product.)

    Args:
      positions: ``[B, T]``, or ``[T]`` for one order in every row; of any integer dtype, whose
        values int32 can hold.
      head_dim: number of features of a head, H, even.
      theta: the base; the longest wavelength is just below ``2 pi theta`` tokens. Or a variant of
        RoPE, which has its own frequencies (:mod:`burst_jax.layers.rope_variants`).
      length: int32 scalar for :class:`DynamicRope`, the largest position of the whole batch plus 1;
        None is that of ``positions``.

    Returns:
      The table, float32 ``[B, T, H/2]``, or ``[1, T, H/2]`` for positions ``[T]``.

    Raises:
      ValueError: positions of another rank or dtype, an odd head_dim, theta not positive.
    """
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions has shape {positions.shape}: pass int32 [B, T] or [T]")
    rows = jnp.asarray(as_int32("positions", positions))
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: RoPE rotates pairs, so it must be even")
    if not isinstance(theta, Rope):
        if not theta > 0:
            raise ValueError(f"theta is {theta}: it must be positive")
        theta = Rope(theta)
    if rows.ndim == 1:
        rows = rows[None]
    frequency = theta.frequencies(head_dim)

    def part(count: jax.Array, angle: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of ``count`` ``[B, T]`` times ``angle`` ``[H/2]``."""
        angles = count.astype(jnp.float32)[..., None] * jnp.asarray(angle, jnp.float32)
        return jnp.cos(angles), jnp.sin(angles)

    if isinstance(theta, DynamicRope):
        length = jnp.max(rows) + 1 if length is None else length
        cos, sin = part(
            rows, jnp.asarray(frequency, jnp.float32) * theta.slowdown(head_dim, length)
        )
        return RopeTable(cos, sin)
    high_angle = frequency * 2**LOW_BITS
    high_angle -= 2 * np.pi * np.round(high_angle / (2 * np.pi))
    cos_high, sin_high = part(rows >> LOW_BITS, high_angle)
    cos_low, sin_low = part(rows & (2**LOW_BITS - 1), frequency)
    cos, sin = cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low
    if theta.magnitude == 1:
        return RopeTable(cos, sin)
    return RopeTable(cos * theta.magnitude, sin * theta.magnitude)


def apply_rope(x: jax.Array, table: RopeTable) -> jax.Array:
    """Rotates the pairs ``(x[i], x[i + H/2])`` of every head (Su et al. 2021, section 3.2).

    Args:
      x: ``[B, T, N, H]``, any floating dtype; the rotation is computed in float32.
      table: the table of :func:`rope_table` for T positions in B rows, or in one row for all.

    Returns:
      ``x`` rotated, ``[B, T, N, H]`` in its dtype.

    Raises:
      ValueError: the table has another T, B or H than ``x``.
    """
    rows, length, half = table.cos.shape
    if x.shape[1] != length or rows not in (1, x.shape[0]) or x.shape[3] != 2 * half:
        raise ValueError(
            f"x has shape {x.shape}, but positions cover {rows} rows of {length} tokens "
            f"with head_dim {2 * half}: pass one position per token"
        )
    cos, sin = table.cos[:, :, None, :], table.sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
