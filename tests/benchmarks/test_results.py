"""Results: saved atomically, plotted, and the command line of ``benchmarks kernels``."""

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

UNSUPPORTED = Row("causal, 32/8 heads", "Pallas example", note="NotImplementedError: no GQA")
WRONG = Row("full", "triton", error=0.5, note="wrong: dq; not timed")
RESULTS = Results(
    "NVIDIA H200",
    "0.11.2",
    "bfloat16",
    685.0,
    rows=[
        Row("full", "cuDNN", 595.25, 539.0, 3e-3),
        WRONG,
        UNSUPPORTED,
        Row("full", "new", 7.5, 690, 1e-3),
    ],
)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_largest_error_decides():
    """NaN and infinity are wrong, in any order."""
    for errors, name, error in (
        ({"out": 1e-3, "dq": 2e-3}, "", 2e-3),
        ({"out": 1e-3, "dq": 2e-2}, "dq", 2e-2),
        ({"out": math.nan, "dq": 1e-3}, "out", math.inf),
        ({"out": 1e-3, "dq": math.nan}, "dq", math.inf),
        ({"out": math.inf, "dq": 1e-3}, "out", math.inf),
    ):
        row = Row("case", "peer")
        assert row.agrees(1e-2, {"out": 0.0}, errors) == (not name)
        assert row.note == (f"wrong: {name}; not timed" if name else "")
        assert row.error == error


def same(a, b):
    return repr(a) == repr(b)  # NaN is not equal to itself


def test_saved_results_are_loaded(tmp_path):
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


def test_an_infinite_error_is_saved_as_null(tmp_path):
    rows = [dataclasses.replace(WRONG, error=math.inf)]
    dataclasses.replace(RESULTS, rows=rows).save(tmp_path / "a.json")
    assert math.isnan(Results.load(tmp_path / "a.json").rows[0].error)


def test_a_failed_write_keeps_the_old_file(tmp_path):
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


def test_a_failed_figure_keeps_the_old_file(tmp_path, monkeypatch):
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
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    command.main()


def test_the_plot_command_draws_a_png(tmp_path, monkeypatch):
    RESULTS.save(tmp_path / "a.json")
    run_command(monkeypatch, "plot", tmp_path / "a.json", tmp_path / "a.png")
    drawn = (tmp_path / "a.png").read_bytes()
    assert files(tmp_path) == ["a.json", "a.png"]
    assert drawn.startswith(b"\x89PNG")
    width, height = (int.from_bytes(drawn[at : at + 4], "big") for at in (16, 20))
    assert width == 2200
    assert 400 < height < 1200
    assert 10_000 < len(drawn) < 500_000


def test_the_figure_has_all_rows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot.figure_class(), "savefig", lambda self, *_, **__: drawn.append(self))
    with pytest.raises(FileNotFoundError):  # Nothing was written.
        plot.draw(RESULTS, tmp_path / "a.png")
    (figure,) = drawn
    assert figure.get_suptitle() == "NVIDIA H200, bfloat16, jax 0.11.2"
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    # In the order of the rows; the last text is the matmul's.
    assert texts == [
        ["595", "wrong", "n/a", "7.5", "matmul 685"],
        ["539", "wrong", "n/a", "690", "matmul 685"],
    ]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["cuDNN", "triton", "Pallas example", "new"]
    colours = {handle.get_facecolor() for handle in legend.legend_handles}
    assert len(colours) == len(names)
    for axes in figure.axes:
        assert {bar.get_facecolor() for bar in axes.patches if bar.get_width()} <= colours


def test_many_bars_are_labelled(tmp_path, monkeypatch):
    """More peers than colours: a legend of the kinds, and no space for missing bars."""
    drawn = []
    monkeypatch.setattr(plot.figure_class(), "savefig", lambda self, *_, **__: drawn.append(self))
    names = [f"peer {i}" for i in range(9)]
    rows = [Row("long", name, 100.0 + i, 50.0, 1e-3) for i, name in enumerate(names)]
    rows += [Row("short", "peer 3", 90.0, 40.0, 1e-3), Row("short", "Ulysses, cuDNN", 80.0, 30.0)]
    with pytest.raises(FileNotFoundError):
        plot.draw(dataclasses.replace(RESULTS, rows=rows, devices=4), tmp_path / "a.png")
    (figure,) = drawn
    (legend,) = figure.legends
    kinds = [text.get_text() for text in legend.get_texts()]
    assert kinds == [
        "one GPU, no communication", "others, with cuDNN", "burst-jax, contiguous layout",
        "burst-jax",
    ]  # fmt: skip
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["long", *names, "short", "peer 3", "Ulysses, cuDNN"]
    positions = list(figure.axes[0].get_yticks())
    assert positions == sorted(positions)
    bars = [bar for bar in figure.axes[0].patches if bar.get_width()]
    assert len(bars) == len(rows)
    assert bars[-1].get_facecolor() != bars[-2].get_facecolor()


BAD_FILES = (
    (None, "No such file"),
    ("{", "Expecting property name"),
    ("[]", "'list' object is not a mapping|list indices"),
    ("{}", "missing 'rows'"),
    ({"rows": []}, "it needs rows and a matmul above 0"),
    ({"matmul": None}, "it needs rows and a matmul above 0"),
    ({"matmul": "685"}, "matmul is '685': it must be a number or null"),
    ({"device": 1}, "device is 1: it must be a string"),
    ({"devices": 1.5}, "devices is 1.5: it must be an integer"),
    ({"rows": [{"case": "full", "peer": "triton", "forward": 1.0}]}, "missing 'both'"),
)


