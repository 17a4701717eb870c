"""Writes a model into a folder that transformers reads."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from burst_jax.models.decoder import Decoder
from burst_jax.models.hf.config import config_json
from burst_jax.models.hf.files import INDEX, SINGLE, safetensors
from burst_jax.models.hf.new_folder import NewFolder
from burst_jax.models.hf.weights import Weight, flat, weights_of
from burst_jax.models.lora import merge_lora
from burst_jax.parallel.processes import by_first_process

# A file's tensors: (name, the weight, the layer or None).
Plan = dict[str, list[tuple[str, Weight, int | None]]]


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
    written: copy them. Low-rank adapters are merged into the weights
    (:func:`burst_jax.models.merge_lora`), which takes the memory of the weights that have some once
    more; :func:`burst_jax.models.save_adapter` writes them alone.

    The folder is written under another name and renamed when it is complete. All processes of a run
    must call this together. The first one writes, and its memory holds one file's tensors, twice
    while the file is being written. Either the folder is complete when any of them returns, or an
    error of the first one is raised in all.

    Args:
      model: the decoder; its weights may be split over any mesh.
      folder: a folder that does not exist yet, or is empty, and is no mount point.
      dtype: of the tensors; None is that of the weights.
      max_length: the number of positions in ``config.json``; None is that of the folder that was
        loaded. A decoder that was not loaded needs it.
      max_file_bytes: size of a file's tensors above which the next one is begun.

    Raises:
      FileExistsError: there is something in the folder.
      ImportError: the library safetensors is missing.
      NotImplementedError: no family of models computes what this decoder does.
      OSError: the disk is full, for example. If all is written and cannot be renamed to ``folder``,
        the error says where it is kept.
      ValueError: no max_length where one is needed, another one than a dynamic RoPE has, a
        max_file_bytes below 1, or a folder that is a mount point.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}: it must be at least 1")
    dtype = jnp.dtype(model.config.param_dtype if dtype is None else dtype)
    written, family = config_json(model.config, dtype, max_length)
    if model.config.lora is not None:
        model = merge_lora(model, param_dtype=dtype)
    state = nnx.state(model)
    plan = _plan(weights_of(state, family, model.config.num_layers), dtype, max_file_bytes)
    texts = {"config.json": written}
    if len(plan) > 1:
        texts[INDEX] = _index(plan, dtype)
    write_folder(Path(folder), plan, flat(state), dtype, texts)


def write_folder(
    folder: Path,
    plan: Plan,
    arrays: Mapping[tuple[str, ...], jax.Array],
    dtype: jnp.dtype,
    texts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes tensors and JSON files into a new folder, see :func:`save`.

    Args:
      folder: a folder that does not exist yet, or is empty.
      plan: which tensors each file has.
      arrays: the weights by path.
      dtype: of the tensors.
      texts: the content of each JSON file.
    """
    writer = _Writer(folder, dtype)
    try:
        by_first_process(writer.begin)
        for file, tensors in plan.items():
            for name, weight, layer in tensors:
                # Every process takes part in this: it gathers the tensor from all devices.
                whole = _whole(arrays[weight.path], layer)
                if jax.process_index() == 0:
                    writer.keep(name, weight, whole)
            by_first_process(lambda file=file: writer.write(file))
        by_first_process(lambda: writer.finish(texts))
    finally:
        writer.discard()


