"""``python -m benchmarks``: the command line of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import (
    ampere,
    decode,
    decode_step,
    kernels,
    loss,
    packed,
    plan,
    plot,
    ring,
    serve,
    train,
)
from burst_jax.command_line import Parser, Unusable


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark that is named."""
    parser = Parser(prog="python -m benchmarks", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for benchmark in (
        kernels,
        ring,
        packed,
        train,
        loss,
        serve,
        decode,
        decode_step,
        ampere,
        plan,
        plot,
    ):
        benchmark.add_command(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except Unusable as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
