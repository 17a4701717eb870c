"""``Family``: how a model family's ``config.json`` and tensor names map to a decoder.

A ``config.json`` may omit keys that have transformers' defaults, so a family has the default of
each key that changes the computation. Unknown keys are rejected, because they might change it, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from burst_jax.errors import shown
from burst_jax.models.config import Activation, DecoderConfig, LayerKind, Norms
from burst_jax.models.delta_net import DeltaNet
from burst_jax.models.experts import Experts, MixtureOfExperts
from burst_jax.models.hf.ropes import FULL, LINEAR, SLIDING, RopeForms, read_ropes, write_ropes
from burst_jax.models.hf.views import OtherForm


class Fused(NamedTuple):
    """A tensor of several weights' outputs, or of all experts of a layer.

    The outputs of the weights follow each other in the order of the family's names, once in each of
    ``groups`` groups: with two weights and two groups ``a0 a1 b0 a2 a3 b1``.

    Attributes:
      name: its name.
      groups: number of groups, from the decoder's config.
      outputs_last: whether it is ``[inputs, outputs]``, rather than ``[outputs, inputs]``.
      experts: whether it has a first dimension for the experts of a layer.
    """

    name: str
    groups: Callable[[DecoderConfig], int] = lambda config: 1
    outputs_last: bool = False
    experts: bool = False


class Shaped(NamedTuple):
    """A tensor that is stored flattened, with dimensions of size 1 around it.

    Attributes:
      name: its name.
      before: number of dimensions of size 1 before that of the elements.
      after: number of those after it.
    """

    name: str
    before: int
    after: int


# A weight's path in nnx.state(decoder), and its tensor's name; {layer} is the layer's index, and
# {expert} the expert's where each has a tensor.
Names = Mapping[tuple[str, ...], str | Fused | Shaped]
# A field of a dataclass, or several with the same value, that a key sets.
Fields = str | tuple[str, ...]

# The types of feed-forwards, in mlp_layer_types.
DENSE, SPARSE = "dense", "sparse"
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
      types: ``config.json``, with defaults, to the type of each layer, where it has no
        ``layer_types``; None is full attention in all.
      names: names of the tensors.
      thetas: RoPE's base by type of layer where ``config.json`` has none.
      only: keys with the values that a decoder here supports.
      keys: fields of ``DecoderConfig`` that are the value of a key of this family.
      ignored: keys that do not change the computation.
      experts: fields of :class:`burst_jax.models.Experts` that are the value of a key; of two keys
        of one field, the last one that is not null. Empty without experts.
      expert_fields: other fields of it, with the same value in all models.
      linear: fields of ``linear_type`` that are the value of a key. Empty without layers of linear
        attention.
      linear_fields: other fields of it, with the same value in all models.
      linear_type: the sizes of these layers, a :class:`burst_jax.models.DeltaNet`.
      norms: norms of the layers with softmax attention (:class:`burst_jax.models.LayerKind`).
      ropes: what its RoPE may be.
      derive: ``config.json``, with defaults, to the values of keys that are null there.
      adjust: ``config.json`` and the fields of ``DecoderConfig`` that were read from it, to fields
        that replace some of these or are added.
      finish: the keys of a ``config.json`` and the decoder's config, to the keys that are written.
      length_key: the key of the largest number of positions.
      tensor_name: a stored name to a tensor's name, or None to skip the tensor.
      module_name: a projection's name in the files to its name in transformers, for adapters.
      other_forms: other forms of its tensors that files may have.
      quantization: ``quant_method`` of quantized tensors that loading dequantizes, or None.
      multimodal: the model of text and images with this family's language models.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    fields: Mapping[str, Any]
    types: Callable[[Mapping[str, Any]], list[str]] | None = None
    names: Names = dataclasses.field(default_factory=lambda: NAMES)
    thetas: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {FULL: 10000.0, SLIDING: 10000.0}
    )
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Collection[str] = ()
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    linear: Mapping[str, Fields] = dataclasses.field(default_factory=dict)
    linear_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    linear_type: type[DeltaNet] = DeltaNet
    norms: Norms | None = None
    ropes: RopeForms = dataclasses.field(default_factory=RopeForms)
    derive: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}
    adjust: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = (
        lambda values, fields: {}
    )
    finish: Callable[[dict[str, Any], DecoderConfig], dict[str, Any]] = lambda written, config: (
        written
    )
    length_key: str = "max_position_embeddings"
    tensor_name: Callable[[str], str | None] = str
    module_name: Callable[[str], str] = str
    other_forms: tuple[OtherForm, ...] = ()
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
        missing = [key for key, value in values.items() if value is None]
        derived = self.derive(values)
        values = {**values, **{key: derived[key] for key in missing if key in derived}}
        heads, head_dim = values["num_attention_heads"], values.get("head_dim")
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
            needed = "count", "per_token"
            fields["experts"] = _made(Experts, values, self.experts, self.expert_fields, needed)
            fields["feed_forward"] = MixtureOfExperts
        if any(kind.mixer == "delta_net" for kind in fields["layer_pattern"]):
            needed = [field for given in self.linear.values() for field in _each(given)]
            of_linear = values, self.linear, self.linear_fields, needed
            fields["delta_net"] = _made(self.linear_type, *of_linear)
        return DecoderConfig(**fields | dict(self.fields) | self.adjust(values, fields))

    def write(self, config: DecoderConfig, max_length: int) -> dict[str, Any]:
        """A ``config.json`` that :meth:`read` reads as ``config``, if the family can express it."""
        kinds = config.layer_kinds
        windows = [kind.window for kind in kinds if kind.window is not None]
        types = [_type(kind) for kind in kinds]
        ropes = {_type(kind): kind.rope for kind in kinds if kind.rope is not None}
        if "delta_net" in config.mixers and (not ropes or not self.linear):
            raise NotImplementedError(
                f"{self.model_type} cannot express layers with mixers {', '.join(config.mixers)}"
            )
        scale = config.attention_scale
        activations = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "swish"}
        written = {key: getattr(config, field) for key, field in self._field_keys.items()}
        written |= {
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            self.length_key: max_length,
            self._activation_key: activations[config.activation],
            "attention_bias": config.out_bias,
            "use_sliding_window": bool(windows),
            "sliding_window": min(windows, default=None),
            "layer_types": types,
            "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
            **write_ropes(ropes, self.ropes, per_type="rope_local_base_freq" in self.defaults),
        }
        if bool(self.experts) != (config.experts is not None):
            raise NotImplementedError(f"{self.model_type} cannot express experts={config.experts}")
        written |= {key: getattr(config.experts, field) for key, field in self.experts.items()}
        if config.delta_net is not None:
            of_linear = ((key, _each(given)[0]) for key, given in self.linear.items())
            written |= {key: getattr(config.delta_net, field) for key, field in of_linear}
        written = {key: value for key, value in written.items() if key in self.known}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.finish(written, config),
        }

    @property
    def _field_keys(self) -> dict[str, str]:
        keys = {**REQUIRED, **_FIELDS, **self.keys}
        return {key: field for key, field in keys.items() if key in self.known}

    @property
    def _activation_key(self) -> str:
        return "hidden_act" if "hidden_act" in self.defaults else "hidden_activation"

    def _kinds(self, values: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        ropes = read_ropes(values, self.thetas, self.ropes)
        count = values["num_hidden_layers"]
        types = values.get("layer_types")
        known = (FULL, LINEAR if self.linear else SLIDING)
        if types is None:
            types = [FULL] * count if self.types is None else self.types(values)
        elif len(types) != count or not all(kind in known for kind in types):
            raise ValueError(
                f"config.json's layer_types is {shown(types)}: it needs {count} entries, each "
                f"{known[0]!r} or {known[1]!r}"
            )
        if FULL not in types and LINEAR in types:
            raise NotImplementedError(
                f"config.json has {count} layers, all {LINEAR!r}: at least one must be {FULL!r}"
            )
        window = values.get("sliding_window")
        if SLIDING in types and window is None:
            raise ValueError("config.json has sliding layers, and its sliding_window is null")
        if SLIDING in types and not values.get("use_sliding_window", True):
            raise ValueError(
                "config.json has sliding layers in layer_types, and its use_sliding_window is "
                "false: make it true, or all layers full_attention"
            )
        kinds = {
            FULL: LayerKind(None, ropes[FULL], norms=self.norms),
            SLIDING: LayerKind(window, ropes[SLIDING], norms=self.norms),
            LINEAR: LayerKind(mixer="delta_net"),
        }
        dense = [False] * count
        if (of_mlp := values.get("mlp_layer_types")) is not None:
            if len(of_mlp) != count or not {*of_mlp} <= {DENSE, SPARSE}:
                raise ValueError(
                    f"config.json's mlp_layer_types is {shown(of_mlp)}: it needs {count} entries, "
                    f"each {DENSE!r} or {SPARSE!r}"
                )
            dense = [kind == DENSE for kind in of_mlp]
        return tuple(
            dataclasses.replace(kinds[kind], dense=is_dense)
            for kind, is_dense in zip(types, dense, strict=True)
        )


def _made[Sizes](
    make: type[Sizes],
    values: Mapping[str, Any],
    keys: Mapping[str, Fields],
    others: Mapping[str, Any],
    needed: Collection[str],
) -> Sizes:
    """Sizes whose fields are the values of keys, of two keys the last one that is not null.

    Args:
      make: the class.
      values: ``config.json``, with defaults.
      keys: the fields by key.
      others: further fields.
      needed: fields that must not be null.

    Raises:
      ValueError: they do not fit together, or one is missing; with the keys, not the fields.
    """
    given = {
        field: values[key]
        for key, fields in keys.items()
        for field in _each(fields)
        if values[key] is not None
    }
    of_keys = ", ".join(f"{key} {shown(values[key])}" for key in keys)
    for field in needed:
        if field in given or field in others:
            continue
        names = [key for key, of in keys.items() if field in _each(of)]
        raise ValueError(f"config.json has {' or '.join(names)} null: it must be a number")
    try:
        return make(**given | dict(others))
    except ValueError as error:
        raise ValueError(f"config.json has {of_keys}: {error}") from None


def _each(fields: Fields) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else fields


def _type(kind: LayerKind) -> str:
    """The type of a layer in ``config.json``."""
    if kind.mixer == "delta_net":
        return LINEAR
    return FULL if kind.window is None else SLIDING


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
