"""A Llama checkpoint of random weights with a tokenizer, in the format of Hugging Face."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
from trained_tokenizers import trained_tokenizer

ROOT = Path(__file__).parents[2]
VOCABULARY = 1024
BOS, EOS, OTHER_EOS = "<|begin|>", "<|end|>", "<|turn|>"


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model; head dims that the GPU kernels support."""

    layers: int = 2
    features: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    hidden: int = 1024
    positions: int = 8192


SMALL = Size(layers=2, features=32, heads=4, kv_heads=2, head_dim=8, hidden=48, positions=1024)


def compile_quickly() -> None:
    """Lets XLA take its first choice for matrix products; before JAX is used in this process.

    Trying out others takes a minute per program, of the processes that share a GPU.
    """
    options = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}"


def attention_for(dtype: str) -> dict[str, Any]:
    """Options of ``load``: the kernels have no float32, which is what equal tokens need."""
    return {"implementation": "xla"} if dtype == "float32" else {}


def texts() -> list[Path]:
    """Texts that every checkout has: the documentation."""
    return sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def write_texts(folder: Path) -> Path:
    """Copies the texts into a folder, and returns it."""
    folder.mkdir(parents=True)
    for path in texts():
        (folder / f"{path.stem}.txt").write_text(path.read_text())
    return folder


def config_of(size: Size) -> dict[str, object]:
    """``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": VOCABULARY, "hidden_size": size.features, "num_hidden_layers": size.layers,
        "intermediate_size": size.hidden, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "hidden_act": "silu",
        "max_position_embeddings": size.positions, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02,
    }  # fmt: skip


def shapes_of(size: Size) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors."""
    queries, keys = (n * size.head_dim for n in (size.heads, size.kv_heads))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, size.features),
        "lm_head.weight": (VOCABULARY, size.features),
        "model.norm.weight": (size.features,),
    }
    per_layer = {
        "self_attn.q_proj": (queries, size.features),
        "self_attn.k_proj": (keys, size.features),
        "self_attn.v_proj": (keys, size.features),
        "self_attn.o_proj": (size.features, queries),
        "mlp.up_proj": (size.hidden, size.features),
        "mlp.gate_proj": (size.hidden, size.features),
        "mlp.down_proj": (size.features, size.hidden),
        "input_layernorm": (size.features,),
        "post_attention_layernorm": (size.features,),
    }
    for layer in range(size.layers):
        for name, shape in per_layer.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found


def write_model(folder: Path, size: Size) -> Path:
    """Writes config, weights, tokenizer, chat template and generation settings."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tensors = {
        name: np.asarray(hf_models.random_weight(name, shape, differences=False))
        for name, shape in shapes_of(size).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = trained_tokenizer(
        [path.read_text() for path in texts()], VOCABULARY, [BOS, EOS, OTHER_EOS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}<|turn|>{% endfor %}"
    for name, content in {
        "config.json": config_of(size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        },
        # Not what config.json has: a model of chats stops at the end of a turn, too.
        "generation_config.json": {
            "bos_token_id": 0, "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.6,
        },
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "chat_template.jinja").write_text(template)
    return folder
