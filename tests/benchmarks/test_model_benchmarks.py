"""``benchmarks train`` and ``serve``: strategies that agree, FLOPs and bytes, communication."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from implementations import QUICK

from benchmarks import communication, decode_step, layer_times, serve, train
from benchmarks.__main__ import main
from burst_jax.models import DeltaNet, Experts, LayerKind, MixtureOfExperts

N = 2
TRUE_SHAPES = dict(train.SHAPES)
SMALL = dataclasses.replace(
    train.SHAPES["llama-3-8b"], vocab_size=64, num_layers=1, embed_dim=32, num_heads=4,
    num_kv_heads=2, head_dim=8, mlp_dim=64,
)  # fmt: skip
TRAIN = "train --lengths 64 --steps 1"


@pytest.fixture(autouse=True)
def on_two_cpus(monkeypatch):
    devices = jax.devices()[:N]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr("burst_jax.training.step.default_compiler_options", lambda: QUICK)
    for benchmark in (train, serve, decode_step):
        monkeypatch.setattr(benchmark, "require_gpus", lambda *_: None)
    for shape in train.SHAPES:
        monkeypatch.setitem(train.SHAPES, shape, SMALL)


@pytest.mark.slow  # two training steps to compile
def test_all_strategies_take_the_same_step(tmp_path, capsys, monkeypatch):
    steps: dict[Any, Any] = {}

    class Recorded(train.TrainingStep):
        def __init__(self, config, strategy, weights, *rest):
            super().__init__(config, strategy, weights, *rest)
            steps[strategy, weights] = self

    monkeypatch.setattr(train, "TrainingStep", Recorded)
    flags = "--remat selective --remat-layers 1 --moment-dtype bfloat16 --moments host"
    strategies = "--strategies zigzag 'tensor parallel' --weights sharded"
    main(shlex.split(f"{TRAIN} {strategies} {flags} --json {tmp_path / 'a.json'}"))
    record = json.loads((tmp_path / "a.json").read_text())
    names = ("devices", "remat", "remat_layers", "moment_dtype", "moments")
    assert [record[name] for name in names] == [N, "selective", 1, "bfloat16", "host"]
    # A strategy whose loss or gradient norm differed would be left out.
    assert [(row["strategy"], row["weights"]) for row in record["rows"]] == [*steps]
    assert len(steps) == 2
    for row in record["rows"]:
        assert row["seconds"] > 0
        assert row["mfu"] is row["communication"] is row["exposed"] is None
    printed = capsys.readouterr().out
    assert "1 layers of 32 features, 4/2 heads x 8, vocabulary 64, bfloat16" in printed
    assert "selective in 1 layers, MLP in 1 chunks; AdamW's moments bfloat16 on the ho" in printed
    assert "64  zigzag, sharded" in printed

    # After the steps: tensor parallelism shards the weights and both of Adam's moments.
    leaves = jax.tree_util.tree_leaves_with_path(steps["tensor parallel", "sharded"]._states)
    split = [path for path, x in leaves if x.sharding.shard_shape(x.shape) != x.shape]
    assert len(split) == 3 * 9
    assert not any("norm" in jax.tree_util.keystr(path) for path in split)
    # Sharded weights have sharded moments; norm scales and counters are replicated.
    states = jax.tree.leaves(steps["zigzag", "sharded"]._states)
    total = sum(x.nbytes for x in states)
    held = sum(x.addressable_shards[0].data.nbytes for x in states)
    assert total / N < held < 1.3 * total / N


def test_strategies_that_differ_are_left_out(tmp_path, monkeypatch, capsys):
    def measure(config, strategy, weights, length, n, *, optimizer, **_):
        moments.append(optimizer.transform.init({"w": jax.numpy.ones(3)})[1].mu["w"].dtype)
        if strategy == "tensor parallel":
            raise ValueError("no such split")
        return {
            "strategy": strategy, "length": length, "seconds": 1.0, "gib": 1.0,
            "loss": math.nan if strategy == "striped" else 4.16,
            "grad_norm": 1.03 if strategy == "contiguous" else 1.0,
            "communication": 0.0123, "exposed": None,
        }  # fmt: skip

    moments = []
    monkeypatch.setattr(train, "measure", measure)
    main(f"{TRAIN} --moment-dtype bfloat16 --json {tmp_path / 'a.json'}".split())
    printed = capsys.readouterr().out
    assert "striped               wrong: loss nan" in printed
    assert "contiguous            wrong: grad_norm 1.0300" in printed
    assert "tensor parallel       no such split" in printed
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["strategy"] for row in record["rows"]] == ["zigzag"]
    assert moments == ["bfloat16"] * 4
    line = "zigzag                 1000.0         64      -    1.00   4.1600     12.3        -"
    assert line in printed


HYBRID = dataclasses.replace(
    SMALL, num_layers=3, layer_pattern=(*[LayerKind(mixer="delta_net")] * 2, LayerKind()),
    delta_net=DeltaNet(2, 1, 8), feed_forward=MixtureOfExperts, experts=Experts(4, 2),
    logits_soft_cap=30.0,
)  # fmt: skip


def test_parts_are_shares_of_the_first_strategy(tmp_path, monkeypatch, capsys):
    def measure(config, strategy, weights, length, n, **_):
        return {
            "strategy": strategy, "weights": weights, "length": length, "seconds": 2.0, "gib": 1.0,
            "loss": 4.0, "grad_norm": 1.0, "communication": None, "exposed": None,
        }  # fmt: skip

    made = []

    class Layers:
        def __init__(self, config, *given):
            made.append((config, *given))

        def compile(self):
            pass

        def __call__(self):
            pass

    monkeypatch.setattr(train, "measure", measure)
    monkeypatch.setattr(layer_times, "LayersAlone", Layers)
    monkeypatch.setattr(layer_times.time, "perf_counter", iter(range(100)).__next__)
    monkeypatch.setitem(train.SHAPES, "qwen3-next-layers", HYBRID)
    path = tmp_path / "a.json"
    main(shlex.split(f"{TRAIN} --shape qwen3-next-layers --parts --json {path}"))
    assert [(c.num_layers, *c.mixers, c.experts is None, *rest) for c, *rest in made] == [
        (1, "attention", False, "zigzag", 64, N),
        (1, "attention", True, "zigzag", 64, N),
        (2, "delta_net", False, "zigzag", 64, N),
        (2, "delta_net", True, "zigzag", 64, N),
    ]
    first, *others = json.loads(path.read_text())["rows"]
    assert [(part["part"], part["share"]) for part in first["parts"]] == [
        ("1 x softmax attention", 0.5),
        ("1 x softmax attention, mixers alone", 0.5),
        ("2 x linear attention", 0.5),
        ("2 x linear attention, mixers alone", 0.5),
    ]
    assert not any("parts" in row for row in others)
    assert "2 x linear attention, mixers alone" in capsys.readouterr().out


@pytest.mark.slow  # a backward pass to compile
def test_a_part_has_the_gradients_of_its_weights():
    (part,) = (x for x in layer_times.parts_of(HYBRID) if x.mixer == "delta_net" and not x.whole)
    alone = layer_times.LayersAlone(part.config(HYBRID), "zigzag", 32, 1)
    alone.compile()
    hidden, gradients = alone()
    assert hidden.shape == (1, 32, SMALL.embed_dim)
    mixer = gradients["delta_net_layers"]["attention"]
    for name in ("query", "value", "output_gate", "decay", "out"):
        kernel = np.asarray(mixer[name]["kernel"][...])
        assert kernel.shape[0] == 2
        assert np.isfinite(kernel).all()
        assert (np.abs(kernel).max((1, 2)) > 0).all(), name


def test_shapes_of_a_hybrid_group():
    """The dense MLP has as many weights per token as the experts; MFU counts both mixers."""
    experts, dense, softmax = (
        TRUE_SHAPES[f"qwen3-next-{name}"] for name in ("layers", "dense", "softmax")
    )
    per_token = 11 * 3 * 2048 * 512
    router_and_gate = 4 * 2048 * (512 + 1)
    assert experts.num_matmul_params - dense.num_matmul_params == router_and_gate
    linear = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    full = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    assert dense.num_matmul_params == 3 * linear + full + 4 * per_token + 2048 * 32000
    assert softmax.num_matmul_params == 4 * full + 4 * per_token + 2048 * 32000
    length = 1000
    attention = 6 * 16 * 512 * length / 2
    for config, count in ((dense, 1), (softmax, 4)):
        recurrence = 18 * 32 * 128 * 128 * (4 - count)
        want = 6 * config.num_matmul_params + count * attention + recurrence
        assert config.train_flops_per_token(length) == pytest.approx(want)


def test_indivisible_lengths_are_lines(capsys):
    main(["train", "--lengths", "66", "--strategies", "zigzag"])
    message = "zigzag                length is 66: the zigzag layout over 2"
    assert message in capsys.readouterr().out


def test_communication_of_a_profile():
    """Streams are merged; what a compute stream overlaps with is not exposed."""

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


# --- serve ---------------------------------------------------------------------------------------


@pytest.mark.slow  # six programs
def test_agreeing_servers_are_lines(capsys, monkeypatch):
    servers = []
    served = serve.served

    def recorded(*given, **options):
        servers.append(served(*given, **options))
        return servers[-1]

    monkeypatch.setattr(serve, "served", recorded)
    options = "--lengths 24 --new 5 --split-weights"
    main(shlex.split(f"serve {options} --strategies zigzag 'tensor parallel'"))
    out = capsys.readouterr().out
    assert out.count("first token") == out.count("ms each") == 2

    # Bytes that a device reads per token: its weights, one row of the embedding, its cache.
    n, d, v, mlp = 4 * 8, 32, 64, 64
    weights = 2 * d * n + 2 * d * n // 2 + 3 * d * mlp
    for server in servers:
        per_layer = weights * 2 / N + 2 * d * 2
        want = per_layer + 2 * d * v / N + 2 * d + server.cache_bytes
        assert serve.step_bytes(server) == pytest.approx(want)
    pairs = sum(range(100)) + 50  # Half of the diagonal, as usual for causal masks.
    want = 2 * 100 * weights + 2 * d * v + 4 * n * pairs
    assert serve.prompt_flops(SMALL, 100) == pytest.approx(want)


def test_servers_that_differ_are_left_out(capsys, monkeypatch):
    logits = iter((np.ones(3), 1.2 * np.ones(3)))
    fakes = {
        "served": lambda *_, **__: SimpleNamespace(after_prompt=next(logits)),
        "measure": lambda server, strategy, *_: serve.ServingTimes(strategy, 1.0, 0.01, 2.5, 3.5),
        "step_bytes": lambda _: 5e9,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(serve, name, fake)
    main(["serve", "--strategies", "zigzag", "striped"])
    zigzag, striped = capsys.readouterr().out.splitlines()[1:]
    assert "then   10.00 ms each (  500 GB/s), cache 2.50 GiB, peak 3.5 GiB" in zigzag
    assert "striped          logits differ by 0.2" in striped


@pytest.mark.slow  # a model to compile
def test_a_decoding_step_reads_the_experts_that_are_hit(monkeypatch, capsys, tmp_path):
    mixture = dataclasses.replace(
        SMALL, num_layers=2, feed_forward=MixtureOfExperts, experts=Experts(6, 2)
    )
    monkeypatch.setitem(train.SHAPES, "qwen3-30b-a3b-layers", mixture)
    monkeypatch.setattr(decode_step, "_COPIED", 2**16)
    path = tmp_path / "a.json"
    main(shlex.split(f"decode-step --length 30 --batches 3 --steps 1 --layers 1 --json {path}"))
    hit = re.search(r"batch   3 .* of a copy, (\d\.\d) experts hit", capsys.readouterr().out)
    assert hit is not None
    assert 2 <= float(hit[1]) <= 6
    (row,) = json.loads(path.read_text())["rows"]
    server = serve.served(dataclasses.replace(mixture, num_layers=1), "zigzag", 1, 32)
    size = decode_step.step_bytes(server, 30)
    assert size.expert == 3 * 32 * 64 * 2
    weights = 32 * (4 + 2 * 2 + 4) * 8 + 32 * 6 + 64 * 32  # projections, router, head
    assert size.weights == 2 * weights + 4 * 3 * 32
    assert size.cache == pytest.approx(30 * 2 * 2 * 8 * 2)
    assert size.states == 0
    assert row["bytes"]["expert"] == pytest.approx(row["experts_hit"] * size.expert)
    assert row["bytes"]["cache"] == pytest.approx(3 * size.cache)


def test_experts_that_uniform_routing_hits():
    config = dataclasses.replace(SMALL, feed_forward=MixtureOfExperts, experts=Experts(6, 2))
    rng = np.random.default_rng(0)
    drawn = [len(np.unique([rng.permutation(6)[:2] for _ in range(3)])) for _ in range(2000)]
    assert decode_step.expected_hits(config, 3) == pytest.approx(np.mean(drawn), rel=0.02)
    assert decode_step.expected_hits(config, 1) == pytest.approx(2)
    assert decode_step.expected_hits(SMALL, 3) == 0


@pytest.mark.slow  # a model to compile
def test_a_decoding_step_of_a_hybrid_reads_and_writes_states():
    sizes = DeltaNet(4, 2, 8, 16)
    pattern = (LayerKind(mixer="delta_net"), LayerKind())
    hybrid = dataclasses.replace(SMALL, num_layers=2, layer_pattern=pattern, delta_net=sizes)
    server = serve.served(hybrid, "zigzag", 1, 32, batch=3)
    size = decode_step.step_bytes(server, 30)
    assert size.cache == pytest.approx(3 * 30 * 2 * 2 * 8 * 2)
    tails = 3 * (2 * 2 * 8 + 4 * 16) * 2
    assert size.states == 2 * 3 * (4 * 4 * 8 * 16 + tails)
    assert size.total == sum(size)
