"""The tensors of a Hugging Face checkpoint, read with the library safetensors.

orbax, too, reads safetensors into sharded arrays. It is not used: it creates one array per tensor,
so the devices would hold a weight's layers twice while a program stacks and transposes them; and it
reads every .safetensors file of a folder, some of which have the weights twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from burst_jax.errors import optional

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Supported dtypes; others are of quantized weights, which need scales.
FLOATING = ("F64", "F32", "F16", "BF16")


def safetensors() -> ModuleType:
    """The library and its NumPy functions; an ImportError names the extra to install."""
    needed = {"user": "a Hugging Face checkpoint", "extra": "models"}
    optional("safetensors.numpy", **needed)
    return optional("safetensors", **needed)


class TensorFiles:
    """The tensors of a checkpoint: names, shapes, and slices as NumPy arrays.

    Args:
      folder: the checkpoint.
      single: name of the file with all tensors; a model may have several files and an index.
      tensor_name: a stored name to a tensor's name here, or None to skip the tensor.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the files disagree with their index.
    """

    def __init__(
        self,
        folder: Path,
        *,
        single: str = SINGLE,
        tensor_name: Callable[[str], str | None] = str,
    ) -> None:
        self._slices: dict[str, Any] = {}
        for path, expected in _files(folder, single).items():
            file = _opened(path)
            if expected is not None and (
                differ := sorted(expected.symmetric_difference(file.keys()))
            ):
                raise ValueError(
                    f"{path} and {folder / INDEX} do not agree: only one of them has "
                    f"{_some(differ)}. Download both again"
                )
            for stored in file.keys():  # noqa: SIM118 (it is no dictionary)
                name = tensor_name(stored)
                if name is None:
                    continue
                if name in self._slices:
                    raise ValueError(f"{path} has {name}, which another file has, too")
                self._slices[name] = file.get_slice(stored)

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as in safetensors, like BF16."""
        return self._slices[name].get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> Any:
        """A slice of a tensor."""
        return self._slices[name][index]


def _files(folder: Path, name: str) -> dict[Path, set[str] | None]:
    """The weight files, each with its tensors by the index.

    As in transformers the single file comes first, then those of the index.
    """
    single, index = folder / name, folder / INDEX
    if name != SINGLE:
        if not single.exists():
            raise FileNotFoundError(f"{folder} lacks {name}")
        return {single: None}
    tensors = _tensors_of(index) if index.exists() else None
    if single.exists():
        if tensors is not None:
            with _opened(single) as file:
                differ = sorted(set().union(*tensors.values()).symmetric_difference(file.keys()))
            if differ:
                raise ValueError(
                    f"{single} and {index} are of different models: only one of them has "
                    f"{_some(differ)}. Remove the wrong one"
                )
        return {single: None}
    missing = [SINGLE] if tensors is None else [n for n in tensors if not (folder / n).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: a checkpoint needs {SINGLE}, or {INDEX} and the "
            "files in it"
        )
    return {folder / name: stored for name, stored in (tensors or {}).items()}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: it has no JSON, or another value.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is {content!r}: it must be a JSON object")
    return content


def _tensors_of(index: Path) -> dict[str, set[str]]:
    """Each file's tensors, by the index."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} lacks weight_map, which has each tensor's file")
    tensors: dict[str, set[str]] = {}
    for tensor, name in places.items():
        # A path could be a file anywhere.
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ValueError(
                f"{index} has {tensor} in {name!r}: it must be a file name in the same folder"
            )
        tensors.setdefault(name, set()).add(tensor)
    return dict(sorted(tensors.items()))


def _opened(path: Path) -> Any:
    """A memory-mapped safetensors file; a damaged one raises ValueError."""
    try:
        return safetensors().safe_open(path, framework="numpy")
    except safetensors().SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or damaged: {error}") from error


def _some(names: list[str]) -> str:
    """The first of these names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
