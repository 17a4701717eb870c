"""The examples, as people run them: in processes, with tiny settings."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import compare_runs
import jax
import numpy as np
import pytest
import reporting
import run_options
import train_lm
from implementations import QUICK
from local_processes import free_port

from burst_jax.training import make_train_step

EXAMPLES = Path(__file__).parents[2] / "examples"

TINY = [
    "--layers=1", "--embed-dim=16", "--heads=2", "--kv-heads=1", "--head-dim=8", "--mlp-dim=16",
    "--seq-len=32", "--batch=2", "--eval-batches=1", "--sample-tokens=5",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Processes share JAX's compilation cache."""
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
    # On GPUs the defaults differ.
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


@pytest.mark.slow
def test_train_lm_ends_with_equal_perplexities_on_any_mesh(corpus, tmp_path):
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
    """Losses of one process, with XLA's own collectives and with gloo's."""
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
    """Bitwise equal to one process that reduces in the same order.

    With four processes of two devices, both axes of the mesh span processes.
    """
    processes = 4
    # They only read the cache: one might read what another has partly written.
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
    # One log, by process 0.
    assert "step 3/3" in ends[0][0]
    assert "held-out perplexity" in ends[0][0]
    assert not any("step" in out for out, _ in ends[1:])
    # One checkpoint, from which a single process can resume.
    again = train(corpus, tmp_path, *ON_ALL)
    assert "resuming from step 3" in again.stdout, again.stderr


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
    # The step it reached is saved.
    assert str(len(losses(tmp_path))) in os.listdir(tmp_path / "checkpoints")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_interrupts(number):
    with reporting.Interrupt(alone=True) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


AXES = "data, fsdp, stage, seq, tensor"
INVALID = {
    "--mesh=data=3,seq=3": "it needs 9 devices, there are 8; use for example seq=8",
    "--mesh=seq": "--mesh is 'seq': write it like fsdp=2,seq=4",
    "--mesh=seq=x": "--mesh is 'seq=x': write it like",
    "--mesh=ring=8": f"--mesh is 'ring=8': its axes are {AXES}",
    "--mesh=seq=0": "--mesh is 'seq=0': its axes are data, .* tensor, of size 1 or more",
    "--mesh=seq=-1": "--mesh is 'seq=-1': its axes are data, .* of size 1 or more",
    "--mesh=seq=2,seq=4": "--mesh is 'seq=2,seq=4': it names an axis twice",
    "--mesh=": "--mesh is '': write it like fsdp=2,seq=4",
    "--mesh=seq=2,": "--mesh is 'seq=2,': write it like",
    "--mesh=seq:2": "--mesh is 'seq:2': write it like",
    "--mesh=Seq=2": f"--mesh is 'Seq=2': its axes are {AXES}",
    "--batch=0": "--batch is 0: it must be at least 1",
    "--seq-len=-8": "--seq-len is -8: it must be at least 1",
    "--layers=0": "--layers is 0: it must be at least 1",
    "--kv-heads=0": "--kv-heads is 0: it must be at least 1",
    "--head-dim=7": "--head-dim is 7: RoPE rotates pairs of features, so it must be even",
    "--vocab-size=0": "--vocab-size is 0: it must be at least 1",
    "--lr=nan": "--lr is nan: it must be positive, and finite",
    "--lr=-1": "--lr is -1.0: it must be positive, and finite",
    "--lr=inf": "--lr is inf: it must be positive, and finite",
    "--stall-timeout=0": "--stall-timeout is 0.0: it must be positive, and finite",
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
    "--steps=0": "--steps is 0: it must be at least 1",
    "--keep=0": "--keep is 0: it must be at least 1",
    "--mlp-chunks=0": "--mlp-chunks is 0: it must be at least 1",
    "--mesh=seq=4 --mlp-chunks=3": "--mlp-chunks is 3: it must divide the 8 tokens",
    "--accumulate=0": "--accumulate is 0: it must be at least 1",
    "--eval-batches=0": "--eval-batches is 0",
    "--checkpoint-every=-1": "--checkpoint-every is -1: it must be at least 0",
    "--profile=-1": "--profile is -1: it must be at least 0",
    "--sample-tokens=-1": "--sample-tokens is -1: it must be at least 0",
    "--seed=-1": "--seed is -1: it must be at least 0",
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
    "--seq-len=16000": "16000: the text's shorter part .* has [0-9]+ bytes .* need 16001",
    "--data=nowhere": "path is nowhere: there is no such file or folder",
    "--tokenizer=nowhere": "path is nowhere: there is no such file",
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


def test_invalid_arguments_raise(corpus, capsys):
    for arguments, message in INVALID.items():
        args, _ = run_options.parse_args(["--data", str(corpus), *TINY, *arguments.split()])
        with pytest.raises(ValueError, match=message):
            run_options.prepare(args)
    for arguments, message in UNKNOWN.items():
        with pytest.raises(SystemExit, match="2"):
            run_options.parse_args(arguments.split())
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_ids_outside_the_given_vocabulary_raise(corpus, tmp_path):
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
        (
            tmp_path,
            ["--tokenizer=t.json"],
            "--tokenizer is t.json, but --data already holds tokens",
        ),
    ):
        args, _ = run_options.parse_args(["--data", str(data), *TINY, *options])
        with pytest.raises(ValueError, match=message):
            first_batch(args)


