"""Low-rank adapters as PEFT adapters, the format of the library peft.

It stores A and B as ``[outputs, inputs]``, for each layer::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [r, D]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [N H, r]

Several projections that are one in transformers, like the query projection and its gate in
Qwen3-Next, have adapters of their own here, and one in peft. Its ranks are those of all of them,
one after the other, and B is zero where an output is not that of a rank's projection::

    q_proj.lora_A.weight  [2 r, D]       A of the queries, A of the gate
    q_proj.lora_B.weight  [2 N H, 2 r]   per head [B of its query, 0], [0, B of its gate]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from burst_jax.errors import check_integer, check_positive, first_of, printable, shown
from burst_jax.json_files import read_object
from burst_jax.layers.lora import LORA_A, LORA_B, PROJECTIONS, ROUTER, Lora
from burst_jax.models.config import MAX_SIZE, DecoderConfig
from burst_jax.models.decoder import Decoder
from burst_jax.models.hf.config import config_json, loaded_from
from burst_jax.models.hf.families import FAMILIES
from burst_jax.models.hf.family import LAYER, Family, Fused, Shaped
from burst_jax.models.hf.files import TensorFiles
from burst_jax.models.hf.load import check_tensors, read_weight
from burst_jax.models.hf.save import in_order, write_folder
from burst_jax.models.hf.tensors import (
    Inputs,
    Outputs,
    Weight,
    layers_of_stacks,
    tensor_shapes,
    weights_at,
)
from burst_jax.models.lora import abstract_like, reject_adapters
from burst_jax.models.weights import flat_weights, with_weights
from burst_jax.parallel.mesh import mesh_with_devices

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# Supported initializers of A and B. Others derive them from W, and peft subtracts the initial
# adapter from W when it loads it.
_INITIALIZERS = (None, False, True, "gaussian", "eva", "orthogonal")
# Key of the metadata of a file in which each part of a fused projection has ranks of its own: the
# projections with adapters. peft writes a file without it.
_PARTS = "burst_jax.projections"
# The remedy for adapters that have more than those of the layers' projections.
_MERGE = "merge others with peft's merge_and_unload, and load the model that it returns, saved"
# Keys without effect on the computation, or read here.
_KNOWN = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "revision"),
        *("base_model_name_or_path", "r", "lora_alpha", "target_modules", "exclude_modules"),
        # Initialization and training.
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("lora_dropout", "ensure_weight_tying", "use_rslora"),
        # Parameters of features that are off.
        *("layers_pattern", "megatron_core", "qalora_group_size"),
        # Compared with those of fused projections.
        *("rank_pattern", "alpha_pattern"),
    )
)
# The names in transformers of the projections with adapters, by their paths.
Adapted = Mapping[tuple[str, ...], str | Fused | Shaped]


def save_adapter(
    model: Decoder,
    folder: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> None:
    """Saves a decoder's low-rank adapters as a PEFT adapter, without the other weights.

    ``peft.PeftModel.from_pretrained(model, folder)`` adds them to the transformers model that the
    decoder was loaded from. All processes call this together, and the folder appears when complete,
    as in :func:`burst_jax.models.save`. Projections that are one in transformers, like the gated
    query projection of Qwen3-Next, have one adapter there, whose rank is the sum of theirs, with
    the same scale (``rank_pattern`` and ``alpha_pattern``).

    Args:
      model: a decoder with adapters.
      folder: a folder that does not exist, or is empty, and is not a mount point.
      base: path or Hub name of the base model, for peft's ``AutoPeftModelForCausalLM``; None leaves
        it out.
      dtype: of the tensors. Default: float32.

    Raises:
      FileExistsError: the folder is not empty.
      ImportError: the library safetensors is missing.
      NotImplementedError: ``base`` is a model of text and images, to whose vision layers peft would
        add the adapters, too; or an expert mixture's router has an adapter.
      OSError: for example, the disk is full.
      ValueError: the decoder has no adapters, or ``folder`` is a mount point.
    """
    lora, config = model.config.lora, model.config
    if lora is None:
        raise ValueError("model has no adapters: add some with add_lora; save writes a whole model")
    family, adapted = _checked(config, base)
    arrays = flat_weights(nnx.state(model, nnx.LoRAParam))
    ranks, alphas = _patterns(adapted, family, lora)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": _number(_alpha(lora)),
        "target_modules": sorted(
            {_module(kernel, family).rsplit(".", 1)[-1] for kernel in adapted.values()}
        ),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": lora.rank_stabilized,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": ranks,
        "alpha_pattern": {module: _number(alpha) for module, alpha in alphas.items()},
    }
    fused = any(isinstance(kernel, Fused) for kernel in adapted.values())
    metadata = {_PARTS: ",".join(config.adapted)} if fused else {}
    weights = _weights(arrays, model, family, _own_ranks(adapted, family, lora.rank))
    files = {TENSORS: list(in_order(weights))}
    texts = {CONFIG: written}
    write_folder(Path(folder), files, arrays, jnp.dtype(dtype), texts, metadata)


def load_adapter(model: Decoder, folder: str | PathLike[str]) -> Decoder:
    """Adds the low-rank adapters of a PEFT adapter to a decoder.

    The other weights are shared, not copied. Each process reads the slices of its devices. An
    adapter of a projection that is several here is one of each of these: with all of its A, and
    their rows of its B, unless :func:`save_adapter` wrote it, which keeps them apart.

    Args:
      model: the decoder that the adapters were trained on, without adapters.
      folder: has ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
      A new decoder.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: the library safetensors, or qwix, is missing.
      NotImplementedError: an adapter other than LoRA, rank-stabilized or not, of one rank on the
        layers' projections.
      ValueError: the decoder already has adapters; missing, unexpected or wrongly shaped tensors; a
        damaged file.
    """
    folder = Path(folder)
    reject_adapters(model)
    given = _read_config(folder / CONFIG)
    files, family = TensorFiles(folder, single=TENSORS), _family(model.config)
    keeps_parts = _PARTS in files.metadata
    if keeps_parts:
        names = files.metadata[_PARTS].split(",")
        if not PROJECTIONS.keys() >= {*names}:
            raise ValueError(
                f"{printable(folder / TENSORS)} has {_PARTS} {shown(names)} in its metadata: they "
                f"must be among {', '.join(PROJECTIONS)}; save the adapter again"
            )
        targets = tuple(ours for ours in PROJECTIONS if ours in names)
    else:
        _check_patterns(folder / CONFIG, given, ({}, {}))
        targets = _targets(files, model.config, family)
    if not targets:
        raise ValueError(f"{folder / TENSORS} has no tensor of a projection: not a LoRA adapter")
    stabilized = bool(given.get("use_rslora"))
    lora = Lora(given["r"], float(given["lora_alpha"]), targets, stabilized)
    adapted = _adapted(dataclasses.replace(model.config, lora=lora), family)
    if keeps_parts:
        _check_patterns(folder / CONFIG, given, _patterns(adapted, family, lora))
    graphdef, shapes = abstract_like(model, lora=lora)
    shardings = nnx.merge(graphdef, shapes).shardings(shapes)
    specs = flat_weights(shardings.weight_specs(shapes))
    mesh = mesh_with_devices(shardings.mesh)
    adapters, _ = nnx.split_state(shapes, nnx.LoRAParam, ...)
    ranks = dict.fromkeys(adapted, Inputs(0, lora.rank))
    if keeps_parts:
        ranks = _own_ranks(adapted, family, lora.rank)
    weights = _weights(flat_weights(adapters), model, family, ranks)
    check_tensors(
        folder, files, tensor_shapes(weights), (), f"{CONFIG} and the model describe", _MERGE
    )
    values = {
        weight.path: read_weight(
            files, weight, NamedSharding(mesh, specs[weight.path]), np.dtype(np.float32)
        )
        for weight in weights
    }
    return nnx.merge(graphdef, with_weights(adapters, values), nnx.state(model))


def check_adapter(config: DecoderConfig, base: str | PathLike[str] | None) -> None:
    """Raises NotImplementedError if peft cannot express the adapters of a decoder.

    Those of a router, and those of a ``base`` that is a model of text and images: peft would also
    match the vision layers' projections.
    """
    _checked(config, base)


def _checked(config: DecoderConfig, base: str | PathLike[str] | None) -> tuple[Family, Adapted]:
    """The family and the adapted projections of a decoder; raises as :func:`check_adapter`."""
    if ROUTER in config.adapted:
        raise NotImplementedError(
            "model has an adapter of the router, which peft does not support: use targets without "
            "it, or save the merged model"
        )
    family = _family(config)
    adapted = _adapted(config, family)
    path = None if base is None else Path(base) / "config.json"
    if path is None or config.hf_config is None or not path.exists():
        return family, adapted
    there, here = read_object(path).get("model_type"), family.model_type
    if there != here:
        raise NotImplementedError(
            f"base is {printable(base)}, with model_type {shown(there)}, and the decoder is a "
            f"{here!r}: peft would give its adapters to more than the language model; save the "
            "merged model"
        )
    return family, adapted


def _adapted(config: DecoderConfig, family: Family) -> Adapted:
    """The projections with adapters; the parts of a fused one in the order of its rows."""
    stacks = layers_of_stacks(config)
    return {
        path[:-1]: kernel
        for path, kernel in family.names.items()
        if path[0] in stacks and path[-1] == "kernel" and path[-2] in config.adapted
    }


def _parts(adapted: Adapted, family: Family) -> dict[str, list[tuple[str, ...]]]:
    """The paths of the adapted projections that are one in transformers, by its name there."""
    parts: dict[str, list[tuple[str, ...]]] = {}
    for path, kernel in adapted.items():
        # A projection of both stacks has one name, and a tensor in each of their layers.
        parts.setdefault(f"{path[0]} {_module(kernel, family)}", []).append(path)
    return parts


def _own_ranks(adapted: Adapted, family: Family, rank: int) -> dict[tuple[str, ...], Inputs]:
    """Which of the ranks of peft's adapter are those of each projection."""
    return {
        path: Inputs(i * rank, len(paths) * rank)
        for paths in _parts(adapted, family).values()
        for i, path in enumerate(paths)
    }


