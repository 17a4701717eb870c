"""Balanced documents: the layout of packed sequences, chosen from the lengths of their documents.

A fixed layout sends all keys around the ring, although a short document needs no other shard, and
evens out the work of one long document, not of several documents. Here each document is either
*whole*, all of it on one shard, or *split* into pieces on several shards. All pieces are within the
last z tokens of their shards, the **gathered zone**, and only the zones are sent::

    shard 0   | document 1 | 2 |    3    | pieces of 8 and 9 |
    shard 1   |     4     |      5       | pieces of 8 and 9 |
    shard 2   |      6       |    7      | pieces of 8 and 9 |
                                         '---- z tokens -----'

Attention is local attention over each shard for whole documents. For split ones every device
all-gathers the zones' keys and values, in slices that overlap with compute; their gradients are
reduce-scattered (:mod:`burst_jax.ring.gathered`). On a shard whole documents come first, the
longest of them ahead, then pieces, then padding. Whole documents may extend into the zone.

A document is split like zigzag, into a low and a high chunk for each shard, but with chunk sizes
that even out the causal pairs of all shards, whole documents included. Four shards with 8 tokens
each, documents A to E of 5, 3, 16, 4 and 4 tokens::

              whole   C: low   C: high       causal pairs of its queries
    shard 0   A A A A A   0        14 15         15 +  1 + 31 = 47
    shard 1   D D D D     3  4     10 11         10 +  9 + 23 = 42
    shard 2   E E E E     1  2     12 13         10 +  5 + 27 = 42
    shard 3   B B B       5  6     7  8  9        6 + 13 + 27 = 46
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from burst_jax.errors import check_integer, shown
from burst_jax.layouts.document_search import Found, pairs, search
from burst_jax.layouts.ring_costs import RingCosts

# A gathered zone is this many sixteenths of a shard, so that at most six programs are compiled.
_ZONE_PARTS = (2, 4, 6, 8, 16)
_ZONE_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The order of the tokens of one packed sequence over the shards: see :func:`balance`.

    Arrays are NumPy arrays ``[n c]`` for n shards of c tokens: shard r has ``r c .. r c + c - 1``.

    Attributes:
      order: int32, each token's index in natural order (documents one after the other); -1 for
        padding.
      positions: int32, for RoPE and the attention calls: the same, 0 for padding.
      segment_ids: int32, for the attention calls: 0 for padding, otherwise one id per document,
        from 1. Ids ascend within a shard, and split documents have the highest.
      layout: ``"balanced:z"``, the ``layout=`` of attention, layers and batches; the last z tokens
        of every shard are its gathered zone, and with ``"balanced:0"`` nothing is sent.
      zone: z.
      balance: the slowest device's causal pairs over the mean device's; 1 is ideal.
      share_of_ideal: the mean device's causal pairs over the modelled time of the slowest device,
        which includes the gathered zone, exposed sends and partly masked tiles.
      split: indices of the documents that are split, ascending.
    """

    order: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    layout: str
    zone: int
    balance: float
    share_of_ideal: float
    split: tuple[int, ...]
    _tokens: int = dataclasses.field(repr=False)

    def place(self, x: Any, axis: int = -1, fill: Any = 0) -> np.ndarray:
        """Permutes tokens along ``axis`` from natural order into this layout, with padding.

        Args:
          x: an array whose length along ``axis`` is the number of tokens, or n c; what follows the
            tokens is ignored.
          axis: the sequence axis.
          fill: the value of padding.

        Returns:
          A NumPy array of the dtype of ``x`` with length n c along ``axis``.

        Raises:
          ValueError: another length, an axis that ``x`` does not have, or a ``fill`` that its dtype
            cannot hold.
        """
        x, axis = self._checked(x, axis, {self._tokens, len(self.order)})
        padding = None
        with contextlib.suppress(TypeError, ValueError), np.errstate(all="ignore"):
            padding = np.asarray(fill).astype(x.dtype)
        if padding is None or padding.ndim or (x.dtype.kind in "biu" and padding != fill):
            raise ValueError(
                f"fill is {shown(fill)}: it must be one value that dtype {x.dtype} can hold"
            )
        if not x.shape[axis]:
            x = np.full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), padding)
        placed = np.take(x, self.positions, axis)
        empty = self.order < 0
        if empty.any():
            placed[(*(slice(None),) * axis, empty)] = padding
        return placed

    def restore(self, x: Any, axis: int = -1) -> np.ndarray:
        """Permutes tokens along ``axis`` back into natural order and drops padding.

        The inverse of :meth:`place`, for outputs.

        Args:
          x: an array with length n c along ``axis``.
          axis: the sequence axis.

        Returns:
          A NumPy array of the dtype of ``x`` with the number of tokens along ``axis``.

        Raises:
          ValueError: another length, or an axis that ``x`` does not have.
        """
        x, axis = self._checked(x, axis, {len(self.order)})
        places = np.flatnonzero(self.order >= 0)
        at = np.empty(self._tokens, np.intp)
        at[self.order[places]] = places
        return np.take(x, at, axis)

    def _checked(self, x: Any, axis: int, lengths: set[int]) -> tuple[np.ndarray, int]:
        x = np.asarray(x)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"axis is {axis}: the array has shape {x.shape}")
        axis %= x.ndim
        if x.shape[axis] not in lengths:
            raise ValueError(
                f"the array's length along axis {axis} is {x.shape[axis]}: the placement needs "
                + " or ".join(map(str, sorted(lengths)))
            )
        return x, axis


