"""The tensors of a Hugging Face checkpoint, read with the library safetensors.

orbax, too, reads safetensors into sharded arrays. It is not used: it creates one array per tensor,
so the devices would hold a weight's layers twice while a program stacks and transposes them; and it
reads every .safetensors file of a folder, some of which have the weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from burst_jax.errors import first_of, optional, printable, shown
from burst_jax.json_files import MAX_INDEX_BYTES, check_regular, read_object
from burst_jax.models.hf.mxfp4 import BLOCKS, MXFP4, SCALES, Mxfp4Slice

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes of the JSON header of a file, which lists its tensors: about 80,000 of them.
MAX_HEADER_BYTES = 1 << 23
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
      quantization: "mxfp4" if pairs of tensors are blocks and scales of one tensor, which is then
        dequantized when it is read; None if not.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or no regular file, or the files disagree with their index.
    """

    def __init__(
        self,
        folder: Path,
        *,
        single: str = SINGLE,
        tensor_name: Callable[[str], str | None] = str,
        quantization: str | None = None,
    ) -> None:
        # The text that the files have by keys of their own.
        self.metadata: dict[str, str] = {}
        # The file of each tensor, and its name there.
        self._places: dict[str, tuple[Any, str]] = {}
        self._slices: dict[str, Any] = {}
        for path, expected in _files(folder, single).items():
            file = _opened(path)
            self.metadata |= file.metadata() or {}
            if expected is not None and (
                differ := sorted(expected.symmetric_difference(file.keys()))
            ):
                raise ValueError(
                    f"{printable(path)} and {printable(folder / INDEX)} do not agree: only one of "
                    f"them has {first_of(differ)}. Download both again"
                )
            for stored in file.keys():  # noqa: SIM118 (it is no dictionary)
                name = tensor_name(stored)
                if name is None:
                    continue
                if name in self._places:
                    raise ValueError(
                        f"{printable(path)} has {first_of([name])} again, under this or another "
                        "name: the checkpoint must have one"
                    )
                self._places[name] = file, stored
        if quantization == MXFP4:
            for name in [each for each in self._places if each.endswith(BLOCKS)]:
                self._dequantize(name.removesuffix(BLOCKS))

    def _dequantize(self, name: str) -> None:
        """Replaces blocks and scales by the tensor that they are."""
        if name + SCALES in self._places and name not in self._places:
            blocks, scales = (self.slice_of(name + end) for end in (BLOCKS, SCALES))
            self._slices[name] = Mxfp4Slice(name, blocks, scales)
            self._places[name] = self._places.pop(name + BLOCKS)
            del self._places[name + SCALES]

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._places.keys()

    def rename(self, old: str, new: str) -> None:
        """Gives a tensor another name."""
        self._places[new] = self._places.pop(old)

    def replace(self, names: Iterable[str], views: Mapping[str, Any]) -> None:
        """Replaces tensors by views of them, which have the methods of a safetensors slice."""
        places = [self._places.pop(name) for name in names]
        self._places.update(dict.fromkeys(views, places[0]))
        self._slices.update(views)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.slice_of(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as in safetensors, like BF16."""
        return self.slice_of(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> Any:
        """A slice of a tensor."""
        return self.slice_of(name)[index]

    def slice_of(self, name: str) -> Any:
        """The safetensors slice of a tensor, or what has its methods."""
        # Made on demand: a file may have a million tensors that nobody reads.
        if name not in self._slices:
            file, stored = self._places[name]
            self._slices[name] = file.get_slice(stored)
        return self._slices[name]


def _files(folder: Path, name: str) -> dict[Path, set[str] | None]:
    """The weight files, each with its tensors by the index.

    As in transformers the single file comes first, then those of the index.
    """
    single, index = folder / name, folder / INDEX
    if name != SINGLE:
        if not _is_there(single):
            raise FileNotFoundError(f"{printable(folder)} lacks {name}")
        return {single: None}
    tensors = _tensors_of(index) if _is_there(index) else None
    if _is_there(single):
        if tensors is not None:
            with _opened(single) as file:
                differ = sorted(set().union(*tensors.values()).symmetric_difference(file.keys()))
            if differ:
                raise ValueError(
                    f"{printable(single)} and {printable(index)} are of different models: only one "
                    f"of them has {first_of(differ)}. Remove the wrong one"
                )
        return {single: None}
    missing = [SINGLE] if tensors is None else [n for n in tensors if not _is_there(folder / n)]
    if missing:
        raise FileNotFoundError(
            f"{printable(folder)} lacks {first_of(missing)}: a checkpoint needs {SINGLE}, or "
            f"{INDEX} and the files in it"
        )
    return {folder / name: stored for name, stored in (tensors or {}).items()}


def _is_there(path: Path) -> bool:
    """Whether something, also a broken link, is at a path; see :func:`check_regular`."""
    if not path.is_symlink() and not path.exists():
        return False
    check_regular(path)
    return True


def _tensors_of(index: Path) -> dict[str, set[str]]:
    """Each file's tensors, by the index."""
    places = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{printable(index)} lacks weight_map, which has each tensor's file")
    tensors: dict[str, set[str]] = {}
    for tensor, name in places.items():
        # A path could be a file anywhere.
        inside = isinstance(name, str) and Path(name).name == name and name != ".."
        if not inside or not name.isprintable() or len(name) > 255:
            raise ValueError(
                f"{printable(index)} has weight_map {shown(tensor)} in {shown(name)}: it must be "
                "a file name in the same folder"
            )
        tensors.setdefault(name, set()).add(tensor)
    return dict(sorted(tensors.items()))


def _opened(path: Path) -> Any:
    """A memory-mapped safetensors file; a damaged one raises ValueError."""
    check_regular(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > MAX_HEADER_BYTES:
        raise ValueError(
            f"{printable(path)} is not a safetensors file, or damaged: it has a header of {header} "
            f"bytes, more than {MAX_HEADER_BYTES}"
        )
    try:
        return safetensors().safe_open(path, framework="numpy")
    except safetensors().SafetensorError as error:
        raise ValueError(
            f"{printable(path)} is not a safetensors file, or damaged: {printable(error)[:300]}"
        ) from None