def _patterns(
    adapted: Adapted, family: Family, lora: Lora
) -> tuple[dict[str, int], dict[str, float]]:
    """peft's rank and alpha of modules whose rank is not ``lora.rank``; their scale is the same."""
    parts = _parts(adapted, family).values()
    counts = {_module(adapted[paths[0]], family): len(paths) for paths in parts}
    counts = {module: count for module, count in counts.items() if count > 1}
    ranks = {module: count * lora.rank for module, count in counts.items()}
    grown = {n: math.sqrt(n) if lora.rank_stabilized else n for n in counts.values()}
    return ranks, {module: grown[count] * _alpha(lora) for module, count in counts.items()}


def _alpha(lora: Lora) -> float:
    return float(lora.divisor if lora.alpha is None else lora.alpha)


def _number(alpha: float) -> float:
    """An int if it is one, as peft's users write it."""
    return int(alpha) if alpha == int(alpha) else alpha


def _check_patterns(
    path: Path, given: Mapping[str, Any], wanted: tuple[dict[str, int], dict[str, float]]
) -> None:
    """Raises NotImplementedError for ranks and alphas other than those of fused projections."""
    for name, own in zip(("rank_pattern", "alpha_pattern"), wanted, strict=True):
        found = given.get(name) or {}
        if (
            not isinstance(found, dict)
            or found.keys() != own.keys()
            or not all(
                isinstance(found[key], (int, float)) and math.isclose(found[key], own[key])
                for key in own
            )
        ):
            raise NotImplementedError(
                f"{printable(path)}: {name} is {shown(found)}. Other ranks than r are supported "
                "where save_adapter wrote the file, in which the parts of a fused projection have "
                f"ranks of their own; {_MERGE}"
            )


