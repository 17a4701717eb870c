"""The model of ``train_lm.py``: its config, and whether a mesh can shard it."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from burst_jax.data import ByteTokens, ChatTokens, TokenizerFile
from burst_jax.models import (
    DecoderConfig,
    DeltaNet,
    KimiDelta,
    LayerKind,
    Lora,
    check_trained_length,
    load_config,
)
from burst_jax.models.hf.peft import check_adapter

# The sizes of the linear-attention layers of each --mixer.
MIXERS: dict[str, type[DeltaNet] | None] = {
    "attention": None, "delta-net": DeltaNet, "kda": KimiDelta, "hybrid": DeltaNet,
    "hybrid-kda": KimiDelta,
}  # fmt: skip
HYBRIDS = ("hybrid", "hybrid-kda")
# Of hybrids, as in Qwen3-Next and Kimi Linear.
FULL_ATTENTION_INTERVAL = 4


def check_hybrid(args: argparse.Namespace) -> None:
    """Fills in ``--full-attention-interval``; raises ValueError for one without a hybrid."""
    if args.mixer in HYBRIDS and args.full_attention_interval is None:
        args.full_attention_interval = FULL_ATTENTION_INTERVAL
    elif args.mixer not in HYBRIDS and args.full_attention_interval is not None:
        raise ValueError(
            f"--full-attention-interval is {args.full_attention_interval}: it needs --mixer "
            f"{' or '.join(HYBRIDS)}"
        )


def check_split(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh) -> None:
    """Raises ValueError if the mesh cannot shard the model, in terms of the command line."""
    if config.delta_net is not None:
        check_delta_net(args, config.delta_net, mesh)
    # Of the command line; both mixers have the same number.
    heads = config.num_heads if config.delta_net is None else config.delta_net.num_heads
    kind = "query heads" if "attention" in config.mixers else "value heads"
    of_weights = ("fsdp", "outer", "inner", "seq", "heads", "stage")
    if args.weights == "replicated":
        of_weights = ()
    for option, what, size, axes in (
        ("--layers", "layers", config.num_layers, ("stage",)),
        ("--heads", kind, heads, ("heads", "tensor")),
        ("--mlp-dim", "hidden features", config.mlp_dim, ("tensor",)),
        # Without --model it is rounded up to a multiple of 128.
        (None, "token ids", config.vocab_size, ("tensor",)),
        (
            "--embed-dim",
            "features",
            config.embed_dim,
            of_weights,
        ),
    ):
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % count:
            split = " x ".join(
                f"{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape[axis] > 1
            )
            remedy = "use another --mesh"
            if option is not None and args.model is None:
                remedy += f", or {option} {-(-size // count) * count}"
            raise ValueError(
                f"{_size(args, option, size, what)}: --mesh shards them over {split}, but {count} "
                f"does not divide {size}; {remedy}"
            )
    if "attention" not in config.mixers:
        return
    heads = config.num_kv_heads
    for axis in ("tensor", "heads"):
        size = mesh.shape[axis]
        if heads % size and size % heads:
            per_device = " on each device" * (axis == "heads" and mesh.shape["tensor"] > 1)
            raise ValueError(
                f"{_size(args, '--kv-heads', heads, 'key/value heads')}{per_device}: --mesh has "
                f"{axis}={size}, and one of the two numbers must divide the other; use another "
                "--mesh" + ", or other --kv-heads" * (args.model is None)
            )
        heads = max(1, heads // size)


def check_delta_net(args: argparse.Namespace, sizes: DeltaNet, mesh: Mesh) -> None:
    """Raises ValueError if the mesh cannot shard linear-attention layers."""
    if mesh.shape["heads"] > 1:
        raise ValueError(
            f"--mesh has heads={mesh.shape['heads']}, over which softmax attention alone exchanges "
            f"heads: with --mixer {args.mixer} use seq or tensor"
        )
    if sizes.num_key_heads % (count := mesh.shape["tensor"]):
        raise ValueError(
            f"--kv-heads is {sizes.num_key_heads}: --mesh has tensor={count}, which shards the key "
            f"heads of --mixer {args.mixer}; use a multiple of {count}, or another --mesh"
        )


def _size(args: argparse.Namespace, option: str | None, size: int, what: str) -> str:
    """A size of the model, by the option that defines it."""
    if args.model is not None:
        return f"--model has {size} {what}"
    return f"the model has {size} {what}" if option is None else f"{option} is {size}"


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options for loading ``--model``: trained weights are float32, frozen ones ``--dtype``."""
    return {
        "dtype": jnp.dtype(args.dtype),
        "param_dtype": jnp.dtype("float32" if args.lora_rank is None else args.dtype),
        "remat": args.remat,
        "remat_layers": args.remat_layers,
        "mlp_chunks": args.mlp_chunks,
        "ignore": args.ignore,
    }


