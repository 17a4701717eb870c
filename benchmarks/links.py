"""How long a program's transfers between GPUs take, read from a profile of one call."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

# Beginnings of the names that CUPTI gives to transfers between GPUs: NCCL's kernels, and copies by
# the copy engines.
_BETWEEN_GPUS = ("nccl", "memcpyp2p")

# Start and end, in nanoseconds.
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Links:
    """Seconds of transfers in one call, the mean over all GPUs; None where no profile has them.

    A collective counts from its start, also while it waits for a GPU that comes later.

    Attributes:
      busy: seconds in which a GPU had a collective or a copy between GPUs under way.
      bare: the part of ``busy`` in which the GPU did nothing else, neither a kernel nor a copy
        within its own memory.
    """

    busy: float | None = None
    bare: float | None = None


def links_of(run: Callable[[], object]) -> Links:
    """Profiles one call of ``run`` and reads its transfers; without GPUs both figures are None.

    Args:
      run: starts a program that is compiled already, and returns what it computes.
    """
    if jax.default_backend() != "gpu":
        return Links()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return of_profile(jax.profiler.ProfileData.from_file(str(file)))


def of_profile(profile: jax.profiler.ProfileData) -> Links:
    """The transfers of the call that ``profile`` shows."""
    each: list[tuple[float, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        moves: list[Span] = []
        others: list[Span] = []
        for line in plane.lines:
            # The other lines list the events of the streams again, by XLA's names.
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                between = event.name.lower().startswith(_BETWEEN_GPUS)
                span = event.start_ns, event.start_ns + event.duration_ns
                (moves if between else others).append(span)
        if moves or others:
            # The time that moves or others cover, less the time that others cover, is the time that
            # moves alone cover.
            bare = _covered(moves + others) - _covered(others)
            each.append((1e-9 * _covered(moves), 1e-9 * bare))
    if not each:
        return Links()
    return Links(*(sum(values) / len(each) for values in zip(*each, strict=True)))


def _covered(spans: Iterable[Span]) -> float:
    """How much time the spans cover; time that several spans cover counts once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
