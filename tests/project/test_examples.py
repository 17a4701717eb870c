"""train_lm.py, in this process and in two, its options, and the short examples."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import compare_runs
import flax_attention
import jax
import linen_model
import numpy as np
import pytest
import reporting
import run_options
import train_lm
from data_files import write_words
from local_processes import free_port, started
from train_lm_runs import TINY, arguments, error_of

from burst_jax.data import ByteTokens, TokenizerFile
from burst_jax.training import (
    Checkpoints,
)

STEPS = ["--steps=3", "--checkpoint-every=2"]
MESH = "--mesh=outer=2,inner=1,heads=2"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("corpus"))


def losses(out, name="metrics.jsonl"):
    lines = (out / name).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run's folder, and what it printed."""
    out, printed = tmp_path_factory.mktemp("run"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train_lm.main(arguments(corpus, out, *STEPS, MESH)) == 0
    return out, printed.getvalue()


@pytest.mark.slow
def test_a_run_ends_with_equal_perplexities(trained):
    out, printed = trained
    assert "step 3/3  loss " in printed
    assert "held-out perplexity of 64 tokens, in float32:" in printed
    assert "[sample starts]" in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    ring, one = summary["ring"]["perplexity"], summary["one_device"]["perplexity"]
    assert ring == pytest.approx(one, rel=1e-4)
    assert f"{ring:.6f}" in printed
    assert f"{one:.6f}" in printed
    curve = losses(out)
    assert len(curve) == 3
    assert curve[-1] < curve[0] - 0.01


@pytest.mark.slow
def test_two_processes_on_another_mesh_take_the_same_steps(corpus, trained, tmp_path):
    """A ring over two processes of one device each, in another layout."""
    train = str(Path(train_lm.__file__))
    of_both = [f"--coordinator=127.0.0.1:{free_port()}", "--num-processes=2", "--mesh=seq=2"]
    own = ["--layout=balanced", "--sample-tokens=0"]
    command = [train, *arguments(corpus, tmp_path, *STEPS, *of_both, *own)]
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    commands = [[*command, f"--process-id={index}"] for index in range(2)]
    with started(commands, [devices] * 2) as processes:
        ends = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ends
    np.testing.assert_allclose(losses(tmp_path), losses(trained[0]), rtol=1e-5)
    # One log, by process 0.
    assert "step 3/3" in ends[0][0]
    assert "held-out perplexity" in ends[0][0]
    assert "step" not in ends[1][0]


@pytest.mark.slow
def test_an_interrupted_run_in_another_s_folder_loses_nothing(
    corpus, trained, tmp_path, monkeypatch, capsys
):
    """Neither metrics and summary of the first run, nor steps of the second."""
    out, checkpoints = tmp_path / "out", tmp_path / "b"
    shutil.copytree(trained[0], out)
    log_step = train_lm.RunLog.step

    def interrupted(self, step, numbers):
        log_step(self, step, numbers)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_lm.RunLog, "step", interrupted)
    second = ["--steps=3", "--checkpoint-every=3", f"--checkpoint-dir={checkpoints}", "--seed=1"]
    second.append("--sample-tokens=0")
    assert train_lm.main(arguments(corpus, out, MESH, *second)) == 130
    printed = capsys.readouterr().out
    assert (
        f"{out} has an earlier run's results, renamed: metrics.jsonl -> metrics.1.jsonl, "
        "summary.json -> summary.1.json, loss.png -> loss.1.png\n"
    ) in printed
    assert losses(out, "metrics.1.jsonl") == losses(trained[0])
    assert (out / "summary.1.json").exists()
    # The step that it reached is finished, saved and drawn.
    assert f"interrupted after step 2, loss {losses(out)[-1]:.4f}" in printed
    assert len(losses(out)) == 2
    assert (checkpoints / "2").is_dir()
    assert (out / "loss.png").exists()

    # The first run's checkpoints do not belong to these metrics.
    shutil.rmtree(out / "checkpoints" / "3")
    before = {path.name for path in out.iterdir()}
    assert re.search(
        r"--out is .*, whose metrics.jsonl belongs to another run than the checkpoints in .*: the "
        rf"losses at step 2 are {losses(out)[1]} and {losses(trained[0])[1]}; use another --out",
        error_of(arguments(corpus, out, *STEPS, MESH), capsys),
    )
    assert {path.name for path in out.iterdir()} == before

    # While another run writes its checkpoints or results, a second one ends at its start.
    for folder in (out / "checkpoints", out):
        with Checkpoints(folder) as other:
            other.lock()
            message = f"{other.folder} is being written by"
            assert message in error_of(arguments(corpus, out, *STEPS, MESH), capsys)
    # An interrupt before the first step leaves nothing to report a loss of.
    monkeypatch.setattr(train_lm, "rehearse", lambda *_: signal.raise_signal(signal.SIGINT))
    assert train_lm.main(arguments(corpus, tmp_path / "early", MESH, "--steps=3")) == 130
    early = "interrupted before the first step was complete; nothing is saved\n"
    assert capsys.readouterr().out.endswith(early)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_interrupts(number):
    with reporting.Interrupt(alone=True) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


