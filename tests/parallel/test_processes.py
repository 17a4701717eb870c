"""Several processes, as on several hosts, on local CPU devices: batches, checkpoints, failures."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_files import loader_of, write_arrays
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from local_processes import free_port, started
from meshes import mesh_of
from processes_of_a_run import HEARTBEAT, ROWS
from safetensors.numpy import load_file

from burst_jax.data import open_corpus
from burst_jax.layouts.permutation import to_layout
from burst_jax.models import Decoder, DecoderConfig, save
from burst_jax.parallel import processes
from burst_jax.parallel.processes import another_may_be_gone, by_first_process, gather_json
from burst_jax.training import (
    CheckpointError,
    Checkpoints,
    barrier,
    check_same,
    initialize,
    is_main,
    make_batch,
)

SCRIPT = str(Path(__file__).parents[1] / "support" / "processes_of_a_run.py")
# What a launcher sets in process {0} of two.
LAUNCHERS = {
    "slurm": "SLURM_JOB_ID=17 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID={0} "
    "SLURM_LOCALID={0}",
    "open-mpi": "OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://127.0.0.1:34911 OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_VERSION=4.1.5",
}


def two_processes(mode: str, folder: Path, launcher: str | None = None, counts=("2", "2")):
    """Two processes of a run, of two devices each, started by a launcher or by arguments."""
    port, commands, environments = free_port(), [], []
    for index in range(2):
        given = [] if launcher else [port, counts[index], str(index)]
        variables = f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 JAX_COORDINATOR_PORT={port}".split()
        variables += LAUNCHERS[launcher].format(index).split() if launcher else []
        commands.append([SCRIPT, mode, str(folder), *given])
        environments.append(dict(variable.split("=", 1) for variable in variables))
    return started(commands, environments)


def one_process_state(seed: int):
    """As in the script, on four devices of this process."""
    mesh = mesh_of(data=2, other=2)
    x = np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)
    state = {"x": x, "mean": x.mean(0), "keys": jax.random.split(jax.random.key(seed), 8)}
    return {
        name: jax.device_put(value, NamedSharding(mesh, P() if name == "mean" else P("data")))
        for name, value in state.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, documents, and two checkpoints, of which the newest is damaged.

    The damage is in a file that only one of the processes reads.
    """
    path = tmp_path_factory.mktemp("processes")
    config = DecoderConfig(vocab_size=8, num_layers=2, embed_dim=8, head_dim=4, mlp_dim=8)
    model = Decoder(config, rngs=nnx.Rngs(0), mesh=mesh_of(seq=1))
    save(model, path / "model", max_length=64)
    write_arrays(path / "arrays")
    with Checkpoints(path / "checkpoints") as checkpoints:
        checkpoints.save(3, one_process_state(1), {"loader": [1, 2]})
        checkpoints.save(5, one_process_state(2))
    (path / "checkpoints" / "5" / "manifest.ocdbt").write_bytes(b"not what was written")
    return path


@pytest.fixture(scope="module")
def seen(folder):
    """What each of two processes reports that SLURM has started."""
    with two_processes("everything", folder, "slurm") as processes:
        ended = [process.communicate(timeout=120) for process in processes]
    for index, (_, errors) in enumerate(ended):
        assert processes[index].returncode == 0, errors
        assert "waiting up to 60 s for the other processes of the run" in errors
        assert re.search(rf"\S+, pid \d+: process {index} of 2\n", errors)
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    assert [each["process"] for each in found] == [0, 1]
    return found


