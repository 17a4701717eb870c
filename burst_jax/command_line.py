"""Command lines of ``python -m``, benchmarks and examples: options that check themselves."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from burst_jax.errors import printable, shown

# Devices on a machine without GPUs.
_CPU_DEVICES = 8


class Unusable(Exception):
    """The program cannot do what its options ask for: the sentence for ``Parser.error``."""


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviations, prints errors on one line, and then exits with 2."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation may become ambiguous when a flag is added.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage; a list in it keeps its lines."""
        lines = "\n".join(printable(line)[:1500] for line in message.split("\n"))
        self.exit(2, f"{self.prog}: error: {lines}\n")


def in_flags(error: Exception, **flags: str) -> str:
    """The message of an error of the library, with flags instead of names of its arguments."""
    # Not in the name of a file.
    names = rf"(?<![\w/.'-])({'|'.join(flags)})(?![\w/.'-])"
    return re.sub(names, lambda found: flags[found[0]], str(error))


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A ``type`` of ``add_argument``: integers from ``least`` to ``most``."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: it must be an integer from {least} to {most}"
        )

    return convert


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A ``type`` of ``add_argument``: finite numbers from ``least`` to ``most``."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= float(text) <= most and math.isfinite(float(text)):
                return float(text)
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: it must be a finite number, at least {least:g}{upper}"
        )

    return convert


def folder(text: str) -> Path:
    """A ``type`` of ``add_argument``: a folder that exists."""
    try:
        if text and Path(text).is_dir():
            return Path(text)
        reason = "there is no such folder"
    except OSError as error:  # A name that is too long.
        reason = str(error.strerror)
    raise argparse.ArgumentTypeError(f"{shown(text)}: {reason}")


def check_output(path: Path) -> None:
    """Makes sure that a file can be written, before the work whose result it gets.

    Its folder is created.

    Raises:
      OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = f"{shown(str(path))} cannot be written: {error.strerror}"
        raise OSError(f"{reason}; name another file") from error


def file_or_folder(text: str) -> Path:
    """A ``type`` of ``add_argument``: a path. Python takes an empty one for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'': it must name a file or a folder")
    return Path(text)


def file(text: str) -> Path:
    """A ``type`` of ``add_argument``: a path. Python takes an empty one for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'': it must name a file")
    return Path(text)


def use_cpu_devices() -> None:
    """Makes 8 CPU devices, unless ``JAX_NUM_CPU_DEVICES`` is set; no effect with GPUs."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
