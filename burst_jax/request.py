"""``Request``: everything static about a call, parsed and checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from burst_jax.checks import WindowSize, check_bool, check_rotation, check_seq_axes, make_spec
from burst_jax.functions import MaskMod, ScoreMod, check_functions
from burst_jax.layout import Layout, check_layout, run_in_blocks, shard_positions
from burst_jax.platform import Target
from burst_jax.ring.blocks import Blocks
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.route import RingMask, Route, Stop, make_route
from burst_jax.sharding import AxisNames, flat_names
from pallas_kernels import (
    AttentionSpec,
    BlockMask,
    Implementation,
    Operands,
    Tokens,
    find,
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
    (:func:`burst_jax.platform.current_target`), because one call may be traced for several.

    Attributes:
      spec: the mask, and how a logit is made.
      layout: the order of the tokens.
      ring_axes: the ring's mesh axes, outermost first; without any there is no ring.
      ring_sizes: how many devices lie along each of them.
      head_parallel_axis: the mesh axis whose devices exchange tokens for heads, or None.
      head_parallel_size: how many devices lie along it; 1 without the axis.
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
    head_parallel_axis: str | None
    head_parallel_size: int
    implementation: Implementation | None
    rotation: RotationChoice
    deterministic: bool = False
    query_offset: int | None = 0
    blocks: Blocks | None = None

    @classmethod
    def parse(
        cls,
        axis_argument: str,
        axes: AxisNames,
        head_parallel_axis: str | None,
        size_of: Callable[[str, str], int],
        *,
        head_dim: int,
        layout: Layout = "contiguous",
        is_causal: bool = False,
        scale: float | None = None,
        local_window_size: WindowSize = None,
        lifts_causality: bool = False,
        logits_soft_cap: float | None = None,
        dropout_rate: float = 0.0,
        implementation: str | Implementation | None = None,
        deterministic: bool = False,
        backward: RotationChoice = "auto",
        query_offset: int | None = 0,
        positions_by_row: bool = False,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Request:
        """The request of a call's arguments.

        An argument that is not described here has the name, the default and the meaning that it has
        in :func:`burst_jax.burst_attention`.

        Args:
          axis_argument: what the caller's argument with the ring's axes is called.
          axes: its value.
          head_parallel_axis: the mesh axis of the exchange of heads, or None.
          size_of: ``(argument, axis) -> devices along it``; raises for an axis that is not there.
          head_dim: H, for the default scale.
          lifts_causality: whether there are keys that causality does not hide. Then, and where a
            side of the window is traced, ranges of keys (:mod:`burst_jax.key_ranges`) say what the
            static mask does not.
          query_offset: the attribute.
          positions_by_row: whether each row has queries at other positions. Then ranges of keys are
            all that there is of the mask.

        Raises:
          ValueError: an argument is wrong.
        """
        check_layout(layout)
        check_rotation(backward)
        check_bool("deterministic", deterministic)
        ring_axes = check_seq_axes(axis_argument, axes, head_parallel_axis)
        head_parallel_size = 1
        if head_parallel_axis is not None:
            head_parallel_size = size_of("head_parallel_axis", head_parallel_axis)
        spec = make_spec(
            head_dim,
            is_causal,
            scale,
            local_window_size,
            logits_soft_cap,
            lifts_causality,
            dropout_rate,
        )
        check_functions(score_mod, mask_mod)
        mask = Mask() if positions_by_row else spec.mask
        return cls(
            spec=dataclasses.replace(
                spec,
                mask=dataclasses.replace(mask, mask_mod=mask_mod),
                score=dataclasses.replace(spec.score, score_mod=score_mod),
            ),
            layout=layout,
            ring_axes=ring_axes,
            ring_sizes=tuple(size_of(axis_argument, axis) for axis in ring_axes),
            head_parallel_axis=head_parallel_axis,
            head_parallel_size=head_parallel_size,
            implementation=find(implementation),
            rotation=backward,
            deterministic=bool(deterministic),
            query_offset=query_offset,
        )

    @property
    def ring_size(self) -> int:
        """How many shards the layout counts."""
        return math.prod(self.ring_sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that a sequence is split over: the ring's, and inside them the heads'."""
        return flat_names(self.ring_axes, self.head_parallel_axis)

    @property
    def token_devices(self) -> int:
        """How many devices a sequence is split over."""
        return self.ring_size * self.head_parallel_size

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
        exchange = self.head_parallel_size
        positions = shard_positions(self.layout, length * exchange, self.ring_size, shard)
        if self.head_parallel_axis is None:
            return positions
        first = lax.axis_index(self.head_parallel_axis) * length
        return lax.dynamic_slice_in_dim(positions, first, length)
