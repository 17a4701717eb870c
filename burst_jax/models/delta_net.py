"""``DeltaNet``, ``KimiDelta``: sizes of a decoder's linear-attention layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from burst_jax.errors import check_bool, check_positive, shown
from burst_jax.layers.gated_delta_net import GatedDeltaNet, check_sizes
from burst_jax.layers.kimi_delta_attention import KimiDeltaAttention
from burst_jax.parallel.rules import LogicalAxes

# The decoder's options that a layer accepts.
OPTIONS = (
    "mesh",
    "seq_axis",
    "batch_axis",
    "tensor_axis",
    "layout",
    "padding_id",
    "implementation",
)
# Fields of DecoderConfig that softmax attention alone reads.
OF_ATTENTION = (
    "num_heads", "num_kv_heads", "head_dim", "rope_theta", "logits_soft_cap", "qk_norm", "rope",
    "qkv_bias", "out_bias", "attention_scale", "attention_sinks", "attention_gate",
)  # fmt: skip
# Logical axes by a weight's path in the layer.
_WEIGHT_AXES: dict[tuple[str, ...], LogicalAxes] = {
    **{(name, "kernel"): ("embed", "heads", None) for name in ("query", "key", "value")},
    ("output_gate", "kernel"): ("embed", "heads", None),
    ("beta", "kernel"): ("embed", "heads"),
    ("decay", "kernel"): ("embed", "heads"),
    ("out", "kernel"): ("heads", None, "embed"),
    **{(f"{name}_conv",): (None, "heads", None) for name in ("query", "key", "value")},
    ("A_log",): ("heads",),
    ("dt_bias",): ("heads",),
    ("norm", "scale"): (None,),
}
_KIMI_WEIGHT_AXES: dict[tuple[str, ...], LogicalAxes] = _WEIGHT_AXES | {
    ("dt_bias",): ("heads", None),
    **{(f"{gate}_a", "kernel"): ("embed", None) for gate in ("output_gate", "decay")},
    **{(f"{gate}_b", "kernel"): (None, "heads", None) for gate in ("output_gate", "decay")},
}


# A default that is not an int, of a field that always is one.
_HEAD_DIM: Any = None


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Sizes of a decoder's Gated DeltaNet layers (:class:`burst_jax.GatedDeltaNet`).

    Attributes:
      num_heads: number of value heads, N.
      num_key_heads: number of query and key heads, K, a divisor of N.
      head_dim: number of features of a query and key head, H.
      value_head_dim: number of features of a value head, Hv; None becomes H.
      conv_taps: number of taps of the convolutions.
      norm_epsilon: epsilon of the output's norm; None is the decoder's.
      negative_eigenvalues: whether beta is twice the sigmoid.

    Raises:
      ValueError: a size below 1, or sizes that do not fit together; an epsilon that is not
        positive; a negative_eigenvalues that is no bool.
    """

    # The layer's name and class, and the logical axes of its weights by their paths.
    title: ClassVar[str] = "Gated DeltaNet"
    layer: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    weight_axes: ClassVar[dict[tuple[str, ...], LogicalAxes]] = _WEIGHT_AXES

    num_heads: int = 4
    num_key_heads: int = 2
    head_dim: int = 64
    value_head_dim: int = _HEAD_DIM
    conv_taps: int = 4
    norm_epsilon: float | None = None
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        if self.value_head_dim is _HEAD_DIM:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        check_sizes(
            self.num_heads, self.num_key_heads, self.head_dim, self.value_head_dim, self.conv_taps
        )
        if self.norm_epsilon is not None:
            check_positive("norm_epsilon", self.norm_epsilon, also=", or None")
        check_bool("negative_eigenvalues", self.negative_eigenvalues)

    def projections(self, embed_dim: int) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections by name."""
        keys, values = self.num_key_heads * self.head_dim, self.num_heads * self.value_head_dim
        sizes = {"query": keys, "key": keys, "value": values, "beta": self.num_heads}
        found = {name: (embed_dim, size) for name, size in sizes.items()}
        return found | self.gates(embed_dim) | {"out": (values, embed_dim)}

    def gates(self, embed_dim: int) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections of output gate and decay."""
        values = self.num_heads * self.value_head_dim
        return {"output_gate": (embed_dim, values), "decay": (embed_dim, self.num_heads)}

    @property
    def train_flops_per_token(self) -> float:
        """Floating point operations of the recurrence, per token of a forward and backward pass.

        Three products of ``2 N H Hv`` (the state with a key, the update, the state with a query),
        and twice that backward.
        """
        return 18.0 * self.num_heads * self.head_dim * self.value_head_dim


