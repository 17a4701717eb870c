"""The examples, as people run them: a process of their own, tiny settings."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import reporting
import run_options
import train_lm
from implementations import QUICK
from local_processes import free_port

from burst_jax.parallel.target import peak_flops
from burst_jax.training import RunLog, make_train_step

EXAMPLES = Path(__file__).parents[2] / "examples"

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
    "--sample-tokens=5",
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """What one of the processes has compiled, the others take from JAX's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield


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
        assert "held-out perplexity of 64 tokens, in float32:" in result.stdout
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


BY_GLOO = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:{port}", num_processes=1, process_id=0)
"""


ON_ALL = ["--steps=3", "--checkpoint-every=2", "--mesh=fsdp=2,seq=4", "--sample-tokens=0"]


@pytest.fixture(scope="module")
def of_one_process(corpus, tmp_path_factory):
    """The losses of one process, by XLA's own collectives and by gloo's."""
    found = {}
    for name, before in (("own", ""), ("gloo", BY_GLOO.format(port=free_port()))):
        out = tmp_path_factory.mktemp(name)
        code = f"{before}\nimport sys, train_lm; sys.exit(train_lm.main(sys.argv[1:]))"
        given = ["--data", corpus, "--out", out, *TINY, *ON_ALL]
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *map(str, given)],
            capture_output=True, text=True, env=environment(), cwd=EXAMPLES,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        found[name] = losses(out)
    return found


@pytest.mark.slow
def test_several_processes_take_the_same_steps_as_one(corpus, tmp_path, of_one_process):
    """To the same bits as one process that adds up in the same order.

    Of four processes with two devices each, both axes of the mesh go from one to another.
    """
    processes = 4
    # These only read the cache: one might read what another has written half of.
    alike = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
    alike["JAX_NUM_CPU_DEVICES"] = str(8 // processes)
    port, running = free_port(), []
    for index in range(processes):
        options = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", processes]
        options += ["--process-id", index, "--data", corpus, "--out", tmp_path]
        running.append(
            subprocess.Popen(
                command("train_lm.py", *options, *TINY, *ON_ALL),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment() | alike,
            )
        )
    try:
        ends = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, ends
    assert losses(tmp_path) == of_one_process["gloo"]
    np.testing.assert_allclose(losses(tmp_path), of_one_process["own"], rtol=1e-6)
    # One log, by the first process.
    assert "step 3/3" in ends[0][0]
    assert "held-out perplexity" in ends[0][0]
    assert not any("step" in out for out, _ in ends[1:])
    # One checkpoint, which a single process can go on from.
    again = train(corpus, tmp_path, *ON_ALL)
    assert "going on from step 3" in again.stdout, again.stderr


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
    # What it had reached is saved.
    assert str(len(losses(tmp_path))) in os.listdir(tmp_path / "checkpoints")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_one_ends(number):
    with reporting.Interrupt(alone=True) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_bad_arguments_are_one_line():
    result = run("train_lm.py", "--mesh", "seq=9")
    assert result.returncode == 2
    assert result.stderr == (
        "train_lm.py: error: --mesh is 'seq=9': it needs 9 devices, there are 8; "
        "use for example seq=8\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=data=3,seq=3"], "it needs 9 devices, there are 8; use for example seq=8"),
        (["--mesh=seq"], "--mesh is 'seq': write it like fsdp=2,seq=4"),
        (["--mesh=seq=x"], "--mesh is 'seq=x': write it like"),
        (["--mesh=ring=8"], "--mesh is 'ring=8': its axes are data, fsdp, stage, seq, tensor"),
        (["--mesh=seq=0"], "--mesh is 'seq=0': its axes are data, .* tensor, of size 1 or more"),
        (["--mesh=seq=-1"], "--mesh is 'seq=-1': its axes are data, .* of size 1 or more"),
        (["--mesh=seq=2,seq=4"], "--mesh is 'seq=2,seq=4': it names an axis twice"),
        (["--mesh="], "--mesh is '': write it like fsdp=2,seq=4"),
        (["--mesh=seq=2,"], "--mesh is 'seq=2,': write it like"),
        (["--mesh=seq:2"], "--mesh is 'seq:2': write it like"),
        (["--mesh=Seq=2"], "--mesh is 'Seq=2': its axes are data, fsdp, stage, seq, tensor"),
        (["--batch=0"], "--batch is 0: it must be at least 1"),
        (["--seq-len=-8"], "--seq-len is -8: it must be at least 1"),
        (["--layers=0"], "--layers is 0: it must be at least 1"),
        (["--kv-heads=0"], "--kv-heads is 0: it must be at least 1"),
        (["--head-dim=7"], "--head-dim is 7: RoPE rotates pairs of features, so it must be even"),
        (["--vocab-size=0"], "--vocab-size is 0: it must be at least 1"),
        (["--lr=nan"], "--lr is nan: it must be positive, and finite"),
        (["--lr=-1"], "--lr is -1.0: it must be positive, and finite"),
        (["--lr=inf"], "--lr is inf: it must be positive, and finite"),
        (["--stall-timeout=0"], "--stall-timeout is 0.0: it must be positive, and finite"),
        (["--seq-len=100"], "--seq-len is 100: the zigzag layout over 8 devices.*; use 112"),
        (["--seq-len=100", "--layout=striped"], "the striped layout over 8 devices.*; use 104"),
        (
            ["--mesh=data=4,seq=2"],
            r"--batch is 2: use a multiple of 4, like 4; .* are 4 \(the data",
        ),
        (["--mesh=data=2,fsdp=2,seq=2"], "--batch is 2: use a multiple of 4, like 4"),
        (["--accumulate=4"], r"use a multiple of 4, .* 4 \(--accumulate\) and 1 \(--microb"),
        (
            ["--mesh=stage=2,seq=2", "--accumulate=2", "--microbatches=4"],
            r"use a multiple of 8, like 8; .*, 2 \(--accumulate\) and 4 \(--microbatches, and",
        ),
        (["--mesh=stage=2,seq=2", "--microbatches=3"], "--batch is 2: use a multiple of 6"),
        (["--microbatches=2"], "--microbatches is 2: they are a pipeline's; give --mesh a stage"),
        (["--steps=0"], "--steps is 0: it must be at least 1"),
        (["--keep=0"], "--keep is 0: it must be at least 1"),
        (["--mlp-chunks=0"], "--mlp-chunks is 0: it must be at least 1"),
        (["--mesh=seq=4", "--mlp-chunks=3"], "--mlp-chunks is 3: it must divide the 8 tokens"),
        (["--accumulate=0"], "--accumulate is 0: it must be at least 1"),
        (["--eval-batches=0"], "--eval-batches is 0"),
        (["--checkpoint-every=-1"], "--checkpoint-every is -1: it must be at least 0"),
        (["--profile=-1"], "--profile is -1: it must be at least 0"),
        (["--sample-tokens=-1"], "--sample-tokens is -1: it must be at least 0"),
        (["--seed=-1"], "--seed is -1: it must be at least 0"),
        (["--heads=3", "--kv-heads=2"], "--heads is 3, --kv-heads 2: use a multiple of --kv-heads"),
        (
            ["--mesh=stage=2", "--layers=3"],
            "--layers is 3: --mesh splits them over stage=2, 2 parts, which do not divide 3; use "
            "another --mesh, or --layers 4$",
        ),
        (
            ["--mesh=tensor=4", "--heads=6", "--kv-heads=2"],
            "--heads is 6: --mesh splits them over tensor=4, .*, or --heads 8$",
        ),
        (["--mesh=tensor=2", "--mlp-dim=15"], "--mlp-dim is 15: .*, or --mlp-dim 16$"),
        (
            ["--mesh=tensor=3", "--heads=3", "--mlp-dim=24"],
            "the model has 256 token ids: .* over tensor=3, .* divide 256; use another --mesh$",
        ),
        (
            ["--mesh=fsdp=2,seq=4", "--embed-dim=20"],
            "--embed-dim is 20: .* over fsdp=2 x seq=4, 8 parts, .* or --embed-dim 24$",
        ),
        (
            ["--mesh=tensor=4", "--heads=12", "--kv-heads=6"],
            "--kv-heads is 6: --mesh has tensor=4, .*; use another --mesh, or other --kv-heads$",
        ),
        (["--seq-len=16000"], "--seq-len is 16000: the text's shorter part .* has [0-9]+ bytes"),
        (["--data=nowhere"], "path is nowhere: there is no such file or folder"),
        (["--tokenizer=nowhere"], "path is nowhere: there is no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_do_not_fit(corpus, arguments, message):
    args, _ = run_options.parse_args(["--data", str(corpus), *TINY, *arguments])
    with pytest.raises(ValueError, match=message):
        run_options.prepare(args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen=64"], "unknown arguments: --seqlen=64. Did you mean '--seq-len'?"),
        (["--mesh-shape", "seq=2"], "unknown arguments: --mesh-shape seq=2"),
        (["--step=5"], "unknown arguments: --step=5. Did you mean '--steps'?"),
        (["notes/"], "unknown arguments: notes/"),
        (["--batch=two"], "argument --batch: invalid int value: 'two'"),
        (["--layout=zig-zag"], "argument --layout: invalid choice: 'zig-zag'"),
        (["--dtype=float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--resume=yes"], "argument --resume: invalid choice: 'yes'"),
        (["--implementation=cuda"], "argument --implementation: invalid choice: 'cuda'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_there_are_not(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        run_options.parse_args(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_ids_that_the_given_vocabulary_has_not_are_refused(corpus, tmp_path):
    """The model's own vocabulary is rounded up."""
    np.save(tmp_path / "ids.npy", np.arange(8000) % 120)

    def first_batch(args):
        prepared = run_options.prepare(args)
        with train_lm.make_loader(args, prepared, prepared.text) as loader:
            next(loader)

    for data, options, message in (
        (tmp_path, ["--vocab-size=100"], "holds token id 1[01][0-9], vocab_size is 100"),
        (corpus, ["--vocab-size=100"], "vocab_size is 100, but ByteTokens"),
        (tmp_path, [], "--vocab-size is missing: --data holds tokens"),
        (tmp_path, ["--tokenizer=t.json"], "--tokenizer is t.json, but --data holds tokens"),
    ):
        args, _ = run_options.parse_args(["--data", str(data), *TINY, *options])
        with pytest.raises(ValueError, match=message):
            first_batch(args)


