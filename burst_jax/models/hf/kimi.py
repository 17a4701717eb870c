"""Kimi Linear: Kimi Delta Attention, latent attention without RoPE, and a mixture of experts.

Its ``config.json`` has the kinds of the layers, counted from 1, and the sizes of Kimi Delta
Attention in an object of their own; transformers adds keys of its own for the same::

    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, ...], "full_attn_layers": [4, 8, ...],
                           "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    "layer_types": ["linear_attention", ...], "linear_num_heads": 32, "linear_head_dim": 128, ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from burst_jax.errors import check_integer, shown
from burst_jax.models.config import MAX_SIZE, STACKS, DecoderConfig
from burst_jax.models.delta_net import KimiDelta
from burst_jax.models.hf.common import MLP, ROUTER_IGNORED
from burst_jax.models.hf.family import DENSE, LAYER, NAMES, SPARSE, Family, Fused, Names, Shaped
from burst_jax.models.hf.ropes import FULL, LINEAR, RopeForms
from burst_jax.models.latent import Latent

_ATTENTION, _KDA = ("layers", "attention"), ("delta_net_layers", "attention")
_MIXER, _MOE = LAYER + "self_attn.", LAYER + "block_sparse_moe."
_GATED = ("gate", "up", "down")
# Of each head the rows of its key without the shared part, and then those of its value.
_KEY_VALUE = Fused(_MIXER + "kv_b_proj.weight", lambda config: config.num_heads)
_MIXERS: Names = {
    (*_ATTENTION, "query", "kernel"): _MIXER + "q_proj.weight",
    (*_ATTENTION, "latent", "kernel"): _MIXER + "kv_a_proj_with_mqa.weight",
    (*_ATTENTION, "latent_norm", "scale"): _MIXER + "kv_a_layernorm.weight",
    (*_ATTENTION, "key", "kernel"): _KEY_VALUE,
    (*_ATTENTION, "value", "kernel"): _KEY_VALUE,
    (*_ATTENTION, "out", "kernel"): _MIXER + "o_proj.weight",
    **{
        (*_KDA, ours, "kernel"): _MIXER + f"{theirs}_proj.weight"
        for ours, theirs in (
            *(("query", "q"), ("key", "k"), ("value", "v"), ("beta", "b"), ("out", "o")),
            *(("decay_a", "f_a"), ("decay_b", "f_b")),
            *(("output_gate_a", "g_a"), ("output_gate_b", "g_b")),
        )
    },
    **{
        (*_KDA, f"{name}_conv"): _MIXER + f"{name[0]}_conv1d.weight"
        for name in ("query", "key", "value")
    },
    (*_KDA, "A_log"): Shaped(_MIXER + "A_log", 2, 1),
    (*_KDA, "dt_bias"): _MIXER + "dt_bias",
    (*_KDA, "norm", "scale"): _MIXER + "o_norm.weight",
}
_NORMS = {path[1:]: name for path, name in NAMES.items() if path[0] == "layers" and len(path) == 3}
_EXPERTS: Names = {
    ("router", "kernel"): _MOE + "gate.weight",
    ("choice_bias",): _MOE + "gate.e_score_correction_bias",
    **{
        (name, "kernel"): _MOE + f"experts.{{expert}}.{theirs}.weight"
        for name, theirs in zip(_GATED, ("w1", "w3", "w2"), strict=True)
    },
    **{("shared", name, "kernel"): _MOE + f"shared_experts.{name}_proj.weight" for name in _GATED},
}
_DENSE = {(name, "kernel"): NAMES[*MLP, name, "kernel"] for name in _GATED}


def _names() -> Names:
    """The names of the tensors of all stacks."""
    found = {path: name for path, name in NAMES.items() if path[0] not in STACKS}
    for name, stack in STACKS.items():
        of_mixer = name.removeprefix("dense_")
        found |= {(name, *path[1:]): x for path, x in _MIXERS.items() if path[0] == of_mixer}
        found |= {(name, *path): x for path, x in _NORMS.items()}
        of_mlp = _DENSE if stack.dense else _EXPERTS
        found |= {(name, MLP[1], *path): x for path, x in of_mlp.items()}
    return found


# The keys of linear_attn_config, by those that transformers adds.
_SIZES = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_LAYERS = {"kda_layers": LINEAR, "full_attn_layers": FULL}


def _derive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What an object ``linear_attn_config`` or ``first_k_dense_replace`` describes."""
    count = values["num_hidden_layers"]
    first = values["first_k_dense_replace"]
    derived: dict[str, Any] = {
        "layer_types": [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)],
        "mlp_layer_types": [DENSE if layer < first else SPARSE for layer in range(count)],
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    given = values["linear_attn_config"]
    if given is None:
        return derived
    name = "config.json's linear_attn_config"
    known = {*_LAYERS, *_SIZES.values()}
    if not isinstance(given, Mapping) or {*given} != known:
        raise ValueError(f"{name} is {shown(given)}: it needs the keys {', '.join(sorted(known))}")
    for key, theirs in _SIZES.items():
        derived[key] = check_integer(f"{name} {theirs}", given[theirs], 1, MAX_SIZE)
    types: list[str | None] = [None] * count
    layers = [(layer, kind) for key, kind in _LAYERS.items() for layer in _list(given[key])]
    for layer, kind in layers:
        if isinstance(layer, int) and 1 <= layer <= count:
            types[layer - 1] = kind
    if len(layers) != count or None in types:
        raise ValueError(
            f"{name} has {', '.join(f'{key} {shown(given[key])}' for key in _LAYERS)}: they need "
            f"each of the layers 1 to {count} once"
        )
    derived["layer_types"] = types
    for key in ("layer_types", *_SIZES):
        if values[key] not in (None, derived[key]):
            raise ValueError(
                f"{name} describes {key} {shown(derived[key])}, and config.json has "
                f"{shown(values[key])}: remove one of them"
            )
    return derived


