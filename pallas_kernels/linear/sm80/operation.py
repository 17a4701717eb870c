"""The gated delta rule on one GPU since Ampere: forward, affine map and gradients.

States are ``[B, N, 128 keys, 128 values]`` float32 here; lengths are multiples of 64. Other head
dims are padded and split to these: :mod:`pallas_kernels.linear.head_dims`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import CHUNK, chunk_vectors
from pallas_kernels.linear.families import (
    gradients_of,
    transposed,
    unmarked,
    unsupported,
    unsupported_decay,
    with_identity,
    zeros_in_padding,
)
from pallas_kernels.linear.head_dims import with_head_dims
from pallas_kernels.linear.kernel_parts import Form, Mode
from pallas_kernels.linear.sm80 import gradients as chunk_gradients
from pallas_kernels.linear.sm80.ahead import forward_with_chunks, spare_ctas
from pallas_kernels.linear.sm80.prepared import Chunks, chunks_of
from pallas_kernels.linear.sm80.scan import ScanInputs, scan
from pallas_kernels.linear.sm80.states import ReverseInputs, first_gradient, states
from pallas_kernels.mosaic.sm80.configs import SHARED_MEMORY, shared_memory_of
from pallas_kernels.mosaic.sm80.implementation import needs_ampere


class Prepared(NamedTuple):
    """What all passes need of every chunk.

    Attributes:
      vectors: float32 ``[B, N, chunks, VECTORS * 64]``.
      chunks: P and X beta; None where the forward scan computes them.
    """

    vectors: jax.Array
    chunks: Chunks | None


def form_of(inputs: Inputs) -> Form:
    """AHEAD where as many SMs are without a scan as there are heads.

    Their two warpgroups then have two chunks in the time that scans have for one.
    """
    chains = inputs.v.shape[0] * inputs.v.shape[2]
    return Form.AHEAD if spare_ctas(chains) >= chains else Form.APART


def prepare(inputs: Inputs, form: Form | None = None) -> Prepared:
    """The vectors of all chunks, and in the form APART P and X beta; None is the faster form."""
    vectors = chunk_vectors(inputs.log_decay, inputs.beta, inputs.tokens)
    form = form_of(inputs) if form is None else form
    chunks = None if form is Form.AHEAD else chunks_of(inputs.q, inputs.k, vectors)
    return Prepared(vectors, chunks)


def forward(
    inputs: Inputs, prepared: Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, Prepared]:
    """The output, bfloat16 ``[B, T, N, 128]``, the state after the last token, and all chunks."""
    vectors, chunks = prepared
    p, x = (None, None) if chunks is None else chunks
    given = ScanInputs(inputs.q, inputs.k, inputs.v, p, x, vectors, transposed(start))
    if chunks is None:
        o, last, chunks = forward_with_chunks(given, scale)
    else:
        o, _, last = scan(given, scale, Mode.OUTPUT)
    assert o is not None
    return zeros_in_padding(inputs, o), transposed(last), Prepared(vectors, chunks)


def affine(inputs: Inputs, prepared: Prepared, start: jax.Array) -> jax.Array:
    """The rows of the map, those of the last state and of M, transposed; no bytes are moved."""
    vectors, chunks = prepared
    chunks = chunks_of(inputs.q, inputs.k, vectors) if chunks is None else chunks
    given = _scan_inputs(inputs, Prepared(vectors, chunks), with_identity(start))
    _, _, last = scan(given, 0.0, Mode.LAST)
    return last


def mapped(inputs: Inputs, start: jax.Array) -> tuple[Prepared, jax.Array]:
    """:func:`prepare` and :func:`affine`."""
    prepared = prepare(inputs)
    return prepared, affine(inputs, prepared, start)


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
    scans = states(*backward_inputs(inputs, prepared, start, do, last), scale)
    kernel = chunk_gradients.gradients
    return gradients_of(kernel, inputs, prepared.vectors, do, scans, scale)


def backward_inputs(
    inputs: Inputs, prepared: Prepared, start: jax.Array, do: jax.Array, last: jax.Array
) -> tuple[ScanInputs, ReverseInputs]:
    """What the backward pass's two scans read; arguments as of :func:`backward`."""
    given = _scan_inputs(inputs, prepared, transposed(start))
    return given, _reverse_inputs(inputs, prepared, do, last)


def _scan_inputs(inputs: Inputs, prepared: Prepared, start: jax.Array) -> ScanInputs:
    """Of a scan without outputs."""
    assert prepared.chunks is not None
    x, vectors = prepared.chunks.x, prepared.vectors
    return ScanInputs(None, inputs.k, inputs.v, None, x, vectors, start)


def _reverse_inputs(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array
) -> ReverseInputs:
    assert prepared.chunks is not None
    (p, x), vectors = prepared.chunks, prepared.vectors
    return ReverseInputs(inputs.q, inputs.k, do, p, x, vectors, transposed(last))


def _unavailable(platform: str, compute_capability: float | None) -> str | None:
    reason = needs_ampere(platform, compute_capability)
    if reason is None and shared_memory_of(compute_capability or 0.0) < SHARED_MEMORY:
        return (
            f"its scans need {SHARED_MEMORY} bytes of shared memory per CTA, more than GPUs of "
            f"compute capability {compute_capability} have"
        )
    return reason


MOSAIC_SM80 = with_head_dims(
    Implementation(
        name="mosaic_sm80",
        prepare=unmarked(prepare),
        forward=unmarked(forward),
        mapped=unmarked(mapped),
        restore=lambda inputs, kept: kept,
        first_gradient=unmarked(first_state_gradient),
        backward=unmarked(backward),
        multiple=CHUNK,
        unsupported=lambda inputs: unsupported(inputs) or unsupported_decay(inputs),
        unavailable=_unavailable,
    )
)
