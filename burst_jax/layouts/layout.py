"""``Layout``: how a sequence is permuted and split over the shards of a ring, as a value.

A layout splits ``length`` tokens over ``n`` shards of ``c = length // n`` tokens. It cuts the
sequence into blocks of equal size and assigns each block to a shard (:meth:`Layout.block_shards`);
a shard holds its blocks in ascending order. Everything else follows: divisor, positions, runs,
permutation. A layout overrides what it computes faster or in fewer operations.

Code outside of this package asks a layout what it needs, and never which one it is.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from burst_jax.layouts.documents import Runs, packed_runs

# How attention runs over the shards: blocks rotate around a ring, or every device gathers the
# tokens of split documents from all devices (burst_jax/ring/vjp.py has the functions).
AttentionPass = Literal["ring", "gathered"]


class FirstHalf(NamedTuple):
    """The tokens at the start of every shard that make up the first half of the sequence.

    Attributes:
      tokens: their number on each shard.
      layouts: the layout that they are in; then, if there is one, another layout into which a ring
        over them may redistribute them.
    """

    tokens: int
    layouts: tuple[Layout, ...]


class Ordered(NamedTuple):
    """Sequences in the order of a layout.

    Attributes:
      layout: the layout, with what the documents determine of it.
      order: ``[B, T]``, the index in natural order of the token at each place, -1 for padding.
      segment_ids: ``[B, T]`` in this order. A layout may give documents new ids.
    """

    layout: Layout
    order: np.ndarray
    segment_ids: np.ndarray


class Layout(abc.ABC):
    """The order of a sequence's tokens over the shards of a ring: frozen and hashable.

    A layout defines :attr:`name`, :attr:`unit` and :meth:`block_shards`.

    Attributes:
      attention_pass: how attention runs in the layout.
      is_fixed: whether the order is the same for all sequences, and known before a batch is.
      in_natural_order: whether tokens stay in natural order, whatever the number of shards.
    """

    attention_pass: ClassVar[AttentionPass] = "ring"
    is_fixed: ClassVar[bool] = True
    in_natural_order: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The public spelling, as of the argument ``layout``."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        # Messages show what callers write.
        return repr(self.name)

    @property
    def unit(self) -> int:
        """The number that must divide the length of a shard."""
        return 1

    @property
    def known_zone(self) -> int:
        """Tokens at the end of every shard that all devices gather; 0 in a ring.

        Raises:
          ValueError: documents have not determined it.
        """
        return 0

    @abc.abstractmethod
    def block_shards(self, shard_length: int, num_shards: int) -> tuple[int, np.ndarray]:
        """Which shard holds each block of the sequence.

        Returns:
          ``(size, shards)``: block b of the sequence, of ``size`` tokens, is on shard
          ``shards[b % len(shards)]``.
        """

    def padded_length(self, length: int, num_shards: int) -> int:
        """The smallest length, ``length`` or longer, that can be split over ``num_shards``."""
        multiple = self.unit * check_shards(num_shards)
        return -(-length // multiple) * multiple

    def check_length(self, length: int, num_shards: int, name: str = "length") -> None:
        """Raises ValueError if a length cannot be split, with the length to pad to.

        ``name`` is the name of the length in the message.
        """
        fit = self.padded_length(length, num_shards)
        if fit != length:
            raise ValueError(
                f"{name} is {length}: the {self} layout over {num_shards} shards needs a multiple "
                f"of {self.unit * num_shards}; pad to {fit} (pad_to_layout pads and masks the "
                "padding)"
            )
        self.check_shard(length // num_shards)

    def check_shard(self, shard_length: int, name: str = "the array") -> None:
        """Raises ValueError if no shard has this length; ``name`` is its array's in the message."""
        if shard_length % self.unit:
            needs = "an even number" if self.unit == 2 else f"a multiple of {self.unit}"
            raise ValueError(
                f"{name} holds {shard_length} tokens per shard: the {self} layout needs {needs}; "
                "pad the sequence with pad_to_layout"
            )

    def check_is_fixed(self) -> None:
        """Raises ValueError unless the order is the same for every sequence."""
        if not self.is_fixed:
            raise ValueError(
                f"layout is {self!r}, whose order differs between sequences: use what "
                "burst_jax.layouts.balance returned for them: order, positions, place, restore"
            )

    def runs(self, shard_length: int, num_shards: int) -> np.ndarray | None:
        """The first position of every run: a range of tokens that are adjacent in natural order.

        Returns:
          int64 ``[num_shards, runs]``, ascending within a shard, whose runs have
          ``shard_length // runs`` tokens each. Two runs may be adjacent. None if the documents of a
          batch define the runs: :func:`burst_jax.layouts.documents.runs_of` its arrays.
        """
        return self._block_starts(shard_length, num_shards)

    def _block_starts(self, shard_length: int, num_shards: int) -> np.ndarray:
        """int64 ``[num_shards, blocks]``: the index of the first token of each shard's blocks."""
        size, shards = self.block_shards(shard_length, num_shards)
        blocks = num_shards * shard_length // max(size, 1)
        by_shard = np.argsort(np.resize(shards, blocks), kind="stable")
        return by_shard.reshape(num_shards, -1) * size

    def positions(self, length: int, num_shards: int) -> np.ndarray | None:
        """The position of every token, int32 ``[length]``; None if sequences differ in them."""
        natural = np.arange(length, dtype=np.int32)
        return self.reorder(natural, num_shards, 0, np, inverse=False)

    def fixed_positions(self, length: int, num_shards: int) -> np.ndarray:
        """:meth:`positions`; ValueError if sequences differ in them, or ``length`` does not fit."""
        self.check_is_fixed()
        self.check_length(length, check_shards(num_shards))
        found = self.positions(length, num_shards)
        assert found is not None
        return found

    def shard_positions(self, shard_length: int, num_shards: int, shard: ArrayLike) -> jax.Array:
        """Positions of one shard's tokens, in index order.

        Args:
          shard_length: number of tokens per shard, ``c``.
          num_shards: number of shards on the ring, ``n``.
          shard: the shard's index, a Python int or a traced int32 (``lax.axis_index``).

        Returns:
          int32 ``[shard_length]``, ascending; indices in the array, if sequences differ in their
          positions. A NumPy array for a Python int: what is computed from it alone, as tile bounds,
          is computed while tracing.
        """
        xp, shard, _ = namespace_and_index(shard_length, shard)
        starts = xp.asarray(self._block_starts(shard_length, num_shards).astype(np.int32))[shard]
        block, within = np.divmod(np.arange(shard_length), shard_length // starts.size)
        return starts[block] + within.astype(np.int32)

    def progressions(
        self, shard_lengths: Sequence[int], num_shards: int, blocks: Sequence[int | None]
    ) -> list[tuple[np.ndarray, int, int]]:
        """The positions of all shards as arithmetic progressions, for shards of several lengths.

        Args:
          shard_lengths: number of tokens per shard, of queries and of keys.
          num_shards: number of shards on the ring.
          blocks: of each, the size in positions of the blocks at which the progressions will be
            split; None for no blocks. It may determine which progressions are fewest.

        Returns:
          ``(starts, stride, count)`` of each length: progression j of shard r has the positions
          ``starts[r, j] + stride * i`` for i from 0 to ``count - 1``; starts is int64
          ``[num_shards, progressions]``. All have one stride.
        """
        del blocks
        starts = [self._block_starts(length, num_shards) for length in shard_lengths]
        pairs = zip(starts, shard_lengths, strict=True)
        return [(each, 1, length // each.shape[1]) for each, length in pairs]

    def run_in_blocks(self, shard_length: int, num_shards: int, block: int) -> int:
        """Number of adjacent tokens of a shard that are always in one block of the sequence.

        Args:
          shard_length: number of tokens per shard.
          num_shards: number of shards on the ring.
          block: block size in positions; the first block starts at position 0.

        Returns:
          The largest r that is known: tokens ``i r .. i r + r - 1`` of every shard are in one
          block, for every i.
        """
        return math.gcd(self.block_shards(shard_length, num_shards)[0], block)

    def reorder(self, x: Any, num_shards: int, axis: int, xp: Any, *, inverse: bool) -> Any:
        """An array permuted along ``axis`` into the layout, or back, by ``xp`` (NumPy or JAX's)."""
        shard_length = x.shape[axis] // num_shards
        size = self.block_shards(shard_length, num_shards)[0]
        starts = self._block_starts(shard_length, num_shards)
        order = (starts[..., None] + np.arange(size)).reshape(-1)
        return xp.take(x, np.argsort(order) if inverse else order, axis)

    def place(
        self, batch: dict[str, Any], num_shards: int, agree: Callable[[int], int] = int
    ) -> tuple[Layout, dict[str, Any]]:
        """A batch of host arrays ``[B, T]`` in natural order, permuted into the layout.

        Args:
          batch: "segment_ids" (None for one segment without padding), "prefix_lengths" ``[B]`` if
            it is given, and arrays that are permuted together.
          num_shards: number of shards on the ring.
          agree: as in :meth:`order_of`.

        Returns:
          ``(layout, batch)``: the layout, with what the documents determine of it, and the permuted
          batch.

        Raises:
          ValueError: the layout is one of other documents.
          NotImplementedError: prefixes, which the layout does not support.
        """
        del agree
        return self, {
            name: x
            if x is None or x.ndim < 2
            else self.reorder(x, num_shards, 1, np, inverse=False)
            for name, x in batch.items()
        }

    def order_of(
        self, segment_ids: np.ndarray, num_shards: int, agree: Callable[[int], int] = int
    ) -> Ordered:
        """The order of sequences with these segment ids ``[B, T]``, and their ids in it.

        ``agree`` returns the size that all processes use for a part of the layout that documents
        determine, of the size that those of this process need: that one or a larger one.

        Raises:
          ValueError: the layout is one of other documents.
        """
        order = self.positions(segment_ids.shape[1], num_shards)
        assert order is not None
        return Ordered(self, np.broadcast_to(order, segment_ids.shape), segment_ids[:, order])

    def variants(self, shard_length: int) -> tuple[Layout, ...]:
        """All layouts that :meth:`order_of` may return, for shards of this length."""
        del shard_length
        return (self,)

    def of_lengths(
        self, lengths: Sequence[Sequence[int]], num_shards: int, shard_length: int
    ) -> tuple[Layout, Iterable[Runs]]:
        """The layout for documents of these lengths, and the runs of each sequence's documents.

        Runs are those of natural order, or of the layout's order if it differs between sequences.
        """
        del num_shards, shard_length
        return self, map(packed_runs, lengths)

    def given_positions[Positions](self, positions: Positions) -> Positions | None:
        """The caller's ``positions`` if attention needs them; None if the layout defines them."""
        del positions
        return None

    def first_half(self, shard_length: int, num_shards: int) -> FirstHalf:
        """The first half of the sequence; only if :meth:`lacks_first_half` returns None."""
        raise NotImplementedError(self.lacks_first_half(num_shards))

    def lacks_first_half(self, num_shards: int) -> str | None:
        """Why the starts of the shards do not make up the first half of a sequence, or None."""
        del num_shards
        return (
            f"layout is {self!r}, in which the first halves of the shards are not the first half "
            "of the sequence"
        )


def gathered_pass_lacks(layout: Layout, argument: str) -> str:
    """The message of an argument that the gathered pass does not support, with the remedy."""
    return (
        f"{argument} is given with layout {layout!r}, in which kernels do not read positions: use "
        "the zigzag or striped layout with it, where attention needs no positions"
    )


def check_shards(num_shards: Any) -> int:
    """``num_shards`` as a Python int; ValueError unless it is a positive integer."""
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards is {num_shards!r}: it must be a positive integer")
    return int(num_shards)


def namespace_and_index(shard_length: int, shard: Any) -> tuple[Any, Any, Any]:
    """``(np or jnp, shard, index)`` of int32, for :meth:`Layout.shard_positions`."""
    known = isinstance(shard, int)
    xp: Any = np if known else jnp
    shard = np.int32(shard) if known else jnp.asarray(shard, jnp.int32)
    return xp, shard, xp.arange(shard_length, dtype=np.int32)
