"""A decoder language model whose attention is a ring: RMSNorm, RoPE, SwiGLU, GQA.

All layers' weights are stacked and run by one ``lax.scan``, each under ``jax.checkpoint``. The
ring's outputs are kept, so that the backward pass recomputes a layer's matrix products but never
communicates for its forward a second time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from burst_jax.flax_layer import BurstAttention
from burst_jax.norm import RMSNorm
from burst_jax.order import refuse_wrong_order
from burst_jax.ring import CHECKPOINT_NAMES
from burst_jax.rope import RopeTable, rope_table
from burst_jax.sharding import flat_names, gathered, lookup, sequence_axes, token_spec

Remat = Literal["none", "keep_attention", "full"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and dtypes of a :class:`Decoder`; checks itself.

    Attributes:
      vocab_size: number of token ids, V.
      num_layers: L.
      embed_dim: features of the residual stream, D.
      num_heads: query heads, N.
      num_kv_heads: key/value heads, K, a divisor of N.
      head_dim: H, even; N H need not equal D.
      mlp_dim: hidden features of SwiGLU.
      rope_theta: RoPE's base.
      logits_soft_cap: soft cap of the attention logits, or None.
      qk_norm: RMS norm of every query and key head.
      dtype: dtype of the computation and of the residual stream.
      param_dtype: dtype of the weights.
      remat: what a layer's backward pass recomputes. "none": nothing. "keep_attention": all but
        the ring, whose out and lse are kept. "full": all, the ring included.

    Raises:
      ValueError: sizes that do not fit together, an unknown remat.
    """

    vocab_size: int = 256
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_dim: int = 768
    rope_theta: float = 10000.0
    logits_soft_cap: float | None = None
    qk_norm: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: Remat = "keep_attention"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
        ):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, num_kv_heads {self.num_kv_heads}: num_heads must "
                "be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: RoPE rotates pairs, so it must be even")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta is {self.rope_theta}: it must be positive")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(
                f"logits_soft_cap is {self.logits_soft_cap}: it must be positive, or None"
            )
        for name in ("dtype", "param_dtype"):
            dtype = getattr(self, name)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"{name} is {dtype!r}: use a floating point dtype")
        if self.remat not in get_args(Remat):
            raise ValueError(
                f"remat is {self.remat!r}: use one of {', '.join(map(repr, get_args(Remat)))}"
            )

    @property
    def num_matmul_params(self) -> int:
        """Weights that multiply every token: all kernels, the output projection included."""
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.embed_dim * self.mlp_dim
        return self.num_layers * (attention + mlp) + self.embed_dim * self.vocab_size

    def train_flops_per_token(self, length: int) -> float:
        """Floating point operations per token of one forward and backward pass.

        6 per weight, and for causal attention ``6 N H length`` a layer: two products of
        ``2 N H length / 2`` forward, twice that backward. Recomputed work does not count.
        """
        attention = 6.0 * self.num_layers * self.num_heads * self.head_dim * length
        return 6.0 * self.num_matmul_params + attention


