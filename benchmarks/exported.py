"""Times the programs of a folder that ``benchmarks export`` wrote, those of a group in turns."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

# Registers what compiled Mosaic kernels call.
import jax.experimental.mosaic.gpu
import jax.numpy as jnp

from benchmarks import ahead
from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.results import gib, save_json
from benchmarks.turns import Clock, add_turns, in_turns
from burst_jax.command_line import Unusable, integer
from burst_jax.parallel.peak import peak_flops

_THREADS = 28


class _Call:
    """A compiled program with its arrays, of which a call may replace some."""

    def __init__(self, program: Any, arrays: list[jax.Array], carried: int) -> None:
        self._program, self._arrays, self._carried = program, arrays, carried

    def __call__(self) -> Any:
        results = jax.tree.leaves(self._program(*self._arrays))
        self._arrays[: self._carried] = results[: self._carried]
        return results[self._carried :]


def differences(results: list[jax.Array], first: list[jax.Array]) -> list[float] | None:
    """Of each result the norm of the difference from the first program's, over its norm.

    None if the programs have results of other shapes; infinity where a result is not finite.
    """
    if [x.shape for x in results] != [x.shape for x in first]:
        return None

    @jax.jit
    def difference(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()), jnp.linalg.norm(y.ravel())

    found = []
    for x, y in zip(results, first, strict=True):
        distance, norm = map(float, difference(x, y))
        found.append(0.0 if distance == 0 else distance / norm if norm else math.inf)
    return [each if math.isfinite(each) else math.inf for each in found]


def numbers(results: list[jax.Array]) -> str:
    """Those results that are one number, such as a loss; not the logits of a decoding step."""
    return " ".join(f"{float(x):.6g}" for x in results if x.ndim == 0)


def add_command(commands: Any) -> None:
    """Adds ``exported`` to the command line."""
    parser = commands.add_parser("exported", help=__doc__)
    parser.add_argument("folder", type=Path, help="what benchmarks export wrote")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="groups whose names contain a word"
    )
    parser.add_argument(
        "--compare", type=integer(0), default=0, metavar="CALLS",
        help="print the largest relative difference of each result from the group's first program"
        " in this number of calls; for programs that compute the same, and keep nothing from call"
        " to call (default: %(default)s)",
    )  # fmt: skip
    add_turns(parser)
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compiles all programs in threads, times and prints them by group, and saves the rows.

    Exit status 1 if one failed.
    """
    try:
        rows = ahead.read(args.folder)
    except OSError as error:
        raise Unusable(f"{args.folder} has no programs: {error}") from error
    rows = [row for row in rows if any(word in row["group"] for word in args.only)]
    if not rows:
        raise Unusable(f"--only {args.only}: no group of {args.folder} has such a name")
    versions = {row["jax"] for row in rows}
    if versions != {jax.__version__}:
        raise Unusable(
            f"{args.folder} was written by JAX {', '.join(sorted(versions))}; "
            f"this is JAX {jax.__version__}"
        )
    require_gpus("benchmarks exported", max(row["devices"] for row in rows))
    require_outputs(args.json)
    device = jax.devices()[0].device_kind
    record: dict[str, Any] = {"device": device, "jax": jax.__version__, "rows": []}
    print(f"{len(jax.devices())} x {device}, jax {jax.__version__}", flush=True)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    with ThreadPoolExecutor(_THREADS) as pool, Clock(len(jax.devices())) as clock:
        compiling = [
            (group, [(row, pool.submit(_compile, args.folder, row)) for row in members])
            for group, members in groups.items()
        ]
        # Threads that compile would delay the calls of short programs.
        wait(each for _, programs in compiling for _, each in programs)
        for group, programs in compiling:
            print(group, flush=True)
            record["rows"] += _timed(programs, args, clock)
            if args.json is not None:
                save_json(record, args.json)
    if any("error" in row for row in record["rows"]):
        sys.exit(1)


def _compile(folder: Path, row: dict[str, Any]) -> tuple[Any, Callable[[], list[jax.Array]]]:
    ready = ahead.load(folder, row)
    return ready.lowered.compile(compiler_options=ready.options), ready.arguments


def _text(errors: list[list[float] | None]) -> str:
    """The largest of all calls, by result."""
    known = [each for each in errors if each is not None]
    if not known:
        return "results of other shapes"
    return "differs by " + " ".join(f"{max(each):.1e}" for each in zip(*known, strict=True))


def _timed(
    programs: list[tuple[dict[str, Any], Future[Any]]], args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """Rows of one group's programs; that of one that fails has an "error"."""
    calls: dict[Any, Any] = {}
    made: dict[str, dict[str, Any]] = {}
    failed: list[dict[str, Any]] = []
    want: list[jax.Array] | None = None
    for row, compiling in programs:
        try:
            program, arguments = compiling.result()
            call = _Call(program, arguments(), row["carried"])
            results = jax.block_until_ready(call())
            want = results if want is None else want
            if row["carried"] and (found := numbers(results)):
                print(f"  {row['name']:36}results of the first call: {found}", flush=True)
            compared = 0 if row["carried"] else args.compare
            errors = [differences(call(), want) for _ in range(compared)]
            if errors:
                print(f"  {row['name']:36}{_text(errors)}", flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:400]
            print(f"  {row['name']}: {text}", flush=True)
            failed.append({"group": row["group"], "name": row["name"], "error": text})
            continue
        calls[row["name"]] = call, jax.block_until_ready
        made[row["name"]] = {key: row[key] for key in ("group", "name", "devices", "flops")}
        made[row["name"]] |= {"gib": gib(program), "tokens": row["tokens"]}
    del want
    first: float | None = None
    timed = in_turns(calls, turns=args.turns, seconds=args.seconds, clock=clock, called=True)
    for name, turns in timed.items():
        row = made[name]
        seconds = statistics.median(turn.seconds for turn in turns)
        first = seconds if first is None else first
        row |= {"ms": 1e3 * seconds, "turns": [1e3 * turn.seconds for turn in turns]}
        row |= {"mhz": statistics.median(turn.mhz for turn in turns)}
        row |= {"watts": statistics.median(turn.watts for turn in turns)}
        text = f"  {name:36}{row['ms']:10.3f} ms  {first / seconds:6.3f} of the first's rate"
        if row["flops"]:
            row["tflops"] = 1e-12 * row["flops"] / seconds
            text += f"  {row['tflops']:5.0f} TFLOP/s"
            peak = peak_flops(jax.devices()[0].device_kind)
            text += "" if peak is None else f" ({1e12 * row['tflops'] / peak:.1%} of the peak)"
        if row["tokens"]:
            text += f"  {row['tokens'] / seconds:9,.0f} tokens/s"
        print(
            f"{text}  {row['gib']:.2f} GiB  {row['mhz']:.0f} MHz {row['watts']:.0f} W", flush=True
        )
    return [*made.values(), *failed]
