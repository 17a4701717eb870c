"""One device's log-probabilities of targets, and entropies, without all logits.

Unlike for a loss, the forward pass does not know the gradients of its results. So the backward pass
recomputes each chunk's logits, and uses the log-sum-exp that the forward pass saved. Four matrix
products in all, three if one of the two gradients is not needed.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.training.fused_loss import (
    HeadLoss,
    capped,
    chunk_sizes,
    gradients_by_chunk,
    matmul,
    split,
    target_logits,
    through_cap,
)

# log p(target), the entropy, and lse of some tokens; the entropy is 0 where it is not asked for.
_Statistics = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def log_probs(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    options: HeadLoss,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """``(logits[target] - lse, lse - sum_j p_j logits_j)`` of each token, in a ``shard_map``.

    ``logits = cap(hidden kernel)``, ``lse = logsumexp(logits)`` over the whole vocabulary,
    ``p = exp(logits - lse)``.

    Args:
      hidden: as for :func:`burst_jax.training.fused_loss.fused_loss`.
      kernel: the same.
      targets: int32 ``[tokens]``, read where ``counts``. An id outside the vocabulary gives NaN.
      counts: bool ``[tokens]``; where it is False both results are 0, and so are gradients.
      options: chunks, soft cap and axes of the vocabulary.
      with_entropy: whether the second result is computed; it is 0 otherwise.

    Returns:
      Both float32 ``[tokens]``, in nats, replicated over ``options.vocab_axes``.
    """
    return _forward(hidden, kernel, targets, counts, options, with_entropy)[0]


def _forward(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    options: HeadLoss,
    with_entropy: bool,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    count = hidden.shape[0]
    chunks, subchunks, size = chunk_sizes(count, options.chunk_size)
    cast = kernel.astype(hidden.dtype)

    def subchunk(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, _Statistics]:
        hidden, targets, counts = xs
        products = matmul(hidden, cast)
        lse, picked, _index = target_logits(products, targets, counts, options)
        found = jnp.where(counts, picked - lse, 0.0)
        entropy = jnp.zeros_like(found)
        if with_entropy:
            entropy = jnp.where(counts, _entropy(products, lse, options), 0.0)
        return None, (found, entropy, lse)

    tokens = split((hidden, targets, counts), chunks * subchunks, size)
    _, statistics = lax.scan(subchunk, None, tokens)
    found, entropy, lse = (x.reshape(-1)[:count] for x in statistics)
    return (found, entropy), (hidden, kernel, targets, counts, lse, entropy)


def _entropy(products: jax.Array, lse: jax.Array, options: HeadLoss) -> jax.Array:
    """``-sum_j p_j log p_j``, of terms that are not negative."""
    differences = capped(products, options) - lse[:, None]
    entropy = -jnp.sum(jnp.exp(differences) * differences, axis=-1)
    return lax.psum(entropy, options.vocab_axes) if options.vocab_axes else entropy


def _backward(
    options: HeadLoss,
    with_entropy: bool,
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    """Computes logits again, a sub-chunk at a time, and both gradients a chunk at a time."""
    hidden, kernel, targets, counts, lse, entropy = residuals
    cast = kernel.astype(hidden.dtype)
    d_log_prob, d_entropy = (jnp.where(counts, x, 0.0) for x in cotangents)

    def subchunk_gradient(
        hidden: jax.Array, targets: jax.Array, counts: jax.Array, lse: jax.Array,
        entropy: jax.Array, d_log_prob: jax.Array, d_entropy: jax.Array,
    ) -> tuple[jax.Array, None]:  # fmt: skip
        products = matmul(hidden, cast)
        column = jnp.where(counts, targets, 0)
        if options.vocab_axes:
            column = column - products.shape[1] * lax.axis_index(options.vocab_axes)
        logits = capped(products, options)
        differences = logits - lse[:, None]
        is_target = lax.broadcasted_iota(jnp.int32, products.shape, 1) == column[:, None]
        # Of log p: onehot - p; of the entropy: -p (log p + entropy).
        factor = d_log_prob[:, None]
        if with_entropy:
            factor = factor + d_entropy[:, None] * (differences + entropy[:, None])
        new = jnp.where(is_target, d_log_prob[:, None], 0.0) - jnp.exp(differences) * factor
        return through_cap(new, logits, options), None

    by_token = hidden, targets, counts, lse, entropy, d_log_prob, d_entropy
    d_hidden, d_kernel, _ = gradients_by_chunk(subchunk_gradient, by_token, cast, options)
    return d_hidden, d_kernel.astype(kernel.dtype), None, None


log_probs.defvjp(_forward, _backward)
