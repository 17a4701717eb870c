"""Checkpoints: what comes back, and what happens when something is wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.training import CheckpointError, Checkpoints, Restored
from burst_jax.training.checkpoint_files import restore_arrays
from burst_jax.training.checkpoints import close_unfinished

WRITER = Path(__file__).parent / "support" / "checkpoint_writer.py"


def mesh_of(data: int, seq: int):
    return jax.make_mesh((data, seq), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)


SPLIT = P("data", "seq")


def make_state(mesh, seed: int = 0) -> dict[str, Any]:
    """Weights, the state of an optimizer and random keys, as a training run has them."""
    draw = np.random.default_rng(seed)

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, SPLIT if x.ndim == 2 else P()))

    params = {
        "dense": {"kernel": draw.normal(size=(64, 32)).astype(np.float32)},
        "embed": jnp.asarray(draw.normal(size=(32, 16)), jnp.bfloat16),
    }
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    keys = {"one": jax.random.key(seed), "many": jax.random.split(jax.random.key(seed), (8, 4))}
    return jax.tree.map(place, {"params": params, "opt_state": opt_state, "keys": keys})


def abstract(state, mesh, spec):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec if x.ndim == 2 else P())
        ),
        state,
    )


def bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert bits(one) == bits(other)


def restore(checkpoints: Checkpoints | Path, state, step=None) -> Restored:
    if isinstance(checkpoints, Path):
        checkpoints = Checkpoints(checkpoints)
    restored = checkpoints.restore(state, step)
    assert restored is not None
    return restored


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints 1, 2 and 3 of states that differ, and those states."""
    mesh = mesh_of(2, 4)
    states = {step: make_state(mesh, seed=step) for step in (1, 2, 3)}
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {"loader": {"next": 10 * step}})
    return tmp_path / "run", states


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "seq", "spec"),
    [(2, 4, P("data", "seq")), (8, 1, P("data")), (1, 4, P("seq", None)), (1, 1, P())],
    ids=["same-mesh", "data-8", "four-devices", "one-device"],
)
def test_a_state_comes_back_bit_for_bit_on_any_mesh(saved, data, seq, spec):
    folder, states = saved
    mesh = jax.make_mesh(
        (data, seq),
        ("data", "seq"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: data * seq],
    )
    wanted = abstract(states[3], mesh, spec)
    restored = restore(folder, wanted)
    assert (restored.step, restored.extra, restored.refused) == (3, {"loader": {"next": 30}}, {})
    assert_same(restored.state, states[3])
    for leaf, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)


def test_random_keys_draw_the_same_numbers(saved):
    folder, states = saved
    keys = restore(folder, states[1]).state["keys"]["many"]
    expected = jax.vmap(jax.vmap(jax.random.bits))(states[3]["keys"]["many"])
    np.testing.assert_array_equal(jax.vmap(jax.vmap(jax.random.bits))(keys), expected)


def test_a_part_of_a_state(saved):
    """The weights without the optimizer's state and the keys, on another mesh."""
    folder, states = saved
    wanted = {"params": abstract(states[3]["params"], mesh_of(8, 1), P("data"))}
    checkpoints = Checkpoints(folder)
    for step in (3, 2):
        restored = checkpoints.restore(wanted, step, partial=True)
        assert restored is not None
        assert restored.extra == {"loader": {"next": 10 * step}}
        assert_same(restored.state, {"params": states[step]["params"]})
    leaf = restored.state["params"]["embed"]
    assert leaf.sharding.is_equivalent_to(wanted["params"]["embed"].sharding, leaf.ndim)
    with pytest.raises(ValueError, match=r"7 arrays differ.*, pass partial=True to restore a part"):
        checkpoints.restore(wanted)
    more = wanted | {"more": states[3]["params"]["embed"]}
    with pytest.raises(ValueError, match=r"1 arrays differ(.|\n)*\n  more: not in the checkpoint$"):
        checkpoints.restore(more, partial=True)


def test_an_older_step_by_name(saved):
    folder, states = saved
    restored = restore(folder, states[1], step=2)
    assert restored.step == 2
    assert_same(restored.state, states[2])
    with pytest.raises(FileNotFoundError, match=r"run has no checkpoint 7; there are \[1, 2, 3\]"):
        Checkpoints(folder).restore(states[1], step=7)


