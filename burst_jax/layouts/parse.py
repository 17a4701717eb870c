"""The public spelling of layouts: strings, parsed to a :class:`burst_jax.layouts.layout.Layout`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from burst_jax.layouts.balanced_layout import Balanced
from burst_jax.layouts.fixed import Contiguous, Striped, Zigzag
from burst_jax.layouts.layout import Layout

# One of LAYOUTS, "striped:k" with stripes of k tokens, like "striped:64", "balanced:z" with a
# gathered zone of z tokens per shard, or the layout itself.
LayoutLike = str | Layout

# Every layout: the pattern of its spelling, whose groups are integers, and its class, which is
# called with the groups that match; LAYOUTS calls it without arguments.
_ENTRIES: tuple[tuple[str, Callable[..., Layout]], ...] = (
    ("contiguous", Contiguous),
    ("zigzag", Zigzag),
    ("striped(?::([1-9][0-9]{0,8}))?", Striped),
    ("balanced(?::(0|[1-9][0-9]{0,8}))?", Balanced),
)
# The fixed ones that need no number.
LAYOUTS = tuple(each.name for each in (make() for _, make in _ENTRIES) if each.is_fixed)
# The largest ring size that is tried to identify the layout of given positions.
_MOST_SHARDS = 512


def parse_layout(layout: LayoutLike) -> Layout:
    """A layout by its spelling, or the layout itself.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(layout, Layout):
        return layout
    # A NumPy array of one string compares equal to it, but is not hashable.
    for spelling, make in _ENTRIES if isinstance(layout, str) else ():
        if found := re.fullmatch(spelling, layout):
            return make(*(int(number) for number in found.groups() if number is not None))
    raise ValueError(
        f"layout is {layout!r}: use one of {', '.join(map(repr, LAYOUTS))}, 'striped:k' for "
        "stripes of k tokens, like 'striped:64', or 'balanced:z' for a gathered zone of z tokens, "
        "the layout of burst_jax.layouts.balance"
    )


def layout_option(options: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Layout:
    """The layout among keyword arguments of ``burst_attention``, or its default."""
    return parse_layout(dict(options).get("layout", "contiguous"))


def layout_of(positions: np.ndarray) -> tuple[Layout, int] | None:
    """The layout and number of shards with these positions ``[T]``; None if there is none."""
    length = len(positions)
    # If the layout is striped, the tokens up to the first gap are one stripe.
    breaks = np.flatnonzero(np.diff(positions) != 1)
    layouts = *map(parse_layout, LAYOUTS), *(Striped(int(stripe) + 1) for stripe in breaks[:1])
    for shards in range(1, min(length, _MOST_SHARDS) + 1):
        for layout in layouts:
            fits = layout.padded_length(length, shards) == length
            if fits and (layout.fixed_positions(length, shards) == positions).all():
                return layout, shards
    return None
