"""Chunks of 64 tokens, and the vectors that kernels need of each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Tokens of a chunk, and the head dim of keys and values that the kernels have.
CHUNK = 64
HEAD_DIM = 128
# Smaller betas are raised to it: the gradient of beta is a sum divided by beta^2, which must be
# right for a beta of 0, too. Float16 still has 10 bits for such rows of A, and the output changes
# by less than bfloat16 resolves.
SMALLEST_BETA = 2.0**-14
# exp of it is 0 in float32.
LEAST_LOG_DECAY = -104.0
# LogDecays.coarse has multiples of it: 64 of the least log decays add up to less than 2^24 steps,
# so their sum is exact in float32.
_STEP = 2.0**-11
# log2 of a decay that leaves nothing of a state in float32, whose least number is 2^-149.
_FORGOTTEN = -192.0
# Where the vectors are in an array ``[B, N, chunks, VECTORS * 64]``: the decay from the chunk's
# start to a token (0 if a document begins in between), the decay from a token to the chunk's end
# (0 in the same case), log2 of the decay from the chunk's start, the index in the chunk of the
# first token of a token's document, and beta.
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


def cumulative_sum(x: jax.Array, *, axis: int = -1, reverse: bool = False) -> jax.Array:
    """Of float32, along an axis with the 64 tokens of a chunk, by a product with ones.

    XLA would fuse ``jnp.cumsum`` with what reads it, and sum 64 numbers for every element. The ones
    are a constant, which no launch computes.
    """
    ones = np.ones((CHUNK, CHUNK), np.float32)
    ones = np.tril(ones) if reverse else np.triu(ones)
    sums = jnp.tensordot(x, ones, (axis, 0), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(sums, -1, axis)


class LogDecays(NamedTuple):
    """Log decays from a chunk's start to each of its tokens, in two parts, float32.

    The difference of two is the log decay from token to token. Of single sums it would lose the
    digits of a weak decay behind strong ones: 1e-4 of it if they sum up to thousands.

    Attributes:
      coarse: sums of log decays rounded to multiples of 2^-11: exact, and so are differences.
      fine: sums of what rounding left.
    """

    coarse: jax.Array
    fine: jax.Array

    def at(self, *index: Any) -> LogDecays:
        """Those of some tokens, or with further axes."""
        return LogDecays(self.coarse[index], self.fine[index])

    def since(self, earlier: LogDecays) -> jax.Array:
        """The log decays from the tokens of ``earlier`` to these, with broadcasting."""
        return (self.coarse - earlier.coarse) + (self.fine - earlier.fine)

    def total(self) -> jax.Array:
        """The log decays from the chunk's start."""
        return self.coarse + self.fine


class Decays(NamedTuple):
    """Decays within chunks, ``[..., 64, C]``.

    Attributes:
      logs: from a chunk's start, across document boundaries.
      into: from a chunk's start; 0 where a document begins in between.
      out: to a chunk's end; 0 where a document begins in between.
      document: int32 ``[..., 64]``, how many documents begin in the chunk up to a token; None
        without documents.
    """

    logs: LogDecays
    into: jax.Array
    out: jax.Array
    document: jax.Array | None


def chunk_decays(log_decay: jax.Array, begins: jax.Array | None = None) -> Decays:
    """The decays within chunks.

    Args:
      log_decay: ``[..., 64, C]``, 0 in padding: one per key channel, or one in all.
      begins: bool ``[..., 64]``, whether a document begins; None without documents.
    """
    # Below the least log decay neither the decay nor the gradient changes.
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
    coarse = lax.stop_gradient(jnp.round(log_decay / _STEP) * _STEP)
    logs = LogDecays(*cumulative_sum(jnp.stack([coarse, log_decay - coarse]), axis=-2))
    end = logs.at(..., slice(-1, None), slice(None))
    into, out = jnp.exp(logs.total()), jnp.exp(end.since(logs))
    if begins is None:
        return Decays(logs, into, out, None)
    document = jnp.cumsum(begins.astype(jnp.int32), -1)
    first, last = document == 0, document == document[..., -1:]
    into, out = (jnp.where(x[..., None], y, 0) for x, y in ((first, into), (last, out)))
    return Decays(logs, into, out, document)


def chunk_vectors(log_decay: jax.Array, beta: jax.Array, tokens: Tokens | None = None) -> jax.Array:
    """The vectors of every chunk and head, float32 ``[B, N, chunks, VECTORS * 64]``.

    Args:
      log_decay: ``[B, T, N]``, 0 in padding.
      beta: ``[B, T, N]``.
      tokens: documents and padding; None without them.
    """
    beta = jnp.maximum(beta.astype(jnp.float32), SMALLEST_BETA)
    begins = None
    if tokens is not None:
        beta = jnp.where(tokens.valid[..., None], beta, 0)
        begins = cut(tokens.begins[..., None])
    decays = chunk_decays(cut(log_decay)[..., None], begins)
    into, out, log = (x[..., 0] for x in (decays.into, decays.out, decays.logs.total()))
    start = jnp.zeros_like(log)
    if begins is not None:
        index = jnp.arange(CHUNK, dtype=jnp.int32)
        first = lax.cummax(jnp.where(begins, index, 0), axis=3)
        start = jnp.broadcast_to(first, log.shape).astype(jnp.float32)
    vectors = [into, out, log * math.log2(math.e), start, cut(beta)]
    return jnp.concatenate(vectors, -1)


def decay_of(
    log_r: jax.Array, log_i: jax.Array, start_r: jax.Array, r: jax.Array, i: jax.Array, *,
    strict: bool = False,
) -> jax.Array:  # fmt: skip
    """The decay from token i to token r of a chunk, where i is r or precedes it; else 0.

    It is 0 across the beginning of a document, too. All arrays have the shape of the result.

    Args:
      log_r: LOG of token r.
      log_i: LOG of token i.
      start_r: START of token r.
      r: int32, the index of token r.
      i: int32, the index of token i.
      strict: 0 for i = r.
    """
    result = jnp.where((i < r) if strict else (i <= r), jnp.exp2(log_r - log_i), 0.0)
    return jnp.where(i.astype(jnp.float32) >= start_r, result, 0.0)


def reaching(vectors: jax.Array, least: int) -> tuple[jax.Array, jax.Array]:
    """Which chunks can affect the last state, and which ones the gradient of the first state.

    Others have no effect: a state decays to nothing between them and the last chunk, or between the
    first chunk and them, or a document begins in between.

    Args:
      vectors: :func:`chunk_vectors`.
      least: minimum number of chunks to include; all, if there are fewer.

    Returns:
      int32 ``[B, N]``: the first chunk that reaches the end, and the last one that the beginning
      reaches.
    """
    chunks, end = vectors.shape[2], CHUNK - 1
    least = min(least, chunks)
    # LOG ignores document boundaries; across one nothing is left.
    log = jnp.where(vectors[..., INTO + end] == 0, _FORGOTTEN, vectors[..., LOG + end])
    index = jnp.arange(chunks, dtype=jnp.int32)
    to_end, from_begin = (lax.cumsum(log, axis=2, reverse=x) <= _FORGOTTEN for x in (True, False))
    # The chunk that makes the decay too strong is needed, too. A reduction is the last operation:
    # what follows one takes a launch of its own.
    first = jnp.where(to_end, index, 0)[..., : chunks - least + 1].max(2)
    return first, jnp.where(from_begin, index, chunks - 1)[..., least - 1 :].min(2)
