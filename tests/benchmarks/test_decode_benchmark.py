"""``benchmarks decode``: checked tiles, and bytes read per second."""

from __future__ import annotations

import argparse
from typing import Any

import interpreted_sm80
import jax.numpy as jnp
import pytest

from benchmarks import decode

ARGUMENTS = argparse.Namespace(
    lengths=[100], batch=1, queries=3, heads=4, kv_heads=2, head_dim=16, block_kv=[64],
    stages=[None, 2], splits=[1],
)  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(decode, "require_gpus", lambda *_: None)
    monkeypatch.setattr(decode, "_CALLS", 1)
    # Drop traces of the compiled kernel.
    attend: Any = decode._attend
    attend.clear_cache()
    with interpreted_sm80.interpreted():
        yield


def test_every_tile_is_a_line(interpreted, capsys, monkeypatch):
    seconds = 1e-7
    monkeypatch.setattr(decode, "median_time", lambda _: seconds)
    decode.run(ARGUMENTS)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "100 keys, 4 / 2 heads, 3 queries"
    assert [row.split("us  ")[1] for row in rows] == [
        "copy, read and written",
        "XLA's matmuls",
        "block_kv 64 stages 3 splits 1",
        "block_kv 64 stages 2 splits 1",
    ]
    read = 2 * 100 * 2 * 16 * 2 / seconds / 1e9
    assert all(row.split()[0] == f"{read:.0f}" for row in rows[1:])


def test_a_wrong_tile_is_not_timed(interpreted, capsys, monkeypatch):
    right = decode.partial_attention

    def wrong(*arrays, **options):
        out, most, total = right(*arrays, **options)
        return out, most, jnp.where(options["config"].stages == 2, 1.1, 1) * total

    monkeypatch.setattr(decode, "partial_attention", wrong)
    decode.run(ARGUMENTS)
    rows = capsys.readouterr().out.splitlines()
    assert "GB/s" in rows[-2]
    assert "GB/s" not in rows[-1]
    assert "block_kv 64 stages 2 splits 1: wrong by 0.09" in rows[-1]
