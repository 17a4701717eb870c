"""JSON of the user's: configs, indices, records and lines of data, of bounded size and depth.

Whatever a file contains, reading it ends: with its value, or with a ValueError that names the file.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from burst_jax.errors import printable, shown

# Bytes of a config or a record. An index has a line for each tensor.
MAX_BYTES, MAX_INDEX_BYTES = 1 << 22, 1 << 25
# Levels of nesting, far below those at which Python's recursion ends.
MAX_DEPTH = 32


def check_regular(path: Path, name: str | None = None) -> int:
    """The size of a file in bytes; links are followed. Messages have ``name``, or else the path.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is a folder, a pipe or a device, from which reading might not end.
    """
    name = printable(path if name is None else name)
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{name} does not exist") from None
    except (OSError, ValueError) as error:  # A loop of links; a name with a null character.
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise ValueError(f"{name} is {kind}: it must be a regular file")
    return found.st_size


def read_bounded(path: Path, most: int = MAX_BYTES, name: str | None = None) -> bytes:
    """The bytes of a regular file. Messages have ``name``, or else the path.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no regular file, or has more than ``most`` bytes.
    """
    check_regular(path, name)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        name = printable(path if name is None else name)
        raise ValueError(
            f"{name} has more than {most} bytes: it is no file of this kind, or damaged"
        )
    return data


def read_object(path: Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no regular file, is larger than ``most`` bytes, or see :func:`parse_object`.
    """
    return parse_object(read_bounded(path, most), str(path))


def parse_object(text: bytes | str, name: str) -> dict[str, Any]:
    """The JSON object in a text, whose ``name`` is for messages.

    Raises:
      ValueError: it is not UTF-8 or not JSON, has a key twice, is nested deeper than ``MAX_DEPTH``,
        or is another value than an object.
    """
    content = parse(text, name, object_pairs_hook=_unique)
    if not isinstance(content, dict):
        raise ValueError(f"{printable(name)} is {shown(content)}: it must be a JSON object")
    return content


def parse(text: bytes | str, name: str, remedy: str = "", **options: Any) -> Any:
    """The JSON value in a text; ``options`` are those of ``json.loads``.

    Raises:
      ValueError: it is not UTF-8 or not JSON, or nested deeper than ``MAX_DEPTH``. The message ends
        with ``remedy``.
    """
    try:
        content = json.loads(text if isinstance(text, str) else text.decode(), **options)
        _check_depth(content)
    except RecursionError:
        raise ValueError(
            f"{printable(name)} is nested deeper than {MAX_DEPTH} levels{remedy}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{printable(name)} is not JSON ({error}){remedy}") from None
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise RecursionError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"it has the key {shown(twice)} twice")
    return found
