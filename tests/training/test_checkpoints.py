"""Checkpoints: what is restored, and what happens when something is wrong with them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax.training import (
    CheckpointError,
    Checkpoints,
    Restored,
    checkpoint_files,
    checkpoints,
)
from burst_jax.training.checkpoint_files import restore_arrays


def make_state(seed: int) -> dict[str, Any]:
    """Weights, optimizer state and random keys, as a training run has them."""
    draw, mesh = np.random.default_rng(seed), mesh_of(data=2, seq=4)
    params = {
        "dense": {"kernel": draw.normal(size=(64, 32)).astype(np.float32)},
        "embed": jnp.asarray(draw.normal(size=(32, 16)), jnp.bfloat16),
    }
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    keys = {"one": jax.random.key(seed), "many": jax.random.split(jax.random.key(seed), (8, 4))}
    state = {"params": params, "opt_state": opt_state, "keys": keys}
    shardings = jax.tree.map(lambda x: x.sharding, abstract(state, mesh, P("data", "seq")))
    return jax.device_put(state, shardings)


def abstract(state, mesh, spec):
    def one(x):
        sharding = NamedSharding(mesh, spec if x.ndim == 2 else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, state)


def assert_same(actual, expected):
    """Bit for bit, random keys too."""

    def bits(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    chex.assert_trees_all_equal(*(jax.tree.map(bits, x) for x in (actual, expected)), strict=True)


def restore(folder: Checkpoints | Path, state, step: Any = None, **options) -> Restored:
    reader = Checkpoints(folder) if isinstance(folder, Path) else folder
    restored = reader.restore(state, step, **options)
    assert restored is not None
    return restored


def names(folder: Path) -> list[str]:
    """What is in a folder, but for the file of its lock."""
    return sorted({path.name for path in folder.iterdir()} - {".checkpoints.lock"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints 1, 2 and 3 of different states, and those states; not modified."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    states = {step: make_state(step) for step in (1, 2, 3)}
    with Checkpoints(folder) as writer:
        for step, state in states.items():
            writer.save(step, state, {"loader": {"next": 10 * step}})
    return folder, states


@pytest.fixture
def own(saved, tmp_path):
    """The same, to modify."""
    return Path(shutil.copytree(saved[0], tmp_path / "run")), saved[1]


# --- what is restored ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "seq", "spec"), [(2, 4, P("data", "seq")), (8, 1, P("data")), (1, 3, P())], ids=str
)
def test_a_state_is_restored_bitwise_on_any_mesh(saved, data, seq, spec):
    folder, states = saved
    wanted = abstract(states[3], mesh_of(data=data, seq=seq), spec)
    restored = restore(folder, wanted)
    assert (restored.step, restored.extra, restored.refused) == (3, {"loader": {"next": 30}}, {})
    assert_same(restored.state, states[3])
    for leaf, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)


def test_a_part_of_a_state(saved):
    """The weights without optimizer state and keys, on another mesh."""
    folder, states = saved
    wanted = {"params": abstract(states[3]["params"], mesh_of(data=8, seq=1), P("data"))}
    for step in (3, 2):
        restored = restore(folder, wanted, step, partial=True)
        assert restored.extra == {"loader": {"next": 10 * step}}
        assert_same(restored.state, {"params": states[step]["params"]})
    with pytest.raises(ValueError, match=r"7 arrays differ.*, pass partial=True to restore a part"):
        restore(folder, wanted)
    more = wanted | {"more": states[3]["params"]["embed"]}
    with pytest.raises(
        ValueError, match=r"1 arrays differ.*\), or start (.|\n)*\n  more: not in the checkpoint$"
    ):
        restore(folder, more, partial=True)
    empty = Checkpoints(folder / "new")
    assert empty.latest() is empty.restore(wanted) is None
    assert not empty.folder.exists()
    for path, there in ((folder, r"\[1, 2, 3\]"), (empty.folder, "none")):
        with pytest.raises(FileNotFoundError, match=f"has no checkpoint 7; there are {there}"):
            restore(path, wanted, step=7)

    def check(extra):
        raise ValueError(f"a run with {extra}")

    with pytest.raises(ValueError, match=r"a run with {'loader': {'next': 30}}"):
        restore(folder, more, check=check)  # Before arrays are compared.


def test_the_last_ones_are_kept_as_they_were_when_saved(tmp_path):
    """Later steps write into the donated memory while the files are written."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros((8, 4096)), NamedSharding(mesh_of(seq=8), P("seq")))
    with Checkpoints(tmp_path, keep=2) as writer:
        for index in range(4):
            writer.save(index, {"x": x})
            assert writer.latest() in (None, index - 1, index)
            if index == 0:  # Counts as any other step.
                writer.wait()
                with pytest.raises(ValueError, match=r"step is 0: .* already holds checkpoint 0"):
                    writer.save(0, {"x": x})
            if index == 1:
                writer.wait()
                assert restore(writer, {"x": x}, 0).step == 0
            for _ in range(20):
                x = step(x)
    assert names(tmp_path) == ["2", "3"]
    for index in (2, 3):
        np.testing.assert_array_equal(restore(tmp_path, {"x": x}, index).state["x"], 20.0 * index)


