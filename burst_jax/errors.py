"""Checks and errors that every package needs: integers, spelling, libraries of an extra."""

from __future__ import annotations

import difflib
import importlib
import numbers
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: which of ``names`` is spelled like it."""
    close = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


def check_integer(name: str, value: Any, least: int) -> int:
    """``value`` as a Python int.

    Raises:
      ValueError: it is no integer, or smaller than ``least``.
    """
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or value < least:
        raise ValueError(f"{name} is {value!r}: it must be an integer, at least {least}")
    return int(value)


def check_seed(seed: Any) -> int:
    """``seed`` as a Python int.

    Raises:
      ValueError: it is not in 0 ... 2**32 - 1. JAX would take its last 32 bits, and so 0 for 2**32.
    """
    if check_integer("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}: it must be below 2**32")
    return int(seed)


def optional(module: str, *, user: str, extra: str) -> ModuleType:
    """A library that one of the package's extras brings, imported when it is needed.

    Args:
      module: name of the library, or of a module in it.
      user: what needs it, the subject of the message.
      extra: the extra.

    Raises:
      ImportError: it is not installed; the message says what to install. An installed library that
        misses another one raises the error that names that one.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error, module, user=user, extra=extra) from None


def missing(error: ModuleNotFoundError, module: str, *, user: str, extra: str) -> ImportError:
    """What to raise where an import raised ``error``; other arguments as of :func:`optional`."""
    library = module.partition(".")[0]
    if error.name is not None and error.name.partition(".")[0] != library:
        return error
    return ImportError(
        f"{user} needs {library}, which is not installed: pip install 'burst-jax[{extra}]'"
    )