AXES = "data, fsdp, stage, outer, inner, seq, heads, tensor"
# tests/project/test_command_lines.py has numbers out of range.
INVALID = {
    **{
        f"--mesh={mesh}": f"--mesh is '{mesh}': write it like fsdp=2,seq=4"
        for mesh in ("seq=x", "seq:2")
    },
    **{
        f"--mesh={mesh}": f"--mesh is '{mesh}': its axes are {AXES}, of size 1 or more"
        for mesh in ("ring=8", "Seq=2")
    },
    "--mesh=data=3,seq=3": "it needs 9 devices, there are 8; use for example seq=8",
    "--mesh=seq=2,outer=2,inner=2": "the ring is seq, or outer and inner .two levels., not both",
    "--mesh=fsdp=2,seq=4 --weights=replicated": "replicated, and --mesh has fsdp=2, which shards",
    "--mesh=seq=2,heads=4": "--heads is 2: --mesh shards them over heads=4, .* or --heads 4$",
    "--mesh=heads=6,tensor=1 --heads=12 --kv-heads=4 --seq-len=36 --embed-dim=12": (
        "--kv-heads is 4: --mesh has heads=6, and one of the two numbers"
    ),
    "--mesh=outer=2,inner=2,heads=2 --seq-len=36": "zigzag layout over 8 devices.*; use 40",
    "--mesh=seq=2,seq=4": "--mesh is 'seq=2,seq=4': it names an axis twice",
    "--steps=0": "--steps is 0: it must be at least 1$",
    "--batch=1048577": "--batch is 1048577: it must be at most 1048576$",
    "--lr=1e300": "--lr is 1e.300: it must be positive and finite in float32$",
    "--expert-axes=fsdp": "--expert-axes is fsdp: the model has no experts; leave it out$",
    "--remat-layers=5": "--remat-layers is 5, --remat 'attention': .* or leave --remat-layers out$",
    "--vocab-size=10": "--vocab-size is 10: the tokenizer makes ids up to 255; use 256 or more",
    "--seed=-1": "--seed is -1: it must be at least 0$",
    "--seed=4294967296": "--seed is 4294967296: it must be at most 4294967295$",
    # The largest seed is right.
    "--seed=4294967295 --head-dim=5": "--head-dim is 5: ",
    "--head-dim=7": "--head-dim is 7: RoPE rotates pairs of features, so it must be even",
    "--seq-len=100": "--seq-len is 100: the zigzag layout over 8 devices.*; use 112",
    "--seq-len=100 --layout=striped": "the striped layout over 8 devices.*; use 104",
    "--mesh=data=4,seq=2": r"--batch is 2: use a multiple of 4, like 4; .* are 4 \(the data",
    "--mesh=data=2,fsdp=2,seq=2": "--batch is 2: use a multiple of 4, like 4",
    "--accumulate=4": r"use a multiple of 4, .* 4 \(--accumulate\) and 1 \(--microb",
    "--mesh=stage=2,seq=2 --accumulate=2 --microbatches=4": (
        r"use a multiple of 8, like 8; .*, 2 \(--accumulate\) and 4 \(--microbatches, and"
    ),
    "--mesh=stage=2,seq=2 --microbatches=3": "--batch is 2: use a multiple of 6",
    "--microbatches=2": "--microbatches is 2: they need a pipeline; give --mesh a stage",
    "--mesh=seq=3 --layout=balanced": "--seq-len is 32: the balanced layout over 3 devices",
    "--mesh=seq=4 --mlp-chunks=3": "--mlp-chunks is 3: it must divide the 8 tokens",
    "--heads=3 --kv-heads=2": "--heads is 3, --kv-heads 2: use a multiple of --kv-heads",
    "--mesh=stage=2 --layers=3": (
        "--layers is 3: --mesh shards them over stage=2, but 2 does not divide 3; use another "
        "--mesh, or --layers 4$"
    ),
    "--mesh=tensor=4 --heads=6 --kv-heads=2": "--heads is 6: .* over tensor=4, .*, or --heads 8$",
    "--mesh=tensor=2 --mlp-dim=15": "--mlp-dim is 15: .*, or --mlp-dim 16$",
    "--mesh=tensor=3 --heads=3 --mlp-dim=24": (
        "the model has 256 token ids: .* over tensor=3, .* divide 256; use another --mesh$"
    ),
    "--mesh=fsdp=2,seq=4 --embed-dim=20": (
        "--embed-dim is 20: .* over fsdp=2 x seq=4, but 8 .* or --embed-dim 24$"
    ),
    "--mesh=tensor=4 --heads=12 --kv-heads=6": (
        "--kv-heads is 6: --mesh has tensor=4, .*; use another --mesh, or other --kv-heads$"
    ),
    "--mesh=seq=4,heads=2 --mixer=delta-net": "--mesh has heads=2, .* --mixer delta-net use seq or",
    "--mesh=tensor=2 --mixer=delta-net": "--kv-heads is 1: .* tensor=2, .*; use a multiple of 2",
    "--mixer=delta-net --remat=half": "--remat is 'half', .*, and --mixer delta-net is given: use",
    "--mesh=tensor=2 --mixer=hybrid --layers=4": "--kv-heads is 1: .* tensor=2, .* --mixer hybrid;",
    "--mixer=hybrid": "--full-attention-interval is 4, --layers 1: every 4th layer is softmax",
    "--mixer=hybrid-kda": "--full-attention-interval is 4, --layers 1: every 4th layer is softmax",
    "--mixer=hybrid --full-attention-interval=1": "--full-attention-interval is 1, --layers 1",
    "--full-attention-interval=2": "--full-attention-interval is 2: it needs --mixer hybrid",
    "--seq-len=16000": "16000: the text's shorter part .* has [0-9]+ bytes .* need 16001",
    "--data=nowhere": "--data is nowhere: there is no such file or folder",
    "--tokenizer=nowhere": "--tokenizer is nowhere: there is no such file",
}  # fmt: skip
UNKNOWN = {
    "--seqlen=64": "unknown arguments: --seqlen=64. Did you mean '--seq-len'?",
    "--mesh-shape seq=2": "unknown arguments: --mesh-shape seq=2",
    "--step=5": "unknown arguments: --step=5. Did you mean '--steps'?",
    "notes/": "unknown arguments: notes/",
    "--batch=two": "argument --batch: invalid int value: 'two'",
    "--layout=zig-zag": "argument --layout: invalid choice: 'zig-zag'",
    "--dtype=float16": "argument --dtype: invalid choice: 'float16'",
    "--resume=yes": "argument --resume: invalid choice: 'yes'",
    "--implementation=cuda": "argument --implementation: invalid choice: 'cuda'",
}


