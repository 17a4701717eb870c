"""A trace of a few steps of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax

from burst_jax.parallel.processes import is_main


class Profile:
    """Traces a few steps with ``jax.profiler``; a context manager around the run. ::

        with Profile(out / "profile", steps=3) as profile:
            for step in range(1, 1001):
                with profile.step(step):
                    state, metrics = train_step(state, batch)
                    metrics = jax.device_get(metrics)  # The step's end belongs to it.

    The first step, which compiles, is left out. The folder opens in XProf (``pip install xprof``,
    ``xprof --logdir FOLDER``) and, its ``.trace.json.gz``, in https://ui.perfetto.dev. With several
    processes, process 0 traces its own devices.

    Args:
      folder: where the trace goes.
      steps: number of steps to trace; 0 traces nothing.
      skip: number of steps before them.

    Raises:
      ValueError: ``steps`` or ``skip`` is below 0.
    """

    def __init__(self, folder: str | Path, steps: int, *, skip: int = 1) -> None:
        for name, value in (("steps", steps), ("skip", skip)):
            if value < 0:
                raise ValueError(f"{name} is {value}: it must be at least 0")
        self.folder = Path(folder)
        self._steps, self._skip = steps if is_main() else 0, skip
        self._done = 0
        self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The computation of step ``step``, which has ended when the block ends."""
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
            print(f"a trace of {traced} steps is in {self.folder}", flush=True)
