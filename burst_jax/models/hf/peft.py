"""Low-rank adapters as folders of the library peft.

peft keeps A and B as PyTorch keeps matrices, ``[outputs, inputs]``, for each layer::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [r, D]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [N H, r]
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from burst_jax.layers.low_rank import LORA_A, LORA_B
from burst_jax.models.config import DecoderConfig
from burst_jax.models.decoder import Decoder
from burst_jax.models.hf.families import FAMILIES, Family
from burst_jax.models.hf.files import TensorFiles
from burst_jax.models.hf.load import check_tensors, read_weight
from burst_jax.models.hf.save import in_order, write_folder
from burst_jax.models.hf.weights import Weight, flat, tree_of
from burst_jax.models.lora import abstract_like
from burst_jax.models.lora_config import PROJECTIONS, Lora
from burst_jax.parallel.mesh import mesh_with_devices

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# How A and B may have been drawn. Other ways draw them from W, and the adapter stands beside what
# is left of W without them: peft takes them away from W when it loads the adapter.
_BESIDE_WHOLE = (None, False, True, "gaussian", "eva", "orthogonal")
# Keys that say nothing about what an adapter computes, or are read here.
_KNOWN = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "revision"),
        *("base_model_name_or_path", "r", "lora_alpha", "target_modules", "exclude_modules"),
        # How it was drawn, and trained.
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("lora_dropout", "ensure_weight_tying"),
        # What others are about, that are off.
        *("layers_pattern", "megatron_core", "qalora_group_size"),
    )
)


def save_adapter(
    model: Decoder,
    folder: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> None:
    """Writes a decoder's low-rank adapters as peft does, without the other weights.

    ``peft.PeftModel.from_pretrained(model, folder)`` gives them to the model of transformers that
    the decoder was loaded from. The folder is written as :func:`burst_jax.models.save` writes one:
    all processes call this together, and it is there when it is complete.

    Args:
      model: a decoder with adapters.
      folder: a folder that does not exist yet, or is empty, and is no mount point.
      base: folder, or name on a hub, of the model without adapters, which peft's
        ``AutoPeftModelForCausalLM`` loads. None says none.
      dtype: of the tensors.

    Raises:
      FileExistsError: there is something in the folder.
      ImportError: the library safetensors is missing.
      NotImplementedError: ``base`` is a folder of a model of text and images, in which peft would
        give the adapters to the images' layers, too.
      OSError: the disk is full, for example.
      ValueError: the decoder has no adapters, or ``folder`` is a mount point.
    """
    lora, config = model.config.lora, model.config
    if lora is None:
        raise ValueError("model has no adapters: add_lora gives it some; save writes a whole model")
    check_base(config, base)
    arrays = flat(nnx.state(model, nnx.LoRAParam))
    alpha = float(lora.rank if lora.alpha is None else lora.alpha)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(PROJECTIONS[name] for name in lora.projections),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    plan = {TENSORS: list(in_order(_weights(arrays, config)))}
    write_folder(Path(folder), plan, arrays, jnp.dtype(dtype), {CONFIG: said})


def load_adapter(model: Decoder, folder: str | PathLike[str]) -> Decoder:
    """The decoder with the low-rank adapters of a folder that peft, or :func:`save_adapter`, wrote.

    The other weights are shared, not copied. Each process reads what its devices keep.

    Args:
      model: the decoder that the adapters were trained on, without adapters.
      folder: has ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: the library safetensors, or qwix, is missing.
      NotImplementedError: another kind of adapter than LoRA of one rank on the layers' projections.
      ValueError: the decoder has adapters already; tensors that are missing, left over, or of
        another shape than the decoder's; a damaged file.
    """
    folder = Path(folder)
    if model.config.lora is not None:
        raise ValueError(
            f"model has adapters already, {model.config.lora}: merge_lora adds them up"
        )
    given = _read_config(folder / CONFIG)
    files = TensorFiles(folder, single=TENSORS)
    targets = tuple(
        ours for ours, theirs in PROJECTIONS.items() if _any(f".{theirs}.lora_A.", files.names)
    )
    if not targets:
        raise ValueError(f"{folder / TENSORS} has no tensor of a projection: it is no LoRA of peft")
    lora = Lora(given["r"], float(given["lora_alpha"]), targets)
    graphdef, shapes = abstract_like(model, lora=lora)
    parts = nnx.merge(graphdef, shapes).parts(shapes)
    specs, mesh = flat(parts.tree(shapes)), mesh_with_devices(parts.mesh)
    adapters, _ = nnx.split_state(shapes, nnx.LoRAParam, ...)
    weights = _weights(flat(adapters), model.config)
    check_tensors(folder, files, weights, (), f"{CONFIG} and the model describe")
    values = {
        weight.path: read_weight(
            files, weight, NamedSharding(mesh, specs[weight.path]), np.dtype(np.float32)
        )
        for weight in weights
    }
    return nnx.merge(graphdef, tree_of(adapters, values), nnx.state(model))


def check_base(config: DecoderConfig, base: str | PathLike[str] | None) -> None:
    """Raises NotImplementedError if ``base`` is a folder of another kind of model than the decoder.

    A model of text and images is one: the decoder is its language model, and peft would find
    projections of the same names in what reads the images.
    """
    path = None if base is None else Path(base) / "config.json"
    if path is None or config.hub_config is None or not path.exists():
        return
    there, here = json.loads(path.read_text())["model_type"], _family(config).model_type
    if there != here:
        raise NotImplementedError(
            f"base is {base}, with model_type {there!r}, and the decoder is a {here!r}: peft would "
            "give its adapters to more than the language model; save the merged model"
        )


def _weights(arrays: Any, config: DecoderConfig) -> list[Weight]:
    """The adapters with their tensors' names; arrays or shapes by path."""
    names, weights = _family(config).names, []
    for path, array in arrays.items():
        stem = "base_model.model." + names[*path[:-1], "kernel"].removesuffix("weight")
        name = stem + {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}[path[-1]]
        layers = tuple(name.format(layer=i) for i in range(config.num_layers))
        weights.append(Weight(path, layers, True, tuple(array.shape[1:]), 1))
    return weights


def _family(config: DecoderConfig) -> Family:
    """The family of a decoder; any one, as they call projections the same, if it was not loaded."""
    if config.hub_config is None:
        return next(iter(FAMILIES.values()))
    return FAMILIES[json.loads(config.hub_config)["model_type"]]


def _read_config(path: Path) -> dict[str, Any]:
    """``adapter_config.json``, checked for what changes the computation and is not known here."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} lacks {CONFIG}: name a folder that peft, or save_adapter, has written"
        )
    try:
        given = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} is {given!r}: it must be a JSON object")
    kind = given.get("peft_type")
    if kind != "LORA":
        raise NotImplementedError(f"{path} has peft_type {kind!r}: there is 'LORA'")
    wrong = [
        f"{key} is {value!r}"
        for key, value in given.items()
        if key not in _KNOWN and value and (key, value) != ("bias", "none")
    ]
    drawn = given.get("init_lora_weights")
    if (drawn.lower() if isinstance(drawn, str) else drawn) not in _BESIDE_WHOLE:
        wrong.append(f"init_lora_weights is {drawn!r}")
    if wrong:
        raise NotImplementedError(
            f"{path}: {'; '.join(wrong)}. Adapters here are LoRA of one rank beside the layers' "
            "whole projections; merge others with peft's merge_and_unload, and load the model"
        )
    missing = [key for key in ("r", "lora_alpha") if given.get(key) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return given


def _any(part: str, names: Iterable[str]) -> bool:
    return any(part in name for name in names)
