"""Times the same attention of several libraries, in turns on one GPU.

Clocks of a GPU at its power limit fall with time and differ from card to card, so all are timed in
one run, in turns of the same length and random order.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import add_cases, add_outputs
from benchmarks.kernels import CASES as KERNEL_CASES
from benchmarks.kernels import TOLERANCE, Attention, Case
from benchmarks.results import Results, Row
from burst_jax import local_attention
from burst_jax.command_line import integer, number
from pallas_kernels.timing import relative_error

CASES = (
    *(case for case in KERNEL_CASES if not case.per_head()),
    Case("causal, 4K, 32/8 heads", 1, 4096, 32, 8, 128, True),
    Case("causal, 4 x 4K", 4, 4096, 32, 32, 128, True),
    Case("causal, head dims (192, 128)", 1, 16384, 16, 16, 192, True, value_dim=128),
    Case("causal, head dim 256", 1, 16384, 16, 16, 256, True),
    Case("causal, head dim 192", 1, 16384, 16, 16, 192, True),
    Case("causal, head dim 256, 32/8 heads", 1, 16384, 32, 8, 256, True),
)
_NAMES = ("out", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the libraries, on arrays of its own.

    Attributes:
      name: in the table.
      forward: starts the forward pass.
      both: starts forward and backward pass, and returns out, dq, dk and dv.
      wait: waits for the results of one of these.
      to_jax: its results as JAX arrays.
    """

    name: str
    forward: Callable[[], Any]
    both: Callable[[], Any]
    wait: Callable[[Any], Any]
    to_jax: Callable[[Any], Any] = lambda x: x


def with_arrays(arguments: dict[str, Any]) -> tuple[Attention, list[jax.Array]]:
    """``attend(q, k, v, *arrays)``, local attention with these arguments; and their arrays, once.

    As constants of a program, XLA would compute what follows from them while compiling: that
    segment ids hold no padding, and part of the kernels' tables.
    """
    leaves, structure = jax.tree.flatten(arguments)
    arrays = {id(x): x for x in leaves if isinstance(x, np.ndarray | jax.Array)}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *given: jax.Array) -> jax.Array:
        traced = dict(zip(arrays, given, strict=True))
        merged = [traced.get(id(x), x) for x in leaves]
        return local_attention(q, k, v, **jax.tree.unflatten(structure, merged))

    return attend, [jnp.asarray(x) for x in arrays.values()]


class Turn(NamedTuple):
    """A turn's seconds per call, the median SM clock in MHz, and a GPU's mean power in watts."""

    seconds: float
    mhz: float
    watts: float


class Clock:
    """SM clock and power of the first GPUs, read every 50 ms while it is entered.

    Args:
      gpus: how many are read.
    """

    def __init__(self, gpus: int = 1):
        self._ids = ",".join(map(str, range(gpus)))

    def __enter__(self) -> Clock:
        query = f"nvidia-smi --id={self._ids} --query-gpu=clocks.sm,power.draw.instant"
        command = f"{query} --format=csv,noheader,nounits -lms 50"
        self._process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
        self._readings: list[tuple[float, float, float]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                mhz, watts = map(_number, line.split(","))
                self._readings.append((time.perf_counter(), mhz, watts))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Median MHz and mean watts between two times of ``time.perf_counter``; NaN if unread."""
        readings = [reading[1:] for reading in list(self._readings) if start < reading[0] < end]
        if not readings:
            return math.nan, math.nan
        mhz, watts = zip(*readings, strict=True)
        return statistics.median(mhz), statistics.fmean(watts)


def _number(cell: str) -> float:
    """NaN where a GPU or its driver does not measure this."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def in_turns(
    calls: dict[Any, tuple[Callable[[], Any], Callable[[Any], Any]]],
    *,
    turns: int,
    seconds: float,
    clock: Clock,
    called: bool = False,
) -> dict[Any, list[Turn]]:
    """Times calls in turns of random order.

    If one call takes ``seconds`` or longer, the call that shows it is its first turn.

    Args:
      calls: by a name, what starts the work, and what waits for its results.
      turns: number of turns of each call.
      seconds: duration of a turn.
      clock: reads SM clock and power.
      called: whether each was called before, and is compiled.

    Returns:
      By name, all turns.
    """

    def turn(name: Any, number: int) -> Turn:
        call, wait = calls[name]
        start = time.perf_counter()
        for _ in range(number - 1):
            call()
        wait(call())
        end = time.perf_counter()
        return Turn((end - start) / number, *clock.between(start, end))

    numbers: dict[Any, int] = {}
    measured: dict[Any, list[Turn]] = {}
    for name, (call, wait) in calls.items():
        if not called:
            wait(call())  # compiles
        first = turn(name, 1)
        numbers[name] = max(1, math.ceil(seconds / first.seconds))
        measured[name] = [first] if first.seconds >= seconds else []
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for i in range(turns):
        shuffle(order)
        for name in order:
            if len(measured[name]) == i:
                measured[name].append(turn(name, numbers[name]))
    return measured


