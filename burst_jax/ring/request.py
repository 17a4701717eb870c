"""``Request``: everything static about a call, parsed and checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container

import jax
from jax import lax

from burst_jax.layouts.permutation import Layout, run_in_blocks, shard_positions
from burst_jax.parallel.mesh import flat_names
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.route import Chunks, RingMask, Route, Stop, make_route
from pallas_kernels import AttentionSpec, Implementation
from pallas_kernels.mask import Mask
from pallas_kernels.score import SCORE_PARAMETERS


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
      chunk_size: C of chunked attention; None without chunks. Per-query KV bounds mask the scores;
        routes skip hops between chunks.
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
    chunk_size: int | None = None

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

    def differentiating(self, names: Container[str]) -> Request:
        """The request whose backward also makes the gradients of these numbers of each head."""
        wanted = tuple(name for name in SCORE_PARAMETERS if name in names)
        score = dataclasses.replace(self.spec.score, differentiated=wanted)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, score=score))

    def ring_mask(self, q_length: int, kv_length: int, *, queries_travel: bool = False) -> RingMask:
        """Which scores the mask keeps at each stop, for shards of these lengths.

        Positions that only arrays say are not known before the program runs: all scores are kept.
        """
        blocks: Blocks | Chunks | None = None
        if self.blocks is not None and self.blocks.bits is not None:
            blocks = self.blocks
        elif self.chunk_size is not None and self.query_offset is not None:
            blocks = Chunks(self.chunk_size)
        return RingMask(
            self.ring_sizes,
            self.layout,
            q_length,
            kv_length,
            Mask() if self.query_offset is None else self.spec.mask,
            queries_travel,
            self.query_offset or 0,
            blocks,
        )

    def route(self, q_length: int, kv_length: int, *, queries_travel: bool = False) -> Route:
        """The stops that shards of these lengths need."""
        mask = self.ring_mask(q_length, kv_length, queries_travel=queries_travel)
        return make_route(self.ring_axes, mask)

    def block_runs(self, q_length: int, kv_length: int) -> tuple[int, int]:
        """``(q_run, kv_run)`` of :class:`pallas_kernels.BlockMask`, for shards of these lengths."""
        assert self.blocks is not None
        q_run, kv_run = (
            run_in_blocks(self.layout, length, self.ring_size, block)
            for length, block in (
                (q_length, self.blocks.q_block),
                (kv_length, self.blocks.kv_block),
            )
        )
        return q_run, kv_run

    def layout_positions(self, route: Route, length: int, stop: Stop | jax.Array) -> jax.Array:
        """Positions int32 ``[length]`` of the tokens that are here at ``stop``, by the layout."""
        return shard_positions(self.layout, length, route.size, route.source(stop))

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
