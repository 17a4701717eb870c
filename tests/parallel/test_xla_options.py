"""XLA options by platform, GPU and number of processes, as compiler options and in XLA_FLAGS."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import compiled_programs as compiled
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import burst_jax
from burst_jax.parallel import xla_options
from burst_jax.parallel.peak import peak_flops

MODE = "xla_gpu_collective_permute_mode"
H200, GAMING = "NVIDIA H200", "NVIDIA GeForce RTX 4090"


def test_no_options_on_other_platforms_and_peaks_of_known_gpus():
    assert burst_jax.compiler_options() == {}
    assert burst_jax.compiler_options("cpu", peer_copies=True) == {}
    peaks = {"NVIDIA A100-SXM4-80GB": 312e12, H200: 989e12, GAMING: None, "cpu": None}
    assert {kind: peak_flops(kind) for kind in peaks} == peaks


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
        ([H200] * 4, 1, None, True),
        (["NVIDIA A100-SXM4-80GB"], 1, None, True),
        ([H200] * 4, 2, None, False),  # Peer access is within one process.
        ([H200] * 4, 1, False, False),
        ([H200, GAMING], 1, None, False),
        ([GAMING] * 2, 1, None, False),  # No peer access.
        ([GAMING] * 2, 1, True, True),
        (["an unknown GPU"], 1, None, False),
    ],
)
def test_copy_engines_are_used_with_nvlink_in_one_process(
    kinds, processes, asked, peer, xla_flags, monkeypatch
):
    """In flags for these GPUs, and in options for a mesh of them, if they are alike."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    want = burst_jax.compiler_options("gpu", peer_copies=peer)
    assert want["xla_gpu_enable_latency_hiding_scheduler"]
    assert (want.get(MODE) == "COLLECTIVES_PEER_MEMORY") == peer
    assert xla_options._set_compiler_options(kinds, processes, asked) == want
    assert os.environ["XLA_FLAGS"] == FLAGS + (f" {PEER}" if peer else "")
    if len(set(kinds)) == 1:
        device = AbstractDevice(kinds[0], None, "gpu")
        mesh = AbstractMesh((1,), ("seq",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert burst_jax.compiler_options(peer_copies=asked) == want


def test_flags_are_set_once_and_existing_flags_are_kept(xla_flags):
    xla_flags(" --xla_dump_to=/tmp/x  --xla_gpu_enable_latency_hiding_scheduler=false ")
    first = xla_options._set_compiler_options([H200], 1, None)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_dump_to=/tmp/x", "--xla_gpu_enable_latency_hiding_scheduler=false"]
    assert flags[2:] == [*FLAGS.split()[1:], PEER]
    want = burst_jax.compiler_options("gpu", peer_copies=True)
    assert first == want | {"xla_gpu_enable_latency_hiding_scheduler": "false"}
    # Called again: nothing changes, and the flags in effect are returned.
    for peer_copies in (None, False):
        assert xla_options._set_compiler_options([H200], 1, peer_copies) == first
    assert os.environ["XLA_FLAGS"].split() == flags


def test_flags_that_cannot_be_set(xla_flags, monkeypatch):
    with pytest.raises(ValueError, match=r"peer_copies is True, and there are 2 processes: .*None"):
        xla_options._set_compiler_options([H200], 2, True)
    xla_flags("flags.txt")
    with pytest.raises(ValueError, match=f"XLA_FLAGS is 'flags.txt', the name of .*: {FLAGS} "):
        xla_options._set_compiler_options([H200], 1, None)
    xla_flags("")
    monkeypatch.setattr(xla_options, "backends_are_initialized", lambda: True)
    message = (
        "set_compiler_options is called too late, .*: call it before anything asks JAX for devices "
        r".*, or pass compiler_options=burst_jax.compiler_options\(\) to jax.jit"
    )
    with pytest.raises(RuntimeError, match=message):
        xla_options._set_compiler_options([H200], 1, None)
    assert os.environ["XLA_FLAGS"] == ""


def list_two_gpus(folder):
    """Makes an nvidia-smi that lists two GPUs, and returns a PATH that starts with it."""
    command = folder / "nvidia-smi"
    listed = "\n".join(f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-{i}f)" for i in (0, 1))
    command.write_text(f"#!/bin/sh\necho '{listed}'\n")
    command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_gpus_are_read_from_the_driver(tmp_path, monkeypatch, xla_flags):
    monkeypatch.setattr(xla_options.pathlib.Path, "glob", lambda *_: iter(()))
    monkeypatch.setenv("PATH", list_two_gpus(tmp_path))
    assert xla_options._gpu_kinds() == ["NVIDIA A100-SXM4-80GB"] * 2
    assert jax.config.jax_platforms == "cpu"
    assert burst_jax.set_compiler_options() == {}
    assert os.environ["XLA_FLAGS"] == ""
    # In a process whose platforms are not set, and on a machine without a driver.
    monkeypatch.setattr(xla_options.jax, "config", SimpleNamespace(jax_platforms=None))
    assert len(burst_jax.set_compiler_options()) == 4
    assert os.environ["XLA_FLAGS"] == f"{FLAGS} {PEER}"
    xla_flags("")
    monkeypatch.setenv("PATH", "")
    assert burst_jax.set_compiler_options() == {}
    assert os.environ["XLA_FLAGS"] == ""


RING = """
import os, sys
import jax
import burst_jax, compiled_programs as compiled
from burst_jax.jax_compat import backends_are_initialized

def program(**options):
    mesh = compiled.gpu_mesh("a100", 2)

    def attend(q, k, v):
        return burst_jax.burst_attention(
            q, k, v, mesh=mesh, is_causal=True, layout="zigzag", implementation=compiled.SMALL
        )

    with compiled.mosaic_compiles_for(mesh):
        traced = jax.jit(attend).trace(*compiled.inputs(mesh, 256, 2, 2))
        found = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    return compiled.schedule(found), found.as_text().count("PEER_MEMORY")
"""
WITH_FLAGS = """
assert len(burst_jax.set_compiler_options()) == 4
assert not backends_are_initialized()
jax.config.update("jax_platforms", "cpu")
print(os.environ["XLA_FLAGS"], program(), sep="\\n")
"""


@pytest.mark.cuda_compiler
def test_flags_give_a_plain_jit_the_same_schedule_as_compiler_options(tmp_path):
    """Overlapped permutes by copy engines, in a new process whose backends have not started."""
    here = {}
    exec(RING, here)
    want, copies = here["program"](**burst_jax.compiler_options("gpu", peer_copies=True))
    assert copies
    assert all(kernels for kernels in compiled.overlapped(want))
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path), "PATH": list_two_gpus(tmp_path),
        "JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RING + WITH_FLAGS],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"{FLAGS} {PEER}", str((want, copies))]
