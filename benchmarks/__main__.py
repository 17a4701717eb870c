"""``python -m benchmarks``: the command line of the benchmarks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from burst_jax.command_line import Parser, Unusable

# Modules of this package, in the order of ``--help``.
BENCHMARKS = (
    *("kernels", "ring", "packed", "train", "loss", "serve"),
    *("decode", "decode_step", "ampere", "flash", "versions", "modifiers"),
    *("max_logits", "linear", "linear_ring", "plan", "plot", "export", "exported"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark that is named."""
    parser = Parser(prog="python -m benchmarks", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        importlib.import_module(f"benchmarks.{benchmark}").add_command(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except Unusable as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
