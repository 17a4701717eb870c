"""Command-line options of the benchmarks, and checks before they measure."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks import plot


def require_gpus(what: str, least: int = 1) -> None:
    """Exits unless JAX has at least ``least`` NVIDIA GPUs.

    On a CPU the benchmarked sizes would take hours and tens of gigabytes.

    Args:
      what: the command, for the message.
      least: required number of GPUs.

    Raises:
      SystemExit: with the required number and what is present.
    """
    needs = "an NVIDIA GPU" if least == 1 else f"{least} or more NVIDIA GPUs"
    platform, count = jax.default_backend(), len(jax.devices())
    if platform != "gpu":
        raise SystemExit(f"{what} needs {needs}; JAX runs on {platform!r} here")
    if count < least:
        raise SystemExit(f"{what} needs {needs}; JAX sees {count}")


def require_outputs(json: Path | None = None, png: Path | None = None) -> None:
    """Exits unless the output files can be written, and a PNG can be drawn.

    Raises:
      SystemExit: a folder that cannot be created or written, a path that is a folder, or no
        matplotlib.
    """
    try:
        for path in (json, png):
            if path is None:
                continue
            if path.is_dir():
                raise SystemExit(f"{path} is a folder: name a file in it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        if png is not None:
            plot.figure_class()
    except (OSError, ImportError) as error:
        raise SystemExit(str(error)) from error


def positive(text: str) -> int:
    """An integer of 1 or more from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be an integer of 1 or more")
    return int(text)


def add_outputs(parser: Any, *, png: bool = True) -> None:
    """Adds ``--json`` and ``--png`` to a benchmark's command line."""
    for_plot = ", for plot" if png else ""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"save the results here{for_plot}"
    )
    if png:
        parser.add_argument("--png", type=plot.png, metavar="FILE", help="draw the results here")
