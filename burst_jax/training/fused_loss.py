"""One device's cross entropy fused with the output projection that makes the logits.

The gradient of the loss with respect to the logits is known as soon as the loss is. So under
differentiation the forward pass also computes the gradients, chunk by chunk, with three matrix
products: logits, gradient of the hidden states, gradient of the kernel. The backward pass only
scales them by the cotangent; a backward pass of its own would recompute all logits.

Chunks have two levels. The kernel's gradient, float32 ``[D, V]``, is read and written once per
chunk, so chunks should be large. The float32 logits are needed only until their gradient exists in
the dtype of the hidden states, so they are computed one sub-chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary, varying_axes

# Sub-chunks per chunk.
SUBCHUNKS = 4

# Hidden states, targets and weights of some tokens.
_PerToken = tuple[jax.Array, ...]


class HeadLoss(NamedTuple):
    """Static options of the loss.

    Attributes:
      chunk_size: number of tokens in a chunk.
      vocab_axes: mesh axes that shard the vocabulary.
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
      hidden: ``[tokens, D]``, any floating dtype; varying over ``options.vocab_axes``, so that its
        gradient is summed over them.
      kernel: ``[D, V / devices]``, any floating dtype, this device's shard of the vocabulary.
        Products use hidden's dtype; the gradient accumulates in float32.
      targets: int32 ``[tokens]``, ids in the whole vocabulary, ignored where the weight is 0. An id
        outside the vocabulary makes the loss NaN.
      weights: float32 ``[tokens]``; they get no gradient.
      options: static options.

    Returns:
      A float32 scalar: the sum over this device's tokens, replicated over ``options.vocab_axes``.
    """
    chunks, subchunks, size = chunk_sizes(hidden.shape[0], options.chunk_size)
    kernel = kernel.astype(hidden.dtype)

    def subchunk(_: None, xs: _PerToken) -> tuple[None, jax.Array]:
        hidden, targets, weights = xs
        return None, _losses(matmul(hidden, kernel), targets, weights, options)[0]

    _, losses = lax.scan(
        subchunk, None, split((hidden, targets, weights), chunks * subchunks, size)
    )
    return jnp.sum(losses)


def _forward(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: HeadLoss,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """The loss, and the gradients of hidden and kernel, divided by the largest weight."""
    cast = kernel.astype(hidden.dtype)
    # Gradients are those of weights of at most 1, which any dtype has room for.
    largest = jnp.max(jnp.abs(weights), initial=0)
    largest = jnp.where(largest == 0, 1, largest)

    def subchunk_gradient(
        hidden: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        products = matmul(hidden, cast)
        loss, lse, columns = _losses(products, targets, weights, options)
        scaled = weights / largest
        return _d_products(products, lse, columns, scaled, options), loss

    by_token = hidden, targets, weights
    d_hidden, d_kernel, losses = gradients_by_chunk(subchunk_gradient, by_token, cast, options)
    # The last residual is empty and carries the kernel's dtype.
    like_kernel = jnp.zeros((0,), kernel.dtype)
    return jnp.sum(losses), (d_hidden, d_kernel, largest, like_kernel)


def _backward(
    options: HeadLoss,
    residuals: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, None, None]:
    """Scales the forward pass' gradients by the cotangent."""
    del options
    d_hidden, d_kernel, largest, like_kernel = residuals
    cotangent = cotangent * largest
    d_hidden = (cotangent * d_hidden.astype(jnp.float32)).astype(d_hidden.dtype)
    return d_hidden, (cotangent * d_kernel).astype(like_kernel.dtype), None, None


fused_loss.defvjp(_forward, _backward)


def gradients_by_chunk(
    subchunk_gradient: Callable[..., tuple[jax.Array, Any]],
    by_token: tuple[jax.Array, ...],
    kernel: jax.Array,
    options: HeadLoss,
) -> tuple[jax.Array, jax.Array, Any]:
    """The gradients of hidden and kernel, from that of the products of each sub-chunk.

    Args:
      subchunk_gradient: called with a sub-chunk of each array of ``by_token``; it returns the
        gradient with respect to ``hidden kernel``, float32 ``[size, V / devices]``, and any pytree.
      by_token: hidden, and other arrays ``[tokens]``.
      kernel: ``[D, V / devices]`` in hidden's dtype.
      options: their ``chunk_size`` is used.

    Returns:
      ``(d_hidden, d_kernel, others)``: the gradients in hidden's dtype and in float32, and the
      pytrees of all sub-chunks, stacked to ``[chunks, sub-chunks, ...]``.
    """
    hidden = by_token[0]
    count, features = hidden.shape
    chunks, subchunks, size = chunk_sizes(count, options.chunk_size)

    def subchunk(d_logits: jax.Array, xs: tuple[jax.Array, _PerToken]) -> tuple[jax.Array, Any]:
        index, tokens = xs
        new, other = subchunk_gradient(*tokens)
        new = new.astype(hidden.dtype)
        return lax.dynamic_update_slice_in_dim(d_logits, new, index * size, 0), other

    # XLA eliminates a product whose result is unused, like the gradient of a frozen kernel.
    def chunk(
        sums: tuple[jax.Array, jax.Array], xs: _PerToken
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, jax.Array]]:
        d_kernel, d_logits = sums
        d_logits, others = lax.scan(subchunk, d_logits, (jnp.arange(subchunks), xs))
        d_hidden = matmul(d_logits, kernel.T).astype(hidden.dtype)
        d_kernel = d_kernel + matmul(xs[0].reshape(-1, features).T, d_logits)
        return (d_kernel, d_logits), (others, d_hidden)

    tokens = jax.tree.map(
        lambda x: x.reshape(chunks, subchunks, *x.shape[1:]),
        split(by_token, chunks * subchunks, size),
    )
    # All chunks write their d_logits to one buffer; a new one would be zero-filled each time.
    zeros = (
        jnp.zeros(kernel.shape, jnp.float32),
        jnp.zeros((subchunks * size, kernel.shape[1]), hidden.dtype),
    )
    zeros = vary(zeros, varying_axes(*by_token, kernel))
    (d_kernel, _), (others, d_hidden) = lax.scan(chunk, zeros, tokens)
    return d_hidden.reshape(-1, features)[:count], d_kernel, others


