"""Routes by the number of steps in each of their inner-ring passes, and the hops that they make."""

from __future__ import annotations

from burst_jax.ring.route import Route
from burst_jax.ring.schedule import count_hops


def route_of_passes(*steps):
    """The route of a ring of ``steps[0]`` devices, or of two levels with these steps per pass."""
    if len(steps) == 1:
        return Route(("seq",), steps, (tuple((i,) for i in range(steps[0])),))
    passes = (tuple((outer, i) for i in range(count)) for outer, count in enumerate(steps))
    return Route(("outer", "inner"), (len(steps), max(steps)), tuple(passes))


def hops_of_passes(*steps):
    return count_hops(route_of_passes(*steps))
