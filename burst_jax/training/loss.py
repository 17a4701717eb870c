"""Chunked cross entropy over sharded sequences, without materializing the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.errors import check_coefficient, check_integer, check_positive
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
from burst_jax.training.log_probs import log_probs
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
    options = HeadLoss(chunk_size, flat_names(vocab_axis), z_loss, logits_soft_cap)
    return _over_mesh(
        _local_loss, (hidden, kernel, targets, weights), options, PartitionSpec(), mesh=mesh,
        seq_axis=seq_axis, batch_axis=batch_axis, vocab_axis=vocab_axis, kernel_spec=kernel_spec,
        frozen_kernel=frozen_kernel,
    )  # fmt: skip


def token_log_probs(
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
    logits_soft_cap: float | None = None,
    frozen_kernel: bool = False,
    entropy: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Each target's log-probability ``logits[target] - lse``, differentiable, without all logits.

    ``logits = hidden kernel`` with a soft cap as in :func:`chunked_cross_entropy`, ``lse =
    logsumexp(logits)``, ``p = exp(logits - lse)``. The memory is that of the loss and three numbers
    per token. The backward pass recomputes the logits: four matrix products in total.

    Arguments are those of :func:`chunked_cross_entropy`, but for the meaning of ``weights`` and for
    ``entropy``.

    Args:
      hidden: ``[B, T, D]``, any floating dtype.
      kernel: ``[D, V]``, any floating dtype.
      targets: int32 ``[B, T]``, in the order of ``hidden``, ignored where the weight is 0.
      weights: float32 ``[B, T]``: where it is 0, results and gradients are 0; other values change
        nothing. None is 1 everywhere.
      mesh: the mesh.
      seq_axis: mesh axis, or axes, that shard T.
      batch_axis: mesh axis, or axes, that shard B, or None.
      vocab_axis: mesh axis, or axes, that shard V, or None.
      kernel_spec: sharding of the kernel.
      chunk_size: number of tokens in a device's chunk.
      logits_soft_cap: bounds the logits to (-cap, cap); None is no cap.
      frozen_kernel: whether the kernel is a constant; its gradient is then 0 and not computed.
      entropy: whether to compute ``-sum_j p_j log p_j``, too.

    Returns:
      ``(log_probs, entropy)``, float32 ``[B, T]`` in nats, sharded and ordered like the targets
      (:func:`burst_jax.from_layout` gives the natural order); the second is None unless asked for.

    Raises:
      ValueError: as :func:`chunked_cross_entropy`.
    """
    options = HeadLoss(chunk_size, flat_names(vocab_axis), 0.0, logits_soft_cap)
    found, entropies = _over_mesh(
        partial(_local_log_probs, with_entropy=entropy), (hidden, kernel, targets, weights),
        options, token_spec(batch_axis, seq_axis), mesh=mesh, seq_axis=seq_axis,
        batch_axis=batch_axis, vocab_axis=vocab_axis, kernel_spec=kernel_spec,
        frozen_kernel=frozen_kernel,
    )  # fmt: skip
    return found, entropies if entropy else None


