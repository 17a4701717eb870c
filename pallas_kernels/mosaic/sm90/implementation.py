"""The sm90 kernels as an implementation of local attention."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.backend import Implementation, needs_gpu
from pallas_kernels.bounds import split_tiles
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.score_inputs import unsupported_block_mask
from pallas_kernels.mosaic.sm90.backward import backward, backward_bounds
from pallas_kernels.mosaic.sm90.configs import MAX_DERIVATIVE_HEAD_DIM, MosaicConfig
from pallas_kernels.mosaic.sm90.forward import forward, forward_bounds
from pallas_kernels.mosaic.user_functions import DTYPES, OPERATIONS
from pallas_kernels.spec import AttentionSpec, unsupported_functions


def mosaic_sm90(
    forward_config: MosaicConfig | None = None, backward_config: MosaicConfig | None = None
) -> Implementation:
    """The Hopper kernels.

    Args:
      forward_config: tile sizes of the forward kernel; None is the shipped config.
      backward_config: tile sizes of the backward kernel; None is the shipped config.
    """
    return Implementation(
        name="mosaic_sm90",
        forward=functools.partial(forward, config=forward_config),
        backward=functools.partial(backward, config=backward_config),
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, config=backward_config),
        split_backward=split_tiles,
        unsupported=functools.partial(_unsupported, multiple_of=16, most=256),
        backward_unsupported=_backward_unsupported,
        unsupported_functions=_unsupported_functions,
        unavailable=_needs_hopper,
        deterministic=False,
    )


def _unsupported(inputs: AttentionInputs, *, multiple_of: int, most: int) -> str | None:
    """Why a kernel does not support the inputs, or None.

    Head dims must be multiples of ``multiple_of`` up to ``most``.
    """
    q, k = inputs.query.q, inputs.kv.k
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"query is {q.dtype} and key {k.dtype}; it supports bfloat16 or float16"
    for what, dim in (("", inputs.head_dim), (" of values", inputs.value_dim)):
        if dim % multiple_of or dim > most:
            return (
                f"the head dim{what} is {dim}; it supports multiples of {multiple_of} up to {most}"
            )
    for name, length in (("query", inputs.q_length), ("key", inputs.kv_length)):
        if length % 8:
            return f"the {name} length per device is {length}; it supports multiples of 8"
    return unsupported_block_mask(inputs)


def _backward_unsupported(inputs: AttentionInputs) -> str | None:
    """Why the backward kernel does not support the inputs, or None.

    Head dims end at 128. With (192, 128), dK, dV and a warpgroup's half of dQ alone would take 208
    of a thread's 240 registers, and two stages 258 KiB of shared memory.
    """
    reason = _unsupported(inputs, multiple_of=32, most=128)
    if reason is None and inputs.value_dim % (inputs.head_dim // 2):
        # dV is written in slices of the same width as dK: half of H.
        return (
            f"the head dim of values is {inputs.value_dim}, of keys {inputs.head_dim}; with that "
            f"the backward supports multiples of {inputs.head_dim // 2}"
        )
    return reason


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    """Why the kernels cannot run the ``score_mod`` or ``mask_mod``, or None.

    With wide heads, a tile of scores and one of derivatives, next to dK and dV, are more than a
    thread's registers.
    """
    reason = unsupported_functions(spec, backward=backward, operations=OPERATIONS, dtypes=DTYPES)
    widest = max(inputs.head_dim, inputs.value_dim)
    is_wide = widest > MAX_DERIVATIVE_HEAD_DIM
    if reason is None and backward and is_wide and spec.score.has_derivative:
        return (
            f"the head dim is {widest}, and the derivative of score_mod depends on the score; the "
            f"backward supports such functions up to {MAX_DERIVATIVE_HEAD_DIM}, and those that "
            "only add to the score at all head dims; use None, 'triton' or 'xla'"
        )
    return reason


def _needs_hopper(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


MOSAIC_SM90 = mosaic_sm90()
