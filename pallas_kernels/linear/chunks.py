"""Chunks of 64 tokens, and the vectors that kernels need of each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Tokens of a chunk, and the head dim of keys and values that the kernels have.
CHUNK = 64
HEAD_DIM = 128
# The gradient of beta is a sum divided by beta^2. With 0 as 2^-14 it is right there, too; float16
# still has 10 bits of such rows of A, and the output changes by less than bfloat16 shows.
SMALLEST_BETA = 2.0**-14
# exp of it is 0 in float32. Sums of a chunk's log decays keep three digits after the point.
LEAST_LOG_DECAY = -104.0
# Where the vectors are in an array ``[B, N, chunks, VECTORS * 64]``: the decay from the chunk's
# start to a token (0 if a document begins in between), the decay from a token to the chunk's end
# (the same), log2 of the decay from the chunk's start, the index in the chunk of the first token
# of a token's document, and beta.
INTO, OUT, LOG, START, BETA = (CHUNK * i for i in range(5))
VECTORS = 5


class Tokens(NamedTuple):
    """What documents change.

    Attributes:
      begins: bool ``[B, T]``, whether the state is reset before the token.
      valid: bool ``[B, T]``; other tokens are padding, which leaves the state unchanged.
    """

    begins: jax.Array
    valid: jax.Array


def cut(x: jax.Array) -> jax.Array:
    """``[B, N, chunks, 64]`` of ``[B, T, N]``; T is a multiple of 64."""
    batch, length, heads = x.shape
    return x.reshape(batch, length // CHUNK, CHUNK, heads).transpose(0, 3, 1, 2)


def merged(x: jax.Array) -> jax.Array:
    """Undoes :func:`cut`."""
    batch, heads, chunks, _ = x.shape
    return x.transpose(0, 2, 3, 1).reshape(batch, chunks * CHUNK, heads)


def cumulative_sum(x: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Of float32 ``[..., 64]``, along a chunk, by a product with ones.

    XLA would fuse ``jnp.cumsum`` with what reads it, and sum 64 numbers for every element.
    """
    ones = jnp.ones((CHUNK, CHUNK), jnp.float32)
    ones = jnp.tril(ones) if reverse else jnp.triu(ones)
    return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST)


def chunk_vectors(log_decay: jax.Array, beta: jax.Array, tokens: Tokens | None = None) -> jax.Array:
    """The vectors of every chunk and head, float32 ``[B, N, chunks, VECTORS * 64]``.

    Args:
      log_decay: ``[B, T, N]``.
      beta: ``[B, T, N]``.
      tokens: documents and padding; None without them.
    """
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
    beta = jnp.maximum(beta.astype(jnp.float32), SMALLEST_BETA)
    if tokens is not None:
        valid = tokens.valid[..., None]
        log_decay, beta = jnp.where(valid, log_decay, 0), jnp.where(valid, beta, 0)
    total = cumulative_sum(cut(log_decay))
    continues: Any = True
    is_last: Any = True
    start = jnp.zeros_like(total)
    if tokens is not None:
        begins = cut(tokens.begins[..., None]).astype(jnp.int32)
        index = jnp.arange(CHUNK, dtype=jnp.int32)
        first = lax.cummax(jnp.where(begins > 0, index, 0), axis=3)
        start = jnp.broadcast_to(first, total.shape).astype(jnp.float32)
        document = jnp.cumsum(begins, -1)
        continues, is_last = document == 0, document == document[..., -1:]
    into = jnp.where(continues, jnp.exp(total), 0)
    out = jnp.where(is_last, jnp.exp(total[..., -1:] - total), 0)
    return jnp.concatenate([into, out, total * math.log2(math.e), start, cut(beta)], -1)
