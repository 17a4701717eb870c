"""The search for a placement of packed documents: which are split, and where the others go.

Work is an integer, the number of causal pairs: that of tokens ``a .. b-1`` of a document is the sum
of ``position + 1``. Modelled times are floats, each operation of which is rounded in the same way
everywhere, so a placement does not depend on the machine.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from burst_jax.layouts.ring_costs import RingCosts

# When documents are placed by the room that is left instead of by work: the work that is left then,
# as a share (1 / x) of all work; 0 is never.
_SWITCHES = (0, 64, 16, 4)
# A search is content with a placement within the limit after it placed this many documents, each
# piece counted as six. That takes about 10 ms.
_EFFORT = 6_000
# It is also content with a placement whose time is at most this multiple of the least possible.
_CLOSE = 1.02
# Rounds of swaps to make room for documents that fit nowhere.
_ROUNDS = 4


class Piece(NamedTuple):
    """The part of a split document on one shard: tokens [start, low) and [high, stop) of it."""

    document: int
    shard: int
    start: int
    low: int
    high: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.low - self.start + self.stop - self.high

    @property
    def work(self) -> int:
        """Causal pairs of its queries."""
        return pairs(self.low) - pairs(self.start) + pairs(self.stop) - pairs(self.high)

    def wasted(self, tile: int) -> int:
        """Pairs that tiles compute in vain: about one tile of queries for each chunk."""
        ends = (self.start + self.low) * (self.low > self.start)
        return tile * (ends + (self.high + self.stop) * (self.stop > self.high)) // 2


@dataclasses.dataclass(frozen=True)
class Found:
    """A placement: the shard of each whole document (-1: it is split), and the pieces.

    ``slowest`` is the most work of a shard and ``time`` the modelled time of the slowest device,
    both in pairs. ``over`` is whether it exceeds the limit of the costs.
    """

    shards: Sequence[int]
    pieces: Sequence[Piece]
    zone: int
    slowest: int
    time: float
    over: bool

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """Smaller is better."""
        return self.over, self.time, self.zone, len(self.pieces)


def pairs(length: int) -> int:
    """Causal pairs of a document."""
    return length * (length + 1) // 2


def search(
    lengths: Sequence[int],
    num_shards: int,
    capacity: int,
    sizes: Sequence[int],
    costs: RingCosts,
    zone: int | None = None,
) -> Found | None:
    """The best placement found, with a gathered zone of ``zone`` tokens, or of one of ``sizes``.

    ``sizes`` ascend. None if no placement is found that fits in ``zone``. Attempts differ in how
    many of the longest documents are split and in how the others are placed. Those that cannot be
    better than the best one so far are left out.
    """
    zones = sizes if zone is None else (zone,)
    descending = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    lengths = [lengths[i] for i in descending]
    work = list(map(pairs, lengths))
    tokens = list(itertools.accumulate(lengths, initial=0))
    mean = sum(work) / num_shards
    limit = costs.limit * mean
    best: Found | None = None
    effort = _EFFORT
    for count in _split_counts(lengths, work, capacity, limit):
        # No device can do less, and no smaller zone holds the documents that are split.
        least = max([mean, *work[count : count + 1]])
        smallest = next((size for size in zones if size * num_shards >= tokens[count]), None)
        if smallest is None:
            continue
        bound = bool(smallest) and least > limit, _CLOSE * costs.time(least, smallest, num_shards)
        # The same attempts for any ``zone``, so that one larger than needed always fits.
        fit = [size for size in sizes if size * num_shards >= tokens[count]]
        caps = (*fit[:2], None) if count else (None,)
        for switch, cap in itertools.product(_SWITCHES, caps):
            if best is not None and (bound >= best.rank[:2] or (effort <= 0 and not best.over)):
                break
            if not switch and cap is not None:
                continue  # The cap matters after the switch.
            whole = _place_whole(lengths, work, count, num_shards, capacity, switch, cap)
            effort -= len(lengths) * (1 if count else 2)
            for found in _with_pieces(whole, zones, costs, limit):
                effort -= 6 * len(found.pieces)
                if best is None or found.rank < best.rank:
                    best = found
    return best and _renamed(best, descending)


def _renamed(found: Found, documents: Sequence[int]) -> Found:
    """``found`` with ``documents[i]`` for document i, and one of a single piece as whole."""
    shards = [-1] * len(documents)
    for document, shard in zip(documents, found.shards, strict=True):
        shards[document] = shard
    counts = collections.Counter(piece.document for piece in found.pieces)
    pieces = []
    for piece in found.pieces:
        document = documents[piece.document]
        if counts[piece.document] == 1:
            shards[document] = piece.shard
        else:
            pieces.append(piece._replace(document=document))
    return dataclasses.replace(found, shards=shards, pieces=pieces)


def _split_counts(
    lengths: Sequence[int], work: Sequence[int], capacity: int, limit: float
) -> Iterator[int]:
    """Numbers of longest documents to split: 0, as few as balance needs, more, then fewer."""
    too_long = sum(length > capacity for length in lengths)
    if not too_long:
        yield 0
    needed = max(too_long, sum(w > limit for w in work))
    count = max(1, needed)
    while count < len(lengths):
        yield count
        count += max(1, (count - needed) // 4)
    if lengths:
        yield len(lengths)
    yield from range(needed - 1, max(too_long, 1) - 1, -1)


class _Shards:
    """Documents placed whole so far, and the free tokens and the work of each shard.

    Documents are numbered by descending length.
    """

    def __init__(
        self, lengths: Sequence[int], work: Sequence[int], num_shards: int, capacity: int
    ) -> None:
        self.lengths, self.work = lengths, work
        self.of_document = [-1] * len(lengths)
        self.rooms, self.loads = [capacity] * num_shards, [0] * num_shards
        self.split: list[int] = []

    def put(self, document: int, shard: int) -> None:
        self.of_document[document] = shard
        self.rooms[shard] -= self.lengths[document]
        self.loads[shard] += self.work[document]

    def put_by_work(self, documents: Iterable[int]) -> None:
        """Places each, longest first, on the shard with the least work that has room."""
        rooms, loads = self.rooms, self.loads
        by_work = sorted((load, shard) for shard, load in enumerate(loads))
        full: list[tuple[int, int]] = []  # Shards without room for the last one, most room first.
        for document in documents:
            length = self.lengths[document]
            while full and -full[0][0] >= length:
                shard = heapq.heappop(full)[1]
                heapq.heappush(by_work, (loads[shard], shard))
            while by_work and rooms[by_work[0][1]] < length:
                shard = heapq.heappop(by_work)[1]
                heapq.heappush(full, (-rooms[shard], shard))
            if by_work:
                shard = by_work[0][1]
                self.put(document, shard)
                heapq.heapreplace(by_work, (loads[shard], shard))
            else:
                self.split.append(document)

    def put_by_room(self, documents: Iterable[int], kept: Sequence[int]) -> None:
        """Places each, longest first, on the shard with most room apart from what it keeps."""
        rooms = self.rooms
        by_room = sorted((kept[r] - room, r) for r, room in enumerate(rooms))
        for document in documents:
            shard, length = by_room[0][1], self.lengths[document]
            if rooms[shard] >= length:
                self.put(document, shard)
                heapq.heapreplace(by_room, (kept[shard] - rooms[shard], shard))
                continue
            # Only the room that some shard keeps for pieces is large enough.
            shard = max(range(len(rooms)), key=rooms.__getitem__)
            if rooms[shard] < length:
                self.split.append(document)
                continue
            at = by_room.index((kept[shard] - rooms[shard], shard))
            self.put(document, shard)
            by_room[at] = kept[shard] - rooms[shard], shard
            heapq.heapify(by_room)

    def close_holes(self) -> None:
        """Places documents that fit nowhere, if swaps of others gather enough room on a shard.

        In each round one shard after the other, least room first, swaps documents for longer ones
        of shards that had no turn, until it is full or nothing fits. Its room goes to those shards.
        Work hardly changes: lengths differ by no more than the room.
        """
        shortest = [i for i in range(len(self.lengths) - 1, -1, -1) if self.of_document[i] >= 0]
        lengths = [self.lengths[i] for i in shortest]
        on_shard: list[set[int]] = [set() for _ in self.rooms]  # Indices in shortest.
        for at, document in enumerate(shortest):
            on_shard[self.of_document[document]].add(at)
        for _ in range(_ROUNDS):
            others = set(range(len(self.rooms)))
            while (holes := [(self.rooms[r], r) for r in others if self.rooms[r]])[1:]:
                shard = min(holes)[1]
                others.remove(shard)
                while swap := self._longer(
                    shard, sorted(on_shard[shard]), shortest, lengths, others
                ):
                    owner = self.of_document[shortest[swap[1]]]
                    for at, old, new in ((swap[0], shard, owner), (swap[1], owner, shard)):
                        on_shard[old].remove(at)
                        on_shard[new].add(at)
                        self.rooms[old] += lengths[at]
                        self.loads[old] -= self.work[shortest[at]]
                        self.put(shortest[at], new)
        unplaced, self.split = self.split, []
        for document in unplaced:
            fit = [(room, r) for r, room in enumerate(self.rooms) if room >= self.lengths[document]]
            if fit:
                self.put(document, min(fit)[1])
            else:
                self.split.append(document)

    def _longer(
        self,
        shard: int,
        own: Iterable[int],
        shortest: Sequence[int],
        lengths: Sequence[int],
        others: Container[int],
    ) -> tuple[int, int] | None:
        """Indices of the two documents whose swap fills most of a shard's room, in ``shortest``."""
        room, gain, best = self.rooms[shard], 0, None
        for at in own:
            if gain == room:
                break
            other = bisect.bisect_right(lengths, lengths[at] + room) - 1
            while (more := lengths[other] - lengths[at]) > gain:
                owner = self.of_document[shortest[other]]
                # A full shard may get all of the room only: part of it would be one hole more.
                if owner in others and (more == room or self.rooms[owner] >= room):
                    gain, best = more, (at, other)
                other -= 1
        return best


