"""The gated delta rule on one Hopper GPU: forward, affine map and gradients.

States are ``[B, N, 128 keys, 128 values]`` float32 here; lengths are multiples of 64. Other head
dims are padded and split to these: :mod:`pallas_kernels.linear.head_dims`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import needs_gpu
from pallas_kernels.device import num_sms
from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import CHUNK, chunk_vectors, reaching
from pallas_kernels.linear.families import (
    gradients_of,
    transposed,
    unmarked,
    unsupported,
    with_identity,
    zeros_in_padding,
)
from pallas_kernels.linear.head_dims import with_head_dims
from pallas_kernels.linear.kernel_parts import PARTS, Form, Mode
from pallas_kernels.linear.sm90 import channel_gradients, inverses
from pallas_kernels.linear.sm90 import gradients as chunk_gradients
from pallas_kernels.linear.sm90.ahead import forward_with_inverses, spare_clusters
from pallas_kernels.linear.sm90.channel_operands import ChannelOperands, channel_operands
from pallas_kernels.linear.sm90.composition import composed
from pallas_kernels.linear.sm90.parts import parts_of
from pallas_kernels.linear.sm90.pipeline import LEAST_STEPS
from pallas_kernels.linear.sm90.scan import ScanInputs, scan
from pallas_kernels.linear.sm90.states import ReverseInputs, first_gradient, states


def form_of(inputs: Inputs) -> Form:
    """AHEAD, the shortest scan, where a chunk's X and P have the time that the scan has for it.

    A scan's CTA has a chunk in 1.1 us, in which a warpgroup has a third of X and P: there must be
    as many SMs for them as for scans. APART computes X in a launch of its own, P in the second
    warpgroup of each scan: fewest bytes.
    """
    chains = inputs.v.shape[0] * inputs.v.shape[2]
    return Form.AHEAD if spare_clusters(chains) >= chains else Form.APART


class Prepared(NamedTuple):
    """What all passes need of every chunk.

    Attributes:
      vectors: float32 ``[B, N, chunks, VECTORS * 64]``; with a decay per key channel those of log
        decays of 0.
      x: X beta, bfloat16 ``[B, N, T, 64]``; None where the forward scan computes it, and with a
        decay per key channel.
      channels: what scans read with a decay per key channel; None with one per head.
    """

    vectors: jax.Array
    x: jax.Array | None
    channels: ChannelOperands | None = None


def prepare(inputs: Inputs, form: Form | None = None) -> Prepared:
    """The vectors of all chunks, and in the form APART the inverses; None is the faster form.

    A decay per key channel has one form.
    """
    if inputs.log_decay.ndim > inputs.beta.ndim:
        vectors = chunk_vectors(jnp.zeros_like(inputs.beta), inputs.beta, inputs.tokens)
        log_decay = inputs.log_decay.astype(jnp.float32)
        operands = channel_operands(inputs.q, inputs.k, log_decay, vectors)
        return Prepared(vectors, None, operands)
    vectors = chunk_vectors(inputs.log_decay, inputs.beta, inputs.tokens)
    form = form_of(inputs) if form is None else form
    return Prepared(vectors, None if form is Form.AHEAD else inverses.inverses(inputs.k, vectors))


def forward(
    inputs: Inputs, prepared: Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, Prepared | None]:
    """The output, bfloat16 ``[B, T, N, 128]``, the state after the last token, and all inverses.

    With a decay per key channel nothing is kept: the operands are four times the inputs.
    """
    vectors, x, channels = prepared
    given = _scan_inputs(inputs, prepared, transposed(start), Mode.OUTPUT)
    if channels is None and x is None:
        o, last, x, _ = forward_with_inverses(given, scale)
    else:
        o, _, last = scan(given, scale, Mode.OUTPUT)
    assert o is not None
    kept = Prepared(vectors, x) if channels is None else None
    return zeros_in_padding(inputs, o), transposed(last), kept


def restore(inputs: Inputs, kept: Prepared | None) -> Prepared:
    """What the forward pass kept, or computes again."""
    return prepare(inputs) if kept is None else kept


def affine(inputs: Inputs, prepared: Prepared, start: jax.Array) -> jax.Array:
    """The rows of the map, those of the last state and of M, transposed; no bytes are moved."""
    vectors, x, channels = prepared
    first, _ = _reaching(inputs, vectors)
    if channels is None and x is None:
        prepared = prepared._replace(x=inverses.inverses(inputs.k, vectors, first))
    given = _scan_inputs(inputs, prepared, with_identity(start), Mode.LAST)._replace(first=first)
    _, _, last = scan(given, 0.0, Mode.LAST)
    return last


def mapped(inputs: Inputs, start: jax.Array) -> tuple[Prepared, jax.Array]:
    """:func:`prepare` and :func:`affine`.

    Inverses that the map does not need are computed last: while the devices exchange their maps.
    """
    chunks = inputs.v.shape[1] // CHUNK
    has_channels = inputs.log_decay.ndim > inputs.beta.ndim
    if has_channels or form_of(inputs) is Form.AHEAD or chunks <= LEAST_STEPS:
        prepared = prepare(inputs)
        return prepared, affine(inputs, prepared, start)
    vectors = chunk_vectors(inputs.log_decay, inputs.beta, inputs.tokens)
    first, _ = _reaching(inputs, vectors)
    x = inverses.inverses(inputs.k, vectors, first)
    rows = affine(inputs, Prepared(vectors, x), start)
    # The map's scan has read X before it changes: XLA would copy it.
    x, rows = lax.optimization_barrier((x, rows))
    return Prepared(vectors, inverses.inverses(inputs.k, vectors, first, x)), rows


def parts(inputs: Inputs, has_maps: bool) -> int:
    """:func:`pallas_kernels.linear.sm90.parts.parts_of`, of these inputs on this GPU."""
    batch, length, heads, _ = inputs.v.shape
    return parts_of(
        batch * heads * PARTS,
        length // CHUNK,
        num_sms(),
        channels=inputs.log_decay.ndim > inputs.beta.ndim,
        has_maps=has_maps,
    )


def first_state_gradient(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array, scale: float
) -> jax.Array:
    """The gradient of the first state alone."""
    _, end = _reaching(inputs, prepared.vectors)
    given = _reverse_inputs(inputs, prepared, do, last)._replace(end=end)
    return transposed(first_gradient(given, scale))


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
    if prepared.channels is not None:
        inputs = inputs._replace(log_decay=inputs.log_decay.astype(jnp.float32))
        return channel_gradients.gradients_of(inputs, prepared.vectors, do, scans, scale)
    kernel = chunk_gradients.gradients
    return gradients_of(kernel, inputs, prepared.vectors, do, scans, scale)


def backward_inputs(
    inputs: Inputs, prepared: Prepared, start: jax.Array, do: jax.Array, last: jax.Array
) -> tuple[ScanInputs, ReverseInputs]:
    """What the backward pass's two scans read; arguments as of :func:`backward`."""
    given = _scan_inputs(inputs, prepared, transposed(start), Mode.STATES)
    return given, _reverse_inputs(inputs, prepared, do, last)


