"""``config.json`` to ``DecoderConfig``, and back."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from burst_jax.errors import first_of, printable, shown
from burst_jax.json_files import parse_object, read_object
from burst_jax.layers.rope import DynamicRope
from burst_jax.models.config import DecoderConfig
from burst_jax.models.hf import quantized
from burst_jax.models.hf.families import FAMILIES
from burst_jax.models.hf.family import REQUIRED, Family, Multimodal
from burst_jax.models.hf.fields import check_fields, ignoring
from burst_jax.models.hf.quantized import reject_quantized
from burst_jax.models.hf.ropes import without_options

# Keys in a message.
_NAMED = 10
_DTYPES = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
# The keys of the dtype of stored weights, since transformers 4.56 and before.
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Keys without effect on hidden states and logits, in any family.
_IGNORED = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("dtype", "torch_dtype", "initializer_range", "tokenizer_class"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("use_cache", "cache_implementation", "attn_implementation", "_attn_implementation"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_return_dict"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task"),
        "pretraining_tp",  # Tensor parallelism in training; the sums are the same.
        # Of other programs.
        *("unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config"),
        # Of generation, which transformers wrote into this file before it had one for them.
        *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p"),
        *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("num_return_sequences", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("decoder_start_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("return_dict_in_generate", "output_scores"),
        *quantized.KEYS,  # Checked before.
    )
)
# Keys with the values that a decoder here supports; absence is supported, too.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
}
# The same in families that do not read these keys.
_ONLY_UNREAD: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


def read_config(
    folder: Path,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    ignore: Collection[str] = (),
    **fields: Any,
) -> tuple[DecoderConfig, Family, Multimodal | None]:
    """The decoder of a checkpoint's ``config.json``, see :func:`burst_jax.models.load`.

    For a model of text and images this is the language model.

    Returns:
      ``(config, family, multimodal)``; ``multimodal`` is the model of text and images that the
      decoder is part of, or None.
    """
    path = folder / "config.json"
    if not path.exists():
        remedy = "pass the folder of a Hugging Face checkpoint"
        if (folder / "adapter_config.json").is_file():
            remedy = "it has a PEFT adapter; load its base model, and pass that to load_adapter"
        raise FileNotFoundError(f"{printable(folder)} lacks config.json: {remedy}")
    given = read_object(path)
    multimodal = None
    for family in FAMILIES.values():
        if family.multimodal and family.multimodal.model_type == given.get("model_type"):
            multimodal = family.multimodal
            given = _text_config(path, given, family, multimodal, ignore)
    family = _family(path, given)
    given = without_options(given, ignore)
    reject_quantized(path, given, family.quantization, ignore)
    # Weights are dequantized while loading, and saved as they are then.
    given = {key: value for key, value in given.items() if key not in quantized.KEYS}
    values = _complete(path, given, family, ignore)
    found = (*map(given.get, _DTYPE_KEYS), "float32")
    stored = next(value for value in found if value is not None)
    if dtype is None:
        if not isinstance(stored, str) or stored not in _DTYPES:
            raise NotImplementedError(
                f"{printable(path)} has dtype {shown(stored)}: pass dtype=, like jnp.bfloat16"
            )
        dtype = _DTYPES[stored]
    try:
        decoder = family.read(check_fields(values))
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{printable(path)}: {error}") from None
    config = dataclasses.replace(
        decoder,
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        # Normalized, so that equal models have equal configs.
        hf_config=json.dumps(given, sort_keys=True),
        **fields,
    )
    return config, family, multimodal


def config_json(
    config: DecoderConfig, dtype: DTypeLike, max_length: int | None
) -> tuple[dict[str, Any], Family]:
    """A decoder's ``config.json`` and family, see :func:`burst_jax.models.save`.

    A loaded decoder keeps the ``config.json`` of its checkpoint, with a new dtype and, if given,
    ``max_length``. For others it is that of the first family that can express the config.
    """
    name = jnp.dtype(dtype).name
    remedy = ""
    for rope in config.layer_ropes:
        if not isinstance(rope, DynamicRope):
            continue
        if max_length not in (None, rope.max_positions):
            raise ValueError(
                f"max_length is {max_length}, and the decoder has {rope}: config.json has one "
                f"number for both, so leave max_length out, or pass {rope.max_positions}"
            )
        max_length = rope.max_positions
    if config.hf_config is not None:
        given, family = loaded_from(config.hf_config)
        if max_length is not None:
            given[family.length_key] = max_length
        known = {key: value for key, value in given.items() if key in family.known}
        loaded = family.read(check_fields(family.completed(known)))
        if not (changed := _differing(loaded, config)):
            keys = [key for key in _DTYPE_KEYS if key in given] or _DTYPE_KEYS[:1]
            return {**given, **dict.fromkeys(keys, name)}, family
        remedy = (
            f"hf_config has model_type {family.model_type!r}, from which {', '.join(changed)} "
            "differ: restore these fields, or those that differ from another family"
        )
        max_length = known.get(family.length_key)
    if max_length is None:
        raise ValueError(
            "max_length is None: config.json has a number of positions, which a decoder that was "
            "not loaded from a checkpoint does not know; pass it, like max_length=32768"
        )
    differences: dict[str, list[str]] = {}  # With the family's values.
    for family in FAMILIES.values():
        try:
            written = family.write(config, max_length)
            found = _differing(family.read(family.completed(written)), config)
        except (ValueError, NotImplementedError):
            continue
        if not found:
            return {**written, "dtype": name}, family
        texts = (_unequal(name, *values) for name, values in found.items())
        differences[family.model_type] = [*itertools.chain.from_iterable(texts)]
    if not remedy:
        remedy = "change the fields that differ from one of them"
        if differences:
            nearest = min(differences, key=lambda each: len(differences[each]))
            remedy = f"the nearest is {nearest}, which has {', '.join(differences[nearest])}"
    raise NotImplementedError(
        f"no model family ({', '.join(FAMILIES)}) has the architecture of {config}: {remedy}"
    )


def _family(path: Path, given: Mapping[str, Any]) -> Family:
    name = given.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    remedy = f"supported are {', '.join(FAMILIES)}"
    if "text_config" in given:
        remedy += "; save its language model with transformers, and load that"
    raise NotImplementedError(f"{printable(path)} has model_type {shown(name)}: {remedy}")


def loaded_from(hf_config: str) -> tuple[dict[str, Any], Family]:
    """The ``config.json`` in ``DecoderConfig.hf_config``, and its family.

    Raises:
      ValueError, NotImplementedError: it is not what :func:`read_config` stores there.
    """
    given = parse_object(hf_config, "hf_config")
    return given, _family(Path("hf_config"), given)


def _text_config(
    path: Path,
    given: Mapping[str, Any],
    family: Family,
    multimodal: Multimodal,
    ignore: Collection[str],
) -> dict[str, Any]:
    """The language model's ``config.json`` from that of a model of text and images."""
    reject_quantized(path, given, family.quantization, ignore)
    text = given.get("text_config")
    if not isinstance(text, dict) and text is not None:
        raise ValueError(
            f"{printable(path)} has text_config {shown(text)}: it must be a JSON object"
        )
    text = dict(text or {})
    # transformers, too, has one language model for each model of text and images.
    if text.get("model_type") not in (None, family.model_type):
        raise ValueError(
            f"{printable(path)} has model_type {multimodal.model_type!r} and "
            f"text_config.model_type {shown(text['model_type'])}: that model's text_config is a "
            f"{family.model_type!r}; correct the one that is wrong"
        )
    # What the whole model has, where its language model's file would have it.
    if text.get("tie_word_embeddings") is None:
        default = family.defaults["tie_word_embeddings"]
        text["tie_word_embeddings"] = given.get("tie_word_embeddings", default)
    if all(text.get(key) is None for key in _DTYPE_KEYS):
        text |= {key: given[key] for key in _DTYPE_KEYS if key in given}
    only = _ONLY | {"tie_word_embeddings": (text["tie_word_embeddings"],)}
    _check_keys(path, multimodal.model_type, given, multimodal.keys, only, ignore)
    return {**text, "architectures": [family.architecture], "model_type": family.model_type}


