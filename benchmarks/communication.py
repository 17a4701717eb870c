"""Time of communication between GPUs, total and exposed, from a profile of one call."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

# Prefixes of CUPTI's names of communication between GPUs: NCCL kernels and copy-engine copies.
_BETWEEN_GPUS = ("nccl", "memcpyp2p")

# Start and end, in nanoseconds.
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Communication:
    """Seconds of communication in one call, averaged over all GPUs; None without a profile.

    A collective counts from its start, including the time that it waits for other GPUs.

    Attributes:
      total: seconds in which a GPU had a collective or a copy between GPUs in flight.
      exposed: the part of ``total`` in which the GPU ran neither a kernel nor a local copy.
    """

    total: float | None = None
    exposed: float | None = None


def profile_communication(run: Callable[[], object]) -> Communication:
    """Profiles the communication of one call of ``run``; both fields are None without GPUs.

    Args:
      run: calls a compiled program and returns its results.
    """
    if jax.default_backend() != "gpu":
        return Communication()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return of_profile(jax.profiler.ProfileData.from_file(str(file)))


def of_profile(profile: jax.profiler.ProfileData) -> Communication:
    """The communication in a profile of one call."""
    each: list[tuple[float, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        moves: list[Span] = []
        others: list[Span] = []
        for line in plane.lines:
            # Other lines repeat the events of the streams by XLA's names.
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                between = event.name.lower().startswith(_BETWEEN_GPUS)
                span = event.start_ns, event.start_ns + event.duration_ns
                (moves if between else others).append(span)
        if moves or others:
            exposed = _covered(moves + others) - _covered(others)
            each.append((1e-9 * _covered(moves), 1e-9 * exposed))
    if not each:
        return Communication()
    return Communication(*(sum(values) / len(each) for values in zip(*each, strict=True)))


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
