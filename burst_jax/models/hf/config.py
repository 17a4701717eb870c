"""``config.json`` to ``DecoderConfig``, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from burst_jax.layers.rope_variants import DynamicRope
from burst_jax.models.config import DecoderConfig, Remat
from burst_jax.models.hf.families import FAMILIES, Family
from burst_jax.models.hf.ropes import without

# Models of text and images, and the family of their language models, which alone are read.
_TEXT_FAMILIES = {"gemma3": "gemma3_text"}
# What their ``config.json`` has beside the language model's.
_BESIDE_TEXT = frozenset(
    (
        *("text_config", "vision_config", "mm_tokens_per_image"),
        *("boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    )
)
_DTYPES = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
# Keys that say nothing about the computation of hidden states and logits.
_IGNORED = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("dtype", "torch_dtype", "initializer_range", "tokenizer_class"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("use_cache", "cache_implementation", "attn_implementation", "_attn_implementation"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_return_dict"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task"),
        # Of Llama: how its products were cut in training; the sums are the same.
        "pretraining_tp",
        # Of Gemma 2, beside the keys that transformers reads. Other families know hidden_act.
        *("hidden_act", "sliding_window_size"),
    )
)
# Keys of which one value alone, or its absence, is what a decoder here computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False, None),
    "quantization_config": (None,),
}


def read_config(
    folder: Path,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    remat: Remat = "attention",
    remat_layers: int | None = None,
    mlp_chunks: int = 1,
    ignore: Collection[str] = (),
) -> tuple[DecoderConfig, Family, bool]:
    """The decoder that a folder's ``config.json`` describes.

    Of a model of text and images it is the language model, whose config the decoder keeps.

    Args:
      folder: the folder.
      dtype: of the computation; None is that of ``config.json``, float32 if it says none.
      param_dtype: of the weights; None is ``dtype``.
      remat: see :class:`DecoderConfig`.
      remat_layers: see :class:`DecoderConfig`.
      mlp_chunks: see :class:`DecoderConfig`.
      ignore: keys of ``config.json`` that may have any value, and options of its RoPE, which are
        left out.

    Returns:
      ``(config, family, part)``, ``part`` being whether the folder has more than the decoder.

    Raises:
      FileNotFoundError: there is no ``config.json``.
      ValueError: it is not JSON, or it lacks something.
      NotImplementedError: a family of models, an option or a value that changes the computation and
        that there is not here.
    """
    path = folder / "config.json"
    if not path.is_file():
        remedy = "name a folder as transformers writes it for a model"
        if (folder / "adapter_config.json").is_file():
            remedy = "it is an adapter's; load its model, and pass that to load_adapter"
        raise FileNotFoundError(f"{folder} lacks config.json: {remedy}")
    try:
        given = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} is {given!r}: it must be a JSON object")
    text_family = _TEXT_FAMILIES.get(given.get("model_type", ""))
    if text_family is not None:
        given = _text_config(path, given, FAMILIES[text_family], ignore)
    family = _family(path, given)
    given = without(given, ignore)
    values = _complete(path, given, family, ignore)
    stored = given.get("dtype") or given.get("torch_dtype") or "float32"
    if dtype is None:
        if stored not in _DTYPES:
            raise NotImplementedError(
                f"{path} has dtype {stored!r}: pass dtype=, like jnp.bfloat16"
            )
        dtype = _DTYPES[stored]
    config = dataclasses.replace(
        family.read(values),
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        remat=remat,
        remat_layers=remat_layers,
        mlp_chunks=mlp_chunks,
        # The same whatever wrote the file, so that equal models have equal configs.
        hub_config=json.dumps(given, sort_keys=True),
    )
    return config, family, text_family is not None


def config_json(
    config: DecoderConfig, dtype: DTypeLike, max_length: int | None
) -> tuple[dict[str, Any], Family]:
    """The ``config.json`` of a decoder, and its family.

    A decoder that was loaded keeps the one that it was loaded with, but for the dtype and, if it is
    given, the number of positions. For others the first family is taken that can say all that the
    config says.

    Args:
      config: the decoder's.
      dtype: of the weights in the files.
      max_length: number of positions; None is that of the file that was loaded, or of a dynamic
        RoPE.

    Raises:
      ValueError: no max_length where one is needed, or another one than a dynamic RoPE has.
      NotImplementedError: no family can say what the config says.
    """
    name = jnp.dtype(dtype).name
    for rope in config.layer_ropes:
        if not isinstance(rope, DynamicRope):
            continue
        if max_length not in (None, rope.max_positions):
            raise ValueError(
                f"max_length is {max_length}, and the decoder has {rope}: config.json has one "
                f"number for both, so leave max_length out, or pass {rope.max_positions}"
            )
        max_length = rope.max_positions
    if config.hub_config is not None:
        given = json.loads(config.hub_config)
        if max_length is not None:
            given["max_position_embeddings"] = max_length
        family = FAMILIES[given["model_type"]]
        known = {key: value for key, value in given.items() if key in {*family.defaults, *_sizes()}}
        if _same(family.read({**family.defaults, **known}), config):
            key = "torch_dtype" if "torch_dtype" in given else "dtype"
            return {**given, key: name}, family
        max_length = known.get("max_position_embeddings")
    if max_length is None:
        raise ValueError(
            "max_length is None: config.json says a number of positions, which a decoder that was "
            "not loaded from a folder does not know; pass it, like max_length=32768"
        )
    for family in FAMILIES.values():
        try:
            written = family.write(config, max_length)
            agrees = _same(family.read({**family.defaults, **written}), config)
        except (ValueError, NotImplementedError):
            continue
        if agrees:
            return {**written, "dtype": name}, family
    raise NotImplementedError(
        f"no family of models ({', '.join(FAMILIES)}) is a decoder of {config}: change what it has "
        "beside one of them"
    )


def _family(path: Path, given: Mapping[str, Any]) -> Family:
    name = given.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    remedy = f"there are {', '.join(FAMILIES)}"
    if "text_config" in given:
        remedy += "; save its language model with transformers, and load that"
    raise NotImplementedError(f"{path} has model_type {name!r}: {remedy}")


def _text_config(
    path: Path, given: Mapping[str, Any], family: Family, ignore: Collection[str]
) -> dict[str, Any]:
    """The ``config.json`` of a language model from that of a model of text and images."""
    text = given.get("text_config") or {}
    # The output projection is the whole model's.
    tied = text.get("tie_word_embeddings", family.defaults["tie_word_embeddings"])
    only = _ONLY | {"tie_word_embeddings": (tied,)}
    _check_keys(path, given["model_type"], given, _BESIDE_TEXT, only, ignore)
    dtype = {key: given[key] for key in ("dtype", "torch_dtype") if key in given}
    architecture = {"architectures": [family.architecture], "model_type": family.model_type}
    return {**dtype, **text, **architecture}


def _sizes() -> dict[str, Any]:
    """The keys that every ``config.json`` must have."""
    return dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
    )


def _complete(
    path: Path, given: Mapping[str, Any], family: Family, ignore: Collection[str]
) -> dict[str, Any]:
    """``config.json`` with the family's defaults, checked for keys that this code does not know."""
    missing = [key for key in _sizes() if {**family.defaults, **given}.get(key) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    known = {*family.defaults, *_sizes()}
    _check_keys(path, family.model_type, given, known, _ONLY | dict(family.only), ignore)
    return {**family.defaults, **given}


def _check_keys(
    path: Path,
    model_type: str,
    given: Mapping[str, Any],
    known: Collection[str],
    only: Mapping[str, tuple[Any, ...]],
    ignore: Collection[str],
) -> None:
    """Raises NotImplementedError that names all keys that are not known, or have a wrong value."""
    wrong = [
        f"{key} is {given[key]!r} and must be {allowed[0]!r}"
        for key, allowed in only.items()
        if key in given and given[key] not in allowed and key not in ignore
    ]
    known = {*known, *only, *_IGNORED, *ignore}
    unknown = [key for key in given if key not in known]
    if wrong or unknown:
        wrong += [f"{key} is {given[key]!r}, and unknown" for key in unknown]
        raise NotImplementedError(
            f"{path}, model_type {model_type!r}: {'; '.join(wrong)}. If a key does not "
            f"change the computation, pass ignore={tuple(unknown) or '(key,)'}"
        )


def _same(one: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether two decoders compute the same from the same weights, dtypes apart."""
    return _computation(one) == _computation(other)


def _computation(config: DecoderConfig) -> DecoderConfig:
    scale = config.attention_scale
    return dataclasses.replace(
        config,
        layer_pattern=config.layer_kinds,
        rope=None,
        rope_theta=DecoderConfig.rope_theta,
        attention_scale=config.head_dim**-0.5 if scale is None else scale,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        # How a decoder runs, and what its files say beside it.
        remat="none",
        remat_layers=None,
        mlp_chunks=1,
        hub_config=None,
        # Adapters are merged, or written apart.
        lora=None,
    )