def chunk_sizes(tokens: int, chunk_size: int) -> tuple[int, int, int]:
    """``(chunks, sub-chunks per chunk, tokens per sub-chunk)``, nearly equal.

    Together they hold at least ``tokens``; a chunk has at most ``chunk_size``.
    """
    most = max(1, chunk_size // SUBCHUNKS)
    chunks = max(1, -(-tokens // (chunk_size // most * most)))
    in_chunk = -(-tokens // chunks)
    subchunks = max(1, -(-in_chunk // most))
    return chunks, subchunks, -(-in_chunk // subchunks)


def split(tokens: tuple[jax.Array, ...], count: int, size: int) -> tuple[jax.Array, ...]:
    """Each array ``[tokens, ...]`` as ``[count, size, ...]``, padded with zeros of weight 0."""

    def one(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, size, *x.shape[1:])

    return tuple(map(one, tokens))


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a b`` with float32 accumulation; both factors have one dtype, for tensor cores."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def capped(products: jax.Array, options: HeadLoss) -> jax.Array:
    """Logits from the product of hidden states and kernel."""
    cap = options.logits_soft_cap
    return products if cap is None else cap * jnp.tanh(products / cap)


def through_cap(gradient: jax.Array, logits: jax.Array, options: HeadLoss) -> jax.Array:
    """The gradient with respect to the products, from that with respect to the logits."""
    cap = options.logits_soft_cap
    return gradient if cap is None else gradient * (1 - (logits / cap) ** 2)


def _losses(
    products: jax.Array, targets: jax.Array, weights: jax.Array, options: HeadLoss
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(weighted sum of losses, lse, index)`` of float32 ``products [size, V / devices]``.

    ``lse`` is float32 ``[size]``; ``index`` is int32 ``[size]``, the targets as columns of
    ``products``, out of range for targets on other devices.
    """
    counts = weights != 0
    lse, picked, index = target_logits(products, targets, counts, options)
    loss = lse - picked
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    return jnp.sum(jnp.where(counts, weights * loss, 0.0)), lse, index


def target_logits(
    products: jax.Array, targets: jax.Array, counts: jax.Array, options: HeadLoss
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(lse, logits[target], index)`` of float32 ``products [size, V / devices]``.

    The second is NaN for a target outside the vocabulary; targets that do not count are read as 0.
    ``index`` is int32 ``[size]``, the targets as columns of ``products``, out of range for targets
    on other devices.
    """
    here, vocab = products.shape[-1], options.vocab_axes
    index = jnp.where(counts, targets, 0)
    if vocab:
        index = index - here * lax.axis_index(vocab)
    largest, total = _max_and_sum(capped(products, options))
    present = (index >= 0) & (index < here)
    columns = jnp.clip(index, 0, here - 1)[:, None]
    picked = capped(jnp.take_along_axis(products, columns, axis=-1)[:, 0], options)
    picked = jnp.where(present, picked, 0.0)
    found = present.astype(jnp.float32)
    if vocab:
        # Log-sum-exp does not depend on the subtracted constant, so it needs no derivative.
        whole = lax.pmax(lax.stop_gradient(largest), vocab)
        total = total * jnp.exp(largest - whole)
        total, picked, found = lax.psum(jnp.stack([total, picked, found]), vocab)
        largest = whole
    # found is 0 for a target outside the vocabulary.
    return largest + jnp.log(total), jnp.where(found == 1, picked, jnp.nan), index


def _d_products(
    products: jax.Array, lse: jax.Array, index: jax.Array, weights: jax.Array, options: HeadLoss
) -> jax.Array:
    """The gradient of :func:`_losses`' sum with respect to ``products``.

    ``weights * ((1 + 2 z_loss lse) softmax(logits) - onehot(target)) * d logits / d products``.
    """
    logits = capped(products, options)
    scale = weights * (1 + 2 * options.z_loss * lse) if options.z_loss else weights
    is_target = lax.broadcasted_iota(jnp.int32, products.shape, 1) == index[:, None]
    gradient = scale[:, None] * jnp.exp(logits - lse[:, None])
    gradient = gradient - jnp.where(is_target, weights[:, None], 0.0)
    return through_cap(gradient, logits, options)


@jax.custom_jvp
def _max_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row maximum and row sum of ``exp(logits - maximum)``, ``[size]`` each, in one pass.

    The logits of a large vocabulary do not fit the cache, so every pass reads them from memory.
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
    """For second derivatives; the maximum is a constant, on which log-sum-exp does not depend."""
    largest, total = _max_and_sum(*primals)
    change = jnp.sum(jnp.exp(primals[0] - largest[:, None]) * tangents[0], axis=-1)
    return (largest, total), (jnp.zeros_like(largest), change)
