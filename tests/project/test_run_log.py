"""The log and the profile of train_lm.py: lines, curves, progress, early ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import run_log
from hostile import check, check_all, json_cases, special_files, text_cases
from run_log import NonFinite, RunLog, cut_metrics, device_memory
from run_profile import Profile

from burst_jax.training import Checkpoints

ROOT = Path(__file__).parents[2]
GOOD = {"loss": 2.0, "grad_norm": 1.0}


def make_log(out, steps=10, **options):
    given: dict[str, Any] = {"tokens_per_step": 100, "flops_per_step": 1e9, "peak": 1e12, **options}
    return RunLog(out, steps, **given)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_a_line_with_its_speed(tmp_path, monkeypatch, capsys):
    clock = itertools.count()  # Advances by a second each time it is read.
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: float(next(clock)))
    with make_log(tmp_path / "new" / "run", steps=100) as log:
        for step in range(1, 101):
            log.step(step, {"loss": 1 / step, "grad_norm": 1.0, "learning_rate": 0.1})
    monkeypatch.undo()
    first, second, *_, last = lines(tmp_path / "new" / "run")
    assert first == {"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1}
    assert second["tokens_per_second"] == last["tokens_per_second"] == 100.0
    assert second["mfu"] == pytest.approx(1e-3)
    assert log.history[1] == second
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 21  # The first, and then every fifth.
    assert shown[0] == "step 1/100  loss 1.0000  grad norm 1.000"
    speed = "100 tokens/s  2 min left  MFU 0.1%"
    assert shown[1] == f"step 5/100  loss 0.2000  grad norm 1.000  {speed}"
    assert "left" not in shown[-1]
    for seconds, text in ((0.4, "0 s"), (59.4, "59 s"), (3600, "1 h 0 min"), (187300, "2 d 4 h")):
        assert run_log.duration(seconds) == text


def test_throughput_leaves_out_what_is_no_step(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    with make_log(tmp_path) as log:
        for step in range(1, 6):
            now[0] += 100 if step == 1 else 2  # The first one compiles.
            log.step(step, GOOD)
            if step in (2, 4):
                with contextlib.suppress(OSError), log.untimed():
                    now[0] += 50
                    raise OSError
    monkeypatch.undo()
    assert [line.get("tokens_per_second") for line in lines(tmp_path)] == [None, *[50.0] * 4]


def test_memory_without_mfu_and_infinite_metrics(tmp_path, monkeypatch, capsys):
    assert device_memory() is None  # CPU devices do not report it.
    peaks = [{"peak_bytes_in_use": 3 << 30}, {"peak_bytes_in_use": 5 << 30}]
    devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in peaks]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    with make_log(tmp_path, peak=None) as log:
        log.step(1, GOOD)
        log.step(2, GOOD | {"perplexity": math.inf})
    first, second = lines(tmp_path)
    assert first["device_memory_bytes"] == 5 << 30
    assert "mfu" not in second
    assert second["perplexity"] is None  # JSON has no infinity.
    assert "  5.0 GiB" in capsys.readouterr().out


# --- resuming ------------------------------------------------------------------------------------


def test_a_resumed_run_logs_each_step_once(tmp_path):
    with make_log(tmp_path) as log:
        for step in range(1, 7):
            log.step(step, GOOD)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # As a killed run leaves it.
    with make_log(tmp_path, start=6) as log:
        assert [record["step"] for record in log.history] == list(range(1, 7))
        for step in range(7, 11):
            log.step(step, {"loss": 3.0, "grad_norm": 1.0})
    assert [record["step"] for record in lines(tmp_path)] == list(range(1, 11))
    assert [record["loss"] for record in lines(tmp_path)] == [2.0] * 6 + [3.0] * 4
    assert log.history[6:] == lines(tmp_path)[6:]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_renames_the_results_of_earlier_ones(tmp_path, capsys):
    with make_log(tmp_path):
        pass  # An empty log is not renamed.
    for loss in (1.0, 2.0, 3.0):
        with make_log(tmp_path, tensorboard=True) as log:
            log.step(1, {"loss": loss, "grad_norm": 1.0})
        assert [record["loss"] for record in lines(tmp_path)] == [loss]
    for number in (1, 2):
        renamed = (tmp_path / f"metrics.{number}.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in renamed] == [number]
        assert list((tmp_path / f"tensorboard.{number}").iterdir())
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path} has an earlier run's results, renamed: metrics.jsonl -> "
        f"metrics.{number}.jsonl, tensorboard -> tensorboard.{number}"
        for number in (1, 2)
    ]
    for name in ("a.json", "b.1"):  # One number for all.
        (tmp_path / name).write_text("x")
    moved = run_log.set_aside(tmp_path, ["a.json", "b"])
    assert moved.endswith("renamed: a.json -> a.2.json")
    assert run_log.set_aside(tmp_path, ["a.json", "b"]) == ""


def test_lines_are_removed_atomically_and_full_disks_named(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": 1}\n{"step": 2, "loss": 2}\n{"st')
    assert run_log.cut_metrics(path, 5) == [{"step": 1}, {"step": 2, "loss": 2}]
    whole = '{"step": 1}\n{"step": 2, "loss": 2}\n'
    assert path.read_text() == whole

    def fail(*_):
        raise OSError(28, "no space left")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=f"no space left: '{path}'"):
            run_log.cut_metrics(path, 1)
    assert path.read_text() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    with make_log(tmp_path, 3) as log:
        assert log._file is not None
        log._file.close()
        log._file = open("/dev/full", "a")  # noqa: SIM115 - a full disk
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            log.step(1, GOOD)


def test_lines_that_cannot_be_read_do_not_stop_a_resume_and_are_kept(tmp_path, capsys):
    path, good = tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 2.0}\n'
    bad = [
        *(
            b'{"step": 2, "loss": "\xff"}',
            b"\xff\xfe",
            b"[]",
            b"3",
            b"{}",
            b"null",
            b'{"step": "2"}',
        ),
        *(b'{"step": 1e999}', b'{"step": NaN}', b'{"step": 2, "loss": NaN}', b'{"step": true}'),
        *(b'{"step": 2, "loss": []}', b'{"step": 2, "loss": 1e999}', b"[" * 100_000, b"1" * 5000),
    ]
    before = good + b"\n".join(bad) + b'\n\n{"step": 3}\n{"step": 4, "lo'
    path.write_bytes(before)
    with make_log(tmp_path, start=3) as log:
        assert log.history == [{"step": 1, "loss": 2.0}, {"step": 3}]
        log.step(4, GOOD)
    assert [record["step"] for record in lines(tmp_path)] == [1, 3, 4]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before
    assert capsys.readouterr().err == (
        f"{path}: {len(bad)} lines cannot be read; they are left out, and kept in metrics.1.jsonl\n"
    )
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"metrics.jsonl is no regular file: use another folder"):
        make_log(tmp_path, start=3)


def test_hostile_lines_are_kept_or_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    valid = {"step": 2, "loss": 2.0, "grad_norm": 1.0}
    cases = [*json_cases(valid, dict.fromkeys(valid, ())), *text_cases(json.dumps(valid).encode())]

    def results():
        for case in cases:
            path.write_bytes(b'{"step": 1, "loss": 3.0}\n' + case.content + b'\n{"step": 3}\n')
            yield check(case.name, partial(cut_metrics, path, 5))
            kept = [json.loads(line)["step"] for line in path.read_text().splitlines()]
            assert {1, 3} <= set(kept), case.name
        with special_files(path) as names:
            for name in names:
                rejected = name not in ("loop of links", "broken link")
                yield check(name, partial(cut_metrics, path, 5), (str(path),), rejected=rejected)

    check_all(results(), at_least=90)


# --- early ends ----------------------------------------------------------------------------------


def test_a_metric_that_is_not_finite_ends_the_run_and_names_the_last_checkpoint(tmp_path):
    with make_log(tmp_path) as log:
        log.step(1, GOOD)
        with pytest.raises(NonFinite) as error:
            log.step(2, {"loss": -math.inf, "grad_norm": math.nan})
    assert error.value.step == 2
    assert str(error.value) == (
        "step 2: loss is -inf and grad_norm is nan. There is no checkpoint to resume from. Start "
        "over with a lower learning rate, a longer warm-up or a smaller clip_norm; look at the "
        "batch of this step; if the run is in float16 or bfloat16, try float32. "
        "jax.config.update('jax_debug_nans', True) finds the operation"
    )
    assert [record["step"] for record in lines(tmp_path)] == [1]
    with (
        Checkpoints(tmp_path / "saved") as checkpoints,
        make_log(tmp_path, checkpoints=checkpoints) as log,
    ):
        checkpoints.save(0, {"x": jnp.zeros(8)})  # Still being written when the step fails.
        message = r"nan\. The last checkpoint is step 0 in \S*saved\. Resume from it with"
        with pytest.raises(NonFinite, match=message):
            log.step(1, GOOD | {"loss": math.nan})


# One process imports what a log needs, and forks another for each kind of stall.
STALLS = """
import ctypes, os, sys, time
from run_log import RunLog
out, *kinds = sys.argv[1:]
children = {}
for kind in kinds:
    child = os.fork()
    if child == 0:
        break
    children[child] = kind
