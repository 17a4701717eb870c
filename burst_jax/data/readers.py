"""Random access to the documents of files: text files, JSON lines, arrays of token ids.

A reader knows the number and sizes of its documents; their contents are read from disk on demand.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from burst_jax.array_files import map_array
from burst_jax.errors import first_of, printable, shown
from burst_jax.json_files import check_regular, parse

# Bytes searched for line ends at once.
_SCAN = 1 << 24
# Bytes of a JSON line, which is read as a whole.
MAX_LINE = 1 << 28
# Name suffix of the file with the documents' offsets in an array of ids.
OFFSETS = ".offsets.npy"


class Reader(Protocol):
    """The documents of some files, in a fixed order.

    Attributes:
      sizes: int64 ``[documents]``, size of each document in bytes of text or in tokens. For a JSON
        line it is the size of the line, an upper bound of the size of its text.
      is_text: whether documents are text rather than token ids.
      is_chats: whether documents are conversations, which have a method ``record``, too.
      divisible: whether a document can be read in parts.
    """

    sizes: np.ndarray
    is_text: bool
    is_chats: bool
    divisible: bool

    def read(self, document: int, start: int, stop: int) -> bytes | np.ndarray:
        """Bytes or tokens ``start`` to ``stop`` of a document, or all of it if indivisible."""
        ...

    def name(self, document: int) -> str:
        """The location of the document, for error messages."""
        ...


class TextFiles:
    """Text files, one document each."""

    is_text = True
    is_chats = False
    divisible = True

    def __init__(self, files: list[Path]):
        sizes = np.array([check_regular(file) for file in files], np.int64)
        self._files = [file for file, size in zip(files, sizes, strict=True) if size]
        self.sizes = sizes[sizes > 0]

    def read(self, document: int, start: int, stop: int) -> bytes:
        """The file's bytes from ``start`` to ``stop``."""
        with self._files[document].open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def name(self, document: int) -> str:
        """The file's path."""
        return printable(self._files[document])


class _Records:
    """The lines of JSON lines files, one document each.

    Empty lines are skipped. Only offsets are held in memory. A line is parsed, and an invalid one
    raises, when it is read.
    """

    is_text = True
    divisible = False

    def __init__(self, files: list[Path]):
        self._files = files
        lines = [_lines(file) for file in files]
        self._first = np.cumsum([0, *(len(each) for each in lines)])
        self._starts, self._stops, self._numbers = np.concatenate(lines).T
        self.sizes = self._stops - self._starts

    def line(self, document: int, remedy: str) -> bytes:
        """The bytes of a line; ``remedy`` ends the message for one that is too long."""
        if self.sizes[document] > MAX_LINE:
            raise ValueError(
                f"{self.name(document)} has {self.sizes[document]} bytes: a line may have "
                f"{MAX_LINE}; {remedy}"
            )
        with self._file(document).open("rb") as file:
            file.seek(self._starts[document])
            return file.read(int(self.sizes[document]))

    def name(self, document: int) -> str:
        """The file's path and the line, counted from 1."""
        return f"{printable(self._file(document))}, line {self._numbers[document]},"

    def _file(self, document: int) -> Path:
        return self._files[np.searchsorted(self._first, document, side="right") - 1]


class JsonLines(_Records):
    """JSON lines files: each line is an object with a text under ``key``, one document."""

    is_chats = False

    def __init__(self, files: list[Path], key: str):
        super().__init__(files)
        self._key = key
        if len(self.sizes):
            self.read(0)  # Fails early for a wrong key or another format.

    def read(self, document: int, start: int = 0, stop: int = 0) -> bytes:
        """The whole text in UTF-8; ``start`` and ``stop`` are ignored."""
        del start, stop
        line = self.line(document, "write longer texts as text files, which are read in parts")
        remedy = f': each line must be an object like {{"{printable(self._key)}": "..."}}'
        record = parse(line, self.name(document), remedy)
        if not isinstance(record, dict) or self._key not in record:
            remedy = "set key= to the key of the text, on a command line --text-key"
            if isinstance(record, dict) and ("messages" in record or "completion" in record):
                remedy = f"for conversations set chats=True, on a command line --chat; or {remedy}"
            raise ValueError(
                f"{self.name(document)} has {kind_of(record)}, and no key {self._key!r}: {remedy}"
            )
        text = record[self._key]
        if not isinstance(text, str):
            raise ValueError(
                f"{self.name(document)} has {shown(text)} under {self._key!r}: it must be a string"
            )
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.name(document)} has half of a surrogate pair under {self._key!r}, which "
                f"UTF-8 cannot encode ({error.reason} at character {error.start}): write "
                "the whole pair"
            ) from None


