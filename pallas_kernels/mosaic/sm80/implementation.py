"""The sm80 kernels as an implementation of local attention."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.bounds import halves_of_tiles
from pallas_kernels.elementwise import unsupported
from pallas_kernels.mosaic.sm80.backward import backward, backward_bounds
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm80.forward import forward, forward_bounds
from pallas_kernels.operands import Operands
from pallas_kernels.pallas_mosaic.blocks import unsupported_blocks
from pallas_kernels.pallas_mosaic.functions import DTYPES, OPERATIONS

_WIDEST = 256


def mosaic_sm80(
    forward_config: ForwardConfig | None = None, backward_config: BackwardConfig | None = None
) -> Implementation:
    """Kernels of Ampere's instructions, which newer GPUs have too: dQ, dK and dV from one pass.

    Args:
      forward_config: tiles of the forward kernel; None is the shipped config.
      backward_config: tiles of the backward kernel; None is the shipped config.
    """
    return Implementation(
        name="mosaic_sm80",
        forward=functools.partial(forward, config=forward_config),
        backward=functools.partial(backward, config=backward_config),
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, config=backward_config),
        split_backward=halves_of_tiles,
        unsupported=_unsupported,
        unsupported_functions=functools.partial(
            unsupported, operations=OPERATIONS, dtypes=DTYPES
        ),
        unavailable=_needs_ampere,
        deterministic=False,
    )


def _unsupported(operands: Operands) -> str | None:
    """Why the kernels do not support these arrays, or None."""
    q, k = operands.q, operands.k
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"query is {q.dtype} and key {k.dtype}; it supports bfloat16 or float16"
    for what, dim in (("", operands.head_dim), (" of values", operands.value_dim)):
        if dim % 16 or dim > _WIDEST:
            return (
                f"the head dim{what} is {dim}; it supports multiples of 16 up to {_WIDEST}"
            )
    return unsupported_blocks(operands)


def _needs_ampere(platform: str, compute_capability: float | None) -> str | None:
    # Mosaic GPU compiles Hopper's own copies for newer GPUs, which these kernels do not await.
    if platform != "gpu" or compute_capability is None or not 8.0 <= compute_capability < 9.0:
        has = "" if compute_capability is None else f" of compute capability {compute_capability}"
        return (
            f"it needs compute capability 8.x (Ampere, Ada), the arrays are on {platform!r}{has}; "
            "use None, 'mosaic_gpu' or 'xla'"
        )
    return None


MOSAIC_SM80 = mosaic_sm80()
