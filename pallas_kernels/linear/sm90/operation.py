"""The gated delta rule on one Hopper GPU: forward, affine map and gradients.

States are ``[B, N, 128 keys, 128 values]`` float32 here; lengths are multiples of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.backend import needs_gpu
from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import CHUNK, chunk_vectors
from pallas_kernels.linear.families import (
    affine_map,
    gate_gradients,
    sum_groups,
    transposed,
    unmarked,
    unsupported,
    with_identity,
    zeros_in_padding,
)
from pallas_kernels.linear.sm90 import gradients as chunk_gradients
from pallas_kernels.linear.sm90 import inverses
from pallas_kernels.linear.sm90.gradients import GradientInputs
from pallas_kernels.linear.sm90.scan import Mode, ScanInputs, scan
from pallas_kernels.linear.sm90.states import ReverseInputs, first_gradient, states


class Prepared(NamedTuple):
    """What all passes need of every chunk.

    Attributes:
      vectors: float32 ``[B, N, chunks, VECTORS * 64]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
    """

    vectors: jax.Array
    x: jax.Array


def prepare(inputs: Inputs) -> Prepared:
    """The vectors and inverses of all chunks."""
    vectors = chunk_vectors(inputs.log_decay, inputs.beta, inputs.tokens)
    return Prepared(vectors, inverses.inverses(inputs.k, vectors))


def forward(
    inputs: Inputs, prepared: Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The output, bfloat16 ``[B, T, N, 128]``, and the state after the last token."""
    given = ScanInputs(
        inputs.q, inputs.k, inputs.v, prepared.x, prepared.vectors, transposed(start)
    )
    o, _, last = scan(given, scale, Mode.OUTPUT)
    assert o is not None
    return zeros_in_padding(inputs, o), transposed(last)


def affine(inputs: Inputs, prepared: Prepared, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(M, last): with ``start + S`` before these tokens, the state after them is ``M S + last``."""
    start = with_identity(start)
    given = ScanInputs(None, inputs.k, inputs.v, prepared.x, prepared.vectors, start)
    _, _, last = scan(given, 0.0, Mode.LAST)
    return affine_map(last)


def first_state_gradient(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array, scale: float
) -> jax.Array:
    """The gradient of the first state alone."""
    return transposed(first_gradient(_reverse_inputs(inputs, prepared, do, last), scale))


def backward(
    inputs: Inputs,
    prepared: Prepared,
    start: jax.Array,
    do: jax.Array,
    last: jax.Array,
    scale: float,
) -> Gradients:
    """All gradients.

    Args:
      inputs: of the forward pass.
      prepared: from it.
      start: the first state.
      do: gradient of the output, bfloat16; 0 in padding.
      last: gradient of the last state.
      scale: of q k.
    """
    scans = backward_inputs(inputs, prepared, start, do, last)
    u, saved, dv, dsaved, first = states(*scans, scale)
    dq, dk, sums = chunk_gradients.gradients(
        GradientInputs(inputs.q, inputs.k, do, dv, u, saved, dsaved, prepared.vectors), scale
    )
    log_decay, beta = gate_gradients(inputs, prepared.vectors, sums)
    key_heads = inputs.k.shape[2]
    return Gradients(
        sum_groups(dq, key_heads),
        sum_groups(dk, key_heads),
        dv,
        log_decay,
        beta,
        transposed(first),
    )


def backward_inputs(
    inputs: Inputs, prepared: Prepared, start: jax.Array, do: jax.Array, last: jax.Array
) -> tuple[ScanInputs, ReverseInputs]:
    """What the backward pass's two scans read; arguments as of :func:`backward`."""
    start = transposed(start)
    given = ScanInputs(None, inputs.k, inputs.v, prepared.x, prepared.vectors, start)
    return given, _reverse_inputs(inputs, prepared, do, last)


def _reverse_inputs(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array
) -> ReverseInputs:
    return ReverseInputs(inputs.q, inputs.k, do, prepared.x, prepared.vectors, transposed(last))


def _unavailable(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


MOSAIC_SM90 = Implementation(
    name="mosaic_sm90",
    prepare=unmarked(prepare),
    forward=unmarked(forward),
    affine=unmarked(affine),
    keep=lambda prepared: prepared,
    restore=lambda inputs, kept: kept,
    first_gradient=unmarked(first_state_gradient),
    backward=unmarked(backward),
    multiple=CHUNK,
    unsupported=unsupported,
    unavailable=_unavailable,
)
