"""The gated delta rule over all GPUs and on one, with as many tokens per GPU, timed in turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import burst_jax
from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.linear import BOTH, BOTH_FLOPS, FORWARD, FORWARD_FLOPS, HEAD_DIM
from benchmarks.results import save_json
from benchmarks.turns import Clock, add_turns, in_turns
from burst_jax import linear
from burst_jax.command_line import integer
from burst_jax.layouts.parse import parse_layout
from burst_jax.linear.exchange import arriving
from burst_jax.linear.runs import DeviceRuns, device_runs
from pallas_kernels.linear.sm90.operation import MOSAIC_SM90

ONE = "one GPU"
EXCHANGE = "exchange of maps"
_IMPLEMENTATION = MOSAIC_SM90.name


class Sizes(NamedTuple):
    """Of a case; ``tokens`` are those of each GPU, ``channels`` as of ``benchmarks linear``."""

    tokens: int
    heads: int
    key_heads: int
    channels: bool = False

    def __str__(self) -> str:
        form = ", a decay per key channel" if self.channels else ""
        return f"{self.tokens:,} tokens per GPU, {self.key_heads}/{self.heads} heads{form}"


def program(layout: str, mesh: Mesh, *, backward: bool) -> Callable[..., Any]:
    """Forward, or forward and backward, with tokens in the layout's order on the mesh."""

    def rule(*arrays: Any) -> Any:
        return linear.gated_delta_rule(
            *arrays, mesh=mesh, layout=layout, implementation=_IMPLEMENTATION
        )

    def both(*given: Any) -> Any:
        *arrays, do = given
        o, vjp = jax.vjp(rule, *arrays)
        # As a loss does; both exchanges would be one otherwise.
        o, do = lax.optimization_barrier((o, do))
        return o, *vjp(do)

    return both if backward else rule


def exchange(layout: str, mesh: Mesh, sizes: Sizes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The exchange of whole runs' maps alone, and its arrays."""
    runs = device_runs(parse_layout(layout), ("seq",), mesh.size, "this benchmark")
    assert isinstance(runs, DeviceRuns)

    def run(rows: Any) -> Any:
        return arriving(runs, rows, compose=MOSAIC_SM90.compose)[0]

    shape = mesh.size * runs.count, sizes.heads, 2 * HEAD_DIM, HEAD_DIM
    spread = NamedSharding(mesh, P("seq"))
    drawn = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape) / 12, out_shardings=spread
    )()
    return jax.shard_map(run, mesh=mesh, in_specs=P("seq"), out_specs=P("seq")), (drawn,)