def _weights(
    arrays: Any, model: Decoder, family: Family, ranks: Mapping[tuple[str, ...], Inputs]
) -> list[Weight]:
    """The adapters with their tensors' names, from arrays or shapes by path.

    ``ranks`` are each projection's own in peft's adapter. B's outputs are fused as those of its
    projection are.
    """
    shapes = flat_weights(abstract_like(model, lora=None)[1])
    shapes = {
        path: shape
        for path, shape in shapes.items()
        if path[-1] == "kernel" and path in family.names
    }
    found = weights_at(shapes, family, model.config)
    of_kernels, weights = {weight.path: weight for weight in found}, []
    for path, array in arrays.items():
        kernel, own = of_kernels[*path[:-1], "kernel"], ranks[path[:-1]]
        names = tuple(_stem(name, family) + _ENDS[path[-1]] for name in kernel.names)
        weight = kernel._replace(path=path, names=names, shape=tuple(array.shape[1:]), inputs=1)
        if path[-1] == LORA_A:
            outputs = Outputs(1, own.total, own.start, array.shape[-1])
            weights.append(weight._replace(fused=None, outputs=outputs))
        else:
            weights.append(weight._replace(within=own))
    return weights


_ENDS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}


def _stem(kernel: str, family: Family) -> str:
    """The names of a projection's adapter, without their ends."""
    return "base_model.model." + family.module_name(kernel.removesuffix("weight"))