def test_errors_before_a_run_name_flags(tmp_path, capsys):
    for words, message in {
        "--coordinator=": "--coordinator is ''",
        "--process-id=3": "--process-id is 3, but --coordinator and --num-processes cannot be",
        "--heartbeat-timeout=0 --num-processes=2 --process-id=0": "--heartbeat-timeout is 0: it",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            train_lm.main(words.split())
        assert message in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"--out is .*file, which cannot be written: .*; name another"
    ):
        reporting.check_out(tmp_path / "file")


def test_invalid_arguments_raise(corpus, capsys):
    for words, message in INVALID.items():
        args, _ = run_options.parse_args(["--data", str(corpus), *TINY, *words.split()])
        with pytest.raises((ValueError, NotImplementedError), match=message):
            run_options.prepare(args)
    for words, message in UNKNOWN.items():
        with pytest.raises(SystemExit, match="2"):
            run_options.parse_args(words.split())
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        run_options.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert 'JSON lines with a "text" key' in text
    assert "sequence layout, balanced: by each batch's documents (default: zigzag)" in text


def test_ids_outside_the_given_vocabulary_raise(corpus, tmp_path):
    """The model's own vocabulary is rounded up."""
    np.save(tmp_path / "ids.npy", np.arange(8000) % 120)

    def first_batch(args):
        prepared = run_options.prepare(args)
        with train_lm.make_loader(args, prepared, prepared.text) as loader:
            next(loader)

    for data, option, message in (
        (tmp_path, "--vocab-size=100", "holds token id 1[01][0-9], vocab_size is 100"),
        (
            corpus,
            "--vocab-size=100",
            "--vocab-size is 100: the tokenizer makes ids up to 255; use 256",
        ),
        (tmp_path, "--steps=1", "--vocab-size is missing: --data holds tokens"),
        (tmp_path, "--tokenizer=t.json", "--tokenizer is t.json, but --data already holds tokens"),
    ):
        args, _ = run_options.parse_args([f"--data={data}", *TINY, option])
        with pytest.raises(ValueError, match=message):
            first_batch(args)


