"""``bench ampere``: what it launches is the kernel that was compiled, as an A100 would run it."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import ampere
from benchmarks.driver import Launch
from pallas_kernels import triton
from pallas_kernels.pallas_triton.configs import TritonConfig

CASE = ampere.Case("small", 1, 64, 2, 1, 16, True)
CONFIG = TritonConfig(32, 16, 4, 1)
HOPPER = 228 * 1024


@pytest.mark.parametrize("kernel", list(ampere.MATMULS))
def test_the_kernel_of_a_call_makes_what_the_call_makes(kernel, monkeypatch):
    monkeypatch.setattr(ampere, "triton", lambda config: triton(interpret=True, config=config))
    candidate = ampere.Candidate(CASE, kernel, CONFIG)
    arguments = candidate.with_bounds(ampere.inputs_of(CASE))
    want = jax.tree.leaves(candidate.run()(*arguments))
    given, results, call = ampere.kernel_call(candidate.run(), *arguments)
    got = jax.tree.leaves(call(*given))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in results]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.abs(np.asarray(x, np.float32)).max() > 1e-3


def test_keys_of_files_name_candidates():
    candidate = ampere.Candidate(ampere.CASES[3], "dq", TritonConfig(128, 32, 4, 3))
    assert candidate.key == "case3-dq-128x32x4x3"
    assert ampere.Candidate.of_key(candidate.key) == candidate


@pytest.mark.parametrize(
    ("shared", "programs"), [(20_000, 7), (49_152, 3), (74_240, 2), (106_496, 1), (170_000, 0)]
)
def test_as_many_programs_share_a_multiprocessor_as_on_an_a100(shared, programs):
    assert 164 * 1024 // (shared + 1024) == programs
    launch = Launch((1, 1, 1), 128, shared)
    there = launch.as_on_an_a100(HOPPER)
    assert there.shared >= shared
    assert HOPPER // (there.shared + 1024) == max(programs, 1)
    assert launch.as_on_an_a100(164 * 1024) == launch


def test_the_launch_is_read_from_what_a_program_runs():
    thunks = (
        "001: kCustomKernel wrapped_iota grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 b\n"
        "002: kCustomKernel burst_dq grid: [256, 32, 2] threads: [256, 1, 1]"
        "  shared_memory: 73728 bytes\n"
    )
    assert ampere._launch_of(thunks) == Launch((256, 32, 2), 256, 73728)


def benchmark(*args):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "ampere", *args],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_folder_without_kernels_says_what_makes_them(tmp_path):
    code, said = benchmark(str(tmp_path))
    assert code == 1
    assert "has no kernels for these cases: --compile makes them" in said
    code, said = benchmark(str(tmp_path), "--configs", "64,64")
    assert code == 2
    assert "64,64: Q,KV,WARPS,STAGES (not enough values" in said


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_what_is_compiled_is_for_an_a100(tmp_path):
    code, said = benchmark(str(tmp_path), "--compile", "--cases", "3", "--kernels", "forward")
    assert code == 0, said
    assert re.search(r"128x64x4x3\* \d+ registers, 0 bytes spilled", said), said
    ptx = (tmp_path / "case3-forward-128x64x4x3.ptx").read_text()
    assert ".target sm_80" in ptx
    assert ptx.count("mma.sync") >= 128
    assert "wgmma" not in ptx
    code, said = benchmark(str(tmp_path))
    assert code == 1
    assert "bench ampere needs an NVIDIA GPU" in said