else:
    for _ in kinds:
        child, status = os.wait()
        print(children[child], os.waitstatus_to_exitcode(status))
    sys.exit()
for fd, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{out}/{kind}.{name}", os.O_WRONLY | os.O_CREAT), fd)
options = {"tokens_per_step": 1, "flops_per_step": 1, "peak": None, "stall_timeout": 5}
with RunLog(f"{out}/{kind}", 9, **options) as log:
    time.sleep(6)  # Compiling, say.
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.0, "grad_norm": 1.0})
        time.sleep(1)
    print("stalls", flush=True)
    if kind == "left":
        log.__exit__()
        time.sleep(6)
        sys.exit(0)
    if kind == "lock":
        ctypes.PyDLL(None).sleep(600)  # Holds the interpreter's lock.
    time.sleep(600)
"""


def test_a_stalled_process_exits_with_its_stacks(tmp_path):
    """Also one whose other threads cannot run, but none that has closed its log."""
    examples = str(Path(run_log.__file__).parent)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{examples}:{ROOT}"}
    codes = {"sleep": "1", "lock": "1", "left": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", STALLS, str(tmp_path), *codes],
        stdout=subprocess.PIPE, text=True, env=environment, process_group=0,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    errors = {kind: (tmp_path / f"{kind}.err").read_text() for kind in codes}
    assert dict(line.split() for line in printed.splitlines()) == codes, errors
    for kind in ("sleep", "lock"):
        assert (tmp_path / f"{kind}.out").read_text().endswith("stalls\n")
        stacks = r"Timeout .*\n(.|\n)*most recent call first.*\n(.|\n)*<string>"
        assert re.search(stacks, errors[kind])


def test_a_log_writes_curves(tmp_path, monkeypatch):
    for start in (0, 2):
        with make_log(tmp_path, start=start, tensorboard=True) as log:
            for step in range(start + 1, 5):
                log.step(step, GOOD)
    files = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert sum(b"grad_norm" in path.read_bytes() for path in files) == len(files) > 0


def test_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    master, terminal = pty.openpty()
    monkeypatch.setattr("rich._console", None)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "150")):
        monkeypatch.setenv(name, value)
    with open(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with make_log(tmp_path, 3) as log:
            for step in (1, 2, 3):
                log.step(step, GOOD)
        monkeypatch.undo()
    shown = b""
    with contextlib.suppress(OSError):  # At the end: the terminal is closed.
        while part := os.read(master, 1 << 16):
            shown += part
    os.close(master)
    for text in (b"step 3/3", b"loss 2.0000", b"\x1b["):  # In color.
        assert text in shown


def test_mistakes_raise(tmp_path):
    for make, message in (
        (lambda: make_log(tmp_path, start=11), r"start is 11: it must be in 0 \.\.\. steps \(10\)"),
        (lambda: make_log(tmp_path, start=-1), "start is -1: it must be in 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with make_log(tmp_path, start=3) as log:
        log.step(4, GOOD)
        for step, metrics, message in (
            (4, GOOD, "step is 4: step 4 is already logged"),
            (5, {"loss": 1.0}, r"metrics has \['loss'\]: it needs loss and"),
        ):
            with pytest.raises(ValueError, match=message):
                log.step(step, metrics)


# --- profiles ------------------------------------------------------------------------------------


def test_a_profile_traces_the_requested_steps(tmp_path, capsys, monkeypatch):
    with Profile(tmp_path / "real", 1, skip=0) as profile, profile.step(1):
        jax.block_until_ready(jnp.ones(3) + 1)
    assert len(list(tmp_path.glob("real/plugins/profile/*/*.xplane.pb"))) == 1
    capsys.readouterr()
    traced: list[object] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append(str(folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stop"))

    def run(steps, count):
        with Profile(tmp_path / "trace", steps) as profile:
            for step in range(1, count + 1):
                with profile.step(step):
                    traced.append(step)
        return capsys.readouterr().out

    assert run(2, 5) == f"wrote a trace of 2 steps to {tmp_path / 'trace'}\n"
    assert traced == [1, str(tmp_path / "trace"), 2, 3, "stop", 4, 5]
    assert "wrote a trace of 1 steps" in run(5, 2)  # A run that ends early.
    assert run(0, 1) == ""
