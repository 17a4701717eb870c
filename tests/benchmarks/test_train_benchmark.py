"""``benchmarks train``: all strategies take the same step; communication from a profile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from implementations import QUICK
from meshes import mesh_of

from benchmarks import communication, train
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
    monkeypatch.setattr(train, "require_gpus", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr("burst_jax.training.step.default_compiler_options", lambda: QUICK)


def arguments(**change):
    given = {
        "lengths": [128], "strategies": list(train.STRATEGIES), "weights": ["replicated"],
        "shape": "7b-layers",
        "layers": None, "remat": "attention", "remat_layers": None, "mlp_chunks": 1,
        "moment_dtype": "float32", "moments": "device", "steps": 1, "profile": True, "json": None,
    }  # fmt: skip
    return argparse.Namespace(**given | change)


@pytest.mark.slow  # five training steps to compile
def test_all_strategies_take_the_same_step(small, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    train.run(
        arguments(
            strategies=["zigzag", "tensor parallel"], weights=["replicated", "sharded"], json=a
        )
    )
    train.run(arguments(strategies=["striped", "contiguous"], json=b))
    record, other = (json.loads(path.read_text()) for path in (a, b))
    assert record["devices"] == N
    strategies = [
        [(row["strategy"], row["weights"]) for row in table["rows"]] for table in (record, other)
    ]
    assert strategies == [
        [("zigzag", "replicated"), ("zigzag", "sharded"), ("tensor parallel", "replicated")],
        [("striped", "replicated"), ("contiguous", "replicated")],
    ]
    first = record["rows"][0]["loss"]
    for row in [*record["rows"], *other["rows"]]:
        assert abs(row["loss"] - first) < 1e-3
        assert row["seconds"] > 0
        assert row["mfu"] is row["communication"] is row["exposed"] is None
    printed = capsys.readouterr().out
    assert "2 layers of 32 features, 4/4 heads x 8, vocabulary 64, bfloat16" in printed
    assert all(f"128  {strategy}" in printed for strategy in train.STRATEGIES)
    assert "128  zigzag, sharded" in printed
    assert "remat attention, MLP in 1 chunks; AdamW's moments float32 on the device" in printed
    assert (record["moment_dtype"], record["moments"]) == ("float32", "device")


@pytest.mark.slow
def test_tensor_parallelism_shards_the_weights():
    step = train.TrainingStep(
        SMALL, "tensor parallel", "replicated", 64, N, make_optimizer(1e-4, 100)
    )
    params, state = step._states
    whole = {}
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        whole[jax.tree_util.keystr(path)] = x.sharding.shard_shape(x.shape) == x.shape
    split = {name for name, is_whole in whole.items() if not is_whole}
    assert len(split) == 3 * 9  # weights, and both of Adam's moments
    assert not any("norm" in name for name in split)
    before = jax.tree.map(lambda x: x.sharding, params)
    step()
    assert jax.tree.map(lambda x: x.sharding, step._states[0]) == before


@pytest.mark.slow
def test_sharded_weights_have_sharded_moments():
    step = train.TrainingStep(SMALL, "zigzag", "sharded", 64, N, make_optimizer(1e-4, 100))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(step._states))
    total = sum(x.nbytes for x in jax.tree.leaves(step._states))
    # Norm scales and counters are replicated.
    assert total / N < held < 1.3 * total / N


@pytest.mark.slow
def test_bfloat16_moments_on_the_host(small, tmp_path, capsys):
    some = SMALL.num_layers - 1
    given = {"moment_dtype": "bfloat16", "moments": "host", "remat": "selective"}
    json_file = tmp_path / "a.json"
    train.run(arguments(**given, remat_layers=some, strategies=["zigzag"], json=json_file))
    record = json.loads(json_file.read_text())
    assert given.items() <= record.items()
    assert record["remat_layers"] == some
    assert record["rows"][0]["seconds"] > 0
    line = f"selective in {some} layers, MLP in 1 chunks; AdamW's moments bfloat16 on the host"
    assert line in capsys.readouterr().out


def test_flags_of_the_optimizer(small, monkeypatch):
    states: list[Any] = []

    def measure(config, strategy, weights, length, n, *, optimizer, steps, profile):
        options: Any = {"layout": "zigzag", "rules": ShardingRules.of(mesh_of(seq=n))}
        states.append(abstract_train_state(config, optimizer, mesh_of(seq=n), **options)[2])
        raise ValueError("not run")

    monkeypatch.setattr(train, "measure", measure)
    train.run(arguments(strategies=["zigzag"]))
    train.run(arguments(strategies=["zigzag"], moment_dtype="bfloat16", moments="host"))
    moments = [state[1].mu["embedding"].get_value() for state in states]
    assert [x.dtype for x in moments] == ["float32", "bfloat16"]
    assert [x.sharding.memory_kind == "pinned_host" for x in moments] == [False, True]


def test_strategies_that_differ_are_left_out(small, tmp_path, monkeypatch, capsys):
    def measure(config, strategy, weights, length, n, *, optimizer, steps, profile):
        if strategy == "tensor parallel":
            raise ValueError("no such split")
        loss = math.nan if strategy == "striped" else 4.16
        norm = 1.03 if strategy == "contiguous" else 1.0
        spent = {"communication": 0.0123, "exposed": None}
        row = {
            "strategy": strategy,
            "length": length,
            "seconds": 1.0,
            "loss": loss,
            "grad_norm": norm,
        }
        return row | {"gib": 1.0} | spent

    monkeypatch.setattr(train, "measure", measure)
    train.run(arguments(json=tmp_path / "a.json"))
    printed = capsys.readouterr().out
    assert "striped               wrong: loss nan" in printed
    assert "contiguous            wrong: grad_norm 1.0300" in printed
    assert "tensor parallel       no such split" in printed
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["strategy"] for row in record["rows"]] == ["zigzag"]
    line = "zigzag                 1000.0        128      -    1.00   4.1600     12.3        -"
    assert line in printed


def test_indivisible_lengths_are_lines(small, capsys):
    train.run(arguments(lengths=[132], strategies=["zigzag"]))
    message = "zigzag                length is 132: the zigzag layout over 4"
    assert message in capsys.readouterr().out


def test_exposed_communication():
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
    spent = communication.of_profile(SimpleNamespace(planes=[first, host, second]))
    # The first GPU: 75 + 10 ns, 20 + 8 of them exposed. The second GPU has none.
    assert spent.total == pytest.approx(85e-9 / 2)
    assert spent.exposed == pytest.approx(28e-9 / 2)
    assert communication.of_profile(SimpleNamespace(planes=[host])) == communication.Communication()
