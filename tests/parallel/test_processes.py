"""Several processes, as on several hosts, on local CPU devices: batches, checkpoints, failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_processes import free_port, last_lines, started
from safetensors.numpy import load_file

from burst_jax.layouts.permutation import to_layout
from burst_jax.models import Decoder, DecoderConfig, save
from burst_jax.parallel.processes import another_may_be_gone, by_first_process
from burst_jax.training import CheckpointError, Checkpoints, barrier, initialize, is_main

SUPPORT = Path(__file__).parents[1] / "support"
HEARTBEAT = 10  # Seconds, as in the script.
ROWS = np.arange(4 * 17).reshape(4, 17)  # As in the script.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint that the processes load."""
    path = tmp_path_factory.mktemp("processes")
    config = DecoderConfig(vocab_size=8, num_layers=2, embed_dim=8, head_dim=4, mlp_dim=8)
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
    save(Decoder(config, rngs=nnx.Rngs(0), mesh=mesh), path / "model", max_length=64)
    return path


@pytest.fixture(scope="module")
def seen(folder):
    """What each of the two processes reports."""
    script, port = str(SUPPORT / "two_processes.py"), free_port()
    found = last_lines([[script, port, str(index), str(folder)] for index in range(2)])
    return [report for report, _ in found]


@pytest.mark.parametrize(
    ("case", "data", "seq"),
    [
        ("whole", 2, 2),
        ("whole, explicit", 2, 2),
        ("own", 2, 2),
        ("own, four parts", 4, 1),
        ("same rows", 1, 4),
    ],
)
def test_every_device_has_its_shard_of_the_batch(seen, case, data, seq):
    whole = to_layout(ROWS[:, :-1], "zigzag", seq)
    rows, columns = 4 // data, 16 // seq
    for process, each in enumerate(seen):
        assert each[case]["shape"] == [4, 16]
        for device, (row, column, tokens) in enumerate(each[case]["held"], 2 * process):
            assert (row, column) == (device // seq * rows, device % seq * columns)
            part = whole[row : row + rows, column : column + columns]
            np.testing.assert_array_equal(tokens, part)


MISTAKES = {
    "own as whole": "batch differs between processes [0, 1]: every process must pass the same "
    "whole batch; if each passes its own sequences, use process_local=True",
    "own of shared rows": "batch differs between processes [0, 1], whose devices hold parts of the "
    "same sequences: pass the same sequences",
    "fewer": "batch has other names, dtypes or sizes on another process",
    "indivisible": "batch has 3 sequences: use a multiple of 2, the shards of mesh axes "
    "('data',); sequences of this process alone need process_local=True",
    "indivisible own": "batch has 1 sequences: use a multiple of 2, the shards of mesh axes "
    "('data',)",
    "segments on one": "make segment_ids on all processes or on none",
}


def test_a_mistake_raises_on_both_processes(seen):
    for case, message in MISTAKES.items():
        for each in seen:
            assert isinstance(each[case], str), case
            assert message in each[case]


def test_an_error_of_one_process_does_not_block_the_other(seen):
    first, second = (each["indivisible on one"] for each in seen)
    assert "batch has other names, dtypes or sizes on another process" in first
    assert "batch has 3 sequences: use a multiple of 2" in second


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
    kinds = [each.pop(0) for saved in seen for each in (saved["saved again"], saved["full disk"])]
    assert kinds == ["FileExistsError", "OSError"] * 2
    for each in seen:
        assert each["saved"] == files
        assert "saved exists: choose a folder that does not" in each["saved again"][0]
        assert "No space left on device" in each["full disk"][0]
    assert sorted(path.name for path in folder.iterdir()) == ["model", "saved"]


# --- checkpoints ---------------------------------------------------------------------------------


def run_commands(count: int, *arguments: object) -> list[list[str]]:
    words = [free_port(), *map(str, arguments)]
    script = str(SUPPORT / "processes_of_a_run.py")
    return [[script, words[0], str(index), str(count), *words[1:]] for index in range(count)]


def one_process_state(seed: int):
    """As in the script, on eight devices of this process."""
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)
    state = {"x": x, "mean": x.mean(0), "keys": jax.random.split(jax.random.key(seed), 8)}
    return {
        name: jax.device_put(value, NamedSharding(mesh, P() if name == "mean" else P("data")))
        for name, value in state.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_checkpoints_are_restored_by_other_numbers_of_processes(tmp_path, count):
    """The newest one is damaged in a file that only one of the processes reads."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, one_process_state(1), {"loader": [1, 2]})
        checkpoints.save(5, one_process_state(2))
    (tmp_path / "5" / "manifest.ocdbt").write_bytes(b"not what was written")
    for each, _ in last_lines(run_commands(count, "checkpoints", tmp_path)):
        assert (each["step"], each["extra"]) == (3, {"loader": [1, 2]})
        assert each["refused"]["5"].startswith("manifest.ocdbt: has 20 bytes, ")
        assert each["same"] == {"x": True, "mean": True, "keys": True}
        assert each["shards"] == 8 // count
        assert "state has x only on this process' devices: put it onto the mesh" in each["local"]
        assert "extra differs between processes: one copy of it is saved" in each["extra differs"]
        assert "y: not in the checkpoint" in each["other state"]
        assert each["there"] == ["5.refused", "6", "7"]
    want = one_process_state(5)
    restored = Checkpoints(tmp_path).restore(want)
    assert restored is not None
    assert (restored.step, restored.extra, restored.refused) == (7, {"step": 7}, {})
    for name, value in want.items():
        assert jnp.all(restored.state[name] == value), name


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_all_and_keeps_the_last_checkpoint(tmp_path):
    with started(run_commands(2, "full", tmp_path)) as (waiting, full):
        _, errors = full.communicate(timeout=90)
        start = time.monotonic()
        assert full.returncode == 1
        assert f"checkpoint 2 could not be written to {tmp_path}: File too large" in errors
        assert "the last good one is 1. Free disk space" in errors
        waiting.communicate(timeout=90)
        assert time.monotonic() - start < 2 * HEARTBEAT
    assert waiting.returncode != 0
    assert Checkpoints(tmp_path).latest() == 1


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "gone", "message"),
    [
        (signal.SIGKILL, 1, r"stopped sending heartbeats\):\n1\n|Task 1 heartbeat timeout"),
        (signal.SIGSTOP, 1, r"stopped sending heartbeats\):\n1\n|Task 1 heartbeat timeout"),
        (signal.SIGKILL, 0, "the leader task was preempted/died/restarted"),
        (signal.SIGSTOP, 0, "CoordinationService/Heartbeat"),
    ],
    ids=["killed", "stalled", "main-killed", "main-stalled"],
)
def test_a_lost_process_ends_the_other_in_time_with_its_index(sent, gone, message):
    with started(run_commands(2, "loop")) as processes:
        for process in processes:
            assert process.stdout is not None
            assert any("meeting" in line for line in iter(process.stdout.readline, ""))
        processes[gone].send_signal(sent)
        start = time.monotonic()
        _, errors = processes[1 - gone].communicate(timeout=90)
        # HEARTBEAT plus time for a busy machine.
        assert time.monotonic() - start < 2 * HEARTBEAT
    assert processes[1 - gone].returncode != 0
    assert re.search(message, errors), errors


def test_errors_caused_by_a_collective_are_recognized(monkeypatch):
    def chain(*errors):
        try:
            try:
                raise errors[0]
            except Exception as error:
                raise errors[1] from error
        except Exception:
            try:
                sys.exit(2)
            except SystemExit as end:
                return end

    lost = jax.errors.JaxRuntimeError("Gloo AllGather failed: Connection reset by peer")
    after_a_collective = chain(lost, CheckpointError("checkpoint 6 could not be written"))
    after_another = chain(OSError("File too large"), CheckpointError("no checkpoint 6"))
    assert not another_may_be_gone(after_a_collective)  # There is one process.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert another_may_be_gone(after_a_collective)
    assert not another_may_be_gone(after_another)


@pytest.mark.slow
def test_a_process_that_raises_does_not_wait_for_the_others():
    with started(run_commands(2, "raise")) as (waiting, raising):
        _, errors = raising.communicate(timeout=90)
        start = time.monotonic()
        assert raising.returncode == 1
        assert "OSError: the loader's disk is gone" in errors
        assert re.search(r"process 1 of 2 on \S+ ends: OSError", errors)
        _, errors = waiting.communicate(timeout=90)
        assert time.monotonic() - start < 2 * HEARTBEAT
    assert waiting.returncode != 0
    assert re.search("stopped sending heartbeats|Task 1 heartbeat timeout", errors), errors


LAUNCHERS = {
    "slurm": lambda index: {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    },
    "open-mpi": lambda index: {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_VERSION": "4.1.5",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_a_launcher_connect(launcher, monkeypatch):
    without_launcher(monkeypatch)
    code = (
        "import jax; jax.config.update('jax_platforms', 'cpu')\n"
        "from burst_jax.training import barrier, initialize\n"
        "with initialize() as processes:\n"
        "    barrier('connected')\n"
        "    print([processes.index, processes.count, jax.device_count()])\n"
    )
    port = {"JAX_COORDINATOR_PORT": free_port(), "JAX_NUM_CPU_DEVICES": "1"}
    environments = [LAUNCHERS[launcher](index) | port for index in range(2)]
    for index, (report, errors) in enumerate(last_lines([["-c", code]] * 2, environments)):
        assert report == [index, 2, 2]
        assert "waiting up to 300 s for the other processes of the run" in errors
        assert re.search(rf"\S+, pid \d+: process {index} of 2\n", errors)


def without_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JOB_COMPLETION", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)


def test_a_single_process_needs_no_arguments(monkeypatch):
    without_launcher(monkeypatch)
    alone: list[dict[str, Any]] = [
        {},
        {"num_processes": 1},
        {"coordinator": "host:1", "num_processes": 1},
    ]
    for arguments in alone:
        with initialize(**arguments) as processes:
            assert (processes.index, processes.count) == (0, 1)
            assert is_main()
            barrier("alone")
    # Under a launcher that has started one process, it keeps all GPUs of the host.
    for name, value in (("STEP_NODELIST", "node7"), ("NTASKS", "1"), ("PROCID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert initialize().count == 1
    with pytest.raises(OSError, match="unchanged"), initialize():
        raise OSError("unchanged")
    assert not jax.distributed.is_initialized()


def test_by_first_process_with_a_single_process():
    done = []
    by_first_process(lambda: done.append(1))
    assert done == [1]
    error = KeyError("the same object")

    def fail():
        raise error

    with pytest.raises(KeyError) as raised:
        by_first_process(fail)
    assert raised.value is error


START_MISTAKES = {
    "coordinator": ({"coordinator": "host0"}, "coordinator is 'host0': write it like host0:1234"),
    "port": ({"coordinator": "host0:http"}, "coordinator is 'host0:http': write it like"),
    "count": ({"num_processes": 0}, "num_processes is 0: it must be at least 1"),
    "heartbeat": ({"heartbeat_timeout": 0}, "heartbeat_timeout is 0: it must be at least 1"),
    "start": ({"start_timeout": -1}, "start_timeout is -1: it must be at least 1"),
    "negative": ({"process_id": -1}, "process_id is -1: it must be at least 0"),
    "range": (
        {"coordinator": "h:1", "num_processes": 2, "process_id": 2},
        r"process_id is 2: with num_processes 2 it must be in 0 \.\.\. 1",
    ),
    "coordinator-alone": (
        {"coordinator": "h:1"},
        "coordinator is 'h:1', but num_processes and process_id cannot be detected: pass all three,"
        " or start the processes by srun",
    ),
    "no-coordinator": (
        {"num_processes": 4, "process_id": 1},
        "num_processes is 4, process_id is 1, but coordinator cannot be detected: pass all three",
    ),
    "no-id": (
        {"coordinator": "h:1", "num_processes": 2},
        "coordinator is 'h:1', num_processes is 2, but process_id cannot be detected",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), START_MISTAKES.values(), ids=START_MISTAKES)
def test_mistakes_of_initialize(arguments, message, monkeypatch):
    without_launcher(monkeypatch)
    with pytest.raises(ValueError, match=message):
        initialize(**arguments)


@pytest.mark.slow
def test_a_launcher_that_jax_cannot_read_is_named_in_the_error():
    """In a new process, whose backends have not started."""
    code = "from burst_jax.training import initialize; initialize()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JOB_COMPLETION_INDEX": "1"},
    )
    assert (
        "ValueError: Kubernetes has started this process, but JAX cannot detect coordinator and "
        "num_processes and process_id (coordinator_address should be defined.): pass them, or "
        "num_processes=1 if each process is a run of its own; for Kubernetes, pip install"
    ) in run.stderr
