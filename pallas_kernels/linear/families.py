"""What the kernel families compute around their kernels, in plain JAX.

States are ``[B, N, 128 keys, 128 values]`` float32 here; kernels have them transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import unvary, vary, varying_axes
from pallas_kernels.linear.backend import Gradients, Inputs
from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, cumulative_sum, cut, merged
from pallas_kernels.linear.kernel_parts import GradientInputs, GradientResults

# Row sums that the kernels of dQ and dK write, float32 ``[B, N, chunks, SUMS, 64]``: q dq;
# k (read - write); k write of the later chunks' part; S dS in 64 parts; u dv.
QUERIES, KEYS, LATER_KEYS, STATES, UPDATES = range(5)
SUMS = 5


def gradients_of(
    kernel: Callable[[GradientInputs, float], GradientResults],
    inputs: Inputs,
    vectors: jax.Array,
    do: jax.Array,
    scanned: tuple[jax.Array, ...],
    scale: float,
) -> Gradients:
    """All gradients.

    Args:
      kernel: that of dQ and dK.
      inputs: of the forward pass.
      vectors: of the chunks.
      do: gradient of the output, bfloat16; 0 in padding.
      scanned: U, the saved states, dV, the gradients of saved states, and that of the first state,
        transposed, from the backward pass's scans.
      scale: of q k.
    """
    u, saved, dv, dsaved, first = scanned
    dq, dk, sums = kernel(
        GradientInputs(inputs.q, inputs.k, do, dv, u, saved, dsaved, vectors), scale
    )
    dq, dk = (sum_groups(x, inputs.k.shape[2]) for x in (dq, dk))
    return Gradients(dq, dk, dv, *_gate_gradients(inputs, vectors, sums), transposed(first))


def _gate_gradients(
    inputs: Inputs, vectors: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of log_decay and beta from the kernel's row sums."""
    by_sum = [sums[..., i, :] for i in range(SUMS)]
    through = vectors[..., INTO + CHUNK - 1]
    # Of the chunk's end, which all of its tokens decay towards.
    of_end = (by_sum[LATER_KEYS] + through[..., None] * by_sum[STATES]).sum(-1, keepdims=True)
    log_decay = cumulative_sum(by_sum[QUERIES] + by_sum[KEYS], reverse=True) + of_end
    if inputs.tokens is not None:
        # No decay applies to padding, nor to a document's first token.
        valid, begins = (cut(x[..., None]) for x in (inputs.tokens.valid, inputs.tokens.begins))
        log_decay = jnp.where(valid & ~begins, log_decay, 0)
    return merged(log_decay), beta_gradient(vectors, by_sum[UPDATES])


def beta_gradient(vectors: jax.Array, updates: jax.Array) -> jax.Array:
    """The gradient of beta, from the sums of u dv; 0 in padding, whose beta is 0.

    Both have the diagonal of X beta as a factor, which is beta rounded: divided by the square of
    any other number, every sum would have twice its rounding error.
    """
    beta = vectors[..., BETA : BETA + CHUNK]
    # Not by a cast to bfloat16 and back, which XLA may leave out.
    beta = lax.reduce_precision(beta, exponent_bits=8, mantissa_bits=7)
    return merged(updates / jnp.where(beta == 0, 1, beta * beta))


def sum_groups(x: jax.Array, key_heads: int) -> jax.Array:
    """Sums the gradients of the value heads that share a key head."""
    batch, length, heads, dim = x.shape
    if heads == key_heads:
        return x
    grouped = x.reshape(batch, length, key_heads, heads // key_heads, dim)
    return grouped.astype(jnp.float32).sum(3).astype(x.dtype)


def zeros_in_padding(inputs: Inputs, o: jax.Array) -> jax.Array:
    """The output, zero in padding."""
    if inputs.tokens is None:
        return o
    return jnp.where(inputs.tokens.valid[..., None, None], o, 0)


def transposed(state: jax.Array) -> jax.Array:
    """A state as kernels have it, and back."""
    return state.swapaxes(-1, -2)


def with_identity(start: jax.Array) -> jax.Array:
    """The columns of a first state, transposed, then those whose last state is M, transposed."""
    identity = jnp.broadcast_to(jnp.eye(HEAD_DIM, dtype=jnp.float32), start.shape)
    return jnp.concatenate([transposed(start), identity], axis=2)


def unsupported(inputs: Inputs) -> str | None:
    """Why the kernels do not support these shapes and dtypes, or None if they do.

    With :func:`pallas_kernels.linear.head_dims.with_head_dims`.
    """
    if (keys := inputs.q.shape[-1]) > HEAD_DIM:
        return f"it has key head dims up to {HEAD_DIM}, query has {keys} (value: any)"
    if inputs.q.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, query has dtype {inputs.q.dtype}"
    return None


def unsupported_decay(inputs: Inputs) -> str | None:
    """Why kernels of one decay per head do not support the decays, or None if they do."""
    if inputs.log_decay.ndim > inputs.beta.ndim:
        return (
            f"it has one decay per token and value head, log_decay has shape "
            f"{inputs.log_decay.shape}, a decay per key channel"
        )
    return None


def unmarked[Results](function: Callable[..., Results]) -> Callable[..., Results]:
    """``function``, run on arrays that are not marked as varying over mesh axes; its results are.

    A kernel's loop may carry both what it has loaded, which would be marked, and what it computes
    by thread, which would not.
    """

    def run(*arrays: Any) -> Results:
        return vary(function(*jax.tree.map(unvary, arrays)), varying_axes(arrays))

    return run
