"""Draws calls of the Mosaic kernels and holds each to float64, in many processes of one GPU.

    python tests/pallas_kernels/run_drawn.py                       500 programs of each family
    python tests/pallas_kernels/run_drawn.py --family mosaic_sm90 --programs 2000 --seed 10000
    python tests/pallas_kernels/run_drawn.py --minutes 3           as many as start in that time
    python tests/pallas_kernels/run_drawn.py --family mosaic_sm80 --seed 417 --programs 1

A program (tests/support/drawn_calls.py) is a forward and a backward pass; compiling it takes most
of its time, so every core compiles. Seeds of both families run in turns. It prints a line per
failure, with the command that repeats it, and a summary; exit status: 0 if all programs are right,
1 if one is wrong, raises or never ends, 2 if nothing could run. Other scripts call :func:`run`.

On a Hopper GPU the Ampere family runs, too: Mosaic GPU is told to compile its instructions.
Without a GPU kernels are interpreted, on short lengths; Hopper's need JAX 0.12.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
FAMILIES = "mosaic_sm80", "mosaic_sm90"
# Seconds until a worker has imported JAX and found its GPU; until a program is given up.
_START, _PATIENCE = 180, 240


@dataclasses.dataclass
class Result:
    """What a run found.

    Attributes:
      right: programs that are right, by family.
      failures: a line for each of the others.
      not_run: programs that were not started in time.
      seconds: wall time.
    """

    right: collections.Counter
    failures: list[str]
    not_run: int
    seconds: float

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.failures else 0 if self.right else 2

    def __str__(self):
        right = ", ".join(f"{family} {count}" for family, count in sorted(self.right.items()))
        late = f", {self.not_run} not started in time" if self.not_run else ""
        return (
            f"drawn calls: {self.right.total()} right ({right or 'none'}), "
            f"{len(self.failures)} wrong{late}, {self.seconds:.0f} s"
        )


def run(
    families: tuple[str, ...] = FAMILIES, programs: int = 500, seed: int = 0,
    workers: int | None = None, minutes: float | None = None, out: TextIO = sys.stdout,
) -> Result:  # fmt: skip
    """Runs the programs of consecutive seeds, of each family; prints failures as they occur.

    Args:
      families: "mosaic_sm80", "mosaic_sm90" or both.
      programs: of each family.
      seed: the first one.
      workers: processes; None: one per core, at most 16.
      minutes: after which no further program starts; None: all do.
      out: where failures are printed.
    """
    started, lock = time.monotonic(), threading.Lock()
    workers = workers or min(16, len(os.sched_getaffinity(0)))
    seeds = [(family, s) for s in range(seed, seed + programs) for family in families]
    # A worker compiles for one architecture.
    queues = {family: iter([s for f, s in seeds if f == family]) for family in families}
    result = Result(collections.Counter(), [], len(seeds), 0.0)

    def take(family: str) -> int | None:
        late = minutes is not None and time.monotonic() - started > 60 * minutes
        with lock:
            drawn = None if late else next(queues[family], None)
            result.not_run -= drawn is not None
        return drawn

    def record(family: str, drawn: int, error: str | None) -> None:
        with lock:
            if error is None:
                result.right[family] += 1
                return
            again = f"--family {family} --seed {drawn} --programs 1"
            line = f"WRONG {again}: {' '.join(error.split())}"
            result.failures.append(line)
            print(line, file=out, flush=True)

    def serve(order: tuple[str, ...]) -> None:
        # Then what the other family has left.
        for family in order:
            worker = None
            while (drawn := take(family)) is not None:
                worker = worker or _Worker(family)
                error = worker.problem or worker.check(drawn)
                record(family, drawn, error)
                if worker.problem:
                    break  # Neither would another one start.
                if not worker.is_alive:
                    worker.close()
                    worker = None
            if worker is not None:
                worker.close()

    orders = itertools.cycle(families[i:] + families[:i] for i in range(len(families)))
    threads = [
        threading.Thread(target=serve, args=(order,))
        for order, _ in zip(orders, range(max(workers, len(families))), strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.seconds = time.monotonic() - started
    return result


class _Worker:
    """A process that runs programs of one family, each asked for by its seed.

    Attributes:
      is_alive: whether it can run another one.
      problem: why it did not start, or None.
    """

    def __init__(self, family: str):
        places = [ROOT, ROOT / "tests", ROOT / "tests" / "support", os.environ.get("PYTHONPATH")]
        variables = {
            # Many processes share the GPU's memory, and the cores.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(str(place) for place in places if place),
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", family], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | variables,
        )  # fmt: skip
        self.is_alive = True
        problem = self._answer(_START)
        self.problem = f"the process did not start: {problem}" if problem else None

    def check(self, seed: int) -> str | None:
        """What is wrong with the program of a seed, or None."""
        print(seed, file=self._process.stdin, flush=True)
        return self._answer(_PATIENCE) or None

    def _answer(self, seconds: float) -> str:
        """What the process answers: "" or what is wrong."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()  # Closes the pipe that is read.

        timer = threading.Timer(seconds, end)
        timer.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            answer = json.loads(line)
            self.is_alive = answer["goes_on"]
            return answer["error"]
        self.is_alive = False
        if is_late.is_set():
            return f"it took more than {seconds:.0f} s"
        status = self._process.wait()
        self._log.seek(0)
        return f"the process ended with {status}: {self._log.read()[-500:]}"

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def _work(family: str, seeds: Iterator[str], answers: TextIO) -> None:
    """Answers each seed with a line of JSON, the first line when ready."""

    def answer(error: str, goes_on: bool = True) -> None:
        print(json.dumps({"error": error, "goes_on": goes_on}), file=answers, flush=True)

    try:
        check = _checks_of(family)
    except Exception as error:
        answer(f"{type(error).__name__}: {error}", goes_on=False)
        return
    answer("")
    for seed in seeds:
        try:
            check(int(seed))
            answer("")
        except AssertionError as error:
            answer(str(error))
        except Exception as error:
            # After a fault in a kernel, nothing else runs in this process.
            answer(f"{type(error).__name__}: {str(error)[:1000]}", goes_on=False)
            return


