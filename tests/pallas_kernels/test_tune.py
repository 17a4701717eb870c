"""What the tuner offers the GPU kernels, and that it times what is right and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionInputs, KVSide, QuerySide, triton, tune
from pallas_kernels.mosaic.sm90 import configs as mosaic_configs
from pallas_kernels.mosaic.sm90.configs import MosaicConfig
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory
from pallas_kernels.pallas_triton.configs import TritonConfig, triton_configs
from pallas_kernels.timing import median_time, relative_error

KERNELS = [(name, kernel) for name, b in tune.BACKENDS.items() for kernel in b.matmuls]
SMALL = ["--shape", "1", "64", "2", "1", "16", "--causal", "--dtype", "float32"]


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_each_triton_config_is_tried_once(kernel):
    space = list(tune.triton_space(kernel, 128, 128))
    assert len(space) == len(set(space)) >= 20
    spec = tune.AttentionSpec.of(1.0, right=0)
    shipped = {
        getattr(triton_configs(capability, 128, "bfloat16", 4096, 4096, spec, False), kernel)
        for capability in (8.0, 9.0)
    }  # what was fastest is among what is tried
    assert shipped <= set(space)


@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (64, 256), (128, 128), (192, 128)])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_each_mosaic_config_that_fits_is_tried_once(kernel, dim, value_dim):
    space = list(tune.mosaic_space(kernel, dim, value_dim))
    assert len(space) == len(set(space))
    for config in space:
        if kernel == "forward":
            dtypes = jnp.bfloat16, jnp.bfloat16
            memory = ForwardMemory.of(config, dim, *dtypes, has_carry=True, value_dim=value_dim)
        else:
            memory = BackwardMemory.of(config, dim, jnp.bfloat16, value_dim)
        assert memory.nbytes <= mosaic_configs.SHARED_MEMORY
    largest = max(dim, value_dim)
    if kernel == "forward" or largest <= 128:
        assert getattr(mosaic_configs, f"{kernel}_config")(largest) in space


def test_the_mosaic_space_is_what_fits_of_the_whole():
    small = {tune.as_entry(config) for config in tune.mosaic_space("forward", 16, 16)}
    sizes = (128, 192), (64, 128, 192, 256), (2, 3, 4)
    assert small == {
        (*config, *cluster)
        for config in itertools.product(*sizes)
        for cluster in ((), ("cluster=2",))
    }
    backward = {tune.as_entry(config) for config in tune.mosaic_space("backward", 32, 32)}
    fewer = {(64, 128, 3, 2), (64, 128, 4, 2), (64, 128, 4, 3)}
    assert backward == {(64, 128, n) for n in (2, 3, 4)} | fewer
    large = {tune.as_entry(config) for config in tune.mosaic_space("forward", 128, 128)}
    assert {(128, 128, 2), (128, 128, 2, "cluster=2")} <= large
    assert (128, 128, 3) not in large
    narrow_values = {tune.as_entry(config) for config in tune.mosaic_space("forward", 128, 64)}
    assert large < narrow_values


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("triton", TritonConfig(64, 128, 8, 3)),
        ("triton", TritonConfig(64, 64, 4, 3, True)),
        ("mosaic_sm90", MosaicConfig(128, 64, 3)),
        ("mosaic_sm90", MosaicConfig(64, 128, 3, 2)),
        ("mosaic_sm90", MosaicConfig(128, 128, 2, cluster=2)),
    ],
)
def test_entries_are_read_as_they_are_printed(name, config):
    entry = tune.as_entry(config)
    printed = ",".join(x if isinstance(x, str) else str(int(x)) for x in entry)
    assert tune.BACKENDS[name].parse(printed) == config
    assert tune.as_entry(tune.BACKENDS[name].parse(printed)) == tune.as_entry(config)


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_each_kernel_is_one_of_its_implementation(name, kernel):
    backend = tune.BACKENDS[name]
    config = next(iter(backend.space(kernel, 64, 64)))
    local = backend.make(config)
    assert local.name == name
    what = kernel if kernel in ("forward", "backward") else f"backward_{kernel}"
    assert getattr(local, what) is not None


@pytest.mark.parametrize(
    ("capability", "name", "kernels"),
    [
        (None, "triton", ["forward", "dq", "dkv"]),
        ("8.0", "triton", ["forward", "dq", "dkv"]),
        ("9.0", "mosaic_sm90", ["forward", "backward"]),
        ("10.0", "triton", ["forward", "dq", "dkv"]),
    ],
)
def test_the_gpu_decides_what_is_tuned(capability, name, kernels, monkeypatch):
    if capability is not None:
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = tune.arguments([])
    assert (args.implementation, args.kernels, args.configs) == (name, kernels, [])
    other = tune.arguments(["--implementation", "mosaic_sm90", "--configs", "128,64,2"])
    assert (other.implementation, other.configs) == ("mosaic_sm90", [MosaicConfig(128, 64, 2)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kernels", "dq"], "mosaic_sm90 has no kernel 'dq'; it has forward, backward"),
        (["--configs", "64,128,8,3,1"], "--configs of mosaic_sm90 are Q,KV,STAGES"),
        (["--configs", "128,x,2"], "--configs of mosaic_sm90 are Q,KV,STAGES"),
        (["--configs", "128,100,2"], "block_kv is 100: it must be a multiple of 64"),
        (["--shape", "1", "64", "8", "3", "64"], "heads a multiple of key heads"),
        (["--shape", "0", "64", "8", "8", "64"], "--shape is [0, 64, 8, 8, 64]: all are 1 or more"),
        (["--value-dim", "0"], "--value-dim is 0: it must be 1 or more"),
        (["--top", "0"], "--top is 0, --window None: at least 1 and 0"),
    ],
)
def test_what_an_implementation_does_not_know_is_refused(given, message, capsys):
    with pytest.raises(SystemExit):
        tune.arguments(["--implementation", "mosaic_sm90", *given])
    assert message in capsys.readouterr().err


def test_the_tuner_says_that_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        tune.main()


def problem(*given):
    """In interpret mode."""
    made = tune.Measurement(tune.arguments(["--implementation", "triton", *SMALL, *given]))
    made.backend = dataclasses.replace(
        made.backend, make=lambda config: triton(interpret=True, config=config), options={}
    )
    return made


@pytest.mark.slow
def test_the_tuner_times_what_is_right_and_nothing_else():
    """With a kernel that is off by a tenth."""
    small, config = problem("--value-dim", "24"), TritonConfig(16, 32, 4, 1)
    assert small.inputs.kv.v.shape == (1, 64, 1, 24)
    assert small.scores == 2 * 64 * 65 // 2
    for kernel in small.backend.matmuls:
        assert small.measure(kernel, config, limit=1e-5) > 0
    small.want["dq"] = small.want["dq"] * 1.1
    with pytest.raises(ArithmeticError, match=r"relative error 0\.09"):
        small.measure("dq", config, limit=1e-5)
    # Both results of a kernel count alone: a large one does not hide a small one's error.
    o, lse = small.want["forward"]
    small.want["forward"] = (o * 1.1, lse)
    with pytest.raises(ArithmeticError, match=r"relative error 0\.09"):
        small.measure("forward", config, limit=1e-5)


@pytest.mark.slow
def test_a_fused_backward_is_held_to_both_gradients():
    """The Triton kernels, whose two halves together are what Mosaic's one kernel is."""
    small, config = problem(), TritonConfig(16, 32, 4, 1)
    assert small.measure("backward", config, limit=1e-5) > 0
    dq, (dk, dv) = small.want["backward"]
    for wrong in ((dq * 1.1, (dk, dv)), (dq, (dk * 1.1, dv)), (dq, (dk, dv * 1.1))):
        small.want["backward"] = wrong
        with pytest.raises(ArithmeticError, match=r"relative error 0\.09"):
            small.measure("backward", config, limit=1e-5)


