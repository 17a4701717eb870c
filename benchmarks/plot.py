"""Draws the results that a benchmark saved by ``--json``; needs no GPU."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.results import Results, Row, replacing
from burst_jax.command_line import Unusable
from burst_jax.errors import optional

# Okabe and Ito's colour-blind safe palette. A bar has the colour of the first of these words in its
# name: warm colours for this project's. The third field is the legend's label.
_KINDS = (
    ("one GPU", "#999999", "one GPU, no communication"),
    ("every GPU", "#999999", "one GPU, no communication"),
    ("cuDNN", "#0072B2", "others"),
    ("Pallas example", "#0072B2", "others"),
    ("contiguous", "#E69F00", "burst-jax, contiguous"),
    ("", "#D55E00", "burst-jax"),
)
_GREY = "#767676"
# Inches: on a phone, where a figure is 360 pixels wide, its text has some 10 pixels.
_WIDTH, _BAR, _AROUND, _FONT = 4.8, 0.19, 1.5, 10
_DPI = 220


def figure_class() -> Any:
    """Matplotlib's ``Figure``, which needs no global state.

    Raises:
      ImportError: matplotlib is not installed.
    """
    return optional("matplotlib.figure", user="drawing", extra="examples").Figure


def png(text: str) -> Path:
    """A path from the command line, which must end in .png."""
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    return path


def draw(results: Results, path: Path) -> None:
    """Writes a PNG of bars grouped by case, each labelled like a table: forward / with backward.

    Raises:
      ImportError: matplotlib is not installed.
    """
    positions, cases, end = _bars(results)
    figure = figure_class()(figsize=(_WIDTH, _AROUND + _BAR * end), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for position, row in zip(positions, results.rows, strict=True):
        _bar(axes, position, row, _kind(row)[1])
    for at, case in cases:
        axes.text(0, at, case, fontsize=_FONT, fontweight="bold", va="center_baseline")
    axes.axvline(results.matmul, color=_GREY, linewidth=0.8, linestyle="--", zorder=0.5)
    axes.text(
        results.matmul, 1.0, f"matmul {results.matmul:.0f}", color=_GREY, fontsize=_FONT - 1,
        ha="center", va="bottom", transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set_xlabel("TFLOP/s" + " per GPU" * (results.devices > 1), fontsize=_FONT)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(left=False, labelsize=_FONT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    rates = [rate for row in results.rows for rate in (row.forward, row.both) if rate > 0]
    axes.set_xlim(0, 1.32 * max(results.matmul, *rates))  # Space for the longest bar's label.
    axes.set_yticks(positions, [row.peer for row in results.rows])
    axes.set_ylim(end - 0.5, -0.5)  # The first case is on top.
    legend = {label: colour for _, colour, label in map(_kind, results.rows)}
    handles = [axes.barh(0, 0, color=colour) for colour in legend.values()]
    figure.legend(
        handles, list(legend), loc="outside lower center", ncols=2, frameon=False, fontsize=_FONT
    )
    devices = f"{results.devices} x " * (results.devices > 1)
    figure.suptitle(
        f"{devices}{results.device}, {results.dtype}, jax {results.jax}\n"
        "forward (light) / forward + backward (dark)",
        fontsize=_FONT + 0.5,
    )
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _kind(row: Row) -> tuple[str, str, str]:
    """The word, colour and legend label of a row."""
    return next(kind for kind in _KINDS if kind[0] in row.peer)


def _bars(results: Results) -> tuple[list[float], list[tuple[float, str]], float]:
    """Bars grouped by case, in bar widths from the top, each case's name above its bars.

    Returns:
      ``(positions, cases, end)``: the position of each row's bar, ``(position, name)`` of each
      case, and the position below the last bar.
    """
    positions, cases, at, case = [], [], 0.0, None
    for row in results.rows:
        if row.case != case:
            at += 0.0 if case is None else 0.6
            case = row.case
            cases.append((at, case))
            at += 1.0
        positions.append(at)
        at += 1.0
    return positions, cases, at


def _bar(axes: Any, at: float, row: Row, colour: str) -> None:
    """Draws one row's rates and their numbers, or a word in place of missing rates."""
    style: dict[str, Any] = {"fontsize": _FONT - 1, "color": "#222222"}
    longest = 0.0
    if math.isnan(row.forward) and math.isnan(row.both):
        text = "wrong" if row.note.startswith("wrong") else "n/a"
        style["color"] = _GREY
    else:
        for rate, alpha in ((row.forward, 0.45), (row.both, 1.0)):
            if rate > 0:
                axes.barh(at, rate, 0.86, color=colour, alpha=alpha, linewidth=0)
                longest = max(longest, rate)
        text = f"{_number(row.forward)} / {_number(row.both)}"
    # On white, because the dashed line of the matmul's rate may be here.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.annotate(
        text, (longest, at), (4, 0), textcoords="offset points", va="center_baseline", bbox=box,
        **style,
    )  # fmt: skip


def _number(rate: float) -> str:
    if math.isnan(rate):
        return "-"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def add_command(commands: Any) -> None:
    """Adds ``plot`` to the command line."""
    parser = commands.add_parser("plot", help=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="FILE.json", help="saved by --json")
    parser.add_argument("png", type=png, metavar="OUT.png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Draws the figure."""
    try:
        draw(Results.load(args.results), args.png)
    except (ValueError, OSError, ImportError) as error:
        raise Unusable(str(error)) from error
