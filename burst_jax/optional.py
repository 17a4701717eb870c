"""Libraries that some parts of the package need and others do not: imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


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