def _place_whole(
    lengths: Sequence[int],
    work: Sequence[int],
    count: int,
    num_shards: int,
    capacity: int,
    switch: int,
    cap: int | None,
) -> _Shards:
    """Places whole all but the first ``count`` documents; lengths descend.

    Long ones go by work. The last ones, with ``1 / switch`` of all work, go by room: each shard
    keeps room for pieces of split documents, in proportion to its missing work and at most ``cap``,
    or as much as the others if that is None. Documents that fit nowhere are split too.
    """
    shards = _Shards(lengths, work, num_shards, capacity)
    shards.split.extend(range(count))
    total, at = sum(work), len(lengths)
    if switch:
        left = 0
        while at > count and switch * (left + work[at - 1]) <= total:
            at -= 1
            left += work[at]
    shards.put_by_work(range(count, at))
    kept = [0] * num_shards
    if cap is not None:
        missing = _even_out(shards.loads, total - sum(shards.loads))
        kept = _in_proportion(sum(shards.rooms) - sum(lengths[at:]), missing, cap)
    shards.put_by_room(range(at, len(lengths)), kept)
    if not count and shards.split:
        shards.close_holes()
    return shards


def _in_proportion(total: int, weights: Sequence[int], most: int) -> list[int]:
    """Parts of ``total`` in proportion to weights, but none larger than ``most``."""
    parts, others = [0] * len(weights), [i for i, weight in enumerate(weights) if weight]
    while others and most and total > 0:
        of_all = sum(weights[i] for i in others)
        capped = [i for i in others if total * weights[i] > most * of_all]
        if not capped:
            for i in others:
                parts[i] = total * weights[i] // of_all
            break
        for i in capped:
            parts[i] = most
        total -= most * len(capped)
        others = [i for i in others if not parts[i]]
    return parts


