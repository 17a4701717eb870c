"""The command line of the benchmarks."""

from __future__ import annotations

import argparse

from benchmarks import (
    ampere,
    decode,
    kernels,
    loss,
    plan_rings,
    plan_steps,
    plot,
    ring,
    serve,
    train,
)


def main() -> None:
    """Runs the benchmark that is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    kernels.add_command(commands)
    ring.add_command(commands)
    train.add_command(commands)
    loss.add_command(commands)
    serve.add_command(commands)
    decode.add_command(commands)
    ampere.add_command(commands)
    plot.add_command(commands)
    plan = commands.add_parser("plan", help="measured rates next to the planner's estimates")
    plan.set_defaults(run=_print_plan)
    args = parser.parse_args()
    args.run(args)


def _print_plan(args: argparse.Namespace) -> None:
    del args
    print("\n\n".join([*map(plan_rings.table, plan_rings.load()), plan_steps.table()]))


if __name__ == "__main__":
    main()
