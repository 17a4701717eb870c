"""Writes a model into a folder that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from burst_jax.models.decoder import Decoder
from burst_jax.models.hub.config import config_json
from burst_jax.models.hub.files import INDEX, SINGLE, safetensors
from burst_jax.models.hub.layout import Weight, flat, weights_of


def save(
    model: Decoder,
    folder: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes a decoder as transformers does: ``config.json`` and safetensors files.

    A decoder that was loaded has the ``config.json`` that it was loaded with, but for the dtype.
    For another one a family of models is found that computes the same. Tokenizer files are not
    written: copy them.

    The folder is written under another name and renamed when it is complete. All processes of a run
    must call this together; the first one writes, and when it returns the folder is complete. Its
    memory holds one file's tensors, twice while the file is being written.

    Args:
      model: the decoder; its weights may be split over any mesh.
      folder: a folder that does not exist yet, or is empty.
      dtype: of the tensors; None is that of the weights.
      max_length: the number of positions in ``config.json``; None is that of the folder that was
        loaded. A decoder that was not loaded needs it.
      max_file_bytes: size of a file's tensors above which the next one is begun.

    Raises:
      FileExistsError: there is something in the folder.
      ImportError: the library safetensors is missing.
      NotImplementedError: no family of models computes what this decoder does.
      ValueError: no max_length where one is needed, another one than a dynamic RoPE has, or a
        max_file_bytes below 1.
    """
    folder = Path(folder)
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}: it must be at least 1")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists: choose a folder that does not, or is empty")
    safetensors()
    state = nnx.state(model)
    dtype = jnp.dtype(model.config.param_dtype if dtype is None else dtype)
    written, family = config_json(model.config, dtype, max_length)
    weights = weights_of(state, family, model.config.num_layers)
    plan = _plan(weights, dtype, max_file_bytes)
    writes = jax.process_index() == 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.being-written-{os.getpid()}")
    try:
        if writes:
            new.mkdir()
        arrays = flat(state)
        for file, tensors in plan.items():
            content = {}
            for name, weight, layer in tensors:
                # Every process takes part in this: it gathers the tensor from all devices.
                whole = _whole(arrays[weight.path], layer)
                if writes:
                    content[name] = weight.to_tensor(np.asarray(whole)).astype(dtype, copy=False)
            if writes:
                # transformers wants to know for which library the tensors are.
                safetensors().numpy.save_file(content, new / file, metadata={"format": "pt"})
        if writes:
            _write_json(new / "config.json", written)
            if len(plan) > 1:
                _write_json(new / INDEX, _index(plan, dtype))
            os.replace(new, folder)
    finally:
        if writes:
            shutil.rmtree(new, ignore_errors=True)


# A file's tensors: (name, the weight, the layer or None).
_Plan = dict[str, list[tuple[str, Weight, int | None]]]


def _plan(weights: list[Weight], dtype: jnp.dtype, max_file_bytes: int) -> _Plan:
    """Which tensors each file has: layer by layer, none beyond the size unless it is alone."""
    files: list[list[tuple[str, Weight, int | None]]] = [[]]
    size = 0
    for tensor in _in_order(weights):
        more = _bytes(tensor[1], dtype)
        if files[-1] and size + more > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += more
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": tensors
        for number, tensors in enumerate(files, 1)
    }


def _in_order(weights: list[Weight]) -> Iterator[tuple[str, Weight, int | None]]:
    stacked = [weight for weight in weights if weight.stacked]
    yield from ((weight.names[0], weight, None) for weight in weights if not weight.stacked)
    for layer in range(len(stacked[0].names)):
        yield from ((weight.names[layer], weight, layer) for weight in stacked)


def _bytes(weight: Weight, dtype: jnp.dtype) -> int:
    return int(np.prod(weight.shape)) * dtype.itemsize


def _index(plan: _Plan, dtype: jnp.dtype) -> dict[str, object]:
    tensors = [(name, file, weight) for file, some in plan.items() for name, weight, _ in some]
    return {
        "metadata": {"total_size": sum(_bytes(weight, dtype) for _, _, weight in tensors)},
        "weight_map": {name: file for name, file, _ in tensors},
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _whole(weight: jax.Array, layer: int | None) -> jax.Array:
    """One layer of a weight, or an unstacked weight, that this process can read all of."""
    taken = weight if layer is None else _take(weight, np.int32(layer))
    if taken.is_fully_addressable or not isinstance(weight.sharding, NamedSharding):
        return taken
    return jax.device_put(taken, NamedSharding(weight.sharding.mesh, PartitionSpec()))


@jax.jit
def _take(weight: jax.Array, layer: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(weight, layer, 0, keepdims=False)
