"""The sizes of a mixture of experts, and how its router weighs them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from burst_jax.errors import check_bool, check_integer, check_positive, shown

Score = Literal["softmax", "sigmoid"]
_MAX_EXPERTS = 65536


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a :class:`MixtureOfExperts`, whose hidden features are ``config.mlp_dim``.

    Attributes:
      count: number of experts, E.
      per_token: number of experts that a token is sent to, k: those with the largest logits.
      score: function of the router's logits that weights the experts' outputs: "softmax" over all
        experts, or "sigmoid" of each.
      normalize: whether a token's k weights are divided by their sum. For "softmax" this is the
        softmax over the k logits.
      router_bias: whether the router has a bias.
      clamp: bound c of gpt-oss's gated unit, or None for ``config.activation``. Hidden features are
        then ``g * sigmoid(1.702 g) * (u + 1)``, with g the gate's output, at most c, and u the up
        projection's, from -c to c.
      shared_dim: number of hidden features of a shared expert, a gated MLP for all tokens whose
        output is added; 0 is none.
      shared_gate: whether that output is multiplied by ``sigmoid(x w)``, one number per token, as
        in Qwen3-Next. Only with a shared expert.
      balance_loss: coefficient of the load-balancing loss (Fedus et al. 2021), per layer
        ``E sum_e f_e p_e``, with f_e the share of an expert in all assignments and p_e its mean
        score, scores being normalized to a sum of 1; 1 if the load is even.
      z_loss: coefficient of the router's z-loss (Zoph et al. 2022), per layer the mean of
        ``logsumexp(logits)**2``.
      capacity_factor: with expert parallelism, for how many assignments of a token to an expert a
        device sends tokens to each other device at a time, as a multiple of the mean. If a device
        has more, further exchanges follow; none is dropped. The experts' rows in memory are
        proportional to it. None sends all at once, in memory for all tokens of all devices.

    Raises:
      ValueError: a number out of range, an unknown score, or a bool's field that is none.
    """

    count: int
    per_token: int
    score: Score = "softmax"
    normalize: bool = True
    router_bias: bool = False
    clamp: float | None = None
    shared_dim: int = 0
    shared_gate: bool = False
    balance_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = 1.5

    def __post_init__(self) -> None:
        check_integer("count", self.count, 1, _MAX_EXPERTS)
        check_integer("per_token", self.per_token, 1, self.count)
        check_integer("shared_dim", self.shared_dim, 0, 2**31 - 1)
        for name in ("normalize", "router_bias", "shared_gate"):
            check_bool(name, getattr(self, name))
        if self.shared_gate and not self.shared_dim:
            raise ValueError(
                f"shared_gate is {shown(self.shared_gate)}, shared_dim 0: there is no shared "
                "expert whose output it could scale; pass shared_dim, or leave shared_gate out"
            )
        if self.score not in get_args(Score):
            raise ValueError(
                f"score is {shown(self.score)}: use one of {str(get_args(Score))[1:-1]}"
            )
        if self.clamp is not None:
            check_positive("clamp", self.clamp, also=", or None")
        if self.capacity_factor is not None:
            check_positive("capacity_factor", self.capacity_factor, also=", or None")
        for name in ("balance_loss", "z_loss"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(
                    f"{name} is {shown(value)}: it must be 0, which is none, or positive and finite"
                )
