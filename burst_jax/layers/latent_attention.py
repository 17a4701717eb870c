"""An nnx attention layer whose keys and values are projections of a small latent vector (MLA)."""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.errors import check_integer, check_positive
from burst_jax.layers.attention_fn import check_options
from burst_jax.layers.nnx_layer import KERNEL_INIT, REJECTED, BurstAttention
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.projection import project


class LatentAttention(BurstAttention):
    """Multi-head latent attention (MLA) without RoPE, the softmax attention of Kimi Linear.

    ::

        q = x Wq                                   # [B,T,N,H]
        c, s = split(x Wc)                         # [B,T,R] [B,T,S]
        k = concat(norm(c) Wk, s)                  # [B,T,N,H-S] and [B,T,S], shared by all heads
        v = norm(c) Wv                             # [B,T,N,Hv]
        out = burst_attention(q, k, v, **options) Wo

    B batch, T length, D features, N heads, H head dim of queries and keys, Hv head dim of values,
    R features of the latent vector, S features of the part of a key that all heads share (DeepSeek
    V2, arXiv 2405.04434, section 2.1; there these features have RoPE). ``norm`` is an RMS norm.

    The projections are ``query``, ``latent`` (Wc), ``key`` (Wk), ``value`` (Wv) and ``out``, and
    ``latent_norm`` the norm. The ring sends keys and values of all heads. Along ``tensor_axis`` a
    device has the weights of its own heads, and all of ``latent`` and ``latent_norm``. Methods, and
    whatever is not an argument here, are those of :class:`burst_jax.BurstAttention`.

    Args:
      in_features: number of features of the input, D.
      num_heads: number of heads, N.
      head_dim: number of features of a query and key head, H.
      value_head_dim: number of features of a value head, Hv.
      latent_dim: number of features of the latent vector, R.
      shared_dim: number of features of a key that all heads share, S, less than H; 0 is none.
      latent_epsilon: epsilon of the latent vector's norm.
      output_gate: whether the output has a gate, see :class:`burst_jax.BurstAttention`.
      sinks: whether each head's softmax has one more logit, see there.
      out_bias: whether the output projection has a bias.
      dtype: floating dtype of the computation; None promotes the dtypes of input and weights.
      param_dtype: floating dtype of the weights.
      kernel_init: initializer of all kernels but the output's.
      out_kernel_init: initializer of the output kernel; None is ``kernel_init``.
      rngs: random numbers for the initializers (stream "params").
      **options: keyword arguments of :func:`burst_attention`, see
        :class:`burst_jax.BurstAttention`.

    Raises:
      TypeError: an unknown option.
      ValueError: sizes that do not fit together, or an option that the layer does not accept.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int,
        value_head_dim: int,
        latent_dim: int,
        shared_dim: int,
        latent_epsilon: float = 1e-6,
        output_gate: bool = False,
        sinks: bool = False,
        out_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ) -> None:
        own = inspect.signature(LatentAttention.__init__).parameters
        check_options("LatentAttention", options, REJECTED, own)
        check_latent_sizes(head_dim, value_head_dim, latent_dim, shared_dim)
        check_positive("latent_epsilon", latent_epsilon)
        # Before the projections, which _add_key_and_value adds.
        self.latent_dim, self.shared_dim = latent_dim, shared_dim
        super().__init__(
            in_features,
            num_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            out_bias=out_bias,
            rope_theta=None,
            sinks=sinks,
            output_gate=output_gate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
            **options,
        )
        self.latent_norm = RMSNorm(latent_dim, epsilon=latent_epsilon, param_dtype=param_dtype)

    def with_projections(
        self, *, latent: nnx.Module | None = None, **projections: Any
    ) -> LatentAttention:
        """See :class:`burst_jax.BurstAttention`; ``latent`` has no heads, ``[B, T, R + S]``."""
        layer: Any = super().with_projections(**projections)
        if latent is not None:
            layer.latent = latent
        return layer

    def _add_key_and_value(
        self, linear: Any, in_features: int, num_kv_heads: int, head_dim: int, value_head_dim: int
    ) -> None:
        self.latent = linear(in_features, self.latent_dim + self.shared_dim)
        self.key = linear(self.latent_dim, (num_kv_heads, head_dim - self.shared_dim))
        self.value = linear(self.latent_dim, (num_kv_heads, value_head_dim))

    def _key_and_value(
        self, x: jax.Array, heads: tuple[jax.Array, int] | None
    ) -> tuple[jax.Array, jax.Array]:
        compressed = project(self.latent, x)
        latent = self.latent_norm(compressed[..., : self.latent_dim])
        own, value = super()._key_and_value(latent, heads)
        shared = compressed[..., None, self.latent_dim :]
        shared = jnp.broadcast_to(shared, (*own.shape[:-1], self.shared_dim))
        return jnp.concatenate([own, shared], -1), value


def check_latent_sizes(
    head_dim: int, value_head_dim: int, latent_dim: int, shared_dim: int
) -> None:
    """Raises ValueError for sizes of :class:`LatentAttention` that do not fit together."""
    sizes = {
        "head_dim": head_dim, "value_head_dim": value_head_dim, "latent_dim": latent_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        check_integer(name, size, 1, 2**31 - 1)
    check_integer("shared_dim", shared_dim, 0, 2**31 - 1)
    if shared_dim >= head_dim:
        raise ValueError(
            f"shared_dim is {shared_dim}, head_dim {head_dim}: a key has the shared features among "
            "its own; use a larger head_dim, or fewer shared features"
        )
