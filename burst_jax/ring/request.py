"""``Request``: everything static about a call, parsed and checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from burst_jax.layouts.permutation import Layout, run_in_blocks, shard_positions
from burst_jax.parallel.mesh import flat_names
from burst_jax.parallel.target import Target
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.route import RingMask, Route, Stop, make_route
from pallas_kernels import (
    AttentionSpec,
    BlockMask,
    Implementation,
    Operands,
    Tokens,
    resolve,
)
from pallas_kernels.mask import Mask
from pallas_kernels.score import LOGITS_NUMBERS

if TYPE_CHECKING:
    from burst_jax.ring.local import Shard

# What an implementation can do depends on no tokens, and the choice comes before there are any.
_NO_POSITIONS: Any = np.zeros(0, np.int32)
_NO_TOKENS = Tokens(_NO_POSITIONS)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a call asks for, whatever its arrays are and whatever it runs on.

    It is hashable, so that an eager call finds its compiled program by it. Shapes and dtypes are
    the arrays' own; platform and compute capability are read where a program is traced
    (:func:`burst_jax.parallel.target.current_target`), because one call may be traced for
    several.

    Attributes:
      spec: the mask, and how a logit is made.
      layout: the order of the tokens.
      ring_axes: the ring's mesh axes, outermost first; without any there is no ring.
      ring_sizes: how many devices lie along each of them.
      ulysses_axis: the mesh axis whose devices exchange tokens for heads, or None.
      ulysses_size: how many devices lie along it; 1 without the axis.
      implementation: the local attention, or None for the fastest that can run.
      rotation: what travels for the gradients: the argument ``backward`` of the public functions.
      deterministic: whether gradients must have the same bits at every run.
      query_offset: what comes onto the queries' positions in the layout; None where only arrays say
        what the positions are.
      blocks: what is static of a mask by blocks; None without one.
    """

    spec: AttentionSpec
    layout: Layout
    ring_axes: tuple[str, ...]
    ring_sizes: tuple[int, ...]
    ulysses_axis: str | None
    ulysses_size: int
    implementation: Implementation | None
    rotation: RotationChoice
    deterministic: bool = False
    query_offset: int | None = 0
    blocks: Blocks | None = None

    @property
    def ring_size(self) -> int:
        """How many shards the layout counts."""
        return math.prod(self.ring_sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that a sequence is split over: the ring's, and inside them the heads'."""
        return flat_names(self.ring_axes, self.ulysses_axis)

    @property
    def token_devices(self) -> int:
        """How many devices a sequence is split over."""
        return self.ring_size * self.ulysses_size

    @property
    def checks_vma(self) -> bool:
        """Whether the implementation can be traced inside ``shard_map(check_vma=True)``."""
        return self.implementation is None or self.implementation.checks_vma

    def resolve(
        self,
        target: Target,
        shard: Shard,
        *,
        backward: bool = False,
    ) -> Implementation:
        """The local attention that runs on ``target`` for these arrays."""
        queries, keys, per_head, seeds, table, _ = shard
        q_tokens = Tokens(**queries.token_arrays | {"positions": _NO_POSITIONS})
        blocks = self.block_mask(table, queries.length, keys.length)
        return resolve(
            self.implementation,
            platform=target.platform,
            compute_capability=target.compute_capability,
            operands=Operands(
                queries.q, keys.k, keys.v, q_tokens, _NO_TOKENS, per_head, seeds, blocks
            ),
            backward=backward,
            deterministic=self.deterministic,
            spec=self.spec,
        )

    def differentiating(self, names: Container[str]) -> Request:
        """The request whose backward also makes the gradients of these numbers of each head."""
        wanted = tuple(name for name in LOGITS_NUMBERS if name in names)
        score = dataclasses.replace(self.spec.score, differentiated=wanted)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, score=score))

    def ring_mask(self, q_length: int, kv_length: int, *, queries_travel: bool = False) -> RingMask:
        """Which scores the mask keeps at each stop, for shards of these lengths.

        Positions that only arrays say are not known before the program runs: all scores are kept.
        """
        blocks = self.blocks
        return RingMask(
            self.ring_sizes,
            self.layout,
            q_length,
            kv_length,
            Mask() if self.query_offset is None else self.spec.mask,
            queries_travel,
            self.query_offset or 0,
            None if blocks is None or blocks.bits is None else blocks,
        )

    def route(self, q_length: int, kv_length: int, *, queries_travel: bool = False) -> Route:
        """The stops that shards of these lengths need."""
        mask = self.ring_mask(q_length, kv_length, queries_travel=queries_travel)
        return make_route(self.ring_axes, mask)

    def block_mask(
        self, table: jax.Array | None, q_length: int, kv_length: int
    ) -> BlockMask | None:
        """A table ``[N or 1, rows, columns]`` as a local attention of such shards takes it."""
        if table is None:
            return None
        assert self.blocks is not None
        sizes = self.blocks.q_block, self.blocks.kv_block
        runs = (
            run_in_blocks(self.layout, length, self.ring_size, block)
            for length, block in zip((q_length, kv_length), sizes, strict=True)
        )
        return BlockMask(table, *sizes, *runs)

    def tokens(
        self,
        route: Route,
        length: int,
        stop: Stop | jax.Array,
        token_arrays: Mapping[str, jax.Array],
    ) -> Tokens:
        """The tokens of the block that is here at ``stop``.

        ``token_arrays`` are the fields of :class:`pallas_kernels.Tokens`, which the block brought
        along: positions ``[1, length]``, if they are not the layout's.
        """
        arrays = dict(token_arrays)
        own = arrays.pop("positions", None)
        if own is not None:
            return Tokens(own[0], **arrays)
        shard = route.source(stop)
        return Tokens(shard_positions(self.layout, length, route.size, shard), **arrays)

    def positions_here(self, length: int) -> jax.Array:
        """Positions int32 ``[length]`` of this device's tokens, before any exchange of heads.

        They are the layout's, without :attr:`query_offset`.
        """
        shard = lax.axis_index(self.ring_axes) if self.ring_axes else 0
        exchange = self.ulysses_size
        positions = shard_positions(self.layout, length * exchange, self.ring_size, shard)
        if self.ulysses_axis is None:
            return positions
        first = lax.axis_index(self.ulysses_axis) * length
        return lax.dynamic_slice_in_dim(positions, first, length)
