"""The order of the tokens in the body of :func:`burst_jax.in_layout`, which its calls must have."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
import numpy as np

from burst_jax.layouts.layout import Layout


class Order(NamedTuple):
    """The order that :func:`burst_jax.in_layout` permuted tokens to.

    Attributes:
      layout: a fixed layout.
      num_shards: its number of shards.
      length: T, of whole sequences.
    """

    layout: Layout
    num_shards: int
    length: int

    def is_of(self, layout: Layout, num_shards: int) -> bool:
        """Whether sequences of this length have the same order in a layout."""
        own = self._positions(self.layout, self.num_shards)
        other = self._positions(layout, num_shards)
        return own is not None and other is not None and bool((own == other).all())

    def _positions(self, layout: Layout, num_shards: int) -> np.ndarray | None:
        """Of the tokens as they are in arrays; None if sequences differ, or T does not fit."""
        if num_shards == 1 or layout.in_natural_order:
            return np.arange(self.length)
        if not layout.is_fixed or layout.padded_length(self.length, num_shards) != self.length:
            return None
        return layout.fixed_positions(self.length, num_shards)


# An Order or None. Part of the keys of JAX's caches: a function that was jitted and traced outside
# of a body is traced again, and checked, inside of it, and the reverse.
_ORDER = jax.make_user_context()


@contextlib.contextmanager
def ordered(layout: Layout, num_shards: int, length: int) -> Iterator[None]:
    """In calls that are traced inside the ``with`` block, tokens must have this order."""
    with _ORDER(Order(layout, num_shards, length)):
        yield


def check_order(
    layout: Layout,
    num_shards: int,
    lengths: Collection[int],
    argument: str,
    axes: str | tuple[str, ...] | None,
) -> None:
    """Raises ValueError if a call has another order than :func:`ordered` set.

    Args:
      layout: that of the call.
      num_shards: the number of its shards.
      lengths: of the call's whole sequences whose positions are those of the layout. Sequences of
        another length than those of the order are other tokens.
      argument: the name of the argument with the mesh axes of the ring.
      axes: its value.
    """
    order = _ORDER.value
    if order is None or order.length not in lengths or order.is_of(layout, num_shards):
        return
    if isinstance(axes, tuple) and len(axes) == 1:
        (axes,) = axes
    remedies = []
    # Over one shard every layout is the natural order.
    if order.layout != layout and num_shards > 1:
        remedies.append(f"layout={order.layout!r} to the call")
    if order.num_shards != num_shards:
        remedies.append(f"num_shards={num_shards} to in_layout")
    raise ValueError(
        f"in_layout permuted tokens to {order.layout} over {order.num_shards} shards, and this "
        f"call has {layout} over {num_shards} "
        + (f"(the size of {argument} {axes!r})" if axes else "(it has no ring)")
        + f": pass {' and '.join(remedies)}"
    )
