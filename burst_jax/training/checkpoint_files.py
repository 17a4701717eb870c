"""On-disk format of a checkpoint: orbax writes the arrays, ``record.json`` lists every file.

orbax 0.12.8 guarantees that a checkpoint appears atomically (it writes to a temporary folder and
renames it), but not that its bytes are still the ones written: OCDBT has checksums for its B-tree
nodes, not for the array chunks, and orbax exposes no option for one. A flipped byte would be
restored as a weight (``tests/training/test_checkpoints.py`` shows it). So each process hashes the
files it wrote, and ``record.json``, written last, lists all files with their sizes and hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

RECORD = "record.json"
# orbax rewrites it after the record. Nothing in it is restored.
_UNREAD = "_CHECKPOINT_METADATA"
_READERS = 8


@dataclasses.dataclass(frozen=True)
class Record:
    """Contents of a checkpoint.

    Attributes:
      arrays: name -> (shape, dtype) of each array; random keys have dtypes like ``key<fry>``.
      extra: JSON value that the caller saved with the arrays.
      files: path within the checkpoint -> (size in bytes, hash).
    """

    arrays: dict[str, tuple[tuple[int, ...], str]]
    extra: Any
    files: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the record into ``folder``, with its own hash in the last line."""
        text = json.dumps(dataclasses.asdict(self)) + "\n"
        (folder / RECORD).write_text(text + _hash_bytes(text.encode()) + "\n")


class Damage(Exception):
    """A checkpoint is not what was written: the file and what is wrong with it."""


def read_record(step_folder: Path) -> Record:
    """Reads the record of a checkpoint and verifies its hash.

    Raises:
      Damage: it is missing or differs from what was written.
    """
    try:
        data = (step_folder / RECORD).read_bytes()
    except OSError as error:
        raise Damage(f"{RECORD}: {error.strerror}") from None
    text, _, digest = data.removesuffix(b"\n").rpartition(b"\n")
    if _hash_bytes(text + b"\n").encode() != digest:
        raise Damage(f"{RECORD}: content does not match its hash")
    try:
        fields = json.loads(text)
        for name in ("arrays", "files"):
            fields[name] = {key: tuple(value) for key, value in fields[name].items()}
        fields["arrays"] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in fields["arrays"].items()
        }
        return Record(**fields)
    except (TypeError, ValueError, KeyError, AttributeError):
        # The hash is right, so the bytes are intact.
        raise Damage(
            f"{RECORD}: written by another version of burst_jax; read it with that version"
        ) from None


def check_files(step_folder: Path, record: Record, part: int = 0, parts: int = 1) -> None:
    """Verifies sizes and hashes of every ``parts``-th file of a checkpoint, starting at ``part``.

    Raises:
      Damage: a file is missing, unreadable, or differs from what was written.
    """

    def check(name: str) -> None:
        size, digest = record.files[name]
        try:
            found = (step_folder / name).stat().st_size
            if found != size:
                raise Damage(f"{name}: has {found} bytes, {size} were written")
            if _hash_file(step_folder / name) != digest:
                raise Damage(f"{name}: content does not match its hash")
        except OSError as error:
            raise Damage(f"{name}: {error.strerror}") from None

    with ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(check, sorted(record.files)[part::parts]):
            pass


class Handler(ocp.StandardCheckpointHandler):
    """Saves arrays as orbax' standard handler does, then the record."""

    async def async_save(  # pyrefly: ignore[bad-override] - orbax passes only these two
        self, directory: epath.Path, args: SaveArgs
    ) -> list[Any]:
        """Copies the arrays to the host; the returned future writes and hashes the files."""
        self._record = args.record
        futures = await super().async_save(directory, args=ocp.args.StandardSave(args.arrays))
        hash_files = partial(_hash_own_files, Path(directory))
        return [ocp.future.ChainedFuture(futures or [], hash_files)]

    def finalize(self, directory: epath.Path) -> None:
        """Merges the files of all processes and writes the record; runs on process 0."""
        super().finalize(directory)
        folder = Path(directory)
        hashes: dict[str, tuple[int, str]] = {}
        for process in range(jax.process_count()):
            own = folder / _own_hashes(process)
            hashes |= json.loads(own.read_text())
            own.unlink()
        others = [
            path
            for path in _files(folder)
            if path.name != _UNREAD and str(path.relative_to(folder)) not in hashes
        ]
        hashes |= _hash_files(folder, others)
        dataclasses.replace(self._record, files=hashes).write(folder)


# orbax requires arguments for both directions, but Handler never restores.
@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):
    """What :class:`Handler` saves: the arrays by name, and the record without its files."""

    arrays: dict[str, jax.Array]
    record: Record


def restore_arrays(
    step_folder: Path, abstract: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads the arrays named in ``abstract`` onto its shardings."""
    # StandardCheckpointHandler wraps this one, but restores all arrays or none.
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


def _own_hashes(process: int) -> str:
    return f"hashes.{process}.json"


def _hash_own_files(folder: Path) -> None:
    """Hashes the files this process wrote and leaves the hashes for process 0."""
    process = jax.process_index()
    hashes = _hash_files(folder, _files(folder / f"ocdbt.process_{process}"))
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


def _hash_bytes(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()
