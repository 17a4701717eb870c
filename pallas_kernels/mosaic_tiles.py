"""What the Mosaic GPU kernels share: layouts, shared memory, masks, and the walk over tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_configs import lane_tile
from pallas_kernels.scores import LOG2_E, allowed
from pallas_kernels.spec import AttentionSpec

# A tile of scores in a warpgroup's registers, and vectors along its rows and its columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def shared(shape: tuple[int, ...], dtype: Any, lanes: int | None = None) -> Any:
    """Shared memory in the order that matrix instructions and tensor copies agree on.

    ``lanes``: the widest slice of lanes that is taken of it, if not all.
    """
    itemsize = jnp.dtype(dtype).itemsize
    step = lane_tile(shape[-1] if lanes is None else lanes, itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(step * itemsize)),
    )


def i32(x: Any) -> jax.Array:
    """An int32 scalar: Python ints would be int64 where x64 is on."""
    return jnp.asarray(x, jnp.int32)


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``[rows]`` over a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``[columns]`` over a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def tanh(x: jax.Array) -> jax.Array:
    """To float32 accuracy; the GPU's own instruction has 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def pin(*values: jax.Array) -> Any:
    """The same values, which the compiler may not make earlier or later than here."""
    pinned = lax.optimization_barrier(values)
    return pinned[0] if len(values) == 1 else pinned


class TokenRefs(NamedTuple):
    """One side's positions and segment ids in device memory; None if no mask needs them."""

    positions: Any
    segment_ids: Any

    def load(self, batch: Any, at: Any, layout: Any) -> tuple[Any, Any]:
        """Those of some tokens, in registers."""
        if self.positions is None:
            return None, None
        positions = plgpu.load(self.positions.at[at], layout=layout, optimized=False)
        if self.segment_ids is None:
            return positions, None
        ids = plgpu.load(self.segment_ids.at[batch, at], layout=layout, optimized=False)
        return positions, ids


def score_mask(
    spec: AttentionSpec,
    shape: tuple[int, ...],
    q: tuple[Any, Any],
    k: tuple[Any, Any],
    q_along: Any,
    k_along: Any,
) -> jax.Array | None:
    """Which scores of a tile count; None if all do. ``q`` and ``k`` are what TokenRefs.load gave.

    ``q_along`` and ``k_along`` are how they lie: :func:`along_rows` or :func:`along_columns`.
    """
    if q[0] is None:
        return None
    q_pos, q_seg = (None if x is None else q_along(x, shape) for x in q)
    k_pos, k_seg = (None if x is None else k_along(x, shape) for x in k)
    assert q_pos is not None
    assert k_pos is not None
    return allowed(spec, q_pos, k_pos, q_seg, k_seg)


class Walk:
    """A program's way over its tiles: those that need a mask first, then the full ones.

    Args:
      bounds: int32 ``[1 or B, tiles, 4]`` in device memory: query_bounds' or key_bounds'.
      batch: the program's batch row.
      tile: the program's tile.
      last: the last tile of the side that is walked over.
      rotate: start the full tiles so many tiles further on, and come back to the others.
    """

    def __init__(self, bounds: Any, batch: Any, tile: Any, last: int, rotate: Any = None):
        row = (batch if bounds.shape[0] != 1 else i32(0), tile)
        first, full_first, full_end, end = (bounds[(*row, i32(c))] for c in range(4))
        self._first, self._full_first, self._full_end = first, full_first, full_end
        self._before = full_first - first
        self._last = i32(last)
        full_tiles = full_end - full_first
        self._rotate = None if rotate is None else lax.rem(rotate, jnp.maximum(full_tiles, 1))
        self.masked = self._before + (end - full_end)
        self.total = end - first

    def tile(self, step: Any) -> jax.Array:
        """The tile of a step. Beyond the last step: any tile."""
        masked = jnp.where(
            step < self._before, self._first + step, self._full_end + (step - self._before)
        )
        i = step - self.masked
        if self._rotate is not None:
            i = i + self._rotate
            count = self._full_end - self._full_first
            i = jnp.where(i >= count, i - count, i)
        tile = jnp.where(step < self.masked, masked, self._full_first + i)
        return jnp.clip(tile, 0, self._last)
