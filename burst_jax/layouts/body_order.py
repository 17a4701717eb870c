"""The order of the tokens in the body of :func:`burst_jax.in_layout`, which its calls must have."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax

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
        orders = (self.layout, self.num_shards), (layout, num_shards)
        if orders[0] == orders[1]:
            return True
        natural = [n == 1 or each.in_natural_order for each, n in orders]
        if any(natural) or not layout.is_fixed:
            return all(natural)
        if layout.padded_length(self.length, num_shards) != self.length:
            return False
        own, other = (each.fixed_positions(self.length, n) for each, n in orders)
        return bool((own == other).all())


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