def arrays_on(mesh: Mesh, sizes: Sizes) -> list[jax.Array]:
    """Inputs and the gradient of the output, drawn on the devices."""
    length = sizes.tokens * mesh.size
    keys = iter(jax.random.split(jax.random.key(0), 6))
    by_key, by_head = (1, length, sizes.key_heads, HEAD_DIM), (1, length, sizes.heads)
    spread = NamedSharding(mesh, P(None, "seq"))

    def drawn(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(function, out_shardings=spread)(next(keys))

    def unit(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, by_key, jnp.float32)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    def values(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (*by_head, HEAD_DIM), jnp.bfloat16)

    decays = (*by_head, HEAD_DIM) if sizes.channels else by_head
    return [
        *(drawn(unit) for _ in range(2)),
        drawn(values),
        drawn(lambda key: -0.1 * jax.random.uniform(key, decays, jnp.float32)),
        drawn(lambda key: jax.random.uniform(key, by_head, jnp.float32)),
        drawn(values),
    ]


def meshes() -> dict[str, Mesh]:
    """One GPU, and all of them for both layouts."""
    devices, kinds = np.array(jax.devices()), (AxisType.Auto,)
    every = Mesh(devices, ("seq",), axis_types=kinds)
    return {
        ONE: Mesh(devices[:1], ("seq",), axis_types=kinds), "contiguous": every, "zigzag": every,
    }  # fmt: skip


def add_command(commands: Any) -> None:
    """Adds ``linear-ring`` to the command line."""
    parser = commands.add_parser("linear-ring", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", nargs="+", type=integer(128), default=[16384, 65536], metavar="TOKENS",
        help="per GPU (default: 16384 65536)",
    )  # fmt: skip
    parser.add_argument("--heads", type=integer(1), default=32, help="value heads (%(default)s)")
    parser.add_argument("--key-heads", type=integer(1), help="default: as many as value heads")
    parser.add_argument(
        "--channels", action="store_true", help="a decay per key channel (Kimi Delta Attention)"
    )
    add_turns(parser)
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Times, prints and saves a row per case and program."""
    require_gpus("benchmarks linear-ring", 2)
    require_outputs(args.json)
    key_heads = args.heads if args.key_heads is None else args.key_heads
    rows: list[dict[str, Any]] = []
    record = {"device": jax.devices()[0].device_kind, "devices": jax.device_count()}
    record |= {"jax": jax.__version__, "rows": rows}
    print(f"{record['devices']} x {record['device']}, jax {record['jax']}", flush=True)
    with ThreadPoolExecutor(14) as pool:
        cases = [Sizes(each, args.heads, key_heads, args.channels) for each in args.tokens]
        compiling = [_compiling(sizes, pool) for sizes in cases]
        with Clock() as clock:
            for sizes, started in zip(cases, compiling, strict=True):
                rows += _timed(sizes, started, args, clock)
                if args.json is not None:
                    save_json(record, args.json)


def _compiling(sizes: Sizes, pool: ThreadPoolExecutor) -> dict[tuple[str, str], Any]:
    """By place and program: what threads compile, and its arrays."""
    options: Any = burst_jax.compiler_options()
    started: dict[tuple[str, str], Any] = {}

    def start(key: tuple[str, str], function: Callable[..., Any], arrays: Sequence[Any]) -> None:
        lowered = jax.jit(function).lower(*arrays)
        started[key] = pool.submit(lowered.compile, compiler_options=options), arrays

    by_mesh: dict[Mesh, list[jax.Array]] = {}
    for place, mesh in meshes().items():
        arrays = by_mesh.setdefault(mesh, arrays_on(mesh, sizes))
        layout = "contiguous" if place == ONE else place
        start((place, FORWARD), program(layout, mesh, backward=False), arrays[:5])
        start((place, BOTH), program(layout, mesh, backward=True), arrays)
        if place != ONE:
            start((place, EXCHANGE), *exchange(layout, mesh, sizes))
    return started


def _timed(
    sizes: Sizes, started: dict[tuple[str, str], Any], args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """Rows of a case, with its rate over that of one GPU."""
    calls, memory = {}, {}
    for key, (compiling, arrays) in started.items():
        compiled = compiling.result()
        memory[key] = compiled.memory_analysis().temp_size_in_bytes / 2**30
        calls[key] = (lambda p=compiled, a=arrays: p(*a)), jax.block_until_ready
    measured = in_turns(calls, turns=args.turns, seconds=args.seconds, clock=clock)
    ms = {
        key: 1e3 * statistics.median(turn.seconds for turn in times)
        for key, times in measured.items()
    }
    case = str(sizes)
    print(case, flush=True)
    rows = []
    for (place, name), each in ms.items():
        row = {"case": case, "place": place, "program": name, "ms": each}
        row["turns"] = [1e3 * turn.seconds for turn in measured[place, name]]
        row["gib"] = memory[place, name]
        text = f"  {place:12} {name:22} {each:8.3f} ms"
        flops = {FORWARD: FORWARD_FLOPS, BOTH: BOTH_FLOPS}.get(name)
        if flops is not None:
            row["tflops"] = 1e-9 * flops * sizes.tokens * sizes.heads / each
            row["of_one"] = ms[ONE, name] / each
            text += f"  {row['tflops']:4.0f} TFLOP/s per GPU, {row['of_one']:.3f} of one GPU's rate"
            text += f", {row['gib']:.2f} GiB"
        rows.append(row)
        print(text, flush=True)
    return rows
