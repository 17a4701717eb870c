"""On-disk format of a checkpoint: orbax writes the arrays, ``record.json`` lists every file.

orbax 0.12.8 guarantees that a checkpoint appears atomically (it writes to a temporary folder and
renames it), but not that its bytes are still the ones written: OCDBT has checksums for its B-tree
nodes, not for the array chunks, and orbax exposes no option for one. A flipped byte would be
restored as a weight (``tests/training/test_checkpoints.py`` shows it). So each process hashes the
files it wrote, and ``record.json``, written last, lists all files with their sizes and hashes.

A folder is one of these checkpoints by its content, never by its name: see :func:`is_checkpoint`.
That is why orbax's ``CheckpointManager`` does not keep the steps: it takes any folder with a number
as its name for its own, counts it, prunes it, and removes temporary folders of other programs that
have the name of its next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from burst_jax.errors import first_of, short_name
from burst_jax.json_files import check_regular, read_bounded

RECORD = "record.json"
# orbax writes it first and again after the record, then with the name of the handler. Nothing in it
# is restored.
_METADATA = "_CHECKPOINT_METADATA"
_READERS = 8
# Names the checkpoint being written, while it is.
_WRITING = ".checkpoints.writing"
# Holds the checkpoint being removed, while it is.
_REMOVED = ".checkpoints.removed"
# Arrays in a message.
_LISTED = 100
# Bytes of a record, which has a line for each file, or of orbax's metadata, which is read.
_MAX_BYTES = 1 << 28


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
        with (folder / RECORD).open("w") as file:
            file.write(text + _hash_bytes(text.encode()) + "\n")
            file.flush()
            # Otherwise a machine failure could keep the checkpoint's name and lose its record.
            os.fsync(file.fileno())


class Damage(Exception):
    """A checkpoint is not what was written: the file and what is wrong with it."""


def read_record(step_folder: Path) -> Record:
    """Reads the record of a checkpoint and verifies its hash.

    Raises:
      Damage: it is missing or differs from what was written, or names a file outside of the folder.
    """
    data = _read(step_folder, RECORD)
    text, _, digest = data.removesuffix(b"\n").rpartition(b"\n")
    if _hash_bytes(text + b"\n").encode() != digest:
        raise Damage(f"{RECORD}: content does not match its hash")
    try:
        fields = json.loads(text.decode())
        if not isinstance(fields, dict):
            raise ValueError("its kind")
        if other := sorted(fields.keys() ^ {"arrays", "extra", "files"}):
            raise ValueError(first_of(other))
        return Record(_arrays(fields["arrays"]), fields["extra"], _sizes(fields["files"]))
    except (ValueError, RecursionError) as error:
        # The hash is right, so the bytes are intact.
        raise Damage(
            f"{RECORD}: written by another version of burst_jax, which differs in {error}; read it "
            "with that version"
        ) from None


def _arrays(entries: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by name; raises ValueError with the key of an entry of another kind."""
    found = {}
    for name, entry in _items("arrays", entries):
        match entry:
            case [[*shape], str(dtype)] if all(map(_is_size, shape)):
                found[name] = tuple(shape), dtype
            case _:
                raise ValueError(f"arrays.{short_name(name)}")
    return found


def _sizes(entries: Any) -> dict[str, tuple[int, str]]:
    """Size and hash by name; raises ValueError with the key of an entry of another kind."""
    found = {}
    for name, entry in _items("files", entries):
        path = PurePosixPath(name)
        # A record may come from anybody, and files are read by their names in it.
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            raise Damage(f"{RECORD}: files has {short_name(name)}, no path within the checkpoint")
        match entry:
            case [int(size), str(digest)] if _is_size(size):
                found[name] = size, digest
            case _:
                raise ValueError(f"files.{short_name(name)}")
    if not found:
        raise ValueError("files, which is empty")
    return found


