"""Random access to the documents of files: text files, JSON lines, arrays of token ids.

A reader counts its documents and knows the size of each, but holds none of them: a document is read
from the disk when it is asked for.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Protocol

import numpy as np

# Bytes that are searched for line ends at once.
_SCAN = 1 << 24
# How the name of a file ends that says where the documents start in an array of ids.
OFFSETS = ".offsets.npy"


class Reader(Protocol):
    """The documents of some files, in a fixed order.

    Attributes:
      sizes: int64 ``[documents]``, the size of each document. Its unit is a byte of text, or a
        token where the files hold tokens. Of a JSON line it is the line's size, because the text's
        is known only after parsing; it is never larger.
      is_text: whether a document is bytes of text; else it is token ids.
      divisible: whether a part of a document can be read alone.
    """

    sizes: np.ndarray
    is_text: bool
    divisible: bool

    def read(self, document: int, start: int, stop: int) -> bytes | np.ndarray:
        """The units from ``start`` to ``stop`` of a document, or all of it if it is indivisible."""
        ...

    def name(self, document: int) -> str:
        """Where the document stands, for messages."""
        ...


class TextFiles:
    """Text files, a document each. The unit is a byte."""

    is_text = True
    divisible = True

    def __init__(self, files: list[Path]):
        sizes = np.array([file.stat().st_size for file in files], np.int64)
        self._files = [file for file, size in zip(files, sizes, strict=True) if size]
        self.sizes = sizes[sizes > 0]

    def read(self, document: int, start: int, stop: int) -> bytes:
        """The file's bytes from ``start`` to ``stop``."""
        with self._files[document].open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def name(self, document: int) -> str:
        """The file's path."""
        return str(self._files[document])


class JsonLines:
    """Files of a JSON object a line, whose ``key`` holds a text; a line is a document.

    Empty lines are passed over. Only the lines' places are held in memory. A line is parsed when it
    is read, and one that is broken raises then.
    """

    is_text = True
    divisible = False

    def __init__(self, files: list[Path], key: str):
        self._files, self._key = files, key
        lines = [_lines(file) for file in files]
        self._first = np.cumsum([0, *(len(each) for each in lines)])
        self._starts, self._stops, self._numbers = np.concatenate(lines).T
        self.sizes = self._stops - self._starts
        if len(self.sizes):
            self.read(0)  # A wrong key or another format shows at once.

    def read(self, document: int, start: int = 0, stop: int = 0) -> bytes:
        """The whole text, in UTF-8; a part of it cannot be read alone."""
        del start, stop
        with self._file(document).open("rb") as file:
            file.seek(self._starts[document])
            line = file.read(int(self.sizes[document]))
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{self.name(document)} is not JSON ({error}): each line must be an object like "
                f'{{"{self._key}": "..."}}'
            ) from None
        if not isinstance(record, dict) or self._key not in record:
            keys = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f"{self.name(document)} has {keys}, and no key {self._key!r}: name the text's key "
                "with key="
            )
        text = record[self._key]
        if not isinstance(text, str):
            raise ValueError(
                f"{self.name(document)} has a {type(text).__name__} under {self._key!r}: it must "
                "be a string"
            )
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.name(document)} has half of a surrogate pair, which no UTF-8 text holds "
                f"({error.reason} at character {error.start}): write the whole pair"
            ) from None

    def name(self, document: int) -> str:
        """The file's path and the line, counted from 1."""
        return f"{self._file(document)}, line {self._numbers[document]},"

    def _file(self, document: int) -> Path:
        return self._files[np.searchsorted(self._first, document, side="right") - 1]


def _lines(file: Path) -> np.ndarray:
    """int64 ``[lines, 3]``: where each line that is not empty starts and stops, and its number."""
    size = file.stat().st_size
    if not size:
        return np.zeros((0, 3), np.int64)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = [
            np.flatnonzero(np.frombuffer(text[at : at + _SCAN], np.uint8) == ord("\n")) + at
            for at in range(0, size, _SCAN)
        ]
        ends = np.concatenate(found)
        if not len(ends) or ends[-1] != size - 1:
            ends = np.append(ends, size)
        starts = np.append(0, ends[:-1] + 1)
        numbers = np.arange(1, len(ends) + 1)
        filled = ends > starts
        for line in np.flatnonzero(ends - starts == 1):  # An empty line may end in \r\n.
            filled[line] = text[starts[line]] not in b"\r \t"
    return np.stack([starts, ends, numbers], 1)[filled].astype(np.int64)


class TokenArrays:
    """Memory-mapped token ids in ``.npy`` files, ``[tokens]`` or ``[documents, tokens]``.

    Beside ``NAME.npy`` with ids ``[tokens]`` may stand ``NAME.offsets.npy``, integers
    ``[documents + 1]``: document i is the ids from the i-th offset to the next. Without it they are
    one document.
    """

    is_text = False
    divisible = True

    def __init__(self, files: list[Path]):
        self._files = files
        arrays = [_integers(file) for file in files]
        offsets = [_offsets(*each) for each in zip(files, arrays, strict=True)]
        self._ids = [array.reshape(-1) for array in arrays]
        self._first = np.cumsum([0, *(len(each) - 1 for each in offsets)])
        self._starts = np.concatenate([each[:-1] for each in offsets])
        self.sizes = np.concatenate([np.diff(each) for each in offsets])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The ids from ``start`` to ``stop``, in the file's dtype."""
        file, _ = self._place(document)
        first = int(self._starts[document])
        return np.array(self._ids[file][first + start : first + stop])

    def name(self, document: int) -> str:
        """The file's path and the document in it, counted from 0."""
        file, document = self._place(document)
        return f"{self._files[file]}, document {document},"

    def _place(self, document: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, document, side="right")) - 1
        return file, document - int(self._first[file])


def offsets_of(file: Path) -> Path:
    """Where the offsets of the documents in a file of ids stand, if there are any."""
    return file.with_name(file.stem + OFFSETS)


def _offsets(file: Path, ids: np.ndarray) -> np.ndarray:
    """int64 ``[documents + 1]``, where each document starts in the flat ids, and their end."""
    beside = offsets_of(file)
    if not beside.is_file():
        documents, length = ids.shape if ids.ndim == 2 else (1, len(ids))
        return np.arange(documents + 1, dtype=np.int64) * length
    if ids.ndim != 1:
        raise ValueError(
            f"{file} has shape {ids.shape}, and {beside.name} beside it: ids with offsets are "
            "[tokens]; remove one of the files, or flatten the ids"
        )
    offsets = np.array(_integers(beside), np.int64)
    rises = offsets.ndim == 1 and len(offsets) > 0 and bool((np.diff(offsets) >= 0).all())
    if not rises or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError(
            f"{beside} does not fit {file.name}: offsets must be [documents + 1], from 0 up to the "
            f"number of ids, {len(ids)}; make both anew with save_tokens"
        )
    return offsets


def _integers(file: Path) -> np.ndarray:
    """The file's integers, ``[tokens]`` or ``[documents, tokens]``, on the disk."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{file} is no array of numbers ({error}): write it with numpy.save"
        ) from None
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{file} has dtype {array.dtype}: token ids are integers; cast the array before "
            "numpy.save"
        )
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{file} has shape {array.shape}: it must be [tokens], one document, or "
            "[documents, tokens]"
        )
    return array
