"""The weight files of a folder, by the library safetensors.

orbax reads safetensors, too, straight into arrays that are split over devices. It is not used here:
it makes one array of each tensor in the files, so the layers of a weight would lie on the devices
twice while a compiled program stacks and transposes them; it reads every file of a folder that ends
in .safetensors, and some folders have the weights a second time under other names; and it reads no
part of a tensor without an array for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from burst_jax.errors import optional

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The dtypes of weights. Others are of quantized ones, which need scales.
FLOATING = ("F64", "F32", "F16", "BF16")
# Of a model of text and images: what is not its language model, and what stands before the names
# of the language model's tensors.
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"(language_model\.model|model\.language_model)\.")


def safetensors() -> ModuleType:
    """The library, with its functions for NumPy; an ImportError says what to install."""
    needed = {"user": "a model folder", "extra": "models"}
    optional("safetensors.numpy", **needed)
    return optional("safetensors", **needed)


class TensorFiles:
    """The tensors of a folder: their names, shapes, and parts of them as NumPy arrays.

    Args:
      folder: what transformers' ``save_pretrained`` writes.
      single: the name of the file that has all tensors; that of a model may be several files.
      text_part: whether to take the language model of a model of text and images, under the names
        that its tensors have in a model of their own.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a file is damaged, or the files and their index do not agree.
    """

    def __init__(self, folder: Path, *, single: str = SINGLE, text_part: bool = False) -> None:
        self._slices: dict[str, Any] = {}
        for path, expected in _files(folder, single).items():
            file = _opened(path)
            if expected is not None and (
                differ := sorted(expected.symmetric_difference(file.keys()))
            ):
                raise ValueError(
                    f"{path} and {folder / INDEX} do not agree: one of them alone has "
                    f"{_some(differ)}. Get both anew"
                )
            for stored in file.keys():  # noqa: SIM118 (it is no dictionary)
                if text_part and _OTHER_PARTS.match(stored):
                    continue
                name = _text_name(stored) if text_part else stored
                if name in self._slices:
                    raise ValueError(f"{path} has {name}, and so has another file of the folder")
                self._slices[name] = file.get_slice(stored)

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as safetensors calls it, like BF16."""
        return self._slices[name].get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> Any:
        """A part of a tensor, a NumPy array."""
        return self._slices[name][index]


def _text_name(stored: str) -> str:
    return _TEXT.sub("model.", stored, count=1).removeprefix("language_model.")


def _files(folder: Path, name: str) -> dict[Path, set[str] | None]:
    """The weight files, as transformers finds them, each with the tensors that the index says.

    That is the single file, if there is one, and else those of the index.
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
                    f"{single} and {index} are of different models: one of them alone has "
                    f"{_some(differ)}. Remove the one that is wrong"
                )
        return {single: None}
    missing = [SINGLE] if tensors is None else [n for n in tensors if not (folder / n).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: a folder needs {SINGLE}, or {INDEX} and the "
            "files that it names"
        )
    return {folder / name: stored for name, stored in (tensors or {}).items()}


def _tensors_of(index: Path) -> dict[str, set[str]]:
    """Of each file the tensors that it has, by the index."""
    try:
        content = json.loads(index.read_text())
    except ValueError as error:
        raise ValueError(f"{index} is no JSON: {error}") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} lacks weight_map, which says in which file each tensor is")
    tensors: dict[str, set[str]] = {}
    for tensor, name in places.items():
        # A name with a folder in it could be a file anywhere.
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ValueError(
                f"{index} says that {tensor} is in {name!r}: it must be the name of a file in the "
                "same folder"
            )
        tensors.setdefault(name, set()).add(tensor)
    return dict(sorted(tensors.items()))


def _opened(path: Path) -> Any:
    """An open safetensors file, mapped into memory, so that reading a part reads that part alone.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return safetensors().safe_open(path, framework="numpy")
    except safetensors().SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error


def _some(names: list[str]) -> str:
    """The first of these names, of which there may be hundreds."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