def test_mistakes_are_found_before_the_first_step(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "train", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    for out, more, message in (
        ("file", [], "File exists"),
        ("run", [], "Is a directory"),
        ("new", ["--implementation=mosaic_sm90"], "so evaluation and sampling after the last step"),
        ("new", ["--implementation=mosaic_sm90"], "would fail: see --implementation, --eval-dtype"),
        ("new", ["--tokenizer=x"], "error: TokenizerFile needs tokenizers, which is not"),
    ):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        assert message in error_of(arguments(corpus, tmp_path / out, *more), capsys)


def test_what_a_perplexity_counts_is_stated():
    text, arrays, tokenizer = ByteTokens(), None, object.__new__(TokenizerFile)
    for tokens, held_out, counted in (
        (text, 64, ""),
        (text, 20, r" \(the held-out 20 bytes, 3\.2 times\)"),
        (arrays, 10, r" \(the held-out 10 tokens, 6\.4 times\)"),
        (
            tokenizer,
            70,
            r" \(of 70 held-out bytes, again from the start if .*\)",
        ),
    ):
        run: Any = types.SimpleNamespace(
            tokens=tokens, held_out=types.SimpleNamespace(size=held_out)
        )
        assert re.fullmatch(counted, train_lm.counted(run, 64, 16))


def test_a_run_without_matplotlib_warns_first(corpus, tmp_path, monkeypatch, capsys):
    def train(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "train", train)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KeyboardInterrupt):
        train_lm.main(arguments(corpus, tmp_path))
    assert "matplotlib is not installed, so loss.png is not written" in capsys.readouterr().out
    reporting.plot_loss([{"step": 1, "loss": 1.0}], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_compare_runs(tmp_path, capsys):
    for name, values in (("a", [2.0, 1.0, 0.5]), ("b", [2.0, 1.5])):
        (tmp_path / name).mkdir()
        steps = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
        lines = "".join(json.dumps(record) + "\n" for record in steps)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    compare_runs.main([str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr().out
    assert "2 steps, from 2.0000 to 1.0000 and 1.5000 nats" in printed
    assert "RMS 3.54e-01, largest 5.00e-01 at step 2, mean -2.50e-01" in printed


@pytest.fixture
def four_devices(monkeypatch):
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    with jax.numpy_dtype_promotion("standard"):  # For Flax's own layers.
        yield


def test_flax_attention_example(four_devices, capsys):
    flax_attention.main()
    printed = capsys.readouterr().out
    assert "4 x cpu, 512 tokens, 128 per device" in printed
    assert "relative difference to Flax's own attention: " in printed


@pytest.mark.slow
def test_linen_model_example(four_devices, capsys):
    linen_model.main(["--steps=8"])
    printed = capsys.readouterr().out
    assert "4 x cpu, mesh data=2,seq=2, 64 tokens" in printed
    curve = [float(line.split()[-1]) for line in printed.splitlines() if "loss" in line]
    assert len(curve) == 8
    # The text is these scripts, so the first batch changes with them.
    assert curve[0] == pytest.approx(np.log(256), abs=0.8)
    assert curve[-1] < curve[0] - 1