def _complete(
    path: Path, given: Mapping[str, Any], family: Family, ignore: Collection[str]
) -> dict[str, Any]:
    """``config.json`` with the family's defaults, checked for unknown keys."""
    missing = [key for key in REQUIRED if {**family.defaults, **given}.get(key) is None]
    if missing:
        raise ValueError(f"{printable(path)} lacks {', '.join(missing)}")
    unread = {key: values for key, values in _ONLY_UNREAD.items() if key not in family.known}
    only = _ONLY | unread | dict(family.only)
    known = {*family.known, *family.ignored}
    _check_keys(path, family.model_type, given, known, only, ignore)
    return family.completed(given)


def _check_keys(
    path: Path,
    model_type: str,
    given: Mapping[str, Any],
    known: Collection[str],
    only: Mapping[str, tuple[Any, ...]],
    ignore: Collection[str],
) -> None:
    """Raises NotImplementedError that names all keys that are unknown or have a wrong value."""
    wrong = [
        f"{key} is {shown(given[key])} and must be {allowed[0]!r}"
        for key, allowed in only.items()
        if key in given and given[key] not in allowed and key not in ignore
    ]
    known = {*known, *only, *_IGNORED, *ignore}
    unknown = [key for key in given if key not in known]
    if wrong or unknown:
        wrong += [f"{first_of([key])} is {shown(given[key])}, and unknown" for key in unknown]
        if len(wrong) > _NAMED:
            wrong[_NAMED:] = [f"and {len(wrong) - _NAMED} more"]
        raise NotImplementedError(
            f"{printable(path)}, model_type {model_type!r}: {'; '.join(wrong)}. If a key does not "
            f"change the computation, {ignoring(unknown)}"
        )


def _differing(one: DecoderConfig, other: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which two decoders differ in what they compute, with both values.

    Dtypes are left out.
    """
    pair = _computation(one), _computation(other)
    names = (field.name for field in dataclasses.fields(DecoderConfig))
    found = ((name, (getattr(pair[0], name), getattr(pair[1], name))) for name in names)
    return {name: values for name, values in found if values[0] != values[1]}


def _unequal(name: str, one: Any, other: Any) -> list[str]:
    """``name=value`` of what differs in two values; of a tuple's elements the first that does."""
    if type(one) is type(other) and dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        parts = [(f"{name}.{each}", getattr(one, each), getattr(other, each)) for each in names]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        parts = [(f"{name}[{i}]", *pair) for i, pair in pairs if pair[0] != pair[1]][:1]
    else:
        return [f"{name}={shown(one)}"] if one != other else []
    return [text for part in parts for text in _unequal(*part)]


def _computation(config: DecoderConfig) -> DecoderConfig:
    scale, experts = config.attention_scale, config.experts
    return dataclasses.replace(
        config,
        layer_pattern=config.layer_kinds,
        rope=None,
        rope_theta=DecoderConfig.rope_theta,
        attention_scale=config.head_dim**-0.5 if scale is None else scale,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        # Execution, and other content of the checkpoint. Adapters are merged, or saved separately.
        remat="none",
        remat_layers=None,
        mlp_chunks=1,
        hf_config=None,
        lora=None,
        experts=experts
        and dataclasses.replace(experts, balance_loss=0.0, z_loss=0.0, capacity_factor=None),
    )