class ChatLines(_Records):
    """JSON lines files: each line is a conversation, see :class:`burst_jax.data.ChatTokens`."""

    is_chats = True

    def __init__(self, files: list[Path]):
        super().__init__(files)
        if len(self.sizes):
            self.record(0)  # Fails early for another format.

    def read(self, document: int, start: int = 0, stop: int = 0) -> bytes:
        """The whole line; ``start`` and ``stop`` are ignored."""
        del start, stop
        return self.line(document, "cut the conversation")

    def record(self, document: int) -> dict[str, Any]:
        """The object of a line."""
        remedy = ': each line must be an object like {"messages": [...]}'
        record = parse(self.read(document), self.name(document), remedy)
        if not isinstance(record, dict):
            raise ValueError(f"{self.name(document)} is {kind_of(record)}{remedy}")
        return record


def kind_of(record: Any) -> str:
    """What a line's value is, for a message: its keys, or its type."""
    if isinstance(record, dict):
        return f"keys [{first_of([repr(key) for key in sorted(record)])}]"
    return type(record).__name__


def _lines(file: Path) -> np.ndarray:
    """int64 ``[lines, 3]``: start, stop and number of each line that is not empty."""
    size = check_regular(file)
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

    ``NAME.npy`` with ids ``[tokens]`` is one document, or with ``NAME.offsets.npy``, integers
    ``[documents + 1]``, several: document i is the ids from offset i to offset i + 1.
    """

    is_text = False
    is_chats = False
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
        file, _ = self._locate(document)
        first = int(self._starts[document])
        return np.array(self._ids[file][first + start : first + stop])

    def name(self, document: int) -> str:
        """The file's path and the document in it, counted from 0."""
        file, document = self._locate(document)
        return f"{printable(self._files[file])}, document {document},"

    def _locate(self, document: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, document, side="right")) - 1
        return file, document - int(self._first[file])


def offsets_path(file: Path) -> Path:
    """Path of the offsets that belong to a file of ids."""
    return file.with_name(file.stem + OFFSETS)


def _offsets(file: Path, ids: np.ndarray) -> np.ndarray:
    """int64 ``[documents + 1]``, start of each document in the flat ids, and the end."""
    path = offsets_path(file)
    if not path.is_symlink() and not path.exists():
        documents, length = ids.shape if ids.ndim == 2 else (1, len(ids))
        return np.arange(documents + 1, dtype=np.int64) * length
    if ids.ndim != 1:
        raise ValueError(
            f"{printable(file)} has shape {ids.shape}, and there is {printable(path.name)}: ids "
            "with offsets are [tokens]; remove one of the files, or flatten the ids"
        )
    offsets = np.array(_integers(path), np.int64)
    rises = offsets.ndim == 1 and len(offsets) > 0 and bool((offsets[1:] >= offsets[:-1]).all())
    if not rises or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError(
            f"{printable(path)} does not fit {printable(file.name)}: offsets must be "
            f"[documents + 1], from 0 up to the number of ids, {len(ids)}; make both again with "
            "save_tokens"
        )
    return offsets


def _integers(file: Path) -> np.ndarray:
    """The file's integers, ``[tokens]`` or ``[documents, tokens]``, memory-mapped."""
    array = map_array(file)
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{printable(file)} has dtype {array.dtype}: token ids are integers; cast the array "
            "before numpy.save"
        )
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{printable(file)} has shape {array.shape}: it must be [tokens], one document, or "
            "[documents, tokens]"
        )
    return array
