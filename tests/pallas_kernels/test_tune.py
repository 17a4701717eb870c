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

from pallas_kernels import XLA, AttentionInputs, KVSide, QuerySide, tune
from pallas_kernels.mosaic.sm80 import configs as sm80
from pallas_kernels.mosaic.sm90 import configs as mosaic_configs
from pallas_kernels.mosaic.sm90.backward_forms import SHARED_KEYS
from pallas_kernels.mosaic.sm90.configs import MosaicConfig
from pallas_kernels.timing import median_time, relative_error


def entries(space):
    """A search space, each of whose configs is offered once."""
    found = [tune.as_entry(config) for config in space]
    assert len(found) == len(set(found))
    return set(found)


def test_spaces_hold_what_ships():
    """What was fastest is among what is tried."""
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for kernel in ("forward", "backward"):
            config = getattr(sm80, f"{kernel}_config")(*dims)
            assert tune.as_entry(config) in entries(tune.sm80_space(kernel, *dims))
    for dims in ((32, 32), (64, 256), (128, 128), (192, 128), (192, 192)):
        for kernel in ("forward", "backward"):
            if kernel == "forward" or max(dims) <= 128:
                config = getattr(mosaic_configs, f"{kernel}_config")(max(dims))
            else:
                config = mosaic_configs.wide_backward_config(*dims)
            config = mosaic_configs.for_this_jax(config)
            assert tune.as_entry(config) in entries(tune.mosaic_space(kernel, *dims))


def test_forwards_that_ship_with_a_producer_are_tried(producer):
    """With a JAX that moves no registers, some calls have a producer warpgroup all the same."""
    for dim, is_causal in ((64, True), (64, False), (128, True), (128, False)):
        config = mosaic_configs.forward_config(dim)
        shipped = mosaic_configs.plain_forward_config(config, dim, is_causal, length=16384)
        assert shipped.producer_warpgroup == (producer or (dim == 64) == is_causal)
        assert tune.as_entry(shipped) in entries(tune.mosaic_space("forward", dim, dim))


@pytest.fixture(params=[True, False], ids=["producer", "no-producer"])
def producer(request, monkeypatch):
    """Whether JAX moves registers from a producer warpgroup to the others."""
    monkeypatch.setattr(mosaic_configs, "EQUAL_REGISTERS_SINCE", (99 if request.param else 0,))
    return request.param


def test_the_mosaic_space_is_what_fits_of_the_whole(producer):
    option = "cluster=2" if producer else "v_stages=3"
    sizes = (128, 192), (64, 96, 112, 128, 192, 256), (2, 3, 4)
    forward = {
        (*config, *options) for config in itertools.product(*sizes) for options in ((), (option,))
    }
    stages = (3,), (4,), (3, 2), (4, 2), (4, 3)
    whole = {(block_q, 128, *n) for block_q in (64, 128) for n in stages}
    own = () if producer else ("producer_warpgroup=True",)
    tiles = [x for x in itertools.product(*sizes) if producer or x[0] == 128]
    forward |= {(*x, *options, *own) for x in tiles for options in ((), ("cluster=2",))}
    queries = (64, 128) if producer else (64,)
    whole |= {(block_q, 128, *n, *own) for block_q in queries for n in ((2,), *stages)}
    assert entries(tune.mosaic_space("forward", 16, 16)) == forward
    assert entries(tune.mosaic_space("backward", 32, 32)) == whole
    large = entries(tune.mosaic_space("forward", 128, 128))
    assert {(128, 128, 2), (128, 64, 2, option)} <= large
    assert (128, 128, 3) not in large
    assert large < entries(tune.mosaic_space("forward", 128, 64))
    assert entries(tune.mosaic_space("backward", 128, 128)) < whole


def test_entries_are_read_as_they_are_printed(producer):
    options: dict[str, Any] = {"cluster": 2} if producer else {"v_stages": 3}
    options["producer_warpgroup"] = producer
    for name, kernel, config in (
        ("mosaic_sm80", "forward", sm80.ForwardConfig(64, 32)),
        ("mosaic_sm80", "backward", sm80.BackwardConfig(64, 64, stages=1)),
        ("mosaic_sm90", "backward", MosaicConfig(64, 128, 3, 2, producer_warpgroup=producer)),
        ("mosaic_sm90", "backward", MosaicConfig(64, 64, 2, form=SHARED_KEYS)),
        ("mosaic_sm90", "forward", MosaicConfig(128, 128, 2, **options)),
    ):
        printed = ",".join(map(str, tune.as_entry(config)))
        assert tune.BACKENDS[name].parse(kernel, printed) == config


