"""Ulysses: an all-to-all from a shard of the sequence to a shard of the heads, and back.

DeepSpeed-Ulysses, arXiv 2309.14509. With h devices on the axis and c tokens on each, an all-to-all
before attention does this, and one after attention the inverse::

    [B, c, N, H]            the tokens of one device, all heads
    [B, h c, N / h, H]      the tokens of all h devices, N / h heads

Each all-to-all sends ``(h - 1) / h`` of an array once, for any mask. Within a node that can be
faster than a ring. With a ring between nodes, the h devices of a node together hold one of the
ring's shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def check_heads(heads: int, kv_heads: int, devices: int, name: str) -> None:
    """Raises ValueError unless N query and K key/value heads can be sharded over ``devices``.

    K may be a multiple of ``devices``, or a divisor: then key heads are copied, one per device.
    """
    if heads % devices:
        raise ValueError(
            f"{name} has {devices} devices, the query {heads} heads on each: N must be a multiple "
            "of the devices; use fewer of them for heads and more for the ring (seq_axis)"
        )
    if kv_heads % devices and devices % kv_heads:
        raise ValueError(
            f"{name} has {devices} devices, the key {kv_heads} heads on each: K must be a multiple "
            "or a divisor of the devices; use another number of them for heads, the rest for the "
            "ring (seq_axis)"
        )


def to_heads(x: jax.Array, axis_name: str | None, *, tokens: int, heads: int) -> jax.Array:
    """An all-to-all: from a device's tokens of all heads to all tokens of its shard of the heads.

    Heads are repeated if there are fewer than devices. ``tokens`` and ``heads`` are indices of axes
    of ``x``. Without a mesh axis it is ``x`` itself.
    """
    if axis_name is None:
        return x
    copies = _copies(x.shape[heads], axis_name)
    if copies > 1:
        x = jnp.repeat(x, copies, axis=heads)
    return lax.all_to_all(x, axis_name, split_axis=heads, concat_axis=tokens, tiled=True)


def to_tokens(x: jax.Array, axis_name: str | None, *, tokens: int, heads: int) -> jax.Array:
    """The inverse of :func:`to_heads`: this device's tokens, all heads."""
    if axis_name is None:
        return x
    return lax.all_to_all(x, axis_name, split_axis=tokens, concat_axis=heads, tiled=True)


def gradient_to_tokens(
    x: jax.Array,
    dtype: DTypeLike,
    axis_name: str | None,
    *,
    heads_before: int,
    tokens: int,
    heads: int,
) -> jax.Array:
    """The transpose of :func:`to_heads`, from float32 ``x`` to ``dtype``.

    Gradients of copied heads are sent and summed in float32. Others are rounded before they are
    sent: nothing is added to them, so the result is the same, with half the bytes.
    ``heads_before`` is the number of heads before :func:`to_heads` copied them.
    """
    if axis_name is None:
        return x.astype(dtype)
    copies = _copies(heads_before, axis_name)
    if copies == 1:
        return to_tokens(x.astype(dtype), axis_name, tokens=tokens, heads=heads)
    x = to_tokens(x, axis_name, tokens=tokens, heads=heads)
    shape = (*x.shape[:heads], heads_before, copies, *x.shape[heads + 1 :])
    return x.reshape(shape).sum(heads + 1).astype(dtype)


def own_heads(x: jax.Array, axis_name: str | None, *, heads: int = -1) -> jax.Array:
    """The entries of ``x`` for this device's N / h heads, along axis ``heads``.

    Its gradient is JAX's own: zero for the heads of other devices.
    """
    if axis_name is None:
        return x
    count = x.shape[heads] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * count, count, axis=heads)


def all_tokens(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Gathers segment ids, positions or KV bounds ``[B, c]`` or ``[c]`` over the axis.

    Returns:
      ``[B, h c]`` or ``[h c]``.
    """
    return x if axis_name is None else lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def _copies(heads: int, axis_name: str) -> int:
    return max(1, lax.axis_size(axis_name) // heads)
