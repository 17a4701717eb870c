"""``benchmarks max-logits``: bounds are checked, then timed next to attention."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import jax
import pytest
from meshes import mesh_of

from benchmarks import max_logits
from benchmarks.__main__ import main

NO_CLOCK = SimpleNamespace(between=lambda *_: (1500.0, 600.0))


SMALL = "--heads 4 --kv-heads 2 --head-dim 8 --rows 3 --turns 1 --seconds 0.01"


@pytest.fixture
def on_cpus(monkeypatch):
    monkeypatch.setattr(max_logits, "require_gpus", lambda *_: None)
    monkeypatch.setattr(max_logits, "Clock", lambda: contextlib.nullcontext(NO_CLOCK))
    monkeypatch.setattr(max_logits, "_CHECKED", 48)


def test_rows_of_both_programs(on_cpus, capsys, tmp_path):
    path = tmp_path / "a.json"
    main(f"max-logits --lengths 64 {SMALL} --json {path}".split())
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["length"], row["rows"]) == (64, 3)
    assert row["us"] == pytest.approx(1e3 * (row["ms_with"] - row["ms"]))
    assert row["share"] == pytest.approx(row["ms_with"] / row["ms"] - 1)
    assert f"{row['ms']:10.3f}{row['ms_with']:10.3f}" in capsys.readouterr().out


def test_wrong_bounds_end_the_benchmark(monkeypatch, on_cpus, capsys):
    monkeypatch.setattr(max_logits, "is_right", lambda *_: False)
    monkeypatch.setattr(max_logits, "measure", None)
    with pytest.raises(SystemExit):
        main(f"max-logits --lengths 64 {SMALL}".split())
    assert "bounds" in capsys.readouterr().err


def test_wrong_bounds_are_found(monkeypatch):
    monkeypatch.setattr(max_logits, "_CHECKED", 48)
    shape, mesh = max_logits.Shape(48, 2, 1, 8, rows=3), mesh_of(seq=1)
    found = shape.program(mesh, measures=True)(*shape.arrays())[2]

    def right_with(change):
        made = change(*found)
        monkeypatch.setattr(
            max_logits.Shape, "program", lambda *_, **__: lambda *_: (None, None, made)
        )
        return max_logits.is_right(shape, mesh)

    assert right_with(lambda lower, upper: (lower, upper))
    assert not right_with(lambda lower, upper: (1.1 * lower, upper))
    assert not right_with(lambda lower, upper: (lower, 0.5 * lower))
    assert not right_with(lambda lower, upper: (0.9 * lower, upper))


def test_gradients_do_not_depend_on_the_metric():
    shape, mesh = max_logits.Shape(32, 2, 1, 8, rows=3), mesh_of(seq=1)
    arrays = shape.arrays()
    with_it, without = (
        shape.program(mesh, measures=measures)(*arrays) for measures in (True, False)
    )
    assert without[2] is None
    assert all(map(jax.numpy.array_equal, *map(jax.tree.leaves, (with_it[:2], without[:2]))))