def _items(key: str, entries: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(entries, dict):
        raise ValueError(key)
    return entries.items()


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _read(step_folder: Path, name: str) -> bytes:
    """The content of a small file of a checkpoint."""
    with _as_damage():
        return read_bounded(step_folder / name, _MAX_BYTES, name)


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Raises the errors of reading a file as :class:`Damage`; their messages name it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Damage(str(error)) from None


def is_checkpoint(folder: Path) -> bool:
    """Whether :class:`Handler` has written this folder, also if it is damaged.

    Decided by orbax's metadata, which names the handler, or else by a readable record. A number as
    a name proves nothing: it may be a year, or a checkpoint of another library.
    """
    try:
        return json.loads(_read(folder, _METADATA))["item_handlers"] == _HANDLER
    except (Damage, ValueError, TypeError, KeyError, RecursionError):
        return has_record(folder)


def has_record(folder: Path) -> bool:
    """Whether a folder has a readable record."""
    try:
        read_record(folder)
    except Damage:
        return False
    return True


def remove(step_folder: Path) -> None:
    """Removes a checkpoint, with all that is in its folder.

    It is moved first, so that no part of it is left under a step's name if this is interrupted: the
    next call removes the rest, and so does :func:`remove_incomplete`. Of a link only the link is
    removed.

    Raises:
      OSError: it cannot be moved, or a file cannot be removed, of this or of an earlier checkpoint.
    """
    removed = step_folder.parent / _REMOVED
    removed.mkdir(exist_ok=True)
    # What could not be removed before does not stand in the way.
    place = Path(tempfile.mkdtemp(prefix=f"{step_folder.name}.", dir=removed))
    step_folder.rename(place / step_folder.name)
    shutil.rmtree(place)
    shutil.rmtree(removed)


def begin(folder: Path, step: int) -> None:
    """Notes that checkpoint ``step`` is being written, for :func:`remove_incomplete`.

    Raises:
      ValueError: orbax' temporary folder of this step exists, so it is another program's.
      OSError: the note cannot be written.
    """
    if found := _incomplete(folder, step):
        raise ValueError(
            f"step is {step}: {found[0]} exists, which another program is writing, or has left "
            "incomplete; use another folder, or remove it"
        )
    (folder / _WRITING).write_text(str(step))


def end(folder: Path) -> None:
    """Removes the note of :func:`begin`; the checkpoint is complete."""
    (folder / _WRITING).unlink(missing_ok=True)


def remove_incomplete(folder: Path) -> None:
    """Removes the checkpoint that a run was writing when it ended, or failed to write.

    And what an interrupted :func:`remove` has left.

    A name is no proof: other programs that use orbax name their temporary folders in the same way,
    and a killed run may have left one without a file.
    """
    with contextlib.suppress(OSError):  # It is in no step's way.
        shutil.rmtree(folder / _REMOVED)
    note = folder / _WRITING
    try:
        step = int(note.read_bytes()[:20])
    except (OSError, ValueError):
        return
    for path in _incomplete(folder, step):
        shutil.rmtree(path)
    note.unlink()


def _incomplete(folder: Path, step: int) -> list[Path]:
    """The temporary folders of orbax for a checkpoint, whoever writes it."""
    name = re.compile(rf"{step}\.orbax-checkpoint-tmp(-[0-9]+)?")
    return [
        path
        for path in folder.iterdir()
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def check_files(step_folder: Path, record: Record, part: int = 0, parts: int = 1) -> None:
    """Verifies sizes and hashes of every ``parts``-th file of a checkpoint, starting at ``part``.

    Raises:
      Damage: a file is missing, unreadable, or differs from what was written.
    """

    def check(name: str) -> None:
        size, digest = record.files[name]
        with _as_damage():
            found = check_regular(step_folder / name, name)
            if found != size:
                raise Damage(f"{name}: has {found} bytes, {size} were written")
            if _hash_file(step_folder / name) != digest:
                raise Damage(f"{name}: content does not match its hash")

    with ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(check, sorted(record.files)[part::parts]):
            pass


def compare(folder: Path, record: Record, wanted: dict[str, Any], partial: bool) -> None:
    """Raises a ValueError that lists the differences between saved and requested arrays.

    If ``partial``, arrays that only the checkpoint has are ignored.
    """
    there = record.arrays
    lines = [f"{short_name(name)}: not in the checkpoint" for name in wanted if name not in there]
    if not partial:
        lines += [
            f"{short_name(name)}: only in the checkpoint" for name in there if name not in wanted
        ]
    for name in wanted:
        if name in there and there[name] != wanted[name]:
            (shape, dtype), (other_shape, other_dtype) = there[name], wanted[name]
            lines.append(
                f"{short_name(name)}: {short_name(dtype)}{list(shape)[:16]} in the checkpoint, "
                f"{other_dtype}{list(other_shape)} requested"
            )
    if lines:
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        part = "" if partial else "pass partial=True to restore a part of it, "
        raise ValueError(
            f"checkpoint {folder} has another state: {len(lines)} arrays differ. Use the model and "
            f"the optimizer that it was saved with (extra may name them), {part}or start over in "
            "another folder:\n  " + "\n  ".join(sorted(lines)[:_LISTED] + more)
        )


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
            if path.name != _METADATA and str(path.relative_to(folder)) not in hashes
        ]
        hashes |= _hash_files(folder, others)
        dataclasses.replace(self._record, files=hashes).write(folder)


# How orbax's metadata names the handler, also that of checkpoints on disk.
_HANDLER = "burst_jax.training.checkpoint_files.Handler"


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
