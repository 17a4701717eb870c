"""One writer at a time: locks of checkpoint folders and logs, and folders that are not theirs."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import pytest
from hostile import unchanged

from burst_jax.training import CheckpointError, Checkpoints, checkpoint_files

X = {"x": jnp.ones(8)}
HOLD = """
import sys, time
from burst_jax.training import Checkpoints
held = Checkpoints(sys.argv[1])
held.lock()
print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def held_elsewhere(folder: Path):
    """Another process that has locked a checkpoint folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_raises_and_takes_over_what_a_killed_one_left(tmp_path):
    folder = tmp_path / "run"
    with held_elsewhere(folder) as process:
        owner = rf"run is being written by process {process.pid} on \S+, since \d+-.*: close that"
        first = Checkpoints(folder)
        for call in (first.lock, lambda: first.save(1, X)):
            with pytest.raises(ValueError, match=owner):
                call()
        assert first.restore(X) is None  # Any number of processes may read.
        process.kill()
        process.wait()
        assert (folder / ".checkpoints.lock").read_text()  # What SIGKILL leaves.
        with first:
            first.lock()
            first.save(1, X)
            # A second one in this process is found, too.
            with pytest.raises(ValueError, match=rf"being written by process {os.getpid()} on"):
                Checkpoints(folder).save(2, X)
    with Checkpoints(folder) as second:
        second.save(2, X)
    assert second.latest() == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks_are_reported(tmp_path, monkeypatch, capsys, number):
    def unsupported(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Checkpoints(tmp_path) as writer:
        writer.lock()
    assert capsys.readouterr().err == (
        f"{tmp_path / '.checkpoints.lock'} cannot be locked on this file system (No locks "
        f"available): two runs that write {tmp_path} at the same time would not notice each other\n"
    )

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        Checkpoints(tmp_path).lock()
    with pytest.raises(CheckpointError, match=r"checkpoint 1 could not .*Input/output error"):
        Checkpoints(tmp_path).save(1, X)


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
        assert not (folder / "2").exists()
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


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_an_error_with_the_last_good_one(
    tmp_path, monkeypatch
):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, X)
        checkpoints.wait()
        (tmp_path / "2" / "manifest.ocdbt").write_text("damaged")
        checkpoints.restore(X)

        def denied(*_):
            raise PermissionError(errno.EACCES, "Permission denied")

        message = (
            "checkpoint 3 could not be written to .*Permission denied; the last good one is 1. "
            "Make it writable, or use another folder"
        )
        with monkeypatch.context() as denying:
            denying.setattr(Path, "rename", denied)
            with pytest.raises(CheckpointError, match=message):
                checkpoints.save(3, X)
        checkpoints.save(2, X)  # The damaged one is out of its way.
    assert (tmp_path / "2.refused").is_dir()


@pytest.mark.parametrize("by", ["the next", "another run"])
def test_an_interrupted_removal_is_completed(tmp_path, monkeypatch, capsys, by):
    """And leaves nothing under the name of a step."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, X)
        with monkeypatch.context() as killed:

            def interrupted(folder):
                raise OSError(errno.EIO, "Input/output error")

            killed.setattr(checkpoint_files.shutil, "rmtree", interrupted)
            checkpoints.save(2, X)
            checkpoints.wait()
        assert list((tmp_path / ".checkpoints.removed").glob("1.*/1/record.json"))
        assert "1 could not be removed: " in capsys.readouterr().err
        assert not (tmp_path / "1").exists()
        if by == "the next":
            checkpoints.save(3, X)
    if by == "another run":
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(3, X)
    left = [".checkpoints.lock", *["2"] * (by == "another run"), "3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_removal_that_fails_is_reported_and_stops_no_later_one(tmp_path, capsys):
    (tmp_path / ".checkpoints.removed").write_text("of somebody else")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, X)
        checkpoints.wait()
        assert f"{tmp_path / '1'} could not be removed: " in capsys.readouterr().err
        (tmp_path / ".checkpoints.removed").unlink()
        checkpoints.save(3, X)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".checkpoints.lock", "3"]
