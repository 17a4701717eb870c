"""Ends a process whose training has stopped going on."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from typing import Self

import jax


class StallGuard:
    """Ends this process when :meth:`alive` has not been called for ``timeout`` seconds.

    JAX notices a process that is gone, but not one that waits for ever: for a disk, a lock, a GPU.
    Then all the others wait for it in a collective. Each process prints its number, its host and
    the line that each of its threads is at, and exits with code 1. The one that is not in a
    collective is the one to look at.

    The clock starts at the first :meth:`alive`, so that compiling the first step does not count.

    Args:
      timeout: seconds, longer than the longest step, evaluation and checkpoint between two calls.

    Raises:
      ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: it must be positive")
        self._timeout = timeout
        self._last: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall_guard", daemon=True)
        # Known before a device hangs.
        self._name = (
            f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def alive(self) -> None:
        """Says that the training goes on."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._end.wait(self._timeout / 20):
            if self._last is not None and time.monotonic() - self._last > self._timeout:
                sys.stdout.flush()
                print(
                    f"{self._name} ends: no step has ended for {self._timeout:g} s. "
                    "Its threads are at:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
