"""A decoder language model whose attention is a ring: RMSNorm, RoPE, gated MLP, GQA.

The weights of all layers are stacked, and one ``lax.scan`` runs the layers, each under
``jax.checkpoint``. The results of a layer's ring are kept, so the backward pass recomputes the
layer's matrix products but does not send keys and values around the ring a second time.

All of it runs in one ``shard_map``: a device sees its own rows and tokens, gathers the weights of
one layer after the other, and makes every sum over devices itself. So the compiler decides nothing
about what travels, and a mesh with Auto axes and one with Explicit axes run the same program.
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
from burst_jax.attention.order import refuse_other_layout, refuse_wrong_order
from burst_jax.errors import check_integer
from burst_jax.layers.rope import rope_table
from burst_jax.layers.rope_variants import DynamicRope, Rope
from burst_jax.models.config import DecoderConfig, LayerKind
from burst_jax.models.layers import DecoderLayer, norm_of
from burst_jax.models.pipeline import pipelined
from burst_jax.models.remat import AttentionFn, Remat, remat_of_layers, rematerialised
from burst_jax.models.shardings import Parts, embed, parts_of, refuse_split
from burst_jax.models.stack import Layer, run_ahead, run_layers
from burst_jax.parallel.collectives import gather_weights
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    constrain,
    flat_names,
    gather_explicit,
    reshard_explicit,
    resolve_mesh,
)
from burst_jax.parallel.rules import ShardingRules, check_rules
from pallas_kernels.arrays import as_int32, vary


class Decoder(nnx.Module):
    """Token ids to final hidden states; tokens stay sharded over a mesh from first to last layer.

    The output projection is a method of its own, :meth:`unembed`, because a loss over long
    sequences applies it to one chunk of tokens at a time.

    Args:
      config: sizes and dtypes.
      rngs: random numbers for the initializers (stream "params").
      rules: the mesh axes that split weights and activations, see
        :class:`burst_jax.ShardingRules`. None: the options ``batch_axis``, ``seq_axis`` and
        ``tensor_axis`` split the activations, and weights are whole but for their heads, hidden
        features and vocabulary, which ``tensor_axis`` splits. Weights that lie split over other
        Auto
        axes are refused where that can be seen (:meth:`refuse_split_weights`); inside ``jit`` it
        cannot, and they are made whole, all layers at once: pass rules instead. Over Explicit axes
        that split rows or tokens weights may be split as they are; they stay so, and one layer's
        are gathered at a time. Over other Explicit axes they are made whole, too.
      microbatches: with a pipeline the number of microbatches in which each device's rows pass
        through the stages; None is the number of stages.
      **options: keyword arguments of :func:`burst_attention` (mesh, seq_axis, batch_axis, layout,
        implementation, ...) but is_causal and logits_soft_cap, which the decoder sets itself, those
        that ``rules`` say, and those that :class:`burst_jax.BurstAttention` does not take.

    Raises:
      TypeError: an unknown option, or one that the decoder sets itself.
      ValueError: an option that :class:`burst_jax.BurstAttention` does not take, or that ``rules``
        say.
    """

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
        _refuse_own_options(config, options)
        if rules is not None:
            options = _with_rules(options, rules)
        if microbatches is not None:
            microbatches = check_integer("microbatches", microbatches, 1)
            if rules is None or rules.stage is None:
                raise ValueError(
                    f"microbatches is {microbatches}: they are a pipeline's; pass rules with a "
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

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, rngs=rngs, **options)

        self.layers = stack(rngs)
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
    ) -> jax.Array:
        """Runs the layers.

        Args:
          tokens: int32 ``[B, T]`` in the order of the option ``layout``.
          positions: int32 ``[B, T]`` or ``[T]`` in the order of the tokens. Make them with
            :func:`burst_jax.positions`; an ``arange`` is right for the contiguous layout only.
          segment_ids: int32 ``[B, T]`` in the order of the tokens, or None for one segment per row.
            0 is padding; documents count from 1.
          prefix_lengths: int32 ``[B]``, or None: tokens at places below their row's number, counted
            from the row's start in its natural order, are seen by every token of the row
            (:func:`burst_jax.burst_attention`). The layers' windows still hide them.

        Returns:
          Hidden states after the final norm, ``[B, T, D]`` in ``config.dtype``. The hidden states
          of padding mean nothing. A token id of V or more gives NaN. Under ``jit`` a row whose
          positions are in another order than its tokens (:mod:`burst_jax.attention.order`) is NaN
          too.

        Raises:
          ValueError: arrays of other shapes or dtypes than these; positions in another order than
            the tokens, if their values are known: outside ``jit``, or in NumPy;
            :meth:`refuse_split_weights`.
        """
        options = dict(self.options)
        graphdef, weights = nnx.split(self)
        parts = self.parts(weights)
        if self.rules is None:
            refuse_split(weights, parts)
        parts.check_rows(tokens, positions, segment_ids, prefix_lengths)
        _check_stacked(weights["layers"], parts)
        positions_in = jnp.asarray(as_int32("positions", positions))
        if prefix_lengths is not None:
            prefix_lengths = jnp.asarray(as_int32("prefix_lengths", prefix_lengths))
        arrays = tokens, positions_in, segment_ids, prefix_lengths
        given = [
            None if array is None or spec is None else reshard_explicit(array, parts.mesh, spec)
            for array, spec in zip(arrays, parts.of_arrays(arrays), strict=True)
        ]
        weights = jax.tree.map(
            lambda w, spec: reshard_explicit(w, parts.mesh, spec), weights, parts.tree(weights)
        )
        hidden = _run(graphdef, parts, weights, *given)
        options |= {"is_causal": True, "batch_axis": parts.out_batch_axes}
        return refuse_wrong_order(hidden, positions, segment_ids, options)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a decoder like this one is made with, beside its config and ``rngs``."""
        said = {} if self.rules is None else _said_by(self.rules)
        options = {name: value for name, value in self.options if name not in said}
        return {"rules": self.rules, "microbatches": self.microbatches, **options}

    def parts(self, weights: Any = None) -> Parts:
        """How this decoder's arrays are split.

        Args:
          weights: its state; None reads it.
        """
        if weights is None:
            weights = nnx.state(self)
        return parts_of(weights, self.config, dict(self.options), self.rules, self.microbatches)

    def refuse_split_weights(self) -> None:
        """Raises if each device would silently gather the weights of all layers first.

        That is so without rules if weights lie split over Auto mesh axes, see :class:`Decoder`.
        Inside ``jit`` nobody sees how an array lies on them, so nothing raises there.

        Raises:
          ValueError: there are no rules, and a weight is split so.
        """
        if self.rules is None:
            weights = nnx.state(self)
            refuse_split(weights, self.parts(weights))

    def refuse_other_layout(self, positions: jax.Array | np.ndarray) -> None:
        """Raises if positions are those of another layout, or of another number of shards.

        A traced call can see neither, and its loss would be wrong without being NaN.

        Args:
          positions: int32 ``[B, T]`` or ``[T]``; outside ``jit``, as inside it nothing is checked.

        Raises:
          ValueError: positions of another order than the option ``layout`` and the mesh say.
        """
        refuse_other_layout(positions, dict(self.options))

    def head_kernel(self) -> jax.Array:
        """The output projection, ``[D, V]``: the head's kernel, or the embedding's transpose."""
        return self.embedding[...].T if self.head is None else self.head.kernel[...]

    def head_parts(self) -> tuple[Parts, P]:
        """How this decoder's arrays are split, and how :meth:`head_kernel` is."""
        weights = nnx.state(self)
        parts = self.parts(weights)
        specs = parts.tree(weights)
        if self.head is None:
            vocab, features = specs["embedding"].get_value()
            return parts, P(features, vocab)
        return parts, specs["head"]["kernel"].get_value()

    def local(
        self,
        parts: Parts,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        prefix_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """One device's part of the call, inside a ``shard_map``; this decoder has its weights.

        Args:
          parts: how the arrays are split.
          tokens: int32, this device's tokens ``[B, T]``.
          positions: int32 ``[B, T]`` or ``[T]``.
          segment_ids: int32 ``[B, T]``, or None.
          prefix_lengths: int32 ``[B]``, or None.

        Returns:
          ``[B, T, D]``; with a pipeline the rows of this device's stage.
        """
        config = self.config
        specs = parts.tree(nnx.state(self))
        whole = partial(gather_weights, over=parts.over, keep=parts.tensor_axes, dtype=config.dtype)
        table = whole(self.embedding[...], specs["embedding"].get_value(), widen=True)
        x = embed(table, tokens, parts.tensor_axes).astype(config.dtype)
        if config.scale_embeddings:
            x = x * jnp.asarray(config.embed_dim**0.5, config.dtype)
        # Adapters are trained alone.
        trained = nnx.Param if config.lora is None else nnx.LoRAParam
        graphdef, stacked, frozen = nnx.split(self.layers, trained, ...)
        # The scan takes the first dimension off, which counts the layers.
        layer_specs = {
            path: P(*spec[1:])
            for path, spec in jax.tree_util.tree_leaves_with_path(specs["layers"])
        }

        kinds = _kinds_of_a_stage(config, parts)
        ropes = list(dict.fromkeys(config.layer_ropes))
        table_of: dict[Rope | None, int] = {rope: number for number, rope in enumerate(ropes)}
        length = None
        if any(isinstance(rope, DynamicRope) for rope in ropes):
            # Of the whole batch, wherever its rows and tokens are, padding left out.
            here = True if segment_ids is None else segment_ids != 0
            present = jnp.where(here, positions, 0)
            length = vary(jnp.max(present) + 1, frozenset(parts.over))
            length = lax.pmax(length, parts.over) if parts.over else length

        ahead = parts.gathers(list(layer_specs.values()))

        def gather(weights: nnx.State) -> nnx.State:
            return jax.tree_util.tree_map_with_path(
                lambda path, weight: whole(weight, layer_specs[path]), weights
            )

        def layer_of(kind: LayerKind, remat: Remat) -> Layer:
            def layer(
                x: jax.Array,
                weights: nnx.State,
                frozen: nnx.State,
                sides: Any,
                attention_fn: AttentionFn | None = None,
            ) -> jax.Array:
                tables, segment_ids, prefix_lengths = sides
                rope = tables[table_of[kind.rope]]
                # Weights that are whole already are marked here, where the backward pass does it
                # again. Marked outside they would be kept for it, in a second stack.
                if not ahead:
                    weights, frozen = gather(weights), gather(frozen)
                module = nnx.merge(graphdef, weights, frozen)
                return module(
                    x, rope, segment_ids, kind.window, attention_fn, prefix_lengths, remat=remat
                )

            return rematerialised(layer, remat)

        layers = {kind: layer_of(*kind) for kind in kinds}

        def run(x: jax.Array, sides: Any) -> jax.Array:
            positions, *masks = sides
            tables = [rope_table(positions, config.head_dim, rope, length=length) for rope in ropes]
            in_order = [layers[kind] for kind in kinds]
            run_stack, gathered_by = (
                (run_ahead, gather) if ahead else (run_layers, lambda weights: weights)
            )
            return run_stack(in_order, gathered_by, x, stacked, frozen, (tables, *masks))

        x = vary(x, frozenset(parts.over))
        sides = positions, segment_ids, prefix_lengths
        if parts.stage_axis is None:
            x = run(x, sides)
        else:
            sides = jnp.broadcast_to(positions, tokens.shape), *sides[1:]
            x = pipelined(run, x, sides, parts.stage_axis, parts.microbatches)
        norm, scale = nnx.split(self.final_norm)
        return nnx.merge(norm, whole(scale, specs["final_norm"]))(x)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., V]``, float32, of hidden states ``[..., D]``, soft-capped if they are.

        With rules V is split as they split the vocabulary.
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
        """A decoder with the weights of this one, and other attention options or another dtype.

        The weights are shared, not copied. If the new mesh has other devices, put the weights on
        them with ``jax.device_put``.

        Args:
          config: sizes and dtypes of the new decoder, which may differ in dtypes and remat, not in
            sizes; None is the config of this one.
          rules: the mesh axes of the new decoder, or None.
          microbatches: of the new decoder's pipeline, or None.
          **options: all attention options of the new decoder; none of this decoder is kept.
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
      rules: the mesh axes that split weights and activations, or None, see :class:`Decoder`.
      microbatches: of a pipeline, see :class:`Decoder`.
      **options: attention options, see :class:`Decoder`.

    Returns:
      ``(graphdef, shapes)``: the graph definition, and a ``jax.ShapeDtypeStruct`` for each weight.
      ``nnx.merge(graphdef, params)`` is the model. Graph definitions that differ in options only
      take the same ``params``.
    """
    model = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), rules=rules, microbatches=microbatches, **options)
    )
    return nnx.split(model)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(
    graphdef: nnx.GraphDef,
    parts: Parts,
    weights: nnx.State,
    *arrays: jax.Array | None,
) -> jax.Array:
    """The decoder on every device's part of the arrays, which :meth:`Decoder.local` takes."""

    def local(weights: nnx.State, *arrays: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, weights).local(parts, *arrays)

    return jax.shard_map(
        local,
        mesh=parts.mesh,
        in_specs=(parts.tree(weights), *parts.of_arrays(arrays)),
        out_specs=P(parts.out_batch_axes or None, parts.token_axes or None),
        check_vma=parts.check_vma,
    )(weights, *arrays)


