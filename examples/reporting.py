"""What a training run shows: a progress bar or plain lines, a history file, a loss curve."""

from __future__ import annotations

import importlib.util
import json
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

RESULTS = ("metrics.jsonl", "summary.json", "loss.png")


def can_plot() -> bool:
    """Whether matplotlib is there for :func:`plot_loss`; it is no requirement of the package."""
    return importlib.util.find_spec("matplotlib") is not None


def check_out(out: Path) -> None:
    """Makes the folder for a run's results, and raises unless all of them can be written there.

    Raises:
      OSError: it cannot be made or written, or a result's name is a folder or a protected file.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass
    for name in RESULTS:
        path = out / name
        if path.exists():
            with path.open("ab"):
                pass


class Interrupt:
    """Turns the first Ctrl-C into a flag; a second one raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Reporter:
    """Shows every step and writes it to ``metrics.jsonl``.

    On a terminal it redraws one bar; otherwise it prints a line now and then.

    Args:
      out: folder of ``metrics.jsonl``.
      steps: how many there will be.
      tokens_per_step: of the whole batch, on all devices.
      flops_per_step: for MFU, model FLOPs, recomputed ones not counted.
      peak: FLOP/s of all devices together, or None.
    """

    def __init__(
        self,
        out: Path,
        steps: int,
        *,
        tokens_per_step: int,
        flops_per_step: float,
        peak: float | None,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self._file = (out / "metrics.jsonl").open("w")
        self._steps, self._tokens, self._flops, self._peak = (
            steps,
            tokens_per_step,
            flops_per_step,
            peak,
        )
        self._line_every = max(1, steps // 20)
        self._times: deque[float] = deque(maxlen=20)
        console = Console()
        self._bar = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=steps, text="compiling")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Takes the metrics of a finished step, counted from 1."""
        self._times.append(time.perf_counter())
        record: dict[str, Any] = {"step": step, **metrics}
        text = f"loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}"
        # The first step compiles: speed is measured between ends of steps, from the second on.
        if len(self._times) > 1:
            seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            record["tokens_per_second"] = self._tokens / seconds
            text += f"  {record['tokens_per_second']:,.0f} tokens/s"
            if self._peak is not None:
                record["mfu"] = self._flops / seconds / self._peak
                text += f"  MFU {record['mfu']:.1%}"
        self.history.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step == 1 or step % self._line_every == 0 or step == self._steps:
            print(f"step {step}/{self._steps}  {text}", flush=True)


def plot_loss(history: list[dict[str, Any]], path: Path, held_out: float | None = None) -> None:
    """Loss by step as PNG, with the held-out loss at its end where there is one.

    Without matplotlib there is no picture; ask :func:`can_plot` before a run.
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
