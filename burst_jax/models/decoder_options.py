"""Which options a decoder accepts: attention options, and those that its config or rules set."""

from __future__ import annotations

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.models.config import DecoderConfig
from burst_jax.models.delta_net import check_options
from burst_jax.parallel.mesh import AxisNames
from burst_jax.parallel.rules import ShardingRules, check_rules


def reject_own_options(config: DecoderConfig, options: AttentionOptions) -> None:
    """Raises TypeError for options that the decoder or its config sets."""
    for name in ("is_causal", "logits_soft_cap"):
        if name in options:
            raise TypeError(
                f"Decoder sets {name} itself: it is always causal, and the soft cap is "
                "DecoderConfig's"
            )
    check_options(config, options)
    windows = any(kind.window is not None for kind in config.layer_pattern)
    for name, given, field in (
        ("scale", config.attention_scale is not None, "attention_scale"),
        ("local_window_size", windows, "layer_pattern"),
    ):
        if given and name in options:
            raise TypeError(f"{name} is given, and DecoderConfig's {field} sets it, too: pass one")


def check_expert_axis(config: DecoderConfig, rules: ShardingRules) -> None:
    """Raises ValueError for an expert axis without experts."""
    if not any("expert" in axes for axes in config.feed_forward.weight_axes.values()):
        raise ValueError(
            f"ShardingRules' expert is {rules.expert!r}, and feed_forward "
            f'{config.feed_forward.__name__} has no weights with a dimension "expert": pass '
            "expert=None, or feed_forward=MixtureOfExperts with experts=Experts(...)"
        )


def with_rules(options: AttentionOptions, rules: ShardingRules) -> AttentionOptions:
    """The attention options with the mesh axes of the rules."""
    check_rules(rules)
    from_rules = options_of_rules(rules)
    for name in from_rules:
        if name in options:
            raise ValueError(f"{name} is given together with rules, which set it: leave it out")
    return options | from_rules  # pyrefly: ignore


def options_of_rules(rules: ShardingRules) -> dict[str, AxisNames]:
    """The attention options that the rules set."""
    return {
        "seq_axis": rules.seq,
        "batch_axis": rules.batch_axes or None,
        "tensor_axis": rules.tensor,
    }
