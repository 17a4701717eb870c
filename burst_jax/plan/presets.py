"""The decoders that ``python -m burst_jax.plan --model`` knows by name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from burst_jax.errors import did_you_mean
from burst_jax.layers.rope import Llama3Rope, Rope, YarnRope
from burst_jax.models import (
    DecoderConfig,
    DeltaNet,
    Experts,
    KimiDelta,
    Latent,
    LayerKind,
    MixtureOfExperts,
)

_SIZES = (
    "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size",
)  # fmt: skip
_LLAMA: dict[str, Any] = {"norm_epsilon": 1e-5, "qk_norm": False}
_LLAMA_3 = _LLAMA | {"rope_theta": 5e5}
_LLAMA_3_2 = {"rope": Llama3Rope(5e5, factor=32.0), "tie_embeddings": True}
_QWEN_2_5 = {"rope_theta": 1e6, "qkv_bias": True, "qk_norm": False}
_QWEN_3_MOE = {"rope_theta": 1e6, "experts": Experts(128, 8)}
_MIXTRAL = _LLAMA | {"rope_theta": 1e6, "experts": Experts(8, 2)}
_GPT_OSS = (
    _LLAMA
    | {
        "rope": YarnRope(1.5e5, factor=32.0, old_positions=4096, truncate=False),
        "layer_pattern": (LayerKind(window=128), LayerKind()),
        "experts": Experts(32, 4, router_bias=True, clamp=7.0),
        "attention_sinks": True,
    }
    | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
)
_QWEN_3_NEXT = {
    "rope": Rope(1e7, fraction=0.25),
    "norm_offset": 1.0,
    "attention_gate": True,
    "layer_pattern": (*[LayerKind(mixer="delta_net")] * 3, LayerKind()),
    "delta_net": DeltaNet(32, 16, 128, 128),
    "experts": Experts(512, 10, shared_dim=512, shared_gate=True),
}
_KDA = LayerKind(mixer="delta_net")
_KIMI_LINEAR = {
    "norm_epsilon": 1e-5,
    "qk_norm": False,
    # A dense layer, and a group of two layers of linear attention at the end.
    "layer_pattern": (
        LayerKind(mixer="delta_net", dense=True),
        *(_KDA, _KDA, LayerKind()),
        *(*[_KDA] * 3, LayerKind()) * 5,
        *(_KDA, _KDA, LayerKind()),
    ),
    "dense_dim": 9216,
    "latent": Latent(512, 64, 128),
    "delta_net": KimiDelta(32, 32, 128, 128),
    "experts": Experts(256, 8, score="sigmoid", choice_bias=True, scale=2.446, shared_dim=1024),
}
# Sizes, max_position_embeddings, and what differs from DecoderConfig's defaults.
SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "gpt-oss-20b": ((24, 2880, 64, 8, 64, 2880, 201088), 131072, _GPT_OSS),
    "kimi-linear-48b-a3b": ((27, 2304, 32, 32, 192, 1024, 163840), 1048576, _KIMI_LINEAR),
    "llama-3-8b": ((32, 4096, 32, 8, 128, 14336, 128256), 8192, _LLAMA_3),
    "llama-3-70b": ((80, 8192, 64, 8, 128, 28672, 128256), 8192, _LLAMA_3),
    "llama-3.1-8b": (
        (32, 4096, 32, 8, 128, 14336, 128256), 131072,
        _LLAMA | {"rope": Llama3Rope(5e5, factor=8.0)},
    ),
    "llama-3.2-1b": ((16, 2048, 32, 8, 64, 8192, 128256), 131072, _LLAMA | _LLAMA_3_2),
    "mistral-7b": ((32, 4096, 32, 8, 128, 14336, 32768), 32768, _LLAMA | {"rope_theta": 1e6}),
    "mixtral-8x7b": ((32, 4096, 32, 8, 128, 14336, 32000), 32768, _MIXTRAL),
    "qwen-2.5-7b": ((28, 3584, 28, 4, 128, 18944, 152064), 131072, _QWEN_2_5),
    "qwen-3-8b": ((36, 4096, 32, 8, 128, 12288, 151936), 40960, {"rope_theta": 1e6}),
    "qwen-3-30b-a3b": ((48, 2048, 32, 4, 128, 768, 151936), 40960, _QWEN_3_MOE),
    "qwen-3-next-80b-a3b": ((48, 2048, 16, 2, 256, 512, 151936), 262144, _QWEN_3_NEXT),
}  # fmt: skip


def config_of(name: str) -> DecoderConfig:
    """The config of a well-known decoder, with bfloat16 compute and float32 weights.

    Raises:
      ValueError: an unknown name.
    """
    if name not in SHAPES:
        raise ValueError(
            f"model is {name!r}: use one of {', '.join(SHAPES)}, or a folder"
            f"{did_you_mean(name, SHAPES)}"
        )
    sizes, _, variant = SHAPES[name]
    config: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True)) | variant
    if "experts" in config:
        config["feed_forward"] = MixtureOfExperts
    return DecoderConfig(**config, dtype=jnp.bfloat16)
