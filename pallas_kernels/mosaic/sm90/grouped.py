"""Grouped matrix products on Hopper: a persistent, warp-specialized kernel for both.

A work tile is ``64 consumers x block_n`` of the result. The product's work tiles are rows of one
group (:class:`GroupTiles`), the weight gradient's are parts of one group's matrix. Each consumer
warpgroup has 64 rows of a tile. Rows of a product that belong to other groups are computed, not
written; a consumer that has none of its group's rows skips the computation. A weight gradient's
operands are zeroed in rows of other groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import depending_on, pad_axis
from pallas_kernels.device import num_sms
from pallas_kernels.group_tiles import GroupBounds, GroupTiles
from pallas_kernels.grouped_products import GroupedProducts
from pallas_kernels.mosaic import transfers
from pallas_kernels.mosaic.fragments import constant, i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS, GroupedConfig, grouped_config
from pallas_kernels.mosaic.sm90.implementation import needs_hopper
from pallas_kernels.mosaic.sm90.instructions import TILE, specialize_warpgroups
from pallas_kernels.mosaic.tile_scheduler import (
    CTA_AXIS,
    SLOTS,
    TileScheduler,
    WorkTile,
    for_each_work_tile,
)
from pallas_kernels.mosaic.work_tiles import TileCoordinates

# Depth of a loop step, and lanes that are written at a time: the width of a swizzled tile.
_DEPTH = 64
_BUFFERS = 2
# Copies start at multiples of the rows of a swizzled tile.
_ALIGN = 8


class _Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
      left: ``[stages, consumers, 64, 64]``: rows of a consumer and a part of K; or rows of the
        group and lanes of a consumer.
      right: ``[stages, 64, block_n]``, or ``[stages, block_n, 64]`` of transposed weights.
      out: ``[consumers, 2, 64, 64]``, staging buffers.
      slots: of the tile scheduler.
      arrived: by stage: both operands have been copied.
      free: by stage: all consumers have read them.
      masked: both consumers have zeroed their part of a stage.
      slot_fetched: of the tile scheduler.
      slot_free: of the tile scheduler.
    """

    left: Any
    right: Any
    out: Any
    slots: Any
    arrived: Any
    free: Any
    masked: Any
    slot_fetched: Any
    slot_free: Any

    @classmethod
    def of(cls, config: GroupedConfig, dtype: Any, transposed: bool) -> _Memory:
        """Descriptions."""

        def matrix(*shape: int) -> Any:
            transforms = transfers.matrix_transforms(shape[-1], 2)
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        stages, consumers = config.stages, config.consumers
        right = (_DEPTH, config.block_n)[:: -1 if transposed else 1]
        return cls(
            left=matrix(stages, consumers, WARPGROUP_ROWS, _DEPTH),
            right=matrix(stages, *right),
            out=matrix(consumers, _BUFFERS, WARPGROUP_ROWS, _DEPTH),
            slots=plgpu.SMEM((SLOTS,), jnp.float32),
            arrived=plgpu.Barrier(num_arrivals=consumers + 1, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            masked=plgpu.Barrier(num_arrivals=consumers),
            slot_fetched=plgpu.Barrier(num_barriers=SLOTS),
            slot_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=SLOTS),
        )


class _Part(NamedTuple):
    """What a work tile reads.

    Attributes:
      total: number of loop steps; 0 where the result is 0.
      group: index of the group.
      first: first row that is read, a multiple of 8.
      begin: first row that belongs to the group.
      end: row after the last that is read and belongs to the group.
    """

    total: Any
    group: Any
    first: Any
    begin: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class _WorkTiles:
    """The order of work tiles: columns of the result first, so that they share rows in L2.

    Attributes:
      count: number of work tiles, which may depend on the sizes.
      ctas: number of CTAs.
      row_tiles: tiles along the rows of each batch index.
      column_tiles: tiles along the columns.
    """

    count: Any
    ctas: int
    row_tiles: int
    column_tiles: int
    one_per_cta: bool = False
    chooses_groups: bool = False
    cluster: int = 1

    def coordinates(self, index: Any) -> TileCoordinates:
        """(matrix, column tile, row tile)."""
        rows, column = (op(index, i32(self.column_tiles)) for op in (lax.div, lax.rem))
        matrix, row = (op(rows, i32(self.row_tiles)) for op in (lax.div, lax.rem))
        return TileCoordinates(matrix, column, row)


