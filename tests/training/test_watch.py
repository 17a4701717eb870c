"""What a run leaves behind and shows: its log, curves, progress, a trace, and early ends."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from burst_jax.training import Checkpoints, NonFinite, Profile, RunLog, device_memory, watch
from burst_jax.training.progress import duration

GOOD = {"loss": 2.0, "grad_norm": 1.0}


def make_log(out, steps=10, **options):
    given: dict[str, Any] = {"tokens_per_step": 100, "flops_per_step": 1e9, "peak": 1e12, **options}
    return RunLog(out, steps, **given)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Clock:
    """A clock that goes on by a second each time it is read."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_each_step_is_a_line_with_its_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "time", Clock())
    with make_log(tmp_path / "new" / "run", steps=100) as log:
        for step in range(1, 101):
            log.step(step, {"loss": 1 / step, "grad_norm": 1.0, "learning_rate": 0.1})
    first, second, *_, last = lines(tmp_path / "new" / "run")
    assert first == {"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1}
    assert second["tokens_per_second"] == last["tokens_per_second"] == 100.0
    assert second["mfu"] == pytest.approx(1e-3)
    assert log.history[1] == second
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 21  # The first, and then each fifth.
    assert said[0] == "step 1/100  loss 1.0000  grad norm 1.000"
    assert said[1] == (
        "step 5/100  loss 0.2000  grad norm 1.000  100 tokens/s  2 min left  MFU 0.1%"
    )
    assert "left" not in said[-1]


def test_without_a_peak_there_is_no_mfu(tmp_path):
    with make_log(tmp_path, peak=None) as log:
        log.step(1, GOOD)
        log.step(2, GOOD)
    assert "mfu" not in lines(tmp_path)[1]


def test_memory_is_that_of_the_fullest_device(tmp_path, monkeypatch, capsys):
    assert device_memory() is None  # CPU devices do not say.

    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return {"peak_bytes_in_use": self.peak}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(3 << 30), Device(5 << 30)])
    with make_log(tmp_path) as log:
        log.step(1, GOOD)
    assert lines(tmp_path)[0]["device_memory_bytes"] == 5 << 30
    assert "  5.0 GiB" in capsys.readouterr().out


# --- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_a_run_that_goes_on_has_each_step_once(tmp_path, start):
    with make_log(tmp_path) as log:
        for step in range(1, 7):
            log.step(step, GOOD)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # As the killed run left it.
    with make_log(tmp_path, start=start) as log:
        assert [record["step"] for record in log.history] == list(range(1, start + 1))
        for step in range(start + 1, 11):
            log.step(step, {"loss": 3.0, "grad_norm": 1.0})
    assert [record["step"] for record in lines(tmp_path)] == list(range(1, 11))
    assert [record["loss"] for record in lines(tmp_path)] == [2.0] * start + [3.0] * (10 - start)
    assert log.history[start:] == lines(tmp_path)[start:]
    earlier = [] if start else ["metrics.1.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*earlier, "metrics.jsonl"]


def test_a_run_that_begins_anew_leaves_the_earlier_ones(tmp_path, capsys):
    for loss in (1.0, 2.0, 3.0):
        with make_log(tmp_path, tensorboard=True) as log:
            log.step(1, {"loss": loss, "grad_norm": 1.0})
        assert [record["loss"] for record in lines(tmp_path)] == [loss]
    for number in (1, 2):
        kept = (tmp_path / f"metrics.{number}.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in kept] == [number]
        assert list((tmp_path / f"tensorboard.{number}").iterdir())
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path} has an earlier run's results: metrics.jsonl is metrics.{number}.jsonl now, "
        f"tensorboard is tensorboard.{number} now"
        for number in (1, 2)
    ]


def test_an_empty_log_is_not_kept(tmp_path, capsys):
    for _ in range(2):
        with make_log(tmp_path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert not capsys.readouterr().err


def test_what_is_renamed_together_has_one_number(tmp_path):
    for name in ("a.json", "b.1", "c.png"):
        (tmp_path / name).write_text("x")
    said = watch.set_aside(tmp_path, ["a.json", "b", "c.png"])
    assert said.endswith(": a.json is a.2.json now, c.png is c.2.png now")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.2.json", "b.1", "c.2.png"]
    assert watch.set_aside(tmp_path, ["a.json", "b", "c.png"]) == ""


def test_lines_that_a_kill_has_doubled_or_torn_stand_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": 1}\n{"step": 2, "loss": 2}\n[]\n3\n{}\n{"st')
    assert watch.cut_metrics(path, 5) == [{"step": 1}, {"step": 2, "loss": 2}]
    assert path.read_text() == '{"step": 1}\n{"step": 2, "loss": 2}\n'


def test_the_cut_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=f"no space left: '{path}'"):
        watch.cut_metrics(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


# --- early ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"loss": math.nan, "grad_norm": 1.0}, "loss is nan"),
        ({"loss": 1.0, "grad_norm": math.inf}, "grad_norm is inf"),
        ({"loss": -math.inf, "grad_norm": math.nan}, "loss is -inf and grad_norm is nan"),
    ],
)
def test_what_is_not_finite_ends_the_run(tmp_path, metrics, found):
    with make_log(tmp_path) as log:
        log.step(1, GOOD)
        with pytest.raises(NonFinite) as error:
            log.step(2, metrics)
    assert error.value.step == 2
    assert str(error.value) == (
        f"step 2: {found}. There is no checkpoint to go on from. Begin anew with a lower learning "
        "rate, a longer warm-up or a smaller clip_norm; look at the batch of this step; if the run "
        "is in float16 or bfloat16, try float32. jax.config.update('jax_debug_nans', True) finds "
        "the operation"
    )
    assert [record["step"] for record in lines(tmp_path)] == [1]