@dataclasses.dataclass(frozen=True)
class KimiDelta(DeltaNet):
    """Sizes of a decoder's Kimi Delta Attention layers (:class:`burst_jax.KimiDeltaAttention`).

    ``DecoderConfig(delta_net=KimiDelta(...))``: attributes and errors are those of
    :class:`burst_jax.models.DeltaNet`.
    """

    title: ClassVar[str] = "Kimi Delta Attention"
    layer: ClassVar[type[GatedDeltaNet]] = KimiDeltaAttention
    weight_axes: ClassVar[dict[tuple[str, ...], LogicalAxes]] = _KIMI_WEIGHT_AXES

    num_key_heads: int = 4

    def gates(self, embed_dim: int) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections of output gate and decay."""
        rank = self.value_head_dim
        sizes = {"output_gate": rank, "decay": self.head_dim}
        inner = {f"{name}_a": (embed_dim, rank) for name in sizes}
        outer = {f"{name}_b": (rank, self.num_heads * size) for name, size in sizes.items()}
        return inner | outer


def check_config(config: Any) -> None:
    """Raises for fields of a ``DecoderConfig`` that do not fit its linear-attention layers.

    Raises:
      ValueError: layers without sizes, or sizes without layers; without softmax attention, one of
        its fields that is not the default.
      NotImplementedError: half-sequence remat.
    """
    if config.delta_net is not None and not isinstance(config.delta_net, DeltaNet):
        raise ValueError(
            f"delta_net is {shown(config.delta_net)}: use a DeltaNet, a KimiDelta, or None"
        )
    has_layers = "delta_net" in config.mixers
    if has_layers and config.delta_net is None:
        raise ValueError(
            "delta_net is None, and layer_pattern has layers with mixer 'delta_net': pass their "
            "sizes, delta_net=DeltaNet(...) or KimiDelta(...)"
        )
    if config.delta_net is not None and not has_layers:
        raise ValueError(
            f"delta_net is {config.delta_net}, and none of the {config.num_layers} layers of "
            f"layer_pattern has mixer 'delta_net': add LayerKind(mixer='delta_net'), or leave one "
            "of the two out"
        )
    if not has_layers:
        return
    if config.remat == "half":
        raise NotImplementedError(
            "remat is 'half', which recomputes softmax attention, and delta_net is given: use "
            "another remat"
        )
    if "attention" in config.mixers:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in OF_ATTENTION:
        if (value := getattr(config, name)) != defaults[name]:
            raise ValueError(
                f"{name} is {shown(value)}, and delta_net is given: its layers have no softmax "
                f"attention, which {name} is of; leave it out (delta_net has its own sizes)"
            )


def check_options(config: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError for options of a decoder that its linear-attention layers would ignore.

    Those of softmax attention are for its layers alone, but for ``ulysses_axis``: it shards the
    tokens of all layers.
    """
    if "delta_net" not in config.mixers:
        return
    hybrid = "attention" in config.mixers
    ignored = {"ulysses_axis"} if hybrid else set(options).difference(OPTIONS)
    for name, value in options.items():
        if name in ignored and value is not None:
            which = "some of the decoder's layers" if hybrid else "the decoder's layers"
            raise TypeError(
                f"{name} is given, and {which} have linear attention (delta_net), which accepts "
                f"{', '.join(OPTIONS)}: leave it out"
            )
