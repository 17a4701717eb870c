"""Makes ``tests/golden_models`` with transformers, and checks folders that burst_jax has saved.

No test imports this: it needs torch and transformers, in an environment of their own::

    python3 -m venv /tmp/peer
    /tmp/peer/bin/pip install torch transformers safetensors numpy    # torch for the CPU is enough
    /tmp/peer/bin/python tests/support/make_hf_models.py make [NAME ...]
    /tmp/peer/bin/python tests/support/make_hf_models.py generate [NAME ...]    # after make
    /tmp/peer/bin/python tests/support/make_hf_models.py check FOLDER    # has NAME.anything, ...
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import torch  # pyrefly: ignore (in an environment of its own)
import transformers  # pyrefly: ignore

SIZES = {
    "vocab_size": hf_models.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def rope(kind, theta=10000.0, **options):
    """``rope_parameters``."""
    return {"rope_type": kind, "rope_theta": theta, **options}


LLAMA3 = rope(
    "llama3",
    500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
YARN = rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=256)
GEMMA: dict = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 100}
GEMMA3_ROPES = {
    "full_attention": rope("linear", 1000000.0, factor=8.0),
    "sliding_attention": rope("default", 10000.0),
}

# Name to (family, options, whether config.json is written in the format before transformers 5).
CASES = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, True),
    "llama3": ("llama", {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}, False),
    "llama3_tied": (
        "llama",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        True,
    ),
    "llama_linear": ("llama", {"rope_parameters": rope("linear", factor=4.0)}, True),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": rope("dynamic", factor=2.0), "max_position_embeddings": 256},
        False,
    ),
    "llama_yarn": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}},
        False,
    ),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}, False),
    "mistral": ("mistral", {"sliding_window": 100, "rms_norm_eps": 1e-5}, True),
    "mistral_full": (
        "mistral",
        {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1},
        False,
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, True),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}, True),
    "qwen2_window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 1,
            "rope_parameters": rope("default", 1000000.0),
        },
        False,
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, False),
    "qwen3_bias": ("qwen3", {"head_dim": 16, "attention_bias": True}, True),
    "gemma2": ("gemma2", GEMMA | {"num_hidden_layers": 5, "tie_word_embeddings": True}, True),
    "gemma2_caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        False,
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 8, "tie_word_embeddings": True, "rope_parameters": GEMMA3_ROPES},
        True,
    ),
    "gemma3_types": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": GEMMA3_ROPES,
        },
        False,
    ),
    # A model of text and images, of which the language model is read.
    "gemma3_images": (
        "gemma3",
        {
            "text_config": {
                key: value for key, value in (SIZES | GEMMA).items() if "tie_word" not in key
            }
            | {"tie_word_embeddings": True, "rope_parameters": GEMMA3_ROPES},
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        False,
    ),
}

# One of each family, and of each kind of window and RoPE that generates in its own way. Tied
# embeddings generate one token again and again, so most have a head of their own.
GENERATING = (
    "llama3", "llama_dynamic", "mistral", "qwen2_window", "qwen3", "gemma2_caps", "gemma3_types",
)  # fmt: skip
# Prompts of so many seeds are tried.
SEEDS = 120


def old_format(config):
    """``config.json`` as transformers wrote it before version 5."""
    config = dict(config)
    ropes = config.pop("rope_parameters")
    full = dict(ropes.get("full_attention", ropes))
    config["rope_theta"] = full.pop("rope_theta")
    default = full.get("rope_type") == "default"
    if "full_attention" not in ropes:
        # The oldest files call it "type".
        full = {"type": full.pop("rope_type"), **full}
    config["rope_scaling"] = None if default else full
    if "full_attention" in ropes:
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")
    return config


def load(folder):
    """The folder's model, float32, with attention by its formula."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits(model):
    """Those that are kept: of the whole row, and of the second document alone."""
    with torch.no_grad():
        rows = [hf_models.TOKENS, hf_models.TOKENS[hf_models.SPLIT :]]
        row, second = (model(torch.tensor(x[None]).long()).logits[0].numpy() for x in rows)
    return {"row": row[hf_models.KEPT], "second": second[hf_models.KEPT_SECOND]}