def compose(
    rows: jax.Array,
    order: jax.typing.ArrayLike,
    wanted: tuple[int, int],
    start: jax.Array | None = None,
) -> jax.Array:
    """:func:`pallas_kernels.linear.sm90.composition.composed`, on any devices' arrays."""

    def run(rows: jax.Array, order: jax.Array, start: jax.Array | None) -> jax.Array:
        return composed(rows, order, wanted, start)

    return unmarked(run)(rows, jnp.asarray(order), start)


def _scan_inputs(inputs: Inputs, prepared: Prepared, start: jax.Array, mode: Mode) -> ScanInputs:
    vectors, x, channels = prepared
    outputs = mode is Mode.OUTPUT
    if channels is None:
        q = inputs.q if outputs else None
        return ScanInputs(q, inputs.k, inputs.v, x, vectors, start)
    q, p = (channels.q_into, channels.p) if outputs else (None, None)
    return ScanInputs(
        q, channels.k_into, inputs.v, channels.x, None, start, p,
        k_out=channels.k_out, through=channels.through,
    )  # fmt: skip


def _reaching(inputs: Inputs, vectors: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """:func:`reaching`, or None for all chunks where scans of a computed number are not shorter.

    With a decay per key channel only documents end a state: chunks mix the channels, so that a
    state decays by no more than the slowest one of each token does.
    """
    has_channels = inputs.log_decay.ndim > inputs.beta.ndim
    if vectors.shape[2] <= LEAST_STEPS or (has_channels and inputs.tokens is None):
        return None, None
    return reaching(vectors, LEAST_STEPS)


def _reverse_inputs(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array
) -> ReverseInputs:
    vectors, x, channels = prepared
    last = transposed(last)
    if channels is None:
        return ReverseInputs(inputs.q, inputs.k, do, x, vectors, last)
    return ReverseInputs(
        channels.q_into, channels.k_into, do, channels.x, None, last,
        p=channels.p, k_out=channels.k_out, through=channels.through,
    )  # fmt: skip


def _unavailable(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


MOSAIC_SM90 = with_head_dims(
    Implementation(
        name="mosaic_sm90",
        prepare=unmarked(prepare),
        forward=unmarked(forward),
        mapped=unmarked(mapped),
        restore=unmarked(restore),
        first_gradient=unmarked(first_state_gradient),
        backward=unmarked(backward),
        multiple=CHUNK,
        parts=parts,
        compose=compose,
        meanwhile="x",
        unsupported=unsupported,
        unavailable=_unavailable,
    )
)
