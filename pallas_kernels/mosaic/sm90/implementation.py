"""The sm90 kernels as an implementation of local attention."""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.backend import Implementation, needs_gpu
from pallas_kernels.bounds import split_tiles
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.launch import multiples_of_16, with_padding
from pallas_kernels.mosaic.score_inputs import unsupported_inputs
from pallas_kernels.mosaic.sm90.backward import backward, backward_bounds
from pallas_kernels.mosaic.sm90.configs import MAX_DERIVATIVE_HEAD_DIM, MosaicConfig
from pallas_kernels.mosaic.sm90.forward import forward, forward_bounds
from pallas_kernels.mosaic.user_functions import DTYPES, OPERATIONS
from pallas_kernels.pallas_triton.implementation import triton
from pallas_kernels.spec import AttentionSpec, unsupported_functions

_WIDEST_BACKWARD = 128
_TRITON = triton(compute_capability=9.0)


def mosaic_sm90(
    forward_config: MosaicConfig | None = None, backward_config: MosaicConfig | None = None
) -> Implementation:
    """The Hopper kernels.

    Args:
      forward_config: tile sizes of the forward kernel; None is the shipped config.
      backward_config: tile sizes of the backward kernel; None is the shipped config.
    """
    implementation = Implementation(
        name="mosaic_sm90",
        forward=functools.partial(forward, config=forward_config),
        backward=functools.partial(backward, config=backward_config),
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, config=backward_config),
        split_backward=split_tiles,
        unsupported=functools.partial(unsupported_inputs, most=256),
        # With (192, 128), dK, dV and a warpgroup's half of dQ alone would take 208 of a thread's
        # 240 registers, and two stages 258 KiB of shared memory.
        backward_unsupported=functools.partial(unsupported_inputs, most=_WIDEST_BACKWARD),
        unsupported_functions=_unsupported_functions,
        unavailable=_needs_hopper,
        deterministic=False,
    )
    implementation = with_padding(implementation, multiples_of_16, _backward_dims, tokens=8)
    return dataclasses.replace(implementation, deterministic_variant=_deterministic(implementation))


def _deterministic(implementation: Implementation) -> Implementation:
    """The same forward pass, and a bitwise reproducible backward pass: Triton's two kernels.

    Triton's forward and backward together make 1.4 times the rate of this forward with the sm80
    reproducible backward (EXPERIMENTS.md).
    """
    return dataclasses.replace(
        implementation,
        backward=_TRITON.backward,
        backward_bounds=_TRITON.backward_bounds,
        split_backward=_TRITON.split_backward,
        unsupported_functions=_deterministic_unsupported_functions,
        deterministic=True,
    )


def _deterministic_unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    of = _TRITON.unsupported_functions if backward else _unsupported_functions
    return of(spec, inputs, backward=backward)


def _backward_dims(*dims: int) -> tuple[int, int]:
    """Head dims that the backward kernel supports.

    Both are multiples of 32. dV is written in slices of the same width as dK: half of H.
    """
    head_dims, value_dims = (range(-(-dim // 32) * 32, _WIDEST_BACKWARD + 1, 32) for dim in dims)
    supported = ((h, hv) for h in head_dims for hv in value_dims if hv % (h // 2) == 0)
    return min(supported, key=sum)


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
            "only add to the score at all head dims; use None, 'mosaic_sm80' or 'xla'"
        )
    return reason


def _needs_hopper(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


MOSAIC_SM90 = mosaic_sm90()