class TestSearch:
    """The whole search, on a GPU that is pretended and with nothing measured."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch):
        device = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

        class Measurement:
            scores = 10**12 // (2 * 128)

            def __init__(self, args):
                self.backend = tune.BACKENDS[args.implementation]
                batch, length, heads, kv_heads, dim = args.shape
                q: Any = jax.ShapeDtypeStruct((batch, length, heads, dim), args.dtype)
                kv_shape = batch, length, kv_heads
                k: Any = jax.ShapeDtypeStruct((*kv_shape, dim), args.dtype)
                v: Any = jax.ShapeDtypeStruct((*kv_shape, args.value_dim), args.dtype)
                self.inputs = AttentionInputs(QuerySide(q), KVSide(k, v))

            def measure(self, kernel, config, limit):
                if getattr(config, "stages", None) == 3:
                    raise ArithmeticError("it is wrong")
                return 1e-2 if config.block_kv == 128 else 2e-2

        monkeypatch.setattr(tune, "Measurement", Measurement)

    def search(self, monkeypatch, capsys, *given):
        monkeypatch.setattr(sys, "argv", ["tune", *given])
        tune.main()
        return capsys.readouterr().out

    def test_it_prints_the_fastest_and_its_entry(self, monkeypatch, capsys):
        printed = self.search(monkeypatch, capsys)
        assert "NVIDIA H200, mosaic_sm90, bfloat16, B T N K H = 1 16384 32 32 128\n" in printed
        assert "entry: forward_config(128): MosaicConfig(128, 128, 2)\n" in printed
        assert "entry: backward_config(128): MosaicConfig(64, 128, 2)\n" in printed
        assert "(64, 128, 2)" in printed
        assert "10.000 ms    500 TFLOP/s" in printed  # five matmuls
        assert "it is wrong" not in printed

    def test_values_of_another_head_dim(self, monkeypatch, capsys):
        given = "--shape", "1", "64", "2", "2", "192", "--value-dim", "128", "--kernels"
        printed = self.search(monkeypatch, capsys, *given, "forward")
        assert "B T N K H = 1 64 2 2 192, Hv = 128\n" in printed
        assert "entry: forward_config(192): MosaicConfig(128, 64, 2)\n" in printed
        assert "20.000 ms    125 TFLOP/s" in printed  # a matmul over H, and one over Hv
        printed = self.search(monkeypatch, capsys, "--implementation", "triton", *given, "dkv")
        assert "entry: 192, Hv = 128: (" in printed

    def test_it_says_why_what_was_named_is_refused(self, monkeypatch, capsys):
        given = "--kernels", "forward", "--configs", "128,64,3", "128,64,2"
        printed = self.search(monkeypatch, capsys, *given)
        assert "forward: 1 configs run, 1 failed\n  failed (128, 64, 3): it is wrong" in printed

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (["--dtype", "float32"], "it supports bfloat16 or float16; or see --implementation"),
            (["--shape", "1", "64", "2", "2", "256"], "the head dim is 256"),
        ],
    )
    def test_what_cannot_run_is_said_before_the_search(self, given, reason, monkeypatch, capsys):
        with pytest.raises(SystemExit, match=f"'mosaic_sm90' cannot run: .*{reason}"):
            self.search(monkeypatch, capsys, *given)

    def test_head_dims_without_a_backward_kernel_have_a_forward(self, monkeypatch, capsys):
        shape = "--shape", "1", "64", "2", "2", "256"
        printed = self.search(monkeypatch, capsys, *shape, "--kernels", "forward")
        assert "entry: forward_config(256): MosaicConfig(128, 64, 2)" in printed


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
