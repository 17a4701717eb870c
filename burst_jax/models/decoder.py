"""A decoder language model with context parallelism: RMSNorm, RoPE, GQA, ring attention, gated MLP.

The weights of all layers are stacked, and one ``lax.scan`` runs the layers, each rematerialized.
By default a layer's attention outputs are stored, so the backward pass recomputes matrix products
but does not run the forward ring again.

The whole model runs in one ``shard_map``: a device has its own sequences and tokens, gathers the
weights of one layer after the other, and sums over devices explicitly. The compiler inserts no
collectives, and meshes with Auto and with Explicit axes run the same program.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.attention.order import reject_other_layout, reject_wrong_order
from burst_jax.errors import check_integer
from burst_jax.layers.nnx_layer import AttentionFn
from burst_jax.layers.rope import DynamicRope, rope_table
from burst_jax.layouts.parse import layout_option
from burst_jax.layouts.tables import DocumentTables
from burst_jax.models.config import DecoderConfig, LayerKind
from burst_jax.models.config import Stack as StackOfLayers
from burst_jax.models.decoder_layer import DecoderLayer, norm_of
from burst_jax.models.decoder_options import (
    check_expert_axis,
    options_of_rules,
    reject_own_options,
    with_rules,
)
from burst_jax.models.feed_forward import Auxiliary
from burst_jax.models.layer_sums import LayerSums, no_logits_of
from burst_jax.models.pipeline import kinds_of_a_stage, pipelined
from burst_jax.models.remat import Remat, rematerialized
from burst_jax.models.shardings import (
    DecoderShardings,
    check_stacked,
    decoder_shardings,
    embed,
    reject_sharded,
)
from burst_jax.models.stack import Stacked, run_ahead, run_layers
from burst_jax.parallel.collectives import gather_weights
from burst_jax.parallel.mesh import (
    axes_size,
    constrain,
    flat_names,
    gather_explicit,
    reshard_explicit,
    resolve_mesh,
)
from burst_jax.parallel.rules import ShardingRules
from pallas_kernels.arrays import as_int32, vary


class Decoder(nnx.Module):
    """Token ids to final hidden states; the sequence stays sharded from first to last layer.

    The output projection is a separate method, :meth:`unembed`, because a loss over long sequences
    applies it to one chunk of tokens at a time.

    ``layers`` has the stacked weights of the layers with softmax attention, ``delta_net_layers``
    those of the layers with linear attention, each in the order of the layers. Dense layers in a
    decoder with experts are in ``dense_layers`` and ``dense_delta_net_layers``.

    Args:
      config: sizes and dtypes.
      rngs: random numbers for the initializers (stream "params").
      rules: the mesh axes that shard weights and activations (:class:`burst_jax.ShardingRules`).
        With None the options ``batch_axis``, ``seq_axis`` and ``tensor_axis`` shard activations,
        and ``tensor_axis`` alone shards weights: weights sharded over other Auto axes are rejected
        where that is visible (:meth:`reject_sharded_weights`), and gathered as a whole stack inside
        ``jit``. Weights sharded over Explicit axes of the batch or the sequence are gathered layer
        by layer; over other Explicit axes, as a whole stack.
      microbatches: number of microbatches of the pipeline; None is the number of stages.
      **options: keyword arguments of :func:`burst_attention` (mesh, seq_axis, batch_axis, layout,
        implementation, ...), except for is_causal and logits_soft_cap, which the decoder sets,
        those that ``rules`` set, and those that :class:`burst_jax.BurstAttention` does not accept.

    Raises:
      TypeError: an unknown option, or one that the decoder sets itself.
      ValueError: an option that :class:`burst_jax.BurstAttention` does not accept, or that
        ``rules`` set.
    """

    layers: DecoderLayer
    delta_net_layers: DecoderLayer
    dense_layers: DecoderLayer
    dense_delta_net_layers: DecoderLayer

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        rules: ShardingRules | None = None,
        microbatches: int | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        if not isinstance(config, DecoderConfig):
            raise ValueError(f"config is a {type(config).__name__}: it must be a DecoderConfig")
        reject_own_options(config, options)
        if rules is not None:
            options = with_rules(options, rules)
            if rules.expert is not None:
                check_expert_axis(config, rules)
        if microbatches is not None:
            microbatches = check_integer("microbatches", microbatches, 1)
            if rules is None or rules.stage is None:
                raise ValueError(
                    f"microbatches is {microbatches}: only a pipeline has them; pass rules with a "
                    "stage"
                )
        self.config = config
        self.rules = rules
        self.microbatches = microbatches
        self.options: tuple[tuple[str, Any], ...] = tuple(sorted(options.items()))
        self.embedding = nnx.Param(
            nnx.initializers.normal(0.02)(
                rngs.params(), (config.vocab_size, config.embed_dim), config.param_dtype
            )
        )

        def layer(rngs: nnx.Rngs, kind: StackOfLayers) -> DecoderLayer:
            layer = DecoderLayer(config, kind, rngs=rngs, **options)
            if rules is not None and rules.expert is not None:
                layer.mlp.expert_axis = rules.expert
            return layer

        for kind, count in config.stacks.items():
            stack = nnx.vmap(partial(layer, kind=kind), in_axes=0, out_axes=0)
            setattr(self, kind.name, nnx.split_rngs(splits=count)(stack)(rngs))
        self.final_norm = norm_of(config)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.embed_dim,
                config.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=nnx.initializers.normal(0.02),
                rngs=rngs,
            )
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | np.ndarray,
        segment_ids: jax.Array | None = None,
        prefix_lengths: jax.Array | None = None,
        document_tables: DocumentTables | None = None,
    ) -> jax.Array:
        """Runs the layers.

        Args:
          tokens: int32 ``[B, T]`` in the order of the option ``layout``.
          positions: int32 ``[B, T]`` or ``[T]`` in the order of the tokens
            (:func:`burst_jax.positions`); an ``arange`` is right for the contiguous layout only.
          segment_ids: int32 ``[B, T]`` in the order of the tokens; 0 is padding, documents count
            from 1. None is one segment per sequence.
          prefix_lengths: int32 ``[B]``: the number of tokens at the start of each sequence, in
            natural order, that all its tokens attend to, within the layers' windows
            (:func:`burst_jax.burst_attention`). None is no prefix.
          document_tables: in a balanced layout, what :func:`burst_jax.training.make_batch` returns
            in the batch, with the windows of all layers; None searches in every layer.

        Returns:
          Hidden states after the final norm, ``[B, T, D]`` in ``config.dtype``; undefined for
          padding. A token id of V or more gives NaN, and under ``jit`` so do sequences with
          positions in another order than their tokens.

        Raises:
          ValueError: arrays of other shapes or dtypes; outside ``jit``, or for NumPy arrays,
            positions in another order than the tokens; see :meth:`reject_sharded_weights`.
        """
        given = tokens, positions, segment_ids, prefix_lengths, document_tables
        return self.with_auxiliary(*given)[0]

    def with_auxiliary(
        self,
        tokens: jax.Array,
        positions: jax.Array | np.ndarray,
        segment_ids: jax.Array | None = None,
        prefix_lengths: jax.Array | None = None,
        document_tables: DocumentTables | None = None,
        *,
        max_logits: bool = False,
    ) -> tuple[jax.Array, Auxiliary]:
        """The hidden states of ``__call__``, and auxiliary losses of the feed-forwards.

        A mixture of experts has some (:class:`burst_jax.models.Experts`), of the global batch
        without padding. With ``max_logits`` there are also bounds of the largest logit of each
        layer and head, of :func:`burst_jax.max_logits`, over the global batch. Other arguments and
        errors are those of ``__call__``.
        """
        graphdef, weights = nnx.split(self)
        shardings = self.shardings(weights)
        if self.rules is None:
            reject_sharded(weights, shardings)
        if prefix_lengths is not None and "delta_net" in self.config.mixers:
            raise ValueError(
                "prefix_lengths is given, and layers have linear attention (delta_net), in which "
                "no token reads a later one: leave it out"
            )
        shardings.check_inputs(tokens, positions, segment_ids, prefix_lengths)
        for stack in self.config.stacks:
            check_stacked(stack.name, weights[stack.name], shardings)
        positions_in = jnp.asarray(as_int32("positions", positions))
        if prefix_lengths is not None:
            prefix_lengths = jnp.asarray(as_int32("prefix_lengths", prefix_lengths))
        if document_tables is not None:
            document_tables = jax.tree.map(jnp.asarray, document_tables)
        arrays = tokens, positions_in, segment_ids, prefix_lengths, document_tables
        placed = [
            jax.tree.map(lambda x, spec: reshard_explicit(x, shardings.mesh, spec), array, specs)
            for array, specs in zip(arrays, shardings.input_specs(arrays), strict=True)
        ]
        weights = jax.tree.map(
            lambda w, spec: reshard_explicit(w, shardings.mesh, spec),
            weights,
            shardings.weight_specs(weights),
        )
        hidden, found = _run(graphdef, shardings, max_logits, weights, *placed)
        options = dict(self.options) | {
            "is_causal": True,
            "batch_axis": shardings.out_batch_axes,
        }
        hidden = reject_wrong_order(hidden, positions, segment_ids, options)
        auxiliary = self.config.feed_forward.auxiliary(self.config, found.sums)
        logits = found.logits_of(self.config.layer_kinds, shardings.mesh)
        return hidden, auxiliary._replace(max_logits=logits)

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, except for ``config`` and ``rngs``."""
        from_rules = {} if self.rules is None else options_of_rules(self.rules)
        options = {name: value for name, value in self.options if name not in from_rules}
        return {"rules": self.rules, "microbatches": self.microbatches, **options}

    def shardings(self, weights: Any = None) -> DecoderShardings:
        """How this decoder's arrays are sharded.

        Args:
          weights: its state; None reads it.
        """
        if weights is None:
            weights = nnx.state(self)
        options = dict(self.options)
        return decoder_shardings(weights, self.config, options, self.rules, self.microbatches)

    def reject_sharded_weights(self) -> None:
        """Raises if each device would silently gather the weights of all layers at once.

        Without rules that happens to weights sharded over Auto mesh axes (:class:`Decoder`). Inside
        ``jit`` shardings over Auto axes are invisible, so nothing raises there.

        Raises:
          ValueError: there are no rules, and a weight is sharded in this way.
        """
        if self.rules is None:
            weights = nnx.state(self)
            reject_sharded(weights, self.shardings(weights))

    def reject_other_layout(
        self, positions: jax.Array | np.ndarray, segment_ids: jax.Array | np.ndarray | None = None
    ) -> None:
        """Raises if positions are those of another layout, or of another number of shards.

        A traced call compares a few tokens only; its loss could be wrong without being NaN.

        Args:
          positions: int32 ``[B, T]`` or ``[T]``, outside of ``jit``.
          segment_ids: int32 ``[B, T]``, 0 for padding, or None.

        Raises:
          ValueError: positions in another order than that of ``layout`` on the mesh.
        """
        reject_other_layout(positions, dict(self.options), segment_ids)

    def head_kernel(self) -> jax.Array:
        """The output projection, ``[D, V]``: the head's kernel, or the embedding's transpose."""
        return self.embedding[...].T if self.head is None else self.head.kernel[...]

    def head_sharding(self) -> tuple[DecoderShardings, P]:
        """:meth:`shardings`, and the sharding of :meth:`head_kernel`."""
        weights = nnx.state(self)
        shardings = self.shardings(weights)
        specs = shardings.weight_specs(weights)
        if self.head is None:
            vocab, features = specs["embedding"].get_value()
            return shardings, P(features, vocab)
        return shardings, specs["head"]["kernel"].get_value()

    def local(
        self,
        shardings: DecoderShardings,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        prefix_lengths: jax.Array | None = None,
        document_tables: DocumentTables | None = None,
        *,
        max_logits: bool = False,
    ) -> tuple[jax.Array, LayerSums]:
        """One device's part of the call, inside a ``shard_map``, with this device's weights.

        Returns:
          ``(hidden, sums)``: ``[B, T, D]``, with a pipeline this stage's part of the batch; and
          what this stage's layers compute besides, over the global batch, with ``max_logits`` the
          largest logits of this device's heads.
        """
        config, varying = self.config, shardings.varying_axes
        specs = shardings.weight_specs(nnx.state(self))
        whole = partial(
            gather_weights, over=varying, keep=shardings.tensor_axes, dtype=config.dtype
        )
        table = whole(self.embedding[...], specs["embedding"].get_value(), widen=True)
        x = embed(table, tokens, shardings.tensor_axes).astype(config.dtype)
        if config.scale_embeddings:
            x = x * jnp.asarray(config.embed_dim**0.5, config.dtype)
        # With LoRA only the adapters are trained.
        trained = nnx.Param if config.lora is None else nnx.LoRAParam
        stacks = [stack.name for stack in config.stacks]
        split = {name: nnx.split(getattr(self, name), trained, ...) for name in stacks}
        graphdefs = {name: parts[0] for name, parts in split.items()}
        stacked, frozen = ({name: parts[i] for name, parts in split.items()} for i in (1, 2))
        # Without the layer dimension, which the scan over layers removes.
        of_stacks = {name: specs[name] for name in stacks}
        layer_specs = {
            path: P(*spec[1:]) for path, spec in jax.tree_util.tree_leaves_with_path(of_stacks)
        }
        kinds = kinds_of_a_stage(config, shardings)
        heads = config.num_heads // axes_size(shardings.mesh, shardings.tensor_axes)
        no_logits = no_logits_of(heads) if max_logits else None
        ropes = list(dict.fromkeys(config.layer_ropes))
        length = None
        if any(isinstance(rope, DynamicRope) for rope in ropes):
            # The longest sequence of the global batch, without padding.
            present = True if segment_ids is None else segment_ids != 0
            length = vary(jnp.max(jnp.where(present, positions, 0)) + 1, frozenset(varying))
            length = lax.pmax(length, varying) if varying else length
        ahead = shardings.are_gathered(list(layer_specs.values()))

        def gather(stack: str, weights: nnx.State) -> nnx.State:
            return jax.tree_util.tree_map_with_path(
                lambda path, weight: gather_weights(
                    weight, layer_specs[path], over=varying, keep=shardings.kept_axes(path),
                    dtype=config.dtype,
                ),
                {stack: weights},
            )[stack]  # fmt: skip

        def layer_of(kind: LayerKind, remat: Remat) -> Stacked:
            stack = kind.stack.name

            def layer(
                x: jax.Array,
                weights: nnx.State,
                frozen: nnx.State,
                shared: Any,
                attention_fn: AttentionFn | None,
            ) -> tuple[tuple[jax.Array, Any], Any]:
                tables, order, segment_ids, prefix_lengths, documents = shared
                rope = None if kind.rope is None else tables[ropes.index(kind.rope)]
                # Casts inside the rematerialized layer: outside, the backward pass would store
                # their results as a second stack.
                if not ahead:
                    weights, frozen = gather(stack, weights), gather(stack, frozen)
                module = nnx.merge(graphdefs[stack], weights, frozen)
                masks = segment_ids, kind.local_window_size, attention_fn, prefix_lengths
                return module(x, rope, *masks, order, documents, remat=remat)

            return Stacked(stack, rematerialized(layer, remat, no_logits))

        layers = {kind: layer_of(*kind) for kind in kinds}

        def run(x: jax.Array, shared: Any) -> tuple[jax.Array, LayerSums]:
            positions, *masks = shared
            tables = [rope_table(positions, config.head_dim, rope, length=length) for rope in ropes]
            run_all, gather_one = (run_ahead, gather) if ahead else (run_layers, lambda _, w: w)
            in_order = [layers[kind] for kind in kinds]
            order = layout_option(self.options).given_positions(positions)
            early = partial(shardings.is_sent_early, layer_specs)
            return run_all(in_order, gather_one, x, stacked, frozen, (tables, order, *masks), early)

        # Tables too: a layer would store what it marks as varying itself for its backward pass.
        x, document_tables = vary((x, document_tables), frozenset(varying))
        masks = segment_ids, prefix_lengths, document_tables
        if shardings.stage_axis is None:
            x, sums = run(x, (positions, *masks))
        else:
            shared = jnp.broadcast_to(positions, tokens.shape), *masks
            x, sums = pipelined(run, x, shared, shardings.stage_axis, shardings.microbatches)
        norm, scale = nnx.split(self.final_norm)
        sums = sums.over_devices(flat_names(shardings.batch_axes, shardings.token_axes))
        return nnx.merge(norm, whole(scale, specs["final_norm"]))(x), sums

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits, float32 ``[..., V]``, of hidden states ``[..., D]``, with the final soft cap.

        With rules V is sharded over ``rules.tensor``.
        """
        kernel = self.head_kernel().astype(hidden.dtype)
        if self.rules is not None:
            mesh, spec = resolve_mesh(dict(self.options).get("mesh")), P(None, self.rules.tensor)
            kernel = constrain(kernel, mesh, spec)
        logits = jnp.einsum(
            "...d,dv->...v",
            hidden,
            gather_explicit(kernel) if self.rules is None else kernel,
            preferred_element_type=jnp.float32,
        )
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def with_attention(
        self,
        config: DecoderConfig | None = None,
        *,
        rules: ShardingRules | None = None,
        microbatches: int | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Decoder:
        """A decoder with the weights of this one and other attention options, dtypes or remat.

        The weights are shared, not copied. If the new mesh has other devices, move the weights with
        ``jax.device_put``.

        Args:
          config: of the new decoder, with the same sizes; None is this decoder's config.
          rules: of the new decoder.
          microbatches: of the new decoder's pipeline.
          **options: all attention options of the new decoder; those of this one are dropped.
        """
        config = self.config if config is None else config
        graphdef, _ = abstract_decoder(config, rules=rules, microbatches=microbatches, **options)
        return nnx.merge(graphdef, nnx.state(self))


def abstract_decoder(
    config: DecoderConfig,
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder without weights.

    Args:
      config: sizes and dtypes.
      rules: see :class:`Decoder`.
      microbatches: see :class:`Decoder`.
      **options: attention options, see :class:`Decoder`.

    Returns:
      ``(graphdef, shapes)``, with a ``jax.ShapeDtypeStruct`` for each weight.
      ``nnx.merge(graphdef, params)`` is the model. Graph definitions that differ only in options
      accept the same ``params``.
    """
    model = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), rules=rules, microbatches=microbatches, **options)
    )
    return nnx.split(model)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run(
    graphdef: nnx.GraphDef,
    shardings: DecoderShardings,
    max_logits: bool,
    weights: nnx.State,
    *arrays: Any,
) -> tuple[jax.Array, LayerSums]:
    """:meth:`Decoder.local` on every device."""

    def local(weights: nnx.State, *arrays: Any) -> tuple[jax.Array, LayerSums]:
        return nnx.merge(graphdef, weights).local(shardings, *arrays, max_logits=max_logits)

    return jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=(shardings.weight_specs(weights), *shardings.input_specs(arrays)),
        out_specs=(
            P(shardings.out_batch_axes or None, shardings.token_axes or None),
            LayerSums.specs(shardings.stage_axis, shardings.tensor_axes),
        ),
        check_vma=shardings.check_vma,
    )(weights, *arrays)
