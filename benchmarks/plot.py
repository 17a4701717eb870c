"""Draws the results that a benchmark saved by ``--json``; needs no GPU."""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.results import Results, Row, replacing
from burst_jax.command_line import Unusable
from burst_jax.errors import optional

# Okabe and Ito's colour-blind safe palette: blue for other attention, warm colours for this
# project's.
_COLOURS = {
    "cuDNN": "#0072B2",
    "Pallas example": "#56B4E9",
    "mosaic_sm90": "#D55E00",
    "mosaic_sm80": "#D55E00",
}
_SPARE = ("#009E73", "#CC79A7", "#F0E442", "#000000")
# With more names than colours, each bar is labelled with its name, and has the colour of the first
# of these words in it. The third field is the legend's label.
_KINDS = (
    ("one GPU", "#999999", "one GPU, no communication"),
    ("every GPU", "#999999", "one GPU, no communication"),
    ("cuDNN", "#0072B2", "others, with cuDNN"),
    ("contiguous", "#56B4E9", "burst-jax, contiguous layout"),
    ("", "#D55E00", "burst-jax"),
)
_GREY = "#767676"
_WIDTH, _DPI = 11, 200  # inches, dots per inch: twice the width of a page


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
    """Writes a PNG of bars grouped by case: forward left, forward and backward right.

    Raises:
      ImportError: matplotlib is not installed.
    """
    peers = list(dict.fromkeys(row.peer for row in results.rows))
    many = len(peers) > len(_COLOURS) + len(_SPARE)
    positions, ticks, end = _labelled_bars(results) if many else _grouped_bars(results, peers)
    bar, around = 0.19, 1.5  # inches
    figure = figure_class()(figsize=(_WIDTH, around + bar * end), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    spare = iter(_SPARE)
    colours = {
        peer: next(colour for word, colour, _ in _KINDS if word in peer)
        if many
        else _COLOURS.get(peer) or next(spare)
        for peer in peers
    }
    for axes, (title, rate_of) in zip(
        panels,
        (("forward", lambda row: row.forward), ("forward + backward", lambda row: row.both)),
        strict=True,
    ):
        axes.set_title(title, loc="left", fontsize=11)
        for position, row in zip(positions, results.rows, strict=True):
            _bar(axes, position, row, rate_of(row), colours)
        axes.axvline(results.matmul, color=_GREY, linewidth=0.8, linestyle="--", zorder=0.5)
        axes.text(
            results.matmul, 1.0, f"matmul {results.matmul:.0f}", color=_GREY, fontsize=9,
            ha="center", va="bottom", transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.set_xlabel("TFLOP/s" + " per GPU" * (results.devices > 1))
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    rates = [rate for row in results.rows for rate in (row.forward, row.both) if rate > 0]
    panels[0].set_xlim(0, 1.13 * max(results.matmul, *rates))  # Space for the longest bar's label.
    panels[0].set_yticks(
        [position for position, _ in ticks], [text for _, text in ticks], fontsize=10
    )
    panels[0].set_ylim(end - 0.5, -0.5)  # The first case is on top.
    if many:
        for label in panels[0].get_yticklabels():
            label.set(fontweight="bold" if label.get_text() not in peers else "normal", fontsize=9)
    legend = {label: colour for _, colour, label in _KINDS} if many else colours
    handles = [panels[0].barh(0, 0, color=colour) for colour in legend.values()]
    figure.legend(
        handles, list(legend), loc="outside lower center", ncols=len(legend), frameon=False
    )
    devices = f"{results.devices} x " * (results.devices > 1)
    figure.suptitle(f"{devices}{results.device}, {results.dtype}, jax {results.jax}", fontsize=12)
    with replacing(path) as file:
        figure.savefig(file, format="png")


_Bars = tuple[list[float], list[tuple[float, str]], float]


def _grouped_bars(results: Results, peers: list[str]) -> _Bars:
    """Bars grouped by case, in bar widths from the top.

    Returns:
      ``(positions, ticks, end)``: the position of each row's bar, ``(position, label)`` of each
      case, and the position below the last bar.
    """
    cases = list(dict.fromkeys(row.case for row in results.rows))
    group = len(peers) + 1
    positions = [
        float(cases.index(row.case) * group + peers.index(row.peer)) for row in results.rows
    ]
    # No-break spaces, so that textwrap breaks labels after commas only.
    parts = (case.replace(" ", "\xa0").replace(",\xa0", ", ") for case in cases)
    labels = [textwrap.fill(case, 20, break_long_words=False) for case in parts]
    middle = (len(peers) - 1) / 2
    return (
        positions,
        [(i * group + middle, text) for i, text in enumerate(labels)],
        len(cases) * group,
    )


def _labelled_bars(results: Results) -> _Bars:
    """As :func:`_grouped_bars`, with a label per bar, and each case's label above its bars."""
    positions, ticks, at, case = [], [], 0.0, None
    for row in results.rows:
        if row.case != case:
            at += 0.0 if case is None else 0.8
            case = row.case
            ticks.append((at, case))
            at += 1.0
        positions.append(at)
        ticks.append((at, row.peer))
        at += 1.0
    return positions, ticks, at


def _bar(axes: Any, at: float, row: Row, rate: float, colours: dict) -> None:
    """Draws one bar and its rate, or a word in place of a missing rate."""
    style: dict[str, Any] = {"fontsize": 8.5, "color": "#222222"}
    if math.isnan(rate):
        rate, text = 0.0, "wrong" if row.note.startswith("wrong") else "n/a"
        style = {"fontsize": 8, "color": _GREY}
    else:
        axes.barh(at, rate, 0.92, color=colours[row.peer])
        text = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
    # On white, because the dashed line of the matmul's rate may be here.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.annotate(
        text, (rate, at), (4, 0), textcoords="offset points", va="center_baseline", bbox=box,
        **style,
    )  # fmt: skip


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