def test_an_empty_folder_has_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.latest() is None
    assert checkpoints.restore(make_state(mesh_of(2, 4))) is None
    assert not (tmp_path / "new").exists()
    with pytest.raises(FileNotFoundError, match="has no checkpoint 1; there are none"):
        checkpoints.restore(make_state(mesh_of(2, 4)), step=1)


def test_the_last_ones_stay(tmp_path):
    state = {"x": jnp.arange(8.0)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(5):
            checkpoints.save(step, state)
            assert checkpoints.latest() in (None, step - 1, step)
        checkpoints.wait()
        assert checkpoints.latest() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_what_was_saved_is_what_was_there_when_save_was_called(tmp_path):
    """The next step writes into the memory that it was given, while the files are written."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros((8, 4096)), NamedSharding(mesh_of(1, 8), P("seq")))
    with Checkpoints(tmp_path) as checkpoints:
        for index in range(3):
            checkpoints.save(index, {"x": x})
            for _ in range(20):
                x = step(x)
    for index in range(3):
        np.testing.assert_array_equal(restore(tmp_path, {"x": x}, index).state["x"], 20.0 * index)


# --- damage --------------------------------------------------------------------------------------


def restored_files(step_folder: Path) -> list[Path]:
    """What orbax and we read again; the other files only say that orbax was here."""
    unread = ("commit_success.txt", "_CHECKPOINT_METADATA")
    found = [path for path in step_folder.rglob("*") if path.is_file() and path.name not in unread]
    assert len(found) > 8
    return sorted(found)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGE = {
    "flipped": (lambda path: flip(path, 7919), "its bytes are not those that were written"),
    "last-flipped": (lambda path: flip(path, -2), "its bytes are not those that were written"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), ""),
    "gone": (lambda path: path.unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_any_damaged_file_is_named_and_the_checkpoint_before_is_taken(saved, capfd, how):
    folder, states = saved
    damage, message = DAMAGE[how]
    checkpoints = Checkpoints(folder)
    for path in restored_files(folder / "3"):
        data = path.read_bytes()
        damage(path)
        restored = restore(checkpoints, states[1])
        assert restored.step == 2, path
        assert_same(restored.state, states[2])
        assert restored.refused.keys() == {3}
        assert restored.refused[3].startswith(f"{path.relative_to(folder / '3')}:")
        assert message in restored.refused[3]
        said = capfd.readouterr().err
        assert f"checkpoint {folder / '3'} is refused: {restored.refused[3]}" in said
        assert f"checkpoint {folder / '2'} is taken" in said
        with pytest.raises(CheckpointError, match=r"run/3 is damaged: .*Nothing is restored"):
            checkpoints.restore(states[1], step=3)
        path.write_bytes(data)


def test_sizes_are_named(saved):
    folder, states = saved
    path = max(restored_files(folder / "3"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    os.truncate(path, size - 5)
    reason = restore(folder, states[1]).refused[3]
    assert reason.endswith(f": has {size - 5} bytes, {size} were written")


def test_orbax_alone_does_not_notice(tmp_path):
    """Why we hash the files: where this fails, the hashes may go."""
    x = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x)
    path = max(restored_files(tmp_path / "1"), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size // 2)
    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=x["x"].sharding)
    assert (restore_arrays(tmp_path / "1", {"x": struct})["x"] != x["x"]).any()


def test_a_record_of_another_version_is_refused(saved):
    folder, states = saved
    for text in ('{"version": 7}', "[]", '{"arrays": {"x": 1}, "files": {}}'):
        text += "\n"
        digest = hashlib.blake2b(text.encode()).hexdigest()
        (folder / "3" / "record.json").write_text(f"{text}{digest}\n")
        with pytest.raises(
            CheckpointError, match=r"run/3 is damaged: record.json: another version"
        ):
            Checkpoints(folder).restore(states[1], step=3)


def test_when_all_are_damaged_nothing_is_restored(saved):
    folder, states = saved
    for step in states:
        (folder / str(step) / "record.json").unlink()
    with pytest.raises(CheckpointError, match=r"run/3 is damaged: record.json: No such") as e:
        Checkpoints(folder).restore(states[1])
    assert "run/2 is damaged" in str(e.value)
    assert "run/1 is damaged" in str(e.value)
    assert "begin anew in another folder" in str(e.value)


def test_a_refused_checkpoint_is_set_aside_when_its_step_comes_again(saved):
    folder, states = saved
    flip(folder / "3" / "record.json", 100)
    with Checkpoints(folder) as checkpoints:
        assert restore(checkpoints, states[1]).step == 2
        assert (folder / "3").exists()  # Reading changes nothing.
        checkpoints.save(3, states[3])
        checkpoints.wait()
        restored = restore(checkpoints, states[1])
    assert (restored.step, restored.refused) == (3, {})
    assert_same(restored.state, states[3])
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3", "3.refused"]


# --- killed, and a full disk ---------------------------------------------------------------------


def writer(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(WRITER), str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_half_a_checkpoint_does_not_count_and_goes_with_the_next(saved):
    folder, states = saved
    half = folder / "4.orbax-checkpoint-tmp"
    shutil.copytree(folder / "3", half)
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 3
    assert restore(checkpoints, states[1]).step == 3
    assert half.exists()  # It may be what another process is writing.
    checkpoints.save(4, states[1])
    checkpoints.close()
    assert not half.exists()
    assert checkpoints.latest() == 4


@pytest.mark.slow
def test_killed_at_any_moment_the_last_good_one_is_there(tmp_path):
    """What the last complete step was is in the state itself."""
    draw = random.Random(0)
    x = jax.ShapeDtypeStruct(
        (256, 1024), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    reached = 0
    for _ in range(6):
        process = writer(tmp_path, "forever")
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        time.sleep(draw.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        restored = Checkpoints(tmp_path).restore({"x": x})
        if restored is not None:
            assert restored.refused == {}
            assert restored.step >= reached
            assert restored.extra == {"step": restored.step}
            np.testing.assert_array_equal(restored.state["x"], restored.step)
            reached = restored.step
    assert reached > 3


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path):
    """The operating system refuses to make files longer than a limit, as it does on a full disk."""
    process = writer(tmp_path, "limited")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    first, second, end = map(json.loads, out.splitlines())
    for step, message in ((2, first), (3, second)):
        assert message == (
            f"checkpoint {step} could not be written to {tmp_path}: File too large; the last good "
            "one is 1. Make room there, or use another folder"
        )
    assert end == {"there": ["1", "4"], "restored": 4}


# Python 3.12.0 to 3.12.2 start no threads in a program that is ending.
ENDS_WRITING = sys.version_info >= (3, 12, 3)


@pytest.mark.parametrize("end", ["unclosed", "unclosed-error"])
def test_a_program_that_does_not_close_waits_or_says_what_is_lost(tmp_path, end):
    process = writer(tmp_path, end)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if end == "unclosed-error" else 0), errors
    assert ("RuntimeError: the training has failed" in errors) == (end == "unclosed-error")
    lost = re.search(
        r"^error: checkpoint 2 could not be written to .*; the last good one is 1\. The program "
        r"ended before .* use `with Checkpoints\(...\)`, or call close\(\)$",
        errors,
        re.MULTILINE,
    )
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=NamedSharding(mesh_of(1, 1), P()))
    if ENDS_WRITING:
        assert restore(tmp_path, {"x": x}).step == 2
    # Whichever Python: it is written, or said to be lost.
    assert Checkpoints(tmp_path).latest() == (1 if lost else 2), errors


def test_a_failure_as_the_program_ends_is_said(tmp_path, monkeypatch, capsys):
    """What Python calls before its threads end, for each that is not closed."""
    first, second = Checkpoints(tmp_path / "first"), Checkpoints(tmp_path / "second")
    first.save(1, {"x": jnp.ones(8)})
    second.save(1, {"x": jnp.ones(8)})
    assert first._writer is not None
    write = first._writer.wait_until_finished

    def fail():
        write()
        raise OSError("disk: No space left on device [os_error_code=28]")

    monkeypatch.setattr(first._writer, "wait_until_finished", fail)
    close_unfinished()
    assert capsys.readouterr().err == (
        f"error: checkpoint 1 could not be written to {first.folder}: No space left on device; "
        "the last good one is 1. Make room there, or use another folder\n"
    )
    assert second.latest() == 1
    close_unfinished()
    assert not capsys.readouterr().err


# --- mistakes ------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit_is_refused_with_every_difference(saved):
    folder, states = saved
    state: dict[str, Any] = dict(states[1], more=jnp.zeros((2, 3)))
    state["params"] = {
        "dense": {"kernel": jnp.zeros((64, 16))},
        "embed": jnp.zeros((32, 16), jnp.float32),
    }
    state["keys"] = {"one": jax.random.key(0, impl="rbg")}
    with pytest.raises(ValueError, match=r"run/3 is of another state, 5 arrays differ") as error:
        Checkpoints(folder).restore(state)
    assert "Start with the model and the optimizer that it was saved with" in str(error.value)
    assert str(error.value).splitlines()[1:] == [
        "  keys.many: in the checkpoint only",
        "  keys.one: key<fry>[] in the checkpoint, key<rbg>[] asked for",
        "  more: not in the checkpoint",
        "  params.dense.kernel: float32[64, 32] in the checkpoint, float32[64, 16] asked for",
        "  params.embed: bfloat16[32, 16] in the checkpoint, float32[32, 16] asked for",
    ]


X = {"x": np.zeros(2, np.float32)}
HALF: Any = 1.5
MISTAKES = {
    "keep": (
        lambda c: Checkpoints(c.folder, keep=0),
        "keep is 0: it must be an integer, at least 1",
    ),
    "timeout": (
        lambda c: Checkpoints(c.folder, timeout=0),
        "timeout is 0: it must be an integer, at least 1",
    ),
    "keep-float": (
        lambda c: Checkpoints(c.folder, keep=HALF),
        "keep is 1.5: it must be an integer",
    ),
    "file": (
        lambda c: Checkpoints(c.folder / "3" / "record.json"),
        "folder is .*record.json, a file: name a folder",
    ),
    "step-text": (lambda c: c.save("4", {"x": jnp.zeros(1)}), "step is '4': it must be an integer"),
    "step-float": (lambda c: c.save(4.5, {"x": jnp.zeros(1)}), "step is 4.5: it must be an int"),
    "restore-text": (
        lambda c: c.restore({"x": jnp.zeros(1)}, "3"),
        "step is '3': it must be an in",
    ),
    "no-arrays": (lambda c: c.save(4, {}), "state is {}, without any array: pass weights"),
    "none": (lambda c: c.restore(None), "state is None, without any array"),
    "numpy": (lambda c: c.save(4, X), "state has x, a ndarray: it must be a jax.Array"),
    "number": (
        lambda c: c.save(4, {"params": {"n": 3}}),
        "state has params.n, a int: .*numbers and text go into extra",
    ),
    "two-names": (
        lambda c: c.save(4, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}),
        "state has two leaves named a.b: rename one of them",
    ),
    "extra-array": (
        lambda c: c.save(4, {"x": jnp.zeros(1)}, {"x": np.zeros(2)}),
        r"extra cannot be written as JSON \(.*ndarray.*\): give it numbers.*arrays belong in state",
    ),
    "again": (
        lambda c: c.save(3, {"x": jnp.zeros(1)}),
        r"step is 3: .*run holds checkpoint 3 already; go on from it \(restore\), use another",
    ),
    "earlier": (lambda c: c.save(2, {"x": jnp.zeros(1)}), "step is 2: .* holds checkpoint 3"),
    "negative": (
        lambda c: c.save(-1, {"x": jnp.zeros(1)}),
        "step is -1: it must be an integer, at least 0",
    ),
    "no-sharding": (
        lambda c: c.restore({"x": jax.ShapeDtypeStruct((2,), jnp.float32)}),
        r"abstract_state has x without a sharding: jax.ShapeDtypeStruct\(shape, dtype, sharding",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_do(saved, call, message):
    with pytest.raises(ValueError, match=message):
        call(Checkpoints(saved[0]))
