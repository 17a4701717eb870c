"""What the first of a run's processes does for all, like writing a file."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

# Errors that the other processes raise as the first one does; any other is a RuntimeError there.
_KINDS: tuple[type[Exception], ...] = (
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    OSError,
    ImportError,
    ValueError,
)
# Of a message in UTF-8. All processes pass an array of the same size.
_BYTES = 2048


def by_first_process(action: Callable[[], None]) -> None:
    """Calls ``action`` in process 0 alone, and returns in all processes when it has returned.

    All processes of a run must call this together. With one process it is ``action()``.

    Raises:
      Exception: the error of ``action``. Process 0 raises it, and the others one of its class, if
        that is a common one, or else a RuntimeError, with the same message.
    """
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as raised:
            error = raised
    # This is a barrier, too: no process has the verdict before process 0 has given it.
    verdict = np.asarray(multihost_utils.broadcast_one_to_all(_packed(error)))
    if error is not None:
        raise error
    number, message = int(verdict[0]), bytes(verdict[1:]).rstrip(b"\0").decode(errors="replace")
    if number:
        kind = (*_KINDS, RuntimeError)[number - 1]
        raise kind(f"process 0 of the run raised: {message}")


def _packed(error: Exception | None) -> np.ndarray:
    """0 for None, or else the number of the error's class from 1 on, and the message."""
    packed = np.zeros(1 + _BYTES, np.uint8)
    if error is not None:
        known = (number for number, kind in enumerate(_KINDS, 1) if isinstance(error, kind))
        packed[0] = next(known, len(_KINDS) + 1)
        text = f"{type(error).__name__}: {error}".encode()[:_BYTES]
        packed[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    return packed