def test_the_gpu_decides_what_is_tuned(monkeypatch):
    nothing = {"forward": [], "backward": []}
    for capability, name in ((None, "mosaic_sm80"), ("8.0", "mosaic_sm80"), ("9.0", "mosaic_sm90")):
        if capability is not None:
            device = types.SimpleNamespace(compute_capability=capability)
            monkeypatch.setattr(jax, "devices", lambda device=device: [device])
            monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        args = tune.arguments([])
        assert (args.implementation, args.kernels, args.configs) == (name, list(nothing), nothing)
    other = tune.arguments(["--implementation", "mosaic_sm80", "--configs", "64,64"])
    of_kernels = {
        "forward": [sm80.ForwardConfig(64, 64)],
        "backward": [sm80.BackwardConfig(64, 64)],
    }
    assert (other.implementation, other.configs) == ("mosaic_sm80", of_kernels)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kernels", "dq"], "invalid choice: 'dq'"),
        (["--dtype", "float32"], "invalid choice: 'float32'"),
        (["--configs", "64,128,8,3,1"], "--configs of mosaic_sm90 are Q,KV,STAGES"),
        (["--configs", "128,x,2"], "--configs of mosaic_sm90 are Q,KV,STAGES"),
        (["--configs", "128,100,2"], "block_kv is 100: it must be 64 or more, a multiple of 16"),
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


def test_the_tuner_times_what_is_right_and_nothing_else():
    """Each result counts alone: a large one does not hide a small one's error of a tenth."""
    shape = ["--shape", "1", "64", "2", "1", "16", "--value-dim", "24", "--causal"]
    small = tune.Measurement(tune.arguments(["--implementation", "mosaic_sm90", *shape]))
    # XLA in place of the kernels, which need a GPU.
    small.backend = dataclasses.replace(small.backend, make=lambda **_: XLA)
    assert small.inputs.kv.v.shape == (1, 64, 1, 24)
    assert small.scores == 2 * 64 * 65 // 2
    for kernel, changed in (("forward", (0, 1)), ("backward", (2,))):
        assert small.measure(kernel, None, limit=1e-5) > 0
        right, tree = jax.tree.flatten(small.want[kernel])
        for i in changed:
            wrong = [x * 1.1 if i == j else x for j, x in enumerate(right)]
            small.want[kernel] = jax.tree.unflatten(tree, wrong)
            with pytest.raises(ArithmeticError, match=r"relative error 0\.09"):
                small.measure(kernel, None, limit=1e-5)


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

    @pytest.mark.parametrize(
        ("given", "printed"),
        [
            ("", [
                "NVIDIA H200, mosaic_sm90, bfloat16, B T N K H = 1 16384 32 32 128\n",
                "entry: forward_config(128): MosaicConfig(128, 128, 2)\n",
                "entry: backward_config(128): MosaicConfig(64, 128, 2)\n",
                "10.000 ms    500 TFLOP/s",  # five matmuls
            ]),
            ("--shape 1 64 2 2 192 --value-dim 128 --kernels forward", [
                "B T N K H = 1 64 2 2 192, Hv = 128\n",
                "entry: forward_config(192, Hv = 128): MosaicConfig(128, 128, 2)\n",
                "10.000 ms    250 TFLOP/s",  # a matmul over H, and one over Hv
            ]),
            ("--implementation mosaic_sm80 --shape 1 64 2 2 192 --value-dim 128 --kernels backward",
             ["entry: backward_config(192, Hv = 128): BackwardConfig(64, 128, 1)"]),
            ("--kernels forward --configs 128,64,3 128,64,2",
             ["forward: 1 configs run, 1 failed\n  failed (128, 64, 3): it is wrong"]),
            ("--shape 1 64 2 2 256 --kernels forward",
             ["entry: forward_config(256): MosaicConfig(128, 64, 2)"]),
        ],
        ids=["default", "value_dim", "sm80", "configs", "wide"],
    )  # fmt: skip
    def test_it_prints_the_fastest_and_its_entry(self, given, printed, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["tune", *given.split()])
        monkeypatch.setattr(mosaic_configs, "EQUAL_REGISTERS_SINCE", (99,))
        tune.main()
        out = capsys.readouterr().out
        assert all(text in out for text in printed)
        # Why a config failed is said of those that were named.
        assert ("it is wrong" in out) == ("--configs" in given)

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ("--shape 1 64 2 2 320", "the head dim is 320"),
            (
                "--shape 1 64 2 2 320 --kernels forward",
                "it supports 256 at most; see --shape, --implementation",
            ),
        ],
    )
    def test_what_cannot_run_is_said_before_the_search(self, given, reason, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["tune", *given.split()])
        with pytest.raises(SystemExit, match=f"'mosaic_sm90' cannot run: .*{reason}"):
            tune.main()


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
