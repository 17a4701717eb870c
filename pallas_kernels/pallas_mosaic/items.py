"""How a Mosaic GPU kernel's work is cut into items, and how its programs take them one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device import multiprocessors
from pallas_kernels.pallas_mosaic.configs import CLUSTER_AXIS, SLOTS
from pallas_kernels.pallas_mosaic.tickets import TicketCounter
from pallas_kernels.pallas_mosaic.tiles import computed_here, i32
from pallas_kernels.pallas_mosaic.walk import Walk

# How many bytes of the L2 cache (50 MiB) a section may take. With small sections the long items of
# the last one begin late, and the GPU is half idle until they end. Where that would be more than
# _END_AT_MOST of the time, a section may take _CACHED_AT_MOST bytes.
_CACHED, _CACHED_AT_MOST = 24 * 2**20, 36 * 2**20
_END_AT_MOST = 0.05


@dataclasses.dataclass(frozen=True)
class Items:
    """The work of a kernel, one item per (batch row, head, tile).

    Where programs form clusters, read "cluster" for "program", and "neighbouring tiles, one for
    each program of a cluster" for "tile".

    There is one program per multiprocessor. A program's first item has the program's number. A
    program draws the ticket of its next item (:class:`TicketCounter`) when it has started all
    copies for its present one. So no multiprocessor waits while another has much to do, also where
    another kernel, like one of NCCL's, keeps some of them; and an item's first copies run while the
    results of the item before it are computed and written.

    Items are given out section by section. A section is all tiles of some heads, the longest tiles
    first. Long items must not come last, so a section has many heads; but what the items of a
    section share must stay in the L2 cache, so it has not too many.

    Attributes:
      batch: rows of the batch.
      heads: heads.
      tiles: tiles of the side that items are split over.
      last_first: start with the last tile. Where positions ascend, causal masks give the last query
        tile and the first key tile the most work.
      shared_bytes: how many bytes of device memory all items of a head read or write.
      equal: all items have the same work. None can come too late then, so a section is one head.
      looped: False where a kernel has no registers for a loop over items. Then every item is a
        program of its own, and the GPU starts the programs one by one.
      cluster: how many programs a cluster has.
    """

    batch: int
    heads: int
    tiles: int
    last_first: bool
    shared_bytes: int
    equal: bool = False
    looped: bool = True
    cluster: int = 1

    @property
    def count(self) -> int:
        """How many there are."""
        return self.batch * self.heads * self.tiles

    @property
    def programs(self) -> int:
        """How many work on them."""
        if not self.looped:
            return self.count
        return min(self.count, max(1, multiprocessors() // self.cluster))

    @property
    def section(self) -> int:
        """How many heads are in a section."""
        if self.equal:
            return 1
        heads = self.batch * self.heads

        def most_within(cached: int) -> int:
            most = max(1, cached // self.shared_bytes)
            return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)

        # A causal mask's longest item is twice as long as the mean one. The last section should
        # take as long as its longest item, or that item goes on when all others are done.
        few = most_within(_CACHED)
        late = 2 * self.programs / self.tiles - few
        return few if late / heads < _END_AT_MOST else most_within(_CACHED_AT_MOST)

    @property
    def one_each(self) -> bool:
        """Whether no program has a second item."""
        return self.programs == self.count

    def place_of(self, number: Any) -> Place:
        """Where an item lies; numbers are in the order in which items are given out."""
        heads = self.section
        section, rest = (op(number, i32(heads * self.tiles)) for op in (lax.div, lax.rem))
        tile = lax.div(rest, i32(heads))
        tile = i32(self.tiles - 1) - tile if self.last_first else tile
        # This counts the heads of all batch rows.
        head = section * heads + lax.rem(rest, i32(heads))
        if self.batch == 1:
            return Place(i32(0), head, tile)
        return Place(lax.div(head, i32(self.heads)), lax.rem(head, i32(self.heads)), tile)


class Place(NamedTuple):
    """Which part of an array or of the work: one tile of one head.

    Attributes:
      batch_row: row of the batch.
      head: head, of the queries or of the keys.
      tile: tile of the same side.
    """

    batch_row: Any
    head: Any
    tile: Any


class Item(NamedTuple):
    """One item, as a warpgroup sees it while it works on it.

    Attributes:
      batch_row: row of the batch.
      head: head.
      tile: tile of the side that items are split over.
      walk: which tiles of the other side it visits.
      steps: how many steps it has.
      steps_before: how many steps the program's earlier items had.
      recompute_place: computes ``batch_row``, ``head`` and ``tile`` anew, for a kernel that has no
        registers to keep them in.
    """

    batch_row: Any
    head: Any
    tile: Any
    walk: Walk
    steps: Any
    steps_before: Any
    recompute_place: Callable[[], Place]


def each_item(
    items: Items,
    counter: TicketCounter,
    walk_of: Callable[[Any, Any, Any], Walk],
    visit: Callable[[Item], None],
    *,
    draws: bool,
    steps_per_tile: int = 1,
    leave_empty: bool,
    empty: Callable[[Item], None] | None = None,
) -> Any:
    """Calls ``visit`` for a program's items one after the other; returns how many steps they had.

    Args:
      items: all items.
      counter: where the tickets of the next ones come from.
      walk_of: ``(batch_row, head, tile) -> walk``.
      visit: does one item.
      draws: whether this warpgroup draws the tickets for its program: one warpgroup must.
      steps_per_tile: how many steps a tile of the walk takes.
      leave_empty: do not visit items that have no tile to visit. Otherwise such an item visits one
        tile, whose scores are all masked.
      empty: what to do with items that are not visited.
    """

    # Registers are scarce: item_and_slot is the item's number times SLOTS, plus the slot of the
    # next ticket.
    def visit_one(item_and_slot, steps_before):
        place = items.place_of(lax.div(item_and_slot, i32(SLOTS)))
        walk = walk_of(*place)
        batch_row, head, tile = _own(items, place)
        visited = walk.total if leave_empty else jnp.maximum(walk.total, 1)
        steps = visited * steps_per_tile

        recompute_place = functools.partial(_recompute_place, items, item_and_slot)
        item = Item(batch_row, head, tile, walk, steps, steps_before, recompute_place)
        pl.when(steps > 0)(lambda: visit(item))
        if empty is not None:
            pl.when(steps == 0)(lambda: empty(item))
        return steps

    def body(state):
        item_and_slot, steps_before = state
        slot = lax.rem(item_and_slot, i32(SLOTS))
        steps = visit_one(item_and_slot, steps_before)
        if draws:
            counter.draw(slot)
        number = items.programs + counter.read(slot, draws)
        return number * SLOTS + lax.rem(slot + 1, i32(SLOTS)), steps_before + steps

    first = lax.axis_index("programs") * SLOTS, i32(0)
    if items.one_each:
        return visit_one(*first)  # No loop, and what it would keep in registers is constant.
    if not draws or items.cluster > 1:
        counter.offer_slots(draws)
    _, steps = lax.while_loop(lambda state: state[0] < items.count * SLOTS, body, first)
    if draws and items.cluster > 1:
        counter.await_last_reads()
    return steps


def _recompute_place(items: Items, item_and_slot: Any) -> Place:
    """An item's place, computed again where it is used: no register keeps it until then."""
    return _own(items, items.place_of(lax.div(computed_here(item_and_slot), i32(SLOTS))))


def _own(items: Items, place: Place) -> Place:
    """The place of this program's own tile, of an item's place."""
    if items.cluster == 1:
        return place
    return place._replace(tile=place.tile * items.cluster + lax.axis_index(CLUSTER_AXIS))
