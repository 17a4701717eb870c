"""Zeros in padding, which the producer warpgroup writes in shared memory.

Masks give padding the weight 0, but 0 times infinity or NaN is NaN, so what queries, keys, values
and dO hold in padding must not reach a product. Zeros in global memory would take copies of whole
arrays. Few tiles hold padding. A copy of one arrives at a barrier of the producer's own: it waits,
writes zeros in the tokens of segment 0, and only then arrives where the consumers wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.bounds import tiles_with_padding
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.fragments import i32, proxy_fence
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

_THREADS = 128


class PaddedTiles(NamedTuple):
    """Which tiles hold padding, int32: 1 where they do, else 0.

    Attributes:
      q: ``[B, query tiles]``.
      kv: ``[B, KV tiles]``.
    """

    q: Any
    kv: Any

    @classmethod
    def of(cls, inputs: AttentionInputs, config: MosaicConfig) -> PaddedTiles:
        """The tiles of a kernel with this config."""
        q_ids, kv_ids = inputs.query.segment_ids, inputs.kv.segment_ids
        assert q_ids is not None
        assert kv_ids is not None
        tiles = (q_ids, config.block_q), (kv_ids, config.block_kv)
        return cls(*(tiles_with_padding(*side) for side in tiles))


class Tokens(NamedTuple):
    """The tokens of a tile that is copied.

    Attributes:
      padded: whether some of them are padding.
      segment_ids: int32 ``[length]`` in global memory, padded to whole tiles.
      first: the first one.
    """

    padded: jax.Array
    segment_ids: Any
    first: Any

    @classmethod
    def of(cls, inputs: Any, side: str, batch: Any, tile: Any, first: Any) -> Tokens | None:
        """Tokens of "q" or "kv"; None if the kernel zeroes no padding.

        Args:
          inputs: a kernel's inputs, with ``padded`` and ``scores``.
          side: "q" or "kv".
          batch: batch index.
          tile: tile index on that side.
          first: the first token.
        """
        if inputs.padded is None:
            return None
        tiles = getattr(inputs.padded, side)
        ids = getattr(inputs.scores, f"{side}_tokens").segment_ids
        batch = batch if ids.shape[0] != 1 else i32(0)
        return cls(tiles[batch, tile] != 0, ids.at[batch], first)


def copy_without_padding(
    tokens: Tokens | None,
    copy: Callable[[Any], None],
    arrived: Any,
    own: Any,
    *targets: tuple[Any, Any],
    copies: int = 1,
) -> None:
    """Starts the copies of a tile, and zeroes its padding before the consumers read it.

    Args:
      tokens: the tile's. Loading whether they hold padding takes long, so call :meth:`Tokens.of`
        before a wait for memory. None zeroes nothing.
      copy: ``(barrier)``: starts the copies, which arrive at the barrier.
      arrived: the barrier at which the consumers wait.
      own: an array of one barrier, the producer's, for as many arrivals as there are ``copies``.
      *targets: what is copied of the tokens, in shared memory, and its description.
      copies: number of copies.
    """
    if tokens is None:
        copy(arrived)
        return
    pl.when(~tokens.padded)(lambda: copy(arrived))

    @pl.when(tokens.padded)
    def _():
        copy(own.at[0])
        plgpu.barrier_wait(own.at[0])
        for target, description in targets:
            rows = pl.ds(tokens.first, target.shape[0])
            zero_rows(target, description.transforms, tokens.segment_ids.at[rows])
        # Every thread arrives by itself, after its own stores.
        proxy_fence()
        for _ in range(copies):
            plgpu.barrier_arrive(arrived)


def zero_rows(target: Any, transforms: Any, segment_ids: Any) -> None:
    """Writes zeros in the rows of ``target`` whose segment id is 0.

    Args:
      target: shared memory ``[rows, lanes]`` of 16-bit numbers, at most 128 rows.
      transforms: its tiling and swizzle, which moves nothing to another row.
      segment_ids: int32 ``[rows]``, in global memory.
    """
    types = plgpu.RefType(transforms), plgpu.RefType()
    plgpu.inline_mgpu(arg_types=types)(_zero_rows)(target, segment_ids)


def _zero_rows(_, target, segment_ids):
    i32_type, memory = ir.IntegerType.get_signless(32), ir.MemRefType(target.type)
    tile_rows, tile_columns, eight, lanes = memory.shape
    row_stride, column_stride, stride, _ = memory.get_strides_and_offset()[0]
    rows = tile_rows * eight
    assert rows <= _THREADS
    row = arith.remui(utils.thread_idx(), utils.c(_THREADS, i32_type))
    inside = arith.cmpi(arith.CmpIPredicate.ult, row, utils.c(rows, i32_type))
    with utils.when(inside):
        place = utils.getelementptr(utils.memref_ptr(segment_ids), [row], i32_type)
        is_padding = arith.cmpi(
            arith.CmpIPredicate.eq, llvm.load(i32_type, place), utils.c(0, i32_type)
        )
        with utils.when(is_padding):
            of_tile = arith.muli(
                arith.divui(row, utils.c(eight, i32_type)), utils.c(row_stride, i32_type)
            )
            in_tile = arith.muli(
                arith.remui(row, utils.c(eight, i32_type)), utils.c(stride, i32_type)
            )
            start = utils.getelementptr(
                utils.memref_ptr(target), [arith.addi(of_tile, in_tile)], memory.element_type
            )
            kind = ir.VectorType.get((4,), i32_type)
            zeros = arith.constant(
                kind, ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(i32_type, 0))
            )
            for column in range(tile_columns):
                for lane in range(0, lanes, 8):
                    offset = column * column_stride + lane
                    at = utils.getelementptr(start, [offset], memory.element_type)
                    llvm.store(zeros, at, alignment=16)
