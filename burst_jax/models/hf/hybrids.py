"""The model families with layers of linear attention (Gated DeltaNet) and of softmax attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burst_jax.models.config import DecoderConfig
from burst_jax.models.hf.common import (
    COMMON,
    EXPERTS_FORMS,
    EXPERTS_NAMES,
    MLP,
    ROUTER_IGNORED,
    all_but_each,
)
from burst_jax.models.hf.family import LAYER, NAMES, Family, Fused, Multimodal, Names
from burst_jax.models.hf.ropes import FULL, LINEAR, RopeForms
from burst_jax.models.hf.views import OtherForm

# The sizes of Gated DeltaNet.
_SIZES = {
    "linear_num_value_heads": "num_heads",
    "linear_num_key_heads": "num_key_heads",
    "linear_key_head_dim": "head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_taps",
}
_STACK, _DELTA_NET, _ATTENTION = (
    ("delta_net_layers",),
    ("delta_net_layers", "attention"),
    ("layers", "attention"),
)
_MIXER = LAYER + "linear_attn."
# The convolutions of queries, keys and values, one after the other.
_CONV = Fused(_MIXER + "conv1d.weight")


def _key_heads(config: DecoderConfig) -> int:
    assert config.delta_net is not None
    return config.delta_net.num_key_heads


def _of_both(names: Names) -> Names:
    """The names, with those of the feed-forward and its norm in the other stack, too."""
    shared = {
        (*_STACK, *path[1:]): name
        for path, name in names.items()
        if path[:2] in (MLP, ("layers", "mlp_norm"), ("layers", "attention_norm"))
    }
    return {**names, **shared}


_QWEN: Names = {
    # A head's query rows, and then those of its gate.
    (*_ATTENTION, "query", "kernel"): (
        _QUERY := Fused(LAYER + "self_attn.q_proj.weight", lambda config: config.num_heads)
    ),
    (*_ATTENTION, "output_gate", "kernel"): _QUERY,
    (*_ATTENTION, "query", "bias"): (
        _BIAS := Fused(LAYER + "self_attn.q_proj.bias", lambda config: config.num_heads)
    ),
    (*_ATTENTION, "output_gate", "bias"): _BIAS,
    **{(*_DELTA_NET, f"{name}_conv"): _CONV for name in ("query", "key", "value")},
    (*_DELTA_NET, "A_log"): _MIXER + "A_log",
    (*_DELTA_NET, "dt_bias"): _MIXER + "dt_bias",
    (*_DELTA_NET, "norm", "scale"): _MIXER + "norm.weight",
    (*_DELTA_NET, "out", "kernel"): _MIXER + "out_proj.weight",
}
# The rows of a key head and of its value heads follow each other.
_QKVZ = Fused(_MIXER + "in_proj_qkvz.weight", _key_heads)
_BA = Fused(_MIXER + "in_proj_ba.weight", _key_heads)
_QWEN3_NEXT: Names = {
    **_QWEN,
    **{(*_DELTA_NET, n, "kernel"): _QKVZ for n in ("query", "key", "value", "output_gate")},
    **{(*_DELTA_NET, name, "kernel"): _BA for name in ("beta", "decay")},
}
_QKV = Fused(_MIXER + "in_proj_qkv.weight")
_QWEN3_5: Names = {
    **_QWEN,
    **{(*_DELTA_NET, name, "kernel"): _QKV for name in ("query", "key", "value")},
    (*_DELTA_NET, "output_gate", "kernel"): _MIXER + "in_proj_z.weight",
    (*_DELTA_NET, "beta", "kernel"): _MIXER + "in_proj_b.weight",
    (*_DELTA_NET, "decay", "kernel"): _MIXER + "in_proj_a.weight",
}
_SHARED_EXPERT: Names = {
    **{
        (*MLP, "shared", name, "kernel"): LAYER + f"mlp.shared_expert.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    (*MLP, "shared_gate", "kernel"): LAYER + "mlp.shared_expert_gate.weight",
}
_KEYS: dict[str, Any] = COMMON | {
    "hidden_act": "silu",
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MOE_KEYS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_FIELDS: dict[str, Any] = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
_EXPERTS = {
    "num_experts": "count",
    "num_experts_per_tok": "per_token",
    "shared_expert_intermediate_size": "shared_dim",
}
# Keys that transformers does not read; the layers that predict further tokens are skipped.
_IGNORED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")


def _types(values: Mapping[str, Any]) -> list[str]:
    return all_but_each(LINEAR, values["full_attention_interval"], values)


def _decoder_tensor(name: str) -> str | None:
    """Without the layers that predict further tokens (MTP)."""
    return None if name.startswith("mtp.") else name


def _qwen3_5_tensor(name: str) -> str | None:
    """Without MTP and vision layers, under the names of a model of text alone."""
    if re.match(r"(model\.)?visual\.", name):
        return None
    return _decoder_tensor(name.replace("model.language_model.", "model.", 1))


_QWEN3_5_FIELDS: dict[str, Any] = {
    "only": {"attn_output_gate": (True,), "mlp_only_layers": ([], None)},
    "ignored": (*_IGNORED, *ROUTER_IGNORED),
    "linear": _SIZES,
    # The tokens of a text have the same position in all three grids of M-RoPE.
    "ropes": RopeForms(partial=True, ignored=("mrope_section", "mrope_interleaved")),
    "tensor_name": _qwen3_5_tensor,
}


def _with_images(model_type: str) -> Multimodal:
    keys = ("text_config", "vision_config", "image_token_id", "video_token_id")
    keys += ("vision_start_token_id", "vision_end_token_id")
    return Multimodal(model_type, keys, _qwen3_5_tensor)


_OLMO: Names = {
    **NAMES,
    (*_ATTENTION, "query_norm", "scales"): LAYER + "self_attn.q_norm.weight",
    (*_ATTENTION, "key_norm", "scales"): LAYER + "self_attn.k_norm.weight",
    # In layers of softmax attention this norm comes after it; in others, before the MLP.
    ("layers", "post_attention_norm", "scale"): LAYER + "feedforward_layer_norm.weight",
    ("layers", "post_mlp_norm", "scale"): LAYER + "post_feedforward_layernorm.weight",
    (*_STACK, "attention_norm", "scale"): LAYER + "attention_layer_norm.weight",
    (*_STACK, "mlp_norm", "scale"): LAYER + "feedforward_layer_norm.weight",
    **{
        (*_STACK, "mlp", name, "kernel"): LAYER + f"mlp.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    **{
        (*_DELTA_NET, ours, "kernel"): _MIXER + f"{theirs}_proj.weight"
        for ours, theirs in (
            *(("query", "q"), ("key", "k"), ("value", "v"), ("output_gate", "g")),
            *(("beta", "b"), ("decay", "a"), ("out", "o")),
        )
    },
    **{
        (*_DELTA_NET, f"{name}_conv"): _MIXER + f"{name[0]}_conv1d.weight"
        for name in ("query", "key", "value")
    },
    (*_DELTA_NET, "A_log"): _MIXER + "A_log",
    (*_DELTA_NET, "dt_bias"): _MIXER + "dt_bias",
    (*_DELTA_NET, "norm", "scale"): _MIXER + "o_norm.weight",
}
_OLMO_CONVS = tuple(_MIXER + f"{name}_conv1d.weight" for name in "qkv")
# Their initialization.
_OLMO_IGNORED = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")


def _olmo_tensor(name: str) -> str | None:
    """Under the names of published files; transformers has its own in memory."""
    name = name.replace("input_layernorm", "attention_layer_norm")
    return _decoder_tensor(name.replace("post_attention_layernorm", "feedforward_layer_norm"))


def _olmo_types(values: Mapping[str, Any]) -> list[str]:
    """Each fourth layer has softmax attention, and of fewer layers the last one."""
    types = all_but_each(LINEAR, 4, values)
    return types if FULL in types else [*types[:-1], FULL]


def _olmo_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    key_heads = values["linear_num_key_heads"] or heads
    width = values["linear_key_head_dim"] or int(0.75 * values["hidden_size"] / key_heads)
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": 2 * width,
    }


HYBRIDS: tuple[Family, ...] = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _KEYS | _MOE_KEYS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        _FIELDS,
        _types,
        _of_both({**EXPERTS_NAMES, **_QWEN3_NEXT, **_SHARED_EXPERT}),
        only={"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)}
        | {"use_sliding_window": (False, None)},
        keys={"moe_intermediate_size": "mlp_dim"},
        ignored=ROUTER_IGNORED,
        experts={"norm_topk_prob": "normalize"} | _EXPERTS,
        expert_fields={"shared_gate": True},
        linear=_SIZES,
        ropes=RopeForms(partial=True),
        tensor_name=_decoder_tensor,
        other_forms=EXPERTS_FORMS,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        # A text_config omits sizes that have transformers' defaults.
        _KEYS
        | {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        _FIELDS,
        _types,
        _of_both({**NAMES, **_QWEN3_5}),
        multimodal=_with_images("qwen3_5"),
        **_QWEN3_5_FIELDS,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _KEYS
        | _MOE_KEYS
        | {"num_experts": 256, "num_experts_per_tok": 8}
        | {
            "vocab_size": 248320,
            "hidden_size": 2048,
            # A key of layers without experts, of which there are none.
            "intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
        },
        _FIELDS,
        _types,
        _of_both({**EXPERTS_NAMES, **_QWEN3_5, **_SHARED_EXPERT}),
        keys={"moe_intermediate_size": "mlp_dim"},
        experts=_EXPERTS,
        expert_fields={"shared_gate": True},
        other_forms=EXPERTS_FORMS,
        multimodal=_with_images("qwen3_5_moe"),
        **_QWEN3_5_FIELDS,
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        COMMON
        | {"hidden_act": "silu", "max_position_embeddings": 65536, "attention_bias": False}
        | {"rope_theta": 10000.0, "layer_types": None, "linear_allow_neg_eigval": True}
        | dict.fromkeys(_SIZES)
        | {"linear_conv_kernel_dim": 4},
        {"qk_norm": "joint"},
        _olmo_types,
        _OLMO,
        only={"linear_use_gate": (True,)},
        ignored=(*_OLMO_IGNORED, "linear_dt_init_floor"),
        linear=_SIZES | {"linear_allow_neg_eigval": "negative_eigenvalues"},
        linear_fields={"norm_epsilon": 1e-5},
        norms="after",
        ropes=RopeForms(absent=True),
        derive=_olmo_sizes,
        tensor_name=_olmo_tensor,
        other_forms=(
            OtherForm(_OLMO_CONVS, _OLMO_CONVS),
            OtherForm((_MIXER + "conv1d.weight",), _OLMO_CONVS),
        ),
    ),
)
