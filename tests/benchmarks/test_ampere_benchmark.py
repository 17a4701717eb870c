"""``benchmarks ampere``: rates, and the cost of modifiers and of a ring's carry."""

from __future__ import annotations

import interpreted_sm80
import pytest

from benchmarks import ampere
from benchmarks.__main__ import main

CASE = ampere.Case("small", 1, 96, 2, 1, 16, True)


@pytest.mark.slow
def test_rates_and_relative_times_are_printed(capsys, monkeypatch):
    unit = 1e-12 * CASE.flops()  # seconds at 1 TFLOP/s
    rates, modified, ring_step = [unit / 4, 3.5 * unit / 2], [2.0, 5.0], [3.0, 2.0, 6.0, 5.0]
    seconds = iter([*rates, 1.0, 4.0, *modified * 7, *ring_step * 2])
    monkeypatch.setattr(ampere, "require_gpus", lambda *_: None)
    monkeypatch.setattr(ampere, "CASES", (CASE, CASE))
    monkeypatch.setattr(ampere, "ALL_CASES", (CASE,))
    monkeypatch.setattr(ampere, "median_time", lambda _: next(seconds))
    monkeypatch.setattr(ampere, "torch_times", lambda _: (unit / 2, 3.5 * unit))
    with interpreted_sm80.interpreted():
        main(["ampere", "--cases", "0"])
    _, rate, _, *costs, _, first, second = capsys.readouterr().out.splitlines()
    assert rate == "small: 4 / 2; 2 / 1; 2.000 / 2.000"
    assert costs[:2] == ["nothing: 2.000 / 1.250", "sinks: 2.000 / 1.250"]
    assert len(costs) == 7
    assert first == second == "small: 1.500 / 1.200"
    assert next(seconds, None) is None


def test_a_failure_is_a_line(capsys, monkeypatch):
    def fails(_):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(ampere, "sm80_times", fails)
    monkeypatch.setattr(ampere, "torch_times", lambda _: None)
    ampere.print_rates([CASE])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "small: failed: out of memory",
        "small: -; -",
    ]
