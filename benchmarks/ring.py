"""Benchmark of rings of all GPUs against other strategies on the same GPUs.

Every strategy gets the same q, k, v and do, in its layout, and computes the forward pass, and the
forward pass with the gradients of q, k and v. Before a case's strategies are timed, their results
are compared with those of the first one that ran (one GPU with the whole sequence, where that
fits). All of a case are timed in turns: at the power limit a GPU's clock falls with time. FLOPs are
counted as in ``benchmarks kernels``, per GPU; the table has each rate as a share of that of every
GPU alone with the whole sequence, or of one GPU, with the same kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plot
from benchmarks.command_line import add_cases, add_outputs, require_gpus, require_outputs
from benchmarks.kernels import TOLERANCE, Case, matmul_ceiling
from benchmarks.results import Results, Row, gib
from benchmarks.ring_strategies import (
    ALL_ALONE,
    ALONE,
    BLOCKS,
    STEPS,
    ZIGZAG,
    Strategy,
    mesh_of,
    strategies,
)
from benchmarks.turns import Clock, add_turns, in_turns
from burst_jax.command_line import Unusable
from pallas_kernels.timing import relative_error

_PARTS = (BLOCKS, STEPS)

_CORE = (
    ALONE,
    ALL_ALONE,
    *_PARTS,
    "one GPU, cuDNN",
    ZIGZAG,
    "striped",
    "contiguous",
    "Ulysses",
    "Ulysses, cuDNN",
)
_ROTATIONS = ("zigzag, rotate_kv", "zigzag, rotate_query", "zigzag, NCCL")
_LEVELS = ("two-level ring", "ring + Ulysses of 2")
_PACKED = (ALL_ALONE, "balanced", ZIGZAG, "striped:128")
# Each case, and the names of its strategies.
CASES: tuple[tuple[Case, tuple[str, ...]], ...] = (
    (Case("64K, 32/8 heads", 1, 65536, 32, 8, 128, True), _CORE + _ROTATIONS + _LEVELS),
    (Case("128K, 32/8 heads", 1, 131072, 32, 8, 128, True), _CORE),
    (Case("16K, 32/32 heads", 1, 16384, 32, 32, 128, True), _CORE + _ROTATIONS),
    (Case("64K, 32/32 heads", 1, 65536, 32, 32, 128, True), (ALONE, ZIGZAG, *_ROTATIONS)),
    (
        Case("64K full, 32/8 heads", 1, 65536, 32, 8, 128),
        (ALONE, "contiguous", "all-gather, cuDNN", "Ulysses, cuDNN"),
    ),
    (
        Case("window 4096 of 128K, 32/8 heads", 1, 131072, 32, 8, 128, True, window=4096),
        (ALONE, ALL_ALONE, "contiguous", ZIGZAG, "Ulysses, cuDNN"),
    ),
    *(
        (Case(f"64K, batch {batch}, 32/8 heads", batch, 65536, 32, 8, 128, True), (ALONE, ZIGZAG))
        for batch in (2, 4, 8)
    ),
    (Case("1M, 32/8 heads", 1, 1048576, 32, 8, 128, True), (ZIGZAG,)),
    (Case("16K, 64/8 heads", 1, 16384, 64, 8, 128, True), _CORE),
    (Case("8K, 32/32 heads", 1, 8192, 32, 32, 128, True), _CORE),
    (
        Case(
            "16 documents of 8K, 32/8 heads",
            *(1, 131072, 32, 8, 128, True),
            documents=16,
            equal_documents=True,
        ),
        _PACKED,
    ),
    (
        Case("32 documents of 128K, 32/8 heads", 1, 131072, 32, 8, 128, True, documents=32),
        _PACKED,
    ),
)


class RingInputs:
    """A case's arrays for any strategy, and the results that all must agree with."""

    def __init__(self, case: Case, n: int):
        self.case = case
        self._everywhere = NamedSharding(mesh_of((n,), ("seq",)), P(None, "seq"))
        self._want: dict[str, jax.Array] = {}

    def arrays(self, strategy: Strategy) -> list[jax.Array]:
        """bfloat16 q, k, v and do ``[copies * B, T, heads, H]``, the same for every strategy."""
        case = self.case
        keys = jax.random.split(jax.random.key(1), 4)
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        return [
            strategy.random(key, (case.batch, case.length, count, case.head_dim))
            for key, count in zip(keys, heads, strict=True)
        ]

    def errors(self, strategy: Strategy, results: dict[str, jax.Array]) -> dict[str, float]:
        """Relative difference of each result from the first strategy's, from the first call."""
        errors = {}
        for name, array in results.items():
            natural = strategy.natural(array, self.case.length)
            here = jax.device_put(natural, self._everywhere)
            errors[name] = relative_error(here, self._want.setdefault(name, here))
        return errors