def _refuse_own_options(config: DecoderConfig, options: AttentionOptions) -> None:
    """Raises TypeError for options that the decoder sets itself, or the config of this one does."""
    for name in ("is_causal", "logits_soft_cap"):
        if name in options:
            raise TypeError(
                f"Decoder sets {name} itself: it is always causal, and the soft cap is "
                "DecoderConfig's"
            )
    windows = any(kind.window is not None for kind in config.layer_pattern)
    for name, given, field in (
        ("scale", config.attention_scale is not None, "attention_scale"),
        ("local_window_size", windows, "layer_pattern"),
    ):
        if given and name in options:
            raise TypeError(f"{name} is given, and DecoderConfig's {field} says it, too: give one")


def _kinds_of_a_stage(config: DecoderConfig, parts: Parts) -> list[tuple[LayerKind, Remat]]:
    """The kinds of the layers of one stage of the pipeline; all layers' where there is none.

    Returns:
      ``(kind, what it keeps)`` of each layer.

    Raises:
      NotImplementedError: stages differ. All devices run one program.
    """
    kinds, stages = config.layer_kinds, axes_size(parts.mesh, parts.stage_axis)
    each = len(kinds) // stages
    if any(kinds[stage * each : (stage + 1) * each] != kinds[:each] for stage in range(stages)):
        raise NotImplementedError(
            f"{len(kinds)} layers in {stages} stages: each stage must have layers of the same "
            "kinds in the same order, as all devices run one program; use a number of layers a "
            "stage that is a multiple of layer_pattern's length, or no stage axis"
        )
    some = None if config.remat_layers is None else config.remat_layers // stages
    return list(zip(kinds[:each], remat_of_layers(config.remat, some, each), strict=True))


