"""The sm90 kernels as an implementation of local attention."""

from __future__ import annotations

import functools
from typing import Any

from pallas_kernels.backend import DqAccumulator, Implementation, needs_gpu
from pallas_kernels.elementwise import derivative_is_one
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic import user_functions
from pallas_kernels.mosaic.launch import multiples_of_16, with_padding
from pallas_kernels.mosaic.score_inputs import BLOCK_TOKENS, unsupported_inputs
from pallas_kernels.mosaic.sm90 import dq
from pallas_kernels.mosaic.sm90.backward import backward, backward_bounds, split_backward
from pallas_kernels.mosaic.sm90.backward_forms import WIDE_HEAD_DIMS, WIDEST_NARROW_HEAD_DIM
from pallas_kernels.mosaic.sm90.configs import (
    MAX_DERIVATIVE_HEAD_DIM,
    MosaicConfig,
    can_zero_padding,
)
from pallas_kernels.mosaic.sm90.forward import forward, forward_bounds
from pallas_kernels.mosaic.sm90.static import backward_needs_zeros
from pallas_kernels.spec import AttentionSpec

# Of the kernels that a call runs; None is the shipped one.
Configs = tuple[MosaicConfig | None, ...]


def mosaic_sm90(
    forward_config: MosaicConfig | None = None,
    backward_config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> Implementation:
    """The Hopper kernels.

    Args:
      forward_config: tile sizes of the forward kernel; None is the shipped config.
      backward_config: tile sizes of the backward kernel; None is the shipped config.
      deterministic: whether the backward pass is bitwise reproducible.
    """
    configs = forward_config, backward_config
    of_backward: Any = {"config": backward_config, "deterministic": deterministic}
    accumulator = DqAccumulator(
        zeros=functools.partial(dq.zeros, **of_backward),
        add=functools.partial(backward, **of_backward),
        finish=functools.partial(dq.finish, **of_backward),
        is_additive=not deterministic,
    )
    implementation = Implementation(
        name="mosaic_sm90",
        forward=functools.partial(forward, config=forward_config),
        backward=accumulator.backward,
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, **of_backward),
        split_backward=functools.partial(split_backward, **of_backward),
        dq_accumulator=accumulator,
        unsupported=functools.partial(_unsupported, configs=(forward_config,)),
        backward_unsupported=functools.partial(_backward_unsupported, configs=configs),
        unsupported_functions=functools.partial(
            _unsupported_functions, deterministic=deterministic
        ),
        unavailable=needs_hopper,
        zeroes_padding=functools.partial(
            _zeroes_padding, configs=configs, deterministic=deterministic
        ),
        deterministic=deterministic,
        deterministic_variant=None if deterministic else mosaic_sm90(*configs, True),
    )
    return with_padding(implementation, multiples_of_16, _backward_dims, tokens=8)


def _backward_dims(*dims: int) -> tuple[int, int]:
    """Head dims that the backward kernel supports.

    Up to 128 both are multiples of 32, and dV is written in slices of the same width as dK: half of
    H.
    """
    if max(dims) > WIDEST_NARROW_HEAD_DIM:
        fitting = (x for x in WIDE_HEAD_DIMS if x[0] >= dims[0] and x[1] >= dims[1])
        return min(fitting, key=sum)
    end = WIDEST_NARROW_HEAD_DIM + 1
    head_dims, value_dims = (range(-(-dim // 32) * 32, end, 32) for dim in dims)
    supported = ((h, hv) for h in head_dims for hv in value_dims if hv % (h // 2) == 0)
    return min(supported, key=sum)


def _unsupported(inputs: AttentionInputs, *, configs: Configs) -> str | None:
    """Why kernels with these configs do not support these arrays, or None if they do."""
    reason = unsupported_inputs(inputs, most=256)
    if reason is not None or inputs.shared.block_mask is None:
        return reason
    sizes = [config.block_kv for config in configs if config is not None]
    wrong = [size for size in sizes if size % BLOCK_TOKENS]
    if not wrong:
        return None
    return (
        f"block_kv is {wrong[0]}; with a block_mask it must be a multiple of {BLOCK_TOKENS} (use "
        "the shipped config, None)"
    )


def _backward_unsupported(inputs: AttentionInputs, *, configs: Configs) -> str | None:
    """Why the backward kernel does not support these arrays, or None if it does."""
    reason = _unsupported(inputs, configs=configs)
    widest = max(inputs.head_dim, inputs.value_dim)
    if reason is not None or widest <= WIDEST_NARROW_HEAD_DIM:
        return reason
    if inputs.head_dim <= WIDEST_NARROW_HEAD_DIM:
        # Padded to keys of 192, they would gain nothing.
        return (
            f"the head dim of values is {inputs.value_dim} and that of keys {inputs.head_dim}; the "
            f"backward supports values above {WIDEST_NARROW_HEAD_DIM} if keys are, too"
        )
    return None


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool, deterministic: bool
) -> str | None:
    """Why the kernels cannot run the ``score_mod`` or ``mask_mod``, or None.

    With wide heads, a tile of scores and one of derivatives, next to dK and dV, are more than a
    thread's registers. dQ in fixed point has a bound that holds for derivatives up to 1.
    """
    reason = user_functions.unsupported(spec, backward=backward)
    if reason is not None or not backward:
        return reason
    widest = max(inputs.head_dim, inputs.value_dim)
    if widest > MAX_DERIVATIVE_HEAD_DIM and spec.score.has_derivative:
        return (
            f"the head dim is {widest}, and the derivative of score_mod depends on the score; the "
            f"backward supports such functions up to {MAX_DERIVATIVE_HEAD_DIM}, and those that "
            "only add to the score at all head dims"
        )
    score_mod = spec.score.score_mod
    if deterministic and score_mod is not None and not derivative_is_one(score_mod):
        return (
            "deterministic is True, and the derivative of score_mod is not 1; the reproducible "
            "backward supports functions that only add to the score"
        )
    return None


def _zeroes_padding(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    *,
    backward: bool,
    configs: Configs,
    deterministic: bool,
) -> bool:
    """See :attr:`pallas_kernels.backend.Implementation.zeroes_padding`."""
    if backward and backward_needs_zeros(spec, inputs.has_bias, deterministic):
        return False
    return can_zero_padding(configs[backward])


def needs_hopper(platform: str, compute_capability: float | None) -> str | None:
    """Why kernels for Hopper cannot run there, or None if they can."""
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


MOSAIC_SM90 = mosaic_sm90()