def make(name):
    family, options, old = CASES[name]
    kind = transformers.CONFIG_MAPPING[family]
    sizes = {} if "text_config" in options else SIZES
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes | options))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        if old:
            config = old_format(config)
            path.write_text(json.dumps(config))
        from safetensors import safe_open

        with safe_open(Path(folder, "model.safetensors"), framework="numpy") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        np.savez_compressed(
            hf_models.FOLDER / f"{name}.npz",
            config=json.dumps(config, sort_keys=True),
            shapes=json.dumps(shapes),
        )
        hf_models.golden.cache_clear()
        hf_models.write_folder(name, Path(folder))
        found = logits(load(folder))
    np.savez_compressed(
        hf_models.FOLDER / f"{name}.npz",
        config=json.dumps(config, sort_keys=True),
        shapes=json.dumps(shapes),
        **found,
    )
    print(
        f"{name}: logits of {found['row'].std():.2f}, {sum(map(np.prod, shapes.values()))} weights"
    )


def generated(loaded, seeds):
    """What ``generate`` makes of the prompts of these seeds, all rows in one batch."""
    # A dynamic RoPE remembers the longest row that the model has seen.
    model = copy.deepcopy(loaded)
    prompts = hf_models.prompts(seeds)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [np.pad(prompt, (pad, 0)) for prompt, pad in zip(prompts, padding, strict=True)]
    mask = [np.arange(longest) >= pad for pad in padding]
    found = model.generate(
        torch.tensor(np.stack(ids)).long(),
        attention_mask=torch.tensor(np.stack(mask)).long(),
        max_new_tokens=hf_models.GENERATED,
        do_sample=False,
        # Random weights know no end of a text.
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(found.logits, 1).float().numpy()
    ordered = np.sort(logits, -1)
    return {
        "seeds": np.asarray(seeds),
        "tokens": found.sequences[:, longest:].numpy().astype(np.int32),
        "margins": (ordered[..., -1] - ordered[..., -2]) / np.abs(logits).max(-1),
        "step_logits": logits[:, hf_models.KEPT_STEPS],
    }


def kinds(tokens):
    """How many different tokens each row has."""
    return np.array([len(np.unique(row)) for row in tokens])


def generate(name):
    """Adds to a model's file what it generates after prompts that lead to no near tie.

    Of the prompts without one those are taken after which a row has the most different tokens.
    """
    path = hf_models.FOLDER / f"{name}.npz"
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(hf_models.write_folder(name, Path(folder)))
    scores = []
    for seed in range(SEEDS):
        found = generated(loaded, [seed] * len(hf_models.PROMPTS))
        clear = found["margins"].min(1) > hf_models.MARGIN
        scores.append(np.where(clear, kinds(found["tokens"]), 0))
    found = generated(loaded, np.argmax(scores, 0))
    if found["margins"].min() <= hf_models.MARGIN:
        raise RuntimeError(f"{name}: no prompts without a near tie")
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file) | found
    np.savez_compressed(path, **arrays)
    print(
        f"{name}: seeds {found['seeds']}, smallest margin {found['margins'].min():.1e}, "
        f"different tokens {kinds(found['tokens'])}"
    )


def check(folder):
    """Prints how far the logits of each model saved in ``folder`` are from the kept ones."""
    for path in sorted(Path(folder).iterdir()):
        name = path.name.split(".")[0]
        found, want = logits(load(path)), hf_models.golden(name)
        errors = [np.abs(found[k] - want[k]).max() / np.abs(want[k]).max() for k in found]
        print(f"{path.name}: relative errors {errors[0]:.1e}, {errors[1]:.1e}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "make":
        hf_models.FOLDER.mkdir(exist_ok=True)
        for name in arguments or CASES:
            make(name)
    elif command == "generate":
        for name in arguments or GENERATING:
            generate(name)
    else:
        check(*arguments)
