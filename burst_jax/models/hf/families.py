"""The model families. A new one is one more :class:`Family` in this file.

Those with layers of linear attention are in :mod:`burst_jax.models.hf.hybrids`, Kimi Linear in
:mod:`burst_jax.models.hf.kimi`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burst_jax.models.hf.common import (
    COMMON,
    EXPERTS,
    EXPERTS_FORMS,
    EXPERTS_NAMES,
    MLP,
    ROUTER_IGNORED,
    all_but_each,
)
from burst_jax.models.hf.family import LAYER, NAMES, Family, Fused, Multimodal, Names
from burst_jax.models.hf.hybrids import HYBRIDS
from burst_jax.models.hf.kimi import KIMI
from burst_jax.models.hf.mxfp4 import MXFP4
from burst_jax.models.hf.ropes import FULL, SLIDING

_QWEN: dict[str, Any] = COMMON | {
    "hidden_act": "silu",
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
# Keys that transformers does not read with experts, where all layers have the window, or none.
_QWEN_LAYERS = ("max_window_layers", "layer_types")
_GEMMA: dict[str, Any] = COMMON | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
}
_GEMMA_FIELDS: dict[str, Any] = {
    "norm_offset": 1.0,
    "post_norms": True,
    "scale_embeddings": True,
    "qk_norm": False,
}
# In Gemma post_attention_layernorm normalizes attention's output; elsewhere, the MLP's input.
_GEMMA_NAMES: Names = {
    **NAMES,
    ("layers", "post_attention_norm", "scale"): LAYER + "post_attention_layernorm.weight",
    ("layers", "mlp_norm", "scale"): LAYER + "pre_feedforward_layernorm.weight",
    ("layers", "post_mlp_norm", "scale"): LAYER + "post_feedforward_layernorm.weight",
}
_MIXTRAL_NAMES: Names = {
    **NAMES,
    (*MLP, "router", "kernel"): LAYER + "block_sparse_moe.gate.weight",
    **{
        (*MLP, name, "kernel"): LAYER + f"block_sparse_moe.experts.{{expert}}.{theirs}.weight"
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_GPT_OSS_NAMES: Names = {
    **NAMES,
    ("layers", "attention", "sinks"): LAYER + "self_attn.sinks",
    (*MLP, "router", "kernel"): LAYER + "mlp.router.weight",
    (*MLP, "router", "bias"): LAYER + "mlp.router.bias",
    **{
        (*MLP, name, of): Fused(f"{LAYER}mlp.experts.{theirs}{end}", groups, True, True)
        # Each output of gate and that of up follow each other.
        for name, theirs, groups in (
            ("gate", "gate_up_proj", lambda config: config.mlp_dim),
            ("up", "gate_up_proj", lambda config: config.mlp_dim),
            ("down", "down_proj", lambda config: 1),
        )
        for of, end in (("kernel", ""), ("bias", "_bias"))
    },
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Keys of Gemma's files that transformers does not read.
_GEMMA_IGNORED = ("hidden_act", "sliding_window_size")


def _last_layers(values: Mapping[str, Any]) -> list[str]:
    """Qwen: a window in the layers from ``max_window_layers`` on, if enabled."""
    used = values["use_sliding_window"] and values["sliding_window"] is not None
    first, count = values["max_window_layers"], values["num_hidden_layers"]
    return [SLIDING if used and layer >= first else FULL for layer in range(count)]


def _all_but_each(values: Mapping[str, Any], pattern: int) -> list[str]:
    """Gemma: a window in all layers but each ``pattern``-th."""
    return all_but_each(SLIDING, pattern, values)


def _all_layers(values: Mapping[str, Any]) -> list[str]:
    """A window in all layers, or none."""
    used = values["sliding_window"] is not None and values.get("use_sliding_window", True)
    return [SLIDING if used else FULL] * values["num_hidden_layers"]


def _gemma3_text_tensor(name: str) -> str | None:
    if re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", name):
        return None
    text = re.sub(r"(language_model\.model|model\.language_model)\.", "model.", name, count=1)
    return text.removeprefix("language_model.")


_ALL: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        COMMON
        | {"hidden_act": "silu", "max_position_embeddings": 2048}
        | {"attention_bias": False, "mlp_bias": False},
        {"qk_norm": False},
        # Of Qwen's and Mistral's files, in models that were converted from those.
        only={"sliding_window": (None,), "use_sliding_window": (False, None)},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        COMMON
        | {"hidden_act": "silu", "max_position_embeddings": 131072, "sliding_window": 4096}
        | {"num_key_value_heads": 8},
        {"qk_norm": False},
        _all_layers,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _QWEN,
        {"qk_norm": False, "qkv_bias": True, "out_bias": False},
        _last_layers,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        {"qk_norm": True},
        _last_layers,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {key: value for key, value in _QWEN.items() if key not in _QWEN_LAYERS}
        | {"num_key_value_heads": 4, "attention_bias": False, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
        {"qk_norm": True},
        _all_layers,
        EXPERTS_NAMES,
        only={"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
        # The experts' hidden features; the other key has those of layers without experts.
        keys={"moe_intermediate_size": "mlp_dim"},
        ignored=(*ROUTER_IGNORED, *_QWEN_LAYERS),
        experts={"norm_topk_prob": "normalize", "num_experts": "count"} | EXPERTS,
        other_forms=EXPERTS_FORMS,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        COMMON
        | {"hidden_act": "silu", "max_position_embeddings": 131072, "sliding_window": None}
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"qk_norm": False},
        _all_layers,
        _MIXTRAL_NAMES,
        {FULL: 1_000_000.0, SLIDING: 1_000_000.0},
        # Training with noise on the router's inputs.
        only={"router_jitter_noise": (0, None)},
        ignored=ROUTER_IGNORED,
        experts=EXPERTS,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        COMMON
        | {"hidden_act": "silu", "max_position_embeddings": 131072, "sliding_window": 128}
        | {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": True}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
        | {"layer_types": None, "rope_parameters": _GPT_OSS_ROPE},
        {"qk_norm": False, "attention_sinks": True, "mlp_bias": True},
        lambda values: _all_but_each(values, 2),
        _GPT_OSS_NAMES,
        {FULL: 150_000.0, SLIDING: 150_000.0},
        {"swiglu_alpha": (1.702,)},
        # The last two are copies of num_experts_per_tok and of YaRN's original length.
        ignored=(*ROUTER_IGNORED, "experts_per_token", "initial_context_length"),
        experts={"swiglu_limit": "clamp"} | EXPERTS,
        expert_fields={"router_bias": True},
        quantization=MXFP4,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA
        | {"max_position_embeddings": 8192}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        _GEMMA_FIELDS,
        lambda values: _all_but_each(values, 2),
        _GEMMA_NAMES,
        ignored=_GEMMA_IGNORED,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA
        | {
            # A text_config omits sizes that have transformers' defaults.
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": None,
            "_sliding_window_pattern": None,
            "rope_local_base_freq": 10000.0,
        },
        _GEMMA_FIELDS | {"qk_norm": True},
        lambda values: _all_but_each(values, values["sliding_window_pattern"] or 6),
        _GEMMA_NAMES,
        {FULL: 1_000_000.0, SLIDING: 10_000.0},
        # transformers' config has this key of Gemma 2 and does not compute it.
        {"attn_logit_softcapping": (None,)},
        ignored=_GEMMA_IGNORED,
        multimodal=Multimodal(
            "gemma3",
            (
                *("text_config", "vision_config", "mm_tokens_per_image"),
                *("boi_token_index", "eoi_token_index", "image_token_index"),
                *("boi_token_id", "eoi_token_id", "image_token_id"),
            ),
            _gemma3_text_tensor,
        ),
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*_ALL, *HYBRIDS, KIMI)}