def zone_sizes(tokens_per_shard: int) -> tuple[int, ...]:
    """The sizes of gathered zones that :func:`balance` chooses from, ascending.

    They are 0, and 1/8, 1/4, 3/8, 1/2 and all of a shard, rounded up to multiples of 128 tokens
    but never more than a shard. Each is a compiled program, so there are at most six.

    Args:
      tokens_per_shard: number of tokens per shard, c.

    Raises:
      ValueError: it is not a positive integer.
    """
    c = check_integer("tokens_per_shard", tokens_per_shard, 1)
    multiple = _ZONE_MULTIPLE
    sizes = {min(c, -(-c * part // (16 * multiple)) * multiple) for part in _ZONE_PARTS}
    return (0, *sorted(sizes))


def balance(
    lengths: Iterable[int] | np.ndarray,
    *,
    num_shards: int,
    tokens_per_shard: int,
    zone: int | None = None,
    costs: RingCosts | None = None,
) -> Placement:
    """Places the documents of one packed sequence on shards, so that no device waits for others.

    The placement minimizes the modelled time of the slowest device (:class:`RingCosts`) as well as
    a search of some milliseconds can. Few documents are split: those that alone are too much for
    one device, and those that fit nowhere whole. The same lengths give the same placement on every
    machine. It runs on the host, once per batch, before batches are put on devices.

    Args:
      lengths: the number of tokens of each document, in natural order: integers, at least 1. A
        sequence without documents is all padding.
      num_shards: number of shards on the ring, n.
      tokens_per_shard: number of tokens per shard, c. What the documents leave of n c tokens is
        padding.
      zone: tokens of the gathered zone, for several sequences that share a program
        (:func:`balance_batch` chooses it). Default: one of :func:`zone_sizes`.
      costs: the cost model; default ``RingCosts()``.

    Returns:
      The :class:`Placement`.

    Raises:
      ValueError: lengths that are not positive integers, more than n c tokens, or split documents
        that do not fit in ``zone``; the message has the zone that fits.
    """
    checked = _check("lengths", lengths, num_shards, tokens_per_shard, costs)
    lengths, n, c, _ = checked
    return _placement(lengths, _search(*checked, zone), n, c)


def balance_batch(
    batch: Sequence[Iterable[int] | np.ndarray],
    *,
    num_shards: int,
    tokens_per_shard: int,
    zone: int | None = None,
    costs: RingCosts | None = None,
) -> list[Placement]:
    """Places the documents of every sequence of a batch with one common gathered zone.

    Args:
      batch: the document lengths of each sequence, as ``lengths`` of :func:`balance`.
      num_shards: number of shards on the ring, n.
      tokens_per_shard: number of tokens per shard of each sequence, c.
      zone: tokens of the gathered zone; default: the largest that a sequence needs.
      costs: the cost model; default ``RingCosts()``.

    Returns:
      One :class:`Placement` per sequence, all with the same ``layout``.

    Raises:
      ValueError: as of :func:`balance`.
    """
    sizes = {"num_shards": num_shards, "tokens_per_shard": tokens_per_shard}
    return placements(search_batch(batch, **sizes, zone=zone, costs=costs), **sizes)


def placements(
    found: Iterable[tuple[list[int], Found]], *, num_shards: int, tokens_per_shard: int
) -> list[Placement]:
    """The arrays of what :func:`search_batch` found for these numbers of shards and tokens."""
    n, c = int(num_shards), int(tokens_per_shard)
    return [_placement(lengths, each, n, c) for lengths, each in found]


def search_batch(
    batch: Sequence[Iterable[int] | np.ndarray],
    *,
    num_shards: int,
    tokens_per_shard: int,
    zone: int | None = None,
    costs: RingCosts | None = None,
    agree: Callable[[int], int] = int,
) -> list[tuple[list[int], Found]]:
    """The documents' lengths and the placement of every sequence, without arrays of its tokens.

    Arguments and errors are those of :func:`balance_batch`. Without ``zone`` the common one is
    ``agree`` of the largest that a sequence needs: that one or a larger one.
    """
    checked = [
        _check(f"batch[{i}]", lengths, num_shards, tokens_per_shard, costs)
        for i, lengths in enumerate(batch)
    ]
    found = [_search(*each, zone) for each in checked]
    common = max((each.zone for each in found), default=0)
    common = agree(common) if zone is None else common
    return [
        (each[0], one if one.zone == common else _search(*each, common))
        for one, each in zip(found, checked, strict=True)
    ]


def check_lengths(name: str, lengths: Any) -> list[int]:
    """The number of tokens of each document, as Python integers; ``name`` is for messages.

    Raises:
      ValueError: they are not positive integers.
    """
    documents = None
    with contextlib.suppress(TypeError, ValueError):
        given = lengths if hasattr(lengths, "dtype") else list(lengths)
        # NumPy takes a bool among integers for 1.
        if hasattr(given, "dtype") or not any(isinstance(each, bool) for each in given):
            documents = np.asarray(given)
    # The array of an empty list has a float dtype.
    is_integer = documents is not None and (documents.dtype.kind in "iu" or not documents.size)
    if documents is None or documents.ndim != 1 or not is_integer:
        raise ValueError(
            f"{name} is {shown(lengths)}: it must be a sequence of integers, the number of tokens "
            "of each document"
        )
    found = documents.tolist()
    for at in np.flatnonzero(documents < 1):
        raise ValueError(
            f"{name}[{at}] is {found[at]}: a document has at least 1 token; leave out empty ones"
        )
    return found


def _check(
    name: str, lengths: Any, num_shards: Any, tokens_per_shard: Any, costs: RingCosts | None
) -> tuple[list[int], int, int, RingCosts]:
    """The arguments of :func:`balance` as Python integers; ``name`` is that of the lengths."""
    n = check_integer("num_shards", num_shards, 1)
    c = check_integer("tokens_per_shard", tokens_per_shard, 1)
    if n * c >= 2**31:
        raise ValueError(
            f"num_shards * tokens_per_shard is {n * c}: it must be less than 2**31, because "
            "positions are int32"
        )
    costs = RingCosts() if costs is None else costs
    if not isinstance(costs, RingCosts):
        raise ValueError(f"costs is {shown(costs)}: it must be a RingCosts")
    found = check_lengths(name, lengths)
    if sum(found) > n * c:
        raise ValueError(
            f"{name} have {sum(found)} tokens in all: {n} shards of {c} tokens hold {n * c}; pack "
            "fewer documents, cut long ones, or increase tokens_per_shard"
        )
    return found, n, c, costs


def _search(lengths: list[int], n: int, c: int, costs: RingCosts, zone: int | None) -> Found:
    """The placement for arguments that are checked, but for ``zone``."""
    zone = None if zone is None else check_integer("zone", zone, 0, c)
    found = search(lengths, n, c, zone_sizes(c), costs, zone)
    if found is None:  # Only with a zone that is given: one of whole shards holds everything.
        fit = _search(lengths, n, c, costs, None).zone
        raise ValueError(
            f"zone is {zone}: the pieces of split documents do not fit in it; use zone={fit}"
        )
    return found


def _placement(lengths: list[int], found: Found, n: int, c: int) -> Placement:
    """The arrays of a placement."""
    segment, start, size = runs_of_placement(lengths, found, n, c)
    is_padding = np.repeat(segment == 0, size)
    first = np.cumsum(size) - size
    order = np.arange(n * c, dtype=np.int32) + np.repeat((start - first).astype(np.int32), size)
    order[is_padding] = -1
    work = sum(map(pairs, lengths))
    return Placement(
        order=order,
        positions=np.maximum(order, 0),
        segment_ids=np.repeat(segment.astype(np.int32), size),
        layout=f"balanced:{found.zone}",
        zone=found.zone,
        balance=found.slowest * n / work if work else 1.0,
        share_of_ideal=work / (n * found.time) if work else 1.0,
        split=tuple(sorted({piece.document for piece in found.pieces})),
        _tokens=sum(lengths),
    )


def runs_of_placement(
    lengths: list[int], found: Found, n: int, c: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of adjacent tokens, int64 ``[R]``, in the order of the layout: of all n shards.

    Returns:
      ``(segment, start, size)`` of each run: its segment id, 0 for the padding at the end of a
      shard; the index of its first token in natural order; its number of tokens, of padding also 0.
    """
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    sizes = np.asarray(lengths, np.int64)
    # Whole documents by shard, then the longest first: the backward kernel takes keys in ascending
    # order, and a GPU idles least if its last tiles are short ones. Ids count in the same order.
    shards = np.array(found.shards, np.int64)
    by_shard = np.lexsort((-sizes, shards))
    whole = by_shard[shards[by_shard] >= 0]
    split = sorted({piece.document for piece in found.pieces})
    ids = {document: len(whole) + 1 + i for i, document in enumerate(split)}
    runs = []  # Shard, id, start, size.
    for piece in found.pieces:
        for start, stop in ((piece.start, piece.low), (piece.high, piece.stop)):
            if stop > start:
                run = piece.shard, ids[piece.document], starts[piece.document] + start, stop - start
                runs.append(run)
    table = [
        np.stack([shards[whole], 1 + np.arange(len(whole)), starts[whole], sizes[whole]], 1),
        np.array(runs, np.int64).reshape(-1, 4),
    ]
    used = np.bincount(np.concatenate(table)[:, 0], np.concatenate(table)[:, 3], n).astype(np.int64)
    # Padding is sorted after all ids.
    table.append(np.stack([np.arange(n), np.full(n, len(lengths) + 1), 0 * used, c - used], 1))
    shard, segment, start, size = np.concatenate(table).T
    ranked = np.lexsort((start, segment, shard))
    segment, start, size = (column[ranked] for column in (segment, start, size))
    return np.where(segment > len(lengths), 0, segment), start, size
