"""``Family``: how a model family's ``config.json`` and tensor names map to a decoder.

A ``config.json`` may omit keys that have transformers' defaults, so a family has the default of
each key that changes the computation. Unknown keys are rejected, because they might change it, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from burst_jax.errors import shown
from burst_jax.models.config import Activation, DecoderConfig, LayerKind
from burst_jax.models.experts import Experts, MixtureOfExperts
from burst_jax.models.hf.ropes import FULL, SLIDING, read_ropes, write_ropes


class Fused(NamedTuple):
    """A tensor of all experts of a layer that may be several weights, ``[E, ..., parts outputs]``.

    Attributes:
      name: its name.
      part: index of the weight in it.
      parts: number of weights in it; output i of the weight is the tensor's ``parts i + part``.
    """

    name: str
    part: int = 0
    parts: int = 1


# A weight's path in nnx.state(decoder), and its tensor's name; {layer} is the layer's index, and
# {expert} the expert's where each has a tensor.
Names = Mapping[tuple[str, ...], str | Fused]

# By their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Fields of DecoderConfig that a config.json must have, by its keys.
REQUIRED: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# Other fields that are a key's value. A family has those among its defaults.
_FIELDS: Mapping[str, str] = {
    "rms_norm_eps": "norm_epsilon",
    "mlp_bias": "mlp_bias",
    "attn_logit_softcapping": "logits_soft_cap",
    "final_logit_softcapping": "final_soft_cap",
    "tie_word_embeddings": "tie_embeddings",
}


class Multimodal(NamedTuple):
    """A model of text and images whose language model is a decoder of a family.

    Attributes:
      model_type: its name in ``config.json``.
      keys: keys of its ``config.json``, which has the language model's in ``text_config``.
      tensor_name: a tensor's name to that of the language model's tensor, or None for others.
    """

    model_type: str
    keys: Collection[str]
    tensor_name: Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      model_type: its name in ``config.json``.
      architecture: transformers' class with the output projection.
      defaults: the keys of ``config.json`` that change the computation, with transformers'
        defaults; keys in ``REQUIRED`` need none.
      fields: fields of ``DecoderConfig`` with the same value in all models.
      keys: fields of ``DecoderConfig`` that are the value of a key of this family.
      sliding: ``config.json``, with defaults, to one bool per layer: whether it has the window.
      names: names of the tensors.
      thetas: RoPE's base by type of layer where ``config.json`` has none.
      only: keys with the values that a decoder here supports.
      ignored: keys that do not change the computation.
      experts: fields of :class:`burst_jax.models.Experts` that are the value of a key; of two keys
        of one field, the last one that is not null. Empty without experts.
      expert_fields: other fields of it, with the same value in all models.
      quantization: ``quant_method`` of quantized tensors that loading dequantizes, or None.
      multimodal: the model of text and images with this family's language models.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    fields: Mapping[str, Any]
    sliding: Callable[[Mapping[str, Any]], list[bool]] | None = None
    names: Names = dataclasses.field(default_factory=lambda: NAMES)
    thetas: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {FULL: 10000.0, SLIDING: 10000.0}
    )
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Collection[str] = ()
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: str | None = None
    multimodal: Multimodal | None = None

    @property
    def known(self) -> set[str]:
        """The keys that change the computation."""
        return {*self.defaults, *REQUIRED}

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A ``config.json`` with the defaults of the keys that it lacks."""
        defaults = dict(self.defaults)
        if given.get("rope_scaling") is not None:
            # A default is not another format of what is given.
            defaults["rope_parameters"] = None
        return {**defaults, **given}

    def read(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a ``config.json``, whose keys are known and complete."""
        heads, head_dim = values["num_attention_heads"], values["head_dim"]
        fields = {field: values[key] for key, field in self._field_keys.items()}
        fields |= {
            "num_kv_heads": values["num_key_value_heads"] or heads,
            "head_dim": values["hidden_size"] // heads if head_dim is None else head_dim,
            "layer_pattern": self._kinds(values),
            "norm_epsilon": float(values["rms_norm_eps"]),
            "tie_embeddings": bool(values["tie_word_embeddings"]),
        }
        activation = values[self._activation_key]
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise NotImplementedError(
                f"config.json's {self._activation_key} is {shown(activation)}: supported are "
                f"{', '.join(ACTIVATIONS)}"
            )
        fields["activation"] = ACTIVATIONS[activation]
        if "attention_bias" in self.defaults:
            fields |= dict.fromkeys(("qkv_bias", "out_bias"), bool(values["attention_bias"]))
        if "query_pre_attn_scalar" in self.defaults:
            scalar = values["query_pre_attn_scalar"]
            fields["attention_scale"] = None if scalar is None else scalar**-0.5
        if self.experts:
            given = ((field, values[key]) for key, field in self.experts.items())
            numbers = {field: value for field, value in given if value is not None}
            fields["experts"] = Experts(**numbers | dict(self.expert_fields))
            fields["feed_forward"] = MixtureOfExperts
        return DecoderConfig(**fields | dict(self.fields))

    def write(self, config: DecoderConfig, max_length: int) -> dict[str, Any]:
        """A ``config.json`` that :meth:`read` reads as ``config``, if the family can express it."""
        kinds = config.layer_kinds
        windows = [kind.window for kind in kinds if kind.window is not None]
        types = [FULL if kind.window is None else SLIDING for kind in kinds]
        ropes = dict(zip(types, config.layer_ropes, strict=True))
        scale = config.attention_scale
        activations = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "swish"}
        written = {key: getattr(config, field) for key, field in self._field_keys.items()}
        written |= {
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": max_length,
            self._activation_key: activations[config.activation],
            "attention_bias": config.out_bias,
            "use_sliding_window": bool(windows),
            "sliding_window": min(windows, default=None),
            "layer_types": types,
            "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
            **write_ropes(ropes, per_type="rope_local_base_freq" in self.defaults),
        }
        if bool(self.experts) != (config.experts is not None):
            raise NotImplementedError(f"{self.model_type} cannot express experts={config.experts}")
        written |= {key: getattr(config.experts, field) for key, field in self.experts.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: value for key, value in written.items() if key in self.known},
        }

    @property
    def _field_keys(self) -> dict[str, str]:
        keys = {**REQUIRED, **_FIELDS, **self.keys}
        return {key: field for key, field in keys.items() if key in self.known}

    @property
    def _activation_key(self) -> str:
        return "hidden_act" if "hidden_act" in self.defaults else "hidden_activation"

    def _kinds(self, values: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        ropes = read_ropes(values, self.thetas)
        count = values["num_hidden_layers"]
        sliding = [False] * count if self.sliding is None else self.sliding(values)
        types = values.get("layer_types")
        if types is not None:
            if len(types) != count or not all(kind in (FULL, SLIDING) for kind in types):
                raise ValueError(
                    f"config.json's layer_types is {shown(types)}: it needs {count} entries, each "
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


LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = ("layers", "attention"), ("layers", "mlp")
# Most families' tensors.
NAMES: Names = {
    ("embedding",): "model.embed_tokens.weight",
    ("layers", "attention_norm", "scale"): LAYER + "input_layernorm.weight",
    (*_ATTENTION, "query", "kernel"): LAYER + "self_attn.q_proj.weight",
    (*_ATTENTION, "query", "bias"): LAYER + "self_attn.q_proj.bias",
    (*_ATTENTION, "key", "kernel"): LAYER + "self_attn.k_proj.weight",
    (*_ATTENTION, "key", "bias"): LAYER + "self_attn.k_proj.bias",
    (*_ATTENTION, "value", "kernel"): LAYER + "self_attn.v_proj.weight",
    (*_ATTENTION, "value", "bias"): LAYER + "self_attn.v_proj.bias",
    (*_ATTENTION, "query_norm", "scale"): LAYER + "self_attn.q_norm.weight",
    (*_ATTENTION, "key_norm", "scale"): LAYER + "self_attn.k_norm.weight",
    (*_ATTENTION, "out", "kernel"): LAYER + "self_attn.o_proj.weight",
    (*_ATTENTION, "out", "bias"): LAYER + "self_attn.o_proj.bias",
    ("layers", "mlp_norm", "scale"): LAYER + "post_attention_layernorm.weight",
    (*_MLP, "gate", "kernel"): LAYER + "mlp.gate_proj.weight",
    (*_MLP, "gate", "bias"): LAYER + "mlp.gate_proj.bias",
    (*_MLP, "up", "kernel"): LAYER + "mlp.up_proj.weight",
    (*_MLP, "up", "bias"): LAYER + "mlp.up_proj.bias",
    (*_MLP, "down", "kernel"): LAYER + "mlp.down_proj.weight",
    (*_MLP, "down", "bias"): LAYER + "mlp.down_proj.bias",
    ("final_norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}
