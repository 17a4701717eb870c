"""XLA options by platform, GPU and number of processes, as compiler options and in XLA_FLAGS."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import compiled_programs as compiled
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import burst_jax
from burst_jax.parallel import xla_options

MODE = "xla_gpu_collective_permute_mode"


def options_on(kind, **options):
    """The options of a program for one GPU of this device name."""
    mesh = AbstractMesh((1,), ("seq",), abstract_device=AbstractDevice(kind, None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return burst_jax.compiler_options(**options)


def test_no_options_on_other_platforms():
    assert burst_jax.compiler_options() == {}
    assert burst_jax.compiler_options("cpu", peer_copies=True) == {}


@pytest.mark.parametrize(
    ("kind", "processes", "peer"),
    [
        ("NVIDIA H200", 1, True),
        ("NVIDIA A100-SXM4-80GB", 1, True),
        ("NVIDIA H200", 2, False),  # Peer access is within one process.
        ("NVIDIA GeForce RTX 4090", 1, False),  # No peer access.
        ("an unknown GPU", 1, False),
    ],
)
def test_copy_engines_are_used_with_nvlink_in_one_process(kind, processes, peer, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    options = options_on(kind)
    assert options["xla_gpu_enable_latency_hiding_scheduler"]
    assert (options.get(MODE) == "COLLECTIVES_PEER_MEMORY") == peer
    assert MODE in options_on(kind, peer_copies=True)
    assert MODE not in options_on(kind, peer_copies=False)


# --- flags for the whole process -----------------------------------------------------------------

FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_experimental_parallel_collective_overlap_limit=4 "
    f"--xla_gpu_collective_permute_combine_threshold_bytes={2**50}"
)
PEER = f"--{MODE}=peer"


@pytest.fixture
def xla_flags(monkeypatch):
    """Sets XLA_FLAGS in a process whose backends seem not to have started."""
    monkeypatch.setattr(xla_options, "backends_are_initialized", lambda: False)

    def set_to(text):
        monkeypatch.setenv("XLA_FLAGS", text)

    set_to("")
    return set_to


@pytest.mark.parametrize(
    ("kinds", "processes", "asked", "peer"),
    [
        (["NVIDIA H200"] * 4, 1, None, True),
        (["NVIDIA H200"] * 4, 2, None, False),
        (["NVIDIA H200"] * 4, 1, False, False),
        (["NVIDIA H200", "NVIDIA GeForce RTX 4090"], 1, None, False),
        (["NVIDIA GeForce RTX 4090"] * 2, 1, True, True),
    ],
)
def test_flags_by_gpus_and_processes(kinds, processes, asked, peer, xla_flags):
    options = xla_options._set_compiler_options(kinds, processes, asked)
    assert options == burst_jax.compiler_options("gpu", peer_copies=peer)
    assert os.environ["XLA_FLAGS"] == FLAGS + (f" {PEER}" if peer else "")


def test_flags_are_set_once_and_existing_flags_are_kept(xla_flags):
    xla_flags(" --xla_dump_to=/tmp/x  --xla_gpu_enable_latency_hiding_scheduler=false ")
    first = xla_options._set_compiler_options(["NVIDIA H200"], 1, None)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_dump_to=/tmp/x", "--xla_gpu_enable_latency_hiding_scheduler=false"]
    assert flags[2:] == [*FLAGS.split()[1:], PEER]
    want = burst_jax.compiler_options("gpu", peer_copies=True)
    assert first == want | {"xla_gpu_enable_latency_hiding_scheduler": "false"}
    # Called again: nothing changes, and the flags in effect are returned.
    assert xla_options._set_compiler_options(["NVIDIA H200"], 1, None) == first
    assert xla_options._set_compiler_options(["NVIDIA H200"], 1, False) == first
    assert os.environ["XLA_FLAGS"].split() == flags


def test_flags_after_the_backends_have_started(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    jax.devices()
    message = (
        "set_compiler_options is called too late, .*: call it before anything asks JAX for devices "
        r".*, or pass compiler_options=burst_jax.compiler_options\(\) to jax.jit"
    )
    with pytest.raises(RuntimeError, match=message):
        xla_options._set_compiler_options(["NVIDIA H200"], 1, None)
    assert os.environ["XLA_FLAGS"] == ""


def test_flags_that_cannot_be_set(xla_flags):
    with pytest.raises(ValueError, match=r"peer_copies is True, and there are 2 processes: .*None"):
        xla_options._set_compiler_options(["NVIDIA H200"], 2, True)
    xla_flags("flags.txt")
    with pytest.raises(ValueError, match=f"XLA_FLAGS is 'flags.txt', the name of .*: {FLAGS} "):
        xla_options._set_compiler_options(["NVIDIA H200"], 1, None)


def test_no_flags_without_a_gpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(xla_options, "_gpu_kinds", lambda: ["NVIDIA H200"])
    assert jax.config.jax_platforms == "cpu"
    assert burst_jax.set_compiler_options() == {}
    monkeypatch.setattr(xla_options, "_gpu_kinds", list)
    with jax_platforms(None):
        assert burst_jax.set_compiler_options() == {}
    assert "XLA_FLAGS" not in os.environ


@contextlib.contextmanager
def jax_platforms(value):
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", value)
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


def run_alone(program, **environment):
    """The lines that a program prints in a new process, whose backends have not started."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_gpus_are_read_from_the_driver_and_no_backend_starts(tmp_path):
    """With an nvidia-smi that lists two GPUs."""
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\n"
        "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f)'\n"
        "echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2e)'\n"
    )
    command.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    program = (
        "import os, burst_jax\n"
        "from burst_jax.parallel import xla_options\n"
        "xla_options.pathlib.Path.glob = lambda *_: iter(())\n"
        "print(xla_options._gpu_kinds())\n"
        "assert len(burst_jax.set_compiler_options()) == 4\n"
        "print(os.environ['XLA_FLAGS'])\n"
        "print(xla_options.backends_are_initialized())\n"
    )
    lines = run_alone(program, PATH=path, JAX_PLATFORMS="cuda,cpu", XLA_FLAGS="")
    assert lines == [str(["NVIDIA H100 80GB HBM3"] * 2), f"{FLAGS} {PEER}", "False"]


