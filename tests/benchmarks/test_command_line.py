"""The command line of the benchmarks: options, GPUs and output files."""

from __future__ import annotations

import jax
import pytest

from benchmarks import ring
from benchmarks.__main__ import main

WRONG_OPTIONS = (
    ("train", "--steps", "0", "argument --steps: 0: it must be an integer of 1 or more"),
    ("train", "--layers", "0", "argument --layers: 0: it must be an integer of 1 or more"),
    ("train", "--moments", "disk", "argument --moments: invalid choice: 'disk'"),
    ("train", "--moment-dtype", "int8", "argument --moment-dtype: invalid choice: 'int8'"),
    ("train", "--lengths", "-5", "argument --lengths: -5: it must be an integer of 1 or more"),
    ("kernels", "--cases", "99", "argument --cases: invalid choice: 99"),
    ("kernels", "--implementations", "cuda", "argument --implementations: invalid choice"),
    ("ring", "--cases", "-1", "argument --cases: invalid choice: -1"),
)


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmarks", *map(str, arguments)])
    main()


def test_wrong_options(monkeypatch, capsys):
    for *arguments, message in WRONG_OPTIONS:
        with pytest.raises(SystemExit):
            run(monkeypatch, *arguments)
        assert message in capsys.readouterr().err


def test_help_lists_the_cases(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "kernels", "--help")
    assert ended.value.code == 0
    assert "window 4096 of 64K" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["kernels", "train", "loss", "serve", "decode"])
def test_benchmarks_need_a_gpu(name, monkeypatch):
    message = f"benchmarks {name} needs an NVIDIA GPU; JAX runs on 'cpu' here"
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, name)


def test_a_ring_needs_two_gpus(monkeypatch):
    with pytest.raises(SystemExit, match="benchmarks ring needs 2 or more NVIDIA GPUs; JAX runs"):
        run(monkeypatch, "ring")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(SystemExit, match="benchmarks ring needs 2 or more NVIDIA GPUs; JAX sees 1"):
        run(monkeypatch, "ring")


def test_output_files_are_checked_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "require_gpus", lambda *_: None)
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for json, message in (
        (tmp_path, "is a folder: name a file in it"),
        (tmp_path / "file" / "a.json", "File exists|Not a directory"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, "ring", "--json", json)


def test_plan_prints_measured_and_estimated_rates(monkeypatch, capsys):
    run(monkeypatch, "plan")
    printed = capsys.readouterr().out
    for text in ("2 x NVIDIA H200", "4 x NVIDIA H200", "training steps on H200s"):
        assert text in printed
