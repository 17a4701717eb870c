"""One device's cross entropy fused with the matrix product that makes the logits.

The slope of a loss with respect to its logits is known as soon as the loss is. So where gradients
are wanted the forward pass makes them too, chunk by chunk, with three matrix products: logits,
gradient of the hidden states, gradient of the kernel. The backward pass only multiplies them by the
cotangent of the sum. A backward pass of its own would have to compute all logits a second time.

A chunk of tokens has two sizes. The kernel's gradient, ``[D, V]`` in float32, is read and written
once a chunk, so a chunk should have many tokens. The float32 logits are needed only until their
slopes are made, in the dtype of the hidden states, so they are computed for a part of the chunk at
a time.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary, varying_axes

# Logits are computed for one such part of a chunk at a time.
_PARTS = 4

# Hidden states, targets and weights of some tokens.
Tokens = tuple[jax.Array, jax.Array, jax.Array]


class HeadLoss(NamedTuple):
    """Which loss of the logits, and how it is computed.

    Attributes:
      chunk_size: number of tokens in a chunk.
      vocab_axes: the mesh axes that the vocabulary is split over.
      z_loss: coefficient of the squared log-sum-exp.
      logits_soft_cap: logits become ``cap * tanh(logits / cap)``; None is no cap.
    """

    chunk_size: int
    vocab_axes: tuple[str, ...] = ()
    z_loss: float = 0.0
    logits_soft_cap: float | None = None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def fused_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: HeadLoss,
) -> jax.Array:
    """Sum of ``weights * (lse - logits[target] + z_loss * lse**2)``, inside a ``shard_map``.

    ``logits = cap(hidden kernel)``, ``lse = logsumexp(logits)`` over the whole vocabulary.

    Args:
      hidden: ``[tokens, D]`` of any floating dtype; it varies over ``options.vocab_axes``, so that
        its gradient is summed over them.
      kernel: ``[D, V / devices]`` of any floating dtype, this device's part of the vocabulary. It
        is multiplied in hidden's dtype. Its gradient is summed in float32.
      targets: int32 ``[tokens]``, ids of the whole vocabulary, not read where the weight is 0. The
        loss of an id that the vocabulary lacks is NaN.
      weights: float32 ``[tokens]``; they get no gradient.
      options: which loss.

    Returns:
      A float32 scalar: the sum over this device's tokens, the same along ``options.vocab_axes``.
    """
    size = _sizes(hidden.shape[0], options.chunk_size)[2]
    kernel = kernel.astype(hidden.dtype)

    def part(_: None, xs: Tokens) -> tuple[None, jax.Array]:
        hidden, targets, weights = xs
        return None, _losses(_matmul(hidden, kernel), targets, weights, options)[0]

    _, losses = lax.scan(part, None, _split((hidden, targets, weights), size))
    return jnp.sum(losses)


def _forward(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: HeadLoss,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The loss, and the gradients of hidden and kernel."""
    count, features = hidden.shape
    chunks, parts, size = _sizes(count, options.chunk_size)
    cast = kernel.astype(hidden.dtype)

    def part(d_logits: jax.Array, xs: tuple[jax.Array, Tokens]) -> tuple[jax.Array, jax.Array]:
        index, (hidden, targets, weights) = xs
        products = _matmul(hidden, cast)
        loss, lse, columns = _losses(products, targets, weights, options)
        slopes = _slopes(products, lse, columns, weights, options).astype(hidden.dtype)
        return lax.dynamic_update_slice_in_dim(d_logits, slopes, index * size, 0), loss

    # The compiler leaves out a product whose result is not used, like that of a frozen kernel.
    def chunk(
        sums: tuple[jax.Array, jax.Array], xs: Tokens
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        d_kernel, d_logits = sums
        d_logits, losses = lax.scan(part, d_logits, (jnp.arange(parts), xs))
        d_hidden = _matmul(d_logits, cast.T).astype(hidden.dtype)
        d_kernel = d_kernel + _matmul(xs[0].reshape(-1, features).T, d_logits)
        return (d_kernel, d_logits), (losses, d_hidden)

    tokens = jax.tree.map(
        lambda x: x.reshape(chunks, parts, *x.shape[1:]),
        _split((hidden, targets, weights), size, chunks * parts),
    )
    # Every chunk writes its slopes to the same memory: a fresh array would be filled with zeros.
    zeros = (
        jnp.zeros(kernel.shape, jnp.float32),
        jnp.zeros((parts * size, kernel.shape[1]), hidden.dtype),
    )
    zeros = vary(zeros, varying_axes(hidden, kernel, targets, weights))
    (d_kernel, _), (losses, d_hidden) = lax.scan(chunk, zeros, tokens)
    # The last residual, which holds nothing, has the dtype of the kernel.
    residuals = d_hidden.reshape(-1, features)[:count], d_kernel, jnp.zeros((0,), kernel.dtype)
    return jnp.sum(losses), residuals


def _backward(
    options: HeadLoss, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """The gradients of the forward pass times the cotangent of the sum."""
    del options
    d_hidden, d_kernel, of_kernel = residuals
    d_hidden = (cotangent * d_hidden.astype(jnp.float32)).astype(d_hidden.dtype)
    return d_hidden, (cotangent * d_kernel).astype(of_kernel.dtype), None, None


fused_loss.defvjp(_forward, _backward)


def _sizes(tokens: int, chunk_size: int) -> tuple[int, int, int]:
    """``(chunks, parts of a chunk, tokens of a part)``, of nearly equal parts.

    All parts together hold at least ``tokens``; a chunk has no more than ``chunk_size``.
    """
    most = max(1, chunk_size // _PARTS)
    chunks = max(1, -(-tokens // (chunk_size // most * most)))
    in_chunk = -(-tokens // chunks)
    parts = max(1, -(-in_chunk // most))
    return chunks, parts, -(-in_chunk // parts)


def _split(tokens: Tokens, size: int, parts: int | None = None) -> Tokens:
    """Each array ``[tokens, ...]`` as ``[parts, size, ...]``; None is as few parts as hold them.

    Zeros fill the last part; their weight is 0 too, so they add nothing.
    """
    count = -(-tokens[0].shape[0] // size) if parts is None else parts

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, size, *x.shape[1:])

    hidden, targets, weights = tokens
    return split(hidden), split(targets), split(weights)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a b`` in float32, of factors of one dtype, which tensor cores multiply."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _cap(products: jax.Array, options: HeadLoss) -> jax.Array:
    """The logits, of products of hidden states and kernel."""
    cap = options.logits_soft_cap
    return products if cap is None else cap * jnp.tanh(products / cap)


def _losses(
    products: jax.Array, targets: jax.Array, weights: jax.Array, options: HeadLoss
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sum of some tokens' losses, and what their slopes are made of.

    Args:
      products: float32 ``[size, V / devices]``.
      targets: int32 ``[size]``.
      weights: float32 ``[size]``.
      options: which loss.

    Returns:
      ``(sum, lse, index)``: lse float32 ``[size]``; index int32 ``[size]``, the targets as columns
      of ``products``, or beyond them if they are on other devices.
    """
    here, vocab = products.shape[-1], options.vocab_axes
    counts = weights != 0
    index = jnp.where(counts, targets, 0)
    if vocab:
        index = index - here * lax.axis_index(vocab)
    largest, total = _max_and_sum(_cap(products, options))
    present = (index >= 0) & (index < here)
    columns = jnp.clip(index, 0, here - 1)[:, None]
    picked = _cap(jnp.take_along_axis(products, columns, axis=-1)[:, 0], options)
    picked = jnp.where(present, picked, 0.0)
    found = present.astype(jnp.float32)
    if vocab:
        # The sum of both is the same for any constant, so this one needs no derivative.
        whole = lax.pmax(lax.stop_gradient(largest), vocab)
        total = total * jnp.exp(largest - whole)
        total, picked, found = lax.psum(jnp.stack([total, picked, found]), vocab)
        largest = whole
    lse = largest + jnp.log(total)
    loss = lse - picked
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    # No device has a target that the vocabulary lacks: its count is 0.
    loss = jnp.where(found == 1, loss, jnp.nan)
    return jnp.sum(jnp.where(counts, weights * loss, 0.0)), lse, index


def _slopes(
    products: jax.Array, lse: jax.Array, index: jax.Array, weights: jax.Array, options: HeadLoss
) -> jax.Array:
    """The gradient of :func:`_losses`' sum with respect to ``products``, of the same shape.

    ``weights * ((1 + 2 z_loss lse) softmax(logits) - onehot(target)) * d logits / d products``.
    """
    logits = _cap(products, options)
    scale = weights * (1 + 2 * options.z_loss * lse) if options.z_loss else weights
    is_target = lax.broadcasted_iota(jnp.int32, products.shape, 1) == index[:, None]
    slopes = scale[:, None] * jnp.exp(logits - lse[:, None])
    slopes = slopes - jnp.where(is_target, weights[:, None], 0.0)
    if options.logits_soft_cap is not None:
        slopes = slopes * (1 - (logits / options.logits_soft_cap) ** 2)
    return slopes


@jax.custom_jvp
def _max_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of each row, and the sum of ``exp(logits - largest)``, ``[size]`` each.

    Both in one pass: the logits of a large vocabulary come from memory each time they are read.
    """

    def merge(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (x, sum_x), (y, sum_y) = a, b
        factor = jnp.exp(-jnp.abs(x - y))
        total = jnp.where(x > y, sum_x + factor * sum_y, factor * sum_x + sum_y)
        return jnp.maximum(x, y), total

    # Finite, because the difference of two infinities is NaN.
    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    return lax.reduce((logits, jnp.ones_like(logits)), start, merge, (1,))


@_max_and_sum.defjvp
def _max_and_sum_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """For second derivatives. The largest counts as a constant, which log-sum-exp lets it be."""
    largest, total = _max_and_sum(*primals)
    change = jnp.sum(jnp.exp(primals[0] - largest[:, None]) * tangents[0], axis=-1)
    return (largest, total), (jnp.zeros_like(largest), change)