def _over_mesh(
    local: Callable[..., tuple[jax.Array, jax.Array]],
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    options: HeadLoss,
    out_spec: PartitionSpec,
    *,
    mesh: Mesh | AbstractMesh | None,
    seq_axis: AxisNames,
    batch_axis: AxisNames,
    vocab_axis: AxisNames,
    kernel_spec: PartitionSpec | None,
    frozen_kernel: bool,
) -> tuple[jax.Array, jax.Array]:
    """Checks a call and runs ``local`` on each device's tokens; ``out_spec`` shards both results.

    ``local(hidden [tokens, D], kernel, targets [tokens], weights [tokens], options=, token_axes=)``
    gets the kernel gathered over all mesh axes but those of the vocabulary.
    """
    hidden, kernel, targets, weights = arrays
    mesh = resolve_mesh(mesh)
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    _check(hidden, kernel, targets, weights, options)
    if kernel_spec is None:
        kernel_spec = explicit_spec(kernel, PartitionSpec(None, vocab_axis))
    check_divides("kernel", kernel.shape, kernel_spec, mesh)
    tokens = token_spec(batch_axis, seq_axis)
    hidden_spec = token_spec(batch_axis, seq_axis, ndim=3)
    hidden = split_explicit("hidden", hidden, mesh, hidden_spec, ("batch_axis", "seq_axis", None))
    targets, weights = (reshard_explicit(x, mesh, tokens) for x in (targets, weights))
    # If the kernel were gathered over other axes inside the shard_map, devices along them would
    # compute equal losses, and JAX could not know that they are equal. So XLA gathers over these.
    token_axes = flat_names(batch_axis, seq_axis)
    spec = restrict_spec(kernel_spec, (*token_axes, *options.vocab_axes))
    kernel = reshard_explicit(kernel, mesh, spec)
    if frozen_kernel:
        kernel = lax.stop_gradient(kernel)

    def run(hidden, kernel, targets, weights):
        if not frozen_kernel:
            hidden, kernel = _gradients_together(hidden, kernel)
        # Gathered outside the scan, so that its gradient is reduced once, not once per chunk.
        kernel = gather_weights(
            kernel, spec, over=token_axes, keep=options.vocab_axes, dtype=hidden.dtype, widen=True
        )
        hidden = vary(hidden, frozenset(options.vocab_axes))
        shape = targets.shape
        results = local(
            hidden.reshape(-1, hidden.shape[-1]), kernel, targets.reshape(-1), weights.reshape(-1),
            options=options, token_axes=token_axes,
        )  # fmt: skip
        return jax.tree.map(lambda x: x.reshape(shape) if x.ndim else x, results)

    in_specs = hidden_spec, spec, tokens, tokens
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=(out_spec, out_spec))
    return mapped(hidden, kernel, targets, lax.stop_gradient(weights))


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
      ``(sum of losses in nats, sum of weights)``, float32 scalars; without auxiliary losses. The
      weights of :func:`make_batch` are 1 by default, and their sum is the number of targets.
    """
    return loss_with_auxiliary(model, batch, chunk_size=chunk_size, z_loss=z_loss)[:2]


def loss_with_auxiliary(
    model: Decoder,
    batch: Batch[jax.Array],
    *,
    chunk_size: int = CHUNK_SIZE,
    z_loss: float = 0.0,
    max_logits: bool = False,
) -> tuple[jax.Array, jax.Array, Auxiliary]:
    """:func:`next_token_loss`, and the auxiliary losses of :meth:`Decoder.with_auxiliary`.

    ``max_logits`` is that of ``with_auxiliary``.

    Returns:
      ``(sum of losses in nats, sum of weights, auxiliary)``; the loss of a training step is the
      quotient of both plus ``auxiliary.loss``.
    """
    hidden, auxiliary, options = _of_decoder(model, batch, max_logits=max_logits)
    total, count = chunked_cross_entropy(
        hidden, model.head_kernel(), batch["targets"], batch["weights"], chunk_size=chunk_size,
        z_loss=z_loss, **options,
    )  # fmt: skip
    return total, count, auxiliary


def next_token_log_probs(
    model: Decoder, batch: Batch[jax.Array], *, chunk_size: int = CHUNK_SIZE, entropy: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """:func:`token_log_probs` of a decoder on a batch of :func:`make_batch`, in its order.

    For reinforcement learning, distillation and scoring; without auxiliary losses.

    Args:
      model: the decoder.
      batch: a batch of :func:`place_batch`.
      chunk_size: number of tokens in a device's chunk.
      entropy: whether to compute the entropies, too.

    Returns:
      ``(log_probs, entropy)``, float32 ``[B, T]``, 0 where the batch's weight is 0; the second is
      None unless asked for.
    """
    hidden, _, options = _of_decoder(model, batch)
    return token_log_probs(
        hidden, model.head_kernel(), batch["targets"], batch["weights"], chunk_size=chunk_size,
        entropy=entropy, **options,
    )  # fmt: skip


def _of_decoder(
    model: Decoder, batch: Batch[jax.Array], *, max_logits: bool = False
) -> tuple[jax.Array, Auxiliary, dict[str, Any]]:
    """Hidden states, auxiliary losses, and the arguments of :func:`_over_mesh`."""
    parts, kernel_spec = model.head_sharding()
    hidden, auxiliary = model.with_auxiliary(
        batch["inputs"],
        batch["positions"],
        batch["segment_ids"],
        prefix_lengths=batch.get("prefix_lengths"),
        document_tables=batch.get("document_tables"),
        max_logits=max_logits,
    )
    options = {
        "logits_soft_cap": model.config.final_soft_cap,
        "mesh": parts.mesh,
        "seq_axis": parts.token_axes,
        "batch_axis": parts.out_batch_axes,
        "vocab_axis": parts.tensor_axes,
        "kernel_spec": kernel_spec,
        # With LoRA only the adapters are trained.
        "frozen_kernel": model.config.lora is not None,
    }
    return hidden, auxiliary, options


def _local_loss(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, *,
    options: HeadLoss, token_axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Sums of loss and weight over one device's tokens, reduced over the token axes."""
    loss = fused_loss(hidden, kernel, targets, weights, options)
    return lax.psum((loss, jnp.sum(weights)), token_axes)


def _local_log_probs(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, *,
    options: HeadLoss, token_axes: tuple[str, ...], with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Log-probabilities and entropies of one device's tokens."""
    del token_axes
    return log_probs(hidden, kernel, targets, weights != 0, options, with_entropy)


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
    check_coefficient("z_loss", options.z_loss)
    if options.logits_soft_cap is not None:
        check_positive("logits_soft_cap", options.logits_soft_cap, also=", or None")
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
