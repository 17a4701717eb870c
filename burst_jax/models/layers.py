"""One layer of a decoder: attention, feed-forward, and their norms."""

from __future__ import annotations

from typing import Unpack

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.layers.low_rank import Linear
from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.rope import RopeTable
from burst_jax.models.config import DecoderConfig
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.models.lora_config import PROJECTIONS
from burst_jax.models.lora_layers import draw_adapters
from burst_jax.models.remat import (
    ATTENTION_SUM,
    BEFORE_POST_NORM,
    LAYER_INPUT,
    AttentionFn,
    Remat,
    keeps_mlp_products,
)


class DecoderLayer(nnx.Module):
    """One layer: ``x += attention(norm(x)); x += mlp(norm(x))``.

    With ``config.post_norms`` it is ``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``.

    Args:
      config: sizes and dtypes.
      rngs: random numbers for the initializers (stream "params").
      **options: attention options, see :class:`burst_jax.models.Decoder`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, **options: Unpack[AttentionOptions]
    ) -> None:
        # 2L outputs are added to the residual stream. This scale gives their sum variance 1.
        out_init = nnx.initializers.variance_scaling(
            1 / (2 * config.num_layers), "fan_in", "truncated_normal"
        )
        if config.attention_scale is not None:
            options["scale"] = config.attention_scale
        self.attention_norm = norm_of(config)
        self.attention = BurstAttention(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_bias=config.qkv_bias,
            out_bias=config.out_bias,
            # The decoder makes one table for all layers of a RoPE, and passes it to each.
            rope_theta=None,
            sinks=config.attention_sinks,
            qk_norm=config.qk_norm,
            norm_epsilon=config.norm_epsilon,
            norm_offset=config.norm_offset,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            out_kernel_init=out_init,
            rngs=rngs,
            logits_soft_cap=config.logits_soft_cap,
            is_causal=True,
            **options,
        )
        self.post_attention_norm = norm_of(config) if config.post_norms else None
        self.mlp_norm = norm_of(config)
        self.mlp = GatedMLP(
            config, down_init=out_init, hidden_axis=options.get("tensor_axis"), rngs=rngs
        )
        self.post_mlp_norm = norm_of(config) if config.post_norms else None
        if config.lora is not None:
            draw_adapters(self.projections(), config.lora, rngs)

    def projections(self) -> dict[str, Linear]:
        """The layer's projections by name, see :class:`burst_jax.models.Lora`."""
        attention = ("query", "key", "value", "out")
        return {
            name: getattr(self.attention if name in attention else self.mlp, name)
            for name in PROJECTIONS
        }

    def __call__(
        self,
        x: jax.Array,
        rope: RopeTable,
        segment_ids: jax.Array | None = None,
        window: int | None = None,
        attention_fn: AttentionFn | None = None,
        prefix_lengths: jax.Array | None = None,
        *,
        remat: Remat,
    ) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``.

        Args:
          x: the residual stream.
          rope: the table of the tokens' positions.
          segment_ids: int32 ``[B, T]``, or None.
          window: that of the layer's kind.
          attention_fn: see :meth:`burst_jax.BurstAttention.attend`.
          prefix_lengths: int32 ``[B]``, or None.
          remat: what this layer keeps for its backward pass.
        """
        x = checkpoint_name(x, LAYER_INPUT)
        size = None if window is None else (window - 1, 0)
        attended = self.attention.attend(
            self.attention_norm(x),
            rope,
            segment_ids,
            local_window_size=size,
            attention_fn=attention_fn,
            prefix_lengths=prefix_lengths,
        )
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(checkpoint_name(attended, BEFORE_POST_NORM))
        x = checkpoint_name(x + attended, ATTENTION_SUM)
        fed = self.mlp(self.mlp_norm(x), keeps_products=keeps_mlp_products(remat))
        if self.post_mlp_norm is not None:
            fed = self.post_mlp_norm(checkpoint_name(fed, BEFORE_POST_NORM))
        return x + fed


def norm_of(config: DecoderConfig) -> RMSNorm:
    """The norm of ``embed_dim`` features."""
    return RMSNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        offset=config.norm_offset,
        param_dtype=config.param_dtype,
    )
