"""Checkpoints of a training run: asynchronous, atomic, verified, restored on any mesh."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout

from burst_jax.errors import check_integer, printable
from burst_jax.parallel.processes import (
    another_may_be_gone,
    by_first_process,
    gather_json,
)
from burst_jax.training import checkpoint_files as files

# How many of the newest checkpoints are tried when several are damaged.
_TRIED = 64
_SHARED = ".all-processes-see-this"
_LOCK = ".checkpoints.lock"
_STEP = re.compile("0|[1-9][0-9]*")
# How a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_HOST_MEMORY = "pinned_host"


class Restored(NamedTuple):
    """Result of :meth:`Checkpoints.restore`.

    Attributes:
      step: the step that was saved.
      state: the pytree of arrays, on the requested shardings.
      extra: the JSON value saved with it.
      refused: step -> reason, for each newer checkpoint that is damaged: a file is missing or not
        as written. The next :meth:`Checkpoints.save` renames it to ``<step>.refused``, or
        ``<step>.refused.1`` and so on if that exists.
    """

    step: int
    state: Any
    extra: Any
    refused: dict[int, str]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or no existing one can be read."""


class Checkpoints:
    """The checkpoints of one run, in one folder with a subfolder per step.

    A checkpoint is written to a temporary folder and renamed when it is complete, so a killed
    process leaves the earlier checkpoints intact. Every file is hashed when it is written and
    verified when it is read: a damaged checkpoint is never restored.

    Only folders that a Checkpoints has written are listed, renamed or removed, by their content:
    other folders with a number as a name stay as they are.

    One run at a time may write in a folder: :meth:`lock`, and so the first :meth:`save`, raises if
    another one has locked it, until that one is closed or its process ends in any way. Any number
    may read.

    With several processes all of them call every method except :meth:`latest`, and the folder must
    be on a shared file system.

    Use it as a context manager or call :meth:`close`: a program that ends without either may lose
    the checkpoint being written, as orbax reports on stderr.

    Args:
      folder: folder of the checkpoints, created by the first :meth:`save`.
      keep: number of checkpoints to keep. :meth:`wait`, and so the next :meth:`save`, removes older
        ones when a new one is complete.
      timeout: seconds that a process waits for the others to write their part.

    Raises:
      ValueError: ``keep`` or ``timeout`` is below 1, ``folder`` is a file.
    """

    def __init__(self, folder: str | Path, keep: int = 3, *, timeout: int = 600) -> None:
        for name, value in (("keep", keep), ("timeout", timeout)):
            check_integer(name, value, 1)
        if Path(folder).is_file():
            raise ValueError(f"folder is {folder}, a file: name a folder")
        # orbax accepts only absolute paths.
        self.folder = Path(folder).absolute()
        self._keep, self._timeout = keep, timeout
        self._writer: ocp.AsyncCheckpointer | None = None
        self._writing: int | None = None
        self._refused: list[int] = []
        self._lock: FileLock | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """The newest complete step, or None; it is not verified."""
        return max(self._steps(), default=None)

    def lock(self) -> None:
        """Reserves the folder, which is created, for this run's writes until :meth:`close`.

        :meth:`save` does so too. A run that calls it before :meth:`restore` finds out at its start
        whether another one is still writing there. The lock is one of ``filelock`` on
        ``.checkpoints.lock``, which ends with the process, so a crash leaves nothing to clean up:
        the file stays, the lock does not. On a file system without locks a line on stderr reports
        that there is none.

        Raises:
          ValueError: another run, or another Checkpoints of this process, has locked the folder.
          OSError: the folder cannot be created or written to.
        """
        by_first_process(self._take_lock)

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _LOCK
        lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            with path.open(errors="replace") as file:
                owner = printable(file.read(300)) or "another process"
            raise ValueError(
                f"{self.folder} is being written by {owner}: close that one, wait until it ends or "
                "stop it, or use another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"{path} cannot be locked on this file system ({error.strerror}): two runs that "
                f"write {self.folder} at the same time would not notice each other",
                file=sys.stderr,
                flush=True,
            )
        else:
            owner = (
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"
            )
            with contextlib.suppress(OSError):  # On a full disk only the message lacks the owner.
                path.write_text(owner)
        self._lock = lock

    def save(self, step: int, state: Any, extra: Any = None) -> None:
        """Starts to save ``state`` and ``extra`` as checkpoint ``step``, and returns.

        On return the arrays are copied to the host and may be donated; files are written in the
        background. Waits first if the previous checkpoint is still being written.

        Args:
          step: number of the checkpoint, greater than all existing ones.
          state: pytree of ``jax.Array``, random keys included. Each device's shard is copied once
            (pinned host memory to host memory); replicated shards are written once.
          extra: JSON value, like the loader's state and the run's configuration; the same on all
            processes.

        Raises:
          ValueError: a leaf of ``state`` is no array, or not on all processes; ``extra`` is not
            JSON or differs between processes; ``step`` is not greater than existing ones, or
            another folder has its name, also that of an incomplete one; the folder is not shared by
            all processes, or see :meth:`lock`.
          CheckpointError: this checkpoint, or the previous one, could not be written.
        """
        step = check_integer("step", step, 0)
        arrays = _by_name(state)
        record = files.Record(_shapes(arrays), _json(extra))
        self.wait()
        try:
            if self._writer is None:
                self._writer = self._make_writer()
            self._set_refused_aside()
        except OSError as error:
            raise self._failed(step, error) from error
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(
                f"step is {step}: {self.folder} already holds checkpoint {latest}; resume from it "
                "(restore), use another folder, or remove the checkpoints that you do not want"
            )
        place = self.folder / str(step)
        if place.is_symlink() or place.exists():
            raise ValueError(
                f"step is {step}: {place} exists and is no checkpoint of burst_jax; move it, or "
                "use another folder"
            )
        try:
            by_first_process(functools.partial(files.begin, self.folder, step))
        except OSError as error:
            raise self._failed(step, error) from error
        try:
            args = files.SaveArgs(_copy_host_memory(arrays), record)
            self._writer.save(place, args=args)
        except Exception as error:
            raise self._failed(step, error) from error
        self._writing = step

    def wait(self) -> None:
        """Waits until the last checkpoint is complete, then removes those beyond ``keep``.

        Raises:
          CheckpointError: it could not be written. Earlier checkpoints are intact.
        """
        step, self._writing = self._writing, None
        if step is None or self._writer is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            raise self._failed(step, error) from error
        if jax.process_index() == 0:
            try:
                files.end(self.folder)
            except OSError as error:
                raise self._failed(step, error) from error
            # Damaged ones neither count nor are removed.
            steps = sorted(self._steps(), reverse=True)
            intact = [step for step in steps if files.has_record(self.folder / str(step))]
            for old in intact[self._keep :]:
                try:
                    files.remove(self.folder / str(old))
                except OSError as error:  # It is tried again after the next checkpoint.
                    place = self.folder / str(old)
                    print(f"{place} could not be removed: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Waits for the last checkpoint, see :meth:`wait`, and ends threads and :meth:`lock`."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            lock, self._lock = self._lock, None
            try:
                if writer is not None:
                    writer.close()
            finally:
                if lock is not None:
                    lock.release()

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        check: Callable[[Any], None] | None = None,
    ) -> Restored | None:
        """Reads a checkpoint onto the shardings of ``abstract_state``.

        Mesh, shardings and number of processes may differ from those of the run that saved it.
        Every file is verified first. If the newest checkpoint is damaged, the one before it is
        restored and a line on stderr reports both; the next :meth:`save` renames the damaged one,
        see :class:`Restored`.

        Args:
          abstract_state: pytree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays.
          step: the checkpoint; None is the newest that is not damaged.
          partial: whether ``abstract_state`` may be a part of what was saved, like the weights
            without the optimizer state: ``{"params": ...}`` of ``{"params": ..., "opt_state":
            ...}``, or ``[params]`` of ``[params, opt_state]``. The rest uses no memory.
          check: called with the saved ``extra`` before arrays are compared and read; what it raises
            propagates.

        Returns:
          Step, state, ``extra`` and rejected checkpoints; None if ``step`` is None and there is no
          checkpoint.

        Raises:
          ValueError: the checkpoint has other arrays than ``abstract_state``; the message lists
            the first 100 differences.
          FileNotFoundError: there is no checkpoint ``step``.
          CheckpointError: checkpoint ``step`` is damaged, or all are.
        """
        wanted = {name: _abstract(name, leaf) for name, leaf in _by_name(abstract_state).items()}
        # Newest first; all processes use the listing of process 0.
        steps = gather_json(sorted(self._steps(), reverse=True)[:_TRIED])[0]
        if step is not None:
            if check_integer("step", step, 0) not in steps:
                raise FileNotFoundError(
                    f"{self.folder} has no checkpoint {step}; there are {sorted(steps) or 'none'}"
                )
            steps = [step]
        refused: dict[int, str] = {}
        for candidate in steps:
            folder = self.folder / str(candidate)
            reason = _damage(folder)
            if reason is not None:
                refused[candidate] = reason
                continue
            record = files.read_record(folder)
            if check is not None:
                check(record.extra)
            files.compare(folder, record, _shapes(wanted), partial)
            self._report(refused, candidate)
            try:
                arrays = files.restore_arrays(folder, wanted)
            except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
                raise CheckpointError(
                    f"checkpoint {folder} cannot be read, though its files are as its record has "
                    f"them: {_reason(error)}"
                ) from error
            leaves = [arrays[name] for name in wanted]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
            return Restored(candidate, state, record.extra, refused)
        if refused:
            raise CheckpointError(
                "; ".join(
                    f"checkpoint {self.folder / str(s)} is damaged: {refused[s]}" for s in refused
                )
                + ". Nothing is restored: pass another step, or start over in another folder"
            )
        return None

    def _report(self, refused: dict[int, str], restored: int) -> None:
        self._refused = list(refused)
        if jax.process_index() == 0:
            for step, reason in refused.items():
                print(
                    f"checkpoint {self.folder / str(step)} is damaged: {reason}; "
                    f"restoring {self.folder / str(restored)} instead",
                    file=sys.stderr,
                    flush=True,
                )

    def _set_refused_aside(self) -> None:
        if self._refused:
            by_first_process(functools.partial(self._rename, self._refused))
            self._refused = []

    def _rename(self, steps: list[int]) -> None:
        for place in (self.folder / str(step) for step in steps):
            if files.is_checkpoint(place):
                aside = Path(f"{place}.refused")
                number = itertools.count(1)
                while aside.is_symlink() or aside.exists():
                    aside = Path(f"{place}.refused.{next(number)}")
                place.rename(aside)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [
            int(path.name)
            for path in self.folder.iterdir()
            if _STEP.fullmatch(path.name) and files.is_checkpoint(path)
        ]

    def _make_writer(self) -> ocp.AsyncCheckpointer:
        """Locks the folder and removes what a killed run was writing there.

        Called by the first :meth:`save`, so a program that only reads removes nothing.
        """
        self.lock()
        by_first_process(functools.partial(files.remove_incomplete, self.folder))
        if jax.process_count() > 1:
            self._check_shared()
        return ocp.AsyncCheckpointer(files.Handler(), timeout_secs=self._timeout)

    def _check_shared(self) -> None:
        mark = self.folder / _SHARED
        by_first_process(mark.touch)
        missing = [index for index, seen in enumerate(gather_json(mark.exists())) if not seen]
        by_first_process(mark.unlink)
        if missing:
            raise ValueError(
                f"{self.folder} is not the same folder on all processes: {missing} do not see what "
                "process 0 writes; use a folder on a shared file system"
            )

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        """The error to raise for a checkpoint that could not be written."""
        # The next writer removes the incomplete checkpoint.
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # It repeats the same error.
                writer.close()
        latest = max((s for s in self._steps() if s not in self._refused), default=None)
        last = "there is none before it" if latest is None else f"the last good one is {latest}"
        remedy = "Free disk space, or use another folder"
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Make it writable, or use another folder"
        if another_may_be_gone(error):
            remedy = "Another process of the run may be gone"
        return CheckpointError(
            f"checkpoint {step} could not be written to {self.folder}: {_reason(error)}; {last}. "
            f"{remedy}"
        )


