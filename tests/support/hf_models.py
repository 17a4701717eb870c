"""Small models of every family, as folders, with what transformers computes from them.

``tests/golden_models/NAME.npz`` has of each model the ``config.json`` that transformers wrote, the
names and shapes of its tensors, and some of its logits. Its weights are random numbers, which
:func:`random_weight` makes again. Of one model of each family it has, too, what transformers
generates. ``make_hf_models.py`` made the files.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent.parent / "golden_models"
# The longer row is that of models with linear attention.
VOCAB, LENGTH, LONG = 64, 600, 716
_LONG_ROW = np.random.default_rng(0).integers(0, VOCAB, LONG).astype(np.int32)
TOKENS = _LONG_ROW[:LENGTH]
# A packed row is two documents: the first SPLIT tokens, and the others.
SPLIT = 250
# Lengths of a batch of prompts, the number of tokens generated after each, and the steps whose
# logits are kept.
PROMPTS, GENERATED = (661, 600), 64
KEPT_STEPS = np.arange(0, GENERATED, 9)
# A batch of training is a row of this many tokens and a packed one of its two documents, the first
# TRAINED_SPLIT tokens and the others; the number of steps of plain gradient descent, and its rate.
TRAINED, TRAINED_SPLIT, STEPS, RATE = 101, 37, 4, 0.05
# The most probable token leads by this at least at every step, relative to the largest logit.
# Rounding moves logits by a twentieth of it at most, so that no other token can take its place.
MARGIN = 1e-3


def row(name: str) -> np.ndarray:
    """The row of a model."""
    keys = {"linear_conv_kernel_dim", "linear_attn_config"}
    return TOKENS if keys.isdisjoint(golden(name)["config"]) else _LONG_ROW


def kept(length: int) -> np.ndarray:
    """The tokens of a row of this length whose logits are kept."""
    return np.append(np.arange(13, length, 27), length - 1)


def kept_second(length: int) -> np.ndarray:
    """Those of the row's second document alone."""
    return np.append(np.arange(7, length - SPLIT, 27), length - SPLIT - 1)


def random_weight(name: str, shape: tuple[int, ...], differences: bool) -> np.ndarray:
    """The float32 weight of this name.

    ``differences``: whether scales of norms are differences from 1, as Gemma's are.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    weight = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        # Gated DeltaNet's own norm is like others in any model.
        weight = 0.3 * weight + (0 if differences and "linear_attn" not in name else 1)
    elif name.endswith("A_log"):
        # States that last from a few tokens to hundreds.
        weight = 1.5 * weight - 3.5
    elif "embed_tokens" in name or name.endswith(("bias", "sinks")):
        weight = 0.5 * weight
    else:
        # Large enough that attention is no mean of all keys, so that positions and windows tell.
        gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
        weight = gain * weight / np.sqrt(shape[-1])
    return weight.astype(np.float32)


def prompts(seeds: Iterable[int]) -> list[np.ndarray]:
    """The batch of prompts, each of a seed of its own."""
    return [
        np.random.default_rng(int(seed)).integers(0, VOCAB, length).astype(np.int32)
        for seed, length in zip(seeds, PROMPTS, strict=True)
    ]


@functools.cache
def golden(name: str) -> dict:
    """``config``, ``shapes``, and the logits ``row`` and ``second`` of a model.

    Where the model was trained: the ``losses`` of the steps. Where it has generated: ``seeds`` of
    the prompts, ``tokens [rows, GENERATED]``, the ``margins`` of the same shape by which each led,
    relative to the largest logit, and the ``step_logits [rows, steps kept, V]``.
    """
    with np.load(FOLDER / f"{name}.npz") as file:
        found = dict(file)
    texts = {key: json.loads(str(found.pop(key))) for key in ("config", "shapes")}
    return {**texts, **found}


def names() -> list[str]:
    """All models."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def tensors(name: str) -> dict[str, np.ndarray]:
    """All tensors of a model."""
    model = golden(name)
    differences = model["config"]["model_type"].startswith(("gemma", "qwen3_next", "qwen3_5"))
    return {
        tensor: random_weight(tensor, tuple(shape), differences)
        for tensor, shape in model["shapes"].items()
    }


def read_folder(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """All tensors of a folder, and its ``config.json``."""
    from safetensors.numpy import load_file

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found, json.loads((folder / "config.json").read_text())


def write_folder(name: str, folder: Path) -> Path:
    """Writes a model's folder, and returns it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden(name)["config"]))
    save_file(tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
