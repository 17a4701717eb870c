"""Free memory of devices, or of the host for devices that have none of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax


def free_memory(devices: Iterable[jax.Device]) -> Iterator[tuple[float, str]]:
    """For each device its free bytes, and its name; CPU devices share the host's equally.

    Devices whose memory is unknown are left out.
    """
    on_host = 0
    for device in devices:
        found = device.memory_stats() or {}
        if "bytes_limit" in found:
            yield found["bytes_limit"] - found.get("bytes_in_use", 0), str(device)
        elif device.platform == "cpu":
            on_host += 1
    free = _host_memory() if on_host else None
    if free is not None:
        yield free / on_host, f"each of {on_host} CPU devices"


def _host_memory() -> int | None:
    """Bytes of memory that this host can still give to programs, at most its container's limit."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not sizes:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Not on Windows.
            sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit.
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=None)