def _module(kernel: str | Fused | Shaped, family: Family) -> str:
    """A projection's name in a layer of transformers, as ``self_attn.q_proj``."""
    name = (kernel if isinstance(kernel, str) else kernel.name).removesuffix("weight")
    return family.module_name(name).removeprefix(LAYER).removesuffix(".")


def _targets(files: TensorFiles, config: DecoderConfig, family: Family) -> tuple[str, ...]:
    """The projections that an adapter has, in any layer."""
    found = set()
    for stack, layers in layers_of_stacks(config).items():
        for path, kernel in family.names.items():
            if path[0] == stack and path[-1] == "kernel" and path[-2] in PROJECTIONS:
                name = _stem(kernel if isinstance(kernel, str) else kernel.name, family)
                names_of = (name.format(layer=i, expert=0) + _ENDS[LORA_A] for i in layers)
                if any(each in files.names for each in names_of):
                    found.add(path[-2])
    return tuple(ours for ours in PROJECTIONS if ours in found)


def _family(config: DecoderConfig) -> Family:
    """The family of a decoder.

    If it was not loaded, any one, as projections have the same names, but for those of linear and
    of gated attention.
    """
    if config.hf_config is not None:
        return loaded_from(config.hf_config)[1]
    if config.has_linear_attention or config.attention_gate:
        return config_json(config, jnp.float32, 1)[1]
    return next(iter(FAMILIES.values()))


def _read_config(path: Path) -> dict[str, Any]:
    """``adapter_config.json``, checked for unsupported keys."""
    if not path.exists():
        raise FileNotFoundError(
            f"{printable(path.parent)} lacks {CONFIG}: pass the folder of a PEFT adapter"
        )
    given = read_object(path)
    kind = given.get("peft_type")
    if kind != "LORA":
        raise NotImplementedError(
            f"{printable(path)} has peft_type {shown(kind)}: only 'LORA' is supported"
        )
    wrong = [
        f"{key} is {shown(value)}"
        for key, value in given.items()
        if key not in _KNOWN and value and (key, value) != ("bias", "none")
    ]
    init = given.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _INITIALIZERS:
        wrong.append(f"init_lora_weights is {shown(init)}")
    if wrong:
        raise NotImplementedError(
            f"{printable(path)}: {first_of(wrong)}. Supported is LoRA of one rank on the layers' "
            f"projections; {_MERGE}"
        )
    stabilized = given.get("use_rslora")
    if not (stabilized is None or isinstance(stabilized, bool)):
        raise ValueError(
            f"{printable(path)} has use_rslora {shown(stabilized)}: it must be true or false"
        )
    missing = [key for key in ("r", "lora_alpha") if given.get(key) is None]
    if missing:
        raise ValueError(f"{printable(path)} lacks {', '.join(missing)}")
    check_integer(f"{printable(path)}: r", given["r"], 1, MAX_SIZE)
    check_positive(f"{printable(path)}: lora_alpha", given["lora_alpha"])
    return given
