"""The one definition of a score: what a logit is, made of a product ``q . k``.

    logit = f(c tanh(scale q.k / c)) - slope |p_q - p_k|

without ``c tanh(. / c)`` where there is no soft cap c, without f where there is no function of the
caller's (``score_mod``), and without the last term where there are no ALiBi slopes (Press et al.
2022, arXiv 2108.12409, with distances in both directions). Every implementation makes its logits by
these hooks, at trace time and on a tile of products: what a score does not have emits nothing.

A per-head array has one number for each query head, and goes by the public argument's name
(:data:`pallas_kernels.inputs.PerHead`). A hook takes the numbers of the tile's heads as
``per_head``, shaped to broadcast against the tile.
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
from pallas_kernels.elementwise import Places

LOG2_E = math.log2(math.e)
# The largest factor on a product of which float32 can also hold LOG2_E times as much. An infinite
# factor would make NaN of a product that is 0.
_LARGEST = 2.0**127
# A bias is divided by a scale only if that is larger: then float32 holds the quotient of every bias
# below 2^64.
_SMALLEST_DIVISOR = 2.0**-64
# The per-head parameters that logits are computed from, by the public argument's name.
SCORE_PARAMETERS = ("alibi_slopes",)


@dataclasses.dataclass(frozen=True)
class Score:
    """How logits are made of products. Hashable, so that it can key a jit cache.

    Attributes:
      scale: factor on the products.
      logits_soft_cap: c of ``c * tanh(logits / c)``, applied after the scale; None is no cap.
      differentiated: names of the per-head arrays whose gradients the backward makes too.
      score_mod: f, after the soft cap and before a bias: :mod:`pallas_kernels.elementwise`; None is
        none. It is hashed by identity.
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
                f"scale is {self.scale}: float32 cannot hold such logits; it must lie between "
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
        """The positive number that takes raw scores to logits, before f and a bias."""
        if self.logits_soft_cap is not None:
            return self.logits_soft_cap
        return self.scale if self.scale > 0 else 1.0

    @property
    def starts_products(self) -> bool:
        """Whether products that start from the bias over the scale are scores with the bias.

        Then logits are the scale times the products plus the bias, and the scale is
        :attr:`raw_factor`. A matrix product that adds to such a start does the addition. Where the
        scale is tiny, float32 cannot hold the bias over it.
        """
        plain = self.logits_soft_cap is None and self.score_mod is None
        return plain and self.scale > _SMALLEST_DIVISOR

    @property
    def has_slope(self) -> bool:
        """Whether f, or f and a soft cap, do more than to add something to the scores.

        Then the gradient of the products has a factor that only the products say.
        """
        if self.score_mod is None:
            return False
        return self.logits_soft_cap is not None or not elementwise.slope_is_one(self.score_mod)

    def raw(
        self, products: jax.Array, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh
    ) -> jax.Array:
        """Raw scores: ``logits = f(raw_factor raw) + bias``."""
        if self.logits_soft_cap is not None:
            return tanh(products * (self.scale / self.logits_soft_cap))
        return products if self.scale > 0 else products * self.scale

    def modified(self, raw: jax.Array, places: Places | None) -> jax.Array:
        """``f(raw_factor raw)``, the logits before a bias.

        ``places`` are the tile's; only f reads them.
        """
        logits = raw * self.raw_factor
        if self.score_mod is None:
            return logits
        assert places is not None
        return places.apply(functools.partial(elementwise.modified, self.score_mod), logits)

    def modified_with_slope(
        self, raw: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array | None]:
        """:meth:`modified`, and its derivative with respect to ``scale q.k``; None if that is 1."""
        assert self.score_mod is not None
        if not self.has_slope:
            return self.modified(raw, places), None
        both = functools.partial(elementwise.with_slope, self.score_mod)
        modified, slope = places.apply(both, raw * self.raw_factor)
        return modified, self.through_cap(raw, slope)

    def bias(
        self,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
        unit: float = 1.0,
    ) -> jax.Array | None:
        """What the tokens' places add to the logits, times ``unit``; None if nothing is added."""
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
        """:meth:`bias` of keys at or before their query; any finite number where they are not.

        Positions are int32 here. Kernels that have them in registers for their mask take this one:
        float32 copies of them would take as many registers again.
        """
        slope = self.bias_slope(per_head, unit)
        return slope * (kv_positions - q_positions).astype(slope.dtype)

    def bias_line(
        self, q_positions: jax.Array, per_head: Mapping[str, jax.Array], unit: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """``(slope, start)``: the bias of keys at or before their query is a line over positions.

            bias(p_k) = line(p_k) - line(p_q)    with line(p) = slope p + start

        ``start`` is ``-slope p_q``, rounded. ``line(p_q)`` would be 0 but for that rounding. It is
        the same for all keys of a query, so a softmax can do without it until its lse is made.

        A line must be computed by a multiply-add that rounds once: its error is then small beside
        the bias, however large the positions are, and ``line(p_q)`` is exact. Rounded twice, the
        error would be that of ``slope p_k``.

        Args:
          q_positions: float32, exact below 2^24. They may be counted from any position, and then
            the line's are counted from it too.
          per_head: the numbers of the queries' heads, with "alibi_slopes" among them.
          unit: factor on the bias.
        """
        slope = self.bias_slope(per_head, unit)
        return slope, -(slope * q_positions)

    def bias_slope(self, per_head: Mapping[str, jax.Array], unit: float = 1.0) -> jax.Array:
        """The slope of :meth:`bias_line`."""
        return per_head["alibi_slopes"] * unit

    def in_base_2(
        self,
        raw: jax.Array,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
        places: Places | None = None,
    ) -> tuple[jax.Array, float]:
        """``(scores, factor)``, whose product is the logits in base 2.

        A softmax multiplies by the factor inside its exponent, where it costs nothing. A bias must
        be added to logits in base 2, so the factor is in the scores then, and is 1. ``places``: as
        in :meth:`modified`.
        """
        scores = raw if self.score_mod is None else self.modified(raw, places)
        return self.with_bias(scores, q_positions, kv_positions, per_head)

    @property
    def base_2_factor(self) -> float:
        """What takes scores to base 2 before a bias: raw ones, or where there is f, those of f."""
        return (self.raw_factor if self.score_mod is None else 1.0) * LOG2_E

    def with_bias(
        self,
        scores: jax.Array,
        q_positions: jax.Array,
        kv_positions: jax.Array,
        per_head: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, float]:
        """:meth:`in_base_2` of scores that :attr:`base_2_factor` takes to base 2."""
        factor = self.base_2_factor
        bias = self.bias(q_positions, kv_positions, per_head, LOG2_E)
        return (scores, factor) if bias is None else (scores * factor + bias, 1.0)

    def to_products(
        self, raw: jax.Array, weights: jax.Array, ds: jax.Array, places: Places | None
    ) -> jax.Array:
        """The gradient of ``scale q.k`` from ``ds``, the gradient of the logits.

        Args:
          raw: :meth:`raw`.
          weights: of the softmax, 0 where a score does not count. There f may have no derivative.
          ds: the caller multiplies by the scale once, after its last matmul.
          places: as in :meth:`modified`.
        """
        if self.score_mod is not None:
            assert places is not None
            slope = functools.partial(elementwise.slope, self.score_mod)
            slope = places.apply(slope, raw * self.raw_factor)
            ds = jnp.where(weights == 0, jnp.zeros((), ds.dtype), ds * slope)
        return self.through_cap(raw, ds)

    def through_cap(self, raw: jax.Array, ds: jax.Array) -> jax.Array:
        """The gradient of ``scale q.k`` from ``ds``, that of the capped scores.

        ``d/dx c tanh(x / c) = 1 - tanh(x / c)^2``, and ``raw`` is that tanh.
        """
        return ds if self.logits_soft_cap is None else ds * (1 - raw * raw)

    def per_head_gradients(
        self, ds: jax.Array, q_positions: jax.Array, kv_positions: jax.Array
    ) -> dict[str, jax.Array]:
        """What each score of a tile adds to the gradients of the :attr:`differentiated` arrays.

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

    Positions are converted before they are subtracted: once for each token instead of each score.
    """
    return jnp.abs(q_positions.astype(dtype) - kv_positions.astype(dtype))
