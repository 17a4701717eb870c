"""The sm80 kernels as an implementation of local attention."""

from __future__ import annotations

import functools
from typing import Any

from pallas_kernels.backend import DqAccumulator, Implementation, needs_gpu
from pallas_kernels.bounds import split_backward
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic import user_functions
from pallas_kernels.mosaic.launch import compiles_for, multiples_of_16, with_padding
from pallas_kernels.mosaic.score_inputs import unsupported_inputs
from pallas_kernels.mosaic.sm80 import configs, dq
from pallas_kernels.mosaic.sm80.backward import backward, backward_bounds
from pallas_kernels.mosaic.sm80.configs import (
    SHARED_MEMORY,
    SMALL_SHARED_MEMORY,
    WIDEST_HEAD_DIM,
    BackwardConfig,
    ForwardConfig,
    shared_memory_of,
)
from pallas_kernels.mosaic.sm80.forward import forward, forward_bounds
from pallas_kernels.spec import AttentionSpec


def mosaic_sm80(
    forward_config: ForwardConfig | None = None,
    backward_config: BackwardConfig | None = None,
    deterministic: bool = False,
    shared_memory: int = SHARED_MEMORY,
) -> Implementation:
    """The kernels in instructions that every GPU since Ampere has.

    One backward kernel computes dQ, dK and dV.

    Args:
      forward_config: tiles of the forward kernel; None is the default config.
      backward_config: tiles of the backward kernel; None is the default config.
      deterministic: whether the backward pass is bitwise reproducible.
      shared_memory: bytes per CTA that the backward kernel's default tiles may use.
    """
    backward_options: Any = {"config": backward_config, "shared_memory": shared_memory}
    tiles = forward_config, backward_config
    accumulator = DqAccumulator(
        zeros=functools.partial(dq.zeros, deterministic=deterministic, **backward_options),
        add=functools.partial(backward, **backward_options),
        finish=functools.partial(dq.finish, **backward_options),
        is_additive=not deterministic,
    )
    implementation = Implementation(
        name="mosaic_sm80",
        forward=functools.partial(forward, config=forward_config),
        backward=accumulator.backward,
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, **backward_options),
        split_backward=split_backward,
        dq_accumulator=accumulator,
        unsupported=functools.partial(unsupported_inputs, most=WIDEST_HEAD_DIM),
        backward_unsupported=functools.partial(_backward_unsupported, **backward_options),
        unsupported_functions=_unsupported_functions,
        unavailable=needs_ampere,
        deterministic=deterministic,
        deterministic_variant=None if deterministic else mosaic_sm80(*tiles, True, shared_memory),
    )
    return with_padding(implementation, multiples_of_16, multiples_of_16)


def _backward_unsupported(
    inputs: AttentionInputs, *, config: BackwardConfig | None, shared_memory: int
) -> str | None:
    """Why the backward kernel does not support these arrays, or None if it does."""
    reason = unsupported_inputs(inputs, most=WIDEST_HEAD_DIM)
    dims = multiples_of_16(inputs.head_dim, inputs.value_dim)
    smallest = config or configs.backward_config(*dims, shared_memory)
    needed = smallest.shared_memory(*dims)
    if reason is None and needed > shared_memory:
        return (
            f"the head dims of keys and values are {dims}, for which the backward kernel needs "
            f"{needed} bytes of shared memory per CTA; this GPU has {shared_memory}"
        )
    return reason


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    """Why the kernels cannot run the spec's ``score_mod`` or ``mask_mod``, or None."""
    del inputs
    return user_functions.unsupported(spec, backward=backward)


def needs_ampere(platform: str, compute_capability: float | None) -> str | None:
    """Why kernels for Ampere cannot run there, or None if they can."""
    if platform != "gpu" or compute_capability is None or compute_capability < 8.0:
        what = "compute capability 8.0 (Ampere) or newer"
        return needs_gpu(what, platform, compute_capability)
    if compute_capability < 9.0 and compiles_for() >= (9, 0):
        return (
            "the program is compiled for a GPU that this process does not have, and Mosaic GPU "
            "then compiles for compute capability 9.0"
        )
    return None


MOSAIC_SM80 = mosaic_sm80()
_SMALL = mosaic_sm80(shared_memory=SMALL_SHARED_MEMORY)


def fitting_sm80(compute_capability: float | None) -> Implementation:
    """The kernels, in tiles that fit in the GPU's shared memory."""
    if compute_capability is None or shared_memory_of(compute_capability) == SHARED_MEMORY:
        return MOSAIC_SM80
    return _SMALL
