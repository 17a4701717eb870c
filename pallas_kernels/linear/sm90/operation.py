"""The gated delta rule on one Hopper GPU: forward, affine map and gradients.

States are ``[B, N, 128 keys, 128 values]`` float32 here; lengths are multiples of 64.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import unvary, vary, varying_axes
from pallas_kernels.backend import needs_gpu
from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import (
    BETA,
    CHUNK,
    HEAD_DIM,
    INTO,
    chunk_vectors,
    cumulative_sum,
    cut,
    merged,
    reaching,
)
from pallas_kernels.linear.sm90 import gradients as chunk_gradients
from pallas_kernels.linear.sm90 import inverses
from pallas_kernels.linear.sm90.ahead import forward_with_inverses, spare_clusters
from pallas_kernels.linear.sm90.gradients import GradientInputs
from pallas_kernels.linear.sm90.pipeline import LEAST_STEPS
from pallas_kernels.linear.sm90.scan import Mode, ScanInputs, scan
from pallas_kernels.linear.sm90.states import ReverseInputs, first_gradient, states


class Form(enum.Enum):
    """How the forward pass computes X and P.

    APART: X in a launch of its own, P in the warpgroup beside each scan: fewest bytes.
    AHEAD: both in the scan's launch on SMs that have no scan: the shortest scan.
    """

    APART = "apart"
    AHEAD = "ahead"

    @classmethod
    def of(cls, inputs: Inputs) -> Form:
        """AHEAD where a chunk's X and P have the time that the scan has for it.

        A scan's CTA has a chunk in 1.1 us, in which a warpgroup has a third of X and P: there must
        be as many SMs for them as for scans.
        """
        chains = inputs.v.shape[0] * inputs.v.shape[2]
        return cls.AHEAD if spare_clusters(chains) >= chains else cls.APART


class Prepared(NamedTuple):
    """What all passes need of every chunk.

    Attributes:
      vectors: float32 ``[B, N, chunks, VECTORS * 64]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``; None where the forward scan computes it.
    """

    vectors: jax.Array
    x: jax.Array | None


def prepare(inputs: Inputs, form: Form | None = None) -> Prepared:
    """The vectors of all chunks, and in the form APART the inverses; None is the faster form."""
    vectors = chunk_vectors(inputs.log_decay, inputs.beta, inputs.tokens)
    form = Form.of(inputs) if form is None else form
    return Prepared(vectors, None if form is Form.AHEAD else inverses.inverses(inputs.k, vectors))


def forward(
    inputs: Inputs, prepared: Prepared, start: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, Prepared]:
    """The output, bfloat16 ``[B, T, N, 128]``, the state after the last token, and all inverses."""
    vectors, x = prepared
    given = ScanInputs(inputs.q, inputs.k, inputs.v, x, vectors, _transposed(start))
    if x is None:
        o, last, x, _ = forward_with_inverses(given, scale)
    else:
        o, _, last = scan(given, scale, Mode.OUTPUT)
    assert o is not None
    if inputs.tokens is not None:
        o = jnp.where(inputs.tokens.valid[..., None, None], o, 0)
    return o, _transposed(last), Prepared(vectors, x)


def affine(inputs: Inputs, prepared: Prepared, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(M, last): with ``start + S`` before these tokens, the state after them is ``M S + last``."""
    identity = jnp.broadcast_to(jnp.eye(HEAD_DIM, dtype=jnp.float32), start.shape)
    start = jnp.concatenate([_transposed(start), identity], axis=2)
    vectors, x = prepared
    first, _ = reaching(vectors, LEAST_STEPS)
    x = inverses.inverses(inputs.k, vectors, first) if x is None else x
    given = ScanInputs(None, inputs.k, inputs.v, x, vectors, start, first=first)
    _, _, last = scan(given, 0.0, Mode.LAST)
    return _transposed(last[:, :, HEAD_DIM:]), _transposed(last[:, :, :HEAD_DIM])