def test_bad_result_files(tmp_path, monkeypatch):
    path, good = tmp_path / "bad.json", tmp_path / "good.json"
    RESULTS.save(good)
    for text, reason in BAD_FILES:
        if isinstance(text, dict):
            text = json.dumps({**json.loads(good.read_text()), **text})
        if text is not None:
            path.write_text(text)
        message = rf"bad\.json is not a result of a benchmark \(.*({reason}).*benchmarks kernels --"
        with pytest.raises(ValueError, match=message):
            Results.load(path)
        with pytest.raises(SystemExit, match=message):
            run_command(monkeypatch, "plot", path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_figure_must_be_a_png(tmp_path, monkeypatch, capsys):
    RESULTS.save(tmp_path / "a.json")
    with pytest.raises(SystemExit):
        run_command(monkeypatch, "plot", tmp_path / "a.png", tmp_path / "a.json")
    assert "a.json does not end in .png" in capsys.readouterr().err
    assert same(Results.load(tmp_path / "a.json").rows[1], WRONG)


def without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib(tmp_path, monkeypatch):
    without_matplotlib(monkeypatch)
    with pytest.raises(ImportError, match=r"pip install 'burst-jax\[examples\]'"):
        plot.draw(RESULTS, tmp_path / "a.png")
    RESULTS.save(tmp_path / "a.json")
    with pytest.raises(SystemExit, match=r"pip install 'burst-jax\[examples\]'"):
        run_command(monkeypatch, "plot", tmp_path / "a.json", tmp_path / "a.png")


# --- benchmarks kernels, with faked measurements -------------------------------------------------


def arguments(**given):
    defaults = {"dtype": "bfloat16", "cases": [0, 2], "implementations": None}
    return argparse.Namespace(**{**defaults, "json": None, "png": None, **given})


@pytest.fixture
def on_hopper(monkeypatch):
    """All implementations have 400 TFLOP/s; mosaic_sm90 does not support the third case."""
    timed = []

    def measure(inputs, peer, make, limit):
        if inputs.case is kernels.CASES[2] and peer == "mosaic_sm90":
            return Row(inputs.case.name, peer, note="NotImplementedError: no")
        return Row(inputs.case.name, peer, 400.0, 300.0, 1e-3)

    def local_times(inputs, name):
        timed.append((inputs.case.name, name))
        return {"forward": 1.0, "carried": 1.1}

    class KernelInputs:
        def __init__(self, case, dtype):
            self.case = case

    fakes = {
        "measure": measure, "local_times": local_times, "KernelInputs": KernelInputs,
        "matmul_ceiling": lambda dtype: 685.0, "compute_capability": lambda: 9.0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(kernels, name, fake)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    return timed


def test_results_are_saved_and_drawn(on_hopper, tmp_path, capsys):
    kernels.run(arguments(json=tmp_path / "a.json", png=tmp_path / "a.png"))
    rows = Results.load(tmp_path / "a.json").rows
    names = ["cuDNN", "Pallas example", "mosaic_sm90", "triton"]
    assert [(row.case, row.peer) for row in rows] == [
        (case, name) for case in ("full", "causal, 32/8 heads") for name in names
    ]
    # The carry is not timed for an unsupported case.
    assert on_hopper == [
        ("full", "mosaic_sm90"), ("full", "triton"), ("causal, 32/8 heads", "triton"),
    ]  # fmt: skip
    assert files(tmp_path) == ["a.json", "a.png"]
    printed = capsys.readouterr().out
    assert "a large matmul: 685 TFLOP/s" in printed
    assert "400 ( 58 %)" in printed
    assert "triton: with the carry 1.100 times as long" in printed


def test_finished_cases_survive_an_interrupt(on_hopper, tmp_path, monkeypatch):
    measure = kernels.measure

    def interrupted(inputs, *rest):
        if inputs.case is kernels.CASES[2]:
            raise KeyboardInterrupt
        return measure(inputs, *rest)

    monkeypatch.setattr(kernels, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.run(arguments(json=tmp_path / "a.json"))
    assert {row.case for row in Results.load(tmp_path / "a.json").rows} == {"full"}


def test_selected_implementations(on_hopper, tmp_path):
    kernels.run(arguments(json=tmp_path / "a.json", cases=[0], implementations=["triton"]))
    peers = [row.peer for row in Results.load(tmp_path / "a.json").rows]
    assert peers == ["cuDNN", "Pallas example", "triton"]


def test_a_missing_matplotlib_is_reported_before_measuring(on_hopper, tmp_path, monkeypatch):
    without_matplotlib(monkeypatch)
    monkeypatch.setattr(kernels, "matmul_ceiling", lambda dtype: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="drawing needs matplotlib"):
        kernels.run(arguments(png=tmp_path / "a.png"))


def test_implementations_by_gpu():
    for capability in (8.0, 8.9, 10.0):
        assert kernels.gpu_implementations(capability) == ["triton"]
    assert kernels.gpu_implementations(9.0) == ["mosaic_sm90", "triton"]
    for capability in (None, 7.5):
        with pytest.raises(NotImplementedError, match=r"mosaic_sm90: it needs .*; triton: it n"):
            kernels.gpu_implementations(capability)