def refusal(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(list(map(str, given)))
    return capsys.readouterr().err


@pytest.mark.slow
def test_another_run_into_the_same_folder_loses_nothing(corpus, tmp_path, monkeypatch, capsys):
    """Neither the metrics and the summary of the first run, nor those of the second."""

    def finish(args, *_):
        train_lm.write_summary(args, {"checkpoints": args.checkpoint_dir.name})
        return 0

    monkeypatch.setattr(train_lm, "finish", finish)
    quick_step = functools.partial(make_train_step, compiler_options=QUICK)
    monkeypatch.setattr(train_lm, "make_train_step", quick_step)
    given = ["--data", corpus, "--out", tmp_path, *TINY, "--mesh=seq=1", "--steps=1"]
    assert train_lm.main(list(map(str, given))) == 0
    first = losses(tmp_path)
    assert "an earlier run" not in capsys.readouterr().out
    other = ["--checkpoint-dir", tmp_path / "b", "--seed=1"]
    assert train_lm.main(list(map(str, [*given, *other]))) == 0
    assert (
        f"{tmp_path} has an earlier run's results: metrics.jsonl is metrics.1.jsonl now, "
        "summary.json is summary.1.json now\n"
    ) in capsys.readouterr().out
    kept = json.loads((tmp_path / "metrics.1.jsonl").read_text())["loss"]
    assert [kept] == first != losses(tmp_path)
    for name, value in (("summary.1.json", "checkpoints"), ("summary.json", "b")):
        assert json.loads((tmp_path / name).read_text()) == {"checkpoints": value}
    before = {path.name for path in tmp_path.iterdir()}
    assert re.search(
        r"--out is .*, whose metrics.jsonl is of another run than the checkpoints in .*: their "
        rf"losses at step 1 are {losses(tmp_path)[0]} and {first[0]}; use another --out, or that",
        refusal(given, capsys),
    )
    assert {path.name for path in tmp_path.iterdir()} == before


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
            ["--data", str(corpus), *TINY, "--out", str(tmp_path), "--implementation=mosaic_sm90"]
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


def test_a_library_that_is_missing_ends_a_run_with_what_to_install(
    corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit):
        train_lm.main(["--data", str(corpus), "--tokenizer", "x", *TINY, "--out", str(tmp_path)])
    assert "error: TokenizerFile needs tokenizers, which is not" in capsys.readouterr().err


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


def test_linen_model_example():
    result = run("linen_model.py", "--steps=8")
    assert result.returncode == 0, result.stderr
    assert "8 x cpu, mesh data=2,seq=4, 128 tokens" in result.stdout
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_known_peaks_and_mfu(tmp_path, capsys):
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("cpu") is None
    with RunLog(tmp_path, 2, tokens_per_step=10, flops_per_step=1e3, peak=1e12) as log:
        for step in (1, 2):
            log.step(step, {"loss": 1.0, "grad_norm": 2.0})
    first, second = log.history
    assert "mfu" not in first
    assert second["mfu"] == pytest.approx(second["tokens_per_second"] * 100 / 1e12)
    assert "MFU 0.0%" in capsys.readouterr().out