def _reason(error: Exception) -> str:
    """The operating system's message if the error has one, else the error's first line."""
    text = str(error).strip() or repr(error)
    found = re.search(r"([^:]+) \[os_error_code", text)
    return found[1].strip() if found else text.splitlines()[0]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, like ``params.layers.kernel``."""
    named: dict[str, Any] = {}
    if not jax.tree.leaves(tree):
        raise ValueError(f"state is {tree!r}, without any array: pass a pytree of arrays")
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"state has two leaves named {name}: rename one of them")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state has {name}, of type {type(leaf).__name__}: it must be a jax.Array, or a "
                "jax.ShapeDtypeStruct to restore; numbers and text go into extra"
            )
        sharding = leaf.sharding
        if jax.process_count() > 1 and sharding is not None and sharding.is_fully_addressable:
            raise ValueError(
                f"state has {name} only on this process' devices: put it onto the mesh of all "
                "processes, like jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"
            )
        named[name] = leaf
    return named


def _copy_host_memory(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Copies arrays in host memory: orbax writes them from there while the next step overwrites
    them."""
    on_host = {name: x for name, x in named.items() if x.sharding.memory_kind == _HOST_MEMORY}
    return named | _copies(on_host)


@jax.jit
def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _abstract(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError(
            f"abstract_state has {name} without a sharding: "
            "use jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _shapes(named: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in named.items()}


def _json(extra: Any) -> Any:
    """``extra`` after a round trip through JSON, compared between processes."""
    try:
        text = json.dumps(extra, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra cannot be written as JSON ({error}): give it numbers, text, lists and dicts; "
            "arrays belong in state"
        ) from None
    if len(set(gather_json(text))) > 1:
        raise ValueError(
            "extra differs between processes: one copy of it is saved, so it must be the same on "
            "all. burst_jax.data.gather_state makes one state of all processes' loaders"
        )
    return json.loads(text)


def _damage(folder: Path) -> str | None:
    """The damage to a checkpoint, or None. Each process verifies a part; all get the result."""
    reason = None
    try:
        record = files.read_record(folder)
        files.check_files(folder, record, jax.process_index(), jax.process_count())
    except files.Damage as damage:
        reason = str(damage)
    return next((each for each in gather_json(reason) if each is not None), None)
