"""Runs of ``examples/train_lm.py`` that are killed, for tests/training/test_kills.py.

Every process is a process group of its own, and SIGKILL is sent to the group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self

from local_processes import free_port

TRAIN = Path(__file__).parents[2] / "examples" / "train_lm.py"
EVERY = 3  # Steps between two checkpoints.
HEARTBEAT = 10  # Seconds after which a process of a pair counts as gone.
TINY = (
    "--layers=1 --embed-dim=16 --heads=2 --kv-heads=1 --head-dim=8 --mlp-dim=16 --seq-len=32 "
    f"--batch=2 --eval-batches=1 --sample-tokens=0 --checkpoint-every={EVERY}"
).split()
# In the name of a folder that orbax has not completed.
HALF = ".orbax-checkpoint-tmp"
_PATIENCE = 200  # Seconds, several times what a run takes on busy cores.

When = Literal["start", "step", "writing", "end"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment in the life of a process.

    Attributes:
      when: "start": around its first step. "step": after some steps. "writing": while a checkpoint
        is written. "end": during the evaluation after the last step.
      count: number of steps or checkpoints that this process has started.
      delay: seconds after that; for "start", relative to the last process' time to first step.
    """

    when: When
    count: int
    delay: float


def draw_moments(count: int, seed: int) -> list[Moment]:
    """``count`` moments: two of five while a checkpoint is written, a tenth after the last step."""
    draw = random.Random(seed)
    kinds: tuple[When, ...] = ("writing", "step", "writing", "start", "step")
    at_end = -(-count // 10)
    moments = []
    for index in range(count - at_end):
        when = kinds[index % len(kinds)]
        if when == "writing":
            # Not the first checkpoint, before which partial ones are removed.
            moments.append(Moment(when, draw.randint(2, 3), draw.uniform(0, 0.05)))
        elif when == "step":
            moments.append(Moment(when, draw.randint(1, 2 * EVERY), draw.uniform(0, 0.1)))
        else:
            moments.append(Moment(when, 0, draw.uniform(0, 1.1)))
    return moments + [Moment("end", 0, draw.uniform(0, 0.3)) for _ in range(at_end)]


def steps_for(moments: Iterable[Moment]) -> int:
    """Number of steps of a run that outlasts all of the moments."""
    checkpoints = 0
    for moment in moments:
        begun = {"start": 2, "step": -(-moment.count // EVERY), "writing": moment.count, "end": 0}
        checkpoints += begun[moment.when] + 1
    return EVERY * checkpoints


class Process:
    """One process of a run, which is killed when the ``with`` block ends."""

    def __init__(self, command: list[str], environment: dict[str, str], printed: Path) -> None:
        self._out, self._errors = (printed.with_suffix(end) for end in (".out", ".err"))
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                env=os.environ | environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return self._out.read_text()

    @property
    def errors(self) -> str:
        """Its stderr so far."""
        return self._errors.read_text()

    def kill(self) -> int:
        """Sends SIGKILL to its group if it still runs; returns its exit code."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        return self._process.wait(_PATIENCE)

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits for a condition while the process runs."""
        end = time.monotonic() + _PATIENCE
        while not happened():
            assert self._process.poll() is None, self.out + self.errors
            assert time.monotonic() < end, self.out + self.errors
            time.sleep(0.001)

    def until_first_step(self) -> int:
        """Waits for its first step; returns the number of the step it started from."""
        self.until(lambda: "\nstep " in self.out)
        return int(re.findall(r"^step (\d+)/", self.out, re.MULTILINE)[0]) - 1


class Training:
    """A training run in one folder, whose processes are killed and started again.

    Args:
      out: the folder.
      steps: number of its last step.
      corpus: the texts that it trains on.
      cache: JAX's compilation cache, written by the first process and only read by the others,
        which may be killed.
      options: more of the command line, the mesh for example.
    """

    def __init__(self, out: Path, steps: int, corpus: Path, cache: Path, *options: str) -> None:
        self.out, self.checkpoints, self._steps = out, out / "checkpoints", steps
        self._command = [sys.executable, "-W", "error", str(TRAIN), "--data", str(corpus)]
        self._command += ["--out", str(out), "--resume=auto", f"--steps={steps}", *TINY]
        self._command += options
        self._cache, self._started, self._to_first_step = cache, 0, 0.0

    def start(self, *options: str, devices: int = 4) -> Process:
        """Starts a process with ``devices`` CPU devices."""
        first = "0.1" if self._started == 0 else "1000"
        self._started += 1
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(self._cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": first,
            # Most of the time of such a run is compile time.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        printed = self.out.with_name(f"{self.out.name}-{self._started}")
        return Process([*self._command, *options], environment, printed)

    @contextmanager
    def start_pair(self) -> Iterator[list[Process]]:
        """Starts a pair of processes with half of the devices each."""
        found = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes=2"]
        found += [f"--heartbeat-timeout={HEARTBEAT}"]
        with ExitStack() as stack:
            yield [
                stack.enter_context(self.start(*found, f"--process-id={index}", devices=2))
                for index in range(2)
            ]

    def finish(self) -> None:
        """Runs to the end."""
        with self.start() as process:
            code = process.wait()
            assert code == 0, process.errors

    def kill_at(self, moment: Moment) -> bool:
        """Starts a process and kills it at a moment of its life.

        Returns:
          Whether this left a partial checkpoint.
        """
        began, summary, due = time.monotonic(), self._summary_written(), 0
        with self.start() as process:
            if moment.when == "start":
                time.sleep(moment.delay * self._to_first_step)
            elif moment.when == "end":
                process.until(lambda: self._summary_written() != summary)
            else:
                start = process.until_first_step()
                self._to_first_step = time.monotonic() - began
                due = start + moment.count * (EVERY if moment.when == "writing" else 1)
                if moment.when == "writing":
                    process.until(lambda: bool(self.half(due)))
                else:
                    process.until(lambda: self.reached() >= due)
            if moment.when != "start":
                time.sleep(moment.delay)
            code = process.kill()
            assert code == -signal.SIGKILL, f"{moment}: ended before, {code}\n{process.errors}"
        return bool(self.half(due))

    def records(self) -> list[dict[str, float]]:
        """The records of ``metrics.jsonl``."""
        lines = (self.out / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reached(self) -> int:
        """The last step in ``metrics.jsonl``."""
        records = self.records()
        return int(records[-1]["step"]) if records else 0

    def losses(self) -> list[float]:
        """The losses of all steps, each logged once."""
        records = self.records()
        assert [record["step"] for record in records] == list(range(1, self._steps + 1))
        return [record["loss"] for record in records]

    def half(self, step: int) -> list[Path]:
        """The folder of checkpoint ``step`` while it is being written, if it is."""
        return list(self.checkpoints.glob(f"{step}{HALF}*"))

    def _summary_written(self) -> int | None:
        path = self.out / "summary.json"
        return path.stat().st_mtime_ns if path.exists() else None
