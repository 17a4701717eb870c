"""Launching a Triton kernel: static parameters, grid, and arguments with their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arrays import varying_axes
from pallas_kernels.dropout import column_hashes
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mask import Mask
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.pallas_triton.blocks import BlockWords
from pallas_kernels.pallas_triton.configs import TritonConfig, padded_lanes
from pallas_kernels.pallas_triton.tiles import (
    SideRefs,
    as_column,
    as_row,
    lanes_in,
    split_sides,
)
from pallas_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Grid:
    """One program per (batch index, head, tile).

    Tiles vary fastest: concurrent programs share few heads' keys in the L2 cache.

    Attributes:
      batch: B.
      heads: number of heads.
      tiles: number of tiles on the side that work is split over.
      last_first: start with the last tile. With ascending positions, causal masks give the last
        query tile and the first KV tile the most work, and long programs must not come last.
    """

    batch: int
    heads: int
    tiles: int
    last_first: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The launch grid, fastest dimension first."""
        return self.tiles, self.heads, self.batch

    def tile(self, program: Any = None) -> Any:
        """The tile of a grid index, or inside a kernel its own tile."""
        i = pl.program_id(0) if program is None else program
        return self.tiles - 1 - i if self.last_first else i

    def index_map(self, index: Callable[[Any, Any, Any], tuple]) -> Callable[..., tuple]:
        """An index map over the grid from one over ``(batch index, head, tile)``."""
        return lambda i, h, b: index(b, h, self.tile(i))


