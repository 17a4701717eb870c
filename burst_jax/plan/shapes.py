"""Sizes of well-known decoders, by the names that ``python -m burst_jax.plan --model`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from burst_jax.models.config import DecoderConfig

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 500_000.0,
    "norm_epsilon": 1e-5, "qk_norm": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3
    | {"num_layers": 32, "embed_dim": 4096, "num_heads": 32, "mlp_dim": 14336},
    "llama-3-70b": _LLAMA_3
    | {"num_layers": 80, "embed_dim": 8192, "num_heads": 64, "mlp_dim": 28672},
    "llama-3.2-1b": _LLAMA_3
    | {
        "num_layers": 16, "embed_dim": 2048, "num_heads": 32, "head_dim": 64, "mlp_dim": 8192,
        "tie_embeddings": True,
    },
    "mistral-7b": {
        "vocab_size": 32768, "num_layers": 32, "embed_dim": 4096, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "mlp_dim": 14336, "rope_theta": 1_000_000.0,
        "norm_epsilon": 1e-5, "qk_norm": False,
    },
    "qwen-2.5-7b": {
        "vocab_size": 152064, "num_layers": 28, "embed_dim": 3584, "num_heads": 28,
        "num_kv_heads": 4, "head_dim": 128, "mlp_dim": 18944, "rope_theta": 1_000_000.0,
        "qkv_bias": True, "qk_norm": False,
    },
    "qwen-3-8b": {
        "vocab_size": 151936, "num_layers": 36, "embed_dim": 4096, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "mlp_dim": 12288, "rope_theta": 1_000_000.0,
    },
}  # fmt: skip


def config_of(name: str) -> DecoderConfig:
    """The config of a decoder of this name, computed in bfloat16, with weights in float32.

    Raises:
      ValueError: no decoder of this name is known.
    """
    from burst_jax.models.config import DecoderConfig

    if name not in SHAPES:
        raise ValueError(f"model is {name!r}: use one of {', '.join(SHAPES)}, or a folder")
    return DecoderConfig(**SHAPES[name], dtype=jnp.bfloat16)
