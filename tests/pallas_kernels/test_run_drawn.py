"""The runner of drawn calls: which programs run, what it says of failures, its exit status."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap

import pytest
import run_drawn

SCRIPT = textwrap.dedent(
    """
    import json, sys, time

    def answer(error, goes_on=True):
        print(json.dumps({"error": error, "goes_on": goes_on}), flush=True)

    family = sys.argv[2]
    answer("no GPU" if family == "mosaic_sm90" else "")
    for line in sys.stdin:
        seed = int(line)
        if seed == 2:
            time.sleep(600)
        if seed == 4:
            print("memory fault", file=sys.stderr)
            sys.exit(3)
        answer({6: "dq: 1 element\\nis wrong"}.get(seed, ""), seed != 8)
    """
)


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Workers that run SCRIPT."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(run_drawn, "__file__", str(script))
    monkeypatch.setattr(run_drawn, "_PATIENCE", 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_is_a_line_and_stops_no_other_program(scripted, workers):
    out = io.StringIO()
    result = run_drawn.run(("mosaic_sm80",), programs=10, workers=workers, out=out)
    lines = sorted(out.getvalue().splitlines())
    of_seed = "WRONG --family mosaic_sm80 --seed {} --programs 1: {}"
    assert lines == [
        of_seed.format(2, "it took more than 2 s"),
        of_seed.format(4, "the process ended with 3: memory fault"),
        of_seed.format(6, "dq: 1 element is wrong"),
    ]
    assert sorted(result.failures) == lines
    assert result.right == {"mosaic_sm80": 7}
    assert result.status == 1
    assert str(result).startswith("drawn calls: 7 right (mosaic_sm80 7), 3 wrong, ")


def test_a_family_that_does_not_start_is_a_failure(scripted):
    out = io.StringIO()
    result = run_drawn.run(programs=2, seed=20, workers=2, out=out)
    assert result.right == {"mosaic_sm80": 2}
    assert "the process did not start: no GPU" in out.getvalue()
    assert result.status == 1


def test_programs_that_are_late_are_counted(scripted):
    result = run_drawn.run(("mosaic_sm80",), programs=5, minutes=0, out=io.StringIO())
    assert str(result).startswith("drawn calls: 0 right (none), 0 wrong, 5 not started in time, ")
    assert result.status == 2
    right = run_drawn.run(("mosaic_sm80",), programs=1, seed=30, out=io.StringIO())
    assert right.status == 0


@pytest.mark.slow
def test_programs_of_interpreted_kernels():
    command = [sys.executable, run_drawn.__file__, "--family", "mosaic_sm80", "--programs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("drawn calls: 1 right (mosaic_sm80 1), 0 wrong, "), done
    assert done.returncode == 0
