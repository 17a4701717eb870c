"""The frequencies of RoPE's variants, by which models reach longer contexts than they began with.

``Rope`` is the plain one. The others change its frequencies ``f_i = theta ** (-2 i / H)``, which
rotate feature pair i of H / 2 by ``position * f_i`` radians:

    LinearRope      all slower, by one factor
    DynamicRope     slower the longer the batch is, low frequencies most
    Llama3Rope      low frequencies slower by a factor, high ones kept, a ramp between
    YarnRope        the same with another ramp; cosines and sines grow by a factor, too
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE as it was published (Su et al. 2021): ``f_i = theta ** (-2 i / H)``.

    Attributes:
      theta: the base; the longest wavelength is just below ``2 pi theta`` tokens.

    Raises:
      ValueError: theta is not positive.
    """

    theta: float = 10000.0

    def __post_init__(self) -> None:
        self._check(*(field.name for field in dataclasses.fields(self) if field.name != "truncate"))

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines, so its square is a factor on the attention's logits."""
        return 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """``f``, float64 ``[H/2]``."""
        return self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)

    def _check(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{type(self).__name__}'s {name} is {value}: it must be positive")


@dataclasses.dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023): ``f_i / factor``.

    Attributes:
      factor: how many times longer the context is.
    """

    factor: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """``f / factor``, float64 ``[H/2]``."""
        return super().frequencies(head_dim) / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicRope(Rope):
    """Frequencies that depend on the longest row of the batch ("dynamic NTK").

    ::

        s = max(1, factor * length / max_positions - (factor - 1))
        f_i * s ** (-2 i / (H - 2))

    ``length`` is the largest position of all rows, plus 1, padding left out. So a row's result
    depends on the rows beside it, as it does in transformers, whose models these are. It is known
    only when the program runs; the angles are float32 products then, with errors near
    ``1e-7 * position`` rad.

    Attributes:
      factor: how steeply the base grows with the length.
      max_positions: number of positions up to which nothing changes.
    """

    factor: float = 1.0
    max_positions: int = 2048

    def slowdown(self, head_dim: int, length: jax.Array) -> jax.Array:
        """``s ** (-2 i / (H - 2))``, float32 ``[H/2]``, of a batch of ``length`` positions."""
        exponent = -np.arange(0, head_dim, 2, dtype=np.float64) / max(head_dim - 2, 1)
        length = jnp.maximum(length, self.max_positions).astype(jnp.float32)
        stretch = (self.factor / self.max_positions) * length - (self.factor - 1)
        return jnp.exp(jnp.asarray(exponent, jnp.float32) * jnp.log(stretch))


@dataclasses.dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's: wavelengths ``w = 2 pi / f_i`` beyond the old context are stretched.

    ::

        old / w < low_freq_factor                f_i / factor
        old / w > high_freq_factor               f_i
        between, r = (old / w - low_freq_factor) / (high_freq_factor - low_freq_factor)
                                                 (1 - r) * f_i / factor + r * f_i

    Attributes:
      factor: how many times longer low frequencies become.
      low_freq_factor: number of turns in the old context below which a frequency is low.
      high_freq_factor: number of turns above which it is high.
      old_positions: number of positions of the old context, ``old``.

    Raises:
      ValueError: a number that is not positive, or a high factor that is not above the low one.
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
        turns = self.old_positions * plain / (2 * math.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(ramp, 0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


@dataclasses.dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): a ramp over the features, and larger cosines and sines.

    A feature pair i that makes ``turns`` turns in the old context lies, as a real number, at
    ``i(turns) = H log(old / (2 pi turns)) / (2 log(theta))``. Pairs up to ``i(beta_fast)`` keep
    their frequency, pairs from ``i(beta_slow)`` on have it divided by ``factor``, and those between
    lie on a line.

    Attributes:
      factor: how many times longer low frequencies become.
      old_positions: number of positions of the old context, ``old``.
      beta_fast: number of turns above which a frequency is kept.
      beta_slow: number of turns below which it is divided by ``factor``.
      attention_factor: factor on cosines and sines; None is ``0.1 log(factor) + 1``, or with both
        ``mscale`` and ``mscale_all_dim`` the quotient of ``0.1 mscale log(factor) + 1``, for each.
      mscale: see ``attention_factor``.
      mscale_all_dim: see ``attention_factor``.
      truncate: whether the ends of the ramp are rounded outwards to whole features.

    Raises:
      ValueError: a number that is not positive.
    """

    factor: float = 4.0
    old_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor

        def grown(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """As above, float64 ``[H/2]``."""
        plain = super().frequencies(head_dim)

        def pair(turns: float) -> float:
            log = math.log(self.old_positions / (turns * 2 * math.pi))
            return head_dim * log / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # A ramp of no length: the step that transformers makes of it.
        slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return slow * plain / self.factor + (1 - slow) * plain
