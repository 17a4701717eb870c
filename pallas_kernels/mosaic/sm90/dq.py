"""The backward kernel's accumulator of dQ, in float32 or fixed point.

It is a :class:`pallas_kernels.backend.DqAccumulator`. Where each consumer warpgroup computes dQ of
half a tile's queries it is in register order
(:func:`pallas_kernels.mosaic.sm90.instructions.add_in_register_order`), and a ring keeps it so over
all of its steps. Else it is row-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import gradient_dtype
from pallas_kernels.backend import Dkv
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic import dq as dq_sums
from pallas_kernels.mosaic import fixed_point
from pallas_kernels.mosaic.dq import DqSum
from pallas_kernels.mosaic.sm90 import instructions
from pallas_kernels.mosaic.sm90.backward_forms import SPLIT, WIDEST_NARROW_HEAD_DIM
from pallas_kernels.mosaic.sm90.configs import (
    BACKWARD_WARPGROUPS,
    LARGE_BLOCK_Q,
    MosaicConfig,
    backward_config,
    for_this_jax,
    moves_registers,
    wide_backward_config,
)
from pallas_kernels.mosaic.sm90.static import BackwardStatic, needs_registers
from pallas_kernels.spec import AttentionSpec


def shipped_config(
    inputs: AttentionInputs, spec: AttentionSpec, deterministic: bool = False
) -> MosaicConfig:
    """The config of a call, with the installed JAX."""
    blocks, small = inputs.shared.block_mask, needs_registers(spec, inputs.has_bias)
    if max(inputs.head_dim, inputs.value_dim) > WIDEST_NARROW_HEAD_DIM:
        small = small or blocks is not None
        # Keys past the last one then have weights, which times delta may exceed float16.
        ragged = inputs.kv_length % SPLIT.block_kv != 0
        small = small or (ragged and inputs.query.q.dtype == jnp.float16)
        return for_this_jax(wide_backward_config(inputs.head_dim, inputs.value_dim, small))
    # Fixed point, masks that read arrays, and consumers that start copies each take registers. Two
    # of them leave none for 128 queries.
    by_arrays = inputs.has_segments or inputs.has_kv_bounds or blocks is not None
    small = small or deterministic + by_arrays + (not moves_registers()) > 1
    # Tiles larger than a block of the mask would be visited for the sake of a part.
    small = small or (blocks is not None and blocks.q_run % LARGE_BLOCK_Q != 0)
    head_dim = max(inputs.head_dim, inputs.value_dim)
    return for_this_jax(backward_config(head_dim, small))


def backward_static(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    config: MosaicConfig | None,
    *,
    dkv: Dkv | None = None,
    out_dtype: DTypeLike | None = None,
    deterministic: bool = False,
) -> BackwardStatic:
    """Static parameters of the backward kernel; ``config`` None is the shipped one."""
    config = config or shipped_config(inputs, spec, deterministic)
    return BackwardStatic.of(
        inputs, spec, config, adds_dkv=dkv is not None and not deterministic,
        dkv_dtype=jnp.dtype(gradient_dtype(dkv, out_dtype)), deterministic=deterministic,
    )  # fmt: skip


def zeros(
    inputs: AttentionInputs,
    bounds: Any,
    *,
    spec: AttentionSpec,
    maximum: Callable[[jax.Array], jax.Array] = lambda x: x,
    config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> DqSum:
    """The sum before the first call; in fixed point if it is ``deterministic``.

    Values in register order are ``[B, N, query tiles, warpgroups, block_q, H / 2]``; else they are
    ``[B, T, N, H]``. The bound of fixed point is each query's, ``[B, N, T]``.
    """
    static, bound = backward_static(inputs, spec, config, deterministic=deterministic), None
    shape = inputs.query.q.shape
    if static.config.dq_by_rows:
        part = static.config.block_q, static.half_dim
        shape = static.batch, static.heads, static.q_tiles, BACKWARD_WARPGROUPS, *part
    if deterministic:
        bound = fixed_point.dq_bound(inputs, spec, maximum)
        if static.scale_in_ds:
            bound = bound * abs(spec.score.scale)
    return dq_sums.zeros(inputs, bounds, shape, bound)


def finish(
    dq: DqSum,
    inputs: AttentionInputs,
    *,
    spec: AttentionSpec,
    config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> jax.Array:
    """dQ, float32 ``[B, T, N, H]``."""
    static = backward_static(inputs, spec, config, deterministic=deterministic)
    x, bound = dq
    if static.config.dq_by_rows:
        x = instructions.from_register_order(x, static.head_dim)
        # [B, N, query tiles, warpgroups, 64, H]
        x = x.transpose(0, 2, 3, 4, 1, 5)
        x = x.reshape(static.batch, -1, static.heads, static.head_dim)[:, : inputs.q_length]
    if bound is not None:
        x = fixed_point.from_32(x, bound.swapaxes(1, 2)[:, : x.shape[1], :, None])
    return x if static.scale_in_ds else x * spec.score.scale
