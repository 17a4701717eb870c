"""``python -m burst_jax.verify``: a Hugging Face checkpoint, on a mesh and on one device."""

from __future__ import annotations

import json
import re

import hf_models
import numpy as np
import pytest

from burst_jax.training import make_batch
from burst_jax.verify import Cost, Difference, Report
from burst_jax.verify import __main__ as command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_models.write_folder("llama3", tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_checkpoint_passes_on_a_mesh(folder, capsys):
    options = ["--model", str(folder), "--mesh", "fsdp=2,seq=2", "--seq-len", "64"]
    assert command.main(options) == 0
    out = capsys.readouterr().out
    assert out.startswith("zigzag on fsdp=2,seq=2, float32; differences relative to float64 on one")
    assert "layers.attention.query" in out
    assert out.endswith("PASSED\n")


@pytest.mark.slow
def test_a_balanced_layout_has_the_zone_of_the_documents(folder, capsys):
    options = ["--model", str(folder), "--mesh", "fsdp=2,seq=2", "--seq-len", "64", "--loss-only"]
    assert command.main([*options, "--layout", "balanced"]) == 0
    assert re.match(r"balanced:[1-9]\d* on fsdp=2,seq=2, float32", capsys.readouterr().out)


@pytest.mark.slow
def test_a_failure_is_reported_by_the_exit_code(folder, capsys, monkeypatch, tmp_path):
    def counted_from_zero(batch, length, vocabulary, seed):
        rows = np.random.default_rng(seed).integers(0, vocabulary, (batch, length + 1))
        return make_batch(rows, segment_ids=np.arange(length + 1) // 40 + 0 * rows)

    monkeypatch.setattr(command, "random_batch", counted_from_zero)
    options = ["--model", str(folder), "--mesh", "seq=2", "--seq-len", "64", "--loss-only"]
    assert command.main([*options, "--json", str(tmp_path / "report.json")]) == 1
    out = capsys.readouterr().out
    assert "FAILED\n- 62.5 % of the tokens are in segment 0 of segment_ids, at the start" in out
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["passed"] is False
    # The mesh itself is right.
    assert record["loss"]["mesh"] <= record["loss"]["limit"]


def test_a_report_that_cannot_be_written_is_printed(capsys, monkeypatch, tmp_path):
    """A full disk shows only when the report is written."""
    report = Report(
        "seq=2", "zigzag", "float32", None, "doubled is written for its dtype", {"mesh": 1.0},
        Difference("loss", 0.0, None, 3e-5), (), None, (), (), Cost({}, {}),
    )  # fmt: skip
    monkeypatch.setattr(command, "_compare", lambda args, mesh: report)
    with pytest.raises(SystemExit) as raised:
        command.main(["--model", str(tmp_path), "--json", "/dev/full"])
    out, err = capsys.readouterr()
    assert raised.value.code == 2
    assert out == f"{report}\n"
    missing = "no reference in a wider dtype: doubled is written for its dtype; limits are those of"
    assert f"{missing} float32\n" in out
    assert err == (
        "python -m burst_jax.verify: error: --json: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "ring=2"], "--mesh is 'ring=2': its axes are data, fsdp, stage, seq, te"),
        (["--mesh", "seq"], "--mesh is 'seq': write it like fsdp=2,seq=4"),
        (["--mesh", "seq=2,seq=2"], "--mesh is 'seq=2,seq=2': it names an axis twice"),
        (["--mesh", "seq=16"], "--mesh is 'seq=16': it needs 16 devices, there are 8; use for"),
        (["--model", "nowhere"], "argument --model: 'nowhere': there is no such folder"),
        (["--mesh", "data=2", "--batch", "3"], "--batch is 3: use a multiple of 2, like 2"),
        (
            ["--seq-len", "100"],
            "--seq-len is 100: the zigzag layout over 8 devices does not",
        ),
        (["--seq-len", "4"], "argument --seq-len: '4': it must be an integer from 8 to"),
        (["--layout", "zig"], "argument --layout: layout is 'zig'"),
        (["--seed", "-1"], "argument --seed: '-1': it must be an integer from 0 to 4294967295"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        # Before the comparison, which here would find no model.
        (
            ["--json", "/dev/null/report.json"],
            "--json: '/dev/null/report.json' cannot be written",
        ),
        (
            ["--json", "/proc/report.json"],
            "--json: '/proc/report.json' cannot be written: ",
        ),
        (["--json", "/"], "--json: / is a folder: name a file in it"),
    ],
)
def test_wrong_options_end_with_a_sentence(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--model", str(tmp_path), *options])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m burst_jax.verify: error: {message}")
