"""Loads a decoder from a Hugging Face checkpoint."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Unpack

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.errors import first_of, printable
from burst_jax.models.config import DecoderConfig, Remat
from burst_jax.models.decoder import Decoder, abstract_decoder
from burst_jax.models.hf.config import read_config
from burst_jax.models.hf.family import Family, Multimodal
from burst_jax.models.hf.fields import ignoring
from burst_jax.models.hf.files import FLOATING, TensorFiles
from burst_jax.models.hf.quantized import DEQUANTIZE
from burst_jax.models.hf.tensors import Weight, index_of, tensor_shapes, weights_of
from burst_jax.models.hf.tied import UntiedHead, head_name, resolve_head
from burst_jax.models.hf.views import add_views
from burst_jax.models.weights import flat_weights, with_weights
from burst_jax.parallel.mesh import mesh_with_devices
from burst_jax.parallel.rules import ShardingRules

# RoPE's frequencies in old Llama checkpoints, which config.json determines.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")


def load_config(
    folder: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    remat: Remat = "attention",
    remat_layers: int | None = None,
    mlp_chunks: int = 1,
    ignore: Collection[str] = (),
) -> DecoderConfig:
    """The config of the decoder that :func:`load` returns, with the same arguments.

    It is that of ``config.json``. Weights and the library safetensors need not be there; if they
    are, an output projection next to a tied embedding is compared with it, as in :func:`load`.
    """
    folder = Path(folder)
    config, family, multimodal = read_config(
        folder, dtype=dtype, param_dtype=param_dtype, remat=remat, remat_layers=remat_layers,
        mlp_chunks=mlp_chunks, ignore=ignore,
    )  # fmt: skip
    if not config.tie_embeddings:
        return config
    try:
        files = _files(folder, family, multimodal)
    except (FileNotFoundError, ImportError):  # No weights, or no library to load them with.
        return config
    return resolve_head(config, family, files, ignore)


def load(
    folder: str | PathLike[str],
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    remat: Remat = "attention",
    remat_layers: int | None = None,
    mlp_chunks: int = 1,
    ignore: Collection[str] = (),
    **options: Unpack[AttentionOptions],
) -> Decoder:
    """Loads a decoder from a Hugging Face checkpoint.

    Supported families: llama (Llama 2 and 3), mistral, qwen2 (with Qwen 2.5), qwen3, qwen3_moe,
    qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid, kimi_linear, mixtral, gpt_oss (MXFP4
    experts are dequantized), gemma2, gemma3_text, and the language models of qwen3_5, qwen3_5_moe
    and gemma3.
    Each process reads the slices that its devices hold, one weight after the other, so host memory
    holds at most one weight with all its layers in addition to the model.

    If ``config.json`` ties the output projection to the embedding and the files have both, each
    process compares them: a copy is not loaded; one that differs is, untied, with the warning
    :class:`burst_jax.models.UntiedHead`, and so is saved.

    Args:
      folder: has ``config.json`` and ``model.safetensors``, or several such files with an index.
      rules: the mesh axes that shard weights and activations, see
        :class:`burst_jax.models.Decoder`.
      microbatches: see :class:`burst_jax.models.Decoder`.
      dtype: of the computation; None is that of ``config.json``.
      param_dtype: of the weights; None is ``dtype``.
      remat: see :class:`burst_jax.models.DecoderConfig`.
      remat_layers: see :class:`burst_jax.models.DecoderConfig`.
      mlp_chunks: see :class:`burst_jax.models.DecoderConfig`.
      ignore: names of unknown keys of ``config.json`` or its RoPE, and of tensors, that do not
        change the computation.
      **options: attention options, like ``mesh`` and ``layout``, see
        :class:`burst_jax.models.Decoder`. A mesh is required: here, or by ``jax.set_mesh``.

    Returns:
      The decoder, with its weights sharded by ``rules`` and ``model.config`` from ``config.json``.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: the library safetensors is missing.
      NotImplementedError: an unsupported model family, or option of one.
      ValueError: missing, unexpected or wrongly shaped tensors, the first of which are named; a
        file that is damaged, or no regular file; a value of ``config.json`` out of range; no mesh,
        or none with devices; a mesh that does not divide a weight.
    """
    folder = Path(folder)
    config, family, multimodal = read_config(
        folder, dtype=dtype, param_dtype=param_dtype, remat=remat, remat_layers=remat_layers,
        mlp_chunks=mlp_chunks, ignore=ignore,
    )  # fmt: skip
    files = _files(folder, family, multimodal)
    tied, config = config.tie_embeddings, resolve_head(config, family, files, ignore)
    if tied and not config.tie_embeddings:
        warnings.warn(
            f"{printable(folder)} has tie_word_embeddings true, and its {head_name(family)} "
            "differs from the embedding: they are loaded untied, as in transformers. To silence "
            "this, set tie_word_embeddings to false in its config.json; to use the embedding for "
            f"both, {ignoring([head_name(family)])}",
            UntiedHead,
            stacklevel=2,
        )
    graphdef, shapes = abstract_decoder(config, rules=rules, microbatches=microbatches, **options)
    shardings = nnx.merge(graphdef, shapes).shardings(shapes)
    specs = flat_weights(shardings.weight_specs(shapes))
    mesh = mesh_with_devices(shardings.mesh)
    weights, dtypes = weights_of(shapes, family, config), flat_weights(shapes)
    copy = (head_name(family),) if config.tie_embeddings else ()
    tensors = tensor_shapes(weights)
    experts = config.experts.count if config.experts else 0
    add_views(files, family.other_forms, tensors, config.num_layers, experts)
    check_tensors(folder, files, tensors, (*ignore, *copy))
    values = {}
    for weight in weights:
        sharding, dtype = NamedSharding(mesh, specs[weight.path]), dtypes[weight.path].dtype
        values[weight.path] = read_weight(files, weight, sharding, np.dtype(dtype))
    return nnx.merge(graphdef, with_weights(shapes, values))


def _files(folder: Path, family: Family, multimodal: Multimodal | None) -> TensorFiles:
    """The tensors of a checkpoint, under the names of the language model."""
    tensor_name = multimodal.tensor_name if multimodal else family.tensor_name
    return TensorFiles(folder, tensor_name=tensor_name, quantization=family.quantization)


def read_weight(
    files: TensorFiles, weight: Weight, sharding: NamedSharding, dtype: np.dtype
) -> jax.Array:
    """One weight, of which this process reads the slices of its devices."""
    shape = *weight.leading, *weight.shape
    # Read once for all devices with the same slice.
    found: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index_of(index or (), shape)
        key = tuple((one.start, one.stop, one.step) for one in index)
        if key not in found:
            found[key] = _slice(files, weight, index, dtype)
        return found[key]

    return jax.make_array_from_callback(shape, sharding, read, dtype=dtype)


def _slice(
    files: TensorFiles, weight: Weight, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    count = len(weight.leading)
    names = np.asarray(weight.names).reshape(weight.leading)[index[:count]]
    size = tuple(one.stop - one.start for one in index[count:])
    out = np.empty((names.size, *size), dtype)
    for part, name in zip(out, names.ravel(), strict=True):
        read = files.read(str(name), weight.tensor_index(index[count:]))
        part[...] = weight.from_tensor(read, size)
    return out.reshape(*names.shape, *size)


def check_tensors(
    folder: Path,
    files: TensorFiles,
    expected: Mapping[str, tuple[int, ...]],
    ignore: Collection[str],
    described_by: str = "its config.json describes",
    skip: str = "if the unexpected ones do not change the computation, pass their names as "
    "ignore=, on a command line --ignore",
) -> None:
    """Raises ValueError with the first missing, unexpected and wrong tensors, and their numbers.

    ``expected`` are the shapes of tensors by name, ``skip`` is the remedy for unexpected ones.
    """
    present = {name for name in files.names if not _COMPUTED.fullmatch(name)}
    missing = sorted(set(expected) - present)
    unexpected = sorted(present - set(expected) - set(ignore))
    wrong = [
        f"{name} is {list(files.shape(name))}, expected {list(expected[name])}"
        for name in sorted(present & set(expected))
        if files.shape(name) != expected[name]
    ]
    quantized = [
        f"{name} is {files.dtype(name)}"
        for name in sorted(present & set(expected))
        if files.dtype(name) not in FLOATING
    ]
    found = [
        f"{what}: {first_of(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", wrong),
            (f"of another dtype than {', '.join(FLOATING)}", quantized),
        )
        if names
    ]
    if found:
        found += [DEQUANTIZE] if quantized else [skip] if unexpected else []
        raise ValueError(
            f"{printable(folder)} does not have the tensors that {described_by}; "
            + "; ".join(found)
        )
