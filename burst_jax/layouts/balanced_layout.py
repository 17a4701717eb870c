"""``Balanced``: the layout of packed documents, whose order differs from sequence to sequence.

Documents are placed by :mod:`burst_jax.layouts.balanced`. The layout has only what a program must
know of it: devices exchange no more than the last z tokens of every shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, override

import numpy as np

from burst_jax.errors import check_integer
from burst_jax.layouts.balanced import search_batch, zone_sizes
from burst_jax.layouts.documents import Runs, place_documents, placed_runs
from burst_jax.layouts.layout import AttentionPass, Layout, Ordered, gathered_pass_lacks


@dataclasses.dataclass(frozen=True, repr=False)
class Balanced(Layout):
    """What :func:`burst_jax.layouts.balance` chose for a batch.

    Attributes:
      zone: number of tokens at the end of every shard, z, that the devices exchange: its gathered
        zone, with the pieces of split documents. None until documents determine it
        (:meth:`order_of`).
    """

    attention_pass: ClassVar[AttentionPass] = "gathered"
    is_fixed: ClassVar[bool] = False
    zone: int | None = None

    def __post_init__(self) -> None:
        if self.zone is not None:
            check_integer("zone", self.zone, 0)

    @property
    @override
    def name(self) -> str:
        return "balanced" if self.zone is None else f"balanced:{self.zone}"

    @property
    @override
    def known_zone(self) -> int:
        if self.zone is None:
            raise ValueError(
                f"layout is {self!r}, without the size of its gathered zone: pass the layout "
                "that burst_jax.training.make_batch(rows, layout='balanced', num_shards=n) returns "
                "with the batch"
            )
        return self.zone

    @override
    def block_shards(self, shard_length: int, num_shards: int) -> tuple[int, np.ndarray]:
        # Of places in the array, which are not positions.
        return shard_length, np.arange(num_shards)

    @override
    def check_shard(self, shard_length: int, name: str = "the array") -> None:
        if self.known_zone > shard_length:
            raise ValueError(
                f"layout is {self!r}, and a shard has {shard_length} tokens: make the batch, the "
                "model and the mesh with the same number of shards and length"
            )

    @override
    def runs(self, shard_length: int, num_shards: int) -> None:
        return None

    @override
    def positions(self, length: int, num_shards: int) -> None:
        return None

    @override
    def place(
        self, batch: dict[str, Any], num_shards: int, agree: Callable[[int], int] = int
    ) -> tuple[Layout, dict[str, Any]]:
        if "prefix_lengths" in batch:
            raise NotImplementedError(gathered_pass_lacks(self, "prefix_lengths"))
        segment_ids = batch["segment_ids"]
        if segment_ids is None:
            segment_ids = np.ones(batch["inputs"].shape, np.int32)
        layout, order, segment_ids = self.order_of(segment_ids, num_shards, agree)
        index, is_padding = np.maximum(order, 0), order < 0
        arrays = {name: x for name, x in batch.items() if name != "segment_ids"}
        arrays = {name: np.take_along_axis(x, index, 1) for name, x in arrays.items()}
        for x in arrays.values():
            x[is_padding] = 0
        return layout, arrays | {"segment_ids": segment_ids}

    @override
    def order_of(
        self, segment_ids: np.ndarray, num_shards: int, agree: Callable[[int], int] = int
    ) -> Ordered:
        if self.zone is not None:
            self.check_shard(segment_ids.shape[1] // num_shards)
        try:
            order, placed = place_documents(segment_ids, num_shards, self.zone, agree)
        except ValueError:
            fit = Balanced().order_of(segment_ids, num_shards).layout
            raise ValueError(
                f"layout is {self!r}, whose gathered zone is too small for these documents: use "
                f"{fit!r}, or better layout='balanced', with which make_batch returns the layout "
                "of the whole batch"
            ) from None
        ids = np.array([one.segment_ids for one in placed], np.int32)
        zone = max((one.zone for one in placed), default=self.zone or 0)
        return Ordered(Balanced(zone), order, ids.reshape(segment_ids.shape))

    @override
    def variants(self, shard_length: int) -> tuple[Layout, ...]:
        if self.zone is not None:
            return (self,)
        return tuple(map(Balanced, zone_sizes(shard_length)))

    @override
    def of_lengths(
        self, lengths: Sequence[Sequence[int]], num_shards: int, shard_length: int
    ) -> tuple[Layout, Iterable[Runs]]:
        placed = search_batch(
            lengths, num_shards=num_shards, tokens_per_shard=shard_length, zone=self.zone
        )
        zone = max((found.zone for _, found in placed), default=0)
        return Balanced(zone), (placed_runs(*each, num_shards, shard_length) for each in placed)

    @override
    def given_positions[Positions](self, positions: Positions) -> Positions:
        return positions

    @override
    def lacks_first_half(self, num_shards: int) -> str:
        return (
            f"layout is {self!r}, which has no first half of a sequence to recompute: it places "
            "every document by itself"
        )
