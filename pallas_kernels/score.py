"""The single definition of scores: how a logit is computed from a product ``q . k``.

    logit = f(c tanh(scale q.k / c)) - slope |p_q - p_k|

without ``c tanh(. / c)`` if there is no soft cap c, without f if there is no ``score_mod``, and
without the last term if there are no ALiBi slopes (Press et al. 2022, arXiv 2108.12409, with
distances in both directions). Every implementation calls these methods on tiles of products while
it is traced: a term that a score does not have emits no code.

Methods take the tile's per-head parameters (:data:`pallas_kernels.inputs.PerHead`) as ``per_head``,
shaped to broadcast against the tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import elementwise
from pallas_kernels.elementwise import ScoreCoordinates

LOG2_E = math.log2(math.e)
# The largest factor on products: LOG2_E times it still fits float32. An infinite factor would turn
# a product of 0 into NaN.
_LARGEST = 2.0**127
# The smallest scale that a bias is divided by: float32 then holds the quotient of every bias below
# 2^64.
_SMALLEST_DIVISOR = 2.0**-64
# The per-head parameters that logits are computed from, by the public argument's name.
SCORE_PARAMETERS = ("alibi_slopes",)


def _tanh(x: jax.Array, factor: float) -> jax.Array:
    return jnp.tanh(x * factor)


@dataclasses.dataclass(frozen=True)
class Score:
    """How logits are computed from products. Hashable, so that it can be part of a jit cache key.

    Attributes:
      scale: factor on the products.
      logits_soft_cap: c of ``c * tanh(logits / c)``, applied after the scale; None: no cap.
      differentiated: names of the per-head parameters whose gradients the backward pass computes.
      score_mod: f, after the soft cap and before a bias (:mod:`pallas_kernels.elementwise`), hashed
        by identity; None: none.
    """

    scale: float
    logits_soft_cap: float | None = None
    differentiated: tuple[str, ...] = ()
    score_mod: Callable[..., Any] | None = None

    def __post_init__(self):
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}: it must be a finite number")
        if abs(self.scale) > _LARGEST:
            raise ValueError(
                f"scale is {self.scale}: float32 cannot hold such logits; it must be between "
                "-2**127 and 2**127"
            )
        cap = self.logits_soft_cap
        if cap is None:
            return
        if not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap is {cap}: it must be positive and finite, or None")
        if cap > _LARGEST or abs(self.scale) > cap * _LARGEST:
            raise ValueError(
                f"logits_soft_cap is {cap}, scale {self.scale}: float32 must hold the cap and "
                "scale / logits_soft_cap; neither may exceed 2**127"
            )

    @property
    def raw_factor(self) -> float:
        """The positive factor from raw scores to logits, before f and a bias."""
        if self.logits_soft_cap is not None:
            return self.logits_soft_cap
        return self.scale if self.scale > 0 else 1.0

    @property
    def bias_can_start_products(self) -> bool:
        """Whether a matrix product may accumulate on the bias divided by the scale.

        Possible if logits are the scale times the products plus the bias. For a tiny scale, float32
        cannot hold the quotient.
        """
        plain = self.logits_soft_cap is None and self.score_mod is None
        return plain and self.scale > _SMALLEST_DIVISOR

    @property
    def has_derivative(self) -> bool:
        """Whether :meth:`modified_with_derivative` returns a derivative.

        Without a soft cap, the derivative is 1 if f only adds to the scores.
        """
        if self.score_mod is None:
            return False
        return self.logits_soft_cap is not None or not elementwise.derivative_is_one(self.score_mod)

    def raw(
        self, products: jax.Array, tanh: Callable[[jax.Array, float], jax.Array] = _tanh
    ) -> jax.Array:
        """Raw scores: ``logits = f(raw_factor raw) + bias``; ``tanh(x, c)`` is that of ``c x``."""
        if self.logits_soft_cap is not None:
            return tanh(products, self.scale / self.logits_soft_cap)
        return products if self.scale > 0 else products * self.scale

    def modified(self, raw: jax.Array, coordinates: ScoreCoordinates | None) -> jax.Array:
        """``f(raw_factor raw)``, the logits before a bias.

        Only f reads the tile's ``coordinates``.
        """
        logits = raw * self.raw_factor
        if self.score_mod is None:
            return logits
        assert coordinates is not None
        return coordinates.apply(functools.partial(elementwise.modified, self.score_mod), logits)

    def modified_with_derivative(
        self, raw: jax.Array, coordinates: ScoreCoordinates
    ) -> tuple[jax.Array, jax.Array | None]:
        """:meth:`modified`, and its derivative with respect to ``scale q.k``; None if that is 1."""
        assert self.score_mod is not None
        if not self.has_derivative:
            return self.modified(raw, coordinates), None
        both = functools.partial(elementwise.with_derivative, self.score_mod)
        modified, derivative = coordinates.apply(both, raw * self.raw_factor)
        return modified, self.through_cap(raw, derivative)

    def bias(
        self,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
        unit: float = 1.0,
    ) -> jax.Array | None:
        """The bias of the logits, times ``unit``; None without one."""
        if "alibi_slopes" not in per_head:
            return None
        slopes = per_head["alibi_slopes"] * -unit
        return slopes * _distance(q_positions, kv_positions, slopes.dtype)

    def bias_of_earlier_keys(
        self,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
        unit: float = 1.0,
    ) -> jax.Array:
        """:meth:`bias` of keys at or before their query; arbitrary but finite for other keys.

        Positions are int32 here, for kernels that already hold them in registers for masks: float32
        copies would need as many registers again.
        """
        slope = self.bias_slope(per_head, unit)
        return slope * (kv_positions - q_positions).astype(slope.dtype)

    def affine_bias(
        self, q_positions: jax.Array, per_head: Mapping[str, jax.Array], unit: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """``(slope, intercept)`` of the bias of keys at or before their query, affine in positions.

            bias(p_k) = line(p_k) - line(p_q)    with line(p) = slope p + intercept

        The intercept is ``-slope p_q``, rounded; without that rounding ``line(p_q)`` would be 0. It
        is the same for all keys of a query, so a softmax can omit it until lse is computed.

        The line must be computed by one FMA, which rounds once: its error is then small relative to
        the bias, however large the positions are, and ``line(p_q)`` is exact. Rounded twice, the
        error would be that of ``slope p_k``.

        Args:
          q_positions: float32, exact below 2^24. They may be relative to any base position, to
            which the line's positions are then relative, too.
          per_head: per-head parameters of the queries' heads, including "alibi_slopes".
          unit: factor on the bias.
        """
        slope = self.bias_slope(per_head, unit)
        return slope, -(slope * q_positions)

    def bias_slope(self, per_head: Mapping[str, jax.Array], unit: float = 1.0) -> jax.Array:
        """The slope of :meth:`affine_bias` alone."""
        return per_head["alibi_slopes"] * unit

    @property
    def base_2_factor(self) -> float:
        """The factor from raw scores, or the results of f, to base 2, before a bias is added."""
        return (self.raw_factor if self.score_mod is None else 1.0) * LOG2_E

    def with_bias(
        self,
        scores: jax.Array,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, float]:
        """``(scores, factor)``, whose product is the logits in base 2.

        A softmax multiplies by the factor inside its exponent, where it costs nothing. A bias must
        be added to logits in base 2; the factor is then applied to the scores, and is 1.

        Args:
          scores: raw scores or the results of f, to which :attr:`base_2_factor` still applies.
          q_positions, kv_positions: of the scores.
          per_head: per-head parameters of the queries' heads.
        """
        factor = self.base_2_factor
        bias = self.bias(q_positions, kv_positions, per_head, LOG2_E)
        return (scores, factor) if bias is None else (scores * factor + bias, 1.0)

    def to_products(
        self,
        raw: jax.Array,
        weights: jax.Array,
        ds: jax.Array,
        coordinates: ScoreCoordinates | None,
    ) -> jax.Array:
        """The gradient of ``scale q.k`` from ``ds``, the gradient of the logits.

        Args:
          raw: :meth:`raw`.
          weights: softmax weights, 0 where a score is masked; the derivative of f may be NaN there.
          ds: gradient of the logits. The caller applies the scale once, after its last matmul.
          coordinates: the tile's coordinates; only f reads them.
        """
        if self.score_mod is not None:
            assert coordinates is not None
            derivative = functools.partial(elementwise.derivative, self.score_mod)
            derivative = coordinates.apply(derivative, raw * self.raw_factor)
            ds = jnp.where(weights == 0, jnp.zeros((), ds.dtype), ds * derivative)
        return self.through_cap(raw, ds)

    def through_cap(self, raw: jax.Array, ds: jax.Array) -> jax.Array:
        """The gradient of ``scale q.k`` from ``ds``, the gradient of the capped scores.

        ``d/dx c tanh(x / c) = 1 - tanh(x / c)^2``, and ``raw`` is that tanh.
        """
        return ds if self.logits_soft_cap is None else ds * (1 - raw * raw)

    def per_head_gradients(
        self, ds: jax.Array, q_positions: jax.Array, kv_positions: jax.Array
    ) -> dict[str, jax.Array]:
        """Each score's contribution to the gradients of the :attr:`differentiated` parameters.

        ``ds`` is the gradient of the logits. The caller sums over the scores of a head.
        """
        if "alibi_slopes" not in self.differentiated:
            return {}
        return {"alibi_slopes": -ds * _distance(q_positions, kv_positions, ds.dtype)}


def sink_gradient(sink_logits: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sink logits, float32 ``[N]``.

    A sink has the weight ``exp(sink - lse)`` and the value 0, so its logit's gradient is minus the
    weight times delta.

    Args:
      sink_logits: float32 ``[N]``.
      lse: float32 ``[B, N, T]``, over all keys and the sink.
      delta: float32 ``[B, N, T]``, ``rowsum(dO * O)`` minus the gradient of lse.
    """
    weight = jnp.exp(sink_logits[None, :, None] - jnp.where(lse == -jnp.inf, 0, lse))
    return -jnp.sum(weight * delta, axis=(0, 2))


def _distance(q_positions: jax.Array, kv_positions: jax.Array, dtype: Any) -> jax.Array:
    """``|p_q - p_k|``, in float32 exact for positions below 2^24.

    Positions are converted before the subtraction: once per token instead of once per score.
    """
    return jnp.abs(q_positions.astype(dtype) - kv_positions.astype(dtype))
