"""The Mosaic GPU kernels as an implementation of local attention."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.bounds import halves_of_tiles
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.pallas_mosaic.backward import backward, backward_bounds
from pallas_kernels.pallas_mosaic.blocks import unsupported_blocks
from pallas_kernels.pallas_mosaic.configs import SLOPED_HEAD_DIM, MosaicConfig
from pallas_kernels.pallas_mosaic.forward import forward, forward_bounds
from pallas_kernels.pallas_mosaic.functions import DTYPES, OPERATIONS
from pallas_kernels.spec import AttentionSpec, unsupported_functions


def mosaic_sm90(
    forward_config: MosaicConfig | None = None, backward_config: MosaicConfig | None = None
) -> Implementation:
    """The Pallas Mosaic GPU kernels, for Hopper: dQ, dK and dV from one pass.

    Args:
      forward_config: tiles of the forward kernel; None is the table's.
      backward_config: tiles of the backward kernel; None is the table's.
    """
    return Implementation(
        name="mosaic_sm90",
        forward=functools.partial(forward, config=forward_config),
        backward=functools.partial(backward, config=backward_config),
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, config=backward_config),
        split_backward=halves_of_tiles,
        unsupported=functools.partial(_unsupported, multiple_of=16, most=256),
        backward_unsupported=_backward_unsupported,
        unsupported_functions=_unsupported_functions,
        unavailable=_needs_hopper,
        deterministic=False,
    )


def _unsupported(inputs: AttentionInputs, *, multiple_of: int, most: int) -> str | None:
    """Why a kernel cannot take these, or None; the arguments are about both head dims."""
    q, k = inputs.query.q, inputs.kv.k
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"query is {q.dtype} and key {k.dtype}; it takes bfloat16 or float16"
    for what, dim in (("", inputs.head_dim), (" of values", inputs.value_dim)):
        if dim % multiple_of or dim > most:
            return f"the head dim{what} is {dim}; it takes multiples of {multiple_of} up to {most}"
    for name, length in (("query", inputs.q_length), ("key", inputs.kv_length)):
        if length % 8:
            return f"the {name} length per device is {length}; it takes multiples of 8"
    return unsupported_blocks(inputs)


def _backward_unsupported(inputs: AttentionInputs) -> str | None:
    """Why the backward kernel cannot take these, or None.

    Head dims end at 128. Of (192, 128), say, dK, dV and a warpgroup's half of dQ alone would take
    208 of a thread's 240 registers, and the smallest number of stages 258 KiB of shared memory.
    """
    reason = _unsupported(inputs, multiple_of=32, most=128)
    if reason is None and inputs.value_dim % (inputs.head_dim // 2):
        # dV is written by as many lanes at a time as dK: half of H.
        return (
            f"the head dim of values is {inputs.value_dim}, of keys {inputs.head_dim}; the "
            f"backward takes multiples of {inputs.head_dim // 2} beside it"
        )
    return reason


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    """Why the kernels cannot run a spec's functions, or None.

    A tile of scores and one of their slopes, beside dK and dV, are more than a thread's registers
    where heads are wide.
    """
    reason = unsupported_functions(spec, backward=backward, operations=OPERATIONS, dtypes=DTYPES)
    widest = max(inputs.head_dim, inputs.value_dim)
    if reason is None and backward and spec.score.has_slope and widest > SLOPED_HEAD_DIM:
        return (
            f"the head dim is {widest}, and the derivative of score_mod depends on the score; the "
            f"backward takes such functions up to {SLOPED_HEAD_DIM}, and those that only add to "
            "the score at all head dims; use None, 'triton' or 'xla'"
        )
    return reason


def _needs_hopper(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        has = "" if compute_capability is None else f" of compute capability {compute_capability}"
        return (
            "it needs compute capability 9.0 (Hopper), the arrays are on "
            f"{platform!r}{has}; use None, 'triton' or 'xla'"
        )
    return None


MOSAIC_SM90 = mosaic_sm90()
