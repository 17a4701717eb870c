"""Checkpoints of a training run: asynchronous, atomic, checked when they are read, on any mesh."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from burst_jax.errors import check_integer
from burst_jax.parallel.processes import another_may_be_gone
from burst_jax.training import checkpoint_files as files
from burst_jax.training.at_exit import before_threads_end

# So many of the newest checkpoints are tried when several are damaged.
_TRIED = 64
_SHARED = ".all-processes-see-this"
# In the name of a folder that orbax has not completed.
_HALF = ".orbax-checkpoint-tmp"
# In the errors of Python's threads and thread pools.
_ENDING = ("interpreter shutdown", "new futures after shutdown")
_HOST_MEMORY = "pinned_host"


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` returns.

    Attributes:
      step: the step that was saved.
      state: the pytree of arrays, on the shardings that were asked for.
      extra: what was saved beside it.
      refused: step -> reason, for each newer checkpoint that was damaged.
    """

    step: int
    state: Any
    extra: Any
    refused: dict[int, str]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none that is there can be read."""


class Checkpoints:
    """The checkpoints of one run, in one folder, a subfolder for each step.

    A checkpoint is written under another name and renamed when all of it is on the disk, so a
    process that is killed leaves the earlier checkpoints as they were. Every file is hashed while
    it is written and compared when it is read: a damaged checkpoint is never restored.

    With several processes every method but :meth:`latest` is called by all of them, and the folder
    must be one that all of them see.

    Use it as a context manager, or call :meth:`close`. A program that ends without either still
    waits for the checkpoint that is being written, but if that fails, a line on stderr is all that
    says so. Python 3.12.0 to 3.12.2 start no threads in a program that is ending: with them the
    checkpoint that is being written is lost then, and the line says it.

    Args:
      folder: where the checkpoints are; it is made when the first one is saved.
      keep: number of checkpoints that stay. When a new one is complete, :meth:`wait`, and so the
        next :meth:`save`, removes older ones.
      timeout: seconds that a process waits for the others to write their part.

    Raises:
      ValueError: ``keep`` or ``timeout`` is below 1, ``folder`` is a file.
    """

    def __init__(self, folder: str | Path, keep: int = 3, *, timeout: int = 600) -> None:
        for name, value in (("keep", keep), ("timeout", timeout)):
            check_integer(name, value, 1)
        if Path(folder).is_file():
            raise ValueError(f"folder is {folder}, a file: name a folder")
        # orbax takes absolute paths only.
        self.folder = Path(folder).absolute()
        self._keep, self._timeout = keep, timeout
        self._writer: ocp.AsyncCheckpointer | None = None
        self._writing: int | None = None
        self._refused: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """The newest step that is complete; None if there is none. It is not checked for damage."""
        return max(self._steps(), default=None)

    def save(self, step: int, state: Any, extra: Any = None) -> None:
        """Starts to save ``state`` and ``extra`` as checkpoint ``step``, and returns.

        When it returns, the arrays are copied to the host and may be donated. The files are written
        while the training goes on. If the one before is still being written, it waits for it.

        Args:
          step: number of the checkpoint, above all that are there.
          state: pytree of ``jax.Array``, random keys among them. Each device's part is copied to
            the host once, or from there if it is in pinned memory; of parts that several devices
            hold, one is written.
          extra: what JSON can hold, like the loader's state and the run's configuration; the same
            on all processes.

        Raises:
          ValueError: a leaf of ``state`` is no array, or not on all processes; JSON cannot hold
            ``extra``, or it differs between processes; ``step`` is not above those that are there;
            the folder is not the same one on all processes.
          CheckpointError: this checkpoint, or the one before, could not be written.
        """
        step = check_integer("step", step, 0)
        arrays = _by_name(state)
        record = files.Record(_shapes(arrays), _json(extra))
        self.wait()
        self._set_refused_aside()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(
                f"step is {step}: {self.folder} holds checkpoint {latest} already; go on from it "
                "(restore), use another folder, or remove the checkpoints that you do not want"
            )
        if self._writer is None:
            try:
                self._writer = self._make_writer()
            except OSError as error:
                raise self._failed(step, error) from error
        try:
            args = files.SaveArgs(_with_own_memory(arrays), record)
            self._writer.save(self.folder / str(step), args=args)
        except Exception as error:
            raise self._failed(step, error) from error
        self._writing = step
        _end_with_the_program(self)

    def wait(self) -> None:
        """Returns when the last checkpoint is complete, and those beyond ``keep`` are removed.

        Raises:
          CheckpointError: it could not be written. The checkpoints before it are as they were.
        """
        step, self._writing = self._writing, None
        _UNFINISHED.discard(self)
        if step is None or self._writer is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            raise self._failed(step, error) from error
        if jax.process_index() == 0:
            for old in sorted(self._steps())[: -self._keep]:
                # What cannot be removed is tried again with the next.
                shutil.rmtree(self.folder / str(old), ignore_errors=True)

    def close(self) -> None:
        """Waits for the last checkpoint, see :meth:`wait`, and ends the threads that write."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        check: Callable[[Any], None] | None = None,
    ) -> Restored | None:
        """Reads a checkpoint onto the shardings of ``abstract_state``.

        The mesh, the shardings and the number of processes may differ from those of the run that
        saved it. Every file is read and compared with its hash first. If the newest checkpoint is
        damaged, a line on stderr says so and names the one that is taken in its place; the damaged
        one stays, and the next :meth:`save` renames it to ``<step>.refused``.

        Args:
          abstract_state: pytree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays.
          step: the checkpoint; None is the newest one that is not damaged.
          partial: whether ``abstract_state`` may be a part of what was saved, like the weights
            without the optimizer's state: ``{"params": ...}`` of ``{"params": ..., "opt_state":
            ...}``, or ``[params]`` of ``[params, opt_state]``. No memory is taken for the rest.
          check: called with what was saved beside the state, before the arrays are compared and
            read; what it raises is raised.

        Returns:
          The step, the state, what was saved beside it, and what was refused; None if ``step`` is
          None and there is no checkpoint at all.

        Raises:
          ValueError: the checkpoint has other arrays than ``abstract_state``; the message lists
            every difference.
          FileNotFoundError: there is no checkpoint ``step``.
          CheckpointError: checkpoint ``step`` is damaged, or all are.
        """
        wanted = {name: _abstract(name, leaf) for name, leaf in _by_name(abstract_state).items()}
        there = self._agreed_steps()
        if step is not None:
            if check_integer("step", step, 0) not in there:
                raise FileNotFoundError(
                    f"{self.folder} has no checkpoint {step}; there are {sorted(there) or 'none'}"
                )
            there = [step]
        refused: dict[int, str] = {}
        for candidate in there:
            folder = self.folder / str(candidate)
            reason = _damage(folder)
            if reason is not None:
                refused[candidate] = reason
                continue
            record = files.read_record(folder)
            if check is not None:
                check(record.extra)
            _compare(folder, record, _shapes(wanted), partial)
            self._report(refused, candidate)
            arrays = files.restore_arrays(folder, wanted)
            leaves = [arrays[name] for name in wanted]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
            return Restored(candidate, state, record.extra, refused)
        if refused:
            raise CheckpointError(
                "; ".join(
                    f"checkpoint {self.folder / str(s)} is damaged: {refused[s]}" for s in refused
                )
                + ". Nothing is restored: pass another step, or begin anew in another folder"
            )
        return None

    def _report(self, refused: dict[int, str], taken: int) -> None:
        self._refused = list(refused)
        if jax.process_index() == 0:
            for step, reason in refused.items():
                print(
                    f"checkpoint {self.folder / str(step)} is refused: {reason}; "
                    f"checkpoint {self.folder / str(taken)} is taken",
                    file=sys.stderr,
                    flush=True,
                )

    def _set_refused_aside(self) -> None:
        if not self._refused:
            return
        if jax.process_index() == 0:
            for step in self._refused:
                place = self.folder / str(step)
                if place.exists():
                    aside = self.folder / f"{step}.refused"
                    shutil.rmtree(aside, ignore_errors=True)
                    place.rename(aside)
        self._refused = []
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("burst_jax refused checkpoints")

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]

    def _agreed_steps(self) -> list[int]:
        """The newest steps first, as process 0 sees the folder."""
        steps = sorted(self._steps(), reverse=True)[:_TRIED]
        if jax.process_count() == 1:
            return steps
        row = np.full(_TRIED, -1, np.int32)
        row[: len(steps)] = steps
        return [int(x) for x in multihost_utils.broadcast_one_to_all(row) if x >= 0]

    def _make_writer(self) -> ocp.AsyncCheckpointer:
        """Makes the folder, and removes what a killed run was writing there.

        It is called at the first :meth:`save`, so that a program which only reads removes nothing.
        """
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for half in self.folder.glob(f"*{_HALF}*"):
                shutil.rmtree(half)
        if jax.process_count() > 1:
            self._check_shared()
        return ocp.AsyncCheckpointer(files.Handler(), timeout_secs=self._timeout)

    def _check_shared(self) -> None:
        mark = self.folder / _SHARED
        if jax.process_index() == 0:
            mark.touch()
        multihost_utils.sync_global_devices("burst_jax shared folder")
        seen = np.asarray(multihost_utils.process_allgather(np.array(mark.exists())))
        if jax.process_index() == 0:
            mark.unlink()
        if not seen.all():
            raise ValueError(
                f"{self.folder} is not the same folder on all processes: {np.flatnonzero(~seen)} "
                "do not see what process 0 writes; use a folder of a file system that all share"
            )

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        """The error to raise for a checkpoint that could not be written."""
        # The next writer removes what was left half written.
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # The same error once more.
                writer.close()
        latest = self.latest()
        last = "there is none before it" if latest is None else f"the last good one is {latest}"
        remedy = "Make room there, or use another folder"
        if another_may_be_gone(error):
            remedy = "Another process of the run may be gone"
        elif any(text in str(error) for text in _ENDING):
            remedy = (
                "The program ended before it was complete, and Python before 3.12.3 starts no "
                "threads then: use `with Checkpoints(...)`, or call close()"
            )
        return CheckpointError(
            f"checkpoint {step} could not be written to {self.folder}: {_reason(error)}; {last}. "
            f"{remedy}"
        )


