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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of a model of text and images: what is not its language model, and what stands before the names
# of the language model's tensors.
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"(language_model\.model|model\.language_model)\.")


def safetensors() -> ModuleType:
    """The library, imported when it is needed.

    Raises:
      ImportError: it is not installed; the message says what to install.
    """
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "model folders need the library safetensors: pip install 'burst-jax[models]'"
        ) from error
    return safetensors


class TensorFiles:
    """The tensors of a folder: their names, shapes, and parts of them as NumPy arrays.

    Args:
      folder: what transformers' ``save_pretrained`` writes.
      text_part: whether to take the language model of a model of text and images, under the names
        that its tensors have in a model of their own.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a file is damaged, or the files and their index do not agree.
    """

    def __init__(self, folder: Path, *, text_part: bool = False) -> None:
        self._slices: dict[str, Any] = {}
        for path in _files(folder):
            try:
                # Kept open, and mapped into memory, so that reading a part reads that part alone.
                file = safetensors().safe_open(path, framework="numpy")
            except safetensors().SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
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

    def read(self, name: str, index: tuple[slice, ...]) -> Any:
        """A part of a tensor, a NumPy array."""
        return self._slices[name][index]


def _text_name(stored: str) -> str:
    return _TEXT.sub("model.", stored, count=1).removeprefix("language_model.")


def _files(folder: Path) -> list[Path]:
    """The weight files, as transformers finds them: those of the index, or the only one."""
    index = folder / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: a folder needs {SINGLE}, or {INDEX} and the "
            "files that it names"
        )
    return [folder / name for name in names]
