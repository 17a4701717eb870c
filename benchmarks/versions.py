"""Times the kernels of several installations in turns: other versions of JAX, or of this project.

Each runs in a process of its own, which waits while another one is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.command_line import require_gpus, require_outputs
from benchmarks.flash import ours
from benchmarks.kernel_cases import Case, arrays_of
from benchmarks.kernels import matmul_ceiling
from benchmarks.results import Results
from benchmarks.turns import Side, add_options, compare_cases
from burst_jax.command_line import Unusable


@dataclasses.dataclass(frozen=True)
class Installation:
    """A Python interpreter, whose packages are used, and a checkout of this project.

    Attributes:
      python: path of the interpreter.
      checkout: the folder whose ``burst_jax``, ``pallas_kernels`` and ``benchmarks`` are timed.
    """

    python: Path
    checkout: Path

    @classmethod
    def parse(cls, text: str) -> Installation:
        """``PYTHON`` or ``PYTHON:CHECKOUT``; without a checkout it is the working directory."""
        name, _, checkout = text.partition(":")
        python, folder = shutil.which(name), Path(checkout or ".").absolute()
        if python is None:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no program: name a Python interpreter, for example .venv/bin/python"
            )
        if not (folder / "benchmarks" / "versions.py").is_file():
            raise argparse.ArgumentTypeError(
                f"{folder} has no benchmarks/versions.py: name a checkout that has this benchmark"
            )
        return cls(Path(python).absolute(), folder)


class Worker:
    """A process of an installation that runs commands."""

    def __init__(self, installation: Installation):
        self._python = installation.python
        self._process = subprocess.Popen(
            [installation.python, "-m", "benchmarks.versions"],
            cwd=installation.checkout,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(
                    [str(installation.checkout), os.environ.get("PYTHONPATH", "")]
                ),
                # Several processes share the GPU's memory.
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, argument: Any = None) -> None:
        """Sends a command, and does not wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # The next answer is that it ended.
            self._process.stdin.write(json.dumps([command, argument]) + "\n")
            self._process.stdin.flush()

    def ask(self, command: str, argument: Any = None) -> Any:
        """Sends a command, and waits for its answer.

        Raises:
          RuntimeError: what the process raised, or that it ended.
        """
        assert self._process.stdout is not None
        self.tell(command, argument)
        line = self._process.stdout.readline()
        answer, error = json.loads(line) if line else (None, "the process ended")
        if error:
            raise RuntimeError(f"{self._python}: {error}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # what it was told and has not read
            self._process.communicate()


def _side(worker: Worker, name: str, case: Case, folder: Path) -> Side:
    """A case in a worker, whose results are read from files in the folder."""
    worker.ask("case", dataclasses.asdict(case))

    def load(_: object) -> list[np.ndarray]:
        paths = worker.ask("save", str(folder))
        return [np.load(path).view(ml_dtypes.bfloat16) for path in paths]

    return Side(
        name,
        functools.partial(worker.tell, "forward"),
        functools.partial(worker.tell, "both"),
        wait=lambda _: worker.ask("wait"),
        to_jax=load,
    )


def _work(commands: IO[str], answers: IO[str]) -> None:
    """Runs the commands of :class:`Worker`, one per line; those that are asked have an answer."""
    side: Side | None = None
    results: Any = None
    failure = ""
    for line in commands:
        command, argument = json.loads(line)
        answer: Any = None
        try:
            if command == "device":
                require_gpus("benchmarks versions")
                answer = [
                    jax.devices()[0].device_kind, jax.__version__, matmul_ceiling(jnp.bfloat16)
                ]  # fmt: skip
            elif command == "case":
                failure = ""  # of a call of the last case, for which nobody waited
                side = results = None  # frees the last case's arrays
                case = Case(**argument)
                side = ours(case, arrays_of(case))
            else:
                assert side is not None
                if command == "wait":
                    side.wait(results)
                elif command == "save":
                    answer = [f"{argument}/{index}.npy" for index in range(len(results))]
                    for path, array in zip(answer, results, strict=True):
                        np.save(path, np.asarray(array).view(np.uint16))
                else:
                    results = getattr(side, command)()
        except Exception as error:  # Calls have no answer: the next command's has the error.
            known = isinstance(error, Unusable)
            failure = failure or (str(error) if known else f"{type(error).__name__}: {error}")
        if command not in ("forward", "both"):
            print(json.dumps([answer, failure]), file=answers, flush=True)
            failure = ""


@contextlib.contextmanager
def _workers(installations: list[Installation]) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = []
        for installation in installations:
            workers.append(Worker(installation))
            stack.callback(workers[-1].close)
        yield workers


def run(args: argparse.Namespace) -> None:
    """The command."""
    if len(args.installations) < 2:
        raise Unusable("benchmarks versions compares installations: name two or more")
    require_outputs(args.json)
    jax.config.update("jax_platforms", "cpu")  # This process compares results only.
    with tempfile.TemporaryDirectory() as folder, _workers(args.installations) as workers:
        try:
            devices = [worker.ask("device") for worker in workers]
        except RuntimeError as error:
            raise Unusable(str(error)) from error
        names = [
            f"{index}: jax {version}, {installation.checkout}"
            for index, (installation, (_, version, _)) in enumerate(
                zip(args.installations, devices, strict=True)
            )
        ]
        device, version, matmul = devices[0]
        print(
            f"{device}; a large matmul: {matmul:.0f} TFLOP/s\n{'; '.join(names)}\n"
            "TFLOP/s forward / forward and backward of each; ratios to the first; difference"
        )

        def sides(case: Case) -> list[Side]:
            return [
                _side(worker, name, case, Path(folder))
                for worker, name in zip(workers, names, strict=True)
            ]

        compare_cases(args, Results(device, version, "bfloat16", matmul), sides)


def add_command(commands: Any) -> None:
    """Adds ``versions`` to the benchmarks' command line."""
    parser = commands.add_parser("versions", help=__doc__.splitlines()[0])
    parser.add_argument(
        "installations", nargs="+", type=Installation.parse, metavar="PYTHON[:CHECKOUT]",
        help="a Python interpreter with JAX, and a checkout of this project (default: this one)",
    )  # fmt: skip
    add_options(parser)
    parser.set_defaults(run=run)


if __name__ == "__main__":
    # What libraries print must not be among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _work(sys.stdin, answers)
