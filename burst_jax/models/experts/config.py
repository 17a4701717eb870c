"""The sizes of a mixture of experts, and how its router weighs them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from burst_jax.errors import check_bool, check_coefficient, check_integer, check_positive, shown
from burst_jax.models.feed_forward import DecoderConfig, GatedMLP

Score = Literal["softmax", "sigmoid"]
_MAX_EXPERTS = 65536


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a :class:`MixtureOfExperts`, whose hidden features are ``config.mlp_dim``.

    Attributes:
      count: number of experts, E.
      per_token: number of experts that a token is sent to, k: those with the largest logits; with
        ``choice_bias`` or groups those with the largest sum of score and bias.
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
      choice_bias: whether each expert has a float32 weight that is added to its scores in the
        choice of a token's experts, and not in their weights: the correction that balances loads
        without a loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek V3). It has no gradient, and
        AdamW leaves it as it is: the rule that updates it by the loads is not implemented.
      groups: number of groups of consecutive experts. A token is sent to experts of
        ``groups_per_token`` of them: those with the largest sum of their two largest scores, biases
        included (DeepSeek V3, arXiv 2412.19437, section 2.1.2).
      groups_per_token: see ``groups``.
      scale: factor on a token's k weights, after they are normalized.

    Raises:
      ValueError: a number out of range, an unknown score, a bool's field that is none, or groups
        that do not fit the experts.
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
    choice_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_integer("count", self.count, 1, _MAX_EXPERTS)
        check_integer("per_token", self.per_token, 1, self.count)
        check_integer("shared_dim", self.shared_dim, 0, 2**31 - 1)
        for name in ("normalize", "router_bias", "shared_gate", "choice_bias"):
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
        check_positive("scale", self.scale)
        self._check_groups()
        if self.clamp is not None:
            check_positive("clamp", self.clamp, also=", or None")
        if self.capacity_factor is not None:
            check_positive("capacity_factor", self.capacity_factor, also=", or None")
        for name in ("balance_loss", "z_loss"):
            object.__setattr__(self, name, check_coefficient(name, getattr(self, name)))

    def _check_groups(self) -> None:
        """Raises ValueError for groups that do not fit the experts."""
        check_integer("groups", self.groups, 1, self.count)
        check_integer("groups_per_token", self.groups_per_token, 1, self.groups)
        size = self.count // self.groups
        if self.count % self.groups or (self.groups > 1 and size < 2):
            raise ValueError(
                f"groups is {self.groups}, count {self.count}: each group needs the same number of "
                "experts, at least 2; use a divisor of count"
            )
        if self.per_token > self.groups_per_token * size:
            raise ValueError(
                f"per_token is {self.per_token}, and {self.groups_per_token} of {self.groups} "
                f"groups have {self.groups_per_token * size} experts: use more groups_per_token, "
                "or fewer experts per token"
            )

    @property
    def chooses_by_logits(self) -> bool:
        """Whether a token's experts are those with the largest logits."""
        return not self.choice_bias and self.groups == self.groups_per_token


def dense_config(config: DecoderConfig, hidden: int) -> DecoderConfig:
    """The config of a gated MLP of so many hidden features, in a decoder with experts."""
    kinds: Any = (dataclasses.replace(kind, dense=False) for kind in config.layer_pattern)
    return dataclasses.replace(
        config,
        mlp_dim=hidden,
        dense_dim=None,
        layer_pattern=tuple(kinds),
        experts=None,
        feed_forward=GatedMLP,
    )
