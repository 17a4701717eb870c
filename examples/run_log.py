"""Log of a training run: metrics.jsonl, TensorBoard, progress, an early end on NaN or a stall."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import jax

from burst_jax.parallel.processes import by_first_process
from burst_jax.training import Checkpoints, check_same, is_main

METRICS = "metrics.jsonl"
CURVES = "tensorboard"
# Steps over which the speed is averaged.
_WINDOW = 20
# Metrics that end the run when they are not finite.
_FINITE = ("loss", "grad_norm")
# Number of progress lines per run without a terminal.
_LINES = 20
# Seconds: the longest timer that faulthandler supports on all platforms.
_LONGEST = 4e6


class NonFinite(ArithmeticError):
    """The loss, the gradient norm or the norm of the weights is infinite or NaN.

    Attributes:
      step: the step at which it was found.
    """

    def __init__(self, step: int, values: Mapping[str, float], checkpoints: Checkpoints | None):
        self.step = step
        found = " and ".join(f"{name} is {value}" for name, value in values.items())
        latest = None
        if checkpoints is not None:
            with contextlib.suppress(Exception):  # This error matters more than a failed save.
                checkpoints.wait()
            latest = checkpoints.latest()
        if checkpoints is None or latest is None:
            remedy = "There is no checkpoint to resume from. Start over"
        else:
            remedy = f"The last checkpoint is step {latest} in {checkpoints.folder}. Resume from it"
        super().__init__(
            f"step {step}: {found}. {remedy} with a lower learning rate, a longer warm-up or a "
            "smaller clip_norm; look at the batch of this step; if the run is in float16 or "
            "bfloat16, try float32. jax.config.update('jax_debug_nans', True) finds the operation"
        )


class RunLog:
    """Logs every step of a run: ``metrics.jsonl``, TensorBoard, progress.

    ``metrics.jsonl`` has one line per step. When a run resumes from step ``start``, later lines are
    removed first, so each step appears once however often the run was killed. A new run in the
    folder of an earlier one renames that one's lines and curves to ``metrics.1.jsonl`` and
    ``tensorboard.1``, or the next free number, and reports it on stderr. On a terminal a progress
    bar is drawn (with ``rich``, if installed); otherwise about twenty lines are printed.

    Lines that cannot be read, like those with an invalid byte, are reported, and the file with them
    is kept under such a name. Two runs must not log into one folder at a time: take the run's
    :meth:`Checkpoints.lock` first.

    Throughput and MFU are those of the last 20 steps, without the first one, which compiles, and
    without what :meth:`untimed` encloses.

    With several processes all create a RunLog and call :meth:`step`; process 0 writes and prints.

    Args:
      out: folder of ``metrics.jsonl``; it is created.
      steps: number of the last step.
      tokens_per_step: number of tokens in the global batch.
      flops_per_step: FLOPs of a step on all devices, without rematerialization.
      peak: peak FLOP/s of all devices together; None shows no MFU.
      start: last completed step; 0 starts a new run.
      tensorboard: whether to write curves for TensorBoard into ``out / "tensorboard"``.
      checkpoints: the run's checkpoints, which :class:`NonFinite` names.
      stall_timeout: seconds after a step, without another, after which ``faulthandler`` prints the
        stack of each thread and ends the process: JAX detects a dead process, but not one that
        hangs on a disk, a lock or a GPU. It must exceed the longest step, evaluation and
        checkpoint; None waits forever.

    Attributes:
      history: on process 0, the records of ``metrics.jsonl``, including those before ``start``.

    Raises:
      ImportError: ``tensorboard`` without tensorboardX.
      ValueError: ``start`` is not in 0 ... ``steps``; ``steps``, ``start`` or ``tokens_per_step``
        differ between processes.
      OSError: ``out`` cannot be written to.
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
            from tensorboardX import SummaryWriter as writer
        self._steps, self._last = steps, start
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_step, peak
        self._checkpoints = checkpoints
        self._stall_timeout = stall_timeout
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._untimed = 0.0
        self.history: list[dict[str, Any]] = []
        self._first, self._every = start + 1, max(1, steps // _LINES)
        self._curves = self._bar = None
        self._file: TextIO | None = None
        self._path = Path(out) / METRICS
        check_same({"steps": steps, "start": start, "tokens_per_step": tokens_per_step})
        by_first_process(self._open)
        if is_main():
            self._bar = _make_bar(steps, start)
            if writer is not None:
                self._curves = writer(str(Path(out) / CURVES), purge_step=start + 1)

    def _open(self) -> None:
        out, start = self._path.parent, self._last
        out.mkdir(parents=True, exist_ok=True)
        if start == 0 and (moved := set_aside(out, [METRICS, CURVES])):
            print(moved, file=sys.stderr, flush=True)
        self.history = cut_metrics(self._path, start)
        self._file = self._path.open("a")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stall_timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._bar is not None:
            self._bar.stop()
        if self._curves is not None:
            self._curves.close()
        if self._file is not None:
            # Every line has been flushed, except one that already raised an error.
            with contextlib.suppress(OSError):
                self._file.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of the completed step ``step``; steps count from 1.

        Args:
          step: its number, greater than the previous one.
          metrics: numbers on the host, including ``loss`` and ``grad_norm``.

        Raises:
          NonFinite: ``loss`` or ``grad_norm`` is infinite or NaN; on all processes.
          OSError: the disk is full; resuming from a checkpoint removes a partial line.
          ValueError: the step is already logged; ``loss`` or ``grad_norm`` is missing.
        """
        if not set(_FINITE) <= set(metrics):
            raise ValueError(f"metrics has {sorted(metrics)}: it needs {' and '.join(_FINITE)}")
        if step <= self._last:
            raise ValueError(f"step is {step}: step {self._last} is already logged")
        self._last = step
        if self._stall_timeout is not None:
            # Its thread needs no interpreter lock, which a thread that hangs may hold. The number
            # is standard error's descriptor: sys.stderr may be an object without one.
            timeout = min(self._stall_timeout, _LONGEST)
            faulthandler.dump_traceback_later(timeout, exit=True, file=2)
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
            raise _with_path(error, self._path) from error
        if self._curves is not None:
            for name, value in record.items():
                if name != "step":
                    self._curves.add_scalar(name, value, step)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, text=self._text(record))
        elif step in (self._first, self._steps) or step % self._every == 0:
            print(f"step {step}/{self._steps}  {self._text(record)}", flush=True)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Encloses what is no part of a step, and leaves its time out of throughput and MFU. ::

            with log.untimed():
                checkpoints.save(step, state)

        Checkpoints, evaluations and compilations are such; one must not enclose another.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self._untimed += time.perf_counter() - start

    def _speed(self) -> dict[str, float]:
        """Throughput, MFU and memory; throughput from the second step on."""
        self._times.append(time.perf_counter() - self._untimed)
        measured: dict[str, float] = {}
        # The first step compiles, so the clock starts when it ends.
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
            if self._bar is None and left:
                text += f"  {duration(left)} left"
        if "mfu" in record:
            text += f"  MFU {record['mfu']:.1%}"
        if "share_of_ideal" in record:
            text += f"  attention {record['share_of_ideal']:.0%} of ideal"
        if "device_memory_bytes" in record:
            text += f"  {record['device_memory_bytes'] / 2**30:.1f} GiB"
        return text


def device_memory() -> int | None:
    """Peak bytes in use over this process' devices; None where devices do not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each and "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def _make_bar(steps: int, start: int) -> Any:
    """A rich progress bar with one task, or None without a terminal or without rich."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("step {task.completed}/{task.total}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[text]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar.add_task("train", total=steps, completed=start, text="compiling")
    return bar


def duration(seconds: float) -> str:
    """Human-readable time: ``40 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def cut_metrics(path: Path, start: int) -> list[dict[str, Any]]:
    """Removes the lines after step ``start`` of a ``metrics.jsonl`` and returns the others.

    A partial line, left by a killed run, is removed too. If other lines cannot be read, a copy of
    the file is kept, and reported on stderr.
    """
    records, unread = _parse_metrics(path)
    if unread:
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        kept.write_bytes(path.read_bytes())
        print(
            f"{path}: {unread} lines cannot be read; they are left out, and kept in {kept.name}",
            file=sys.stderr,
            flush=True,
        )
    remaining = [records[step] for step in sorted(records) if step <= start]
    replace_file(path, "".join(json.dumps(record) + "\n" for record in remaining))
    return remaining


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Step -> record of a ``metrics.jsonl``, ignoring lines that cannot be read.

    Raises:
      ValueError: ``path`` is no regular file.
    """
    return _parse_metrics(path)[0]


def _parse_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """Step -> record, and the number of complete lines without one."""
    records: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return records, 0
    if not path.is_file():
        raise ValueError(f"{path} is no regular file: use another folder, or move it")
    *lines, partial = path.read_bytes().split(b"\n")
    unread = 0
    for line in (*lines, partial):
        try:
            record = json.loads(line.decode())
            step = record["step"]
            # A loss that is drawn or compared is a number; the log writes None for NaN.
            if type(step) is not int or not all(_is_number(value) for value in record.values()):
                raise ValueError
            records[step] = record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            unread += line is not partial and bool(line.strip())
    return records, unread


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e308)


def set_aside(folder: Path, names: Iterable[str]) -> str:
    """Renames the results of an earlier run so that another one can write there.

    Args:
      folder: output folder of both runs.
      names: files and folders that the new run writes. Those that exist and are not empty are
        renamed, all with the same number: ``metrics.jsonl`` to ``metrics.1.jsonl``.

    Returns:
      A message, or "" if nothing was renamed.
    """
    names = list(names)

    def numbered(name: str, number: int) -> Path:
        path = folder / name
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    found = [
        name
        for name in names
        if (folder / name).is_dir() or ((folder / name).exists() and (folder / name).stat().st_size)
    ]
    number = 1
    while any(numbered(name, number).exists() for name in names):
        number += 1
    for name in found:
        (folder / name).rename(numbered(name, number))
    if not found:
        return ""
    moves = ", ".join(f"{name} -> {numbered(name, number).name}" for name in found)
    return f"{folder} has an earlier run's results, renamed: {moves}"


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: a killed run leaves either the old or the new content.

    Raises:
      OSError: it cannot be written, for example on a full disk; the old file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            # Otherwise a machine failure could keep the new name and lose its content.
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise _with_path(error, path) from error


def _with_path(error: OSError, path: Path) -> OSError:
    """The error with the file's path, which an error of a write lacks."""
    return OSError(error.errno, error.strerror, str(path))