def compare(
    case: Case, sides: Sequence[Side], *, turns: int, seconds: float, clock: Clock
) -> list[Row]:
    """Checks that all sides have the same results, and times them in turns.

    Returns:
      A row of each side; ``error`` is the largest relative difference from the first side's
      results, of the first row the largest of all others.
    """
    rows = [Row(case.name, side.name) for side in sides]
    started = [side.both() for side in sides]  # Processes of their own compile side by side.
    first, *others = (side.to_jax(x) for side, x in zip(sides, started, strict=True))
    errors = [
        {
            name: relative_error(a.reshape(b.shape), b)
            for name, a, b in zip(_NAMES, other, first, strict=True)
        }
        for other in others
    ]
    del started, first, others
    limit = TOLERANCE["bfloat16"]
    right = [row.agrees(limit, e) for row, e in zip(rows[1:], errors, strict=True)]
    if not (rows[0].agrees(limit, *errors) and all(right)):
        wrong = next((row for row in rows[1:] if row.note), rows[0])
        for row in rows:
            row.note = row.note or f"not timed: the results of {wrong.peer} differ"
        return rows
    calls = {
        (index, what): (getattr(side, what), side.wait)
        for index, side in enumerate(sides)
        for what in ("forward", "both")
    }
    flops = {"forward": case.flops(), "both": case.flops_with_gradients()}
    for (index, what), measured in in_turns(
        calls, turns=turns, seconds=seconds, clock=clock
    ).items():
        setattr(
            rows[index],
            what,
            1e-12 * flops[what] / statistics.median(turn.seconds for turn in measured),
        )
        rates = (f"{1e-12 * flops[what] / x.seconds:.0f} at {x.mhz:.0f}" for x in measured)
        print(f"  {rows[index].peer}, {what}, TFLOP/s at MHz: {', '.join(rates)}", flush=True)
    return rows


def compare_cases(
    args: argparse.Namespace, results: Results, sides: Callable[[Case], Sequence[Side]]
) -> None:
    """Compares the chosen cases, prints a line of each, and saves the results after each.

    Args:
      args: the options of :func:`add_options`.
      results: rows are added to it.
      sides: makes the sides of a case.
    """
    with Clock() as clock:
        for index in args.cases:
            case = CASES[index]
            try:
                made = sides(case)
                rows = compare(case, made, turns=args.turns, seconds=args.seconds, clock=clock)
            except Exception as error:  # The table has the reason, and the benchmark continues.
                note = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                rows = [Row(case.name, "all", note=note)]
            print(_line(rows), flush=True)
            results.rows += rows
            if args.json is not None:
                results.save(args.json)


def _line(rows: list[Row]) -> str:
    if rows[0].note:
        return f"{rows[0].case}: " + "; ".join(f"{row.peer}: {row.note}" for row in rows)
    first, *others = rows
    rates = (f"{row.forward:.0f} / {row.both:.0f}" for row in rows)
    ratios = (f"{x.forward / first.forward:.3f} / {x.both / first.both:.3f}" for x in others)
    return f"{first.case}: {'; '.join(rates)}; {'; '.join(ratios)}; {first.error:.1e}"


def add_turns(parser: Any) -> None:
    """Adds number and duration of the turns to a command line."""
    parser.add_argument(
        "--turns", type=integer(1), default=3, help="turns of each call (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=number(0.01), default=0.7, help="duration of a turn (%(default)s)"
    )


def add_options(parser: Any) -> None:
    """Adds the cases, the turns and the JSON file to a command line."""
    add_cases(parser, [case.name for case in CASES])
    add_turns(parser)
    add_outputs(parser, png=False)
