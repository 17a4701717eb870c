"""The gated delta rule's kernels: checked against plain JAX in float32, then timed in turns."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.ampere import as_ampere
from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.linear_cases import CHECKED, HEAD_DIM, Case
from benchmarks.results import save_json
from benchmarks.turns import Clock, add_turns, in_turns
from burst_jax.command_line import Unusable, integer
from burst_jax.linear import gated_delta_rule
from burst_jax.linear.exchange import Maps
from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.chunks import Tokens
from pallas_kernels.linear.kernel_parts import Form, GradientInputs
from pallas_kernels.timing import relative_error

SCALE = HEAD_DIM**-0.5
# Accepted relative errors of bfloat16 results.
TOLERANCE = 1.5e-2
# FLOPs per token and value head of 128, with chunks of 64 tokens.
FORWARD_FLOPS, BOTH_FLOPS = 10.75e6 / 64, (10.75e6 + 28.35e6) / 64
FAMILIES = ("mosaic_sm90", "mosaic_sm80")
RESULTS = ("o", "last", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstart")
FORWARD, BOTH = "forward", "forward and backward"

# (name, function, arguments): these are a function of the results of the programs before it, by
# name. It is called with shapes first, so that all programs are compiled before any runs.
Program = tuple[str, Callable[..., Any], Callable[[dict[str, Any]], Sequence[Any]]]


class Family(NamedTuple):
    """A family of kernels.

    Attributes:
      name: its implementation's.
      operation: the module of its passes.
      states: that of the backward pass's scans.
      gradients: that of dQ and dK.
    """

    name: str
    operation: Any
    states: Any
    gradients: Any

    @classmethod
    def of(cls, name: str) -> Family:
        """By the implementation's name."""
        package = f"pallas_kernels.linear.{name.removeprefix('mosaic_')}"
        modules = (importlib.import_module(f"{package}.{part}") for part in cls._fields[1:])
        return cls(name, *modules)

    def prepare(self, inputs: Inputs) -> Any:
        """The inverses of all chunks, also where the forward scan would compute them itself."""
        return self.operation.prepare(inputs, form=Form.APART)

    def chunk_gradients(
        self, inputs: Inputs, vectors: jax.Array, do: jax.Array, scanned: Any
    ) -> Any:
        """The gradients of chunks, from the results of both scans."""
        if inputs.log_decay.ndim > inputs.beta.ndim:
            return self.operation.channel_gradients.gradients_of(
                inputs, vectors, do, scanned, SCALE
            )
        u, saved, dv, dsaved, _ = scanned
        given = GradientInputs(inputs.q, inputs.k, do, dv, u, saved, dsaved, vectors)
        return self.gradients.gradients(given, SCALE)


def gradients_of(
    rule: Callable[..., Any],
    inputs: Inputs,
    start: jax.Array,
    do: jax.Array,
    last: jax.Array,
) -> dict[str, jax.Array]:
    """All results of a rule ``(q, k, v, log_decay, beta, start) -> (o, last)``, by name."""
    results, vjp = jax.vjp(rule, *inputs[:5], start)
    return dict(zip(RESULTS, (*results, *vjp((do, last))), strict=True))


def _plain_results(inputs: Inputs, start: Any, do: Any, last: Any) -> dict[str, jax.Array]:
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), inputs._replace(tokens=None))
    rule = _rule_of("xla", inputs.tokens)
    return gradients_of(rule, arrays, start, do.astype(jnp.float32), last)


def _kernel_results(
    family: Family, inputs: Inputs, start: Any, do: Any, last: Any
) -> dict[str, jax.Array]:
    return gradients_of(_rule_of(family.name, inputs.tokens), inputs, start, do, last)


def _rule_of(implementation: str, tokens: Tokens | None) -> Callable[..., Any]:
    """``(q, k, v, log_decay, beta, start) -> (o, last)`` as users call it."""
    ids = None
    if tokens is not None:
        ids = jnp.where(tokens.valid, 1 + jnp.cumsum(tokens.begins, 1, dtype=jnp.int32), 0)

    def rule(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, start: Any) -> Any:
        return gated_delta_rule(
            q, k, v, log_decay, beta, segment_ids=ids, initial_state=start,
            return_final_state=True, implementation=implementation,
        )  # fmt: skip

    return rule