def _tensor(name: str) -> str:
    """Under the names of published files; transformers saves those of dense layers as of others."""
    return re.sub(r"\.block_sparse_moe\.((gate|up|down)_proj\.)", r".mlp.\1", name)


def _module(name: str) -> str:
    """transformers has the decays' projections in a module of their own."""
    return re.sub(r"\.self_attn\.(f_[ab]_proj)", r".self_attn.forget_gate.\1", name)


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [None]


def _adjust(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of latent attention, of shared experts and of dense layers."""
    hidden = check_integer("moe_intermediate_size", values["moe_intermediate_size"], 1, MAX_SIZE)
    shared, rotated = values["num_shared_experts"], values["qk_rope_head_dim"]
    has_dense = any(kind.dense for kind in fields["layer_pattern"])
    return {
        "head_dim": values["qk_nope_head_dim"] + rotated,
        "latent": Latent(values["kv_lora_rank"], rotated, values["v_head_dim"]),
        "experts": dataclasses.replace(fields["experts"], shared_dim=shared * hidden),
        "dense_dim": fields["dense_dim"] if has_dense else None,
    }


def _finish(written: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """The keys of published files, for those of transformers."""
    latent, experts = config.latent, config.experts
    if latent is None or experts is None or experts.shared_dim % config.mlp_dim:
        raise NotImplementedError(
            f"kimi_linear cannot express latent={latent}, experts={experts} and mlp_dim "
            f"{config.mlp_dim}: it has latent attention, and shared experts of that size"
        )
    dense = [kind.dense for kind in config.layer_kinds]
    first = dense.index(False)
    types = written.pop("layer_types")
    layers = {
        key: [layer for layer, each in enumerate(types, 1) if each == kind]
        for key, kind in _LAYERS.items()
    }
    sizes = {theirs: written.pop(key, None) for key, theirs in _SIZES.items()}
    if any(dense[first:]):
        written["mlp_layer_types"] = [DENSE if each else SPARSE for each in dense]
        first = 0
    return written | {
        "linear_attn_config": layers | sizes,
        "first_k_dense_replace": first,
        "intermediate_size": config.dense_dim or config.mlp_dim,
        "num_shared_experts": experts.shared_dim // config.mlp_dim,
        "kv_lora_rank": latent.dim,
        "qk_nope_head_dim": config.head_dim - latent.shared_dim,
        "qk_rope_head_dim": latent.shared_dim,
        "v_head_dim": latent.value_head_dim,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
    }


KIMI = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "model_max_length": 1048576,
        "num_key_value_heads": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "layer_types": None,
        "linear_attn_config": None,
        **dict.fromkeys(_SIZES),
    },
    {"qk_norm": False},
    names=_names(),
    only={
        "q_lora_rank": (None,),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": (True,),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0, None),
        "tie_word_embeddings": (False,),
    },
    keys={"intermediate_size": "dense_dim", "moe_intermediate_size": "mlp_dim"},
    # The head dims and RoPE of attention that is not latent; transformers' sum of two head dims.
    ignored=(
        *ROUTER_IGNORED,
        *("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", "auto_map"),
    ),
    experts={
        "num_experts": "count",
        "num_experts_per_token": "per_token",
        "num_expert_group": "groups",
        "topk_group": "groups_per_token",
        "moe_renormalize": "normalize",
        "routed_scaling_factor": "scale",
    },
    expert_fields={"score": "sigmoid", "choice_bias": True},
    linear={
        "linear_num_heads": ("num_heads", "num_key_heads"),
        "linear_head_dim": ("head_dim", "value_head_dim"),
        "linear_conv_kernel_dim": "conv_taps",
    },
    linear_type=KimiDelta,
    ropes=RopeForms(none=True),
    derive=_derive,
    adjust=_adjust,
    finish=_finish,
    tensor_name=_tensor,
    module_name=_module,
    length_key="model_max_length",
)
