"""Chunked cross entropy over sharded sequences, without materializing the logits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.errors import check_integer
from burst_jax.models.decoder import Decoder
from burst_jax.models.feed_forward import Auxiliary
from burst_jax.parallel.collectives import gather_weights
from burst_jax.parallel.mesh import (
    AxisNames,
    explicit_spec,
    flat_names,
    reshard_explicit,
    resolve_mesh,
    restrict_spec,
    split_explicit,
    token_spec,
)
from burst_jax.parallel.rules import check_divides
from burst_jax.training.batches import Batch
from burst_jax.training.fused_loss import HeadLoss, fused_loss
from pallas_kernels.arrays import vary

# Each chunk reads and writes the kernel's gradient once. With 4K tokens this takes a few percent of
# the time of the chunk's products; logits and their gradient take 1.5 GiB with a 128K vocabulary.
CHUNK_SIZE = 4096


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
    chunk_size: int = CHUNK_SIZE,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    frozen_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Sum of ``weights * (lse - logits[target] + z_loss * lse**2)``, ``lse = logsumexp(logits)``.

    ``logits = hidden kernel``, with a soft cap ``cap * tanh(hidden kernel / cap)``.

    Each device scans over chunks of its own tokens and never holds logits of more than
    ``chunk_size`` tokens. Gradients are computed in the same pass, with three matrix products per
    chunk (two if only one gradient is needed, one for the value alone). Sums and the kernel's
    gradient are reduced over the mesh once.

    B batch, T length, D features, V vocabulary.

    Args:
      hidden: ``[B, T, D]``, any floating dtype, B sharded over ``batch_axis`` and T over
        ``seq_axis``, in any token order. Products use this dtype with float32 accumulation; logits,
        log-sum-exp and softmax are float32; the logits' gradient is rounded to this dtype.
      kernel: ``[D, V]``, any floating dtype. Its gradient accumulates in float32 over the chunks
        and is converted to the kernel's dtype at the end.
      targets: int32 ``[B, T]``, ignored where the weight is 0.
      weights: float32 ``[B, T]``, 0 for padding; they get no gradient. None is 1 everywhere.
      mesh: None is the mesh of ``jax.set_mesh``.
      seq_axis: mesh axis, or axes, that shard T.
      batch_axis: mesh axis, or axes, that shard B, or None.
      vocab_axis: mesh axis, or axes, that shard V, or None. Each device then computes the logits of
        its shard of the vocabulary, and sums of exponentials are reduced over the axis.
      kernel_spec: sharding of the kernel, which is gathered over all axes but ``vocab_axis``. None
        is ``vocab_axis`` alone, or the kernel's own sharding over Explicit axes.
      chunk_size: number of tokens in a device's chunk; it need not divide the device's tokens.
        Under differentiation a device holds the logits' gradient of one chunk in hidden's dtype,
        and float32 logits of a quarter of it. Each chunk reads and writes the kernel's gradient,
        ``8 D V`` bytes, so small chunks are slow.
      z_loss: coefficient of the squared log-sum-exp, 0 or more; it keeps logits from drifting
        (arXiv 2204.02311, section 5).
      logits_soft_cap: bounds the logits to (-cap, cap), as in Gemma 2 (arXiv 2408.00118, section
        2); None is no cap.
      frozen_kernel: whether the kernel is a constant; its gradient is then 0 and not computed.

    Returns:
      ``(sum of losses in nats, sum of weights)``, float32 scalars.

    Raises:
      ValueError: no mesh, a chunk_size below 1, a z_loss below 0, a soft cap that is not positive,
        sizes that a mesh axis does not divide, or other shapes and dtypes.
    """
    mesh = resolve_mesh(mesh)
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    options = HeadLoss(chunk_size, flat_names(vocab_axis), z_loss, logits_soft_cap)
    _check(hidden, kernel, targets, weights, options)
    if kernel_spec is None:
        kernel_spec = explicit_spec(kernel, PartitionSpec(None, vocab_axis))
    check_divides("kernel", kernel.shape, kernel_spec, mesh)
    tokens = token_spec(batch_axis, seq_axis)
    hidden_spec = token_spec(batch_axis, seq_axis, ndim=3)
    hidden = split_explicit("hidden", hidden, mesh, hidden_spec, ("batch_axis", "seq_axis", None))
    targets, weights = (reshard_explicit(x, mesh, tokens) for x in (targets, weights))
    # Over other axes every device would compute the same loss from its gathered kernel, which JAX
    # could not know to be the same; so those are gathered before.
    token_axes = flat_names(batch_axis, seq_axis)
    kernel_spec = restrict_spec(kernel_spec, (*token_axes, *options.vocab_axes))
    kernel = reshard_explicit(kernel, mesh, kernel_spec)
    if frozen_kernel:
        kernel = lax.stop_gradient(kernel)
    local = jax.shard_map(
        partial(
            _local_loss,
            token_axes=token_axes,
            kernel_spec=kernel_spec,
            options=options,
            frozen_kernel=frozen_kernel,
        ),
        mesh=mesh,
        in_specs=(hidden_spec, kernel_spec, tokens, tokens),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    return local(hidden, kernel, targets, lax.stop_gradient(weights))


def next_token_loss(
    model: Decoder, batch: Batch[jax.Array], *, chunk_size: int = CHUNK_SIZE, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """:func:`chunked_cross_entropy` of a decoder on a batch of :func:`make_batch`.

    Mesh and axes are those of the decoder's attention options, the soft cap that of its config.

    Args:
      model: the decoder.
      batch: a batch of :func:`place_batch`.
      chunk_size: number of tokens in a device's chunk.
      z_loss: coefficient of the squared log-sum-exp.

    Returns:
      ``(sum of losses in nats, number of targets)``, float32 scalars; without auxiliary losses.
    """
    return loss_with_auxiliary(model, batch, chunk_size=chunk_size, z_loss=z_loss)[:2]


def loss_with_auxiliary(
    model: Decoder, batch: Batch[jax.Array], *, chunk_size: int = CHUNK_SIZE, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array, Auxiliary]:
    """:func:`next_token_loss`, and what :meth:`Decoder.with_auxiliary` returns next to the states.

    Returns:
      ``(sum of losses in nats, number of targets, auxiliary)``; the loss of a training step is
      ``sum / number + auxiliary.loss``.
    """
    parts, kernel_spec = model.head_sharding()
    hidden, auxiliary = model.with_auxiliary(
        batch["inputs"],
        batch["positions"],
        batch["segment_ids"],
        prefix_lengths=batch.get("prefix_lengths"),
        document_tables=batch.get("document_tables"),
    )
    total, count = chunked_cross_entropy(
        hidden,
        model.head_kernel(),
        batch["targets"],
        batch["weights"],
        chunk_size=chunk_size,
        z_loss=z_loss,
        logits_soft_cap=model.config.final_soft_cap,
        mesh=parts.mesh,
        seq_axis=parts.token_axes,
        batch_axis=parts.out_batch_axes,
        vocab_axis=parts.tensor_axes,
        kernel_spec=kernel_spec,
        # With LoRA only the adapters are trained.
        frozen_kernel=model.config.lora is not None,
    )
    return total, count, auxiliary


def _local_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    token_axes: tuple[str, ...],
    kernel_spec: PartitionSpec,
    options: HeadLoss,
    frozen_kernel: bool,
) -> tuple[jax.Array, jax.Array]:
    """Sums of loss and weight over one device's tokens, reduced over the token axes."""
    if not frozen_kernel:
        hidden, kernel = _gradients_together(hidden, kernel)
    # Gathered outside the scan, so that its gradient is reduced once, not once per chunk.
    kernel = gather_weights(
        kernel, kernel_spec, over=token_axes, keep=options.vocab_axes, dtype=hidden.dtype,
        widen=True,
    )  # fmt: skip
    hidden = vary(hidden, frozenset(options.vocab_axes))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    loss = fused_loss(hidden, kernel, targets.reshape(-1), weights.reshape(-1), options)
    return lax.psum((loss, jnp.sum(weights)), token_axes)


@jax.custom_vjp
def _gradients_together(hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The identity, whose backward pass ties both gradients with an optimization barrier.

    Only the optimizer needs the kernel's gradient, so XLA would delay its reduction until all
    layers' backward passes are done, and each device would hold the whole gradient meanwhile.
    """
    return hidden, kernel


def _together_forward(hidden: jax.Array, kernel: jax.Array) -> tuple[Any, None]:
    return (hidden, kernel), None


def _together_backward(_: None, gradients: Any) -> Any:
    return lax.optimization_barrier(gradients)


_gradients_together.defvjp(_together_forward, _together_backward)


def _check(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: HeadLoss,
) -> None:
    check_integer("chunk_size", options.chunk_size, 1)
    z_loss, cap = options.z_loss, options.logits_soft_cap
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is {z_loss}: it must be 0, which is none, or positive and finite")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"logits_soft_cap is {cap}: it must be positive and finite, or None")
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
