"""What a program spends on the links between GPUs, read from a profile of one call."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# How CUPTI names what moves data between GPUs: NCCL's kernels, and copies by the copy engines.
_BETWEEN_GPUS = ("nccl", "memcpyp2p")

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Links:
    """Seconds of one call, the mean over all GPUs; None where there is none to read.

    A collective that waits for a later GPU is busy from its start.

    Attributes:
      busy: a collective, or a copy between GPUs, of the GPU's own was under way.
      bare: of these, nothing else ran on it, no kernel and no copy of its own memory.
    """

    busy: float | None = None
    bare: float | None = None


def links_of(run: Callable[[], Any]) -> Links:
    """Of one call, profiled; without GPUs there is none.

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


def of_profile(profile: Any) -> Links:
    """The same of a profile that exists, a ``jax.profiler.ProfileData``."""
    each: list[tuple[float, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        moves: list[Span] = []
        others: list[Span] = []
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # The others say the same again, by XLA's names.
                continue
            for event in line.events:
                between = event.name.lower().startswith(_BETWEEN_GPUS)
                span = event.start_ns, event.start_ns + event.duration_ns
                (moves if between else others).append(span)
        if moves or others:
            # What both cover, counted once, less what the others do: the moves that lie bare.
            bare = _covered(moves + others) - _covered(others)
            each.append((1e-9 * _covered(moves), 1e-9 * bare))
    if not each:
        return Links()
    return Links(*(sum(values) / len(each) for values in zip(*each, strict=True)))


def _covered(spans: Iterable[Span]) -> float:
    """How much the spans cover, what several do counted once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
