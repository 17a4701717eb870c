"""How a Mosaic GPU kernel's work is cut into items, and how its programs take them one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_configs import SLOTS
from pallas_kernels.mosaic_tiles import Walk, i32, pin

_H100_MULTIPROCESSORS = 132
# Bytes of the L2 cache (50 MiB) that a section takes; and where its end would cost more than such a
# share of the time, because long items would begin too late, so many.
_CACHED, _CACHED_AT_MOST = 24 * 2**20, 36 * 2**20
_END = 0.05


@dataclasses.dataclass(frozen=True)
class Items:
    """The work of a kernel, one item per (batch row, head, tile).

    There is one program per multiprocessor. Each takes the next item when it has started the copies
    for the last one (:class:`Line`), so that no multiprocessor waits while another has much to do,
    and an item's first copies run while the last one's results are made and written.

    Items go section by section, a section being all tiles of some heads: few enough for what their
    items share to stay in the L2 cache, and else many, because long items must not come last.

    Attributes:
      batch: rows of the batch.
      heads: heads.
      tiles: tiles of the side that items are split over.
      last_first: start with the last tile. Where positions ascend, causal masks give the last query
        tile and the first key tile the most work.
      shared_bytes: what the items of a head have in common in device memory.
      equal: all items have the same work, so that none can come too late: a section is one head.
      looped: false where a kernel has no registers for a loop over items. Then every item is a
        program of its own, and the GPU starts them one by one.
    """

    batch: int
    heads: int
    tiles: int
    last_first: bool
    shared_bytes: int
    equal: bool = False
    looped: bool = True

    @property
    def count(self) -> int:
        """How many there are."""
        return self.batch * self.heads * self.tiles

    @property
    def programs(self) -> int:
        """How many work on them."""
        return min(self.count, _multiprocessors()) if self.looped else self.count

    @property
    def section(self) -> int:
        """How many heads are in a section."""
        if self.equal:
            return 1
        heads = self.batch * self.heads

        def within(cached: int) -> int:
            most = max(1, cached // self.shared_bytes)
            return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)

        # A causal mask's longest item is twice as long as the mean one. The last section should
        # take as long, or that one goes on when all others are done.
        few = within(_CACHED)
        late = 2 * self.programs / self.tiles - few
        return few if late / heads < _END else within(_CACHED_AT_MOST)

    @property
    def one_each(self) -> bool:
        """Whether no program has a second item."""
        return self.programs == self.count

    def at(self, number: Any) -> tuple[Any, Any, Any]:
        """``(batch row, head, tile)`` of an item."""
        together = self.section
        section, place = (op(number, i32(together * self.tiles)) for op in (lax.div, lax.rem))
        tile = lax.div(place, i32(together))
        tile = i32(self.tiles - 1) - tile if self.last_first else tile
        head = section * together + lax.rem(place, i32(together))
        if self.batch == 1:
            return i32(0), head, tile
        return lax.div(head, i32(self.heads)), lax.rem(head, i32(self.heads)), tile


def _multiprocessors() -> int:
    """Those of the GPU that the code being traced will run on; an H100's where it is not known."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or _H100_MULTIPROCESSORS
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or _H100_MULTIPROCESSORS


class Barriers:
    """Some of an array of barriers, used as an array of its own.

    Threads keep the phases of one array in one register.

    Args:
      array: reference to all.
      first: the first of these.
    """

    def __init__(self, array: Any, first: int):
        self._array, self._first = array, first

    @classmethod
    def split(cls, array: Any, counts: Sequence[int]) -> list[Barriers]:
        """Cuts an array of ``sum(counts)`` barriers."""
        return [cls(array, sum(counts[:i])) for i in range(len(counts))]

    @property
    def at(self) -> Barriers:
        """To be indexed, as a reference's."""
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._array.at[self._first + index]


