"""``benchmarks modifiers``: options that must not change the result are checked, all are timed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import modifiers
from benchmarks.__main__ import main
from burst_jax.command_line import Unusable

CASE = modifiers.Case("small", 1, 64, 4, 4, 16, is_causal=True)


@pytest.mark.slow  # two programs of each option
def test_ratios_of_all_options(monkeypatch, capsys):
    no_clock = SimpleNamespace(between=lambda *_: (1500.0, 600.0))
    monkeypatch.setattr(modifiers, "require_gpus", lambda *_: None)
    monkeypatch.setattr(modifiers, "Clock", lambda: contextlib.nullcontext(no_clock))
    monkeypatch.setattr(modifiers, "CASE", CASE)
    main(["modifiers", "--turns", "1", "--seconds", "0.01"])
    lines = capsys.readouterr().out.splitlines()[2:]
    names = [line.split(":")[0] for line in lines]
    assert names == ["plain", *modifiers.neutral(CASE), *modifiers.others(CASE)]
    assert lines[0].endswith("; 1.000 / 1.000")


def test_an_option_that_changes_the_result_is_an_error(monkeypatch):
    monkeypatch.setattr(modifiers, "neutral", lambda _: {"a cap": {"logits_soft_cap": 0.1}})
    no_clock: Any = SimpleNamespace()
    with pytest.raises(Unusable, match="a cap changes the result by"):
        modifiers.measure(CASE, turns=1, seconds=0.01, clock=no_clock)
