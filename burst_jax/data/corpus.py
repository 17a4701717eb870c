"""Documents on disk, and their split into a training and a held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from burst_jax.data.readers import OFFSETS, ChatLines, JsonLines, Reader, TextFiles, TokenArrays
from burst_jax.errors import printable
from burst_jax.json_files import check_regular

_JSON_LINES = {".jsonl", ".ndjson"}
_ARRAYS = {".npy"}
# Binary formats, which would train a byte model on noise.
_UNSUPPORTED = {
    ".arrow", ".bin", ".bz2", ".gz", ".h5", ".hdf5", ".idx", ".json", ".npz", ".parquet", ".pdf",
    ".pickle", ".pkl", ".pt", ".pth", ".pyc", ".safetensors", ".tar", ".tfrecord", ".xz", ".zip",
    ".zst",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents on disk, or parts of them, read on demand; ``len`` is their number.

    Created by :func:`open_corpus` and :func:`python_source`.

    Attributes:
      reader: reader of the documents.
      documents: int64 ``[documents]``, indices of the documents in the reader.
      starts: int64 ``[documents]``, first byte or token of each.
      stops: int64 ``[documents]``, end of each.
      description: where the documents come from.
    """

    reader: Reader
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    description: str

    def __len__(self) -> int:
        return len(self.documents)

    def __repr__(self) -> str:
        return f"Corpus({self.description}: {len(self)} documents)"

    @property
    def size(self) -> int:
        """Total bytes, or tokens for token arrays, of the documents."""
        return int((self.stops - self.starts).sum())

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """Splits the documents into a training part and a held-out part.

        Held-out documents are evenly spaced: every 20th with 0.05. They depend only on the number
        of documents, so every run on the same files holds out the same ones. Of a single text file
        or array, the end is held out.

        Args:
          held_out: fraction of the documents, in [0, 1). At least one document is held out unless
            it is 0, and at least one is left for training.

        Returns:
          The training part and the held-out part, which is empty with ``held_out=0``.

        Raises:
          ValueError: ``held_out`` is not in [0, 1), or there is only one JSON line.
        """
        if isinstance(held_out, bool) or not 0 <= held_out < 1:
            raise ValueError(
                f"held_out is {held_out}: it must be a fraction of the documents, at least 0 and "
                "below 1, like 0.05"
            )
        if len(self) == 1 and held_out > 0:
            return self._split_single(held_out)
        count = min(max(1, round(len(self) * held_out)), len(self) - 1) if held_out else 0
        held = np.zeros(len(self), bool)
        held[((np.arange(count) + 1) * len(self)) // max(count, 1) - 1] = True
        return self._part(~held, "training part"), self._part(held, "held-out part")

    def _split_single(self, held_out: float) -> tuple[Corpus, Corpus]:
        if not self.reader.divisible:
            raise ValueError(
                f"held_out is {held_out}, but {self.description} has a single document, which "
                "cannot be cut: add documents, or use held_out=0"
            )
        cut = self.stops - np.round((self.stops - self.starts) * held_out).astype(np.int64)
        both = np.ones(1, bool)
        return (
            self._part(both, "training part", stops=cut),
            self._part(both, "held-out part", starts=cut),
        )

    def _part(
        self,
        chosen: np.ndarray,
        what: str,
        starts: np.ndarray | None = None,
        stops: np.ndarray | None = None,
    ) -> Corpus:
        return Corpus(
            self.reader,
            self.documents[chosen],
            (self.starts if starts is None else starts)[chosen],
            (self.stops if stops is None else stops)[chosen],
            f"{what} of {self.description}",
        )

    def fingerprint(self) -> str:
        """A hash of the documents' number, order and sizes, and of the part of them this is.

        Contents are not hashed, because reading them all would take too long, nor are paths, so a
        folder may be moved.
        """
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.reader.sizes, self.documents, self.starts, self.stops):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
            digest.update(b"|")
        return digest.hexdigest()


