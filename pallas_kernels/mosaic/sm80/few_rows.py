"""Products of a few rows with some of many matrices, bound by reading each of these once.

A decoding step has one row per sequence, and its rows hit some of a mixture's experts. A tile of
the grouped product's kernels has 64 rows or more of one group, so that they would launch few CTAs,
each with many rows of padding. Here a CTA multiplies all rows by a part of one matrix, or by parts
of several whose products are added (split-K), with a deep pipeline of cp.async copies. One CTA per
SM does not reach the memory bandwidth, so few matrices are split along K, too.
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

from pallas_kernels.device import num_sms
from pallas_kernels.grouped_products import Slots, unsupported_operand
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm80 import instructions, warp_operations
from pallas_kernels.mosaic.sm80.configs import MMA_ROWS, WARPS
from pallas_kernels.mosaic.sm80.implementation import needs_ampere

# The most rows: accumulators of more would leave the compiler too few registers.
MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """How the kernel is tiled.

    Attributes:
      block_n: columns per CTA.
      depth: elements of the contracted axis per stage.
      stages: pipeline stages.
      ctas_per_sm: CTAs per SM for which the number of splits is chosen.
    """

    block_n: int
    depth: int = 64
    stages: int = 4
    ctas_per_sm: int = 2


class _Inputs(NamedTuple):
    """What the kernel reads.

    Attributes:
      x: ``[1 or U, R, K]``.
      weights: one or more ``[G, K, N]``.
      first: as many ``[K, N]``, of a slot before all others; or none.
      slots: the slots.
    """

    x: Any
    weights: tuple[Any, ...]
    first: tuple[Any, ...]
    slots: Slots


@dataclasses.dataclass(frozen=True)
class FewRowsStatic:
    """Static parameters.

    Attributes:
      rows: R, rounded up to a multiple of 16.
      config: tile sizes.
      steps: of one slot.
      columns: CTAs along the columns of one array of weights.
      splits: CTAs along the steps of all slots, or of each.
      summed: whether the splits are those of all slots.
      dtype: of rows and weights.
    """

    rows: int
    config: FewRowsConfig
    steps: int
    columns: int
    splits: int
    summed: bool
    dtype: Any


# Where :func:`few_rows_product` can run.
unavailable = needs_ampere


def unsupported(rows: int, weights: jax.Array) -> str | None:
    """Why :func:`few_rows_product` cannot run so many rows, with these weights, or None."""
    if rows > MOST_ROWS:
        return f"there are {rows} rows; it supports {MOST_ROWS} at most"
    return unsupported_operand("weights", weights)


def few_rows_product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    slots: Slots,
    *,
    summed: bool,
    first: tuple[jax.Array, ...] = (),
    config: FewRowsConfig | None = None,
) -> jax.Array:
    """Multiplies rows by the matrices of all used slots.

        out[j, u] = x[u] weights[j][slots.matrices[u]]

    Not differentiable.

    Args:
      x: ``[U, R, K]``, the rows of each slot, or ``[1, R, K]``, the same for all; R is at most 64.
      weights: J arrays ``[G, K, N]`` of x's dtype; K and N are multiples of 64.
      slots: U of them.
      summed: whether to return partial sums over the slots instead.
      first: J matrices ``[K, N]`` of one more slot, the first one, which is always used; or none.
      config: tile sizes; None is the shipped config.

    Returns:
      float32 ``[J, U, R, N]``, undefined for unused slots; or ``[J, S, R, N]``, whose sum over S is
      that over the used slots.
    """
    rows, (depth, columns) = x.shape[1], weights[0].shape[1:]
    config = config or FewRowsConfig(64 if columns % 128 else 128)
    count, slot_steps = slots.matrices.shape[0] + bool(first), depth // config.depth
    tiles = len(weights) * (columns // config.block_n)
    separate = 1 if summed else count
    most = count * slot_steps // (separate * config.stages)
    splits = max(1, min(config.ctas_per_sm * num_sms() // (separate * tiles), most))
    padded = -(-rows // MMA_ROWS) * MMA_ROWS
    static = FewRowsStatic(
        padded, config, slot_steps, columns // config.block_n, splits, summed, weights[0].dtype
    )
    parts = separate * splits
    result: Any = jax.ShapeDtypeStruct((len(weights), parts, rows, columns), jnp.dtype(jnp.float32))
    out = launch(
        functools.partial(_kernel, static),
        "burst_few_rows",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"part": parts, "column": tiles},
        warpgroups=1,
        inputs=_Inputs(x, weights, first, slots),
        results=result,
        memory={
            "x": instructions.tiled_memory((config.stages, padded, config.depth), static.dtype),
            "weights": instructions.tiled_memory(
                (config.stages, config.depth, config.block_n), static.dtype
            ),
        },
    )
    return out if summed else out.reshape(len(weights), count, splits, rows, columns).sum(2)


def _kernel(static: FewRowsStatic, inputs: _Inputs, out: Any, memory: Any) -> None:
    """One CTA."""
    part, tile = lax.axis_index("part"), lax.axis_index("column")
    array, column = (op(tile, i32(static.columns)) for op in (lax.div, lax.rem))
    used = inputs.slots.count[0] + int(bool(inputs.first))
    if static.summed:
        slot, split, steps = i32(0), part, used * static.steps
    else:
        slot, split = (op(part, i32(static.splits)) for op in (lax.div, lax.rem))
        steps = i32(static.steps)
    first, end = (
        slot * static.steps + lax.div(at * steps, i32(static.splits)) for at in (split, split + 1)
    )
    column = column * static.config.block_n

    def run() -> None:
        acc = _sum(static, inputs, memory, array, column, first, end)
        target = out.at[array, part, :, pl.ds(column, static.config.block_n)]
        instructions.store_first_rows(target, acc, _fragments(static))

    if static.summed:
        run()
    else:
        pl.when(slot < used)(run)


def _sum(
    static: FewRowsStatic,
    inputs: _Inputs,
    memory: Any,
    array: Any,
    column: Any,
    first: Any,
    end: Any,
) -> jax.Array:
    """The products of some steps, added up."""
    fragments, ahead = _fragments(static), static.config.stages - 1

    def copy(step: Any, stage: Any) -> None:
        """Starts the copies of a step as one group, which is empty after the last step."""

        @pl.when(step < end)
        def _():
            slot, depth = (op(step, i32(static.steps)) for op in (lax.div, lax.rem))
            lanes = pl.ds(depth * static.config.depth, static.config.depth)
            x = inputs.x.at[0 if inputs.x.shape[0] == 1 else slot, :, lanes]
            warp_operations.copy_matrix(x, memory["x"].at[stage], 0)

            def copy_weights(matrix: Any) -> None:
                given = matrix.at[:, pl.ds(column, static.config.block_n)]
                target = memory["weights"].at[stage]
                warp_operations.copy_matrix(given, target, depth * static.config.depth)

            others = slot - int(bool(inputs.first))
            for index, weights in enumerate(inputs.weights):

                @pl.when((array == index) & (others >= 0))
                def _(weights=weights):
                    copy_weights(weights.at[inputs.slots.matrices[others]])

            for index, weights in enumerate(inputs.first):
                is_here = (array == index) & (slot == 0)
                pl.when(is_here)(functools.partial(copy_weights, weights))

        warp_operations.commit_copies()

    for step in range(ahead):
        copy(first + step, i32(step))

    def add(step: Any, state: Any) -> Any:
        stage, acc = state
        # Ends with a barrier: all have read the previous step's stage.
        warp_operations.wait_for_copies(ahead - 1, WARPS)
        copy(step + ahead, jnp.where(stage == 0, ahead, stage - 1))
        left = instructions.load_matrix(memory["x"].at[stage], fragments.lhs)
        right = instructions.load_matrix(memory["weights"].at[stage], fragments.rhs)
        return jnp.where(stage == ahead, 0, stage + 1), plgpu.mma(acc, left, right)

    zeros = fragments.zeros((static.rows, static.config.block_n))
    return lax.fori_loop(first, end, add, (i32(0), zeros))[1]


def _fragments(static: FewRowsStatic) -> instructions.Fragments:
    """All warps are along the columns."""
    return instructions.Fragments.of(static.dtype, 1)
