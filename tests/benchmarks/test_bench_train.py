"""``bench train``: all ways take the same step, and one that does not is no row."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from implementations import QUICK
from meshes import mesh_of

from benchmarks import links, train
from benchmarks.__main__ import main
from burst_jax import ShardingRules
from burst_jax.training import abstract_train_state, make_optimizer

N = 4
SMALL = dataclasses.replace(
    train.SHAPES["7b-layers"], vocab_size=64, num_layers=2, embed_dim=32, num_heads=4,
    num_kv_heads=4, head_dim=8, mlp_dim=64,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    devices = jax.devices()[:N]
    monkeypatch.setitem(train.SHAPES, "7b-layers", SMALL)
    monkeypatch.setattr(train, "need_gpus", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr("burst_jax.training.step.default_compiler_options", lambda: QUICK)


def arguments(**change):
    given = {
        "lengths": [128], "ways": list(train.WAYS), "weights": ["whole"], "shape": "7b-layers",
        "layers": None, "remat": "attention", "remat_layers": None, "mlp_chunks": 1,
        "moment_dtype": "float32", "moments": "device", "steps": 1, "profile": True, "json": None,
    }  # fmt: skip
    return argparse.Namespace(**given | change)


@pytest.mark.slow  # five training steps to compile
def test_all_ways_take_the_same_step(small, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    train.run(arguments(ways=["zigzag", "tensor parallel"], weights=["whole", "split"], json=a))
    train.run(arguments(ways=["striped", "contiguous"], json=b))
    record, other = (json.loads(path.read_text()) for path in (a, b))
    assert record["devices"] == N
    ways = [[(row["way"], row["weights"]) for row in table["rows"]] for table in (record, other)]
    assert ways == [
        [("zigzag", "whole"), ("zigzag", "split"), ("tensor parallel", "whole")],
        [("striped", "whole"), ("contiguous", "whole")],
    ]
    first = record["rows"][0]["loss"]
    for row in [*record["rows"], *other["rows"]]:
        assert abs(row["loss"] - first) < 1e-3
        assert row["seconds"] > 0
        assert row["mfu"] is row["links"] is row["bare"] is None  # CPUs have neither
    printed = capsys.readouterr().out
    assert "2 layers of 32 features, 4/4 heads x 8, vocabulary 64, bfloat16" in printed
    assert all(f"128  {way}" in printed for way in train.WAYS)
    assert "128  zigzag, split" in printed
    assert "remat attention, MLP in 1 chunks; AdamW's moments float32 on the device" in printed
    assert (record["moment_dtype"], record["moments"]) == ("float32", "device")


@pytest.mark.slow
def test_tensor_parallel_splits_the_weights():
    run = train.Run(SMALL, "tensor parallel", "whole", 64, N, make_optimizer(1e-4, 100))
    params, state = run._states
    whole = {}
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        whole[jax.tree_util.keystr(path)] = x.sharding.shard_shape(x.shape) == x.shape
    split = {name for name, is_whole in whole.items() if not is_whole}
    assert len(split) == 3 * 9  # weights, and both of Adam's moments
    assert not any("norm" in name for name in split)
    before = jax.tree.map(lambda x: x.sharding, params)
    run()
    assert jax.tree.map(lambda x: x.sharding, run._states[0]) == before


@pytest.mark.slow
def test_split_weights_are_split_with_their_moments():
    run = train.Run(SMALL, "zigzag", "split", 64, N, make_optimizer(1e-4, 100))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(run._states))
    total = sum(x.nbytes for x in jax.tree.leaves(run._states))
    # Norm scales and counters are whole on every device.
    assert total / N < held < 1.3 * total / N


@pytest.mark.slow
def test_moments_may_be_small_or_on_the_host(small, tmp_path, capsys):
    some = SMALL.num_layers - 1
    given = {"moment_dtype": "bfloat16", "moments": "host", "remat": "selective"}
    json_file = tmp_path / "a.json"
    train.run(arguments(**given, remat_layers=some, ways=["zigzag"], json=json_file))
    record = json.loads(json_file.read_text())
    assert given.items() <= record.items()
    assert record["remat_layers"] == some
    assert record["rows"][0]["seconds"] > 0
    line = f"selective in {some} layers, MLP in 1 chunks; AdamW's moments bfloat16 on the host"
    assert line in capsys.readouterr().out


def test_the_optimizer_is_what_the_flags_say(small, monkeypatch):
    states: list[Any] = []

    def measure(config, way, weights, length, n, *, optimizer, steps, profile):
        options: Any = {"layout": "zigzag", "rules": ShardingRules.of(mesh_of(seq=n))}
        states.append(abstract_train_state(config, optimizer, mesh_of(seq=n), **options)[2])
        raise ValueError("no more than its state is asked for")

    monkeypatch.setattr(train, "measure", measure)
    train.run(arguments(ways=["zigzag"]))
    train.run(arguments(ways=["zigzag"], moment_dtype="bfloat16", moments="host"))
    moments = [state[1].mu["embedding"].get_value() for state in states]
    assert [x.dtype for x in moments] == ["float32", "bfloat16"]
    assert [x.sharding.memory_kind == "pinned_host" for x in moments] == [False, True]


def test_a_step_that_differs_is_no_row(small, tmp_path, monkeypatch, capsys):
    def measure(config, way, weights, length, n, *, optimizer, steps, profile):
        if way == "tensor parallel":
            raise ValueError("no such split")
        loss = math.nan if way == "striped" else 4.16
        norm = 1.03 if way == "contiguous" else 1.0
        spent = {"links": 0.0123, "bare": None}
        row = {"way": way, "length": length, "seconds": 1.0, "loss": loss, "grad_norm": norm}
        return row | {"gib": 1.0} | spent

    monkeypatch.setattr(train, "measure", measure)
    train.run(arguments(json=tmp_path / "a.json"))
    printed = capsys.readouterr().out
    assert "striped               wrong: loss nan" in printed
    assert "contiguous            wrong: grad_norm 1.0300" in printed
    assert "tensor parallel       no such split" in printed
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["way"] for row in record["rows"]] == ["zigzag"]
    line = "zigzag                 1000.0        128      -    1.00   4.1600     12.3       -"
    assert line in printed


def test_what_cannot_be_split_is_a_line_of_the_table(small, capsys):
    train.run(arguments(lengths=[132], ways=["zigzag"]))
    message = "zigzag                length is 132: the zigzag layout over 4"
    assert message in capsys.readouterr().out


def test_it_needs_a_gpu():
    with pytest.raises(SystemExit, match="bench train needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        train.run(arguments())


@pytest.mark.parametrize(
    ("benchmark", "option", "value", "message"),
    [
        ("train", "--steps", "0", "argument --steps: 0: it must be 1 or more"),
        ("train", "--layers", "0", "argument --layers: 0: it must be 1 or more"),
        ("train", "--moments", "disk", "argument --moments: invalid choice: 'disk'"),
        ("train", "--moment-dtype", "int8", "argument --moment-dtype: invalid choice: 'int8'"),
        ("train", "--lengths", "-5", "argument --lengths: -5: it must be 1 or more"),
        ("kernels", "--cases", "99", "argument --cases: invalid choice: 99"),
        ("kernels", "--implementations", "cuda", "argument --implementations: invalid choice"),
        ("ring", "--cases", "-1", "argument --cases: invalid choice: -1"),
    ],
)
def test_wrong_options_are_said_at_once(benchmark, option, value, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", benchmark, option, value])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_bare_links_are_those_with_no_kernel_beside_them():
    def stream(name, *spans):
        events = [SimpleNamespace(name=n, start_ns=a, duration_ns=b - a) for n, a, b in spans]
        return SimpleNamespace(name=name, events=events)

    def gpu(index, *lines):
        return SimpleNamespace(name=f"/device:GPU:{index}", lines=lines)

    first = gpu(
        0,
        stream("Stream #13(Compute)", ("burst_forward", 0, 100), ("MemcpyD2D", 120, 130)),
        stream("Stream #14(MemcpyP2P)", ("MemcpyP2P", 50, 125), ("MemcpyP2P", 60, 70)),
        stream("Stream #15", ("ncclDevKernel_SendRecv", 200, 210), ("add", 205, 207)),
        stream("XLA Ops", ("ncclDevKernel_SendRecv", 0, 1000)),
    )
    second = gpu(1, stream("Stream #13", ("burst_forward", 0, 100)))
    host = SimpleNamespace(name="/host:CPU", lines=[stream("Stream", ("MemcpyP2P", 0, 9))])
    spent = links.of_profile(SimpleNamespace(planes=[first, host, second]))
    # The first: 75 + 10 of transfers, 20 + 8 of them bare. The second has none.
    assert spent.busy == pytest.approx(85e-9 / 2)
    assert spent.bare == pytest.approx(28e-9 / 2)
    assert links.of_profile(SimpleNamespace(planes=[host])) == links.Links()