def first_state_gradient(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array, scale: float
) -> jax.Array:
    """The gradient of the first state alone."""
    _, end = reaching(prepared.vectors, LEAST_STEPS)
    given = _reverse_inputs(inputs, prepared, do, last)._replace(end=end)
    return _transposed(first_gradient(given, scale))


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
    log_decay, beta = _gate_gradients(inputs, prepared, sums)
    key_heads = inputs.k.shape[2]
    return Gradients(
        _sum_groups(dq, key_heads),
        _sum_groups(dk, key_heads),
        dv,
        log_decay,
        beta,
        _transposed(first),
    )


def backward_inputs(
    inputs: Inputs, prepared: Prepared, start: jax.Array, do: jax.Array, last: jax.Array
) -> tuple[ScanInputs, ReverseInputs]:
    """What the backward pass's two scans read; arguments as of :func:`backward`."""
    start = _transposed(start)
    given = ScanInputs(None, inputs.k, inputs.v, prepared.x, prepared.vectors, start)
    return given, _reverse_inputs(inputs, prepared, do, last)


def _gate_gradients(
    inputs: Inputs, prepared: Prepared, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of log_decay and beta from the kernel's row sums."""
    by_sum = [sums[..., i, :] for i in range(chunk_gradients.SUMS)]
    through = prepared.vectors[..., INTO + CHUNK - 1]
    of_end = by_sum[chunk_gradients.LATER_KEYS].sum(-1)
    of_end += through * by_sum[chunk_gradients.STATES].sum(-1)
    total = by_sum[chunk_gradients.QUERIES] + by_sum[chunk_gradients.KEYS]
    total = total.at[..., -1].add(of_end)
    log_decay = cumulative_sum(total, reverse=True)
    beta = prepared.vectors[..., BETA : BETA + CHUNK]
    updates = by_sum[chunk_gradients.UPDATES]
    if inputs.tokens is None:
        return merged(log_decay), merged(updates / (beta * beta))
    # No decay applies to padding, nor to a document's first token.
    valid, begins = (cut(x[..., None]) for x in (inputs.tokens.valid, inputs.tokens.begins))
    log_decay = jnp.where(valid & ~begins, log_decay, 0)
    beta = jnp.where(valid, updates / jnp.where(valid, beta * beta, 1), 0)
    return merged(log_decay), merged(beta)


def _reverse_inputs(
    inputs: Inputs, prepared: Prepared, do: jax.Array, last: jax.Array
) -> ReverseInputs:
    return ReverseInputs(inputs.q, inputs.k, do, prepared.x, prepared.vectors, _transposed(last))


def _transposed(state: jax.Array) -> jax.Array:
    return state.swapaxes(-1, -2)


def _sum_groups(x: jax.Array, key_heads: int) -> jax.Array:
    """Sums gradients of value heads over those of each key head."""
    batch, length, heads, dim = x.shape
    if heads == key_heads:
        return x
    grouped = x.reshape(batch, length, key_heads, heads // key_heads, dim)
    return grouped.astype(jnp.float32).sum(3).astype(x.dtype)


def _unavailable(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        return needs_gpu("compute capability 9.0 (Hopper)", platform, compute_capability)
    return None


def _unsupported(inputs: Inputs) -> str | None:
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    if dims != (HEAD_DIM, HEAD_DIM):
        return f"it has head dims {(HEAD_DIM, HEAD_DIM)}, query and value have {dims}"
    if inputs.q.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, query has dtype {inputs.q.dtype}"
    return None


def _unmarked[Results](function: Callable[..., Results]) -> Callable[..., Results]:
    """``function`` of arrays that vary over mesh axes.

    A kernel's loop may carry both what it has loaded, which would be marked, and what it computes
    by thread, which would not.
    """

    def run(*arrays: Any) -> Results:
        return vary(function(*jax.tree.map(unvary, arrays)), varying_axes(arrays))

    return run


MOSAIC_SM90 = Implementation(
    name="mosaic_sm90",
    prepare=_unmarked(prepare),
    forward=_unmarked(forward),
    affine=_unmarked(affine),
    restore=lambda inputs, kept: kept,
    first_gradient=_unmarked(first_state_gradient),
    backward=_unmarked(backward),
    multiple=CHUNK,
    unsupported=_unsupported,
    unavailable=_unavailable,
)
