"""``benchmarks serve``: agreeing strategies, FLOPs and bytes."""

from __future__ import annotations

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import serve, train

N = 2
SMALL = dataclasses.replace(
    train.SHAPES["llama-3-8b"], vocab_size=64, num_layers=1, embed_dim=32, num_heads=4,
    num_kv_heads=2, head_dim=8, mlp_dim=64,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    devices = jax.devices()[:N]
    monkeypatch.setitem(train.SHAPES, "llama-3-8b", SMALL)
    monkeypatch.setattr(serve, "require_gpus", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def arguments(**change):
    given = {
        "lengths": [24], "strategies": ["zigzag", "tensor parallel"], "shape": "llama-3-8b",
        "layers": None, "new": 5, "prefill_chunk": None, "split_weights": False,
    }  # fmt: skip
    return argparse.Namespace(**given | change)


def test_agreeing_strategies_are_lines(small, capsys, monkeypatch):
    serve.run(arguments())
    out = capsys.readouterr().out
    assert out.count("first token") == 2
    assert out.count("ms each") == 2
    monkeypatch.setattr(serve, "_TOLERANCE", -1)
    serve.run(arguments(strategies=["contiguous"], layers=1, split_weights=True))
    assert "contiguous       logits differ by 0" in capsys.readouterr().out


def test_flops_and_bytes():
    config = dataclasses.replace(SMALL, param_dtype=jnp.bfloat16)
    n, d, v, mlp = 4 * 8, 32, 64, 64
    layer = 2 * d * n + 2 * d * n // 2 + 3 * d * mlp
    pairs = sum(range(100)) + 50  # Half of the diagonal, as usual for causal masks.
    want = 2 * 100 * layer + 2 * d * v + 4 * n * pairs
    assert serve.prompt_flops(config, 100) == pytest.approx(want)
    per_layer = layer * 2 / N + 2 * d * 2
    for server in (
        serve.served(config, "tensor parallel", N, 40),
        serve.served(config, "zigzag", N, 40, split_weights=True),
    ):
        assert serve.step_bytes(server) == pytest.approx(
            per_layer + 2 * d * v / N + 2 * d + server.cache_bytes
        )
