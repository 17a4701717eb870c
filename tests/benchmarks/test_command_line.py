"""The command line of the benchmarks: options, GPUs and output files."""

from __future__ import annotations

import re

import jax
import pytest

from benchmarks import ring
from benchmarks.__main__ import main

WRONG_OPTIONS = {
    "train --steps 0": "argument --steps: '0': it must be an integer from 1 to 2147483647",
    "train --layers 0": "argument --layers: '0': it must be an integer from 1",
    "train --moments disk": "argument --moments: invalid choice: 'disk'",
    "train --moment-dtype int8": "argument --moment-dtype: invalid choice: 'int8'",
    "train --lengths -5": "argument --lengths: '-5': it must be an integer from 1",
    "kernels --cases 99": "argument --cases: invalid choice: 99",
    "kernels --implementations cuda": "argument --implementations: invalid choice",
    "ring --cases -1": "argument --cases: invalid choice: -1",
    "plot a.png a.json": "argument OUT.png: a.json does not end in .png",
}
NEED_A_GPU = "benchmarks {} needs an NVIDIA GPU; JAX runs on 'cpu' here"
EXITS = {
    **{
        name: NEED_A_GPU.format(name)
        for name in (
            "kernels",
            "train",
            "loss",
            "serve",
            "decode",
            "decode-step",
            "ampere",
            "flash",
            "modifiers",
            "max-logits",
            "linear",
        )
    },
    "train --parts --strategies striped --remat selective --remat-layers 1": "leave --remat-layers",
    "train --weights exchanged": "--weights exchanged needs a --shape with experts: qwen3-30b-a3b",
    "linear-ring": "benchmarks linear-ring needs 2 or more NVIDIA GPUs; JAX runs",
    "ring": "benchmarks ring needs 2 or more NVIDIA GPUs; JAX runs",
    "ring --cases 0 --strategies zigzag zigag": r"--strategies ['zigag']: these cases have Ulysses",
}


def test_wrong_options(capsys):
    for words, message in (WRONG_OPTIONS | EXITS).items():
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert message in capsys.readouterr().err, words


def test_a_ring_needs_two_gpus(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(SystemExit, match="2"):
        main(["ring"])
    assert "benchmarks ring needs 2 or more NVIDIA GPUs; JAX sees 1" in capsys.readouterr().err


def test_output_files_are_checked_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ring, "require_gpus", lambda *_: None)
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for json, message in (
        (tmp_path, "is a folder: name a file in it"),
        (tmp_path / "file" / "a.json", "File exists|Not a directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["ring", "--json", str(json)])
        assert re.search(message, capsys.readouterr().err)


def test_plan_prints_measured_and_estimated_rates(capsys):
    main(["plan"])
    printed = capsys.readouterr().out
    for text in ("2 x NVIDIA H200", "4 x NVIDIA H200", "training steps on H200s"):
        assert text in printed
