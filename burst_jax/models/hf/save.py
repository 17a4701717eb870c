"""Saves a decoder as a Hugging Face checkpoint."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
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
from burst_jax.models.hf.tensors import Weight, weights_of
from burst_jax.models.lora import merge_lora
from burst_jax.models.weights import flat_weights
from burst_jax.parallel.mesh import flat_names
from burst_jax.parallel.processes import by_first_process

# A tensor or a part of one: (name, the weight, its index in the weight's leading dimensions).
Part = tuple[str, Weight, tuple[int, ...]]
# Each file's tensors; the parts of one follow each other.
Files = dict[str, list[Part]]


def save(
    model: Decoder,
    folder: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Saves a decoder as a Hugging Face checkpoint: ``config.json`` and safetensors files.

    A loaded decoder keeps the ``config.json`` of its checkpoint, except for the dtype; for others a
    model family with the same architecture is chosen. Other files are not written: copy those of
    the tokenizer, the chat template and ``generation_config.json``. Low-rank adapters are merged
    into the weights (:func:`burst_jax.models.merge_lora`), which needs memory for a second copy of
    those; :func:`burst_jax.models.save_adapter` saves adapters alone.

    The folder is written under a temporary name and renamed when complete. All processes must call
    this together. The first one writes, and holds one file's tensors in host memory, twice during
    the write. When any process returns, the folder is complete; an error of the first one is raised
    in all.

    Args:
      model: the decoder, with weights on any mesh.
      folder: a folder that does not exist, or is empty, and is not a mount point.
      dtype: of the tensors; None is that of each weight: some are always float32, like ``A_log``.
      max_length: ``max_position_embeddings`` of ``config.json``; None is that of the loaded
        checkpoint. Required for a decoder that was not loaded.
      max_file_bytes: size of tensors at which a new file starts. Default: 5 GB.

    Raises:
      FileExistsError: the folder is not empty. Call :func:`burst_jax.models.check_save_folder`
        before a training that ends with this.
      ImportError: the library safetensors is missing.
      NotImplementedError: no model family has this decoder's architecture.
      OSError: for example, the disk is full. If all is written and cannot be renamed, the message
        has the temporary name.
      ValueError: no max_length where it is required, one that differs from a dynamic RoPE's, a
        max_file_bytes below 1, or a mount point.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}: it must be at least 1")
    of_most = jnp.dtype(model.config.param_dtype if dtype is None else dtype)
    written, family = config_json(model.config, of_most, max_length)
    if model.config.lora is not None:
        model = merge_lora(model, param_dtype=of_most)
    state = nnx.state(model)
    weights, arrays = weights_of(state, family, model.config), flat_weights(state)
    item = {path: jnp.dtype(dtype or x.dtype).itemsize for path, x in arrays.items()}
    files = _assign_files(weights, item, max_file_bytes)
    texts = {"config.json": written}
    if len(files) > 1:
        texts[INDEX] = _index(files, item)
    write_folder(Path(folder), files, arrays, None if dtype is None else of_most, texts)


def check_save_folder(folder: str | PathLike[str]) -> None:
    """Raises what :func:`save` and :func:`save_adapter` would raise for this folder.

    Call it before a training that ends with one of them. It leaves nothing behind.

    Args:
      folder: the folder to save to later.

    Raises:
      FileExistsError: the folder is not empty.
      ImportError: the library safetensors is missing.
      PermissionError: it cannot be created.
      ValueError: it is a mount point, or an empty name.
    """
    safetensors()
    if not os.fspath(folder):  # A Path takes it for the current folder.
        raise ValueError("folder is '': it must name a folder")
    folder = Path(folder)
    final = folder.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise FileExistsError(f"{folder} exists: choose a folder that does not, or is empty")
    if final.is_mount():
        raise ValueError(
            f"{folder} is a mount point, to which no complete folder can be renamed: choose a "
            f"folder in it, like {folder / 'model'}"
        )
    parent = next(path for path in final.parents if path.exists())
    try:
        # Permissions do not show it: of a file system like /proc, and for root.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError:
        raise PermissionError(
            f"{folder} cannot be created: {parent} is no folder that this process may write into"
        ) from None


def write_folder(
    folder: Path,
    files: Files,
    arrays: Mapping[tuple[str, ...], jax.Array],
    dtype: jnp.dtype | None,
    texts: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors, from weights by path, and JSON files into a new folder, see :func:`save`.

    ``dtype`` None is that of each weight. ``metadata``: text in each safetensors file, by key.
    """
    writer = _Writer(folder, dtype, metadata or {})
    try:
        by_first_process(writer.begin)
        for file, tensors in files.items():
            for name, weight, index in tensors:
                # All processes: this gathers the tensor from all devices.
                whole = _whole(arrays[weight.path], index)
                if jax.process_index() == 0:
                    writer.add(name, weight, whole)
            by_first_process(lambda file=file: writer.write(file))
        by_first_process(lambda: writer.finish(texts))
    finally:
        writer.discard()