def open_corpus(
    path: str | Path | None = None,
    *,
    pattern: str = "**/*",
    key: str = "text",
    chats: bool = False,
) -> Corpus:
    """Opens a file, or the files of a folder, as documents.

    The suffix selects the format, and all files of a folder must have the same:

    - ``.jsonl``, ``.ndjson``: one JSON object per line, whose ``key`` holds the document's text;
      with ``chats`` it is a conversation.
    - ``.npy``: token ids, integers ``[documents, tokens]``, or ``[tokens]``, one document unless
      :func:`burst_jax.data.save_tokens` wrote it, together with offsets.
    - Any other suffix: text, one document per file.

    Only offsets and sizes are held in memory, about 90 bytes per document. JSON lines are counted
    here, and parsed when they are read.

    Args:
      path: a file or a folder, or None for Python's own source, see :func:`python_source`.
      pattern: which files of a folder to read, as in ``pathlib.Path.glob``. Hidden and empty files
        are skipped. Files are sorted by name, so the same folder gives the same documents anywhere.
      key: key of the text in a JSON line.
      chats: whether each JSON line is a conversation, with the key ``messages``, or ``prompt`` and
        ``completion``: see :class:`burst_jax.data.ChatTokens`, their tokenizer.

    Returns:
      The documents.

    Raises:
      ValueError: no such path, no document in it, several formats or an unsupported one, a first
        line that is no JSON object with that key, an array that does not hold token ids, or
        ``chats`` for another format than JSON lines.
    """
    if path is None:
        if chats:
            raise ValueError("chats is True, and path None: name a file of JSON lines, or a folder")
        return python_source()
    if not str(path):  # pathlib takes it for the current folder.
        raise ValueError("path is '': name a file or a folder, or use None for Python's source")
    path = Path(path)
    if path.is_dir():
        files = _files_in(path, pattern)
    else:
        try:
            check_regular(path)
        except FileNotFoundError:
            raise ValueError(
                f"path is {printable(path)}: there is no such file or folder"
            ) from None
        files = [path]
    kinds: dict[str, Path] = {}
    for file in files:
        kinds.setdefault(_kind(file), file)
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        raise ValueError(
            f"path is {printable(path)}, which holds {first} ({printable(one.name)}) and {second} "
            f"({printable(other.name)}): choose files of one kind with pattern=, like '**/*.txt'"
        )
    (kind,) = kinds
    if chats and kind != "JSON lines":
        raise ValueError(
            f"chats is True, and path {printable(path)} holds {kind}: conversations are JSON "
            "lines, .jsonl"
        )
    match kind:
        case "JSON lines" if chats:
            reader = ChatLines(files)
        case "JSON lines":
            reader = JsonLines(files, key)
        case "token arrays":
            reader = TokenArrays(files)
        case _:
            reader = TextFiles(files)
    return _whole(reader, printable(path))


def python_source() -> Corpus:
    """The source files of the running Python, one document each: text available everywhere.

    Files that are not UTF-8, a few of Python's tests, are skipped.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
        if "site-packages" not in file.parts and _is_utf8(file)
    ]
    return _whole(TextFiles(files), f"Python's own source files in {root}")


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _files_in(folder: Path, pattern: str) -> list[Path]:
    try:
        found = [file for file in folder.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"pattern is {pattern!r}: {error}; write it like '**/*.txt'") from None
    names = {file.relative_to(folder): file for file in found}
    names = {
        name: file
        for name, file in names.items()
        if not any(part.startswith(".") for part in name.parts) and not name.name.endswith(OFFSETS)
    }
    if not names:
        raise ValueError(
            f"path is {printable(folder)}: no file in it matches {pattern!r}; hidden files are "
            "skipped"
        )
    return [names[name] for name in sorted(names, key=Path.as_posix)]


def _kind(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix in _UNSUPPORTED:
        raise ValueError(
            f"{printable(file)} ends in {printable(suffix)}, which is not supported: use text "
            "files, JSON lines (.jsonl) or arrays of token ids (.npy), or choose files with "
            "pattern="
        )
    if suffix in _JSON_LINES:
        return "JSON lines"
    return "token arrays" if suffix in _ARRAYS else "text"


def _whole(reader: Reader, description: str) -> Corpus:
    stops = np.asarray(reader.sizes)
    if not stops.sum():
        raise ValueError(f"{description} holds no document: all files are empty")
    return Corpus(reader, np.arange(len(stops)), np.zeros_like(stops), stops, description)