def test_the_last_good_checkpoint_is_named_when_it_is_complete(tmp_path):
    with (
        Checkpoints(tmp_path / "saved") as checkpoints,
        make_log(tmp_path, checkpoints=checkpoints) as log,
    ):
        log.step(1, GOOD)
        checkpoints.save(1, {"x": jnp.zeros(8)})  # Is being written while the next step fails.
        with pytest.raises(NonFinite, match=r"checkpoint is step 1 in \S*saved\. Go on"):
            log.step(2, {"loss": math.nan, "grad_norm": math.nan})


def test_other_numbers_may_be_infinite(tmp_path):
    """JSON has no word for them."""
    with make_log(tmp_path) as log:
        log.step(1, GOOD | {"perplexity": math.inf})
    assert lines(tmp_path)[0]["perplexity"] is None


STALL = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
from burst_jax.training import StallGuard
def load_a_batch():
    time.sleep(60)
with StallGuard(1) as guard:
    time.sleep(1.5)  # Compiling, say.
    for _ in range(4):
        time.sleep(0.5)
        guard.alive()
    print("four steps")
    load_a_batch()
"""


@pytest.mark.slow
def test_a_run_that_stalls_ends_and_says_where():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", STALL], capture_output=True, text=True, timeout=50
    )
    assert (run.returncode, run.stdout) == (1, "four steps\n")
    assert re.search(
        r"process 0 of 1 on \S+ ends: no step has ended for 1 s. Its threads are at:", run.stderr
    )
    assert "in load_a_batch" in run.stderr


def test_a_log_guards_its_run_until_it_ends(tmp_path):
    with make_log(tmp_path, stall_timeout=100) as log:
        log.step(1, GOOD)
        assert any(thread.name == "stall_guard" for thread in threading.enumerate())
    assert not any(thread.name == "stall_guard" for thread in threading.enumerate())


# --- curves and a trace --------------------------------------------------------------------------


def test_curves_for_tensorboard(tmp_path):
    for start in (0, 2):
        with make_log(tmp_path, start=start, tensorboard=True) as log:
            for step in range(start + 1, 5):
                log.step(step, GOOD)
    files = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert sum(b"grad_norm" in path.read_bytes() for path in files) == len(files) > 0


def test_tensorboard_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'burst-jax\[tensorboard\]'"):
        make_log(tmp_path, tensorboard=True)


def test_a_trace_of_the_steps_that_were_asked_for(tmp_path, capsys, monkeypatch):
    traced: list[object] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append(str(folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stop"))
    with Profile(tmp_path / "trace", 2) as profile:
        for step in range(1, 6):
            with profile.step(step):
                traced.append(step)
    assert traced == [1, str(tmp_path / "trace"), 2, 3, "stop", 4, 5]
    assert capsys.readouterr().out == f"a trace of 2 steps is in {tmp_path / 'trace'}\n"


def test_a_run_that_ends_early_leaves_its_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    with Profile(tmp_path, 5) as profile:
        for step in (1, 2):
            with profile.step(step):
                pass
    assert "a trace of 1 steps is in" in capsys.readouterr().out
    with Profile(tmp_path, 0) as profile, profile.step(1):
        pass
    assert capsys.readouterr().out == ""


# --- what is shown -------------------------------------------------------------------------------

BAR = """
import jax
jax.config.update("jax_platforms", "cpu")
from burst_jax.training import RunLog
with RunLog(".", 3, tokens_per_step=8, flops_per_step=1.0, peak=None) as log:
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.5, "grad_norm": 1.0})
"""


@pytest.mark.slow
def test_a_terminal_gets_a_bar(tmp_path):
    master, terminal = pty.openpty()
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", BAR],
        stdout=terminal,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "150"},
    )
    os.close(terminal)
    assert run.returncode == 0, run.stderr
    shown = os.read(master, 1 << 16).decode()
    assert "step 3/3" in shown
    assert "loss 1.5000" in shown
    assert "\x1b[" in shown  # Redrawn, in colours.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (90, "2 min"), (3600, "1 h 0 min"), (187300, "2 d 4 h")],
)
def test_times_to_read(seconds, text):
    assert duration(seconds) == text


MISTAKES = {
    "start": ({"start": 11}, r"start is 11: it must be in 0 \.\.\. steps \(10\)"),
    "stall": ({"stall_timeout": 0}, "timeout is 0: it must be positive"),
    "negative": ({"start": -1}, "start is -1: it must be in 0"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_do(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_log(tmp_path, **options)


def test_a_step_is_logged_once(tmp_path):
    with make_log(tmp_path, start=3) as log:
        with pytest.raises(ValueError, match="step is 3: step 3 has been logged"):
            log.step(3, GOOD)
        with pytest.raises(ValueError, match=r"metrics has \['loss'\]: it needs loss and"):
            log.step(4, {"loss": 1.0})
        log.step(4, GOOD)
        with pytest.raises(ValueError, match="step is 4: step 4 has been logged"):
            log.step(4, GOOD)


def test_a_trace_of_less_than_nothing(tmp_path):
    with pytest.raises(ValueError, match="steps is -1: it must be at least 0"):
        Profile(tmp_path, -1)