def error_of(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(list(map(str, given)))
    return capsys.readouterr().err


@pytest.mark.slow
def test_another_run_in_the_same_folder_loses_nothing(corpus, tmp_path, monkeypatch, capsys):
    """Neither metrics and summary of the first run, nor those of the second."""

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
        f"{tmp_path} has an earlier run's results, renamed: metrics.jsonl -> metrics.1.jsonl, "
        "summary.json -> summary.1.json\n"
    ) in capsys.readouterr().out
    kept = json.loads((tmp_path / "metrics.1.jsonl").read_text())["loss"]
    assert [kept] == first != losses(tmp_path)
    for name, value in (("summary.1.json", "checkpoints"), ("summary.json", "b")):
        assert json.loads((tmp_path / name).read_text()) == {"checkpoints": value}
    before = {path.name for path in tmp_path.iterdir()}
    assert re.search(
        r"--out is .*, whose metrics.jsonl belongs to another run than the checkpoints in .*: the "
        rf"losses at step 1 are {losses(tmp_path)[0]} and {first[0]}; use another --out, or the",
        error_of(given, capsys),
    )
    assert {path.name for path in tmp_path.iterdir()} == before


def test_mistakes_are_found_before_the_first_step(corpus, tmp_path, monkeypatch, capsys):
    def error_with(out, *more):
        return error_of(["--data", corpus, *TINY, "--out", tmp_path / out, *more], capsys)

    monkeypatch.setattr(train_lm, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # Devices exist already.
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    assert "File exists" in error_with("file")
    assert "Is a directory" in error_with("run")
    error = error_with("new", "--implementation=mosaic_sm90")
    assert "so evaluation and sampling after the last step would fail" in error
    assert "--eval-dtype (float32)" in error
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    error = error_with("new", "--tokenizer=x")
    assert "error: TokenizerFile needs tokenizers, which is not" in error


def test_a_run_without_matplotlib_warns_first(corpus, tmp_path, monkeypatch, capsys):
    def train(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "train", train)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KeyboardInterrupt):
        train_lm.main(["--data", str(corpus), *TINY, "--out", str(tmp_path)])
    assert "matplotlib is not installed, so loss.png is not written" in capsys.readouterr().out
    reporting.plot_loss([{"step": 1, "loss": 1.0}], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_compare_runs(tmp_path, monkeypatch, capsys):
    for name, values in (("a", [2.0, 1.0, 0.5]), ("b", [2.0, 1.5])):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"loss": value}) + "\n" for value in values)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tmp_path / "a"), str(tmp_path / "b")])
    compare_runs.main()
    assert "2 steps, from 2.0000 to 1.0000 and 1.5000 nats" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"metrics.jsonl: no steps of a run; name the --out"):
        compare_runs.losses(tmp_path)


def test_flax_attention_example():
    result = run("flax_attention.py")
    assert result.returncode == 0, result.stderr
    assert "8 x cpu, 1024 tokens, 128 per device" in result.stdout
    assert "relative difference to Flax's own attention: " in result.stdout


def test_linen_model_example():
    result = run("linen_model.py", "--steps=8")
    assert result.returncode == 0, result.stderr
    assert "8 x cpu, mesh data=2,seq=4, 128 tokens" in result.stdout
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1
