"""What a program does before its threads end."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable


@functools.cache
def before_threads_end(function: Callable[[], None]) -> None:
    """Has ``function`` called when the program ends, while thread pools still take work.

    What ``atexit`` calls comes too late for that: Python has shut all thread pools by then, and
    waited for all threads. The standard library's own pools are shut by the hook that is used here,
    which has no public name; the last function registered is the first that is called. Where a
    Python has no such hook, ``atexit`` calls the function. Registered twice, it is called once.
    """
    getattr(threading, "_register_atexit", atexit.register)(function)
