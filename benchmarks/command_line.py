"""Command-line options of the benchmarks, and checks before they measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import plot
from burst_jax.command_line import Unusable, check_output


def require_gpus(what: str, least: int = 1) -> None:
    """Raises unless JAX has at least ``least`` NVIDIA GPUs.

    On a CPU the benchmarked sizes would take hours and tens of gigabytes.

    Args:
      what: the command, for the message.
      least: required number of GPUs.

    Raises:
      Unusable: with the required number and what is present.
    """
    needs = "an NVIDIA GPU" if least == 1 else f"{least} or more NVIDIA GPUs"
    platform, count = jax.default_backend(), len(jax.devices())
    if platform != "gpu":
        raise Unusable(f"{what} needs {needs}; JAX runs on {platform!r} here")
    if count < least:
        raise Unusable(f"{what} needs {needs}; JAX sees {count}")


def require_outputs(json: Path | None = None, png: Path | None = None) -> None:
    """Raises unless the output files can be written, and a PNG can be drawn.

    Raises:
      Unusable: a folder that cannot be created or written, a path that is a folder, or no
        matplotlib.
    """
    try:
        for path in (json, png):
            if path is not None:
                check_output(path)
        if png is not None:
            plot.figure_class()
    except (OSError, ImportError) as error:
        raise Unusable(str(error)) from error


def add_cases(parser: Any, names: Sequence[str]) -> None:
    """Adds ``--cases``, indices of the named cases, to a benchmark's command line."""
    parser.add_argument(
        "--cases", nargs="+", type=int, default=list(range(len(names))), metavar="I",
        choices=range(len(names)), help="; ".join(f"{i}: {name}" for i, name in enumerate(names)),
    )  # fmt: skip


def add_outputs(parser: Any, *, png: bool = True) -> None:
    """Adds ``--json`` and ``--png`` to a benchmark's command line."""
    for_plot = ", for plot" if png else ""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"save the results here{for_plot}"
    )
    if png:
        parser.add_argument("--png", type=plot.png, metavar="FILE", help="draw the results here")