class Line(NamedTuple):
    """Where programs take the number of their next item, and pass it on within the program.

    Attributes:
      taken: int32 ``[1]`` in device memory: how many have been taken by all programs.
      here: SLOTS barriers: a number has come.
      free: SLOTS barriers: all that compute have read it.
      numbers: float32 shared memory for them, which is exact up to 2^24: more items than a GPU
        holds.
      first: where in it they begin.
      arrivals: at each of ``here``.
    """

    taken: Any
    here: Any
    free: Any
    numbers: Any
    first: int = 0
    arrivals: int = 1

    def open(self) -> None:
        """To be called first by those who do not take."""
        for slot in range(SLOTS):
            plgpu.barrier_arrive(self.free.at[slot])

    def take(self, slot: Any) -> None:
        """Takes the number of the next item. Nobody waits for it here."""
        plgpu.barrier_wait(self.free.at[slot])
        _take(self.taken, self.numbers.at[pl.ds(self.first + slot, 1)])
        for _ in range(self.arrivals):
            plgpu.barrier_arrive(self.here.at[slot])

    def read(self, slot: Any, taker: bool) -> Any:
        """The number of the next item; ``taker``: in the warpgroup that takes them."""
        plgpu.barrier_wait(self.here.at[slot])
        number = self.numbers[self.first + slot].astype(jnp.int32)
        if not taker:
            plgpu.barrier_arrive(self.free.at[slot])
        return number


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _take(_, taken, number):
    """``number[0] = taken[0]++``, by one thread."""
    # One of the warpgroup's second warp: the first one starts the copies, which would wait for it.
    utils.inline_ptx(
        """{
        .reg .pred mine;
        .reg .b32 thread, count;
        .reg .f32 ticket;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 mine, thread, 32;
        @mine atom.relaxed.gpu.global.add.u32 count, [$0], 1;
        @mine cvt.rn.f32.u32 ticket, count;
        @mine st.shared.f32 [$1], ticket;
        }""",
        utils.memref_ptr(taken),
        utils.memref_ptr(number),
        has_side_effects=True,
    )


class Item(NamedTuple):
    """One item's place, its way over tiles, and its steps.

    ``begun``: steps of the items before. ``again``: makes ``(row, head, tile)`` anew, for a kernel
    that has no registers to keep them in.
    """

    row: Any
    head: Any
    tile: Any
    walk: Walk
    steps: Any
    begun: Any
    again: Callable[[], tuple[Any, Any, Any]]


def each_item(
    items: Items,
    line: Line,
    walk_of: Callable[[Any, Any], Walk],
    visit: Callable[[Item], None],
    *,
    taker: bool,
    steps_per_tile: int = 1,
    leave_empty: bool,
    empty: Callable[[Item], None] | None = None,
) -> None:
    """Calls ``visit`` for a program's items one after the other.

    Args:
      items: all items.
      line: where the numbers of the next ones come from.
      walk_of: ``(row, tile) -> walk``.
      visit: does one item.
      taker: whether this warpgroup takes the numbers for its program, as one must.
      steps_per_tile: how many steps a tile of the walk takes.
      leave_empty: do not visit items that have no tile to visit. Else they visit one, which its
        mask makes empty.
      empty: what to do with those that are not visited.
    """

    def visit_one(ticket, begun):
        # Registers are scarce: the number of the item and the slot of the next one share one.
        row, head, tile = items.at(lax.div(ticket, i32(SLOTS)))
        walk = walk_of(row, tile)
        visited = walk.total if leave_empty else jnp.maximum(walk.total, 1)
        steps = visited * steps_per_tile

        def again():
            return items.at(lax.div(pin(ticket), i32(SLOTS)))

        item = Item(row, head, tile, walk, steps, begun, again)
        pl.when(steps > 0)(lambda: visit(item))
        if empty is not None:
            pl.when(steps == 0)(lambda: empty(item))
        return steps

    def body(state):
        ticket, begun = state
        slot = lax.rem(ticket, i32(SLOTS))
        steps = visit_one(ticket, begun)
        if taker:
            line.take(slot)
        number = items.programs + line.read(slot, taker)
        return number * SLOTS + lax.rem(slot + 1, i32(SLOTS)), begun + steps

    first = lax.axis_index("programs") * SLOTS, i32(0)
    if items.one_each:
        visit_one(*first)  # No loop, and what it would keep in registers is constant.
    else:
        if not taker:
            line.open()
        lax.while_loop(lambda state: state[0] < items.count * SLOTS, body, first)
