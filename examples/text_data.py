"""Text as bytes: read from disk, split into training and held-out parts, cut into rows."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

# One byte between files, so that a model sees where one ends.
SEPARATOR = b"\0"


class Text(NamedTuple):
    """Training and held-out bytes, uint8, and where they came from."""

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load_text(path: Path | None = None, held_out_fraction: float = 0.05) -> Text:
    """Reads a file, a folder's files, or (None) the source files of the running Python.

    Files are taken in the order of their names, so the same files give the same bytes anywhere. Of
    several files every 1 / ``held_out_fraction``-th is held out; of one, its end.

    Raises:
      ValueError: nothing readable there.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if "site-packages" not in file.parts]
        source = f"Python's own source files in {root}"
    elif path.is_dir():
        root, files, source = path, [file for file in path.rglob("*") if file.is_file()], str(path)
    elif path.is_file():
        root, files, source = path.parent, [path], str(path)
    else:
        raise ValueError(f"--data is {path}: there is no such file or folder")
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    texts = [text for file in files if (text := file.read_bytes())]
    if not texts:
        raise ValueError(f"--data is {path}: no text in it")
    if len(texts) == 1:
        cut = round(len(texts[0]) * (1 - held_out_fraction))
        train, held_out = [texts[0][:cut]], [texts[0][cut:]]
    else:
        every = min(max(2, round(1 / held_out_fraction)), len(texts))
        held_out = texts[every - 1 :: every]
        train = [text for index, text in enumerate(texts) if (index + 1) % every]
    return Text(_join(train), _join(held_out), f"{source}: {len(texts)} files")


def training_rows(text: np.ndarray, batch: int, length: int, *, seed: int, step: int) -> np.ndarray:
    """``[batch, length]`` bytes from random places: the same for a seed and step on any mesh."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length + 1, batch)
    return text[starts[:, None] + np.arange(length)]


def held_out_rows(text: np.ndarray, batch: int, length: int, batches: int) -> list[np.ndarray]:
    """``batches`` times ``[batch, length]`` bytes, evenly spread; they overlap if there are few."""
    starts = np.linspace(0, len(text) - length, batch * batches).astype(np.int64)
    rows = text[starts[:, None] + np.arange(length)]
    return list(rows.reshape(batches, batch, length))


def _join(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(SEPARATOR.join(texts), np.uint8)
