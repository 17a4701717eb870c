"""Which tiles the Triton kernels get, and what the tuner offers them."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, tune
from pallas_kernels.timing import median_time, relative_error
from pallas_kernels.triton_configs import TritonConfig, triton_configs

PLAIN = AttentionSpec(1.0, right=0)


def configs(capability=9.0, dim=128, dtype="bfloat16", length=4096, spec=PLAIN, packed=False):
    return triton_configs(capability, dim, dtype, length, length, spec, packed)


@pytest.mark.parametrize("capability", [None, 8.6, 8.9, 10.0, 12.1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_without_a_table_gets_the_tiles_that_fit_all(capability, dtype):
    for dim in (32, 64, 96, 128, 256):
        assert configs(capability, dim, dtype) == configs(None, dim, dtype)


def test_each_table_is_for_its_gpu():
    assert len({configs(capability) for capability in (None, 8.0, 9.0)}) == 3
    assert configs(dtype="bfloat16") == configs(dtype="float16") != configs(dtype="float32")


@pytest.mark.parametrize("capability", [8.0, 9.0])
@pytest.mark.parametrize(
    "what",
    [
        {"length": 4000},
        {"packed": True},
        {"spec": AttentionSpec(1.0, right=0, logits_soft_cap=30.0)},
    ],
    ids=["ragged", "packed", "cap"],
)
def test_what_takes_registers_gets_tiles_that_leave_them(capability, what):
    assert configs(capability, **what) != configs(capability)
    assert configs(capability, spec=AttentionSpec(1.0, left=99, right=0)) == configs(capability)


def test_shared_memory_counts_what_is_walked_over_in_every_stage():
    config = TritonConfig(64, 128, num_warps=8, num_stages=3)
    kib = 1024
    assert config.shared_memory("forward", 128, 2) == (2 * 3 * 32 + 16) * kib
    assert config.shared_memory("dq", 128, 2) == (2 * 3 * 32 + 2 * 16) * kib
    assert config.shared_memory("dkv", 128, 2) == (2 * 3 * 16 + 2 * 32) * kib
    # A head dim of 96 is padded to 128 lanes; rows in registers take no shared memory.
    assert config.shared_memory("dq", 96, 2) == config.shared_memory("dq", 128, 2)
    kept = TritonConfig(64, 128, num_warps=8, num_stages=3, rows_in_registers=True)
    assert kept.shared_memory("dq", 128, 2) == 2 * 3 * 32 * kib


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_the_tuner_tries_each_config_once(kernel):
    space = list(tune.space(kernel))
    assert len(space) == len(set(space)) >= 20
    shipped = {
        getattr(configs(capability), kernel) for capability in (8.0, 9.0)
    }  # what was fastest is among what is tried
    assert shipped <= set(space)


def test_entries_are_read_as_they_are_printed():
    for config in (TritonConfig(64, 128, 8, 3), TritonConfig(64, 64, 4, 3, True)):
        printed = ",".join(str(int(x)) for x in tune.as_entry(config))
        assert tune.parse_entry(printed) == config


def test_the_tuner_says_that_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        tune.main()


def test_the_tuner_times_what_is_right_and_nothing_else(monkeypatch):
    """In interpret mode, with a kernel that is off by a tenth."""
    args = tune.arguments(["--shape", "1", "64", "2", "1", "16", "--causal", "--dtype", "float32"])
    problem = tune.Problem(args)
    assert problem.flops == 2 * 2 * 16 * 64 * 65 // 2
    config, interpreted = TritonConfig(16, 32, 4, 1), tune.triton

    def in_interpret_mode(config):
        return interpreted(interpret=True, config=config)

    monkeypatch.setattr(tune, "triton", in_interpret_mode)
    monkeypatch.setattr(tune, "NO_SPILLS", {})
    for kernel in tune.KERNELS:
        assert problem.measure(kernel, config, limit=1e-5) > 0
    problem.want["dq"] = problem.want["dq"] * 1.1
    with pytest.raises(ArithmeticError, match=r"relative error 0\.09"):
        problem.measure("dq", config, limit=1e-5)


def test_relative_error():
    want = [jnp.asarray([3.0, 4.0]), jnp.zeros(2)]
    assert relative_error(want, want) == 0
    assert np.isclose(relative_error([want[0], jnp.asarray([0.0, 0.5])], want), 0.1)
    for bad in (jnp.nan, jnp.inf):
        assert relative_error([want[0], jnp.asarray([0.0, bad])], want) == np.inf
    assert relative_error([jnp.ones(1)], [jnp.zeros(1)]) == np.inf


def test_median_time_counts_every_call():
    calls = []
    seconds = median_time(lambda: calls.append(1) or jnp.zeros(()), rounds=3, seconds=0.01)
    assert 0 < seconds < 0.01
    assert len(calls) > 3
