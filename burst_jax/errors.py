"""Checks and errors that every package needs: numbers, spelling, libraries of an extra."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import math
import numbers
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

import numpy as np


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: which of ``names`` is spelled like it."""
    close = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


# Sequences of a batch, each of which is packed from a stream of its own.
MAX_BATCH = 2**20


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as a Python int.

    Raises:
      ValueError: it is no integer, smaller than ``least`` or larger than ``most``.
    """
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or not least <= int(value) <= (math.inf if most is None else most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(
            f"{name} is {shown(value)}: it must be an integer, at least {least}{upper}"
        )
    return int(value)


def as_number(name: str, value: Any, valid: str = "a number") -> float:
    """``value`` as a Python float.

    Raises:
      ValueError: it is no single number, or an integer too large for one; it must be ``valid``.
    """
    if np.ndim(value) == 0 and not isinstance(value, (bool, np.bool_, str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ValueError(f"{name} is {shown(value)}: it must be {valid}")


def check_positive(name: str, value: Any, also: str = "") -> float:
    """``value`` as a Python float.

    Args:
      name: its name, for the message.
      value: anything.
      also: what else is valid, the end of the message, like ", or None".

    Raises:
      ValueError: it is no number, not positive, or float32 cannot hold it.
    """
    number = as_number(name, value, f"positive and finite in float32{also}")
    if not 2.0**-126 <= number <= 2.0**127:
        raise ValueError(
            f"{name} is {shown(value)}: it must be positive and finite in float32{also}"
        )
    return number


def check_coefficient(name: str, value: Any) -> float:
    """``value``, the coefficient of a loss, as a Python float.

    Raises:
      ValueError: it is no number, negative, or not finite.
    """
    valid = "0, which is none, or positive and finite"
    number = as_number(name, value, valid)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {shown(value)}: it must be {valid}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value`` as a Python bool; raises ValueError unless it is True or False itself."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {shown(value)}: it must be True or False")
    return bool(value)


def shown(value: Any) -> str:
    """``repr(value)`` for a message: printable, and shortened to about 200 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # More digits than Python converts; nested too deeply.
        return f"a {type(value).__name__} that cannot be printed"
    text = printable(text)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"


def printable(text: object) -> str:
    """A name or a path for a message: what would control a terminal is escaped."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in str(text)
    )


def first_of(names: Collection[str], count: int = 5) -> str:
    """The first of some names and the number of others, for a message."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(short_name(name) for name in itertools.islice(names, count)) + more


def short_name(name: str) -> str:
    """A name for a message: :func:`printable`, and shortened to about 200 characters."""
    text = printable(name)
    return text if len(text) <= 200 else f"{text[:160]}..."


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
