"""Ulysses: inside a node, devices that hold parts of the sequence take parts of the heads instead.

h devices on the axis, c tokens each. One all-to-all before attention, one after::

    [B, c, N, H]  the tokens of one device, all heads   (DeepSpeed-Ulysses, arXiv 2309.14509)
        ->  [B, h c, N / h, H]  the tokens of all h devices, a part of the heads

Each all-to-all sends ``(h - 1) / h`` of an array once, whatever the masks are. Inside a fast node
that can take less time than the hops of a ring. Between nodes there is still a ring. Each of its
shards is held by h devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def check_heads(heads: int, kv_heads: int, devices: int, name: str) -> None:
    """Raises ValueError unless N query and K key/value heads can be dealt out to so many devices.

    K may be a multiple of the devices, or a divisor: then devices share key heads, and each gets a
    copy of the one it needs.
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
    """All tokens of the axis' devices, this device's part of the heads.

    Args:
      x: its ``tokens`` axis holds this device's tokens, its ``heads`` axis all heads. Fewer heads
        than devices are copied, so that every device has one.
      axis_name: the mesh axis; None leaves ``x`` as it is.
      tokens: index of the axis of tokens.
      heads: index of the axis of heads.
    """
    if axis_name is None:
        return x
    copies = _copies(x.shape[heads], axis_name)
    if copies > 1:
        x = jnp.repeat(x, copies, axis=heads)
    return lax.all_to_all(x, axis_name, split_axis=heads, concat_axis=tokens, tiled=True)


def to_tokens(x: jax.Array, axis_name: str | None, *, tokens: int, heads: int) -> jax.Array:
    """The inverse: this device's tokens, all heads."""
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
    """The transpose of :func:`to_heads`: ``x`` float32, the result in ``dtype``.

    Where heads were copied, the gradients of the copies travel in float32, and are summed in it.
    Where they were not, a gradient is rounded before it travels: nothing is added to it, so the
    result is the same, and half the bytes are sent. ``heads_before``: how many heads there were
    before the exchange.
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
    """The entries of ``x`` for the N / h heads that :func:`to_heads` leaves, along axis ``heads``.

    Its gradient is JAX's own: zero for the heads of the other devices.
    """
    if axis_name is None:
        return x
    count = x.shape[heads] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * count, count, axis=heads)


def all_tokens(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Segment ids, positions or KV bounds ``[B, c]`` or ``[c]``, of all the axis' devices.

    Returns:
      ``[B, h c]`` or ``[h c]``.
    """
    return x if axis_name is None else lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def _copies(heads: int, axis_name: str) -> int:
    return max(1, lax.axis_size(axis_name) // heads)
