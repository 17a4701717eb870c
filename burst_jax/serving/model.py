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

from burst_jax.layers.rope import DynamicRope, Rope, RopeTable, rope_table
from burst_jax.models.decoder import Decoder
from burst_jax.models.shardings import DecoderShardings, embed
from burst_jax.models.weights import name_of
from burst_jax.parallel.collectives import gather_weights
from burst_jax.parallel.mesh import axes_size, mesh_with_devices
from burst_jax.serving.joined import NAMES, join, use_joined
from burst_jax.serving.split import my_part, padded, spec_of, use_parts

# Attention options that say how a prompt is computed, not what; and the scale, which decoding
# takes, too.
_TAKEN = (
    "mesh", "seq_axis", "batch_axis", "tensor_axis", "ulysses_axis", "layout", "scale",
    "implementation", "backward", "deterministic", "dropout_rate",
)  # fmt: skip

# (index of the layer, query, key, value, the layer's options) -> (out, (keys, values)).
Attend = Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]]


class ServedModel:
    """A decoder whose layers are arrays of their own.

    A step of decoding reads all weights once. From a stack of all layers' weights each step would
    copy every layer's first.

    Attributes:
      config: of the decoder.
      parts: how the decoder's arrays are split.
      split: whether weights are split over the sequence axes (:mod:`burst_jax.serving.split`); else
        they are whole but for the tensor axes.
      weights: the arrays: "embedding", "final_norm", "head" and, for each layer, "layers".
      specs: how each of them is split.
      scale: the attention option of the decoder.
    """

    def __init__(self, model: Decoder, split: bool = False) -> None:
        if model.config.lora is not None:
            raise ValueError(
                "the model has adapters that are not merged: burst_jax.models.merge_lora(model) "
                "merges them"
            )
        if split and model.rules is None:
            raise ValueError(
                "split_weights is True, and the model has no rules, which say that weights are "
                "split: load it with rules=ShardingRules(...)"
            )
        _refuse_options(dict(model.options))
        self.scale: Any = dict(model.options).get("scale")
        state = nnx.state(model)
        self.config, self.parts = model.config, model.shardings(state)
        if axes_size(self.parts.mesh, self.parts.stage_axis) > 1:
            raise NotImplementedError(
                f"the model's rules have a stage axis, {self.parts.stage_axis!r}: serving has no "
                "pipeline; load the model with stage=None"
            )
        # On one device of the sequence axes all weights are whole.
        self.split = split and axes_size(self.parts.mesh, self.parts.token_axes) > 1
        self._layer, _ = nnx.split(model.layers)
        self._norm, _ = nnx.split(model.final_norm)
        self.weights: dict[str, Any] = {}
        self.specs: dict[str, Any] = {}
        self._place(state, model.head is not None)

    def _place(self, state: nnx.State, has_head: bool) -> None:
        """Copies the decoder's weights to where serving has them."""
        mesh, count = mesh_with_devices(self.parts.mesh), self.config.num_layers
        specs = jax.tree_util.tree_map_with_path(
            lambda path, spec: spec_of(path, spec, self.parts, self.split),
            self.parts.weight_specs(state),
            is_leaf=_is_spec,
        )

        def placed(weight: jax.Array, spec: P) -> jax.Array:
            return jax.jit(self._in_dtype, out_shardings=NamedSharding(mesh, spec))(weight)

        def taken_apart(path: tuple[Any, ...], stack: jax.Array, spec: P) -> list[jax.Array]:
            def apart(stack: jax.Array) -> list[jax.Array]:
                if self.split:
                    stack = padded(path, stack, self.parts)
                return [self._in_dtype(stack[i]) for i in range(count)]

            return jax.jit(apart, out_shardings=[NamedSharding(mesh, spec)] * count)(stack)

        layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"], is_leaf=_is_spec)
        leaves, structure = jax.tree_util.tree_flatten_with_path({"layers": state["layers"]})
        of_layers = jax.tree.leaves(layer_specs, is_leaf=_is_spec)
        apart = [
            taken_apart(path, stack, spec)
            for (path, stack), spec in zip(leaves, of_layers, strict=True)
        ]
        if self._joins:
            self._join([path for path, _ in leaves], of_layers, apart)
        self.weights["layers"] = [
            jax.tree.unflatten(structure, [w[i] for w in apart])["layers"] for i in range(count)
        ]
        self.specs["layers"] = [layer_specs] * count
        self.weights["final_norm"] = jax.tree.map(placed, state["final_norm"], specs["final_norm"])
        self.specs["final_norm"] = specs["final_norm"]
        matrices: dict[str, Any] = {"embedding": (state["embedding"], specs["embedding"])}
        if has_head:
            matrices["head"] = state["head"]["kernel"], specs["head"]["kernel"]
        for name, (matrix, spec) in matrices.items():
            self.specs[name] = spec.get_value()
            self.weights[name] = placed(matrix[...], self.specs[name])

    @property
    def _joins(self) -> bool:
        """Whether query's, key's and value's weights are one matrix (``serving.joined``).

        Not where weights are split over the sequence: a prompt gathers them as the decoder has
        them. Not where devices share a key head: each takes its head's weights out of all.
        """
        return not self.split and self.heads == self.config.num_kv_heads

    def _join(self, paths: list[Any], specs: list[P], apart: list[list[jax.Array]]) -> None:
        """Joins the three matrices of every layer, in the place of query's.

        Args:
          paths: of the layers' weights.
          specs: how each of them is split.
          apart: each weight of all layers; the three are replaced.
        """
        mesh = mesh_with_devices(self.parts.mesh)
        names = [name_of(path) for path in paths]
        at = [names.index(f"layers.attention.{name}.kernel") for name in NAMES]
        for layer in range(self.config.num_layers):
            joined = join(tuple(apart[i][layer] for i in at), mesh, specs[at[0]])
            for i, kernel in zip(at, joined, strict=True):
                apart[i][layer] = kernel

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
        gather: bool,
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """One device's hidden states after the final norm, inside a ``shard_map``.

        Args:
          weights: this device's.
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, in the row.
          length: int32 scalar, tokens of the longest row of the batch, these included.
          present: int32 ``[B, T]``, 0 for padding, or None.
          attend: each layer's attention.
          gather: whether devices have tokens of their own, so that split weights are gathered, one
            layer ahead. Else all have the same tokens, and compute with their parts.

        Returns:
          ``(hidden [B, T, D], each layer's keys and values)``.
        """
        config, axes, split_over = self.config, self.parts.tensor_axes, self.parts.token_axes
        table = weights["embedding"]
        if self.split and gather:
            table = self._whole(table, self.specs["embedding"])
        x = embed(table, tokens, axes).astype(config.dtype)
        if self.split and not gather:
            x = lax.all_gather(x, split_over, axis=2, tiled=True)
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
        layers, specs = list(weights["layers"]), self.specs["layers"]
        stored = []
        for index, kind in enumerate(config.layer_kinds):
            if self.split and gather:
                if index == 0:
                    layers[0] = self._whole(layers[0], specs[0])
                if index + 1 < len(layers):
                    # Not before this layer begins: two layers' weights are whole at a time.
                    after, x = lax.optimization_barrier((layers[index + 1], x))
                    layers[index + 1] = self._whole(after, specs[index + 1])
            layer = nnx.merge(self._layer, layers[index])
            if self.split and not gather:
                use_parts(layer, self.parts)
            if self._joins:
                use_joined(layer, config.num_heads // axes_size(self.parts.mesh, axes))
            fn = partial(attend, index)
            x, key_value = layer(x, tables[kind.rope], present, kind.window, fn, remat="none")
            stored.append(key_value)
        return nnx.merge(self._norm, weights["final_norm"])(x), stored

    def _whole(self, weights: Any, specs: Any) -> Any:
        """Weights as they are without a split over the sequence axes."""
        return gather_weights(weights, specs, over=(), keep=self.parts.tensor_axes)

    def logits(self, weights: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """Logits of all token ids, float32 ``[B, V]``, of hidden states ``[B, D]``."""
        kernel = weights["head"] if "head" in weights else weights["embedding"].T
        if self.split:
            hidden = my_part(hidden, self.parts.token_axes)
        logits = jnp.einsum("bd,dv->bv", hidden, kernel, preferred_element_type=jnp.float32)
        if self.split:
            logits = lax.psum(logits, self.parts.token_axes)
        if self.parts.tensor_axes:
            logits = lax.all_gather(logits, self.parts.tensor_axes, axis=1, tiled=True)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _refuse_options(options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention options that decoding would ignore."""
    for name, value in options.items():
        if name not in _TAKEN and value is not None:
            raise NotImplementedError(
                f"the model's attention has the option {name}: decoding knows the windows of "
                "DecoderConfig's layers, its scales, soft caps and sinks alone; say a window by "
                "layer_pattern=(LayerKind(window=...),)"
            )


def split_of(parts: DecoderShardings) -> tuple[Any, Any]:
    """``(rows, tokens)``: the mesh axes of each, as a ``PartitionSpec`` names them."""
    return parts.batch_axes or None, parts.token_axes or None
