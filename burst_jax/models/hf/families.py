"""Families of models: what their ``config.json`` says, and how their weights are called.

Each family is data and two small functions. A ``config.json`` may leave out what has transformers'
default, so a family knows the default of each key that changes the computation. Keys that it does
not know are refused, because one of them might change it, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from burst_jax.models.config import Activation, DecoderConfig, LayerKind
from burst_jax.models.hf.ropes import FULL, SLIDING, ropes_json, ropes_of

# A weight's path in nnx.state(decoder), and its name in the files. {layer} counts the layers, which
# are one stacked weight here.
Names = Mapping[tuple[str, ...], str]
_LAYER = "model.layers.{layer}."
_NAMES: Names = {
    ("embedding",): "model.embed_tokens.weight",
    ("layers", "attention_norm", "scale"): _LAYER + "input_layernorm.weight",
    ("layers", "attention", "query", "kernel"): _LAYER + "self_attn.q_proj.weight",
    ("layers", "attention", "query", "bias"): _LAYER + "self_attn.q_proj.bias",
    ("layers", "attention", "key", "kernel"): _LAYER + "self_attn.k_proj.weight",
    ("layers", "attention", "key", "bias"): _LAYER + "self_attn.k_proj.bias",
    ("layers", "attention", "value", "kernel"): _LAYER + "self_attn.v_proj.weight",
    ("layers", "attention", "value", "bias"): _LAYER + "self_attn.v_proj.bias",
    ("layers", "attention", "query_norm", "scale"): _LAYER + "self_attn.q_norm.weight",
    ("layers", "attention", "key_norm", "scale"): _LAYER + "self_attn.k_norm.weight",
    ("layers", "attention", "out", "kernel"): _LAYER + "self_attn.o_proj.weight",
    ("layers", "attention", "out", "bias"): _LAYER + "self_attn.o_proj.bias",
    ("layers", "mlp_norm", "scale"): _LAYER + "post_attention_layernorm.weight",
    ("layers", "mlp", "gate", "kernel"): _LAYER + "mlp.gate_proj.weight",
    ("layers", "mlp", "gate", "bias"): _LAYER + "mlp.gate_proj.bias",
    ("layers", "mlp", "up", "kernel"): _LAYER + "mlp.up_proj.weight",
    ("layers", "mlp", "up", "bias"): _LAYER + "mlp.up_proj.bias",
    ("layers", "mlp", "down", "kernel"): _LAYER + "mlp.down_proj.weight",
    ("layers", "mlp", "down", "bias"): _LAYER + "mlp.down_proj.bias",
    ("final_norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}
# Gemma's norm "post_attention" follows the attention, others' stands before the feed-forward part.
_GEMMA_NAMES: Names = {
    **_NAMES,
    ("layers", "post_attention_norm", "scale"): _LAYER + "post_attention_layernorm.weight",
    ("layers", "mlp_norm", "scale"): _LAYER + "pre_feedforward_layernorm.weight",
    ("layers", "post_mlp_norm", "scale"): _LAYER + "post_feedforward_layernorm.weight",
}

# By their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_SIZES: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
_QWEN: dict[str, Any] = _SIZES | {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = _SIZES | {
    "hidden_activation": "gelu_pytorch_tanh",
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


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      model_type: its name in ``config.json``.
      architecture: the class of transformers that has its output projection.
      defaults: the keys of ``config.json`` that change the computation, with transformers'
        defaults; sizes without a default are required.
      fields: fields of ``DecoderConfig`` that all its models have in common.
      sliding: ``config.json``, with defaults, to one bool a layer: whether it has the window.
      names: the names of its weights.
      thetas: RoPE's base by type of layer, where ``config.json`` says none.
      only: keys of which one of these values alone is what a decoder here computes.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    fields: Mapping[str, Any]
    sliding: Callable[[Mapping[str, Any]], list[bool]] | None = None
    names: Names = dataclasses.field(default_factory=lambda: _NAMES)
    thetas: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {FULL: 10000.0, SLIDING: 10000.0}
    )
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def activation_key(self) -> str:
        """The key of ``config.json`` that says the activation."""
        return "hidden_act" if "hidden_act" in self.defaults else "hidden_activation"

    def read(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder that ``config.json`` describes, whose keys are known and complete."""
        heads = values["num_attention_heads"]
        head_dim = values["head_dim"]
        bias = bool(values.get("attention_bias", False))
        scalar = values.get("query_pre_attn_scalar")
        fields: dict[str, Any] = {
            "vocab_size": values["vocab_size"],
            "num_layers": values["num_hidden_layers"],
            "embed_dim": values["hidden_size"],
            "num_heads": heads,
            "num_kv_heads": values["num_key_value_heads"] or heads,
            "head_dim": values["hidden_size"] // heads if head_dim is None else head_dim,
            "mlp_dim": values["intermediate_size"],
            "layer_pattern": self._kinds(values),
            "norm_epsilon": float(values["rms_norm_eps"]),
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bool(values.get("mlp_bias", False)),
            "activation": _activation(self.activation_key, values[self.activation_key]),
            "attention_scale": None if scalar is None else scalar**-0.5,
            "logits_soft_cap": (
                values.get(cap) if (cap := "attn_logit_softcapping") in self.defaults else None
            ),
            "final_soft_cap": values.get("final_logit_softcapping"),
            "tie_embeddings": bool(values["tie_word_embeddings"]),
        }
        return DecoderConfig(**fields | dict(self.fields))

    def write(self, config: DecoderConfig, max_length: int) -> dict[str, Any]:
        """A ``config.json`` that :meth:`read` reads as ``config``, if this family can say it."""
        kinds = config.layer_kinds
        windows = [kind.window for kind in kinds if kind.window is not None]
        types = [FULL if kind.window is None else SLIDING for kind in kinds]
        ropes = dict(zip(types, config.layer_ropes, strict=True))
        scale = config.attention_scale
        activations = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "swish"}
        said = {
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_epsilon,
            "tie_word_embeddings": config.tie_embeddings,
            "max_position_embeddings": max_length,
            self.activation_key: activations[config.activation],
            "attention_bias": config.out_bias,
            "mlp_bias": config.mlp_bias,
            "use_sliding_window": bool(windows),
            "sliding_window": min(windows, default=None),
            "layer_types": types,
            "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": config.logits_soft_cap,
            "final_logit_softcapping": config.final_soft_cap,
            **ropes_json(ropes, apart="rope_local_base_freq" in self.defaults),
        }
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.embed_dim,
            "intermediate_size": config.mlp_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            **{key: value for key, value in said.items() if key in self.defaults},
        }

    def _kinds(self, values: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        ropes = ropes_of(values, self.thetas)
        count = values["num_hidden_layers"]
        sliding = [False] * count if self.sliding is None else self.sliding(values)
        types = values.get("layer_types")
        if types is not None:
            if len(types) != count or not set(types) <= {FULL, SLIDING}:
                raise ValueError(
                    f"config.json's layer_types is {types}: it needs {count} entries, each "
                    f"{FULL!r} or {SLIDING!r}"
                )
            sliding = [kind == SLIDING for kind in types]
        window = values.get("sliding_window")
        if any(sliding) and window is None:
            raise ValueError("config.json has sliding layers, and its sliding_window is null")
        if any(sliding) and not values.get("use_sliding_window", True):
            raise ValueError(
                "config.json has sliding layers in layer_types, and its use_sliding_window is "
                "false: make it true, or all layers full_attention"
            )
        return tuple(
            LayerKind(window, ropes[SLIDING]) if slides else LayerKind(None, ropes[FULL])
            for slides in sliding
        )


def _activation(key: str, name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise NotImplementedError(
            f"config.json's {key} is {name!r}: there are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _last_layers(values: Mapping[str, Any]) -> list[bool]:
    """Qwen: a window in the layers from ``max_window_layers`` on, if there is one."""
    used = values["use_sliding_window"] and values["sliding_window"] is not None
    first = values["max_window_layers"]
    return [bool(used) and layer >= first for layer in range(values["num_hidden_layers"])]


def _all_but_each(values: Mapping[str, Any], pattern: int) -> list[bool]:
    """Gemma: a window in all layers but each ``pattern``-th."""
    return [bool((layer + 1) % pattern) for layer in range(values["num_hidden_layers"])]


_ALL: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _SIZES
        | {
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {"qk_norm": False},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _SIZES
        | {"hidden_act": "silu", "max_position_embeddings": 131072, "sliding_window": 4096}
        | {"num_key_value_heads": 8},
        {"qk_norm": False},
        lambda values: [values["sliding_window"] is not None] * values["num_hidden_layers"],
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _QWEN | {"num_key_value_heads": 32},
        {"qk_norm": False, "qkv_bias": True, "out_bias": False},
        _last_layers,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _QWEN | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        {"qk_norm": True},
        _last_layers,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        _GEMMA_FIELDS,
        lambda values: _all_but_each(values, 2),
        _GEMMA_NAMES,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA
        | {
            # Models of text and images leave out what has transformers' default.
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": None,
            "_sliding_window_pattern": None,
            "rope_local_base_freq": 10000.0,
        },
        _GEMMA_FIELDS | {"qk_norm": True},
        lambda values: _all_but_each(values, values["sliding_window_pattern"] or 6),
        _GEMMA_NAMES,
        {FULL: 1_000_000.0, SLIDING: 10_000.0},
        # transformers has this key of Gemma 2 in the config, and does not compute it.
        {"attn_logit_softcapping": (None,)},
    ),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
