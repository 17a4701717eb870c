"""``benchmarks flash``: equal results are timed in turns, others and failures are a line."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import flash, turns
from benchmarks.__main__ import main
from benchmarks.results import Results

CASE = flash.Case("small", 1, 64, 4, 2, 16, True, documents=2)


# Read 1,500 MHz and 600 W throughout.
NO_CLOCK = SimpleNamespace(between=lambda *_: (1500.0, 600.0))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command on a CPU; returns the lines of the cases and the saved rows."""

    def run_cases(*cases, theirs=flash.ours):
        monkeypatch.setattr(flash, "require_gpus", lambda *_: None)
        monkeypatch.setattr(flash, "matmul_ceiling", lambda _: 800.0)
        monkeypatch.setattr(turns, "Clock", lambda: contextlib.nullcontext(NO_CLOCK))
        monkeypatch.setattr(turns, "CASES", cases)
        monkeypatch.setattr(flash, "flash_attention_4", theirs)
        for module in ("torch", "flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, module, SimpleNamespace())
        file = tmp_path / "flash.json"
        options = ["--seconds", "0.01", "--turns", "2", "--json", str(file)]
        main(["flash", *options, "--cases", *map(str, range(len(cases)))])
        return capsys.readouterr().out.splitlines()[2:], Results.load(file).rows

    return run_cases


def test_equal_results_are_timed_in_turns(run):
    wide = flash.Case("wide", 1, 64, 2, 2, 32, value_dim=16)
    lines, rows = run(CASE, wide)
    assert [line.split(":")[0] for line in lines if line[0] != " "] == ["small", "wide"]
    timed = [line for line in lines if line[0] == " "]
    assert len(timed) == 8
    assert all(line.count(" at 1500") == 2 for line in timed)
    assert len(rows) == 4
    assert all(row.error == 0 and row.forward > 0 and row.both > 0 for row in rows)
    assert wide.flops_with_gradients() / wide.flops() == (4 * 32 + 3 * 16) / (32 + 16)


def test_other_results_and_failures_are_not_timed(run):
    calls = itertools.count()

    def wrong(case, arrays):
        q, k, v, do = arrays
        if next(calls):
            raise RuntimeError("no such\nkernel")
        return flash.ours(case, (q, k, 1.1 * v, do))

    lines, rows = run(CASE, CASE, theirs=wrong)
    notes = ["wrong: out; not timed", "RuntimeError: no such kernel"]
    assert lines == [
        f"small: {'; '.join(2 * [f'burst-jax: {notes[0]}'])}",
        f"small: all: {notes[1]}",
    ]
    assert [row.note for row in rows] == [notes[0], *notes]


def test_turns_have_the_same_length_and_each_its_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])

    counts: Counter[str] = Counter()

    def call(name, seconds):
        def started():
            counts[name] += 1
            now[0] += seconds

        return started, lambda _: None

    clock: Any = SimpleNamespace(between=lambda start, end: (end - start, 7.0))
    lengths = {"a": 0.25, "b": 0.5, "long": 4.0}
    calls: dict[Any, Any] = {name: call(name, seconds) for name, seconds in lengths.items()}
    short = {"a": [(0.25, 1.0, 7.0)] * 3, "b": [(0.5, 1.0, 7.0)] * 3}
    for called in (False, True):
        counts.clear()
        measured = turns.in_turns(calls, turns=3, seconds=1.0, clock=clock, called=called)
        assert measured == short | {"long": [(4.0, 4.0, 7.0)] * 3}
        # Of a long call the one that its duration is found by is a turn.
        first = 0 if called else 1
        assert counts == {"a": 13 + first, "b": 7 + first, "long": 3 + first}


def test_the_clock_and_power_of_all_gpus_between_two_times(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    # The second GPU does not measure its power.
    lines = "1500, 600.5\\n1400, 500.5\\n1600, [N/A]\\n"
    tool.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/given; printf '{lines}'; exec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with turns.Clock(2) as clock:
        while len(clock._readings) < 3:
            pass
    assert "--id=0,1 " in (tmp_path / "given").read_text()
    mhz, watts = clock.between(-math.inf, math.inf)
    assert mhz == 1500
    assert math.isnan(watts)
    clock._readings.pop()
    assert clock.between(-math.inf, math.inf) == (1450, 550.5)
    assert all(map(math.isnan, clock.between(-2, -1)))


def test_missing_libraries(monkeypatch, capsys):
    monkeypatch.setattr(flash, "require_gpus", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="2"):
        main(["flash"])
    assert "benchmarks flash needs torch and flash-attn-4 (" in capsys.readouterr().err
