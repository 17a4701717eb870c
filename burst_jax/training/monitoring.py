"""Monitoring a run: profiler traces, a stall guard, peak device memory."""

from __future__ import annotations

import faulthandler
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

import jax

from burst_jax.errors import check_integer
from burst_jax.parallel.processes import is_main

# Seconds: the longest timeout, and the delay between a process's name and its stacks.
_LONGEST, _AFTER_NAME = 1e9, 1


class Profile:
    """Traces a few steps with ``jax.profiler``; a context manager around the training loop. ::

        with Profile(out / "profile", steps=3) as profile:
            for step in range(1, 1001):
                with profile.step(step):
                    state, metrics = train_step(state, batch)
                    metrics = jax.device_get(metrics)  # Wait for the step inside the block.

    The first step, which compiles, is skipped. View the folder in XProf (``pip install xprof``,
    ``xprof --logdir FOLDER``) or its ``.trace.json.gz`` in https://ui.perfetto.dev. With several
    processes, process 0 traces its own devices.

    Args:
      folder: folder of the trace.
      steps: number of steps to trace; 0 traces nothing.
      skip: number of steps before them.

    Raises:
      ValueError: ``steps`` or ``skip`` is below 0.
    """

    def __init__(self, folder: str | Path, steps: int, *, skip: int = 1) -> None:
        steps, self._skip = check_integer("steps", steps, 0), check_integer("skip", skip, 0)
        self.folder = Path(folder)
        self._steps = steps if is_main() else 0
        self._done = 0
        self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Encloses the computation of step ``step``, including the wait for its result."""
        if not self._tracing and self._skip <= self._done < self._skip + self._steps:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self.folder)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        self._done += 1
        if self._done >= self._skip + self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
            traced = self._done - self._skip
            print(f"wrote a trace of {traced} steps to {self.folder}", flush=True)


class StallGuard:
    """Ends this process if :meth:`alive` is not called for ``timeout`` seconds.

    JAX detects a dead process, but not one that hangs on a disk, a lock or a GPU while the others
    wait for it in a collective. Each process prints its index and its host, a second later the
    stack of each thread, and exits with code 1; the one that is not in a collective is the culprit.

    The stacks and the exit are those of ``faulthandler.dump_traceback_later``, whose thread needs
    no interpreter lock: a process that hangs in a C function which holds the lock prints no index,
    but ends, too. There is one such timer per process, so there is one StallGuard at a time.

    The clock starts at the first :meth:`alive`, so compilation of the first step does not count.

    Args:
      timeout: seconds, longer than the longest step, evaluation and checkpoint between two calls.

    Raises:
      ValueError: ``timeout`` is not positive, or above 10**9 seconds; on entering, the process is
        in another StallGuard.
    """

    _active: ClassVar[bool] = False

    def __init__(self, timeout: float) -> None:
        if not 0 < timeout <= _LONGEST:
            raise ValueError(
                f"timeout is {timeout}: it must be positive, and at most {_LONGEST:g} seconds"
            )
        self._timeout = timeout
        self._deadline = math.inf
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall_guard", daemon=True)
        # Queried now, because a hanging device may block the query later.
        self._name = (
            f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"
        )

    def __enter__(self) -> Self:
        if StallGuard._active:
            raise ValueError("this process has a StallGuard already: leave that one first")
        StallGuard._active = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        faulthandler.cancel_dump_traceback_later()
        StallGuard._active = False
        self._thread.join()

    def alive(self) -> None:
        """Resets the clock."""
        self._deadline = time.monotonic() + self._timeout
        # Standard error's descriptor: sys.stderr may be an object without one.
        faulthandler.dump_traceback_later(self._timeout + _AFTER_NAME, exit=True, file=2)

    def _watch(self) -> None:
        """Prints what faulthandler cannot: which process it is."""
        left = self._timeout
        while not self._end.wait(max(0, min(left, self._timeout))):
            left = self._deadline - time.monotonic()
            if left <= 0:
                sys.stdout.flush()
                print(
                    f"{self._name} exits: no step has completed for {self._timeout:g} s. "
                    "Its threads are at:",
                    file=sys.stderr,
                    flush=True,
                )
                return


def device_memory() -> int | None:
    """Peak bytes in use over this process' devices; None where devices do not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each and "peak_bytes_in_use" in each]
    return max(peaks, default=None)
