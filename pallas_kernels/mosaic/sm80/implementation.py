"""The sm80 kernels as an implementation of local attention."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.backend import Implementation, needs_gpu
from pallas_kernels.bounds import split_tiles
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.launch import compiles_for
from pallas_kernels.mosaic.score_inputs import unsupported_block_mask
from pallas_kernels.mosaic.sm80.backward import backward, backward_bounds
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm80.forward import forward, forward_bounds
from pallas_kernels.mosaic.user_functions import DTYPES, OPERATIONS
from pallas_kernels.spec import AttentionSpec, unsupported_functions

_WIDEST = 256


def mosaic_sm80(
    forward_config: ForwardConfig | None = None,
    backward_config: BackwardConfig | None = None,
    deterministic: bool = False,
) -> Implementation:
    """The Ampere kernels; one backward kernel computes dQ, dK and dV.

    Args:
      forward_config: tiles of the forward kernel; None is the default config.
      backward_config: tiles of the backward kernel; None is the default config.
      deterministic: whether the backward pass is bitwise reproducible.
    """
    return Implementation(
        name="mosaic_sm80",
        forward=functools.partial(forward, config=forward_config),
        backward=functools.partial(backward, config=backward_config, deterministic=deterministic),
        forward_bounds=functools.partial(forward_bounds, config=forward_config),
        backward_bounds=functools.partial(backward_bounds, config=backward_config),
        split_backward=split_tiles,
        unsupported=_unsupported,
        unsupported_functions=_unsupported_functions,
        unavailable=_needs_ampere,
        deterministic=deterministic,
        deterministic_variant=None
        if deterministic
        else mosaic_sm80(forward_config, backward_config, deterministic=True),
    )


def _unsupported(inputs: AttentionInputs) -> str | None:
    """Why the kernels do not support these arrays, or None."""
    q, k = inputs.query.q, inputs.kv.k
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"query is {q.dtype} and key {k.dtype}; it supports bfloat16 or float16"
    for what, dim in (("", inputs.head_dim), (" of values", inputs.value_dim)):
        if dim % 16 or dim > _WIDEST:
            return f"the head dim{what} is {dim}; it supports multiples of 16 up to {_WIDEST}"
    return unsupported_block_mask(inputs)


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    """Why the kernels cannot run the spec's ``score_mod`` or ``mask_mod``, or None."""
    del inputs
    return unsupported_functions(spec, backward=backward, operations=OPERATIONS, dtypes=DTYPES)


def _needs_ampere(platform: str, compute_capability: float | None) -> str | None:
    # The tiles need more shared memory than Ampere's and Ada's smaller GPUs have (8.6, 8.9: 99 KiB
    # per CTA). For newer GPUs Mosaic GPU emits copies that these kernels do not wait for.
    if platform != "gpu" or compute_capability not in (8.0, 8.7):
        what = "compute capability 8.0 or 8.7 (A100, Orin)"
        return needs_gpu(what, platform, compute_capability)
    if compiles_for() not in ((8, 0), (8, 7)):
        return (
            "the program is compiled for a GPU that this process does not have, and Mosaic GPU "
            "then compiles for compute capability 9.0; use None, 'triton' or 'xla'"
        )
    return None


MOSAIC_SM80 = mosaic_sm80()