@pytest.mark.slow
def test_every_device_has_its_shard_of_the_batch(seen):
    cases = {"whole": 2, "whole, explicit": 2, "own": 2, "own, four parts": 4, "same rows": 1}
    for (case, data), process in itertools.product(cases.items(), (0, 1)):
        seq = 4 // data
        whole = to_layout(ROWS[:, :-1], "zigzag", seq)
        rows, columns = 4 // data, 16 // seq
        assert seen[process][case]["shape"] == [4, 16]
        for device, (row, column, tokens) in enumerate(seen[process][case]["held"], 2 * process):
            assert (row, column) == (device // seq * rows, device % seq * columns), case
            part = whole[row : row + rows, column : column + columns]
            np.testing.assert_array_equal(tokens, part)


OTHER_SIZES = "batch has other names, dtypes or sizes on another process: every process must pass"
MISTAKES = {
    "own as whole": "batch differs between processes [0, 1]: every process must pass the same "
    "whole batch; if each passes its own sequences, use process_local=True",
    "own of shared rows": "batch differs between processes [0, 1], whose devices hold parts of the "
    "same sequences: pass the same sequences",
    "fewer": OTHER_SIZES,
    "indivisible": "batch has 3 sequences: use a multiple of 2, the shards of mesh axes "
    "('data',); sequences of this process alone need process_local=True",
    "indivisible own": "batch has 1 sequences: use a multiple of 2, the shards of mesh axes "
    "('data',)",
    "segments on one": "make segment_ids on all processes or on none",
    # What process 0 reports, which alone has a batch that its mesh divides.
    "indivisible on one": OTHER_SIZES,
}


def test_mistakes_raise_on_both_processes(seen):
    for case, message in MISTAKES.items():
        for each in seen[: 1 if case == "indivisible on one" else 2]:
            assert each[case].startswith("ValueError: "), case
            assert message in each[case]
    assert "batch has 3 sequences: use a multiple of 2" in seen[1]["indivisible on one"]


def test_save_completes_or_raises_on_all_processes(seen, folder):
    files = sorted(path.name for path in (folder / "saved").iterdir())
    tensors = {}
    for path in (folder / "saved").glob("*.safetensors"):
        tensors |= load_file(path)
    want = load_file(folder / "model" / "model.safetensors")
    assert tensors.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(tensors[name], tensor)
    assert len(files) > 3
    for each in seen:
        assert each["saved"] == files
        assert re.match(r"FileExistsError: .*saved exists: choose a fold", each["saved again"])
        assert re.match(r"OSError: .*No space left on device", each["full disk"])
    assert "OSError: process 0 of the run raised: OSError: " in seen[1]["full disk"]
    assert not (folder / "full").exists()


def test_loaders_place_the_batches_of_one_and_resume_from_a_gathered_state(seen, folder):
    with loader_of(open_corpus(folder / "arrays")) as loader:
        whole = [next(loader) for _ in range(3)]
        assert seen[0]["loader"] == seen[1]["loader"] == loader.get_state()
        whole += [next(loader) for _ in range(3)]
    for each in seen:
        for rows, shards in zip(whole, each["loaded"], strict=True):
            want = make_batch(**rows, layout="zigzag", num_shards=2)["inputs"]
            assert len(shards) == 2
            for row, column, tokens in shards:
                np.testing.assert_array_equal(tokens, want[row : row + 2, column : column + 8])


def test_checkpoints_are_restored_by_another_number_of_processes(seen, folder):
    for each in seen:
        assert (each["step"], each["extra"]) == (3, {"loader": [1, 2]})
        assert list(each["refused"]) == ["5"]
        assert "manifest.ocdbt: has 20 bytes" in each["refused"]["5"]
        assert each["same"] == {"x": True, "mean": True, "keys": True}
        assert "state has x only on this process' devices: put it onto the mesh" in each["local"]
        assert "extra differs between processes: one copy of it is saved" in each["extra differs"]
        assert "y: not in the checkpoint" in each["other state"]
        assert each["options"] == (
            "ValueError: the processes of this run differ: --lr is 0.1 on process 0, 0.2 on "
            "process 1. Start all of them with the same program and options"
        )
        assert each["there"] == ["5.refused", "6", "7"]
    want = one_process_state(5)
    restored = Checkpoints(folder / "checkpoints").restore(want)
    assert restored is not None
    assert (restored.step, restored.extra, restored.refused) == (7, {"step": 7}, {})
    for name, value in want.items():
        assert jnp.all(restored.state[name] == value), name


# --- failures ------------------------------------------------------------------------------------

NAMES_IT = r"stopped sending heartbeats\):\n1\n|Task 1 heartbeat timeout"
# Mode, the process that is lost, the signal that it gets, and the other one's last message.
LOST = [
    ("loop", 1, signal.SIGSTOP, NAMES_IT),
    ("loop", 0, signal.SIGKILL, "the leader task was preempted/died/restarted"),
    ("raise", 1, None, NAMES_IT),
    ("full", 1, None, ""),
]


@pytest.mark.slow
def test_a_lost_process_ends_the_other_in_time_with_its_index(tmp_path):
    """Killed, stopped, an error, a full disk: all at the same time."""

    def lose(mode, gone, sent, message):
        with two_processes(mode, tmp_path, "open-mpi" if mode == "raise" else None) as processes:
            errors = ""
            if sent is None:
                _, errors = processes[gone].communicate(timeout=120)
                assert processes[gone].returncode == 1
            else:
                for process in processes:
                    assert any("meeting" in line for line in process.stdout or ())
                processes[gone].send_signal(sent)
            start = time.monotonic()
            _, of_other = processes[1 - gone].communicate(timeout=120)
            assert time.monotonic() - start < HEARTBEAT + 10  # Time for a busy machine.
            assert processes[1 - gone].returncode != 0
            assert re.search(message, of_other), of_other
        return errors

    def differ():
        with two_processes("loop", tmp_path, counts=("2", "3")) as both:
            return [process.communicate(timeout=120)[1] for process in both]

    with ThreadPoolExecutor(len(LOST) + 1) as pool:
        different = pool.submit(differ)
        *_, raised, full = pool.map(lambda case: lose(*case), LOST)
    assert all(
        "differ: num_processes is 2 on process 0, 3 on process 1. Start" in errors
        for errors in different.result()
    )
    assert "OSError: the loader's disk is gone" in raised
    assert re.search(r"process 1 of 2 on \S+ ends: OSError", raised)
    assert f"checkpoint 2 could not be written to {tmp_path}: File too large" in full
    assert "the last good one is 1. Free disk space" in full
    assert Checkpoints(tmp_path).latest() == 1


def test_errors_caused_by_a_collective_are_recognized(monkeypatch):
    def ended_by(cause):
        """The exit of a program after a checkpoint's error, which has a cause."""
        try:
            try:
                raise CheckpointError("checkpoint 6 could not be written") from cause
            except CheckpointError:
                sys.exit(2)
        except SystemExit as end:
            return end

    lost = jax.errors.JaxRuntimeError("Gloo AllGather failed: Connection reset by peer")
    assert not another_may_be_gone(ended_by(lost))  # There is one process.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert another_may_be_gone(ended_by(lost))
    assert not another_may_be_gone(ended_by(OSError("File too large")))


def without_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JOB_COMPLETION", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)


def test_a_single_process_needs_no_arguments(monkeypatch):
    without_launcher(monkeypatch)
    alone: list[dict[str, Any]] = [
        {}, {"num_processes": 1}, {"coordinator": "host:1", "num_processes": 1}
    ]  # fmt: skip
    for arguments in alone:
        with initialize(**arguments) as processes:
            assert (processes.index, processes.count) == (0, 1)
            assert is_main()
            barrier("alone")
    assert gather_json({"a": 1}) == [{"a": 1}]
    # Under a launcher that has started one process, it keeps all GPUs of the host.
    for name, value in (("STEP_NODELIST", "node7"), ("NTASKS", "1"), ("PROCID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert initialize().count == 1
    with pytest.raises(OSError, match="unchanged"), initialize():
        raise OSError("unchanged")
    assert not jax.distributed.is_initialized()


def test_values_and_devices_that_differ_between_processes_are_named(monkeypatch):
    check_same({"--lr": 0.1, "config": object})  # One process.

    def seen(*found):
        monkeypatch.setattr(processes, "gather_json", lambda _: list(found))

    same = {"--lr": "0.1", "--steps": "9"}
    seen(same, same, same)
    check_same({})
    seen(*[same] * 6, {"--lr": "0.2"}, {"--lr": "0.2", "--steps": "9", "--new": "'a'"})
    message = (
        r"differ: --lr is 0.1 on process 0, 1, 2, 3 and 2 more, 0.2 on process 6, 7; --steps is 9 "
        r"on process 0, 1, 2, 3 and 3 more, missing on process 6; --new is missing on process 0, "
        r"1, 2, 3 and 3 more, 'a' on process 7. Start all of them with the same"
    )
    with pytest.raises(ValueError, match=message):
        check_same({})
    processes._check_devices([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"numbers of devices, 2 on process 0, 1 on process 1: sh"):
        processes._check_devices([0, 1, 0])


def test_a_coordinator_that_never_starts_ends_with_a_sentence(monkeypatch):
    without_launcher(monkeypatch)
    message = r"no process 0 at 127.0.0.1:\d+ within 1 s \(.*refused\): start it, see whether"
    with pytest.raises(TimeoutError, match=message):
        initialize(f"127.0.0.1:{free_port()}", 2, 1, start_timeout=1)


def test_by_first_process_with_a_single_process():
    done, error = [], KeyError("the same object")
    by_first_process(lambda: done.append(1))
    assert done == [1]

    def fail():
        raise error

    with pytest.raises(KeyError) as raised:
        by_first_process(fail)
    assert raised.value is error


def test_a_start_without_all_processes_ends_with_their_number(monkeypatch):
    without_launcher(monkeypatch)
    ended = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: ended.wait(60))
    monkeypatch.setattr(processes, "_GRACE", 0.0)
    with pytest.raises(TimeoutError, match=(
        r"not all processes of this run have joined within 1 s: num_processes is 3 here; start "
        r"the missing ones, .* or correct num_processes"
    )):  # fmt: skip
        initialize(f"127.0.0.1:{free_port()}", 3, 0, start_timeout=1)
    ended.set()


START_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"coordinator": "host0"}, "coordinator is 'host0': write it like host0:1234"),
    ({"coordinator": "host0:http"}, "coordinator is 'host0:http': write it like"),
    ({"num_processes": 0}, "num_processes is 0: it must be at least 1"),
    ({"heartbeat_timeout": 0}, "heartbeat_timeout is 0: it must be at least 1"),
    ({"start_timeout": -1}, "start_timeout is -1: it must be at least 1"),
    ({"process_id": -1}, "process_id is -1: it must be at least 0"),
    (
        {"coordinator": "h:1", "num_processes": 2, "process_id": 2},
        r"process_id is 2: with num_processes 2 it must be in 0 \.\.\. 1",
    ),
    (
        {"coordinator": "h:1"},
        "coordinator is 'h:1', but num_processes and process_id cannot be detected: pass all three,"
        " or start the processes by srun",
    ),
    (
        {"num_processes": 4, "process_id": 1},
        "num_processes is 4, process_id is 1, but coordinator cannot be detected: pass all three",
    ),
]


def test_mistakes_of_initialize(monkeypatch):
    without_launcher(monkeypatch)
    for arguments, message in START_MISTAKES:
        with pytest.raises(ValueError, match=message):
            initialize(**arguments)


def test_a_launcher_that_jax_cannot_read_is_named_in_the_error(monkeypatch):
    without_launcher(monkeypatch)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    # Backends must not have started.
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    message = (
        r"Kubernetes has started this process, but JAX cannot detect coordinator and num_processes "
        r"and process_id \(coordinator_address should be defined.\): pass them, or num_processes=1 "
        r"if each process is a run of its own; for Kubernetes, pip install"
    )
    with pytest.raises(ValueError, match=message):
        initialize()
