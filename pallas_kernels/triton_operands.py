"""The host half of the Triton kernels: what they know, operands, blocks, results in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering
from pallas_kernels.arrays import Pair, varying_axes
from pallas_kernels.spec import AttentionSpec, Tokens
from pallas_kernels.triton_configs import TritonConfig, padded_lanes
from pallas_kernels.triton_tiles import split_tokens


@dataclasses.dataclass(frozen=True)
class Programs:
    """One program per (batch row, head, tile).

    Tiles vary fastest: the programs that run at one time share few heads' keys in the L2 cache.

    Attributes:
      batch: rows of the batch.
      heads: heads.
      tiles: tiles of the side that programs are split over.
      last_first: start with the last tile. Where positions ascend, causal masks give the last query
        tile and the first key tile the most work, and long programs must not be left to the end.
    """

    batch: int
    heads: int
    tiles: int
    last_first: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """The launch grid, fastest dimension first."""
        return self.tiles, self.heads, self.batch

    def tile(self, program: Any = None) -> Any:
        """The tile of a grid index, or inside a kernel its own tile."""
        i = pl.program_id(0) if program is None else program
        return self.tiles - 1 - i if self.last_first else i

    def at(self, index: Callable[[Any, Any, Any], tuple]) -> Callable[..., tuple]:
        """An index map over the grid from one over ``(batch row, head, tile)``."""
        return lambda i, h, b: index(b, h, self.tile(i))


@dataclasses.dataclass(frozen=True)
class Known:
    """What a kernel knows before it sees data, beside the shapes of its blocks.

    ``groups`` is how many query heads share a key head, ``lanes`` is ``dim`` as blocks have it.
    """

    spec: AttentionSpec
    config: TritonConfig
    interpret: bool
    programs: Programs
    q_length: int
    kv_length: int
    groups: int
    dim: int
    lanes: int

    @classmethod
    def of(
        cls,
        split: Literal["queries", "keys"],
        q_shape: tuple[int, ...],
        kv_shape: tuple[int, ...],
        spec: AttentionSpec,
        config: TritonConfig,
        interpret: bool,
    ) -> Known:
        """For a kernel whose programs are split over the tiles of one side."""
        batch, q_length, heads, dim = q_shape
        kv_length, kv_heads = kv_shape[1:3]
        if split == "queries":
            programs = Programs(batch, heads, -(-q_length // config.block_q), last_first=True)
        else:
            programs = Programs(batch, kv_heads, -(-kv_length // config.block_kv), last_first=False)
        sizes = q_length, kv_length, heads // kv_heads, dim, padded_lanes(dim)
        return cls(spec, config, interpret, programs, *sizes)


class Operands:
    """A kernel's operands and their blocks, in the order in which the kernel takes them."""

    def __init__(self, known: Known):
        self._known = known
        self._segments = False
        self._arrays: list[Any] = []
        self._specs: list[pl.BlockSpec] = []
        self._aliases: dict[int, int] = {}

    def block(self, shape: tuple[int | None, ...], index: Callable[..., tuple]) -> pl.BlockSpec:
        """A block at ``index(batch row, head, tile)``."""
        return pl.BlockSpec(shape, self._known.programs.at(index))

    def add(self, array: jax.Array, spec: pl.BlockSpec, result: int | None = None) -> None:
        """One operand; ``result`` is the number of the result that takes its memory."""
        if result is not None:
            self._aliases[len(self._arrays)] = result
        self._arrays.append(array)
        self._specs.append(spec)

    def add_pair(
        self, pair: Pair, shape: tuple[int | None, ...], index: Callable[..., tuple]
    ) -> None:
        """Both arrays of a pair. A packed one is passed twice, each operand seeing its own half."""
        if isinstance(pair, tuple):
            for array in pair:
                self.add(array, self.block(shape, index))
            return
        for half in (0, 1):

            def of_half(*ids, half=half):
                return (half, *index(*ids))

            self.add(pair, self.block((None, *shape), of_half))

    def add_tokens(
        self,
        bounds: jax.Array,
        q_tokens: Tokens,
        kv_tokens: Tokens,
        *,
        q_block: int | None,
        kv_block: int | None,
    ) -> None:
        """The bounds table, the positions, and the segment ids if there are any.

        Args:
          bounds: int32 ``[1 or B, tiles, 4]``.
          q_tokens: the queries' tokens.
          kv_tokens: the keys' tokens.
          q_block: queries per program, None for all of them.
          kv_block: keys per program, None for all of them.
        """
        per_row = bounds.shape[0] != 1
        self.add(bounds, self.block((None, None, 4), lambda b, h, i: (b if per_row else 0, i, 0)))
        sides = ((q_tokens, q_block), (kv_tokens, kv_block))
        self._segments = q_tokens.segment_ids is not None
        for tokens, block in sides:
            size = tokens.positions.shape[0] if block is None else block
            at = (lambda b, h, i: (0,)) if block is None else (lambda b, h, i: (i,))
            self.add(tokens.positions, self.block((size,), at))
        for tokens, block in sides:
            if tokens.segment_ids is not None:
                size = tokens.positions.shape[0] if block is None else block
                at = (lambda b, h, i: (b, 0)) if block is None else (lambda b, h, i: (b, i))
                self.add(tokens.segment_ids, self.block((None, size), at))

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        results: Sequence[tuple[tuple[int, ...], Any, pl.BlockSpec]],
    ) -> Any:
        """Runs ``kernel(known, table, tokens, *references to what comes after the tokens)``.

        ``results`` are ``(shape, dtype, block)``; their references come last.
        """
        known, segments = self._known, self._segments

        def body(*refs):
            table, tokens, refs = split_tokens(refs, segments)
            kernel(known, table, tokens, *refs)

        # A result varies over the mesh axes that any operand varies over.
        kind = jax.typeof(self._arrays[0]).manual_axis_type
        kind = kind.update(varying=varying_axes(self._arrays))
        return triton_lowering.call(
            body,
            *self._arrays,
            name=name,
            grid=known.programs.grid,
            in_specs=self._specs,
            out_specs=[block for _, _, block in results],
            out_shape=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
                for shape, dtype, _ in results
            ],
            num_warps=known.config.num_warps,
            num_stages=known.config.num_stages,
            input_output_aliases=self._aliases,
            interpret=known.interpret,
        )
