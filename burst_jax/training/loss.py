"""Cross entropy: every device computes the loss of its own tokens, a chunk at a time."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.models.decoder import Decoder
from burst_jax.rules import check_divides
from burst_jax.sharding import (
    AxisNames,
    flat_names,
    place_explicit,
    resolve_mesh,
    split_as_it_is,
    token_spec,
)
from burst_jax.training.batches import Batch
from burst_jax.weights import gather_weights
from pallas_kernels.arrays import vary


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    vocab_axis: AxisNames = None,
    kernel_spec: PartitionSpec | None = None,
    chunk_size: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Sum of ``weights * (logsumexp(logits) - logits[target])`` with ``logits = hidden kernel``.

    Every device takes its own tokens through a scan over chunks, and the backward pass recomputes
    each chunk's logits. So no device ever holds more logits than ``[chunk_size, V]``, forward or
    backward. The sums and the gradient of the kernel are added up over the mesh once.

    B batch, T length, D features, V vocabulary.

    Args:
      hidden: ``[B, T, D]`` of any floating dtype, B sharded over ``batch_axis`` and T over
        ``seq_axis``, tokens in any order.
      kernel: ``[D, V]`` of any floating dtype. The product is multiplied in hidden's dtype and
        accumulated in float32. The kernel's gradient is accumulated in float32 over the chunks and
        converted to the kernel's dtype at the end.
      targets: int32 ``[B, T]``. A target whose weight is 0 is not read.
      weights: float32 ``[B, T]``, 0 for padding; None is 1 everywhere. They are constants and get
        no gradient.
      mesh: None is the mesh of ``jax.set_mesh``.
      seq_axis: mesh axis, or axes, that T is split over.
      batch_axis: mesh axis, or axes, that B is split over, or None.
      vocab_axis: mesh axis, or axes, that V is split over, or None. Each device then computes the
        logits of its part of the vocabulary, and the devices add up their sums of exponentials.
      kernel_spec: how the kernel is split; it is gathered over all axes but ``vocab_axis``. None is
        over ``vocab_axis`` alone, but over Explicit axes as it is split.
      chunk_size: number of tokens in one device's chunk; it need not divide the device's tokens.

    Returns:
      ``(sum of losses in nats, sum of weights)``, float32 scalars.

    Raises:
      ValueError: no mesh, a chunk_size below 1, sizes that a mesh axis does not divide, or shapes
        and dtypes other than these.
    """
    mesh = resolve_mesh(mesh)
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    _check(hidden, kernel, targets, weights, chunk_size)
    if kernel_spec is None:
        kernel_spec = split_as_it_is(kernel, PartitionSpec(None, vocab_axis))
    check_divides("kernel", kernel.shape, kernel_spec, mesh)
    tokens = token_spec(batch_axis, seq_axis)
    # Hidden states are not moved here: that would cost much, so the caller must split them so.
    targets, weights = (place_explicit(x, mesh, tokens) for x in (targets, weights))
    axes = _Axes(flat_names(batch_axis, seq_axis), flat_names(vocab_axis), kernel_spec)
    local = jax.shard_map(
        partial(_local_loss, axes=axes, chunk_size=chunk_size),
        mesh=mesh,
        in_specs=(token_spec(batch_axis, seq_axis, ndim=3), kernel_spec, tokens, tokens),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    kernel = place_explicit(kernel, mesh, kernel_spec)
    return local(hidden, kernel, targets, lax.stop_gradient(weights))


def next_token_loss(
    model: Decoder, batch: Batch[jax.Array], *, chunk_size: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """:func:`chunked_cross_entropy` of a decoder on a batch of :func:`make_batch`.

    The decoder's attention options say the mesh and its axes.

    Args:
      model: the decoder.
      batch: int32 and float32 arrays ``[B, T]``.
      chunk_size: number of tokens in one device's chunk.

    Returns:
      ``(sum of losses in nats, number of targets)``, float32 scalars.

    Raises:
      NotImplementedError: a decoder with a soft cap on its output logits.
    """
    if model.config.final_soft_cap is not None:
        raise NotImplementedError(
            f"final_soft_cap is {model.config.final_soft_cap}: the chunked loss has no soft cap; "
            "take the loss of model.unembed(hidden) instead"
        )
    parts, kernel_spec = model.head_parts()
    hidden = model(batch["inputs"], batch["positions"], batch["segment_ids"])
    return chunked_cross_entropy(
        hidden,
        model.head_kernel(),
        batch["targets"],
        batch["weights"],
        chunk_size=chunk_size,
        mesh=parts.mesh,
        seq_axis=parts.token_axes,
        batch_axis=parts.out_batch_axes,
        vocab_axis=parts.tensor_axes,
        kernel_spec=kernel_spec,
    )


class _Axes(NamedTuple):
    """The mesh axes of a loss.

    Attributes:
      tokens: those that rows and tokens are split over.
      vocab: those that the vocabulary is split over.
      kernel: how the kernel is split.
    """

    tokens: tuple[str, ...]
    vocab: tuple[str, ...]
    kernel: PartitionSpec


def _local_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    axes: _Axes,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """One device's chunks, and the sums of loss and weight over the mesh axes of the tokens."""
    # Before the scan, or the transpose would sum the kernel's gradient over the mesh once a chunk.
    kernel = gather_weights(
        kernel, axes.kernel, over=axes.tokens, keep=axes.vocab, dtype=hidden.dtype, widen=True
    )
    hidden = vary(hidden, frozenset(axes.vocab))
    chunks = jax.tree.map(
        partial(_split, chunk_size=chunk_size),
        (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)),
    )

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(_: None, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        hidden, targets, weights = xs
        return None, _chunk_loss(hidden, kernel, targets, weights, axes.vocab)

    _, losses = lax.scan(chunk, None, chunks)
    return lax.psum((jnp.sum(losses), jnp.sum(weights)), axes.tokens)


def _split(x: jax.Array, chunk_size: int) -> jax.Array:
    """``[tokens, ...]`` to ``[chunks, size, ...]``, size at most ``chunk_size``.

    Zeros fill the last chunk; their weight is 0 too, so they add nothing.
    """
    chunks = -(-x.shape[0] // chunk_size)
    size = -(-x.shape[0] // chunks)
    x = jnp.pad(x, [(0, chunks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(chunks, size, *x.shape[1:])


def _chunk_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    vocab: tuple[str, ...],
) -> jax.Array:
    """The weighted sum of one chunk's losses, ``hidden`` ``[size, D]``; a float32 scalar."""
    logits = _logits(hidden, kernel)
    counts = weights != 0
    index = jnp.where(counts, targets, 0)
    if not vocab:
        picked = jnp.take_along_axis(logits, index[:, None], axis=-1, mode="fill")[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - picked
    else:
        nll = _nll_of_parts(logits, index, vocab)
    return jnp.sum(jnp.where(counts, weights * nll, 0.0))


def _nll_of_parts(logits: jax.Array, index: jax.Array, vocab: tuple[str, ...]) -> jax.Array:
    """``logsumexp(logits) - logits[index]`` of logits that are split over the mesh axes ``vocab``.

    Args:
      logits: ``[size, V / devices]``, this device's part of the vocabulary.
      index: int32 ``[size]``, ids of the whole vocabulary.
      vocab: mesh axes.
    """
    here = logits.shape[-1]
    largest = lax.pmax(jnp.max(lax.stop_gradient(logits), axis=-1), vocab)
    total = lax.psum(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1), vocab)
    index = index - here * lax.axis_index(vocab)
    present = (index >= 0) & (index < here)
    picked = jnp.take_along_axis(logits, jnp.clip(index, 0, here - 1)[:, None], axis=-1)[:, 0]
    # No device has a target beyond the vocabulary: its count is 0, which shows as NaN.
    count, picked = lax.psum((present.astype(jnp.int32), jnp.where(present, picked, 0.0)), vocab)
    picked = jnp.where(count == 1, picked, jnp.nan)
    return jnp.log(total) + largest - picked


@jax.custom_vjp
def _logits(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """``hidden kernel`` ``[size, V]`` in float32, its factors multiplied in hidden's dtype."""
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _logits_fwd(
    hidden: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _logits(hidden, kernel), (hidden, kernel)


def _logits_bwd(
    residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # JAX's own transpose would multiply float32 by bfloat16, which no tensor core does.
    hidden, kernel = residuals
    grad = grad.astype(hidden.dtype)
    matmul = partial(jnp.matmul, preferred_element_type=jnp.float32)
    grad_hidden = matmul(grad, kernel.astype(hidden.dtype).T)
    grad_kernel = matmul(hidden.T, grad)
    return grad_hidden.astype(hidden.dtype), grad_kernel.astype(kernel.dtype)


_logits.defvjp(_logits_fwd, _logits_bwd)


def _check(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, chunk_size: int
) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it must be at least 1")
    if hidden.ndim != 3:
        raise ValueError(f"hidden has shape {hidden.shape}: it needs [B, T, D]")
    if kernel.ndim != 2 or kernel.shape[0] != hidden.shape[2]:
        raise ValueError(
            f"kernel has shape {kernel.shape}: with hidden {hidden.shape} it needs "
            f"[{hidden.shape[2]}, V]"
        )
    for name, x, dtype in (("targets", targets, jnp.int32), ("weights", weights, jnp.float32)):
        if x.shape != hidden.shape[:2]:
            raise ValueError(f"{name} has shape {x.shape}: hidden's [B, T] is {hidden.shape[:2]}")
        if x.dtype != dtype:
            raise ValueError(f"{name} has dtype {x.dtype}: convert it to {jnp.dtype(dtype).name}")
