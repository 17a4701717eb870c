"""What a training run leaves and shows: a line for each step, curves, progress, an early end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from burst_jax.errors import optional
from burst_jax.parallel.processes import is_main
from burst_jax.training.checkpoints import Checkpoints
from burst_jax.training.progress import Progress, duration
from burst_jax.training.stall import StallGuard

METRICS = "metrics.jsonl"
CURVES = "tensorboard"
# Steps over which the speed is averaged.
_WINDOW = 20
# Metrics that end the run when they are not finite.
_FINITE = ("loss", "grad_norm")


class NonFinite(ArithmeticError):
    """The loss or the norm of the gradient is infinite or not a number.

    Attributes:
      step: the step that it was found at.
    """

    def __init__(self, step: int, values: Mapping[str, float], checkpoints: Checkpoints | None):
        self.step = step
        found = " and ".join(f"{name} is {value}" for name, value in values.items())
        good = None
        if checkpoints is not None:
            with contextlib.suppress(Exception):  # This error matters more than a failed save.
                checkpoints.wait()
            good = checkpoints.latest()
        if checkpoints is None or good is None:
            remedy = "There is no checkpoint to go on from. Begin anew"
        else:
            remedy = (
                f"The last good checkpoint is step {good} in {checkpoints.folder}. Go on from it"
            )
        super().__init__(
            f"step {step}: {found}. {remedy} with a lower learning rate, a longer warm-up or a "
            "smaller clip_norm; look at the batch of this step; if the run is in float16 or "
            "bfloat16, try float32. jax.config.update('jax_debug_nans', True) finds the operation"
        )


class RunLog:
    """Shows every step of a run and keeps it: ``metrics.jsonl``, TensorBoard, progress.

    ``metrics.jsonl`` has one line a step. When a run goes on from step ``start``, the lines after
    it are cut off first, so that each step stands there once, however often the run was killed.
    A run that begins anew where another one was leaves that one's lines and curves: they are
    renamed to ``metrics.1.jsonl`` and ``tensorboard.1``, or the next free number, and a line on
    stderr says so.
    On a terminal one progress bar is redrawn (with ``rich``, if it is installed); elsewhere about
    twenty lines are printed in all.

    With several processes all make a RunLog and call :meth:`step`; process 0 writes and prints.

    Args:
      out: folder of ``metrics.jsonl``; it is made.
      steps: number of the last step.
      tokens_per_step: number of tokens in the batch, on all devices together.
      flops_per_step: FLOPs of a step on all devices together, recomputed ones not counted.
      peak: peak FLOP/s of all devices together; None shows no MFU.
      start: number of the last step that is done; 0 begins anew.
      tensorboard: whether to write curves for TensorBoard into ``out / "tensorboard"``.
      checkpoints: where a run that has failed can go on from, for :class:`NonFinite`.
      stall_timeout: seconds without a step after which the process is ended, see
        :class:`StallGuard`; None waits for ever.

    Attributes:
      history: on process 0, what ``metrics.jsonl`` has of each step, those before ``start`` too.

    Raises:
      ImportError: ``tensorboard`` without tensorboardX.
      ValueError: ``start`` is not in 0 ... ``steps``.
    """

    def __init__(
        self,
        out: str | Path,
        steps: int,
        *,
        tokens_per_step: int,
        flops_per_step: float,
        peak: float | None,
        start: int = 0,
        tensorboard: bool = False,
        checkpoints: Checkpoints | None = None,
        stall_timeout: float | None = None,
    ) -> None:
        if not 0 <= start <= steps:
            raise ValueError(f"start is {start}: it must be in 0 ... steps ({steps})")
        writer = None
        if tensorboard:
            needed = optional("tensorboardX", user="tensorboard=True", extra="tensorboard")
            writer = needed.SummaryWriter
        self._steps, self._last = steps, start
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_step, peak
        self._checkpoints = checkpoints
        self._guard = None if stall_timeout is None else StallGuard(stall_timeout)
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self.history: list[dict[str, Any]] = []
        self._file = self._curves = self._progress = None
        if not is_main():
            return
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        if start == 0:
            moved = set_aside(out, [METRICS, CURVES])
            if moved:
                print(moved, file=sys.stderr, flush=True)
        self.history = cut_metrics(out / METRICS, start)
        self._path = out / METRICS
        self._file = self._path.open("a")
        self._progress = Progress(steps, start)
        if writer is not None:
            # Curves, too, go on where the run does.
            self._curves = writer(str(out / CURVES), purge_step=start + 1)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        if self._guard is not None:
            self._guard.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.__exit__()
        for each in (self._progress, self._curves):
            if each is not None:
                each.close()
        if self._file is not None:
            # All lines are in the file, but one that has raised an error already.
            with contextlib.suppress(OSError):
                self._file.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows and writes the metrics of step ``step``, which is finished; steps count from 1.

        Args:
          step: its number, above the one before.
          metrics: numbers on the host, ``loss`` and ``grad_norm`` among them.

        Raises:
          NonFinite: ``loss`` or ``grad_norm`` is infinite or not a number; on all processes.
          OSError: there is no room for the line; going on from a checkpoint cuts off what is left
            of it.
          ValueError: the step has been logged; ``loss`` or ``grad_norm`` is missing.
        """
        if not set(_FINITE) <= set(metrics):
            raise ValueError(f"metrics has {sorted(metrics)}: it needs {' and '.join(_FINITE)}")
        if step <= self._last:
            raise ValueError(f"step is {step}: step {self._last} has been logged")
        self._last = step
        if self._guard is not None:
            self._guard.alive()
        wrong = {name: metrics[name] for name in _FINITE if not math.isfinite(metrics[name])}
        if wrong:
            raise NonFinite(step, wrong, self._checkpoints)
        if self._file is None:
            return
        record = {"step": step, **metrics, **self._speed()}
        self.history.append(record)
        # JSON has no infinity and no NaN.
        line = {k: v if math.isfinite(v) else None for k, v in record.items()}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise _named(error, self._path) from error
        if self._curves is not None:
            for name, value in record.items():
                if name != "step":
                    self._curves.add_scalar(name, value, step)
        if self._progress is not None:
            self._progress.update(step, self._text(record))

    def _speed(self) -> dict[str, float]:
        """What the clock and the devices say; nothing of speed before the second step."""
        self._times.append(time.perf_counter())
        measured: dict[str, float] = {}
        # The first step compiles, so speed is measured from its end on.
        if len(self._times) > 1:
            seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            measured["tokens_per_second"] = self._tokens / seconds
            if self._peak is not None:
                measured["mfu"] = self._flops / seconds / self._peak
        memory = device_memory()
        if memory is not None:
            measured["device_memory_bytes"] = memory
        return measured

    def _text(self, record: Mapping[str, float]) -> str:
        text = f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}"
        if "tokens_per_second" in record:
            text += f"  {record['tokens_per_second']:,.0f} tokens/s"
            left = (self._steps - record["step"]) * self._tokens / record["tokens_per_second"]
            if self._progress is not None and not self._progress.shows_time and left:
                text += f"  {duration(left)} left"
        if "mfu" in record:
            text += f"  MFU {record['mfu']:.1%}"
        if "device_memory_bytes" in record:
            text += f"  {record['device_memory_bytes'] / 2**30:.1f} GiB"
        return text


