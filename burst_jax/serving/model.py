"""A decoder's weights and layers for serving, inside a ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.layers.gated_delta_net import DeltaNetState, GatedDeltaNet
from burst_jax.layers.rope import DynamicRope, Rope, RopeTable, rope_table
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import layout_option
from burst_jax.linear.runs import device_runs
from burst_jax.models.config import LayerKind, Mixer, Stack
from burst_jax.models.decoder import Decoder
from burst_jax.models.decoder_layer import DecoderLayer
from burst_jax.models.experts import MixtureOfExperts
from burst_jax.models.shardings import embed
from burst_jax.models.weights import name_of
from burst_jax.parallel.collectives import gather_weights
from burst_jax.parallel.mesh import axes_size, mesh_with_devices
from burst_jax.serving import fused_delta_net, fused_qkv, fused_router
from burst_jax.serving.one_row import with_one_row_output
from burst_jax.serving.sharded_weights import (
    hidden_axes,
    hidden_padding,
    local_shard,
    serving_spec,
    with_sharded_projections,
)

# Attention options that do not change what is computed; and the scale, which decoding supports.
_SUPPORTED = (
    "mesh", "seq_axis", "batch_axis", "tensor_axis", "ulysses_axis", "layout", "scale",
    "implementation", "backward", "deterministic", "dropout_rate",
)  # fmt: skip

# The argument of a layer for what it calls, by its mixer.
_ARGUMENTS: dict[Mixer, str] = {"attention": "attention_fn", "delta_net": "delta_net_fn"}
# What a layer calls, with its index first: with softmax attention (query, key, value, axis,
# **options), with linear attention (layer, x, segment ids). It returns (out, the layer's cache).
Mix = Callable[..., tuple[jax.Array, Any]]


class ServedModel:
    """A decoder whose layers have separate arrays.

    A decoding step reads all weights once. From a stack of all layers' weights, every step would
    copy each layer's first.

    Attributes:
      config: of the decoder.
      shardings: of the decoder's arrays.
      sharded: whether weights are sharded over the sequence axes
        (:mod:`burst_jax.serving.sharded_weights`); else only over the tensor axes.
      weights: the arrays: "embedding", "final_norm", "head" and, for each layer, "layers".
      specs: the spec of each array.
      leaves: the arrays of ``weights`` that have elements, the argument of programs: to flatten
        modules' states in every step takes the host longer than a small step takes the device. Each
        argument takes the host time, too, so arrays without elements are none.
      leaf_specs: the spec of each of them.
      scale: the attention option of the decoder.
    """

    def __init__(self, model: Decoder, shard: bool = False) -> None:
        if model.config.lora is not None:
            raise ValueError(
                "the model has LoRA adapters: merge them first, by "
                "burst_jax.models.merge_lora(model)"
            )
        if shard and model.rules is None:
            raise ValueError(
                "split_weights is True, and the model has no rules to shard weights by: load it "
                "with rules=ShardingRules(...)"
            )
        _check_options(dict(model.options))
        _check_layout(layout_option(model.options))
        self.scale: Any = dict(model.options).get("scale")
        state = nnx.state(model)
        self.config, self.shardings = model.config, model.shardings(state)
        if axes_size(self.shardings.mesh, self.shardings.stage_axis) > 1:
            raise NotImplementedError(
                f"the model's rules have a stage axis, {self.shardings.stage_axis!r}: serving does "
                "not support pipelines; load the model with stage=None"
            )
        if self.config.delta_net is not None:
            if self.config.delta_net.conv_taps == 1:
                # JAX 0.11.2 crashes on donated arrays without elements.
                raise NotImplementedError(
                    "config.delta_net has conv_taps 1, and the cache has the inputs of the taps "
                    "before the last one: serving needs 2 taps or more"
                )
            devices = axes_size(self.shardings.mesh, self.shardings.token_axes)
            device_runs(layout_option(model.options), (), devices, "Generator")
        # With one device on the sequence axes there is nothing to shard.
        self.sharded = shard and axes_size(self.shardings.mesh, self.shardings.token_axes) > 1
        self._layers = {
            stack: nnx.split(getattr(model, stack.name))[0] for stack in self.config.stacks
        }
        self._norm, _ = nnx.split(model.final_norm)
        self.weights: dict[str, Any] = {}
        self.specs: dict[str, Any] = {}
        self._place(state, model.head is not None)
        leaves, self._tree = jax.tree.flatten(self.weights)
        self.leaves = [x for x in leaves if x.size]
        specs = jax.tree.leaves(self.specs, is_leaf=_is_spec)
        self.leaf_specs = [spec for x, spec in zip(leaves, specs, strict=True) if x.size]
        shards = [x.sharding.shard_shape(x.shape) for x in leaves]
        empty = zip(leaves, shards, strict=True)
        self._empty = [None if x.size else (shape, x.dtype) for x, shape in empty]

    def _place(self, state: nnx.State, has_head: bool) -> None:
        """Copies the decoder's weights with the shardings of serving."""
        mesh = mesh_with_devices(self.shardings.mesh)
        specs = jax.tree_util.tree_map_with_path(
            lambda path, spec: serving_spec(path, spec, self.shardings, self.sharded),
            self.shardings.weight_specs(state),
            is_leaf=_is_spec,
        )

        def placed(weight: jax.Array, spec: P) -> jax.Array:
            return _placed(self.config.dtype, NamedSharding(mesh, spec))(weight)

        of_stack = {
            stack: jax.tree.map(lambda spec: P(*spec[1:]), specs[stack.name], is_leaf=_is_spec)
            for stack in self.config.stacks
        }
        layers = {
            stack: iter(self._unstacked(stack, state[stack.name], of_stack[stack], mesh))
            for stack in self.config.stacks
        }
        stacks = [kind.stack for kind in self.config.layer_kinds]
        self.weights["layers"] = [next(layers[stack]) for stack in stacks]
        self.specs["layers"] = [of_stack[stack] for stack in stacks]
        self.weights["final_norm"] = jax.tree.map(placed, state["final_norm"], specs["final_norm"])
        self.specs["final_norm"] = specs["final_norm"]
        matrices: dict[str, Any] = {"embedding": (state["embedding"], specs["embedding"])}
        if has_head:
            matrices["head"] = state["head"]["kernel"], specs["head"]["kernel"]
        for name, (matrix, spec) in matrices.items():
            self.specs[name] = spec.get_value()
            self.weights[name] = placed(matrix[...], self.specs[name])

    def _unstacked(self, stack: Stack, state: Any, specs: Any, mesh: Mesh) -> list[Any]:
        """The weights of each layer of a stack, with these specs."""
        count, name = self.config.stacks[stack], stack.name

        def unstacked(path: tuple[Any, ...], weight: jax.Array, spec: P) -> list[jax.Array]:
            widths = hidden_padding(path, weight.shape, self.shardings) if self.sharded else None
            # Read in float32, as in the decoder.
            is_wide = name_of(path).endswith(("_conv", "dt_bias"))
            dtype = weight.dtype if is_wide else self.config.dtype
            return _unstacked(dtype, NamedSharding(mesh, spec), count, widths)(weight)

        weights = jax.tree_util.tree_leaves_with_path({name: state})
        of_weights = jax.tree.leaves(specs, is_leaf=_is_spec)
        per_layer = {
            name_of(path): unstacked(path, weight, spec)
            for (path, weight), spec in zip(weights, of_weights, strict=True)
        }
        fusions = {"attention": self._fusion(stack.mixer), "mlp": self._router_fusion(stack)}
        for block, fusion in fusions.items():
            if fusion is None:
                continue
            names = [f"{name}.{block}.{each}.kernel" for each in fusion.NAMES]
            names = [each for each in names if each in per_layer]
            at = list(per_layer)
            specs = tuple(of_weights[at.index(each)] for each in names)
            kernels = zip(*(per_layer[each] for each in names), strict=True)
            fused = zip(*(fusion.fuse(each, mesh, specs) for each in kernels), strict=True)
            per_layer |= dict(zip(names, map(list, fused), strict=True))
        structure = jax.tree.structure(state)
        return [
            jax.tree.unflatten(structure, each) for each in zip(*per_layer.values(), strict=True)
        ]

    def initial_state(self, index: int, batch: int) -> DeltaNetState:
        """The shapes of the state of a linear-attention layer, ``jax.ShapeDtypeStruct`` each."""
        stack, weights = self.config.layer_kinds[index].stack, self.weights["layers"][index]
        layer: GatedDeltaNet = nnx.merge(self._layers[stack], weights).attention
        return jax.eval_shape(partial(layer.initial_state, batch, self.config.dtype))

    def unflatten(self, leaves: list[Any]) -> dict[str, Any]:
        """One device's shards of ``leaves``, as ``weights`` has them, inside a ``shard_map``."""
        given = iter(leaves)
        all_of_them = [next(given) if x is None else jnp.zeros(*x) for x in self._empty]
        return jax.tree.unflatten(self._tree, all_of_them)

    def _fusion(self, mixer: Mixer) -> Any:
        """The module that fuses the input projections of a mixer's layers, or None.

        Not with weights sharded over the sequence, because prefill gathers them as the decoder has
        them. Not if devices share a key head, because each slices its head's weights from all. Not
        with latent attention, whose keys and values are projected from another vector than queries,
        nor with Kimi Delta Attention, whose gates are.
        """
        if self.sharded:
            return None
        if mixer == "attention":
            fits = self.config.latent is None and self.heads == self.config.num_kv_heads
            return fused_qkv if fits else None
        assert self.config.delta_net is not None
        return fused_delta_net if self.config.delta_net.layer is GatedDeltaNet else None

    def _router_fusion(self, stack: Stack) -> Any:
        """The module that fuses a mixture's router and gate; None with sharded weights."""
        is_mixture = issubclass(self.config.feed_forward_of(stack), MixtureOfExperts)
        return fused_router if is_mixture and not self.sharded else None

    @property
    def data_axes(self) -> tuple[Any, Any]:
        """``(batch, tokens)``: the mesh axes of each, for a ``PartitionSpec``."""
        return self.shardings.batch_axes or None, self.shardings.token_axes or None

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a window."""
        return any(kind.window is not None for kind in self.config.layer_kinds)

    @property
    def heads(self) -> int:
        """Key heads in the cache, with copies if the tensor axes have more devices than heads."""
        return max(
            self.config.num_kv_heads, axes_size(self.shardings.mesh, self.shardings.tensor_axes)
        )

    def hidden(
        self,
        weights: dict[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        length: jax.Array,
        present: jax.Array | None,
        mix: Mapping[Mixer, Mix],
        gather: bool,
    ) -> tuple[jax.Array, list[Any]]:
        """One device's hidden states after the final norm, inside a ``shard_map``.

        Args:
          weights: this device's shards.
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, in each sequence.
          length: int32 scalar, tokens of the longest sequence of the batch, these included.
          present: int32 ``[B, T]``, 0 for padding, or None.
          mix: what layers call in place of softmax or linear attention.
          gather: whether devices have different tokens, so that sharded weights are gathered, one
            layer ahead. Otherwise all have the same tokens, and compute with their shards.

        Returns:
          ``(hidden [B, T, D], each layer's cache)``.
        """
        config, axes, token_axes = (
            self.config,
            self.shardings.tensor_axes,
            self.shardings.token_axes,
        )
        table = weights["embedding"]
        if self.sharded and gather:
            table = self._gathered(table, self.specs["embedding"])
        x = embed(table, tokens, axes).astype(config.dtype)
        if self.sharded and not gather:
            x = lax.all_gather(x, token_axes, axis=2, tiled=True)
        if config.scale_embeddings:
            x = x * jnp.asarray(config.embed_dim**0.5, config.dtype)

        def table_of(rope: Rope) -> RopeTable:
            of_batch = length if isinstance(rope, DynamicRope) else None
            found = rope_table(positions, config.head_dim, rope, length=of_batch)
            # XLA would compute a part of a decoding step's table in every kernel that reads it, and
            # cosines and sines of one token by a kernel each.
            return found if gather else RopeTable(*lax.optimization_barrier(jnp.stack(found)))

        ropes = dict.fromkeys(config.layer_ropes)
        tables = {rope: table_of(rope) for rope in ropes}
        stored = []
        layers, specs = list(weights["layers"]), self.specs["layers"]
        for index, kind in enumerate(config.layer_kinds):
            if self.sharded and gather:
                if index == 0:
                    layers[0] = self._gathered_layer(kind, layers[0], specs[0])
                if index + 1 < len(layers):
                    # Not before this layer starts: two layers' weights are gathered at a time.
                    after, x = lax.optimization_barrier((layers[index + 1], x))
                    following = config.layer_kinds[index + 1], after, specs[index + 1]
                    layers[index + 1] = self._gathered_layer(*following)
            layer = self._served(kind, layers[index], tokens.size, gather)
            rope = None if kind.rope is None else tables[kind.rope]
            fn: Any = {_ARGUMENTS[kind.mixer]: partial(mix[kind.mixer], index)}
            (x, _), of_layer = layer(x, rope, present, kind.local_window_size, **fn, remat="none")
            stored.append(of_layer)
        return nnx.merge(self._norm, weights["final_norm"])(x), stored

    def _served(self, kind: LayerKind, weights: Any, tokens: int, gather: bool) -> DecoderLayer:
        """A layer of these weights, for a prompt or for a decoding step; see :meth:`hidden`."""
        layer, shardings = nnx.merge(self._layers[kind.stack], weights), self.shardings
        attention, mlp = layer.attention, layer.mlp
        if self._router_fusion(kind.stack) is not None:
            mlp = fused_router.with_fused_router(mlp, at_once=not gather)
        if not gather:
            same = tuple(n for n in shardings.expert_axes if n in shardings.token_axes)
            hidden = hidden_axes(shardings) if self.sharded else mlp.hidden_axis
            mlp = mlp.decoding(hidden_axis=hidden, same_tokens_axis=same)
        if self.sharded and not gather:
            attention = with_sharded_projections(attention, shardings.token_axes)
        elif not gather and tokens == 1:
            attention = with_one_row_output(attention)
        fusion = self._fusion(kind.mixer)
        if fusion is fused_qkv:
            heads = self.config.num_heads // axes_size(shardings.mesh, shardings.tensor_axes)
            attention = fused_qkv.with_fused_qkv(attention, heads, at_once=not gather)
        elif fusion is fused_delta_net:
            attention = fused_delta_net.with_fused_projections(attention, at_once=not gather)
        return layer.with_blocks(attention, mlp)

    def _gathered(self, weights: Any, specs: Any) -> Any:
        """Weights all-gathered over the sequence axes."""
        return gather_weights(weights, specs, over=(), keep=self.shardings.tensor_axes)

    def _gathered_layer(self, kind: LayerKind, weights: Any, specs: Any) -> Any:
        """The same for one layer's weights; experts are not gathered over their own axes."""
        stack = kind.stack.name
        return jax.tree_util.tree_map_with_path(
            lambda path, weight, spec: gather_weights(
                weight, spec, over=(), keep=self.shardings.kept_axes(path)
            ),
            {stack: weights},
            {stack: specs},
        )[stack]

    def logits(self, weights: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """Logits of all token ids, float32 ``[B, V]``, of hidden states ``[B, D]``."""
        kernel = weights["head"] if "head" in weights else weights["embedding"].T
        if self.sharded:
            hidden = local_shard(hidden, self.shardings.token_axes)
        logits = jnp.einsum("bd,dv->bv", hidden, kernel, preferred_element_type=jnp.float32)
        if self.sharded:
            logits = lax.psum(logits, self.shardings.token_axes)
        if self.shardings.tensor_axes:
            logits = lax.all_gather(logits, self.shardings.tensor_axes, axis=1, tiled=True)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@cache
def _placed(dtype: Any, sharding: NamedSharding) -> Any:
    """A program that copies a weight, for all weights of one spec, and all generators."""
    return jax.jit(partial(_in_dtype, dtype), out_shardings=sharding)


@cache
def _unstacked(
    dtype: Any, sharding: NamedSharding, count: int, widths: tuple[tuple[int, int], ...] | None
) -> Any:
    """The same for a stack of ``count`` layers' weights, padded with zeros: a list of copies."""

    def unstack(stack: jax.Array) -> list[jax.Array]:
        stack = stack if widths is None else jnp.pad(stack, widths)
        return [_in_dtype(dtype, stack[i]) for i in range(count)]

    return jax.jit(unstack, out_shardings=[sharding] * count)


def _in_dtype(dtype: Any, weight: jax.Array) -> jax.Array:
    """A matrix in the compute dtype; norms and sinks unchanged."""
    return weight.astype(dtype) if weight.ndim > 1 else weight


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _check_layout(layout: Layout) -> None:
    """Raises ValueError for a layout of packed documents."""
    if not layout.is_fixed:
        raise ValueError(
            f"the model's layout is {layout!r}, which places the documents of a training batch, "
            "and prompts have none: serve model.with_attention(**model.arguments | "
            "{'layout': 'zigzag'}), which shares the weights"
        )


def _check_options(options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention options that decoding does not support."""
    for name, value in options.items():
        if name not in _SUPPORTED and value is not None:
            raise NotImplementedError(
                f"the model's attention has the option {name}: decoding supports only the "
                "windows of DecoderConfig's layers, its scales, soft caps and sinks; set a "
                "window by layer_pattern=(LayerKind(window=...),)"
            )
