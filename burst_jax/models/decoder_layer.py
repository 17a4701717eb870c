"""One layer of a decoder: attention or linear attention, feed-forward, and their norms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.layers.gated_delta_net import GatedDeltaNet
from burst_jax.layers.latent_attention import LatentAttention
from burst_jax.layers.lora import init_adapters
from burst_jax.layers.nnx_layer import AttentionFn, BurstAttention
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.rope import RopeTable
from burst_jax.layouts.tables import DocumentTables
from burst_jax.models.config import DecoderConfig, Norms, Stack
from burst_jax.models.delta_net import OPTIONS
from burst_jax.models.remat import (
    ATTENTION_SUM,
    BEFORE_POST_NORM,
    LAYER_INPUT,
    Remat,
    keeps_mlp_products,
)

# (layer, x, segment ids) -> (out, aux).
DeltaNetFn = Callable[[GatedDeltaNet, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


class DecoderLayer(nnx.Module):
    """One layer: ``x += attention(norm(x)); x += mlp(norm(x))``.

    With the mixer "delta_net" attention is a :class:`burst_jax.GatedDeltaNet`, and with
    ``config.latent`` softmax attention a :class:`burst_jax.LatentAttention`. With the norms
    "both" of its kind it is ``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``, with
    "after" ``x += norm(attention(x)); x += norm(mlp(x))``.

    Args:
      config: sizes and dtypes.
      stack: of the layer's kind (:class:`burst_jax.models.LayerKind`).
      rngs: random numbers for the initializers (stream "params").
      **options: attention options, see :class:`burst_jax.models.Decoder`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stack: Stack,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ) -> None:
        # The residual stream is a sum of 2L outputs. This scale gives it variance 1.
        out_init = nnx.initializers.variance_scaling(
            1 / (2 * config.num_layers), "fan_in", "truncated_normal"
        )
        norms = config.norms_of(stack.mixer)

        def norm(*places: Norms) -> RMSNorm | None:
            return norm_of(config) if norms in places else None

        self.attention_norm = norm("before", "both")
        make_mixer = _delta_net if stack.mixer == "delta_net" else _attention
        self.attention: Any = make_mixer(config, out_init, rngs, options)
        self.post_attention_norm = norm("after", "both")
        self.mlp_norm = norm("before", "both")
        self.mlp: Any = config.feed_forward_of(stack)(
            config, out_init=out_init, hidden_axis=options.get("tensor_axis"), rngs=rngs
        )
        self.post_mlp_norm = norm("after", "both")
        if config.lora is not None:
            of_attention = config.mixer_sizes(stack.mixer)
            of_layer = config.projections(stack)
            adapted = [
                getattr(self.attention if name in of_attention else self.mlp, name)
                for name in config.adapted
                if name in of_layer
            ]
            init_adapters(adapted, config.lora, rngs)

    def with_blocks(self, attention: BurstAttention | GatedDeltaNet, mlp: Any) -> DecoderLayer:
        """A copy with other blocks, such as those that they return for a decoding step."""
        layer = nnx.merge(*nnx.split(self))
        layer.attention, layer.mlp = attention, mlp
        return layer

    def __call__(
        self,
        x: jax.Array,
        rope: RopeTable | None,
        segment_ids: jax.Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        attention_fn: AttentionFn | None = None,
        prefix_lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        document_tables: DocumentTables | None = None,
        *,
        delta_net_fn: DeltaNetFn | None = None,
        remat: Remat,
    ) -> tuple[tuple[jax.Array, Any], Any]:
        """Runs the layer on the residual stream ``[B, T, D]``.

        ``rope`` and ``local_window_size`` are those of the layer's kind, which linear attention
        does not read; ``attention_fn``, ``positions`` and ``document_tables`` those of
        :meth:`burst_jax.BurstAttention.attend`. ``delta_net_fn`` is called in place of
        :meth:`burst_jax.GatedDeltaNet.mix`, with the layer, its input and ``segment_ids``.

        Returns:
          ``((x, sums), aux)``: the residual stream after the layer, the sums of
          :meth:`burst_jax.models.FeedForward.with_sums`, and what ``attention_fn`` or
          ``delta_net_fn`` returned next to its output, None without one.
        """
        x = checkpoint_name(x, LAYER_INPUT)
        normed = x if self.attention_norm is None else self.attention_norm(x)
        if isinstance(self.attention, GatedDeltaNet):
            if delta_net_fn is None:
                attended, aux = self.attention.mix(normed, segment_ids, document_tables), None
            else:
                attended, aux = delta_net_fn(self.attention, normed, segment_ids)
        else:
            attended, aux = self.attention.attend(
                normed,
                rope,
                segment_ids,
                positions=positions,
                local_window_size=local_window_size,
                attention_fn=attention_fn,
                document_tables=document_tables,
                prefix_lengths=prefix_lengths,
            )
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(checkpoint_name(attended, BEFORE_POST_NORM))
        x = checkpoint_name(x + attended, ATTENTION_SUM)
        normed = x if self.mlp_norm is None else self.mlp_norm(x)
        update, sums = self.mlp.with_sums(
            normed, segment_ids, keeps_products=keeps_mlp_products(remat)
        )
        if self.post_mlp_norm is not None:
            update = self.post_mlp_norm(checkpoint_name(update, BEFORE_POST_NORM))
        return (x + update, sums), aux


def norm_of(config: DecoderConfig) -> RMSNorm:
    """A norm of ``embed_dim`` features."""
    return RMSNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        offset=config.norm_offset,
        param_dtype=config.param_dtype,
    )


def _attention(
    config: DecoderConfig, out_init: nnx.Initializer, rngs: nnx.Rngs, options: AttentionOptions
) -> BurstAttention:
    """Softmax attention, latent or not, with the decoder's options."""
    if config.attention_scale is not None:
        options["scale"] = config.attention_scale
    make: Any
    if (latent := config.latent) is not None:
        make = functools.partial(
            LatentAttention,
            value_head_dim=latent.value_head_dim,
            latent_dim=latent.dim,
            shared_dim=latent.shared_dim,
            latent_epsilon=latent.norm_epsilon,
        )
    else:
        make = functools.partial(
            BurstAttention,
            num_kv_heads=config.num_kv_heads,
            use_bias=config.qkv_bias,
            rope_theta=None,  # The decoder computes one table for all layers.
            qk_norm=config.qk_norm,
            norm_epsilon=config.norm_epsilon,
            norm_offset=config.norm_offset,
        )
    return make(
        config.embed_dim,
        config.num_heads,
        head_dim=config.head_dim,
        out_bias=config.out_bias,
        sinks=config.attention_sinks,
        output_gate=config.attention_gate,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        out_kernel_init=out_init,
        rngs=rngs,
        logits_soft_cap=config.logits_soft_cap,
        is_causal=True,
        **options,
    )


def _delta_net(
    config: DecoderConfig, out_init: nnx.Initializer, rngs: nnx.Rngs, options: AttentionOptions
) -> GatedDeltaNet:
    """Linear attention with those of the decoder's options that it has."""
    assert config.delta_net is not None
    known: Any = {name: options[name] for name in OPTIONS if name in options}
    own: dict[str, Any] = dataclasses.asdict(config.delta_net)
    if own["norm_epsilon"] is None:
        own["norm_epsilon"] = config.norm_epsilon
    return config.delta_net.layer(
        config.embed_dim,
        **own,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        out_kernel_init=out_init,
        rngs=rngs,
        **known,
    )
