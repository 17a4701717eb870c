"""The examples, as people run them: a process of their own, tiny settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import reporting  # noqa: E402 - the examples are scripts, not a package
import text_data  # noqa: E402
import train_lm  # noqa: E402

from burst_jax.platform import peak_flops  # noqa: E402

TINY = [
    "--layers=1",
    "--embed-dim=16",
    "--heads=2",
    "--kv-heads=1",
    "--head-dim=8",
    "--mlp-dim=16",
    "--seq-len=32",
    "--batch=2",
    "--eval-batches=1",
    "--sample-bytes=5",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = np.random.default_rng(0).choice(["ring ", "burst ", "stripe\n"], 3000)
    for index, part in enumerate(np.array_split(words, 4)):
        (folder / f"{index}.txt").write_text("".join(part))
    return folder


def command(script, *arguments):
    return [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, arguments)]


def environment():
    # On GPUs the defaults are another model's; the tests are the CPU's.
    return os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}


def run(script, *arguments):
    return subprocess.run(
        command(script, *arguments), capture_output=True, text=True, env=environment()
    )


def train(corpus, out, *arguments):
    return run("train_lm.py", "--data", corpus, "--out", out, *TINY, *arguments)


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow  # two runs; the next test is one, without its end
def test_train_lm_ends_with_equal_perplexities_whatever_the_mesh(corpus, tmp_path):
    curves = []
    for mesh in ("data=2,seq=4", "seq=2"):
        out = tmp_path / mesh
        result = train(corpus, out, "--steps=4", f"--mesh={mesh}")
        assert result.returncode == 0, result.stderr
        assert "step 4/4  loss " in result.stdout
        assert "held-out perplexity of 64 bytes, in float32:" in result.stdout
        assert "[sample starts]" in result.stdout
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        summary = json.loads((out / "summary.json").read_text())
        ring, one = summary["ring"]["perplexity"], summary["one_device"]["perplexity"]
        assert ring == pytest.approx(one, rel=1e-4)
        assert f"{ring:.6f}" in result.stdout
        assert f"{one:.6f}" in result.stdout
        curves.append(losses(out))
    assert len(curves[0]) == 4
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)
    assert curves[0][-1] < curves[0][0] - 0.01


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_plots(corpus, tmp_path):
    arguments = ["--data", corpus, "--out", tmp_path, *TINY, "--steps=200000", "--mesh=seq=2"]
    process = subprocess.Popen(
        command("train_lm.py", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"interrupted after step {len(losses(tmp_path))}, loss " in out
    assert len(losses(tmp_path)) >= 1
    assert (tmp_path / "loss.png").exists()


def test_bad_arguments_are_one_line():
    result = run("train_lm.py", "--mesh", "seq=9")
    assert result.returncode == 2
    assert result.stderr == (
        "train_lm.py: error: --mesh is 'seq=9': it needs 9 devices, there are 8; "
        "use for example data=1,seq=8\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=data=3,seq=3"], "it needs 9 devices, there are 8; use for example data=1,seq=8"),
        (["--mesh=seq"], "--mesh is 'seq': write it like data=1,seq=8"),
        (["--mesh=seq=x"], "--mesh is 'seq=x': write it like"),
        (["--mesh=ring=8"], "--mesh is 'ring=8': its axes are data and seq"),
        (["--mesh=seq=0"], "--mesh is 'seq=0': its axes are data and seq, of size 1 or more"),
        (["--seq-len=100"], "--seq-len is 100: the zigzag layout over 8 devices.*; use 112"),
        (["--seq-len=100", "--layout=striped"], "the striped layout over 8 devices.*; use 104"),
        (["--mesh=data=4,seq=2"], "--batch is 2: use a multiple of 4, .* like 4"),
        (["--steps=0"], "--steps is 0: it must be at least 1"),
        (["--eval-batches=0"], "--eval-batches is 0"),
        (["--sample-bytes=-1"], "--sample-bytes is -1: it must be at least 0"),
        (["--seed=-1"], "--seed is -1: it must be at least 0"),
        (["--heads=3", "--kv-heads=2"], "num_heads is 3, num_kv_heads 2"),
        (["--seq-len=16000"], "--seq-len is 16000: the text's shorter part .* has [0-9]+ bytes"),
        (["--data=nowhere"], "--data is nowhere: there is no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_do_not_fit(corpus, arguments, message):
    args, _ = train_lm.parse_args(["--data", str(corpus), *TINY, *arguments])
    with pytest.raises(ValueError, match=message):
        train_lm.prepare(args)


def no_training(monkeypatch):
    monkeypatch.setattr(train_lm, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # Devices are there already.


def test_an_out_that_cannot_be_written_is_said_before_the_first_step(
    corpus, tmp_path, monkeypatch, capsys
):
    no_training(monkeypatch)
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    for out, message in (("file", "File exists"), ("run", "Is a directory")):
        with pytest.raises(SystemExit):
            train_lm.main(["--data", str(corpus), *TINY, "--out", str(tmp_path / out)])
        assert message in capsys.readouterr().err


def test_an_end_that_cannot_run_is_said_before_the_first_step(
    corpus, tmp_path, monkeypatch, capsys
):
    no_training(monkeypatch)
    with pytest.raises(SystemExit):
        train_lm.main(
            ["--data", str(corpus), *TINY, "--out", str(tmp_path), "--implementation=mosaic_gpu"]
        )
    error = capsys.readouterr().err
    assert "so the evaluation and the sample after the last step could not run" in error
    assert "--eval-dtype (float32)" in error


def test_without_matplotlib_a_run_says_first_that_there_will_be_no_picture(
    corpus, tmp_path, monkeypatch, capsys
):
    def train(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "train", train)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KeyboardInterrupt):
        train_lm.main(["--data", str(corpus), *TINY, "--out", str(tmp_path)])
    assert "matplotlib is not installed: there will be no loss.png" in capsys.readouterr().out
    reporting.plot_loss([{"step": 1, "loss": 1.0}], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_comparing_runs_names_what_is_no_run(tmp_path):
    result = run("compare_runs.py", tmp_path, tmp_path / "other")
    assert result.returncode == 1
    assert result.stderr == (
        f"{tmp_path / 'metrics.jsonl'}: no steps of a run; name the --out folder of one\n"
    )


def test_flax_attention_example():
    result = run("flax_attention.py")
    assert result.returncode == 0, result.stderr
    assert "8 x cpu, 1024 tokens, 128 on each" in result.stdout
    assert "relative difference to Flax's own attention: " in result.stdout


def test_text_is_split_by_file_and_always_the_same(corpus, tmp_path):
    text = text_data.load_text(corpus)
    files = [(corpus / f"{index}.txt").read_bytes() for index in range(4)]
    assert bytes(text.train) == b"\0".join(files[:3])
    assert bytes(text.held_out) == files[3]
    single = text_data.load_text(corpus / "0.txt", held_out_fraction=0.25)
    assert bytes(single.train) + bytes(single.held_out) == files[0]
    assert len(single.held_out) == round(len(files[0]) / 4)
    with pytest.raises(ValueError, match="no text in it"):
        text_data.load_text(tmp_path)


def test_default_text_is_pythons_source():
    text = text_data.load_text()
    assert sysconfig.get_paths()["stdlib"] in text.source
    assert len(text.train) > 10 * len(text.held_out) > 1e6
    assert b"def " in bytes(text.train[:100_000])


def test_rows_depend_on_seed_and_step_only():
    text = np.arange(1000).astype(np.uint8)
    rows = text_data.training_rows(text, 3, 10, seed=1, step=2)
    assert rows.shape == (3, 10)
    assert (np.diff(rows.astype(int)) % 256 == 1).all()
    np.testing.assert_array_equal(rows, text_data.training_rows(text, 3, 10, seed=1, step=2))
    for other in ({"seed": 2, "step": 2}, {"seed": 1, "step": 3}):
        assert (text_data.training_rows(text, 3, 10, **other) != rows).any()
    held_out = text_data.held_out_rows(text[:100], 2, 10, 3)
    assert [row.shape for row in held_out] == [(2, 10)] * 3
    assert (held_out[0][0, 0], held_out[-1][-1, -1]) == (0, 99)


def test_known_peaks_and_mfu(tmp_path, capsys):
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("cpu") is None
    reporter = reporting.Reporter(tmp_path, 2, tokens_per_step=10, flops_per_step=1e3, peak=1e12)
    with reporter:
        for step in (1, 2):
            reporter.step(step, {"loss": 1.0, "grad_norm": 2.0})
    first, second = reporter.history
    assert "mfu" not in first
    assert second["mfu"] == pytest.approx(second["tokens_per_second"] * 100 / 1e12)
    assert "MFU 0.0%" in capsys.readouterr().out