class _Writer:
    """The first process's part of :func:`write_folder`.

    It writes into a temporary folder next to the final one, and renames that when complete.
    """

    def __init__(self, folder: Path, dtype: jnp.dtype | None, metadata: Mapping[str, str]) -> None:
        self._given, self._final, self._dtype = folder, folder.resolve(), dtype
        # transformers requires this one.
        self._metadata = {"format": "pt", **metadata}
        self._temporary: Path | None = None
        self._content: dict[str, np.ndarray] = {}
        self._error: Exception | None = None

    def begin(self) -> None:
        """Creates the temporary folder, see :func:`save` for what raises."""
        check_save_folder(self._given)
        final = self._final
        final.parent.mkdir(parents=True, exist_ok=True)
        # mkdtemp's name is unique and its folder private; the one inside has the umask's mode.
        prefix = f".{final.name}.being-written-"
        self._temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
        self._path = self._temporary / final.name
        self._path.mkdir()

    def add(self, name: str, weight: Weight, whole: jax.Array) -> None:
        """Adds a tensor to the next file. Errors are raised in ``write``, after all gathers."""
        if self._error is None:
            try:
                array = np.asarray(whole).astype(self._dtype or whole.dtype, copy=False)
                self._content[name] = weight.to_tensor(array, self._content.get(name))
            except Exception as error:
                self._error = error

    def write(self, file: str) -> None:
        if self._error is not None:
            raise self._error
        safetensors().numpy.save_file(self._content, self._path / file, metadata=self._metadata)
        self._content = {}

    def finish(self, texts: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes the JSON files, and renames the folder once it is on disk."""
        for file, content in texts.items():
            # A config made in Python may have NumPy's numbers.
            text = json.dumps(content, indent=2, sort_keys=True, default=np.generic.item)
            (self._path / file).write_text(text + "\n")
        for path in (*self._path.iterdir(), self._path):
            _sync(path)
        try:
            os.replace(self._path, self._final)
        except OSError as error:
            self._temporary = None
            state = f"{self._final} cannot be replaced; {self._path} is complete"
            raise OSError(error.errno, f"{error.strerror}: {state}") from error
        _sync(self._final.parent)

    def discard(self) -> None:
        """Removes the temporary folder."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _assign_files(
    weights: list[Weight], item: Mapping[tuple[str, ...], int], max_file_bytes: int
) -> Files:
    """Assigns tensors to files of at most this size, layer by layer.

    ``item`` has the bytes of an element, by the weight's path.
    """
    files: list[list[Part]] = [[]]
    size = 0
    for tensor in in_order(weights):
        same = bool(files[-1]) and files[-1][-1][0] == tensor[0]
        # All parts of a tensor are in the file of the first one.
        more = 0 if same else int(np.prod(tensor[1].tensor_shape)) * item[tensor[1].path]
        if files[-1] and size + more > max_file_bytes and not same:
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


def in_order(weights: list[Weight]) -> Iterator[Part]:
    """The weights' tensors, layer by layer."""
    parts = [
        (name, weight, index)
        for weight in weights
        for name, index in zip(weight.names, np.ndindex(*weight.leading), strict=True)
    ]
    # Those without a layer come first. By name, so that the parts of a tensor follow each other.
    yield from sorted(parts, key=lambda part: ([part[1].layers[i] for i in part[2][:1]], part[0]))


def _index(files: Files, item: Mapping[tuple[str, ...], int]) -> dict[str, Any]:
    tensors = [(name, file, weight) for file, some in files.items() for name, weight, _ in some]
    size = sum(int(np.prod(weight.shape)) * item[weight.path] for _, _, weight in tensors)
    return {
        "metadata": {"total_size": size},
        "weight_map": {name: file for name, file, _ in tensors},
    }


def _whole(weight: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """The part of a weight at an index of its leading dimensions, gathered to this process."""
    if not isinstance(weight.sharding, NamedSharding):
        return weight[index]
    mesh, spec = weight.sharding.mesh, weight.sharding.spec
    taken = weight
    if index:
        taken = take_layer(weight, *map(np.int32, index), mesh=mesh, spec=spec)
    if taken.is_fully_addressable:
        return taken
    return jax.device_put(taken, NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames=("mesh", "spec"))
def take_layer(
    weight: jax.Array, layer: jax.Array, *expert: jax.Array, mesh: Mesh, spec: PartitionSpec
) -> jax.Array:
    """One layer of a stacked weight ``[L, ...]``, sharded as its other dimensions are.

    With ``expert``, one expert of a layer of ``[L, E, ...]``.

    A pipeline's stages shard the layers, and an expert axis the experts. The device that has the
    matrix sends it to the others, which add zeros, so that no device holds a whole stack.
    """
    axes = [*spec, *[None] * (weight.ndim - len(spec))]
    count = 1 + len(expert)
    over = flat_names(*axes[:count])

    def take(part: jax.Array, *where: jax.Array) -> jax.Array:
        here: Any = True
        for each, names in zip(where, axes, strict=False):
            index = each - (lax.axis_index(names) * part.shape[0] if names else 0)
            here = here & (index >= 0) & (index < part.shape[0])
            index = jnp.clip(index, 0, part.shape[0] - 1)
            part = lax.dynamic_index_in_dim(part, index, 0, keepdims=False)
        if not over:
            return part
        # Bytes, because a floating point sum would turn -0.0 into 0.0.
        sent = lax.bitcast_convert_type(part, jnp.uint8)
        sent = lax.psum(jnp.where(here, sent, jnp.zeros_like(sent)), over)
        return lax.bitcast_convert_type(sent, part.dtype)

    run = jax.shard_map(
        take,
        mesh=mesh,
        in_specs=(spec, *[PartitionSpec()] * count),
        out_specs=PartitionSpec(*axes[count:]),
    )
    return run(weight, layer, *expert)