def _checks_of(family: str) -> Any:
    """``seed -> None``, which raises AssertionError where the program of the seed is wrong."""
    import conftest
    import jax

    # Interpreted warpgroups wait for each other: they need as many threads.
    jax.config.update("jax_num_cpu_devices", 8)
    on_gpu = jax.default_backend() == "gpu"
    vars(conftest).update(IMPLEMENTATION=family if on_gpu else None, ON_GPU=on_gpu)
    import drawn_calls

    levels = drawn_calls.ON_GPU if on_gpu else drawn_calls.ON_CPU

    def check(seed: int) -> None:
        case = drawn_calls.draw(seed, family, levels)
        try:
            of_case = drawn_calls.run_of(case, family, on_gpu=on_gpu)
            drawn_calls.check(case, seed, of_case, repeats=2 if on_gpu else 1)
        except AssertionError:
            raise
        except Exception as error:
            described = drawn_calls.describe(case)
            raise RuntimeError(f"{described}: {type(error).__name__}: {error}") from error
        # No program runs twice, and their compiled code stays mapped.
        jax.clear_caches()

    return check


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, help="only this one; default: both")
    parser.add_argument("--programs", type=int, default=500, metavar="N", help="of each family")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first one")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one per core")
    parser.add_argument("--minutes", type=float, metavar="M", help="then start no further program")
    parser.add_argument("--worker", choices=FAMILIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        # What libraries print goes to the log.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        _work(args.worker, iter(sys.stdin), answers)
        return 0
    families = (args.family,) if args.family else FAMILIES
    result = run(families, args.programs, args.seed, args.workers, args.minutes)
    print(result)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
