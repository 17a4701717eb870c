"""Grouped matrix products on Ampere: one CTA per tile of the result, for both products.

A CTA has one warpgroup and loops over the contracted axis with a pipeline of cp.async copies, which
replace rows of other groups by zeros. A product's tiles are rows of one group
(:class:`GroupTiles`), a weight gradient's are parts of one group's matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import pad_axis
from pallas_kernels.group_tiles import GroupBounds, GroupTiles
from pallas_kernels.grouped_products import GroupedProducts
from pallas_kernels.mosaic import transfers
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm80 import instructions, warp_operations
from pallas_kernels.mosaic.sm80.configs import WARPS, GroupedConfig, grouped_config
from pallas_kernels.mosaic.sm80.implementation import needs_ampere

# Warps along the rows of a tile; the others are along its columns.
_M_WARPS = 2
# Lanes that are written at a time.
_OUT_LANES = 64


class _Part(NamedTuple):
    """What a CTA computes.

    Attributes:
      steps: number of loop steps; 0 where the result is 0.
      group: index of the group.
      first: first row of the group that is read.
      rows: number of the group's rows from there on.
      written: number of rows of the result that exist in the tile, or more.
    """

    steps: Any
    group: Any
    first: Any
    rows: Any
    written: Any


@dataclasses.dataclass(frozen=True)
class GroupedStatic:
    """Static parameters.

    Attributes:
      config: tile sizes.
      groups: G.
      shape: of one matrix of the result: ``[M, N]`` or ``[K, N]``.
      depth: K of a product; None of a weight gradient, whose depth is a group's size.
      transposed: whether the weights of a product are.
      dtype: of everything.
    """

    config: GroupedConfig
    groups: int
    shape: tuple[int, int]
    depth: int | None
    transposed: bool
    dtype: Any

    @property
    def columns(self) -> int:
        """Tiles along the columns."""
        return -(-self.shape[1] // self.config.block_n)

    def memory(self) -> dict[str, Any]:
        """Descriptions of shared memory."""
        config = self.config
        left, right = (config.block_m, config.depth), (config.block_n, config.depth)
        if self.depth is None:
            left = left[::-1]
        if not self.transposed:
            right = right[::-1]
        return {
            "left": instructions.tiled_memory((config.stages, *left), self.dtype),
            "right": instructions.tiled_memory((config.stages, *right), self.dtype),
            "out": instructions.tiled_memory((config.block_m, _OUT_LANES), self.dtype),
        }

    def part(self, tiles: Any, matrix: Any, row: Any) -> _Part:
        """What a CTA computes, from its matrix and its row tile."""
        depth = self.config.depth
        if self.depth is not None:
            group, first = tiles.group[row], tiles.first[row]
            rows = tiles.end[row] - first
            steps = jnp.where(group < self.groups, self.depth // depth, 0)
            return _Part(steps, group, first, rows, rows)
        rows = tiles.sizes[matrix]
        steps = lax.div(rows + (depth - 1), i32(depth))
        written = self.shape[0] - row * self.config.block_m
        return _Part(steps, matrix, tiles.starts[matrix], rows, written)


def _kernel(static: GroupedStatic, inputs: Any, out: Any, memory: Any) -> None:
    """One CTA."""
    matrix, tile = lax.axis_index("matrix"), lax.axis_index("tile")
    row, column = (op(tile, i32(static.columns)) for op in (lax.div, lax.rem))
    left, right, tiles = inputs
    part = static.part(tiles, matrix, row)
    cta = _Cta(static, left, right, memory, part, row, column)

    @pl.when(part.written > 0)
    def _():
        cta.write(out, cta.sum())


class _Cta(NamedTuple):
    """One CTA: its operands, memory and part."""

    static: GroupedStatic
    left: Any
    right: Any
    memory: Any
    part: _Part
    row: Any
    column: Any

    def sum(self) -> jax.Array:
        """The tile of the result, float32."""
        config, part = self.static.config, self.part
        fragments = instructions.Fragments.of(self.static.dtype, _M_WARPS)
        ahead = config.stages - 1
        for step in range(ahead):
            self._copy(i32(step), i32(step))

        def add(step, state):
            stage, acc = state
            # Ends with a barrier: all have read the previous step's stage.
            warp_operations.wait_for_copies(ahead - 1, WARPS)
            self._copy(step + ahead, jnp.where(stage == 0, ahead, stage - 1))
            left, right = self.memory["left"].at[stage], self.memory["right"].at[stage]
            if self.static.depth is None:
                left = left.transpose((1, 0))
            elif self.static.transposed:
                right = right.transpose((1, 0))
            left = instructions.load_matrix(left, fragments.lhs)
            acc = plgpu.mma(acc, left, instructions.load_matrix(right, fragments.rhs))
            return jnp.where(stage == ahead, 0, stage + 1), acc

        zeros = fragments.zeros((config.block_m, config.block_n))
        return lax.fori_loop(i32(0), part.steps, add, (i32(0), zeros))[1]

    def _copy(self, step: Any, stage: Any) -> None:
        """Starts the copies of a step as one group, which is empty after the last step."""
        static, part, config = self.static, self.part, self.static.config
        left, right = self.memory["left"].at[stage], self.memory["right"].at[stage]
        first, column = step * config.depth, self.column * config.block_n
        lanes, columns = pl.ds(first, config.depth), pl.ds(column, config.block_n)

        @pl.when(step < part.steps)
        def _():
            copy = warp_operations.copy_matrix
            if static.depth is None:
                row, count = part.first + first, part.rows - first
                own = pl.ds(self.row * config.block_m, config.block_m)
                copy(self.left.at[:, own], left, row, count)
                copy(self.right.at[:, columns], right, row, count)
                return
            copy(self.left.at[:, lanes], left, part.first, part.rows)
            if static.transposed:
                copy(self.right.at[part.group, :, lanes], right, column)
            else:
                copy(self.right.at[part.group, :, columns], right, first)

        warp_operations.commit_copies()

    def write(self, out: Any, acc: jax.Array) -> None:
        """Writes the rows that exist."""
        static, config = self.static, self.static.config
        if static.depth is None:
            out = out.at[self.part.group, pl.ds(self.row * config.block_m, config.block_m)]
        else:
            out = out.at[pl.ds(self.part.first, config.block_m)]
        for first in range(0, config.block_n, _OUT_LANES):
            part = acc[:, first : first + _OUT_LANES].astype(static.dtype)
            # Two barriers: all have read the memory before, then all have written it.
            warp_operations.wait_for_copies(0, WARPS)
            self.memory["out"][...] = part
            warp_operations.wait_for_copies(0, WARPS)
            lanes = pl.ds(self.column * config.block_n + first, _OUT_LANES)
            target = out.at[:, lanes]
            transfers.store_rows(self.memory["out"], target, i32(0), self.part.written)


def _run(
    static: GroupedStatic,
    inputs: Any,
    name: str,
    matrices: int,
    row_tiles: int,
    shape: tuple[int, ...],
) -> jax.Array:
    result: Any = jax.ShapeDtypeStruct(shape, static.dtype)
    return launch(
        functools.partial(_kernel, static),
        name,
        grid={"matrix": matrices, "tile": row_tiles * static.columns},
        warpgroups=1,
        semantics=plgpu.LoweringSemantics.Lane,
        inputs=inputs,
        results=result,
        memory=static.memory(),
    )


def product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transposed: bool,
    config: GroupedConfig | None = None,
) -> jax.Array:  # fmt: skip
    """See :class:`GroupedProducts`; ``config`` None is the shipped one."""
    (given, depth), groups = x.shape, w.shape[0]
    columns = w.shape[1 if transposed else 2]
    config = config or grouped_config(128, columns)
    # Slices must fit in the array.
    x = pad_axis(x, 0, max(given, config.block_m))
    rows = x.shape[0]
    tiles = GroupTiles.of(group_sizes, rows, config.block_m)
    static = GroupedStatic(config, groups, (rows, columns), depth, transposed, x.dtype)
    most = tiles.group.shape[0]
    return _run(static, (x, w, tiles), "burst_grouped", 1, most, (rows, columns))[:given]


def weight_gradient(
    x: jax.Array, dy: jax.Array, group_sizes: jax.Array, *, config: GroupedConfig | None = None
) -> jax.Array:
    """See :class:`GroupedProducts`; ``config`` None is the shipped one."""
    groups, shape = group_sizes.shape[0], (x.shape[1], dy.shape[1])
    bounds = GroupBounds.of(group_sizes, x.shape[0])
    config = config or grouped_config(*shape)
    x, dy = (pad_axis(each, 0, max(each.shape[0], config.depth)) for each in (x, dy))
    static = GroupedStatic(config, groups, shape, None, False, x.dtype)
    row_tiles = shape[0] // config.block_m
    name = "burst_grouped_gradient"
    return _run(static, (x, dy, bounds), name, groups, row_tiles, (groups, *shape))


GROUPED_SM80 = GroupedProducts("mosaic_sm80", product, weight_gradient, needs_ampere)
