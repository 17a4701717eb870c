"""The command line of the benchmarks."""

from __future__ import annotations

import argparse

from burst_jax.bench import ampere, decode, kernels, loss, plot, ring, serve, train


def main() -> None:
    """Runs the benchmark that is named."""
    parser = argparse.ArgumentParser(prog="python -m burst_jax.bench", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    kernels.add_command(commands)
    ring.add_command(commands)
    train.add_command(commands)
    loss.add_command(commands)
    serve.add_command(commands)
    decode.add_command(commands)
    ampere.add_command(commands)
    plot.add_command(commands)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