def _with_rules(options: AttentionOptions, rules: ShardingRules) -> AttentionOptions:
    """The attention options with the mesh axes that the rules say."""
    check_rules(rules)
    said = _said_by(rules)
    for name in said:
        if name in options:
            raise ValueError(f"{name} is given beside rules: the rules say it; leave it out")
    return options | said  # pyrefly: ignore


def _said_by(rules: ShardingRules) -> dict[str, AxisNames]:
    """The attention options that the rules say."""
    return {
        "seq_axis": rules.seq,
        "batch_axis": rules.batch_axes or None,
        "tensor_axis": rules.tensor,
    }


def _check_stacked(stacked: nnx.State, parts: Parts) -> None:
    """Raises ValueError if a weight's first axis, which counts the layers, is split wrongly."""
    for path, weight in jax.tree_util.tree_leaves_with_path(stacked):
        spec = jax.typeof(weight).sharding.spec
        if set(flat_names(*spec[:1])) - set(flat_names(parts.stage_axis)):
            raise ValueError(
                f"layers{jax.tree_util.keystr(path)} of shape {weight.shape} is split as {spec} "
                "over Explicit mesh axes: the first axis counts the layers, which run one after "
                "the other; split another axis, like PartitionSpec(None, ...), or use Auto axes"
            )
