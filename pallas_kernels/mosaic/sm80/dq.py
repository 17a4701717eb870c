"""The backward kernel's accumulator of dQ: in register order, in float32 or fixed point.

It is a :class:`pallas_kernels.backend.DqAccumulator`. A ring keeps it in register order over all of
its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic import dq as dq_sums
from pallas_kernels.mosaic import fixed_point
from pallas_kernels.mosaic.dq import DqSum
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.configs import (
    BACKWARD_M_WARPS,
    BACKWARD_WARPGROUPS,
    SHARED_MEMORY,
    WARPS,
    BackwardConfig,
    backward_config,
)
from pallas_kernels.mosaic.sm80.inputs import Sm80Static
from pallas_kernels.spec import AttentionSpec

_THREADS = 32 * WARPS


def backward_static(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    config: BackwardConfig | None,
    shared_memory: int,
) -> Sm80Static[BackwardConfig]:
    """Static parameters of the backward kernel; ``config`` None is the default one."""
    config = config or backward_config(inputs.head_dim, inputs.value_dim, shared_memory)
    return Sm80Static.of(inputs, spec, config)


def zeros(
    inputs: AttentionInputs,
    bounds: Any,
    *,
    spec: AttentionSpec,
    maximum: Callable[[jax.Array], jax.Array] = lambda x: x,
    config: BackwardConfig | None = None,
    shared_memory: int = SHARED_MEMORY,
    deterministic: bool = False,
) -> DqSum:
    """The sum before the first call; in fixed point if it is ``deterministic``.

    Values are those of dQ / scale, padded to whole query tiles: ``[B, N, query tiles, warpgroups,
    registers, 128 threads]``, in fixed point ``[..., 2]``, the low and the high half of each
    integer. The bound of fixed point is the largest of each head, ``[B, N]``.
    """
    static, bound = backward_static(inputs, spec, config, shared_memory), None
    queries, lanes = static.config.dq_part(static.head_dim)
    registers = queries * lanes // _THREADS
    shape = static.batch, static.heads, static.q_tiles, BACKWARD_WARPGROUPS, registers, _THREADS
    if deterministic:
        bound = jnp.max(fixed_point.dq_bound(inputs, spec, maximum), axis=2)
        shape = *shape, 2
    return dq_sums.zeros(inputs, bounds, shape, bound)


def finish(
    dq: DqSum,
    inputs: AttentionInputs,
    *,
    spec: AttentionSpec,
    config: BackwardConfig | None = None,
    shared_memory: int = SHARED_MEMORY,
) -> jax.Array:
    """dQ, float32 ``[B, T, N, H]``."""
    static = backward_static(inputs, spec, config, shared_memory)
    part = static.config.dq_part(static.head_dim)
    x, bound = dq
    if bound is not None:
        x = fixed_point.from_64(x, bound.reshape(*bound.shape, 1, 1, 1, 1))
    x = instructions.from_register_order(x, part, BACKWARD_M_WARPS)
    # [B, N, query tiles, warpgroups, queries, lanes]
    order = (0, 2, 3, 4, 1, 5) if part[0] < static.config.block_q else (0, 2, 4, 1, 3, 5)
    x = x.transpose(order)
    x = x.reshape(static.batch, static.padded_q_length, static.heads, static.head_dim)
    return x[:, : static.q_length] * spec.score.scale
