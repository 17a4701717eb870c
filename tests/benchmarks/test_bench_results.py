"""What the benchmark measured is kept whole or not at all, and drawn from its file anywhere."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import cast

import pytest

from benchmarks import __main__ as command
from benchmarks import kernels, plot
from benchmarks.results import Results, Row, replacing

CANNOT = Row("causal, 32/8 heads", "Pallas example", note="NotImplementedError: no grouped heads")
WRONG = Row("full", "triton", error=0.5, note="wrong: dq; not timed")
RESULTS = Results(
    "NVIDIA H200",
    "0.11.2",
    "bfloat16",
    685.0,
    rows=[
        Row("full", "cuDNN", 595.25, 539.0, 3e-3),
        WRONG,
        CANNOT,
        Row("full", "new", 7.5, 690, 1e-3),
    ],
)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def same(a, b):
    return repr(a) == repr(b)  # NaN is not equal to itself


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "new" / "h200.json"
    RESULTS.save(path)
    assert files(path.parent) == ["h200.json"]
    loaded = Results.load(path)
    assert same(loaded, dataclasses.replace(RESULTS, rows=[*RESULTS.rows[:3], loaded.rows[3]]))
    assert loaded.rows[3].both == 690
    record = json.loads(path.read_text(), parse_constant=pytest.fail)  # No NaN: it is not JSON.
    assert record["rows"][2]["forward"] is None
    assert set(record["rows"][0]) == {
        *("case", "peer", "forward", "both", "error", "note", "memory")
    }


def test_an_infinite_error_is_kept_as_null(tmp_path):
    rows = [dataclasses.replace(WRONG, error=math.inf)]
    dataclasses.replace(RESULTS, rows=rows).save(tmp_path / "a.json")
    assert math.isnan(Results.load(tmp_path / "a.json").rows[0].error)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")

    def interrupted():
        with replacing(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert files(tmp_path) == ["a.json"]
    with pytest.raises(TypeError):
        dataclasses.replace(RESULTS, device=cast(str, object())).save(path)
    assert path.read_text() == "before"
    assert files(tmp_path) == ["a.json"]


def test_a_figure_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"before")

    def savefig(self, file, **_):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(plot.figure_class(), "savefig", savefig)
    with pytest.raises(OSError, match="no space left"):
        plot.draw(RESULTS, path)
    assert path.read_bytes() == b"before"
    assert files(tmp_path) == ["a.png"]


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    command.main()


def test_the_plot_command_draws_a_png(tmp_path, monkeypatch):
    RESULTS.save(tmp_path / "a.json")
    run_command(monkeypatch, "plot", tmp_path / "a.json", tmp_path / "a.png")
    drawn = (tmp_path / "a.png").read_bytes()
    assert files(tmp_path) == ["a.json", "a.png"]
    assert drawn.startswith(b"\x89PNG")
    width, height = (int.from_bytes(drawn[at : at + 4], "big") for at in (16, 20))
    assert width == 1100
    assert 200 < height < 600
    assert 10_000 < len(drawn) < 500_000


def test_the_figure_says_everything(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot.figure_class(), "savefig", lambda self, *_, **__: drawn.append(self))
    with pytest.raises(FileNotFoundError):  # Nothing was written, so nothing takes its place.
        plot.draw(RESULTS, tmp_path / "a.png")
    (figure,) = drawn
    assert figure.get_suptitle() == "NVIDIA H200, bfloat16, jax 0.11.2"
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    # The figure's order is the rows'; the last text of a panel is its ceiling's.
    assert texts == [
        ["595", "wrong", "cannot", "7.5", "matmul 685"],
        ["539", "wrong", "cannot", "690", "matmul 685"],
    ]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["cuDNN", "triton", "Pallas example", "new"]
    colours = {handle.get_facecolor() for handle in legend.legend_handles}
    assert len(colours) == len(names)
    for axes in figure.axes:
        assert {bar.get_facecolor() for bar in axes.patches if bar.get_width()} <= colours


def test_many_bars_carry_their_names(tmp_path, monkeypatch):
    """More peers than colours: no legend, and no empty lines for what a case has not."""
    drawn = []
    monkeypatch.setattr(plot.figure_class(), "savefig", lambda self, *_, **__: drawn.append(self))
    names = [f"way {i}" for i in range(9)]
    rows = [Row("long", name, 100.0 + i, 50.0, 1e-3) for i, name in enumerate(names)]
    rows += [Row("short", "way 3", 90.0, 40.0, 1e-3), Row("short", "Ulysses, cuDNN", 80.0, 30.0)]
    with pytest.raises(FileNotFoundError):
        plot.draw(dataclasses.replace(RESULTS, rows=rows, devices=4), tmp_path / "a.png")
    (figure,) = drawn
    assert not figure.legends
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["long", *names, "short", "way 3", "Ulysses, cuDNN"]
    places = list(figure.axes[0].get_yticks())
    assert places == sorted(places)
    bars = [bar for bar in figure.axes[0].patches if bar.get_width()]
    assert len(bars) == len(rows)
    assert bars[-1].get_facecolor() != bars[-2].get_facecolor()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "'list' object is not a mapping|list indices"),
        ("{}", "no 'rows'"),
        ({"rows": []}, "it needs rows and a matmul above 0"),
        ({"matmul": None}, "it needs rows and a matmul above 0"),
        ({"matmul": "685"}, "matmul is '685': it must be a number or null"),
        ({"device": 1}, "device is 1: it must be a string"),
        ({"devices": 1.5}, "devices is 1.5: it must be an integer"),
        ({"rows": [{"case": "full", "peer": "triton", "forward": 1.0}]}, "no 'both'"),
    ],
)
def test_a_file_that_is_no_result_is_refused_with_its_name_and_a_remedy(
    text, reason, tmp_path, monkeypatch
):
    path, good = tmp_path / "bad.json", tmp_path / "good.json"
    if isinstance(text, dict):
        RESULTS.save(good)
        text = json.dumps({**json.loads(good.read_text()), **text})
    if text is not None:
        path.write_text(text)
    message = rf"bad\.json is no result of the benchmark \(.*({reason}).*bench kernels --json "
    with pytest.raises(ValueError, match=message):
        Results.load(path)
    with pytest.raises(SystemExit, match=message):
        run_command(monkeypatch, "plot", path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_figure_is_a_png_and_overwrites_nothing_else(tmp_path, monkeypatch, capsys):
    RESULTS.save(tmp_path / "a.json")
    with pytest.raises(SystemExit):
        run_command(monkeypatch, "plot", tmp_path / "a.png", tmp_path / "a.json")
    assert "a.json does not end in .png" in capsys.readouterr().err
    assert same(Results.load(tmp_path / "a.json").rows[1], WRONG)


def without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    without_matplotlib(monkeypatch)
    with pytest.raises(ImportError, match=r"pip install 'burst-jax\[examples\]'"):
        plot.draw(RESULTS, tmp_path / "a.png")
    RESULTS.save(tmp_path / "a.json")
    with pytest.raises(SystemExit, match=r"pip install 'burst-jax\[examples\]'"):
        run_command(monkeypatch, "plot", tmp_path / "a.json", tmp_path / "a.png")


# --- the benchmark itself, with nothing measured -------------------------------------------------


def arguments(**given):
    defaults = {"dtype": "bfloat16", "cases": [0, 2], "implementations": None}
    return argparse.Namespace(**{**defaults, "json": None, "png": None, **given})


@pytest.fixture
def on_hopper(monkeypatch):
    """Every implementation makes 400 TFLOP/s, but mosaic_sm90, which cannot do the third case."""
    timed = []

    def measure(problem, peer, make, limit):
        if problem.case is kernels.CASES[2] and peer == "mosaic_sm90":
            return Row(problem.case.name, peer, note="NotImplementedError: it cannot")
        return Row(problem.case.name, peer, 400.0, 300.0, 1e-3)

    def local_times(problem, name):
        timed.append((problem.case.name, name))
        return {"forward": 1.0, "carried": 1.1}

    class Problem:
        def __init__(self, case, dtype):
            self.case = case

    fakes = {
        "measure": measure, "local_times": local_times, "Problem": Problem,
        "matmul_ceiling": lambda dtype: 685.0, "compute_capability": lambda: 9.0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(kernels, name, fake)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    return timed


def test_a_run_is_kept_and_drawn(on_hopper, tmp_path, capsys):
    kernels.run(arguments(json=tmp_path / "a.json", png=tmp_path / "a.png"))
    rows = Results.load(tmp_path / "a.json").rows
    names = ["cuDNN", "Pallas example", "mosaic_sm90", "triton"]
    assert [(row.case, row.peer) for row in rows] == [
        (case, name) for case in ("full", "causal, 32/8 heads") for name in names
    ]
    # What cannot do a case is not asked what its carry costs there.
    assert on_hopper == [
        ("full", "mosaic_sm90"), ("full", "triton"), ("causal, 32/8 heads", "triton"),
    ]  # fmt: skip
    assert files(tmp_path) == ["a.json", "a.png"]
    printed = capsys.readouterr().out
    assert "a large matmul: 685 TFLOP/s" in printed
    assert "400 ( 58 %)" in printed
    assert "triton: with the carry 1.100 of the time" in printed


def test_what_was_measured_outlives_an_interrupt(on_hopper, tmp_path, monkeypatch):
    measure = kernels.measure

    def interrupted(problem, *rest):
        if problem.case is kernels.CASES[2]:
            raise KeyboardInterrupt
        return measure(problem, *rest)

    monkeypatch.setattr(kernels, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.run(arguments(json=tmp_path / "a.json"))
    assert {row.case for row in Results.load(tmp_path / "a.json").rows} == {"full"}


def test_named_implementations_are_taken_as_named(on_hopper, tmp_path):
    kernels.run(arguments(json=tmp_path / "a.json", cases=[0], implementations=["triton"]))
    peers = [row.peer for row in Results.load(tmp_path / "a.json").rows]
    assert peers == ["cuDNN", "Pallas example", "triton"]


def test_a_missing_matplotlib_is_said_before_anything_is_measured(on_hopper, tmp_path, monkeypatch):
    without_matplotlib(monkeypatch)
    monkeypatch.setattr(kernels, "matmul_ceiling", lambda dtype: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="drawing needs matplotlib"):
        kernels.run(arguments(png=tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (8.0, ["triton"]),
        (8.9, ["triton"]),
        (9.0, ["mosaic_sm90", "triton"]),
        (10.0, ["triton"]),
    ],
)
def test_the_implementations_say_where_they_run(capability, names):
    assert kernels.gpu_implementations(capability) == names


@pytest.mark.parametrize("capability", [None, 7.5])
def test_a_gpu_on_which_nothing_runs_is_told_why(capability):
    with pytest.raises(NotImplementedError, match=r"mosaic_sm90: it needs .*; triton: it needs"):
        kernels.gpu_implementations(capability)