def device_memory() -> int | None:
    """The most bytes that any device of this process has held so far; None if it does not say."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each and "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def cut_metrics(path: Path, start: int) -> list[dict[str, Any]]:
    """Cuts the lines after step ``start`` off a ``metrics.jsonl``, and returns those that stay.

    A half line, which a killed run leaves, goes too.
    """
    records = read_metrics(path)
    kept = [records[step] for step in sorted(records) if step <= start]
    replace_file(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Step -> what a ``metrics.jsonl`` has of it; a half line is left out."""
    records: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                records[int(record["step"])] = record
    return records


def set_aside(folder: Path, names: Iterable[str]) -> str:
    """Renames what an earlier run has left, so that another one can write there.

    Args:
      folder: of both runs.
      names: of files and folders that the other run will write. Those that are there and not empty
        are renamed, all with the same number: ``metrics.jsonl`` to ``metrics.1.jsonl``.

    Returns:
      What was done, for people; "" if there was nothing.
    """
    names = list(names)

    def numbered(name: str, number: int) -> Path:
        path = folder / name
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    there = [
        name
        for name in names
        if (folder / name).is_dir() or ((folder / name).exists() and (folder / name).stat().st_size)
    ]
    number = 1
    while any(numbered(name, number).exists() for name in names):
        number += 1
    for name in there:
        (folder / name).rename(numbered(name, number))
    if not there:
        return ""
    moves = ", ".join(f"{name} is {numbered(name, number).name} now" for name in there)
    return f"{folder} has an earlier run's results: {moves}"


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: a run that is killed leaves the old file or the new one.

    Raises:
      OSError: it cannot be written, for want of room for example; the old file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            # Or else a machine that fails may keep the new name and lose what it names.
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    """The error with the file's name, which the operating system does not say of a write."""
    return OSError(error.errno, error.strerror, str(path))