def test_a_record_is_on_disk_before_its_checkpoint_has_a_name(tmp_path, monkeypatch):
    """Otherwise a machine failure could leave a checkpoint without one."""
    names, fsync = [], os.fsync

    def recorded(descriptor):
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with Checkpoints(tmp_path) as writer:
        writer.save(1, {"x": jnp.ones(8)})
    assert str(tmp_path / "1.orbax-checkpoint-tmp" / "record.json") in names


# --- damage --------------------------------------------------------------------------------------


def restored_files(step_folder: Path) -> list[Path]:
    """Files that orbax or burst_jax read again; the others only mark the folder as orbax'."""
    unread = ("commit_success.txt", "_CHECKPOINT_METADATA")
    found = [path for path in step_folder.rglob("*") if path.is_file() and path.name not in unread]
    assert len(found) > 8
    return sorted(found, key=lambda path: path.stat().st_size)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGE: list[Any] = [
    (lambda path: flip(path, 7919), "content does not match its hash$"),
    (lambda path: flip(path, -2), "content does not match its hash$"),
    (lambda path: os.truncate(path, path.stat().st_size // 2), "hash$|has [0-9]+ bytes, "),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "hash$|has [0-9]+ bytes, "),
    (lambda path: path.unlink(), "does not exist$"),
]


def test_damage_to_any_file_is_detected_and_the_previous_checkpoint_restored(own, capfd):
    """The next save sets damaged and partial checkpoints aside."""
    folder, states = own
    paths, half = restored_files(folder / "3"), folder / "4.orbax-checkpoint-tmp"
    for damage, message in DAMAGE:
        for path in (*paths, folder / "3" / "record.json"):
            data = path.read_bytes()
            damage(path)
            reason = checkpoints._damage(folder / "3")
            assert re.match(rf"{path.relative_to(folder / '3')}:? .*({message})", str(reason))
            path.write_bytes(data)
    shutil.copytree(folder / "3", half)
    (folder / ".checkpoints.writing").write_text("4")  # What a killed run leaves.
    flip(paths[-1], 7919)
    with Checkpoints(folder) as writer:
        assert writer.latest() == 3
        restored = restore(writer, states[1])
        assert (restored.step, restored.refused.keys()) == (2, {3})
        assert_same(restored.state, states[2])
        assert (
            f"checkpoint {folder / '3'} is damaged: {restored.refused[3]}; restoring "
            f"{folder / '2'} instead\n"
        ) in capfd.readouterr().err
        with pytest.raises(CheckpointError, match=r"run/3 is damaged: .*Nothing is restored"):
            restore(folder, states[1], step=3)
        # Reading changes nothing: another process may be writing there.
        assert (folder / "3").exists()
        assert half.exists()
        writer.save(3, states[3])
        writer.wait()
        restored = restore(writer, states[1])
    assert (restored.step, restored.refused) == (3, {})
    assert_same(restored.state, states[3])
    assert names(folder) == ["1", "2", "3", "3.refused"]


def test_orbax_alone_does_not_notice(tmp_path):
    """Why files are hashed: if this fails with a new orbax, the hashes may go."""
    x = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
    with Checkpoints(tmp_path) as writer:
        writer.save(1, x)
    path = restored_files(tmp_path / "1")[-1]
    flip(path, path.stat().st_size // 2)
    assert (restore_arrays(tmp_path / "1", abstract(x, mesh_of(seq=1), P()))["x"] != x["x"]).any()


def test_records_of_other_versions_and_damage_to_all_checkpoints_raise(own):
    folder, states = own
    for text in ('{"version": 7}\n', "[]\n", '{"arrays": {"x": 1}, "files": {}}\n'):
        digest = hashlib.blake2b(text.encode()).hexdigest()
        (folder / "3" / "record.json").write_text(f"{text}{digest}\n")
        with pytest.raises(CheckpointError, match=r"3 is damaged: record.json: written by another"):
            restore(folder, states[1], step=3)
    for step in states:
        (folder / str(step) / "record.json").unlink()
    with pytest.raises(CheckpointError, match=r"3 is damaged: record.json does not") as error:
        restore(folder, states[1])
    assert all(f"run/{step} is damaged" in str(error.value) for step in states)
    assert "start over in another folder" in str(error.value)


# --- a full disk, and programs that end early ----------------------------------------------------


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path):
    """A limit on file sizes fails writes as a full disk does."""
    small, large = ({"x": jax.random.normal(jax.random.key(0), (n, 1024))} for n in (16, 1024))
    writer = Checkpoints(tmp_path)
    writer.save(1, small)
    writer.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The note of what is being written has no space, then the arrays.
        for step, limit in ((2, 0), (2, 1 << 20), (3, 1 << 20)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            message = (
                rf"checkpoint {step} could not be written to {tmp_path}: .*File too large; the "
                "last good one is 1. Free disk space, or use another folder$"
            )
            with pytest.raises(CheckpointError, match=message), contextlib.closing(writer):
                writer.save(step, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with writer:
        writer.save(4, small)
    assert restore(tmp_path, small).step == 4
    assert names(tmp_path) == ["1", "4"]


def test_a_note_that_cannot_be_removed_or_written_is_an_error(tmp_path):
    small, note = {"x": jnp.ones(8)}, tmp_path / checkpoint_files._WRITING
    writer = Checkpoints(tmp_path)
    writer.save(1, small)
    note.unlink()
    note.mkdir()
    message = "could not be written to .*: .*Is a directory.*; the last good one is 1"
    with pytest.raises(CheckpointError, match=f"checkpoint 1 {message}"):
        writer.wait()
    with pytest.raises(CheckpointError, match=f"checkpoint 2 {message}"):
        writer.save(2, small)
    writer.close()
    note.rmdir()
    with writer:
        writer.save(2, small)
    assert restore(tmp_path, small).step == 2


def test_folders_that_cannot_be_made_are_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint 1 could not be written.*Not a direct"):
        Checkpoints(tmp_path / "file" / "run").save(1, {"x": jnp.zeros(3)})


# --- mistakes ------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit_raises_with_every_difference(saved):
    folder, states = saved
    state: dict[str, Any] = dict(states[1], more=jnp.zeros((2, 3)))
    state["params"] = {
        "dense": {"kernel": jnp.zeros((64, 16))},
        "embed": jnp.zeros((32, 16), jnp.float32),
    }
    state["keys"] = {"one": jax.random.key(0, impl="rbg")}
    with pytest.raises(ValueError, match=r"run/3 has another state: 5 arrays differ") as error:
        restore(folder, state)
    assert "Use the model and the optimizer that it was saved with" in str(error.value)
    assert str(error.value).splitlines()[1:] == [
        "  keys.many: only in the checkpoint",
        "  keys.one: key<fry>[] in the checkpoint, key<rbg>[] requested",
        "  more: not in the checkpoint",
        "  params.dense.kernel: float32[64, 32] in the checkpoint, float32[64, 16] requested",
        "  params.embed: bfloat16[32, 16] in the checkpoint, float32[32, 16] requested",
    ]


def save(step: Any, state: Any = None, extra: Any = None, **options: Any):
    """Saves into a folder with checkpoints 1 to 3."""
    return lambda c: Checkpoints(c, **options).save(step, state or {"x": jnp.zeros(1)}, extra)


X, ZEROS, ANY = {"x": np.zeros(2, np.float32)}, jnp.zeros(1), {"x": jnp.zeros(1)}
UNPLACED = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
MISTAKES: list[Any] = [
    (save(4, keep=0), "keep is 0: it must be an integer, at least 1"),
    (save(4, keep=1.5), "keep is 1.5: it must be an integer"),
    (save(4, timeout=0), "timeout is 0: it must be an integer"),
    (lambda c: Checkpoints(c / "3" / "record.json"), "folder is .*record.json, a file: name a fo"),
    (save("4"), "step is '4': it must be an integer"),
    (save(-1), "step is -1: it must be an integer, at least 0"),
    (save(3), r"step is 3: .*run already holds checkpoint 3; resume from it \(restore\), use"),
    (save(2), "step is 2: .* holds checkpoint 3"),
    (lambda c: restore(c, ANY, "3"), "step is '3': it must be an integer"),
    (save(4, [None]), r"state is \[None\], without any array: pass a pytree of arr"),
    (lambda c: restore(c, None), "state is None, without any array"),
    (save(4, X), "state has x, of type ndarray: it must be a jax.Array"),
    (save(4, {"params": {"n": 3}}), "params.n, of type int: .*numbers and text go into extra"),
    (save(4, {"a": {"b": ZEROS}, "a.b": ZEROS}), "two leaves named a.b: rename one of them"),
    (save(4, ANY, X), r"extra cannot be written as JSON \(.*ndarray.*\): give it.*arrays bel"),
    (lambda c: restore(c, UNPLACED), "abstract_state has x without a sharding: use jax.ShapeDtyp"),
]


def test_mistakes_raise(saved):
    for call, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            call(saved[0])