class _Inputs(NamedTuple):
    """What a kernel reads.

    Attributes:
      left: ``[M, K]``.
      right: weights ``[G, K, N]`` or ``[G, N, K]``; or dy ``[M, N]``.
      tiles: GroupTiles of a product; GroupBounds of a weight gradient.
    """

    left: Any
    right: Any
    tiles: Any


@dataclasses.dataclass(frozen=True)
class GroupedStatic:
    """Static parameters.

    Attributes:
      config: tile sizes.
      groups: G.
      shape: of one matrix of the result: ``[M, N]`` or ``[K, N]``.
      depth: K of a product; None of a weight gradient, whose depth is a group's size.
      most_tiles: the most tiles along the rows of a product, or of all weight gradients.
      transposed: whether the weights of a product are.
      dtype: of everything.
    """

    config: GroupedConfig
    groups: int
    shape: tuple[int, int]
    depth: int | None
    most_tiles: int
    transposed: bool
    dtype: Any

    @property
    def is_product(self) -> bool:
        """Whether it is a product; else a weight gradient."""
        return self.depth is not None

    def work_tiles(self, tiles: Any) -> Any:
        """The work tiles; ``tiles`` are a reference in the kernel."""
        columns = -(-self.shape[1] // self.config.block_n)
        most = self.most_tiles * columns
        # All row tiles of a product count as one matrix's.
        row_tiles = self.most_tiles // (1 if self.is_product else self.groups)
        count = tiles.count[0] * columns if self.is_product else i32(most)
        return _WorkTiles(count, self.ctas, row_tiles, columns)

    @property
    def ctas(self) -> int:
        """Number of CTAs."""
        return min(self.most_tiles * -(-self.shape[1] // self.config.block_n), num_sms())

    def part(self, tiles: Any, matrix: Any, column: Any, row: Any) -> Any:
        """What a work tile reads."""
        del column
        if self.depth is not None:
            group = tiles.group[row]
            steps = jnp.where(group < self.groups, self.depth // _DEPTH, 0)
            first = pl.multiple_of(tiles.first[row], _ALIGN)
            return _Part(steps, group, first, tiles.begin[row], tiles.end[row])
        begin, size = tiles.starts[matrix], tiles.sizes[matrix]
        first = pl.multiple_of(lax.div(begin, i32(_ALIGN)) * _ALIGN, _ALIGN)
        steps = lax.div(begin - first + size + (_DEPTH - 1), i32(_DEPTH))
        return _Part(jnp.where(size > 0, steps, 0), matrix, first, begin, begin + size)


class _Kernel(NamedTuple):
    """One warpgroup's view of the kernel."""

    static: GroupedStatic
    inputs: _Inputs
    out: Any
    memory: _Memory

    def stage(self, work: WorkTile, step: Any) -> Any:
        """The stage of a step. Stages are used in turn across all work tiles of a CTA."""
        return lax.rem(work.steps_before + step, i32(self.static.config.stages))

    def columns(self, work: WorkTile) -> Any:
        """Columns of the result."""
        block = self.static.config.block_n
        return pl.ds(work.head * block, block)

    # --- producer ---------------------------------------------------------------------------------

    def produce(self, work: WorkTile) -> None:
        """Starts the copies of a work tile's operands, each when its stage is free."""

        @pl.loop(i32(0), work.steps)
        def _(step):
            stage = self.stage(work, step)

            @pl.when(work.steps_before + step >= self.static.config.stages)
            def _():
                plgpu.barrier_wait(self.memory.free.at[stage])

            self._copy(work, step, stage)

    def _copy(self, work: WorkTile, step: Any, stage: Any) -> None:
        static, inputs, memory, part = self.static, self.inputs, self.memory, _part(work)
        depth, columns = pl.ds(step * _DEPTH, _DEPTH), self.columns(work)
        rows = pl.ds(part.first + step * _DEPTH, _DEPTH)
        if not static.is_product:
            right = inputs.right.at[rows, columns]
        elif static.transposed:
            right = inputs.right.at[part.group, columns, depth]
        else:
            right = inputs.right.at[part.group, depth, columns]
        arrived = memory.arrived.at[stage]
        plgpu.copy_gmem_to_smem(right, memory.right.at[stage], arrived)
        for consumer in range(static.config.consumers):
            own = pl.ds(self.first_row(work, consumer), WARPGROUP_ROWS)
            left = inputs.left.at[(own, depth) if static.is_product else (rows, own)]
            plgpu.copy_gmem_to_smem(left, memory.left.at[stage, consumer], arrived)

    # --- consumers --------------------------------------------------------------------------------

    def first_row(self, work: WorkTile, warpgroup: Any) -> Any:
        """A consumer's first row of the result, or of the group's weight gradient."""
        row = warpgroup * WARPGROUP_ROWS
        if not self.static.is_product:
            return work.tile * self.static.config.block_m + row
        return _part(work).first + row

    def own_rows(self, work: WorkTile, warpgroup: Any) -> tuple[Any, Any]:
        """The first of a consumer's 64 rows to write, and the one after the last."""
        first = self.first_row(work, warpgroup)
        if self.static.is_product:
            return _part(work).begin - first, _part(work).end - first
        return i32(0), self.static.shape[0] - first

    def consume(self, warpgroup: Any, work: WorkTile) -> None:
        """One work tile of a consumer."""
        exists = self.own_rows(work, warpgroup)[1] > 0

        @pl.when(exists)
        def _():
            acc = pl.run_scoped(
                functools.partial(self._add_steps, warpgroup, work),
                plgpu.ACC((WARPGROUP_ROWS, self.static.config.block_n), jnp.float32),
            )
            self._free(work, work.steps - 1)
            self._write(warpgroup, work, acc)

        @pl.when(jnp.logical_not(exists))
        def _():
            @pl.loop(i32(0), work.steps)
            def _(step):
                self._wait(warpgroup, work, step)
                self._free(work, step)

    def write_zeros(self, warpgroup: Any, work: WorkTile) -> None:
        """One work tile of a consumer that has nothing to add up."""
        shape = WARPGROUP_ROWS, self.static.config.block_n

        @pl.when(self.own_rows(work, warpgroup)[1] > 0)
        def _():
            self._write(warpgroup, work, constant(shape, 0, TILE))

    def _add_steps(self, warpgroup: Any, work: WorkTile, acc: Any) -> jax.Array:
        """Adds up all steps. The last one's stage is not freed."""

        @pl.loop(i32(0), work.steps)
        def _(step):
            self._wait(warpgroup, work, step)
            self._multiply(warpgroup, self.stage(work, step), acc)
            # The previous step's product has ended.
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: self._free(work, step - 1))

        return acc[...]

    def _multiply(self, warpgroup: Any, stage: Any, acc: Any) -> None:
        left, right = self.memory.left.at[stage, warpgroup], self.memory.right.at[stage]
        if not self.static.is_product:
            left = left.transpose((1, 0))
        elif self.static.transposed:
            right = right.transpose((1, 0))
        plgpu.wgmma(acc, left, right)

    def _free(self, work: WorkTile, step: Any) -> None:
        plgpu.barrier_arrive(self.memory.free.at[self.stage(work, step)])

    def _wait(self, warpgroup: Any, work: WorkTile, step: Any) -> None:
        """Waits for a step's operands; zeroes rows of a gradient's that are not the group's."""
        memory, stage = self.memory, self.stage(work, step)
        plgpu.barrier_wait(memory.arrived.at[stage])
        if self.static.is_product:
            return
        consumers = self.static.config.consumers
        part = _part(work)
        first = part.first + step * _DEPTH
        begin, end = part.begin - first, part.end - first

        # Both operands: one may hold NaN.
        @pl.when((begin > 0) | (end < _DEPTH))
        def _():
            _keep_rows(memory.left.at[stage, warpgroup], begin, end)
            for index, lane in enumerate(range(0, self.static.config.block_n, _DEPTH)):
                piece = memory.right.at[stage, :, pl.ds(lane, _DEPTH)]
                own = warpgroup == index % consumers
                pl.when(own)(functools.partial(_keep_rows, piece, begin, end))
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.masked)
            plgpu.barrier_wait(memory.masked)

    def _write(self, warpgroup: Any, work: WorkTile, acc: jax.Array) -> None:
        """Writes the rows that exist, 64 lanes at a time."""
        static, (begin, end) = self.static, self.own_rows(work, warpgroup)
        own = pl.ds(self.first_row(work, warpgroup), WARPGROUP_ROWS)
        place = (own,) if static.is_product else (work.batch, own)

        def write(pending: int, start: Callable[[Any, Any, Any], None]) -> None:
            for index, first in enumerate(range(0, static.config.block_n, _DEPTH)):
                buffer = self.memory.out.at[warpgroup, index % _BUFFERS]
                # Ends with a barrier: all threads have read the buffer.
                plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
                buffer[...] = acc[:, first : first + _DEPTH].astype(static.dtype)
                plgpu.commit_smem()
                lane = work.head * static.config.block_n + first
                start(buffer, self.out.at[(*place, pl.ds(lane, _DEPTH))], lane)

        def whole(buffer, target, lane):
            del lane
            plgpu.copy_smem_to_gmem(buffer, target)

        def partial(buffer, target, lane):
            existing = jnp.where(lane < static.shape[1], end, 0)
            transfers.store_rows(buffer, target, begin, existing)

        # Each buffer is used equally often, so the copy before the last was from another one.
        pending = min(_BUFFERS, static.config.block_n // _DEPTH) - 1
        if not static.is_product:
            # TMA leaves out what does not exist.
            write(pending, whole)
            return
        all_exist = (begin <= 0) & (end >= WARPGROUP_ROWS)
        pl.when(all_exist)(lambda: write(pending, whole))
        pl.when(jnp.logical_not(all_exist))(lambda: write(0, partial))


def _part(work: WorkTile) -> Any:
    """What a work tile reads: its iterator, to the tile scheduler."""
    return work.iterator


def _keep_rows(ref: Any, begin: Any, end: Any) -> None:
    """Zeroes the other rows of ``[64, 64]`` in shared memory."""
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=TILE)
    x = plgpu.load(ref, layout=TILE)
    ref[...] = jnp.where((row >= begin) & (row < end), x, jnp.zeros_like(x))


def _kernel(
    static: GroupedStatic, inputs: _Inputs, out: Any, memory: _Memory, counter: Any
) -> None:
    """One warpgroup of one CTA."""
    kernel = _Kernel(static, inputs, out, memory)
    scheduler = TileScheduler(counter, memory.slot_fetched, memory.slot_free, memory.slots)
    run_all = functools.partial(
        for_each_work_tile,
        static.work_tiles(inputs.tiles),
        scheduler,
        functools.partial(static.part, inputs.tiles),
        skip_empty=True,
    )

    def consume(warpgroup):
        run_all(
            functools.partial(kernel.consume, warpgroup),
            is_producer=False,
            run_empty=functools.partial(kernel.write_zeros, warpgroup),
        )
        plgpu.wait_smem_to_gmem(0)

    specialize_warpgroups(
        static.config.consumers, consume, lambda: run_all(kernel.produce, is_producer=True)
    )


def _run(static: GroupedStatic, inputs: _Inputs, name: str, shape: tuple[int, ...]) -> jax.Array:
    result: Any = jax.ShapeDtypeStruct(shape, static.dtype)
    return launch(
        functools.partial(_kernel, static),
        name,
        grid={CTA_AXIS: static.ctas},
        warpgroups=static.config.consumers + 1,
        inputs=inputs,
        results=result,
        memory=_Memory.of(static.config, static.dtype, static.transposed),
        counter=depending_on(jnp.zeros((1,), jnp.int32), inputs.left),
    )


def _padded(x: jax.Array) -> jax.Array:
    """Copies are of 64 rows, of an array with whole tiles of shared memory."""
    rows = max(x.shape[0], WARPGROUP_ROWS)
    return pad_axis(x, 0, -(-rows // _ALIGN) * _ALIGN)


def product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transposed: bool,
    config: GroupedConfig | None = None,
) -> jax.Array:  # fmt: skip
    """See :class:`GroupedProducts`; ``config`` None is the shipped one."""
    (given, depth), groups = x.shape, w.shape[0]
    columns = w.shape[1 if transposed else 2]
    x = _padded(x)
    rows = x.shape[0]
    config = config or grouped_config(-(-rows // 128) + min(groups, given), columns)
    tiles = GroupTiles.of(group_sizes, rows, config.block_m, _ALIGN)
    most = tiles.group.shape[0]
    static = GroupedStatic(config, groups, (rows, columns), depth, most, transposed, x.dtype)
    out = _run(static, _Inputs(x, w, tiles), "burst_grouped", (rows, columns))
    return out[:given]


def weight_gradient(
    x: jax.Array, dy: jax.Array, group_sizes: jax.Array, *, config: GroupedConfig | None = None
) -> jax.Array:
    """See :class:`GroupedProducts`; ``config`` None is the shipped one."""
    groups = group_sizes.shape[0]
    bounds = GroupBounds.of(group_sizes, x.shape[0])
    x, dy = _padded(x), _padded(dy)
    shape = x.shape[1], dy.shape[1]
    config = config or grouped_config(-(-shape[0] // 128) * groups, shape[1])
    most = groups * -(-shape[0] // config.block_m)
    static = GroupedStatic(config, groups, shape, None, most, False, x.dtype)
    return _run(static, _Inputs(x, dy, bounds), "burst_grouped_gradient", (groups, *shape))


GROUPED_SM90 = GroupedProducts("mosaic_sm90", product, weight_gradient, needs_hopper)
