"""Output folder, Ctrl-C and loss curve of the training example."""

from __future__ import annotations

import importlib.util
import io
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
from run_log import replace_file

RESULTS = ("metrics.jsonl", "summary.json", "loss.png")


def can_plot() -> bool:
    """Whether matplotlib is installed, which :func:`plot_loss` needs."""
    return importlib.util.find_spec("matplotlib") is not None


def check_out(out: Path) -> None:
    """Creates the output folder; raises OSError unless all results can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        for name in RESULTS:
            path = out / name
            if path.exists():
                with path.open("ab"):
                    pass
    except OSError as error:
        raise OSError(
            f"--out is {out}, which cannot be written: {error.strerror}; name another folder"
        ) from error


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a flag; a second one raises KeyboardInterrupt.

    Cluster schedulers send SIGTERM some time before they kill a run.

    Args:
      alone: whether there is one process. Several would stop at different steps and wait for each
        other, so their signals keep the default behaviour.
    """

    def __init__(self, *, alone: bool) -> None:
        self.requested = False
        self._alone = alone

    def __enter__(self) -> Self:
        if self._alone:
            self._previous = {each: signal.signal(each, self._handle) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._alone:
            for each, previous in self._previous.items():
                signal.signal(each, previous)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def report_interrupt(history: list[dict[str, Any]], out: Path) -> None:
    """Prints what an interrupted run has reached, and draws its loss."""
    if not history:
        print("interrupted before the first step was complete; nothing is saved")
        return
    print(f"interrupted after step {history[-1]['step']}, loss {history[-1]['loss']:.4f}")
    plot_loss(history, out / "loss.png")


def plot_loss(history: list[dict[str, Any]], path: Path, held_out: float | None = None) -> None:
    """Draws the loss of each step, and the held-out loss if given, as a PNG.

    Does nothing without matplotlib, see :func:`can_plot`.
    """
    if not can_plot():
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = [record["step"] for record in history]
    losses = np.array([record["loss"] for record in history])
    axes.plot(steps, losses, linewidth=1, alpha=0.4, label="training batch")
    window = max(1, len(losses) // 25)
    if window > 1:
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], mean, label=f"mean of the last {window}")
    if held_out is not None:
        axes.plot(steps[-1:], [held_out], "o", label=f"held out: {held_out:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    pyplot.close(figure)
    replace_file(path, png.getvalue())