@dataclasses.dataclass(frozen=True)
class TritonStatic:
    """Static parameters of a launch.

    Attributes:
      split: the side that work is split over.
      spec: mask, score and dropout.
      mask: the mask that scores are tested by, :meth:`.inputs.AttentionInputs.folded`.
      config: tile sizes.
      interpret: run on any platform, slowly.
      grid: the programs.
      q_length: T.
      kv_length: S.
      groups: query heads per key/value head.
      dim: H.
      lanes: H padded to a power of two.
      value_dim: Hv.
      value_lanes: Hv padded.
      listed: whether bounds are tile lists, as with a block-sparse mask.
      block_words: test of scores by a block-sparse mask; None if not needed.
    """

    split: Literal["queries", "keys"]
    spec: AttentionSpec
    mask: Mask
    config: TritonConfig
    interpret: bool
    grid: Grid
    q_length: int
    kv_length: int
    groups: int
    dim: int
    lanes: int
    value_dim: int
    value_lanes: int
    listed: bool
    block_words: BlockWords | None

    def lanes_inside(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Which lanes are within the head dim of q and k, and of v; None if all are.

        With equal head dims, both are the same array.
        """
        of_keys = lanes_in(self.lanes, self.dim)
        if self.value_dim == self.dim:
            return of_keys, of_keys
        return of_keys, lanes_in(self.value_lanes, self.value_dim)

    def by_blocks(self, sides: SideRefs, head: Any, rows: Any, tile: Any) -> jax.Array | None:
        """Which scores of a tile the block-sparse mask allows; None if no test is needed.

        Args:
          sides: the program's references.
          head: index among the program's query heads.
          rows: :meth:`SideRefs.table_rows` of the queries.
          tile: KV tile.
        """
        if self.block_words is None:
            return None
        words = sides.block_words
        head = head if words.shape[0] > 1 else jnp.int32(0)
        shaped = (as_column, as_row) if self.split == "queries" else (as_row, as_column)
        return self.block_words.seen(words, head, rows, tile, shaped)

    @classmethod
    def of(
        cls,
        split: Literal["queries", "keys"],
        inputs: AttentionInputs,
        spec: AttentionSpec,
        config: TritonConfig,
        interpret: bool,
    ) -> TritonStatic:
        """From a call's inputs."""
        batch, q_length, heads, dim = inputs.query.q.shape
        kv_length, kv_heads = inputs.kv.k.shape[1:3]
        if split == "queries":
            grid = Grid(batch, heads, -(-q_length // config.block_q), last_first=True)
        else:
            grid = Grid(batch, kv_heads, -(-kv_length // config.block_kv), last_first=False)
        sizes = q_length, kv_length, inputs.groups
        lanes = dim, padded_lanes(dim), inputs.value_dim, padded_lanes(inputs.value_dim)
        mask, _ = inputs.folded(spec.mask)
        together = 1 if split == "queries" else inputs.groups
        blocks = inputs.shared.block_mask is not None, BlockWords.of(inputs, config.tiles, together)
        return cls(split, spec, mask, config, interpret, grid, *sizes, *lanes, *blocks)


class Arguments:
    """A kernel's arguments and their blocks, in the kernel's order.

    All kernels start with the bounds, positions, segment ids, KV bounds, per-head parameters,
    dropout hashes, the block-sparse mask and global indices
    (:class:`pallas_kernels.pallas_triton.tiles.SideRefs`).

    Args:
      static: static parameters of the launch.
      inputs: the arrays. Those above are added here.
      bounds: the kernel's tile bounds.
    """

    def __init__(self, static: TritonStatic, inputs: AttentionInputs, bounds: jax.Array):
        self._static = static
        self._arrays: list[Any] = []
        self._specs: list[pl.BlockSpec] = []
        self._aliases: dict[int, int] = {}
        self._has_segments = inputs.has_segments
        self._per_head_names = tuple(inputs.shared.score_parameters)
        self._add_bounds(bounds)
        # A program has a tile of one side, and all tokens of the other one.
        by_query = static.split == "queries"
        q_size = static.config.block_q if by_query else static.q_length
        kv_size = static.kv_length if by_query else static.config.block_kv
        sides = (
            (inputs.q_positions, inputs.query.segment_ids, q_size, by_query),
            (inputs.kv_positions, inputs.kv.segment_ids, kv_size, not by_query),
        )
        for positions, _, size, is_tile in sides:
            index = (lambda b, h, i: (i,)) if is_tile else (lambda b, h, i: (0,))
            self.add(positions, self.block((size,), index))
        for _, segment_ids, size, is_tile in sides:
            if segment_ids is not None:
                index = self._by_row(by_batch=True, is_tile=is_tile)
                self.add(segment_ids, self.block((None, size), index))
        _, ranges = inputs.folded(static.spec.mask)
        self._range_names = tuple(ranges)
        for x in ranges.values():
            self.add(x, self.block((None, q_size), self._by_row(x.shape[0] != 1, by_query)))
        for array in inputs.shared.score_parameters.values():
            self.add(array, self.per_head_block())
        self._has_dropout = inputs.shared.dropout_seeds is not None
        if self._has_dropout:
            # Computed once: each program would hash all of its keys.
            rows = self.stat_block() if by_query else self.all_stats_block()
            self.add(inputs.dropout_rows, rows)
            index = (lambda b, h, i: (0,)) if by_query else (lambda b, h, i: (i,))
            columns = column_hashes(inputs.kv_positions)
            self.add(columns, self.block((kv_size,), index))
        if static.block_words is not None:
            assert inputs.shared.block_mask is not None
            rows = inputs.shared.block_mask.rows(inputs.q_positions)
            self.add(rows, self.block((q_size,), (lambda b, h, i: (i if by_query else 0,))))
            words = static.block_words.packed(inputs)
            # A table shared by all heads has one block.
            heads = 1 if by_query or len(words) == 1 else static.groups
            which = (lambda b, h, i: (h, 0)) if len(words) > 1 else (lambda b, h, i: (0, 0))
            self.add(words, self.block((heads, words.shape[1]), which))
        self._has_functions = inputs.shared.indices is not None
        if inputs.shared.indices is not None:
            self.add(inputs.shared.indices.batch, self.block((1,), lambda b, h, i: (b,)))
            self.add(inputs.shared.indices.head, self.per_head_block())

    def _add_bounds(self, bounds: jax.Array) -> None:
        """Adds the bounds or the tile lists."""
        by_batch = bounds.shape[0] != 1
        if not self._static.listed:
            self.add(
                bounds, self.block((None, None, 4), lambda b, h, i: (b if by_batch else 0, i, 0))
            )
            return
        by_head = bounds.shape[1] != 1
        self.add(
            bounds,
            self.block(
                (None, None, None, bounds.shape[3]),
                lambda b, h, i: (b if by_batch else 0, h if by_head else 0, i, 0),
            ),
        )

    def stat_block(self) -> pl.BlockSpec:
        """Block of ``[B, N, T]`` for programs that are split over queries."""
        return self.block((None, None, self._static.config.block_q), lambda b, h, i: (b, h, i))

    def all_stats_block(self) -> pl.BlockSpec:
        """Block of ``[B, N, T]`` for programs that are split over keys."""
        block = (None, self._static.groups, self._static.q_length)
        return self.block(block, lambda b, h, i: (b, h, 0))

    @staticmethod
    def _by_row(by_batch: bool, is_tile: bool) -> Callable[..., tuple]:
        """Index of a program's block of an array ``[B or 1, tokens]``."""
        return lambda b, h, i: (b if by_batch else 0, i if is_tile else 0)

    def block(self, shape: tuple[int | None, ...], index: Callable[..., tuple]) -> pl.BlockSpec:
        """A block at ``index(batch index, head, tile)``."""
        return pl.BlockSpec(shape, self._static.grid.index_map(index))

    def per_head_block(self) -> pl.BlockSpec:
        """Block of a per-head parameter: the program's query heads, one or a group."""
        heads = 1 if self._static.split == "queries" else self._static.groups
        return self.block((heads,), lambda b, h, i: (h,))

    def add(self, array: jax.Array, spec: pl.BlockSpec, result: int | None = None) -> None:
        """Adds an argument; ``result`` is the index of the result that overwrites it."""
        if result is not None:
            self._aliases[len(self._arrays)] = result
        self._arrays.append(array)
        self._specs.append(spec)

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        results: Sequence[tuple[tuple[int, ...], Any, pl.BlockSpec]],
    ) -> Any:
        """Runs ``kernel(static, bounds table, sides, *references to what was added)``.

        ``results`` are ``(shape, dtype, block)``; their references come last.
        """
        static = self._static

        def body(*refs):
            names = self._range_names, self._per_head_names
            others = self._has_dropout, static.block_words is not None, self._has_functions
            table, sides, refs = split_sides(refs, self._has_segments, *names, *others)
            kernel(static, table, sides, *refs)

        # A result varies over the mesh axes that any argument varies over.
        axis_type = jax.typeof(self._arrays[0]).manual_axis_type
        axis_type = axis_type.update(varying=varying_axes(self._arrays))
        return lowering.call(
            body,
            *self._arrays,
            name=name,
            grid=static.grid.shape,
            in_specs=self._specs,
            out_specs=[block for _, _, block in results],
            out_shape=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axis_type)
                for shape, dtype, _ in results
            ],
            num_warps=static.config.num_warps,
            num_stages=static.config.num_stages,
            input_output_aliases=self._aliases,
            interpret=static.interpret,
        )
