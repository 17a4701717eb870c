"""``benchmarks ampere``: the launched kernel is the compiled one, in the A100's occupancy."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import ampere
from benchmarks.__main__ import main
from benchmarks.driver import Launch
from pallas_kernels import triton
from pallas_kernels.pallas_triton.configs import TritonConfig

CASE = ampere.Case("small", 1, 64, 2, 1, 16, True)
CONFIG = TritonConfig(32, 16, 4, 1)
HOPPER = 228 * 1024


@pytest.mark.parametrize("kernel", list(ampere.MATMULS))
def test_the_extracted_kernel_equals_the_call(kernel, monkeypatch):
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


def test_as_many_ctas_per_sm_as_on_an_a100():
    for shared, ctas in ((20_000, 7), (49_152, 3), (74_240, 2), (106_496, 1), (170_000, 0)):
        assert 164 * 1024 // (shared + 1024) == ctas
        launch = Launch((1, 1, 1), 128, shared)
        padded = launch.as_on_an_a100(HOPPER)
        assert padded.shared >= shared
        assert HOPPER // (padded.shared + 1024) == max(ctas, 1)
        assert launch.as_on_an_a100(164 * 1024) == launch


def test_launches_and_candidates_are_read_from_text():
    thunks = (
        "001: kCustomKernel wrapped_iota grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 b\n"
        "002: kCustomKernel burst_dq grid: [256, 32, 2] threads: [256, 1, 1]"
        "  shared_memory: 73728 bytes\n"
    )
    assert ampere._launch_of(thunks) == Launch((256, 32, 2), 256, 73728)
    candidate = ampere.Candidate(ampere.CASES[3], "dq", TritonConfig(128, 32, 4, 3))
    assert candidate.key == "case3-dq-128x32x4x3"
    assert ampere.Candidate.of_key(candidate.key) == candidate


def test_kernels_must_be_compiled_first(tmp_path):
    with pytest.raises(SystemExit, match="has no kernels for these cases: run with --compile"):
        main(["ampere", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_compiled_kernels_are_for_an_a100(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "ampere", str(tmp_path)]
    compiling = [*command, "--compile", "--cases", "3", "--kernels", "forward"]
    done = subprocess.run(compiling, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"128x64x4x3\* \d+ registers, 0 bytes spilled", done.stdout), done.stdout
    ptx = (tmp_path / "case3-forward-128x64x4x3.ptx").read_text()
    assert ".target sm_80" in ptx
    assert ptx.count("mma.sync") >= 128
    assert "wgmma" not in ptx
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "benchmarks ampere needs an NVIDIA GPU" in done.stderr
