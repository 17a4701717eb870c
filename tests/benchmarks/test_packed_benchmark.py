"""``benchmarks packed`` at toy size, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import packed
from burst_jax.layouts import balance


@pytest.mark.parametrize("mix", packed.MIXES)
def test_documents_fill_the_sequence(mix):
    lengths = packed.documents(mix, 100_000, seed=1)
    assert sum(lengths) == 100_000
    assert min(lengths) > 0
    assert lengths == packed.documents(mix, 100_000, seed=1)


def test_ranks_are_those_of_all_zones():
    """Sorted by document and position; padding comes last."""
    case = packed.PackedCase(devices=3, tokens=8)
    name, orders = packed.order_of(case, "balanced", [13, 4, 5])
    zone = balance([13, 4, 5], num_shards=3, tokens_per_shard=8).zone
    assert name == f"balanced:{zone}"
    ranks = packed._ranks(orders, zone).reshape(-1)
    ids, positions = np.moveaxis(orders[..., -zone:], 1, 0).reshape(2, -1)
    in_order = np.argsort(ranks)
    live = [(i, p) for i, p in zip(ids[in_order], positions[in_order], strict=True) if i]
    assert live == sorted(live)
    assert (ids[in_order][len(live) :] == 0).all()


@pytest.mark.slow
def test_every_layout_is_timed(monkeypatch):
    calls = []
    monkeypatch.setattr(packed, "median_time", lambda call, *_: calls.append(call()) or 1e-3)
    monkeypatch.setattr(packed, "documents", lambda *_: [700, 200, 124])
    case = packed.PackedCase(devices=2, tokens=512, heads=2, kv_heads=1, head_dim=16)
    records = list(packed.measure(case, ["sft"], 1, ["balanced", "zigzag"]))
    ways = [(record["layout"].partition(":")[0], record["tables"]) for record in records]
    assert ways == [("balanced", False), ("balanced", True), ("zigzag", False)]
    # The whole sequence on one device takes half the time of the slowest of two.
    assert all(record["share"] == [0.5, 0.5] for record in records)
    assert len(calls) == packed._ROUNDS * (2 + 3 * 2 * 2)
