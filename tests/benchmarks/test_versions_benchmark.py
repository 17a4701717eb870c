"""``benchmarks versions``: installations in processes of their own, compared and timed in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import turns, versions
from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]
CASE = versions.Case("small", 1, 64, 4, 2, 16, True, documents=2)
NO_CLOCK: Any = SimpleNamespace(between=lambda *_: (1500.0, 600.0))


@pytest.fixture
def installation(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return versions.Installation.parse(f"{sys.executable}:{ROOT}")


@pytest.mark.slow  # two processes that compile
def test_processes_have_the_same_results_and_are_timed(installation, tmp_path):
    with versions._workers([installation, installation]) as workers:
        with pytest.raises(RuntimeError, match="needs an NVIDIA GPU; JAX runs on 'cpu' here"):
            workers[0].ask("device")
        sides = [versions._side(worker, "cpu", CASE, tmp_path) for worker in workers]
        rows = turns.compare(CASE, sides, turns=2, seconds=0.01, clock=NO_CLOCK)
    assert len(rows) == 2
    assert all(row.error == 0 and row.forward > 0 and row.both > 0 for row in rows)


def test_another_result_is_not_timed(tmp_path):
    def side(name, value):
        return turns.Side(name, lambda: None, lambda: [value] * 4, wait=lambda _: None)

    one = versions.np.ones(3, versions.np.float32)
    sides = [side("a", one), side("b", one), side("c", 2 * one)]
    rows = turns.compare(CASE, sides, turns=1, seconds=0.01, clock=NO_CLOCK)
    wrong = "wrong: out; not timed"
    assert [row.note for row in rows] == [wrong, "not timed: the results of c differ", wrong]
    assert turns._line(rows) == "small: " + "; ".join(f"{x.peer}: {x.note}" for x in rows)


def test_a_failed_call_is_in_the_next_answer_of_its_case():
    answers = io.StringIO()
    case = dataclasses.asdict(CASE)
    told = [["both", None], ["wait", None], ["both", None], ["case", case]]
    versions._work(io.StringIO("\n".join(map(json.dumps, told))), answers)
    failed, another = map(json.loads, answers.getvalue().splitlines())
    assert (failed, another) == ([None, "AssertionError: "], [None, ""])


def test_a_process_that_ended_is_named(installation, tmp_path):
    ends = tmp_path / "python"
    ends.write_text("#!/bin/sh\nexit 3\n")
    ends.chmod(0o755)
    worker = versions.Worker(versions.Installation(ends, ROOT))
    with (
        contextlib.closing(worker),
        pytest.raises(RuntimeError, match=f"{ends}: the process ended"),
    ):
        worker.ask("device")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([sys.executable], "benchmarks versions compares installations: name two or more"),
        (["nothing", sys.executable], "'nothing' is no program: name a Python interpreter"),
        ([f"{sys.executable}:/"], "/ has no benchmarks/versions.py: name a checkout"),
    ],
)
def test_unusable_installations(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["versions", *arguments])
    assert message in capsys.readouterr().err
