"""Times the kernels and FlashAttention-4 in turns, on the same arrays and one Hopper GPU.

Clocks of a GPU at its power limit fall with time and differ from card to card, so both are timed in
one process, in turns of the same length and random order. FlashAttention-4 runs in torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import add_cases, add_outputs, require_gpus, require_outputs
from benchmarks.kernels import CASES as KERNEL_CASES
from benchmarks.kernels import Case, arrays_of, matmul_ceiling, with_gradients
from benchmarks.results import Results, Row
from burst_jax import local_attention
from burst_jax.command_line import Unusable, integer, number
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
# Both round weights and results to bfloat16: 3e-3 each.
_TOLERANCE = 1.2e-2
_NAMES = ("out", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two libraries, on arrays of its own.

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


def ours(case: Case, arrays: tuple[jax.Array, ...]) -> Side:
    """This project's kernels, as :func:`burst_jax.local_attention` chooses them."""
    attend = functools.partial(local_attention, **case.arguments())
    forward, both = jax.jit(attend), with_gradients(attend)
    return Side(
        "burst-jax", lambda: forward(*arrays[:3]), lambda: both(*arrays), jax.block_until_ready
    )


def flash_attention_4(case: Case, arrays: tuple[jax.Array, ...]) -> Side:
    """FlashAttention-4 on the same arrays; packed documents as sequences of their own length."""
    torch: Any = importlib.import_module("torch")
    flash: Any = importlib.import_module("flash_attn.cute")
    q, k, v, do = (torch.from_dlpack(x).clone() for x in arrays)
    options: dict[str, Any] = {"causal": case.is_causal}
    if case.window is not None:
        options = {"window_size": (case.window - 1, 0)}
    ids, attend = case.segment_ids(), flash.flash_attn_func
    if ids is not None:
        sizes = [size for row in ids for size in np.bincount(row)[1:].tolist()]
        ends = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device="cuda")
        options |= {f"cu_seqlens_{side}": ends for side in "qk"}
        options |= {f"max_seqlen_{side}": max(sizes) for side in "qk"}
        q, k, v, do = (x.flatten(0, 1) for x in (q, k, v, do))
        attend = flash.flash_attn_varlen_func
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> Any:
        results = attend(*inputs, **options)
        return results[0] if isinstance(results, tuple) else results

    def forward() -> Any:
        with torch.no_grad():
            return run()

    def both() -> Any:
        out = run()
        return out.detach(), *torch.autograd.grad(out, inputs, do)

    return Side(
        "FlashAttention-4", forward, both,
        wait=lambda _: torch.cuda.synchronize(),
        to_jax=lambda results: [jax.dlpack.from_dlpack(x.contiguous()) for x in results],
    )  # fmt: skip


class Clock:
    """The SM clock in MHz, read every 50 ms while it is entered."""

    def __enter__(self) -> Clock:
        query = "nvidia-smi --id=0 --query-gpu=clocks.sm --format=csv,noheader,nounits -lms 50"
        self._process = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
        self._readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._readings.append((time.perf_counter(), float(line)))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def median(self, start: float, end: float) -> float:
        """The median between two times of ``time.perf_counter``; NaN without a reading."""
        readings = [mhz for at, mhz in list(self._readings) if start < at < end]
        return statistics.median(readings) if readings else math.nan


def in_turns(
    calls: dict[Any, tuple[Callable[[], Any], Callable[[Any], Any]]],
    *,
    turns: int,
    seconds: float,
    clock: Clock,
) -> dict[Any, list[tuple[float, float]]]:
    """Times calls in turns of random order.

    Args:
      calls: by a name, what starts the work, and what waits for its results.
      turns: number of turns of each call.
      seconds: duration of a turn.
      clock: reads the SM clock.

    Returns:
      By name, for each turn: seconds per call, and the median SM clock in MHz.
    """
    numbers = {}
    for name, (call, wait) in calls.items():
        wait(call())  # compiles
        start = time.perf_counter()
        wait(call())
        numbers[name] = max(1, math.ceil(seconds / (time.perf_counter() - start)))
    order = list(calls)
    measured: dict[Any, list[tuple[float, float]]] = {name: [] for name in order}
    shuffle = random.Random(0).shuffle
    for _ in range(turns):
        shuffle(order)
        for name in order:
            call, wait = calls[name]
            start = time.perf_counter()
            for _ in range(numbers[name] - 1):
                call()
            wait(call())
            end = time.perf_counter()
            measured[name].append(((end - start) / numbers[name], clock.median(start, end)))
    return measured


def compare(case: Case, *, turns: int, seconds: float, clock: Clock) -> list[Row]:
    """Checks that both sides have the same results, and times them in turns.

    Returns:
      A row of each side, FlashAttention-4 first; ``error`` is the largest relative difference
      between the two sides' results.
    """
    arrays = arrays_of(case)
    sides = [make(case, arrays) for make in (flash_attention_4, ours)]
    rows = [Row(case.name, side.name) for side in sides]
    theirs, mine = (side.to_jax(side.both()) for side in sides)
    errors = {
        name: relative_error(a.reshape(b.shape), b)
        for name, a, b in zip(_NAMES, theirs, mine, strict=True)
    }
    del theirs, mine
    for row in rows:
        row.agrees(_TOLERANCE, errors)
    if rows[0].note:
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
        setattr(rows[index], what, 1e-12 * flops[what] / statistics.median(s for s, _ in measured))
        rates = (f"{1e-12 * flops[what] / s:.0f} at {mhz:.0f}" for s, mhz in measured)
        print(f"  {rows[index].peer}, {what}, TFLOP/s at MHz: {', '.join(rates)}", flush=True)
    return rows


def run(args: argparse.Namespace) -> None:
    """The command."""
    require_gpus("benchmarks flash")
    require_outputs(args.json)
    for module in ("torch", "flash_attn.cute"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unusable(
                f"benchmarks flash needs torch and flash-attn-4 ({error}); install them with: "
                "pip install torch flash-attn-4==4.0.0b36 (pre-releases only)"
            ) from error
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, "bfloat16", matmul_ceiling(jnp.bfloat16)
    )
    print(
        f"{results.device}, jax {results.jax}; a large matmul: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s forward / forward and backward: FlashAttention-4; burst-jax; ratio; difference"
    )
    with Clock() as clock:
        for index in args.cases:
            case = CASES[index]
            try:
                rows = compare(case, turns=args.turns, seconds=args.seconds, clock=clock)
            except Exception as error:  # The table has the reason, and the benchmark continues.
                note = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                rows = [Row(case.name, "both", note=note)]
            print(_line(rows), flush=True)
            results.rows += rows
            if args.json is not None:
                results.save(args.json)


def _line(rows: list[Row]) -> str:
    if rows[0].note:
        return f"{rows[0].case}: {rows[0].note}"
    theirs, mine = rows
    rates = (f"{row.forward:.0f} / {row.both:.0f}" for row in rows)
    ratio = f"{mine.forward / theirs.forward:.3f} / {mine.both / theirs.both:.3f}"
    return f"{mine.case}: {'; '.join(rates)}; {ratio}; {mine.error:.1e}"


def add_command(commands: Any) -> None:
    """Adds ``flash`` to the benchmarks' command line."""
    parser = commands.add_parser("flash", help=__doc__.splitlines()[0])
    add_cases(parser, [case.name for case in CASES])
    parser.add_argument(
        "--turns", type=integer(1), default=3, help="turns of each call (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=number(0.01), default=0.7, help="duration of a turn (%(default)s)"
    )
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)
