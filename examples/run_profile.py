"""A trace of a few training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax

from burst_jax.training import is_main


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
    """

    def __init__(self, folder: str | Path, steps: int, *, skip: int = 1) -> None:
        self.folder, self._skip = Path(folder), skip
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
