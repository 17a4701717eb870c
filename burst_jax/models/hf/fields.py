"""The type and range of each key of ``config.json`` that a decoder is read from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from burst_jax.errors import check_integer, check_positive, printable, shown
from burst_jax.models.config import MAX_LAYERS, MAX_SIZE

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    "max_position_embeddings",
    "full_attention_interval",
    "model_max_length",
    *("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
)
# Null where transformers computes them from others, or where there is none.
_OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim", "sliding_window", "original_max_position_embeddings"),
    *("sliding_window_pattern", "_sliding_window_pattern"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_heads", "linear_head_dim"),
    *("num_experts_per_token", "num_expert_group", "topk_group"),
)
# These may be 0.
_COUNTS = ("max_window_layers", "first_k_dense_replace", "num_shared_experts", "qk_rope_head_dim")
_NUMBERS = ("rms_norm_eps", "rope_local_base_freq", "routed_scaling_factor")
_OPTIONAL_NUMBERS = (
    "swiglu_limit",
    *("rope_theta", "partial_rotary_factor", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_BOOLEANS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"),
    *("norm_topk_prob", "linear_allow_neg_eigval", "moe_renormalize"),
)
_LISTS = ("layer_types", "mlp_layer_types")


def ignoring(names: Sequence[str]) -> str:
    """The remedy for keys or tensors that do not change the computation, for a message."""
    keys = shown(tuple(names)) if names else "(key,)"
    flags = shown(shlex.join(printable(name) for name in names))[1:-1] if names else "KEY"
    return f"pass ignore={keys}, on a command line --ignore {flags}"


def check_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with the family's defaults, each key checked; null booleans become False.

    Raises:
      ValueError: a value of another type or out of range, or sizes that do not fit together.
    """
    checked = dict(values)
    for key, value in values.items():
        if value is None and key in (*_OPTIONAL_SIZES, *_OPTIONAL_NUMBERS):
            continue
        if key in (*_SIZES, *_OPTIONAL_SIZES):
            check_integer(key, value, 1, MAX_SIZE)
        elif key == "num_hidden_layers":
            check_integer(key, value, 1, MAX_LAYERS)
        elif key in _COUNTS:
            check_integer(key, value, 0, MAX_SIZE)
        elif key in (*_NUMBERS, *_OPTIONAL_NUMBERS):
            check_positive(key, value)
        elif key in _BOOLEANS:
            if not (value is None or isinstance(value, bool)):
                raise ValueError(f"{key} is {shown(value)}: it must be true or false")
            checked[key] = bool(value)
        elif key in _LISTS and value is not None and not isinstance(value, list):
            raise ValueError(f"{key} is {shown(value)}: it must be a list")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"num_attention_heads is {heads}, num_key_value_heads {kv_heads}: it must be a multiple"
        )
    if values.get("head_dim") is None and heads > values["hidden_size"]:
        raise ValueError(
            f"num_attention_heads is {heads}, hidden_size {values['hidden_size']}: there is no "
            "feature for each head"
        )
    return checked
