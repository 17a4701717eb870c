"""Benchmark of the bounds of the largest logit of each head, next to attention on one GPU.

A program computes causal attention and its gradients, the other one also
:func:`burst_jax.max_logits` of the same queries and keys, as a training step with the metric does
in each layer. Both are timed in turns; the difference is the metric's time. The bounds are compared
with all logits of a short sequence first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.results import save_json
from benchmarks.turns import Clock, add_turns, in_turns
from burst_jax import burst_attention, max_logits
from burst_jax.command_line import Unusable, integer
from burst_jax.ring.max_logits import ROWS, MaxLogits

# Tokens of the check, and its accepted relative difference from float32 logits of rounded inputs.
_CHECKED, _TOLERANCE = 1024, 1e-3


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer's attention, batch 1, causal, bfloat16.

    Attributes:
      length: number of tokens.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      head_dim: number of features of a head.
      rows: queries per head whose logits are computed again.
    """

    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rows: int = ROWS

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the cotangent of the output, standard normal."""
        keys = jax.random.split(jax.random.key(self.length), 4)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        return tuple(
            jax.random.normal(key, (1, self.length, count, self.head_dim), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        )

    def program(self, mesh: Mesh, *, measures: bool) -> Any:
        """``(q, k, v, do) -> (out, gradients, bounds)``; without ``measures`` bounds are None."""
        options: Any = {"mesh": mesh, "is_causal": True}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, lse = burst_attention(q, k, v, return_residual=True, **options)
            return out, max_logits(q, k, lse, rows=self.rows, **options) if measures else None

        @jax.jit
        def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
            out, vjp, found = jax.vjp(attend, q, k, v, has_aux=True)
            return out, vjp(do), found

        return run


def is_right(shape: Shape, mesh: Mesh) -> bool:
    """Whether the bounds of ``_CHECKED`` tokens enclose the largest logits, and some are these."""
    shape = dataclasses.replace(shape, length=_CHECKED)
    q, k, v, do = shape.arrays()
    found: MaxLogits = shape.program(mesh, measures=True)(q, k, v, do)[2]
    lower, upper = (np.asarray(x, np.float64) for x in found)
    q, k = (np.asarray(x.astype(jnp.float32), np.float64)[0] for x in (q, k))
    k = k.repeat(shape.heads // shape.kv_heads, 1)
    logits = shape.head_dim**-0.5 * np.einsum("qnh,knh->nqk", q, k)
    largest = np.where(np.tri(_CHECKED, dtype=bool), logits, -math.inf).max((1, 2))
    slack = _TOLERANCE * largest
    near = (np.abs(lower - largest) <= slack).mean()
    return bool((lower <= largest + slack).all() and (largest <= upper + slack).all() and near > 0)


def measure(
    shape: Shape, rows: Sequence[int], mesh: Mesh, args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """Rows of the table, for each number of rows: milliseconds with the metric and without it."""
    arrays = shape.arrays()
    shapes: dict[int | None, Shape] = {None: shape}
    shapes |= {count: dataclasses.replace(shape, rows=count) for count in rows}
    with ThreadPoolExecutor(len(shapes)) as pool:
        compiling = {
            count: pool.submit(
                each.program(mesh, measures=count is not None).lower(*arrays).compile
            )
            for count, each in shapes.items()
        }
    calls: dict[Any, Any] = {
        count: (functools.partial(program.result(), *arrays), jax.block_until_ready)
        for count, program in compiling.items()
    }
    turns = in_turns(calls, turns=args.turns, seconds=args.seconds, clock=clock)
    seconds = {count: [turn.seconds for turn in each] for count, each in turns.items()}
    without, found = statistics.median(seconds[None]), []
    for count in rows:
        measured = statistics.median(seconds[count])
        found.append({
            "length": shape.length, "rows": count, "ms": 1e3 * without, "ms_with": 1e3 * measured,
            "us": 1e6 * (measured - without), "share": measured / without - 1,
            "turns": {"without": seconds[None], "with": seconds[count]},
        })  # fmt: skip
    return found


def run(args: argparse.Namespace) -> None:
    """Checks, times, prints the table and saves it."""
    require_gpus("benchmarks max-logits")
    require_outputs(args.json)
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,), devices=[device])
    shape = Shape(0, args.heads, args.kv_heads, args.head_dim)
    print(f"{device.device_kind}, jax {jax.__version__}; causal attention, forward and backward, "
          f"{args.heads}/{args.kv_heads} heads x {args.head_dim}, bfloat16\n")  # fmt: skip
    for rows in args.rows:
        if not is_right(dataclasses.replace(shape, rows=rows), mesh):
            raise Unusable(f"the bounds of {_CHECKED} tokens, --rows {rows}, are wrong: not timed")
    heading = f"{'length':>9}{'rows':>6}{'ms':>10}{'with':>10}{'metric, us':>12}{'share':>8}"
    print(heading + "\n" + "-" * len(heading), flush=True)
    record: dict[str, Any] = {
        "device": device.device_kind, "jax": jax.__version__, "heads": args.heads,
        "kv_heads": args.kv_heads, "head_dim": args.head_dim, "rows": [],
    }  # fmt: skip
    with Clock() as clock:
        for length in args.lengths:
            of_length = dataclasses.replace(shape, length=length)
            for row in measure(of_length, args.rows, mesh, args, clock):
                print(f"{length:9,}{row['rows']:6}{row['ms']:10.3f}{row['ms_with']:10.3f}"
                      f"{row['us']:12.1f}{row['share']:8.2%}", flush=True)  # fmt: skip
                record["rows"].append(row)
                if args.json is not None:
                    save_json(record, args.json)


def add_command(commands: Any) -> None:
    """Adds ``max-logits`` to the command line."""
    parser = commands.add_parser("max-logits", help=__doc__.splitlines()[0])
    lengths = [8192, 32768, 65536]
    parser.add_argument("--lengths", nargs="+", type=integer(1), default=lengths, metavar="TOKENS")
    parser.add_argument("--heads", type=integer(1), default=32, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", type=integer(1), default=8, help="(%(default)s)")
    parser.add_argument("--head-dim", type=integer(1), default=128, help="(%(default)s)")
    parser.add_argument(
        "--rows", nargs="+", type=integer(1), default=[ROWS], help="queries per head (%(default)s)"
    )
    add_turns(parser)
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)
