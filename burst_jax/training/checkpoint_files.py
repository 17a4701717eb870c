"""The files of a checkpoint: orbax writes the arrays, a record beside them says what must be there.

orbax stores an array as compressed chunks without a checksum of their own, so that a flipped byte
could pass for a weight. Each process therefore hashes the files that it has written, and the last
file of a checkpoint, ``record.json``, lists every file with its size and hash. orbax renames the
folder to its final name only after that, so that a folder with a final name is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

RECORD = "record.json"
# orbax writes it anew after the record. Nothing in it is restored.
_UNREAD = "_CHECKPOINT_METADATA"
_READERS = 8


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint holds.

    Attributes:
      arrays: name -> (shape, dtype) of each array; random keys have dtypes like ``key<fry>``.
      extra: what the caller saved beside the arrays.
      files: path within the checkpoint -> (bytes, hash).
    """

    arrays: dict[str, tuple[tuple[int, ...], str]]
    extra: Any
    files: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the record into ``folder``, its own hash in the last line."""
        text = json.dumps(dataclasses.asdict(self)) + "\n"
        (folder / RECORD).write_text(text + _hash_text(text) + "\n")


class Damage(Exception):
    """A checkpoint is not what was written: which file, and what is wrong with it."""


def read_record(step_folder: Path) -> Record:
    """Reads the record of a checkpoint and checks its hash.

    Raises:
      Damage: it is missing, or not what was written.
    """
    path = step_folder / RECORD
    try:
        text, _, digest = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    except OSError as error:
        raise Damage(f"{RECORD}: {error.strerror}") from None
    text += b"\n"
    if hashlib.blake2b(text).hexdigest().encode() != digest:
        raise Damage(f"{RECORD}: its bytes are not those that were written")
    try:
        fields = json.loads(text)
        for name in ("arrays", "files"):
            fields[name] = {key: tuple(value) for key, value in fields[name].items()}
        fields["arrays"] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in fields["arrays"].items()
        }
        return Record(**fields)
    except (TypeError, ValueError, KeyError, AttributeError):
        # The bytes are those that were written, so it was not this code that wrote them.
        raise Damage(
            f"{RECORD}: another version of burst_jax wrote it; read it with that"
        ) from None


def check_files(step_folder: Path, record: Record, part: int = 0, parts: int = 1) -> None:
    """Reads each ``parts``-th file of a checkpoint, from ``part`` on, and compares it.

    Raises:
      Damage: a file is missing, shorter or longer, unreadable, or has other bytes.
    """
    names = sorted(record.files)[part::parts]

    def check(name: str) -> None:
        size, digest = record.files[name]
        try:
            found = (step_folder / name).stat().st_size
            if found != size:
                raise Damage(f"{name}: has {found} bytes, {size} were written")
            if _hash_file(step_folder / name) != digest:
                raise Damage(f"{name}: its bytes are not those that were written")
        except OSError as error:
            raise Damage(f"{name}: {error.strerror}") from None

    with ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(check, names):
            pass


class Handler(ocp.AsyncCheckpointHandler):
    """Saves arrays by orbax' own handler, and the record after them."""

    def __init__(self) -> None:
        self._arrays = ocp.StandardCheckpointHandler()
        self._record: Record | None = None

    async def async_save(self, directory: epath.Path, args: SaveArgs) -> list[Any]:
        """Copies the arrays to the host; the rest happens in what it returns."""
        self._record = args.record
        futures = await self._arrays.async_save(directory, args=ocp.args.StandardSave(args.arrays))
        return [_Then(futures or [], lambda: _hash_own_files(Path(directory)))]

    def save(self, directory: epath.Path, args: SaveArgs) -> None:
        """Not used: every checkpoint is saved asynchronously."""
        raise NotImplementedError

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        """Not used: :func:`restore_arrays` needs no checkpointer."""
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Merges what all processes have written, and writes the record; on process 0."""
        self._arrays.finalize(directory)
        folder = Path(directory)
        files: dict[str, tuple[int, str]] = {}
        for process in range(jax.process_count()):
            own = folder / _own_hashes(process)
            files |= json.loads(own.read_text())
            own.unlink()
        here = [
            path
            for path in _files(folder)
            if path.name != _UNREAD and str(path.relative_to(folder)) not in files
        ]
        files |= _hash_files(folder, here)
        assert self._record is not None
        dataclasses.replace(self._record, files=files).write(folder)

    def close(self) -> None:
        """Releases what orbax holds."""
        self._arrays.close()


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):
    """What :class:`Handler` saves: the arrays by name, and the record without its files."""

    arrays: dict[str, jax.Array]
    record: Record


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class RestoreArgs(ocp.args.CheckpointArgs):
    """Nothing: orbax wants arguments for both directions."""


def restore_arrays(
    step_folder: Path, abstract: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads those arrays of a checkpoint that ``abstract`` has, onto its shardings."""
    # What saves, StandardCheckpointHandler, is made of this one, and reads all arrays or none.
    handler = ocp.PyTreeCheckpointHandler()
    args = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    try:
        return handler.restore(epath.Path(step_folder), args=args)
    finally:
        handler.close()


class _Then:
    """A future for orbax: the ``futures``, and then ``action``."""

    def __init__(self, futures: Iterable[Any], action: Callable[[], None]) -> None:
        self._futures, self._action = futures, action

    def result(self, timeout: int | None = None) -> None:
        for future in self._futures:
            future.result(timeout=timeout)
        self._action()


def _own_hashes(process: int) -> str:
    return f"hashes.{process}.json"


def _hash_own_files(folder: Path) -> None:
    """Hashes what this process has written, and leaves the hashes for process 0."""
    process = jax.process_index()
    own = folder / f"ocdbt.process_{process}"
    hashes = _hash_files(folder, _files(own))
    (folder / _own_hashes(process)).write_text(json.dumps(hashes))


def _files(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _hash_files(folder: Path, paths: Iterable[Path]) -> dict[str, tuple[int, str]]:
    def entry(path: Path) -> tuple[str, tuple[int, str]]:
        return str(path.relative_to(folder)), (path.stat().st_size, _hash_file(path))

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(pool.map(entry, paths))


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()
