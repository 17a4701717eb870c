"""Work tiles of a persistent kernel, and their order."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import num_sms
from pallas_kernels.mosaic.fragments import i32

# Bytes of the L2 cache (50 MiB) that an L2 swizzle group may use. With small groups the long work
# tiles of the last group may start late, and the GPU is half idle until they end. If larger groups
# would save more than _MAX_TAIL of the time, a group may use _L2_BYTES_MAX.
_L2_BYTES, _L2_BYTES_MAX = 24 * 2**20, 36 * 2**20
_MAX_TAIL = 0.02
# Halves of a head's tiles, by index.
Half = Literal["first", "second"]
# Factor of a group's heads where work tiles read at most 1 / _LOCAL of the other side.
_LOCAL = 4


class TileCoordinates(NamedTuple):
    """One tile of one head of one batch index.

    Attributes:
      batch: batch index.
      head: head index, of queries or of keys.
      tile: tile index on the same side.
    """

    batch: Any
    head: Any
    tile: Any


@dataclasses.dataclass(frozen=True)
class WorkTiles:
    """All work tiles of a kernel, one per (batch index, head, tile), and their order.

    They are ordered by L2 swizzle group: all tiles of some heads, longest tiles first. The longest
    tiles must not come last, so a group has many heads; but what a group's tiles share must stay in
    the L2 cache, so it does not have too many.

    Attributes:
      batch: B.
      heads: number of heads.
      tiles: number of tiles on the side that work is split over.
      last_first: start with the last tile. With ascending positions, causal masks give the last
        query tile and the first key tile the most work.
      shared_bytes: bytes of global memory that the tiles of one head share.
      equal: whether all tiles have the same amount of work. Then none can start too late, and an L2
        swizzle group is one head.
      persistent: False if a kernel lacks registers for a loop over work tiles: then one CTA each.
      cluster: CTAs per cluster.
      may_be_local: whether work tiles may turn out to read a small part of the other side, because
        of packed documents. What the tiles of a head share is then less than ``shared_bytes``, and
        a kernel may choose larger groups when it starts (:meth:`counter`).
      half: the half of the tiles that has work, where a causal mask gives later tiles less; None:
        all have. Tiles of half a head are fewer, so those of a group may not occupy all CTAs, and
        the first half has no short ones, which would fill the others' last steps.
      given_group_heads: heads per L2 swizzle group, as chosen before; None chooses them.
    """

    batch: int
    heads: int
    tiles: int
    last_first: bool
    shared_bytes: int
    equal: bool = False
    persistent: bool = True
    cluster: int = 1
    may_be_local: bool = False
    half: Half | None = None
    given_group_heads: int | None = None

    @property
    def count(self) -> int:
        """Number of work tiles."""
        return self.batch * self.heads * self.tiles

    @property
    def ctas(self) -> int:
        """Number of CTAs."""
        if not self.persistent:
            return self.count
        return min(self.count, max(1, num_sms() // self.cluster))

    @property
    def group_heads(self) -> int:
        """Heads per L2 swizzle group."""
        if self.given_group_heads is not None:
            return self.given_group_heads
        if self.equal:
            return 1
        heads = self.batch * self.heads
        # The tiles of the second half read the second half of the other side.
        shared_bytes = self.shared_bytes // 2 if self.half == "second" else self.shared_bytes

        def most_within(cache_bytes: int) -> int:
            most = max(1, cache_bytes // shared_bytes)
            return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)

        few, many = most_within(_L2_BYTES), most_within(_L2_BYTES_MAX)
        steps = functools.partial(_causal_steps, self.ctas, heads, self.tiles, self.half)
        return few if few == many or steps(few) <= (1 + _MAX_TAIL) * steps(many) else many

    @property
    def exceeds_cache(self) -> bool:
        """Whether the tiles of one head share more than a group may use of the L2 cache."""
        return self.shared_bytes > _L2_BYTES

    @property
    def large_group_heads(self) -> int:
        """Heads per group where every work tile reads at most 1 / _LOCAL of the other side."""
        few, heads = self.group_heads, self.batch * self.heads
        if not self.may_be_local or self.cluster > 1:
            return few
        return max(n for n in range(few, _LOCAL * few + 1, few) if heads % n == 0)

    @property
    def chooses_groups(self) -> bool:
        """Whether a kernel chooses, when it starts, between groups and large groups."""
        at_once = self.one_per_cta and self.persistent
        return not at_once and self.large_group_heads > self.group_heads

    @property
    def one_per_cta(self) -> bool:
        """Whether no CTA has a second work tile."""
        return self.ctas == self.count

    def counter(self, ranges: jax.Array, other_tiles: int) -> jax.Array | None:
        """What :class:`TileScheduler` counts with; None if it neither counts nor chooses groups.

        Args:
          ranges: tile bounds ``[R, tiles, 4]`` or more columns.
          other_tiles: number of tiles of the other side.

        Returns:
          int32 ``[1]``: 0, the number of fetched indices. Or ``[2]``, if the kernel
          chooses groups, with whether they are large.
        """
        if not self.chooses_groups:
            return None if self.one_per_cta else jnp.zeros((1,), jnp.int32)
        most = (ranges[..., 3] - ranges[..., 0]).max()
        return jnp.stack([jnp.int32(0), (most * _LOCAL <= other_tiles).astype(jnp.int32)])

    def coordinates(self, index: Any) -> TileCoordinates:
        """The coordinates of the work tile at ``index`` in this order."""
        heads = self.group_heads
        group, rest = (op(index, i32(heads * self.tiles)) for op in (lax.div, lax.rem))
        tile = lax.div(rest, i32(heads))
        tile = i32(self.tiles - 1) - tile if self.last_first else tile
        # Counts the heads of all batch indices.
        head = group * heads + lax.rem(rest, i32(heads))
        if self.batch == 1:
            return TileCoordinates(i32(0), head, tile)
        heads = i32(self.heads)
        return TileCoordinates(lax.div(head, heads), lax.rem(head, heads), tile)

    def in_large_groups(self, index: Any) -> Any:
        """The index in this order of the work tile at ``index`` in the order of large groups.

        Indices past the last work tile stay past it.
        """
        few, many = self.group_heads, self.large_group_heads
        group, rest = (op(index, i32(many * self.tiles)) for op in (lax.div, lax.rem))
        place, head = lax.div(rest, i32(many)), lax.rem(rest, i32(many))
        group = group * (many // few) + lax.div(head, i32(few))
        return (group * self.tiles + place) * few + lax.rem(head, i32(few))


@functools.lru_cache
def _causal_steps(ctas: int, heads: int, tiles: int, half: Half | None, group_heads: int) -> int:
    """Steps until the last CTA has finished, where the tiles of a head take 1, 2, 3, ... steps.

    ``half``: those of the longer (first) or the shorter (second) half of the tiles alone.
    """
    ends = [0] * ctas
    longest = tiles // 2 if half == "second" else tiles
    shortest = tiles // 2 + 1 if half == "first" else 1
    for _ in range(heads // group_heads):
        for steps in range(longest, shortest - 1, -1):
            for _ in range(group_heads):
                heapq.heapreplace(ends, ends[0] + steps)
    return max(ends)
