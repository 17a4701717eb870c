"""A decoder's weights and layers as serving runs them, inside a ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.flax.rope import RopeTable, rope_table
from burst_jax.flax.rope_variants import DynamicRope, Rope
from burst_jax.models.decoder import Decoder
from burst_jax.models.parts import Parts, embed
from burst_jax.sharding import axes_size, mesh_with_devices, only

# Attention options that say how a prompt is computed, not what; and the scale, which decoding
# takes, too.
_TAKEN = (
    "mesh", "seq_axis", "batch_axis", "head_axis", "head_parallel_axis", "layout", "scale",
    "implementation", "backward", "deterministic", "dropout_rate",
)  # fmt: skip

# (index of the layer, query, key, value, the layer's options) -> out.
Attend = Callable[..., jax.Array]


class ServedModel:
    """A decoder whose layers are arrays of their own, whole but for the tensor axes.

    A step of decoding reads all weights once. From a stack of all layers' weights each step would
    copy every layer's first, and weights that are split over the sequence axes would travel.

    Attributes:
      config: of the decoder.
      parts: how the decoder's arrays are split.
      weights: the arrays: "embedding", "final_norm", "head" and, for each layer, "layers".
      specs: how each of them is split.
      scale: the attention option of the decoder.
    """

    def __init__(self, model: Decoder) -> None:
        if model.config.lora is not None:
            raise ValueError(
                "the model has adapters that are not merged: burst_jax.models.merge_lora(model) "
                "merges them"
            )
        _refuse_options(dict(model.options))
        self.scale: Any = dict(model.options).get("scale")
        state = nnx.state(model)
        self.config, self.parts = model.config, model.parts(state)
        if axes_size(self.parts.mesh, self.parts.stage_axis) > 1:
            raise NotImplementedError(
                f"the model's rules have a stage axis, {self.parts.stage_axis!r}: serving has no "
                "pipeline; load the model with stage=None"
            )
        mesh = mesh_with_devices(self.parts.mesh)
        specs = jax.tree.map(
            lambda spec: only(spec, self.parts.tensor_axes),
            self.parts.tree(state),
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        self._layer, _ = nnx.split(model.layers)
        self._norm, _ = nnx.split(model.final_norm)
        layer_specs = jax.tree.map(
            lambda spec: P(*spec[1:]), specs["layers"], is_leaf=lambda leaf: isinstance(leaf, P)
        )
        count = self.config.num_layers

        def sharding(spec: P) -> NamedSharding:
            return NamedSharding(mesh, spec)

        def placed(weight: jax.Array, spec: P) -> jax.Array:
            return jax.jit(self._in_dtype, out_shardings=sharding(spec))(weight)

        def taken_apart(stack: jax.Array, spec: P) -> list[jax.Array]:
            apart = jax.jit(
                lambda stack: [self._in_dtype(stack[i]) for i in range(count)],
                out_shardings=[sharding(spec)] * count,
            )
            return apart(stack)

        leaves, structure = jax.tree.flatten(state["layers"])
        of_layers = jax.tree.leaves(layer_specs, is_leaf=lambda leaf: isinstance(leaf, P))
        apart = [taken_apart(*each) for each in zip(leaves, of_layers, strict=True)]
        layers = [jax.tree.unflatten(structure, [w[i] for w in apart]) for i in range(count)]
        self.weights: dict[str, Any] = {
            "embedding": placed(model.embedding[...], specs["embedding"].get_value()),
            "final_norm": jax.tree.map(placed, state["final_norm"], specs["final_norm"]),
            "layers": layers,
        }
        self.specs: dict[str, Any] = {
            "embedding": specs["embedding"].get_value(),
            "final_norm": specs["final_norm"],
            "layers": [layer_specs] * count,
        }
        if model.head is not None:
            spec = specs["head"]["kernel"].get_value()
            self.weights["head"] = placed(model.head.kernel[...], spec)
            self.specs["head"] = spec

    def _in_dtype(self, weight: jax.Array) -> jax.Array:
        """A matrix in the dtype of the computation; norms and sinks as they are."""
        return weight.astype(self.config.dtype) if weight.ndim > 1 else weight

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer."""
        return [kind.window for kind in self.config.layer_kinds]

    @property
    def heads(self) -> int:
        """Key heads in the cache: copied where the tensor axes have more devices than heads."""
        return max(self.config.num_kv_heads, axes_size(self.parts.mesh, self.parts.tensor_axes))

    def hidden(
        self,
        weights: dict[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        length: jax.Array,
        present: jax.Array | None,
        attend: Attend,
    ) -> jax.Array:
        """One device's hidden states after the final norm, inside a ``shard_map``.

        Args:
          weights: this device's.
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, in the row.
          length: int32 scalar, tokens of the longest row of the batch, these included.
          present: int32 ``[B, T]``, 0 for padding, or None.
          attend: each layer's attention.

        Returns:
          ``[B, T, D]``.
        """
        config, axes = self.config, self.parts.tensor_axes
        x = embed(weights["embedding"], tokens, axes).astype(config.dtype)
        if config.scale_embeddings:
            x = x * jnp.asarray(config.embed_dim**0.5, config.dtype)
        tables: dict[Rope | None, RopeTable] = {
            rope: rope_table(
                positions,
                config.head_dim,
                rope,
                length=length if isinstance(rope, DynamicRope) else None,
            )
            for rope in dict.fromkeys(config.layer_ropes)
        }
        for index, kind in enumerate(config.layer_kinds):
            layer = nnx.merge(self._layer, weights["layers"][index])
            fn = partial(attend, index)
            x = layer(x, tables[kind.rope], present, kind.window, fn, remat="none")
        return nnx.merge(self._norm, weights["final_norm"])(x)

    def logits(self, weights: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """Logits of all token ids, float32 ``[B, V]``, of hidden states ``[B, D]``."""
        kernel = weights["head"] if "head" in weights else weights["embedding"].T
        logits = jnp.einsum("bd,dv->bv", hidden, kernel, preferred_element_type=jnp.float32)
        if self.parts.tensor_axes:
            logits = lax.all_gather(logits, self.parts.tensor_axes, axis=1, tiled=True)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _refuse_options(options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention options that decoding would ignore."""
    for name, value in options.items():
        if name not in _TAKEN and value is not None:
            raise NotImplementedError(
                f"the model's attention has the option {name}: decoding knows the windows of "
                "DecoderConfig's layers, its scales, soft caps and sinks alone; say a window by "
                "layer_pattern=(LayerKind(window=...),)"
            )


def split_of(parts: Parts) -> tuple[Any, Any]:
    """``(rows, tokens)``: the mesh axes of each, as a ``PartitionSpec`` names them."""
    return parts.batch_axes or None, parts.token_axes or None
