"""Sizes and dtypes of a decoder."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

Remat = Literal["none", "keep_attention", "full"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and dtypes of a :class:`Decoder`.

    Attributes:
      vocab_size: number of token ids, V.
      num_layers: number of layers, L.
      embed_dim: number of features of the residual stream, D.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N.
      head_dim: number of features of a head, H, even; N H need not equal D.
      mlp_dim: number of hidden features of SwiGLU.
      rope_theta: RoPE's base.
      logits_soft_cap: soft cap of the attention logits, or None.
      qk_norm: whether every query and key head is RMS-normalised.
      dtype: floating dtype of the computation and of the residual stream.
      param_dtype: floating dtype of the weights.
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
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
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
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
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
            try:
                floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
            except TypeError:  # NumPy knows no dtype of this name.
                floating = False
            if not floating:
                raise ValueError(f"{name} is {dtype!r}: use a floating point dtype")
        if self.remat not in get_args(Remat):
            raise ValueError(
                f"remat is {self.remat!r}: use one of {', '.join(map(repr, get_args(Remat)))}"
            )

    @property
    def num_matmul_params(self) -> int:
        """Number of weights that multiply every token, the output projection included."""
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.embed_dim * self.mlp_dim
        return self.num_layers * (attention + mlp) + self.embed_dim * self.vocab_size

    def train_flops_per_token(self, length: int) -> float:
        """Floating point operations per token of one forward and backward pass.

        Each weight takes 6: a multiplication and an addition forward, twice that backward. Causal
        attention takes ``6 N H length`` a layer: two products of ``2 N H length / 2`` forward,
        twice that backward. Recomputed work does not count.

        Args:
          length: number of tokens in a sequence.
        """
        attention = 6.0 * self.num_layers * self.num_heads * self.head_dim * length
        return 6.0 * self.num_matmul_params + attention