# Those with a checkpoint that is still being written.
_UNFINISHED: set[Checkpoints] = set()


def _end_with_the_program(checkpoints: Checkpoints) -> None:
    """Sees to it that the program does not end before what is being written is complete."""
    before_threads_end(close_unfinished)
    _UNFINISHED.add(checkpoints)


def close_unfinished() -> None:
    """Closes all that have a checkpoint which is still being written, and prints what fails."""
    for checkpoints in list(_UNFINISHED):
        try:
            checkpoints.close()
        except CheckpointError as error:
            # The program is ending, so there is nobody to raise to.
            print(f"error: {error}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """What the operating system said, if it is in the error, else the error's first line."""
    text = str(error).strip() or repr(error)
    said = re.search(r"([^:]+) \[os_error_code", text)
    return said[1].strip() if said else text.splitlines()[0]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, like ``params.layers.kernel``."""
    named: dict[str, Any] = {}
    if not jax.tree.leaves(tree):
        raise ValueError(
            f"state is {tree!r}, without any array: pass weights, or what restores them"
        )
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"state has two leaves named {name}: rename one of them")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state has {name}, a {type(leaf).__name__}: it must be a jax.Array, or a "
                "jax.ShapeDtypeStruct to restore; numbers and text go into extra"
            )
        sharding = leaf.sharding
        if jax.process_count() > 1 and sharding is not None and sharding.is_fully_addressable:
            raise ValueError(
                f"state has {name} on this process' devices alone: put it onto the mesh of all "
                "processes, like jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"
            )
        named[name] = leaf
    return named


def _with_own_memory(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays, with copies of those that are in the host's memory.

    orbax writes from the memory in which it finds them there, and the next step needs it.
    """
    on_host = {name: x for name, x in named.items() if x.sharding.memory_kind == _HOST_MEMORY}
    return named | _copies(on_host)


@jax.jit
def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _abstract(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError(
            f"abstract_state has {name} without a sharding: "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...) says where it goes"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _shapes(named: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in named.items()}


def _json(extra: Any) -> Any:
    """``extra`` as JSON gives it back, compared between processes."""
    try:
        text = json.dumps(extra, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra cannot be written as JSON ({error}): give it numbers, text, lists and dicts; "
            "arrays belong in state"
        ) from None
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(np.uint32(zlib.crc32(text.encode())))
        if len(set(np.asarray(sums).tolist())) > 1:
            raise ValueError(
                "extra differs between processes: one copy of it is saved, so it must be the same "
                "on all. burst_jax.data.gather_state makes one state of all processes' loaders"
            )
    return json.loads(text)


def _compare(folder: Path, record: files.Record, wanted: dict[str, Any], partial: bool) -> None:
    """Raises a ValueError that lists every difference between the arrays there and those wanted.

    If ``partial``, arrays that are in the checkpoint only are no difference.
    """
    there = record.arrays
    lines = [f"{name}: not in the checkpoint" for name in wanted if name not in there]
    if not partial:
        lines += [f"{name}: in the checkpoint only" for name in there if name not in wanted]
    for name in wanted:
        if name in there and there[name] != wanted[name]:
            (shape, dtype), (other_shape, other_dtype) = there[name], wanted[name]
            lines.append(
                f"{name}: {dtype}{list(shape)} in the checkpoint, "
                f"{other_dtype}{list(other_shape)} asked for"
            )
    if lines:
        raise ValueError(
            f"checkpoint {folder} is of another state, {len(lines)} arrays differ. Start with the "
            "model and the optimizer that it was saved with (extra may say which), pass "
            "partial=True to restore a part of it, or begin anew in another folder:\n  "
            + "\n  ".join(sorted(lines))
        )


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; the processes share the reading, and know the answer."""
    reason = ""
    try:
        record = files.read_record(folder)
        files.check_files(folder, record, jax.process_index(), jax.process_count())
    except files.Damage as damage:
        reason = str(damage)
    if jax.process_count() > 1:
        # Text as an array: every process must know, and say, the same.
        row = np.zeros(512, np.uint8)
        data = reason.encode()[:512]
        row[: len(data)] = np.frombuffer(data, np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(row))
        reasons = [bytes(x).rstrip(b"\0").decode(errors="replace") for x in rows]
        reason = next((x for x in reasons if x), "")
    return reason or None
