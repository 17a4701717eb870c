"""Results: saved atomically, loaded with errors, and plotted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from typing import cast

import pytest

from benchmarks import plot
from benchmarks.__main__ import main
from benchmarks.results import Results, Row, replacing

UNSUPPORTED = Row("causal, 32/8 heads", "Pallas example", note="NotImplementedError: no GQA")
WRONG = Row("full", "mosaic_sm80", error=0.5, note="wrong: dq; not timed")
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


def test_saved_results_are_loaded(tmp_path):
    path = tmp_path / "new" / "h200.json"
    RESULTS.save(path)
    assert files(path.parent) == ["h200.json"]
    loaded = Results.load(path)
    assert loaded.rows[3].both == 690
    # NaN is not equal to itself.
    assert repr(loaded) == repr(
        dataclasses.replace(RESULTS, rows=[*RESULTS.rows[:3], loaded.rows[3]])
    )
    record = json.loads(path.read_text(), parse_constant=pytest.fail)  # No NaN: it is not JSON.
    assert record["rows"][2]["forward"] is None
    fields = {"case", "peer", "forward", "both", "error", "note", "memory", "mhz", "watts"}
    assert set(record["rows"][0]) == fields
    infinite = dataclasses.replace(WRONG, error=math.inf)
    dataclasses.replace(RESULTS, rows=[infinite]).save(path)
    assert math.isnan(Results.load(path).rows[0].error)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("before")

    def savefig(self, file, **_):
        file.write_bytes(b"half")
        raise OSError("no space left")

    def interrupted():
        with replacing(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    monkeypatch.setattr(plot.figure_class(), "savefig", savefig)
    for write, error in (
        (interrupted, KeyboardInterrupt),
        (lambda: dataclasses.replace(RESULTS, device=cast(str, object())).save(path), TypeError),
        (lambda: plot.draw(RESULTS, path), OSError),
    ):
        with pytest.raises(error):
            write()
        assert path.read_text() == "before"
        assert files(tmp_path) == ["a.png"]


def drawn_by(results, tmp_path, monkeypatch):
    """The figure, instead of a file."""
    drawn = []
    monkeypatch.setattr(plot.figure_class(), "savefig", lambda self, *_, **__: drawn.append(self))
    with pytest.raises(FileNotFoundError):  # Nothing was written.
        plot.draw(results, tmp_path / "a.png")
    (figure,) = drawn
    (legend,) = figure.legends
    return figure, legend, [text.get_text() for text in legend.get_texts()]


def test_the_figure_has_all_rows(tmp_path, monkeypatch):
    RESULTS.save(tmp_path / "a.json")
    main(["plot", str(tmp_path / "a.json"), str(tmp_path / "a.png")])
    assert files(tmp_path) == ["a.json", "a.png"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure, _, names = drawn_by(RESULTS, tmp_path, monkeypatch)
    assert figure.get_suptitle().startswith("NVIDIA H200, bfloat16, jax 0.11.2\n")
    # Numbers as in a table, in the order of the rows; the last text is the matmul's.
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == [
        "595 / 539", "wrong", "n/a", "7.5 / 690", "full", "causal, 32/8 heads", "full",
        "matmul 685",
    ]  # fmt: skip
    assert names == ["others", "burst-jax"]
    widths = [bar.get_width() for bar in axes.patches if bar.get_width()]
    assert widths == [595.25, 539.0, 7.5, 690]


def test_bars_have_names_and_the_colours_of_their_kind(tmp_path, monkeypatch):
    """No space for missing bars, each case's name above its bars."""
    names = [f"peer {i}" for i in range(9)]
    rows = [Row("long", name, 100.0 + i, 50.0, 1e-3) for i, name in enumerate(names)]
    rows += [Row("short", "peer 3", 90.0, math.nan), Row("short", "Ulysses, cuDNN", 80.0, 30.0)]
    rows += [Row("short", "contiguous", 70.0, 20.0), Row("short", "one GPU", 60.0, 10.0)]
    results = dataclasses.replace(RESULTS, rows=rows, devices=4)
    figure, legend, kinds = drawn_by(results, tmp_path, monkeypatch)
    assert kinds == ["burst-jax", "others", "burst-jax, contiguous", "one GPU, no communication"]
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [row.peer for row in rows]
    heads = {text.get_text(): text.get_position()[1] for text in axes.texts}
    ticks = list(axes.get_yticks())
    assert heads["long"] < ticks[0] < ticks[8] < heads["short"] < ticks[9]
    assert ticks == sorted(ticks)
    assert "90 / -" in {text.get_text() for text in axes.texts}
    bars = [bar for bar in axes.patches if bar.get_width()]
    assert len(bars) == 2 * len(rows) - 1
    colours = [handle.get_facecolor() for handle in legend.legend_handles]
    assert len(set(colours)) == len(colours)
    # The last rows are of three other kinds than the first.
    assert [bar.get_facecolor()[:3] for bar in bars[-5::2]] == [c[:3] for c in colours[1:]]


BAD_FILES = (
    (None, "it does not exist"),
    ("{", "Expecting property name"),
    ("[]", "it is \\[\\]: it must be a JSON object"),
    ("[" * 5000, "it is nested deeper than 32 levels"),
    ("{}", "missing 'rows'"),
    ({"rows": []}, "it needs rows and a matmul above 0"),
    ({"matmul": None}, "it needs rows and a matmul above 0"),
    ({"matmul": "685"}, "not supported between instances of 'str' and 'int'"),
    ({"rows": [{"case": "full"}]}, "missing 1 required positional argument: 'peer'"),
)


def test_what_cannot_be_drawn(tmp_path, monkeypatch, capsys):
    """Files that hold no results, and no matplotlib."""
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
        with pytest.raises(SystemExit, match="2"):
            main(["plot", str(path), str(tmp_path / "a.png")])
        assert re.search(message, capsys.readouterr().err)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(good), str(tmp_path / "a.png")])
    assert "pip install 'burst-jax[examples]'" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
