"""Cross entropy computed where the tokens are, a chunk of them at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from burst_jax.models.decoder import Decoder
from burst_jax.sharding import (
    AxisNames,
    flat_names,
    gathered,
    place_explicit,
    resolve_mesh,
    sequence_axes,
    token_spec,
)
from burst_jax.training.batches import Batch


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    mesh: Any = None,
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    chunk_size: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Sum of ``weights * (logsumexp(logits) - logits[target])`` with ``logits = hidden kernel``.

    Every device takes its own tokens through a scan over chunks; a chunk's logits are recomputed in
    the backward pass. So ``[chunk_size, V]`` per device is the most that ever exists, forward or
    backward. Sums, and the gradient of the kernel, are added over the mesh once.

    B batch, T length, D features, V vocabulary.

    Args:
      hidden: ``[B, T, D]``, B sharded over ``batch_axis`` and T over ``seq_axis``, in any order.
      kernel: ``[D, V]``; gathered to every device if it is split. Multiplied in hidden's dtype,
        accumulated in float32; its gradient is float32 until it takes the kernel's dtype.
      targets: int32 ``[B, T]``. Not read where the weight is 0.
      weights: float32 ``[B, T]``, 0 for padding; None is 1 everywhere. Constants: they get no
        gradient.
      mesh: None is the mesh of ``jax.set_mesh``.
      seq_axis: mesh axis, or axes, of T.
      batch_axis: mesh axis, or axes, of B, or None.
      chunk_size: tokens per device and chunk; it need not divide their number.

    Returns:
      ``(sum of losses in nats, sum of weights)``, float32 scalars.

    Raises:
      ValueError: no mesh, a chunk_size below 1, shapes or dtypes that are not the above.
    """
    mesh = resolve_mesh(mesh)
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    _check(hidden, kernel, targets, weights, chunk_size)
    kernel = gathered(kernel)
    names = flat_names(batch_axis, seq_axis)
    tokens = token_spec(batch_axis, seq_axis)
    # Hidden states that are split otherwise are the caller's to move: that would cost much.
    targets, weights = (place_explicit(x, mesh, tokens) for x in (targets, weights))

    # check_vma (the default): transposing the cast of the replicated kernel is the psum over all
    # axes that its gradient needs, and float32 because the kernel is cast below, not before.
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(token_spec(batch_axis, seq_axis, ndim=3), PartitionSpec(), tokens, tokens),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    def local(
        hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Before the scan, or its transpose would sum over the mesh once per chunk.
        kernel = lax.pcast(kernel, names, to="varying")
        chunks = jax.tree.map(
            partial(_split, chunk_size=chunk_size),
            (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)),
        )

        @partial(jax.checkpoint, prevent_cse=False)
        def chunk(_: None, xs: Any) -> tuple[None, jax.Array]:
            return None, _chunk_loss(xs[0], kernel, xs[1], xs[2])

        _, losses = lax.scan(chunk, None, chunks)
        return lax.psum((jnp.sum(losses), jnp.sum(weights)), names)

    return local(hidden, kernel, targets, lax.stop_gradient(weights))


def next_token_loss(
    model: Decoder, batch: Batch, *, chunk_size: int = 1024, token_axes: AxisNames = None
) -> tuple[jax.Array, jax.Array]:
    """:func:`chunked_cross_entropy` of a decoder on a batch of :func:`make_batch`.

    Mesh and axes are those of the decoder's attention options; ``token_axes`` are the mesh axes
    that the loss splits T over, if they are others.

    Returns:
      ``(sum of losses in nats, number of targets)``, float32 scalars.
    """
    options = dict(model.options)
    hidden = model(batch["inputs"], batch["positions"], batch["segment_ids"])
    return chunked_cross_entropy(
        hidden,
        model.head.kernel[...],
        batch["targets"],
        batch["weights"],
        chunk_size=chunk_size,
        mesh=options.get("mesh"),
        seq_axis=sequence_axes(options) if token_axes is None else token_axes,
        batch_axis=options.get("batch_axis"),
    )


def _split(x: jax.Array, chunk_size: int) -> jax.Array:
    """``[t, ...]`` to ``[chunks, size, ...]``; zeros fill the last, and their weight is 0."""
    chunks = -(-x.shape[0] // chunk_size)
    size = -(-x.shape[0] // chunks)
    x = jnp.pad(x, [(0, chunks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(chunks, size, *x.shape[1:])


def _chunk_loss(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    logits = _logits(hidden, kernel)
    counts = weights != 0
    index = jnp.where(counts, targets, 0)[:, None]
    picked = jnp.take_along_axis(logits, index, axis=-1, mode="fill")[:, 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(jnp.where(counts, weights * nll, 0.0))


@jax.custom_vjp
def _logits(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Float32 ``hidden kernel``, multiplied in hidden's dtype."""
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _logits_fwd(hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _logits(hidden, kernel), (hidden, kernel)


def _logits_bwd(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The transpose that JAX would write multiplies float32 by bfloat16: off the tensor cores.
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