def make_lora(args: argparse.Namespace) -> Lora | None:
    """The LoRA configuration, or None."""
    if args.lora_rank is None:
        return None
    return Lora(args.lora_rank, args.lora_alpha, args.lora_targets or ".*")


def make_config(
    args: argparse.Namespace, tokens: ByteTokens | TokenizerFile | ChatTokens | None
) -> DecoderConfig:
    """The model's config; raises ValueError for inconsistent sizes or no vocabulary size."""
    if args.model is not None:
        config = load_config(args.model, **model_options(args))
        check_trained_length(config, "--seq-len", args.seq_len)
        config = dataclasses.replace(config, lora=make_lora(args))
        if args.lora_export == "adapter":
            check_adapter(config, args.model)
        return config
    mlp_dim = args.mlp_dim
    if mlp_dim is None:
        mlp_dim = -(-args.embed_dim * 8 // (3 * 64)) * 64
    vocabulary = args.vocab_size
    if vocabulary is None:
        if tokens is None:
            raise ValueError("--vocab-size is missing: --data holds tokens without a tokenizer")
        vocabulary = tokens.vocab_size
    elif tokens is not None and vocabulary < tokens.vocab_size:
        raise ValueError(
            f"--vocab-size is {vocabulary}: the tokenizer makes ids up to {tokens.vocab_size - 1}; "
            f"use {tokens.vocab_size} or more, or leave it out"
        )
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads is {args.heads}, --kv-heads {args.kv_heads}: use a multiple of --kv-heads"
        )
    linear, is_hybrid = MIXERS[args.mixer], args.mixer in HYBRIDS
    if args.head_dim % 2 and (linear is None or is_hybrid):
        raise ValueError(
            f"--head-dim is {args.head_dim}: RoPE rotates pairs of features, so it must be even"
        )
    heads, kv_heads, size = args.heads, args.kv_heads, args.head_dim
    mixer: dict[str, Any] = {}
    if linear is None or is_hybrid:
        mixer |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size}
    if linear is not None:
        mixer["delta_net"] = linear(heads, kv_heads, size, size)
    if is_hybrid:
        interval = args.full_attention_interval
        if not 2 <= interval <= args.layers:
            raise ValueError(
                f"--full-attention-interval is {interval}, --layers {args.layers}: every "
                f"{interval}th layer is softmax attention, the others linear; use 2 or more, and "
                "at least as many layers"
            )
        other = LayerKind(mixer="delta_net")
        mixer["layer_pattern"] = (*[other] * (interval - 1), LayerKind())
    return DecoderConfig(
        # A multiple of 128, so that common tensor axes divide it.
        vocab_size=-(-vocabulary // 128) * 128,
        num_layers=args.layers,
        embed_dim=args.embed_dim,
        **mixer,
        mlp_dim=mlp_dim,
        dtype=jnp.dtype(args.dtype),
        remat=args.remat,
        remat_layers=args.remat_layers,
        mlp_chunks=args.mlp_chunks,
    )
