"""One layer of a decoder: attention, feed-forward, and their norms."""

from __future__ import annotations

from typing import Unpack

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from burst_jax.attention_options import AttentionOptions
from burst_jax.flax.layer import BurstAttention
from burst_jax.flax.norm import RMSNorm
from burst_jax.flax.rope import RopeTable
from burst_jax.models.config import DecoderConfig
from burst_jax.models.feed_forward import SwiGLU
from burst_jax.models.remat import ATTENTION_SUM, LAYER_INPUT


class DecoderLayer(nnx.Module):
    """One layer: ``x += attention(norm(x)); x += mlp(norm(x))``.

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
        self.attention_norm = RMSNorm(config.embed_dim, param_dtype=config.param_dtype)
        self.attention = BurstAttention(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            qk_norm=config.qk_norm,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            out_kernel_init=out_init,
            rngs=rngs,
            logits_soft_cap=config.logits_soft_cap,
            is_causal=True,
            **options,
        )
        self.mlp_norm = RMSNorm(config.embed_dim, param_dtype=config.param_dtype)
        self.mlp = SwiGLU(
            config, down_init=out_init, hidden_axis=options.get("head_axis"), rngs=rngs
        )

    def __call__(
        self, x: jax.Array, rope: RopeTable, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = checkpoint_name(x, LAYER_INPUT)
        x = x + self.attention.attend(self.attention_norm(x), rope, segment_ids)
        x = checkpoint_name(x, ATTENTION_SUM)
        return x + self.mlp(self.mlp_norm(x))