class _Writer:
    """What the first process does: it writes the files."""

    def __init__(self, folder: Path, dtype: jnp.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._new: NewFolder | None = None
        self._content: dict[str, np.ndarray] = {}
        self._error: Exception | None = None

    def begin(self) -> None:
        safetensors()
        self._new = NewFolder(self._folder)

    def keep(self, name: str, weight: Weight, whole: jax.Array) -> None:
        """Takes a tensor of the next file; raises nothing, as the others gather the next one."""
        if self._error is None:
            try:
                tensor = weight.to_tensor(np.asarray(whole))
                self._content[name] = tensor.astype(self._dtype, copy=False)
            except Exception as error:
                self._error = error

    def write(self, file: str) -> None:
        assert self._new is not None
        if self._error is not None:
            raise self._error
        # transformers wants to know for which library the tensors are.
        safetensors().numpy.save_file(
            self._content, self._new.path / file, metadata={"format": "pt"}
        )
        self._content = {}

    def finish(self, texts: Mapping[str, Mapping[str, Any]]) -> None:
        assert self._new is not None
        for file, content in texts.items():
            text = json.dumps(content, indent=2, sort_keys=True)
            (self._new.path / file).write_text(text + "\n")
        self._new.finish()

    def discard(self) -> None:
        if self._new is not None:
            self._new.discard()


def _plan(weights: list[Weight], dtype: jnp.dtype, max_file_bytes: int) -> Plan:
    """Which tensors each file has: layer by layer, none beyond the size unless it is alone."""
    files: list[list[tuple[str, Weight, int | None]]] = [[]]
    size = 0
    for tensor in in_order(weights):
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


def in_order(weights: list[Weight]) -> Iterator[tuple[str, Weight, int | None]]:
    """The weights' tensors layer by layer: (name, the weight, the layer or None)."""
    stacked = [weight for weight in weights if weight.stacked]
    yield from ((weight.names[0], weight, None) for weight in weights if not weight.stacked)
    for layer in range(len(stacked[0].names)):
        yield from ((weight.names[layer], weight, layer) for weight in stacked)


def _bytes(weight: Weight, dtype: jnp.dtype) -> int:
    return int(np.prod(weight.shape)) * dtype.itemsize


def _index(plan: Plan, dtype: jnp.dtype) -> dict[str, Any]:
    tensors = [(name, file, weight) for file, some in plan.items() for name, weight, _ in some]
    return {
        "metadata": {"total_size": sum(_bytes(weight, dtype) for _, _, weight in tensors)},
        "weight_map": {name: file for name, file, _ in tensors},
    }


def _whole(weight: jax.Array, layer: int | None) -> jax.Array:
    """One layer of a weight, or an unstacked weight, that this process can read all of."""
    if not isinstance(weight.sharding, NamedSharding):
        return weight if layer is None else weight[layer]
    mesh, spec = weight.sharding.mesh, weight.sharding.spec
    taken = weight if layer is None else take_layer(weight, np.int32(layer), mesh=mesh, spec=spec)
    if taken.is_fully_addressable:
        return taken
    return jax.device_put(taken, NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames=("mesh", "spec"))
def take_layer(
    weight: jax.Array, layer: jax.Array, *, mesh: Mesh, spec: PartitionSpec
) -> jax.Array:
    """One layer of a stacked weight, split as its other dimensions are.

    The stages of a pipeline split the layers. So that no device gets a whole stack, the stage that
    has the layer sends it to the others: they add zeros to it.

    Args:
      weight: ``[L, ...]``, L being the number of layers.
      layer: number of the layer, int32.
      mesh: the weight's.
      spec: that of the weight.
    """
    stages, *others = spec or (None,)

    def take(part: jax.Array, layer: jax.Array) -> jax.Array:
        if stages is None:
            return lax.dynamic_index_in_dim(part, layer, 0, keepdims=False)
        row = layer - lax.axis_index(stages) * part.shape[0]
        here = (row >= 0) & (row < part.shape[0])
        row = jnp.clip(row, 0, part.shape[0] - 1)
        taken = lax.dynamic_index_in_dim(part, row, 0, keepdims=False)
        # Bytes, because a sum of floating point numbers would make 0.0 of -0.0.
        sent = lax.bitcast_convert_type(taken, jnp.uint8)
        sent = lax.psum(jnp.where(here, sent, jnp.zeros_like(sent)), stages)
        return lax.bitcast_convert_type(sent, taken.dtype)

    run = jax.shard_map(
        take, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(*others)
    )
    return run(weight, layer)
