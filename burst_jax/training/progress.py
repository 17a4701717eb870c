"""The progress of a run: one bar that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

# So many lines a run prints in all, where there is no terminal.
_LINES = 20


class Progress:
    """Shows how far a run is.

    Args:
      steps: number of the last step.
      start: number of the last step that is done.

    Attributes:
      shows_time: whether it says by itself how long the run has taken and will take.
    """

    def __init__(self, steps: int, start: int) -> None:
        self._steps, self._first = steps, start + 1
        self._every = max(1, steps // _LINES)
        self._bar, self._task = _make_bar(steps, start)
        self.shows_time = self._bar is not None

    def start(self) -> None:
        """Draws the bar."""
        if self._bar is not None:
            self._bar.start()

    def update(self, step: int, text: str) -> None:
        """Shows ``text`` of step ``step``, which is finished."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step in (self._first, self._steps) or step % self._every == 0:
            print(f"step {step}/{self._steps}  {text}", flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def _make_bar(steps: int, start: int) -> tuple[Any, Any]:
    """A bar of rich and its task, or None for both: without a terminal, or without rich."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return None, None
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("step {task.completed}/{task.total}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[text]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    return bar, bar.add_task("train", total=steps, completed=start, text="compiling")


def duration(seconds: float) -> str:
    """A time to read: ``40 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
