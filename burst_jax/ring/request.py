"""``Request``: the static part of a call, parsed and checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container

import jax
from jax import lax

from burst_jax.layouts.layout import Layout
from burst_jax.parallel.mesh import flat_names
from burst_jax.ring.block_mask import AttentionChunks, Blocks
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.route import Offset, RingMask, Route, make_route
from pallas_kernels import AttentionSpec, Implementation
from pallas_kernels.mask import Mask
from pallas_kernels.score import SCORE_PARAMETERS


@dataclasses.dataclass(frozen=True)
class Request:
    """The static part of a call, independent of its arrays and of the device.

    It is hashable, as part of the cache key of an eager call's compiled program. Platform and
    compute capability are not part of it, because one call may be traced for several
    (:func:`pallas_kernels.device.current_target`).

    Attributes:
      spec: mask, score and dropout.
      layout: the sequence permutation.
      ring_axes: the ring's mesh axes, outermost first; empty without a ring.
      ring_sizes: number of devices on each of them.
      ulysses_axis: the mesh axis of the all-to-all between sequence and heads, or None.
      ulysses_size: number of devices on it; 1 without the axis.
      implementation: the local attention, or None for the fastest that supports the call.
      rotation: the argument ``backward``: what rotates in the backward pass.
      deterministic: whether gradients must be bitwise reproducible.
      query_offset: global position of the first query of the sequence; None if positions are
        arrays.
      blocks: the static part of a block-sparse mask; None without one.
      chunk_size: C of chunked attention; None without chunks. Per-query KV bounds mask the scores;
        routes skip ring steps between chunks.
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
        """Number of shards of the layout."""
        return math.prod(self.ring_sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that a sequence is sharded over: the ring's, then ``ulysses_axis``."""
        return flat_names(self.ring_axes, self.ulysses_axis)

    @property
    def token_devices(self) -> int:
        """Number of devices that a sequence is sharded over."""
        return self.ring_size * self.ulysses_size

    @property
    def checks_vma(self) -> bool:
        """Whether the implementation can be traced inside ``shard_map(check_vma=True)``."""
        return self.implementation is None or self.implementation.checks_vma

    def differentiating(self, names: Container[str]) -> Request:
        """The request whose backward kernels also compute gradients of these parameters."""
        wanted = tuple(name for name in SCORE_PARAMETERS if name in names)
        score = dataclasses.replace(self.spec.score, differentiated=wanted)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, score=score))

    def ring_mask(self, q_length: int, kv_length: int, *, rotates_query: bool = False) -> RingMask:
        """The scores that the mask allows at each ring step, for shards of these lengths.

        Positions given as arrays are unknown before the program runs: all scores are allowed.
        """
        blocks: Blocks | AttentionChunks | None = None
        if self.blocks is not None and self.blocks.bits is not None:
            blocks = self.blocks
        elif self.chunk_size is not None and self.query_offset is not None:
            blocks = AttentionChunks(self.chunk_size, self.chunk_size)
        return RingMask(
            self.ring_sizes,
            self.layout,
            q_length,
            kv_length,
            Mask() if self.query_offset is None else self.spec.mask,
            rotates_query,
            self.query_offset or 0,
            blocks,
        )

    def route(self, q_length: int, kv_length: int, *, rotates_query: bool = False) -> Route:
        """The ring steps that shards of these lengths need."""
        mask = self.ring_mask(q_length, kv_length, rotates_query=rotates_query)
        return make_route(self.ring_axes, mask)

    def block_runs(self, q_length: int, kv_length: int) -> tuple[int, int]:
        """``(q_run, kv_run)`` of :class:`pallas_kernels.BlockMask`, for shards of these lengths."""
        assert self.blocks is not None
        sizes = (q_length, self.blocks.q_block), (kv_length, self.blocks.kv_block)
        q_run, kv_run = (
            self.layout.run_in_blocks(length, self.ring_size, block) for length, block in sizes
        )
        return q_run, kv_run

    def layout_positions(
        self, route: Route, length: int, offset: Offset | jax.Array, device: int | None = None
    ) -> jax.Array:
        """The layout's positions, int32 ``[length]``, of the block held at ``offset``.

        ``device``: of that which the device of this index holds, a NumPy array.
        """
        source = route.source(offset) if device is None else route.source_on(device, offset)
        return self.layout.shard_positions(length, route.size, source)

    def positions_here(self, length: int) -> jax.Array:
        """Positions int32 ``[length]`` of this device's tokens, before the Ulysses all-to-all.

        They are the layout's, without :attr:`query_offset`.
        """
        shard = lax.axis_index(self.ring_axes) if self.ring_axes else 0
        size = self.ulysses_size
        positions = self.layout.shard_positions(length * size, self.ring_size, shard)
        if self.ulysses_axis is None:
            return positions
        first = lax.axis_index(self.ulysses_axis) * length
        return lax.dynamic_slice_in_dim(positions, first, length)