@dataclasses.dataclass
class Compiling:
    """A strategy's row, and what threads compile and its arrays; a note in the row if it failed."""

    row: Row
    strategy: Strategy | None = None
    arrays: list[jax.Array] = dataclasses.field(default_factory=list)
    packing: list[Any] = dataclasses.field(default_factory=list)
    programs: list[Any] = dataclasses.field(default_factory=list)

    def calls(self) -> list[Callable[[], Any]]:
        """The forward pass, and forward and backward pass."""
        forward, both = (program.result() for program in self.programs)
        arrays, packing = self.arrays, self.packing
        return [lambda: forward(*arrays[:3], *packing), lambda: both(*arrays, *packing)]

    def failed(self, error: Exception) -> None:
        """The table has the reason, and the benchmark continues."""
        self.row.note = " ".join(f"{type(error).__name__}: {error}".split())[:70]


# The programs of strategies of earlier cases, or futures of them.
Programs = dict[Any, list[Any]]


def _program_key(case: Case, name: str, started: Compiling) -> Any:
    """What a strategy's programs depend on. Documents are arguments, a balanced layout is not."""
    assert started.strategy is not None
    is_packed = case.documents > 1
    like = dataclasses.replace(case, name="", documents=1 + is_packed, equal_documents=False)
    return like, name, started.strategy.layout, tuple(x.shape for x in started.arrays)


def start(
    inputs: RingInputs,
    name: str,
    make: Callable[[], Strategy],
    pool: ThreadPoolExecutor,
    programs: Programs,
) -> Compiling:
    """Makes a strategy's arrays, and compiles its programs in threads of the pool.

    Lowering is Python, some 0.6 s for each kernel of a program, so ``programs`` are used again.
    """
    started = Compiling(Row(inputs.case.name, name))
    try:
        strategy = started.strategy = make()
        arrays = started.arrays = inputs.arrays(strategy)
        packing = started.packing = strategy.packing_arrays()
        key = _program_key(inputs.case, name, started)
        started.programs = list(programs.get(key, ()))
        if started.programs:
            return started
        for run, given in ((strategy.attend, arrays[:3]), (strategy.both, arrays)):
            with strategy.lowering():
                lowered = jax.jit(run, compiler_options=strategy.options).lower(*given, *packing)
            started.programs.append(pool.submit(lowered.compile))
        programs[key] = started.programs
    except Exception as error:
        started.failed(error)
    return started


def check(inputs: RingInputs, started: Compiling) -> None:
    """Compares a strategy's results with the first one's: a note if they differ."""
    strategy, row = started.strategy, started.row
    if strategy is None or row.note:
        return
    try:
        forward, both = started.calls()
        row.memory = gib(started.programs[1].result())
        if strategy.is_part:
            jax.block_until_ready((forward(), both()))
            return
        alone_errors = inputs.errors(strategy, {"out": forward()})
        results = dict(zip(("out", "dq", "dk", "dv"), both(), strict=True))
        row.agrees(TOLERANCE["bfloat16"], alone_errors, inputs.errors(strategy, results))
    except Exception as error:
        started.failed(error)


