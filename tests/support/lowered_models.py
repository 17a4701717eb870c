"""Layers and training steps at training lengths, traced and lowered for GPUs that are not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import valid_calls as valid
from flax import linen, nnx
from jax.sharding import AbstractMesh, AxisType
from lowered_programs import BALANCED, LAYOUTS, TOKENS, ZONES, a_shape, abstract_mesh, for_gpu, pick

import burst_jax
from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, Experts, LayerKind, MixtureOfExperts
from burst_jax.models.lora import Lora
from burst_jax.training import abstract_train_state, make_optimizer, make_train_step

# The axes of layers have the names of their roles, those of training steps the names of the rules.
LAYER_MESHES: tuple[dict[str, int], ...] = (
    *({"seq": 1}, {"seq": 2}, {"ulysses": 2}, {"data": 2, "seq": 4}),
    *({"data": 2, "seq": 2, "ulysses": 2}, {"data": 2, "seq": 2, "tensor": 2}),
)
STEP_MESHES: tuple[dict[str, int], ...] = (
    *({"seq": 1}, {"seq": 2}, {"data": 2, "seq": 4}, {"fsdp": 2, "seq": 2, "tensor": 2}),
    {"data": 2, "seq": 2, "ulysses": 2},
)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"local_window_size": (4096, 0)}, "chunks": {"attention_chunk_size": 8192},
    "cap": {"logits_soft_cap": 30.0}, "deterministic": {"deterministic": True},
    "dropout": {"dropout_rate": 0.1},
}  # fmt: skip
LAYERS = ("BurstAttention", "LinenBurstAttention", "nnx_attention_fn", "linen_attention_fn")
FEATURES, HEADS = 512, (8, 2)


class Layer(NamedTuple):
    """The gradient of a layer's weights and input.

    Attributes:
      name: one of ``LAYERS``.
      gpu: "a100" or "h100".
      mesh: its axes are named by their roles.
      layout: the layout's name, or one of ``ZONES``.
      tokens: of a device.
      features: of ``OPTIONS``, "segments", and arguments of the call.
      head_dim: of the layers of this library.
    """

    name: str
    gpu: str
    mesh: AbstractMesh
    layout: str
    tokens: int
    features: frozenset[str]
    head_dim: int

    @property
    def levels(self) -> frozenset[str]:
        axes = "".join(f"{name}{size}" for name, size in self.mesh.shape.items())
        kind = self.mesh.axis_types[0].name
        names = self.name, self.gpu, self.layout, axes, kind, f"tokens{self.tokens}"
        return self.features | {*names, f"dim{self.head_dim}"}

    def __str__(self) -> str:
        return "-".join(sorted(self.levels))

    def check(self, *, lowers: bool = True) -> None:
        """Traces it, and lowers it; raises if JAX or the library does."""
        sizes, axes = self.mesh.shape, valid.axes_of(dict(self.mesh.shape))
        layout, length = placed(self.layout, self.tokens, dict(sizes))
        tokens = (*valid.names_of(axes["seq_axis"]), *valid.names_of(axes.get("ulysses_axis")))
        spec = axes.get("batch_axis"), tokens
        batch = sizes.get("data", 1)
        ints: Any = jnp.int32
        arrays = {"x": a_shape(self.mesh, (batch, length, FEATURES), jnp.bfloat16, *spec)}
        own = self.name.endswith("BurstAttention")
        if own:
            arrays["positions"] = a_shape(self.mesh, (batch, length), ints, *spec)
        if "segments" in self.features:
            arrays["segment_ids"] = a_shape(self.mesh, (batch, length), ints, *spec)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if name in self.features:
                arrays[name] = a_shape(self.mesh, (batch,), ints, spec[0])
        options = {"is_causal": True, "layout": layout, **axes}
        for name in self.features & OPTIONS.keys():
            options |= OPTIONS[name]
        make = _own_layer if own else _flax_layer
        layer, weights = make(self.name, options, self.head_dim)

        def run(weights: Any, arrays: dict[str, jax.Array]) -> Any:
            x = arrays["x"]
            out, vjp = jax.vjp(lambda w, x: layer(w, arrays | {"x": x}), weights, x)
            return vjp(out)

        weights = jax.tree.map(lambda w: a_shape(self.mesh, w.shape, w.dtype), weights)
        for_gpu(self.gpu, self.mesh, run, weights, arrays, lowers=lowers)


def placed(layout: str, tokens: int, sizes: dict[str, int]) -> tuple[str, int]:
    """A layout with its zone, and the length of sequences with these tokens on a device."""
    shard = tokens * sizes.get("ulysses", 1)
    name = f"balanced:{int(ZONES[layout] * shard)}" if layout in ZONES else layout
    return name, shard * sizes.get("seq", 1)


Applied = tuple[Callable[[Any, dict[str, Any]], jax.Array], Any]


def _own_layer(name: str, options: dict[str, Any], head_dim: int) -> Applied:
    """``(weights, arrays) -> out`` of a layer of this library, and the shapes of its weights."""
    sizes = {"num_kv_heads": HEADS[1], "head_dim": head_dim, "sinks": True, "dtype": jnp.bfloat16}
    layer = nnx.eval_shape(
        lambda: burst_jax.BurstAttention(
            FEATURES, HEADS[0], rngs=nnx.Rngs(0), **sizes, **options
        )
    )  # fmt: skip
    graphdef, weights = nnx.split(layer)
    has_dropout = "dropout_rate" in options
    if name == "BurstAttention":

        def apply(weights: Any, arrays: dict[str, Any]) -> jax.Array:
            rngs = nnx.Rngs(dropout=0) if has_dropout else None
            return nnx.merge(graphdef, weights)(**arrays, rngs=rngs)

        return apply, weights
    of_linen = burst_jax.LinenBurstAttention(num_heads=HEADS[0], **sizes, **options)

    def apply_linen(weights: Any, arrays: dict[str, Any]) -> Any:
        rngs = {"dropout": jax.random.key(0)} if has_dropout else {}
        return of_linen.apply({"params": weights}, **arrays, rngs=rngs)

    return apply_linen, nnx.to_pure_dict(weights)


def _flax_layer(name: str, options: dict[str, Any], head_dim: int) -> Applied:
    """The same of one of Flax's layers, whose ``attention_fn`` has the batch's segment ids."""
    options = {name: x for name, x in options.items() if name != "dropout_rate"}
    sizes = {"num_heads": HEADS[0], "qkv_features": HEADS[0] * head_dim, "dtype": jnp.bfloat16}

    def masks(arrays: dict[str, Any]) -> dict[str, Any]:
        given = {name: x for name, x in arrays.items() if name not in ("x", "segment_ids")}
        ids = arrays.get("segment_ids")
        both = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        return options | given | (both if ids is not None else {})

    if name == "nnx_attention_fn":
        layer = nnx.eval_shape(
            lambda: nnx.MultiHeadAttention(
                in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **sizes
            )
        )
        graphdef, weights = nnx.split(layer)

        def apply(weights: Any, arrays: dict[str, Any]) -> jax.Array:
            layer = nnx.merge(graphdef, weights)
            layer.attention_fn = burst_jax.nnx_attention_fn(**masks(arrays))
            return layer(arrays["x"])

        return apply, weights

    def of_linen(**arguments: Any) -> Any:
        return linen.MultiHeadDotProductAttention(**sizes, **arguments)

    few = jax.ShapeDtypeStruct((1, 8, FEATURES), jnp.bfloat16)
    weights = jax.eval_shape(of_linen().init, jax.random.key(0), few)["params"]

    def apply_linen(weights: Any, arrays: dict[str, Any]) -> Any:
        attend = burst_jax.linen_attention_fn(**masks(arrays))
        return of_linen(attention_fn=attend).apply({"params": weights}, arrays["x"])

    return apply_linen, weights


def a_layer(rng: np.random.Generator) -> Layer:
    """A layer with some of the arguments that it supports."""
    name, gpu = pick(rng, LAYERS), pick(rng, ("a100", "h100"))
    own = name.endswith("BurstAttention")
    # Flax's layers pass no positions, which balanced layouts need.
    layout = pick(rng, (*LAYOUTS, *ZONES) if own else LAYOUTS)
    features = {"segments"} if layout in ZONES or rng.random() < 0.6 else set[str]()
    for each in rng.permutation([*OPTIONS, "query_seq_lengths", "key_value_seq_lengths"])[:2]:
        if layout not in ZONES or each in BALANCED:
            features.add(str(each))
    if {"deterministic", "dropout"} <= features or not own:
        # Of the layers deterministic means that nothing is dropped.
        features -= {"dropout"}
    kind = pick(rng, (AxisType.Auto, AxisType.Explicit))
    mesh = abstract_mesh(gpu, pick(rng, LAYER_MESHES), kind)
    return Layer(
        name, gpu, mesh, layout, pick(rng, TOKENS), frozenset(features), pick(rng, (64, 128))
    )


# Fields of a decoder's config.
VARIANTS: dict[str, dict[str, Any]] = {
    "windows": {"layer_pattern": (LayerKind(4096), LayerKind())},
    "cap": {"logits_soft_cap": 50.0}, "sinks": {"attention_sinks": True},
    "lora": {"lora": Lora(rank=8, alpha=16.0)},
    "experts": {"feed_forward": MixtureOfExperts, "experts": Experts(4, 2)},
    **{f"remat_{name}": {"remat": name} for name in ("none", "selective", "half", "full")},
}  # fmt: skip


class Step(NamedTuple):
    """A training step: loss, gradients, optimizer.

    Attributes:
      gpu: "a100" or "h100".
      mesh: its axes have the names of the rules' fields; "ulysses" is that axis.
      layout: the layout's name, or one of ``ZONES``.
      tokens: of a device.
      head_dim: of the attention.
      features: of ``VARIANTS``, "packed", "prefixes", "accumulate", "deterministic", "max_logits".
    """

    gpu: str
    mesh: AbstractMesh
    layout: str
    tokens: int
    head_dim: int
    features: frozenset[str]

    @property
    def levels(self) -> frozenset[str]:
        axes = "".join(f"{name}{size}" for name, size in self.mesh.shape.items())
        names = self.gpu, self.layout, axes, f"tokens{self.tokens}", f"dim{self.head_dim}"
        return self.features | {*names, self.mesh.axis_types[0].name}

    def __str__(self) -> str:
        return "-".join(sorted(self.levels))

    def check(self, *, lowers: bool = True) -> None:
        """Traces it, and lowers it; raises if JAX or the library does."""
        sizes = dict(self.mesh.shape)
        config = DecoderConfig(
            vocab_size=512, num_layers=2, embed_dim=256, num_heads=8, num_kv_heads=2,
            head_dim=self.head_dim, mlp_dim=512, dtype=jnp.bfloat16,
        )  # fmt: skip
        for name in sorted(self.features & VARIANTS.keys()):
            config = dataclasses.replace(config, **VARIANTS[name])
        fields = [field.name for field in dataclasses.fields(ShardingRules)]
        rules = ShardingRules(**{name: name if name in sizes else None for name in fields})
        layout, length = placed(self.layout, self.tokens, sizes)
        options: dict[str, Any] = {"layout": layout}
        options |= {"ulysses_axis": "ulysses"} if "ulysses" in sizes else {}
        options |= {"deterministic": True} if "deterministic" in self.features else {}
        optimizer, accumulate = make_optimizer(1e-3, 10), 2 if "accumulate" in self.features else 1
        graphdef, params, state = abstract_train_state(
            config, optimizer, self.mesh, rules=rules, **options
        )
        rows = rules.batch_axes or None
        batch_size = accumulate * sizes.get("data", 1) * sizes.get("fsdp", 1)
        dtypes = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), jnp.int32)
        tokens = ("seq", "ulysses") if "ulysses" in sizes else "seq"
        batch: Any = {
            name: a_shape(self.mesh, (batch_size, length), dtype, rows, tokens)
            for name, dtype in (dtypes | {"weights": jnp.float32}).items()
        }
        if "packed" not in self.features:
            batch["segment_ids"] = None
        if "prefixes" in self.features:
            batch["prefix_lengths"] = a_shape(self.mesh, (batch_size,), jnp.int32, rows)
        step = make_train_step(
            graphdef, optimizer, accumulate=accumulate, max_logits="max_logits" in self.features
        )
        for_gpu(self.gpu, self.mesh, step, params, state, batch, lowers=lowers)


def a_step(rng: np.random.Generator) -> Step:
    """A training step of a small decoder."""
    gpu, layout = pick(rng, ("a100", "h100")), pick(rng, (*LAYOUTS, *ZONES))
    features = {"packed"} if layout in ZONES or rng.random() < 0.7 else set[str]()
    others = [*VARIANTS, "prefixes", "accumulate", "deterministic", "max_logits"]
    for name in map(str, rng.permutation(others)[:4]):
        is_remat = name.startswith("remat_")
        if is_remat and any(each.startswith("remat_") for each in features):
            continue
        # Half of the attention is recomputed only if the other half does not attend to it.
        if name == "prefixes" and "remat_half" in features:
            continue
        if name == "remat_half" and ("prefixes" in features or layout == "contiguous"):
            continue
        if layout not in ZONES or name not in ("prefixes", "remat_half"):
            features.add(name)
    # Adapters of experts: of models without experts.
    features -= {"experts"} if "lora" in features else set()
    mesh = abstract_mesh(gpu, pick(rng, STEP_MESHES), pick(rng, (AxisType.Auto, AxisType.Explicit)))
    tokens, head_dim = pick(rng, TOKENS), pick(rng, (64, 128))
    return Step(gpu, mesh, layout, tokens, head_dim, frozenset(features))