class SwiGLU(nnx.Module):
    """``(silu(x Wgate) * x Wup) Wdown`` (Shazeer 2020)."""

    def __init__(
        self, config: DecoderConfig, *, down_init: nnx.Initializer, rngs: nnx.Rngs
    ) -> None:
        def linear(features: int, out: int, init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(
                features,
                out,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.gate = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.up = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.down = linear(config.mlp_dim, config.embed_dim, down_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, **options: Any) -> None:
        # 2L outputs are added to the residual stream: scaled so that their sum has variance 1.
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
        self.mlp = SwiGLU(config, down_init=out_init, rngs=rngs)

    def __call__(
        self, x: jax.Array, rope: RopeTable, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.attention.attend(self.attention_norm(x), rope, segment_ids)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Token ids to final hidden states, tokens sharded over a mesh all the way.

    The output projection is separate (:meth:`unembed`), because a loss over long sequences applies
    it in chunks.

    Args:
      config: sizes and dtypes.
      rngs: for the initializers (stream "params").
      **options: keyword arguments of :func:`burst_attention` but is_causal and logits_soft_cap,
        which are set here: mesh, seq_axis, batch_axis, layout, implementation, ...

    Raises:
      TypeError: an unknown option, or one that is set here.
      ValueError: an option that the layer does not take.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, **options: Any) -> None:
        for name in ("is_causal", "logits_soft_cap"):
            if name in options:
                raise TypeError(
                    f"Decoder sets {name} itself: it is always causal, and the soft cap is "
                    "DecoderConfig's"
                )
        self.config = config
        self.options = tuple(sorted(options.items()))
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
        self.final_norm = RMSNorm(config.embed_dim, param_dtype=config.param_dtype)
        self.head = nnx.Linear(
            config.embed_dim,
            config.vocab_size,
            use_bias=False,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | np.ndarray,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Runs the layers.

        Args:
          tokens: int32 ``[B, T]`` in the order of the option ``layout``.
          positions: int32 ``[B, T]`` or ``[T]`` in that order (:func:`burst_jax.positions` makes
            it), never an ``arange`` unless the layout is contiguous.
          segment_ids: int32 ``[B, T]`` in that order, or None. 0 is padding; documents count from
            1.

        Returns:
          Hidden states after the final norm, ``[B, T, D]`` in ``config.dtype``. Those of padding
          mean nothing. A token id of V or more gives NaN, and so does a row whose positions are in
          another order than its tokens (:mod:`burst_jax.order`), like an ``arange``.

        Raises:
          ValueError: such positions, where their values are known: outside ``jit``, or in NumPy.
        """
        config = self.config
        options = dict(self.options)
        mesh = options.get("mesh")
        spec = token_spec(options.get("batch_axis"), sequence_axes(options), ndim=3)
        rope = rope_table(positions, config.head_dim, config.rope_theta)
        x = lookup(gathered(self.embedding[...]), tokens, mesh, spec).astype(config.dtype)
        graphdef, stacked = nnx.split(self.layers)
        _check_stacked(stacked)

        def layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, gathered(state))(x, rope, segment_ids), None

        x, _ = jax.lax.scan(_remat(layer, config.remat), x, stacked)
        x = gathered(self.final_norm)(x)
        return refuse_wrong_order(x, positions, segment_ids, options | {"is_causal": True})

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., V]``, float32, of hidden states ``[..., D]``."""
        return jnp.einsum(
            "...d,dv->...v",
            hidden,
            gathered(self.head.kernel[...]).astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )

    def with_attention(self, config: DecoderConfig | None = None, **options: Any) -> Decoder:
        """A decoder over these same weights with other attention options, and another dtype.

        The arrays are shared, not copied; put them on the other mesh's devices with
        ``jax.device_put`` if it has others.

        Args:
          config: None for this one's; it may differ in dtypes and remat, not in sizes.
          **options: all attention options of the new one (none is taken over).
        """
        config = self.config if config is None else config
        graphdef, _ = abstract_decoder(config, **options)
        return nnx.merge(graphdef, nnx.state(self))


def abstract_decoder(config: DecoderConfig, **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder without weights: ``(graphdef, shapes of the parameters)``.

    ``nnx.merge(graphdef, params)`` is the model. Two graphdefs with different options serve the
    same ``params``.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    return nnx.split(model)


def _check_stacked(stacked: Any) -> None:
    """Raises ValueError where the axis of the layers is split over Explicit mesh axes."""
    for path, weight in jax.tree_util.tree_leaves_with_path(stacked):
        spec = jax.typeof(weight).sharding.spec
        if flat_names(*spec[:1]):
            raise ValueError(
                f"layers{jax.tree_util.keystr(path)} of shape {weight.shape} is split as {spec} "
                "over Explicit mesh axes: the first axis counts the layers, which run one after "
                "the other; split another axis, like PartitionSpec(None, ...), or use Auto axes"
            )


def _remat(layer: Any, remat: str) -> Any:
    if remat == "none":
        return layer
    policy = None
    if remat == "keep_attention":
        policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    # Inside a scan nothing can be eliminated across iterations, so the barriers would only cost.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)