def measure(
    case: Case,
    makers: dict[str, Callable[[], Strategy]],
    n: int,
    programs: Programs,
    *,
    turns: int,
    seconds: float,
    clock: Clock,
) -> list[Row]:
    """Checks the strategies against the first one, and times them in turns."""
    inputs = RingInputs(case, n)
    with ThreadPoolExecutor() as pool:  # Compilation dominates.
        started = [start(inputs, name, make, pool, programs) for name, make in makers.items()]
        for each in started:
            check(inputs, each)
    timed = [each for each in started if not each.row.note]
    calls: dict[Any, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        (index, what): (call, jax.block_until_ready)
        for index, each in enumerate(timed)
        for what, call in zip(("forward", "both"), each.calls(), strict=True)
    }
    flops = {"forward": case.flops(), "both": case.flops_with_gradients()}
    measured = in_turns(calls, turns=turns, seconds=seconds, clock=clock)
    for (index, what), taken in measured.items():
        strategy, row = timed[index].strategy, timed[index].row
        assert strategy is not None
        tera = 1e-12 * flops[what] * strategy.copies / strategy.mesh.size
        setattr(row, what, tera / statistics.median(turn.seconds for turn in taken))
        if what == "both":
            row.mhz = statistics.median(turn.mhz for turn in taken)
            row.watts = statistics.median(turn.watts for turn in taken)
    return [each.row for each in started]


def add_command(commands: Any) -> None:
    """Adds ``ring`` to the command line."""
    parser = commands.add_parser("ring", help=__doc__.splitlines()[0])
    add_cases(parser, [case.name for case, _ in CASES])
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="default: all of the cases")
    add_turns(parser)
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, saves and draws it."""
    known = {name for index in args.cases for name in CASES[index][1]}
    unknown = [name for name in args.strategies or () if name not in known]
    if unknown:
        raise Unusable(f"--strategies {unknown}: these cases have {', '.join(sorted(known))}")
    require_gpus("benchmarks ring", 2)
    require_outputs(args.json, args.png)
    n = len(jax.devices())
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, "bfloat16", matmul_ceiling(jnp.bfloat16), n
    )
    print(
        f"{n} x {results.device}, jax {results.jax}, bfloat16, head dim 128, causal unless full; "
        f"a large matmul on one: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s per GPU (share of every GPU alone, or of one GPU); of forward and backward: GiB "
        "per GPU, SM clock, watts, joules per TFLOP; the largest difference from the first\n"
    )
    heading = f"{'case':34}{'strategy':22}{'forward':>13}{'fwd + bwd':>13}{'GiB':>7}"
    heading += f"{'MHz':>6}{'W':>5}{'J/TFLOP':>9}{'error':>9}"
    print(heading + "\n" + "-" * len(heading))
    programs: Programs = {}
    with Clock(n) as clock:
        for index in args.cases:
            case, names = CASES[index]
            makers = strategies(case, n)
            chosen = [name for name in names if name in (args.strategies or names)]
            rows = measure(
                case, {name: makers[name] for name in chosen}, n, programs,
                turns=args.turns, seconds=args.seconds, clock=clock,
            )  # fmt: skip
            print("\n".join(_lines(rows)), flush=True)
            results.rows += rows
            # After every case, so that a later failure loses nothing.
            if args.json is not None:
                results.save(args.json)
    if args.png is not None:
        plot.draw(results, args.png)


def _lines(rows: Sequence[Row]) -> list[str]:
    """A line of each row of a case."""
    timed = {row.peer: row for row in rows if not row.note}
    alone = timed.get(ALL_ALONE) or timed.get(ALONE)
    lines = []
    for row in rows:
        line = f"{row.case:34}{row.peer:22}"
        if row.note:
            lines.append(f"{line}  {row.note}")
            continue
        for what in ("forward", "both"):
            rate = getattr(row, what)
            share = f" ({rate / getattr(alone, what):6.1%})" if alone else " " * 9
            line += f"{f'{rate:4.0f}{share}':>13}"
        line += f"{row.memory:7.2f}{row.mhz:6.0f}{row.watts:5.0f}{row.watts / row.both:9.2f}"
        lines.append(f"{line}{row.error:9.1e}")
    return lines