GRADIENT = """
import jax
import burst_jax, compiled_programs as compiled

def program(**options):
    mesh = compiled.gpu_mesh("a100", 4)
    arrays = compiled.inputs(mesh, 256, 2, 2)

    def gradient(q, k, v):
        def attend(q, k, v):
            return burst_jax.burst_attention(
                q, k, v, mesh=mesh, is_causal=True, layout="zigzag", implementation="triton"
            )

        return jax.vjp(attend, q, k, v)[1](q)

    lowered = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",))
    compiled_for = lowered.compile(compiler_options=options)
    return compiled.schedule(compiled_for), compiled_for.as_text().count("PEER_MEMORY")
"""


@pytest.mark.cuda_compiler
def test_flags_give_a_plain_jit_the_same_schedule_as_compiler_options():
    """Overlapped permutes by copy engines, which a plain ``jax.jit`` does not have."""
    here = {}
    exec(GRADIENT, here)
    want, copies = here["program"](**burst_jax.compiler_options("gpu", peer_copies=True))
    assert copies
    assert all(kernels for kernels in compiled.overlapped(want))
    plain, plain_copies = here["program"]()
    assert not plain_copies
    assert not all(kernels for kernels in compiled.overlapped(plain))
    first = (
        "from burst_jax.parallel import xla_options\n"
        "xla_options._set_compiler_options(['NVIDIA A100-SXM4-80GB'] * 4, 1, None)\n"
    )
    last = "print(program())"
    lines = run_alone(first + GRADIENT + last, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert lines[-1] == str((want, copies))
