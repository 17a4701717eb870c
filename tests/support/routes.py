"""Routes by the number of stops in each of their turns, and the hops that they make."""

from __future__ import annotations

from burst_jax.ring.route import Route
from burst_jax.ring.schedule import count_hops


def route_of_turns(*turns):
    """The route of a ring of so many devices, or of two levels with so many stops in each turn."""
    if len(turns) == 1:
        return Route(("seq",), turns, (tuple((place,) for place in range(turns[0])),))
    stops = (tuple((outer, place) for place in range(count)) for outer, count in enumerate(turns))
    return Route(("outer", "inner"), (len(turns), max(turns)), tuple(stops))


def hops_of_turns(*turns):
    return count_hops(route_of_turns(*turns))