def _results_of_two_blocks(
    family: Family, inputs: Inputs, start: Any, do: Any, last: Any
) -> dict[str, jax.Array]:
    """The same by two blocks, as devices exchange them, and with inverses in a launch apart."""

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(2, -1, *x.shape[2:])

    def product(m: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("...ij,...jk->...ik", m, x, precision="highest")

    tokens = None if inputs.tokens is None else Tokens(*map(blocks, inputs.tokens))
    given = jax.tree.map(blocks, inputs._replace(tokens=None))._replace(tokens=tokens)
    do = blocks(do)
    if tokens is not None:
        do = jnp.where(tokens.valid[..., None, None], do, 0)
    operation, prepared = family.operation, family.prepare(given)
    first = jnp.concatenate([start, jnp.zeros_like(start)])
    m, ends = Maps.of_rows(operation.affine(given, prepared, first))
    starts = jnp.concatenate([start, ends[:1].mT])
    o, ends, kept = operation.forward(given, prepared, starts, SCALE)
    if kept is not None:
        prepared = kept
    zeros = jnp.zeros_like(starts)
    alone = operation.first_state_gradient(given, prepared, do, zeros, SCALE)
    lasts = jnp.concatenate([product(m[1:], last) + alone[1:], last])
    made = operation.backward(given, prepared, starts, do, lasts, SCALE)
    by_token = (o, *made[:5])
    o, *gradients = (x.reshape(1, -1, *x.shape[2:]) for x in by_token)
    return dict(zip(RESULTS, (o, ends[1:], *gradients, made.start[:1]), strict=True))


class Check:
    """A case's programs, compiled in threads, and the comparison of their results."""

    def __init__(self, name: str, case: Case, family: Family, pool: ThreadPoolExecutor):
        self.name = name
        arrays, programs = case.arrays(), {"plain": _plain_results}
        programs["kernels"] = functools.partial(_kernel_results, family)
        if case.batch == 1 and case.length % 128 == 0 and not case.is_padded:
            programs["two blocks"] = functools.partial(_results_of_two_blocks, family)
        self._arrays = arrays
        self._compiled = {
            name: pool.submit(jax.jit(f).lower(*arrays).compile) for name, f in programs.items()
        }

    def run(self) -> list[dict[str, Any]]:
        """A row of each program: errors by result, and whether repeats have the same bits."""
        want = self._compiled.pop("plain").result()(*self._arrays)
        rows = []
        for program, compiled in self._compiled.items():
            runs = [compiled.result()(*self._arrays) for _ in range(4)]
            same = all(bool(jnp.array_equal(r[n], runs[0][n])) for r in runs for n in RESULTS)
            errors = {n: relative_error(runs[0][n], want[n].astype(jnp.float32)) for n in RESULTS}
            right = same and max(errors.values()) < TOLERANCE
            # JSON has no infinity, the error of a result that is not finite.
            errors = {n: e if math.isfinite(e) else None for n, e in errors.items()}
            rows.append(
                {"check": self.name, "program": program, "same_bits": same, "right": right}
                | {"errors": errors}
            )
        return rows


def whole_programs(rule: Callable[..., Any], case: Case) -> list[Program]:
    """Forward, and forward and backward, of a rule of q, k, v, log_decay and beta."""
    inputs, _, do, _ = case.arrays()

    def both(q, k, v, log_decay, beta, do):
        o, vjp = jax.vjp(rule, q, k, v, log_decay, beta)
        return o, *vjp(do)

    return [
        (FORWARD, rule, lambda done: inputs[:5]),
        (BOTH, both, lambda done: (*inputs[:5], do)),
    ]


def kernel_programs(case: Case, family: Family) -> list[Program]:
    """Each kernel by itself."""
    inputs, start, do, last = case.arrays()
    operation = family.operation

    def both_scans(*given: Any) -> Any:
        return family.states.states(*operation.backward_inputs(*given), SCALE)

    def gradient_inputs(done: dict[str, Any]) -> Any:
        return inputs, done["prepare"].vectors, do, done["states"]

    scan = functools.partial(operation.forward, scale=SCALE)

    def scan_with_inverses(inputs: Inputs, vectors: jax.Array, start: jax.Array) -> Any:
        return scan(inputs, operation.Prepared(vectors, None), start)

    ahead: list[Program] = []
    if not case.channels and operation.form_of(inputs) is Form.AHEAD:
        ahead = [(
            "scan with inverses", scan_with_inverses,
            lambda done: (inputs, done["prepare"].vectors, start),
        )]  # fmt: skip
    return [
        ("prepare", family.prepare, lambda done: (inputs,)),
        ("scan", scan, lambda done: (inputs, done["prepare"], start)),
        *ahead,
        ("affine map", operation.affine, lambda done: (inputs, done["prepare"], start)),
        ("states", both_scans, lambda done: (inputs, done["prepare"], start, do, last)),
        (
            "first state's gradient",
            functools.partial(operation.first_state_gradient, scale=SCALE),
            lambda done: (inputs, done["prepare"], do, last),
        ),
        ("gradients", family.chunk_gradients, gradient_inputs),
    ]


def _load(path: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Unusable(f"--baseline {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_command(commands: Any) -> None:
    """Adds ``linear`` to the command line."""
    parser = commands.add_parser("linear", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", nargs="+", type=integer(128), default=[32768, 8192], metavar="TOKENS"
    )
    parser.add_argument("--heads", type=integer(1), default=32, help="value heads (%(default)s)")
    parser.add_argument("--key-heads", type=integer(1), help="default: as many as value heads")
    parser.add_argument(
        "--channels", action="store_true",
        help="a decay per key channel (Kimi Delta Attention), with Hopper's kernels",
    )  # fmt: skip
    parser.add_argument(
        "--head-dims", nargs=2, type=integer(1), default=[HEAD_DIM] * 2, metavar=("H", "HV"),
        help="of keys and values; those unlike 128 are padded: whole calls alone are timed",
    )  # fmt: skip
    parser.add_argument(
        "--implementation", choices=FAMILIES, default=FAMILIES[0],
        help="mosaic_sm80 is compiled for an A100 on a newer GPU, too (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE",
        help="a Python file with rule(q, k, v, log_decay, beta) -> o, timed in the same turns, and"
        " kernels(inputs, start, do, last, scale), a list like that of kernel_programs",
    )  # fmt: skip
    add_turns(parser)
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Checks, times, prints the table and saves it."""
    require_gpus("benchmarks linear")
    require_outputs(args.json)
    begin, rows = time.perf_counter(), []
    baseline = None if args.baseline is None else _load(args.baseline)
    family = Family.of(args.implementation)
    if args.channels and family.name != FAMILIES[0]:
        raise Unusable(f"--channels needs --implementation {FAMILIES[0]}, not {family.name}")
    record: dict[str, Any] = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "implementation": family.name, "rows": rows,
    }  # fmt: skip

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if args.json is not None:  # After every row: a later failure loses none.
            save_json(record, args.json)

    print(f"{record['device']}, jax {record['jax']}, {family.name}", flush=True)
    ampere = as_ampere() if family.name == "mosaic_sm80" else contextlib.nullcontext()
    with ampere, ThreadPoolExecutor(14) as pool:
        checks = [
            Check(name, dataclasses.replace(case, **_form(args)), family, pool)
            for name, case in CHECKED.items()
        ]
        cases = _timed_cases(args)
        timed = [
            (case, _compiled(case, detailed, family, baseline, pool)) for case, detailed in cases
        ]
        print(f"lowered after {time.perf_counter() - begin:.0f} s", flush=True)
        wrong = False
        for check in checks:
            try:
                made = check.run()
            except Exception as error:  # Times are of interest all the same, marked as wrong.
                print(f"{check.name}: {type(error).__name__}: {error}"[:2000], flush=True)
                wrong, made = True, []
            for row in made:
                add(row)
                wrong |= not row["right"]
                print(_line(row), flush=True)
        print(f"checked after {time.perf_counter() - begin:.0f} s", flush=True)
        with Clock() as clock:
            for case, programs in timed:
                for row in _time(case, programs, args, clock):
                    add(row | {"wrong": wrong})
    print(f"done after {time.perf_counter() - begin:.0f} s\n")
    _print_table([row for row in rows if "ms" in row], [str(case) for case, _ in cases], wrong)


def _line(row: dict[str, Any]) -> str:
    """A check in words."""
    errors = (
        f"{name} {'not finite' if e is None else f'{e:.1e}'}" for name, e in row["errors"].items()
    )
    bits = "same bits" if row["same_bits"] else "BITS DIFFER"
    mark = "" if row["right"] else "  WRONG"
    return f"{row['check']}, {row['program']}: {' '.join(errors)}; {bits}{mark}"


def _form(args: argparse.Namespace) -> dict[str, Any]:
    """What all cases of a run share."""
    return {"channels": args.channels, "dims": tuple(args.head_dims)}


def _timed_cases(args: argparse.Namespace) -> list[tuple[Case, bool]]:
    """Whole sequences and two blocks of half of each, and whether kernels are timed alone."""
    key_heads = args.heads if args.key_heads is None else args.key_heads
    cases = []
    for length in args.lengths:
        case = Case(length, args.heads, key_heads, **_form(args))
        detailed = length == max(args.lengths) and not case.is_padded
        half = dataclasses.replace(case, length=length // 2, batch=2)
        cases += [(case, detailed), (half, detailed)]
    return cases


@dataclasses.dataclass
class _Compiling:
    """A program that a thread compiles.

    Attributes:
      side: "own" or "baseline".
      name: of the program.
      program: what will have been compiled.
      arguments: a function of the results of the side's programs before it.
    """

    side: str
    name: str
    program: Future[Any]
    arguments: Callable[[dict[str, Any]], Sequence[Any]]


def _compiled(
    case: Case, detailed: bool, family: Family, baseline: Any, pool: ThreadPoolExecutor
) -> list[_Compiling]:
    rule = functools.partial(gated_delta_rule, implementation=family.name)
    programs = [("own", program) for program in whole_programs(rule, case)]
    if detailed:
        programs += [("own", program) for program in kernel_programs(case, family)]
    if baseline is not None:
        programs += [("baseline", program) for program in whole_programs(baseline.rule, case)]
        if detailed and case.batch == 1:
            others = baseline.kernels(*case.arrays(), SCALE)
            programs += [("baseline", program) for program in others]
    shapes: dict[str, dict[str, Any]] = {"own": {}, "baseline": {}}
    compiling = []
    for side, (name, f, arguments) in programs:
        lowered = jax.jit(f).lower(*arguments(shapes[side]))
        shapes[side][name] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
        )
        compiling.append(_Compiling(side, name, pool.submit(lowered.compile), arguments))
    return compiling


def _time(
    case: Case, compiling: list[_Compiling], args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """Rows of one case."""
    calls, memory = {}, {}
    done: dict[str, dict[str, Any]] = {"own": {}, "baseline": {}}
    for each in compiling:
        key, results = (each.side, each.name), done[each.side]
        try:
            program, arguments = each.program.result(), each.arguments(results)
            made = program(*arguments)
            if each.name not in (FORWARD, BOTH):
                results[each.name] = made
        except Exception as error:  # The table lacks it, and the benchmark continues.
            print(f"{case}, {key}: {type(error).__name__}: {error}"[:2000], flush=True)
            continue
        calls[key] = (lambda p=program, a=arguments: p(*a)), jax.block_until_ready
        memory[key] = program.memory_analysis().temp_size_in_bytes / 2**30
    measured = in_turns(calls, turns=args.turns, seconds=args.seconds, clock=clock)
    rows = []
    for (side, name), times in measured.items():
        ms = 1e3 * statistics.median(turn.seconds for turn in times)
        row = {
            "case": str(case), "side": side, "program": name, "ms": ms, "gib": memory[side, name],
            "turns": [1e3 * turn.seconds for turn in times],
        }  # fmt: skip
        flops = {FORWARD: FORWARD_FLOPS, BOTH: BOTH_FLOPS}.get(name)
        if flops is not None and not case.is_padded:
            row["tflops"] = 1e-9 * flops * case.batch * case.length * case.heads / ms
        rows.append(row)
        print(f"{case}, {side}, {name}: {ms:.3f} ms", flush=True)
    return rows


def _print_table(rows: list[dict[str, Any]], cases: list[str], wrong: bool) -> None:
    print("ms" + (" (results are WRONG)" if wrong else ""))
    print(" " * 34 + "".join(f"{case:>34}" for case in cases))
    names = list(dict.fromkeys((row["side"], row["program"]) for row in rows))
    for side, name in names:
        cells = []
        for case in cases:
            match = [r for r in rows if (r["case"], r["side"], r["program"]) == (case, side, name)]
            cell = f"{match[0]['ms']:.3f}" if match else ""
            if match and "tflops" in match[0]:
                cell += f" ({match[0]['tflops']:.0f} TFLOP/s, {match[0]['gib']:.2f} GiB)"
            cells.append(f"{cell:>34}")
        print(f"{side + ', ' + name:34}" + "".join(cells))