def _with_pieces(
    whole: _Shards, zones: Sequence[int], costs: RingCosts, limit: float
) -> Iterator[Found]:
    """The placement with its split documents cut, for each gathered zone that can hold them."""
    num_shards, needed = len(whole.rooms), sum(whole.lengths[i] for i in whole.split)
    tried: list[int] | None = None
    for zone in zones:
        # Padding comes last, so a shard with pieces has nothing else than its zone to fill.
        rooms = [room if room <= zone else 0 for room in whole.rooms]
        if sum(rooms) < needed or rooms == tried:
            continue
        tried = rooms
        pieces, loads = cut_documents(
            [(whole.lengths[i], i) for i in whole.split], rooms, whole.loads
        )
        busy = list(loads)
        for piece in pieces:
            busy[piece.shard] += piece.wasted(costs.tile)
        slowest, time = max(loads), costs.time(max(busy), zone, num_shards)
        yield Found(whole.of_document, pieces, zone, slowest, time, bool(zone) and slowest > limit)
        if not needed:
            return


def cut_documents(
    documents: Iterable[tuple[int, int]], rooms: Sequence[int], loads: Sequence[int]
) -> tuple[list[Piece], list[int]]:
    """Cuts documents so that they fill the shards' rooms and even out their work.

    Args:
      documents: length and index of each document.
      rooms: tokens that each shard has room for; their sum is at least that of the lengths.
      loads: pairs of each shard's whole documents.

    Returns:
      The pieces, and the pairs of each shard with them. Each document is spread over all shards
      with room, in proportion to it.
    """
    rooms, loads, pieces = list(rooms), list(loads), []
    ascending = sorted(documents)  # The longest is last: it can even out most.
    left = sum(pairs(length) for length, _ in ascending)
    for length, document in ascending:
        total, work = sum(rooms), pairs(length)
        cuts = [end * length // total for end in itertools.accumulate(rooms, initial=0)]
        tokens = [stop - start for start, stop in itertools.pairwise(cuts)]
        used = [shard for shard, count in enumerate(tokens) if count]
        wanted = [want * work // left for want in _even_out([loads[r] for r in used], left)]
        left -= work
        for piece in cut(document, length, used, [tokens[r] for r in used], wanted):
            pieces.append(piece)
            rooms[piece.shard] -= piece.tokens
            loads[piece.shard] += piece.work
    return pieces, loads


def _even_out(loads: Sequence[int], more: int) -> list[int]:
    """How much of ``more`` work each shard gets, so that those that get any end with the same."""
    level, filled = 0, 0
    for count, load in enumerate(sorted(loads)):
        if count and count * load - filled > more:
            break
        filled += load
        level = (filled + more) // (count + 1)
    return [max(0, level - load) for load in loads]


def cut(
    document: int, length: int, shards: Sequence[int], tokens: Sequence[int], wanted: Sequence[int]
) -> list[Piece]:
    """Cuts one document like zigzag, into given numbers of tokens and about the wanted work.

    Shards follow one another. Each gets a low chunk, the first x tokens that are left, and a high
    chunk, the last t - x. If tokens ``[p, q)`` are left its work is ::

        x (p - q + t) + t q - t (t - 1) / 2

    which gives x, from 0 to t. Early shards can differ most from the document's mean work per
    token, so they are ordered by how much they want to. Equal tokens and work give zigzag.

    Args:
      document: its index.
      length: its number of tokens.
      shards: the shards that share it.
      tokens: tokens of each shard, at least 1; their sum is ``length``.
      wanted: pairs that each shard should get.
    """
    ranked = sorted(range(len(shards)), key=lambda i: (wanted[i] / tokens[i], shards[i]))
    low, high, first, last = 0, length, 0, len(ranked) - 1
    left, pieces = sum(wanted), []
    while first <= last:
        # Twice the distance from the mean of the work that is left, at both ends of the ranking.
        mean = low + high + 1
        a, b = ranked[first], ranked[last]
        below, above = (abs(2 * wanted[i] - tokens[i] * mean) for i in (a, b))
        take_first = below * tokens[b] >= above * tokens[a]
        i = a if take_first else b
        # All shards still to come share what they want more than there is.
        surplus = (left - pairs(high) + pairs(low)) // (last - first + 1)
        first, last = first + take_first, last - (not take_first)
        left -= wanted[i]
        t = x = tokens[i]
        slope = high - low - t
        if slope:
            more = t * high - t * (t - 1) // 2 - (wanted[i] - surplus)
            x = min(max((2 * more + slope) // (2 * slope), 0), t)
        pieces.append(Piece(document, shards[i], low, low + x, high - t + x, high))
        low, high = low + x, high - t + x
    return pieces
