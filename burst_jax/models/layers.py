"""The layers of a decoder: attention, a gated feed-forward part, and their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

import jax
from flax import nnx

from burst_jax.attention_options import AttentionOptions
from burst_jax.flax.layer import BurstAttention, project
from burst_jax.flax.norm import RMSNorm
from burst_jax.flax.rope import RopeTable
from burst_jax.models.config import DecoderConfig
from burst_jax.sharding import AxisNames

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """``(activation(x Wgate) * x Wup) Wdown``: SwiGLU or GeGLU (Shazeer 2020), with biases or none.

    Args:
      config: sizes and dtypes, the activation, and whether there are biases.
      down_init: initializer of ``Wdown``.
      hidden_axis: mesh axis, or axes, that split the hidden features, or None. Inside a
        ``shard_map`` each device has its features of the three matrices; the results are summed.
      rngs: random numbers for the initializers (stream "params").
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        down_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(features: int, out: int, init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(
                features,
                out,
                use_bias=config.mlp_bias,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.gate = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.up = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.down = linear(config.mlp_dim, config.embed_dim, down_init)
        self.activation = config.activation
        self.hidden_axis = hidden_axis

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        hidden = ACTIVATIONS[self.activation](self.gate(x)) * self.up(x)
        return project(self.down, hidden, summed_over=self.hidden_axis)


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
            config, down_init=out_init, hidden_axis=options.get("head_axis"), rngs=rngs
        )
        self.post_mlp_norm = norm_of(config) if config.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        rope: RopeTable,
        segment_ids: jax.Array | None = None,
        window: int | None = None,
    ) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``; ``window`` is that of the layer's kind."""
        size = None if window is None else (window - 1, 0)
        attended = self.attention.attend(
            self.attention_norm(x), rope, segment_ids, local_window_size=size
        )
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        x = x + attended
        fed = self.mlp(self.mlp_norm(x))
        return x + (fed if self.post_mlp_norm is None else self.post_mlp_norm(fed))


def norm_of(config: DecoderConfig) -> RMSNorm:
    """The norm of ``embed_dim`` features."""
    return RMSNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        offset=config.norm_offset,
        param_dtype=config.param_dtype,
    )
