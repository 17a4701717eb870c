"""One writer at a time: locks of checkpoint folders and logs, and folders that are not theirs."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hostile import unchanged

from burst_jax.training import Checkpoints, RunLog, lock
from burst_jax.training.lock import FileLock

X = {"x": jnp.ones(8)}
# The module needs nothing but the standard library, so this process starts at once.
HOLD = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
held = lock.FileLock(Path(sys.argv[2]), "it")
print("locked", flush=True)
time.sleep(600)
"""


def log(out: Path, **options: Any) -> RunLog:
    return RunLog(out, 3, tokens_per_step=8, flops_per_step=1.0, peak=None, **options)


@contextmanager
def held_elsewhere(path: Path):
    """Another process that has locked ``path``."""
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(lock.__file__), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_raises_and_takes_over_what_a_killed_one_left(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out"
    with (
        held_elsewhere(folder / ".checkpoints.lock") as process,
        held_elsewhere(out / ".metrics.lock") as other,
    ):
        owner = rf"is being written by another run: process {process.pid} on \S+, since \d+-.*Wait"
        first = Checkpoints(folder)
        for call in (first.lock, lambda: first.save(1, X)):
            with pytest.raises(ValueError, match=f"{folder} {owner}"):
                call()
        assert first.restore(X) is None  # Any number of processes may read.
        with pytest.raises(ValueError, match=f"metrics.jsonl in {out} is .*process {other.pid} on"):
            log(out)
        assert [path.name for path in out.iterdir()] == [".metrics.lock"]
        process.kill()
        process.wait()
        other.kill()
        other.wait()
        assert (folder / ".checkpoints.lock").read_text()  # What SIGKILL leaves.
        with first, log(out):
            first.lock()
            first.save(1, X)
            # A second one in this process is found, too.
            with pytest.raises(ValueError, match="run is being written by this process already"):
                Checkpoints(folder).save(2, X)
            with pytest.raises(ValueError, match="out is being written by this process already"):
                log(out)
    assert sorted(path.name for path in (*folder.iterdir(), *out.iterdir())) == [
        "1",
        "metrics.jsonl",
    ]
    with Checkpoints(folder) as second:
        second.save(2, X)


def test_locks_end_with_their_owner_only(tmp_path, monkeypatch, capsys):
    path = tmp_path / "lock"
    held = FileLock(path, "it")
    monkeypatch.setattr(os, "getpid", lambda: 0)  # As in a forked process.
    held.release()
    monkeypatch.undo()
    assert path.exists()
    held = FileLock(tmp_path / "other", "it")
    (tmp_path / "other").unlink()  # Somebody removes it: the next owner makes another one.
    again = FileLock(tmp_path / "other", "it")
    held.release()
    assert (tmp_path / "other").exists()
    again.release()
    assert not (tmp_path / "other").exists()
    del again
    dropped = FileLock(path.with_name("dropped"), "it")
    del dropped  # Without a release: with its object.
    FileLock(path.with_name("dropped"), "it").release()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file: remove it"):
        FileLock(tmp_path / "pipe", "it")

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    FileLock(tmp_path / "lustre", "out").release()
    assert capsys.readouterr().err == (
        f"{tmp_path / 'lustre'} cannot be locked on this file system (No locks available): two "
        "runs that write out at the same time would not notice each other\n"
    )


def test_a_file_that_its_last_owner_removes_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Two runs would hold locks, one on a file that nobody finds any more."""
    path, lockf, calls = tmp_path / "lock", fcntl.lockf, []

    def late(descriptor, operation):
        if not calls:  # Between opening and locking, the owner ends and a third run starts.
            path.unlink()
            path.touch()
        calls.append(operation)
        lockf(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", late)
    held = FileLock(path, "it")
    assert path.read_text().startswith(f"process {os.getpid()} on ")
    held.release()
    assert not path.exists()


def test_folders_of_others_are_neither_steps_nor_removed_nor_renamed(tmp_path):
    """Only what a Checkpoints has written is, whatever other names look like."""
    folder = tmp_path / "run"
    theirs = ("9 old.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp-17")
    for name in ("0", "007", "5", "2024", "1.refused", "٣", *theirs, "77"):
        (folder / name).mkdir(parents=True)
        (folder / name / "photo.jpg").write_text(name)
    # Another library's checkpoint by orbax.
    (folder / "77" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"default": "theirs"}}')
    (folder / "8").write_text("a file")
    (tmp_path / "best").mkdir()
    (folder / "link").symlink_to(tmp_path / "best")
    steps = [folder / name for name in ("1", "2", "3", "4", "1.refused.1")]
    steps += [folder / f"{step}.orbax-checkpoint-tmp-17" for step in (1, 15)]
    with (
        unchanged(folder, *steps, folder / ".checkpoints.lock"),
        Checkpoints(folder, keep=1) as checkpoints,
    ):
        assert checkpoints.latest() is checkpoints.restore(X) is None
        # Of orbax' temporary folders only that of the step that a killed run was writing is ours.
        (folder / ".checkpoints.writing").write_text("7")
        (folder / "7.orbax-checkpoint-tmp").mkdir()
        with pytest.raises(ValueError, match=r"step is 1: .*/1.orbax-checkpoint-tmp-17 exists, wh"):
            checkpoints.save(1, X)
        (folder / "1.orbax-checkpoint-tmp-17").rename(folder / "15.orbax-checkpoint-tmp-17")
        checkpoints.save(1, X)
        checkpoints.wait()
        (folder / "1" / "record.json").write_text("damaged")
        (folder / "1" / "notes.txt").write_text("mine")
        with pytest.raises(RuntimeError, match=r"run/1 is damaged: record.json"):
            checkpoints.restore(X)
        checkpoints.save(2, X)
        checkpoints.wait()
        # It cannot be read, so it is not removed; it was not refused for an older one.
        assert (folder / "1" / "notes.txt").exists()
        (folder / "2" / "notes.txt").write_text("mine")
        (folder / "2" / "manifest.ocdbt").write_text("damaged")
        checkpoints.save(3, X)
        checkpoints.wait()
        assert [path.name for path in (folder / "2").iterdir()] == ["notes.txt"]
        assert checkpoints.latest() == 3
        for taken in (5, 8):
            with pytest.raises(ValueError, match=rf"step is {taken}: .*/{taken} exists and is"):
                checkpoints.save(taken, X)
    (folder / "3").rename(tmp_path / "best" / "3")
    (folder / "3").symlink_to(tmp_path / "best" / "3")
    with unchanged(tmp_path / "best"), Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.latest() == 3  # A link can be read.
        checkpoints.save(4, X)


def test_a_damaged_checkpoint_is_none_of_those_to_keep(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, X)
            checkpoints.wait()
            if step == 2:
                (tmp_path / "2" / "record.json").write_text("damaged")
        restored = checkpoints.restore(X, step=1)
    assert restored is not None
    assert restored.step == 1


def test_a_refused_checkpoint_overwrites_nothing(tmp_path):
    (tmp_path / "2.refused").mkdir()
    (tmp_path / "2.refused" / "photo.jpg").write_text("mine")
    changed = [tmp_path / name for name in ("1", "2", "2.refused.1", ".checkpoints.lock")]
    with unchanged(tmp_path, *changed), Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, X)
        checkpoints.wait()
        (tmp_path / "2" / "manifest.ocdbt").write_text("damaged")
        restored = checkpoints.restore(X)
        assert restored is not None
        assert restored.step == 1
        checkpoints.save(2, X)
    assert (tmp_path / "2.refused.1" / "manifest.ocdbt").read_text() == "damaged"
