"""What travels around the ring, and how many bytes that is.

Device r sends to r + 1, so after i hops it holds what started on device r - i:

    n = 4      device 0   device 1   device 2   device 3
    step 0     block 0    block 1    block 2    block 3
    step 1     block 3    block 0    block 1    block 2
    step 2     block 2    block 3    block 0    block 1
    step 3     block 1    block 2    block 3    block 0
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
from jax import lax

Backward = Literal["auto", "rotate_kv", "rotate_query"]
BACKWARDS: tuple[str, ...] = get_args(Backward)


def shift(tree: Any, axis_name: str, size: int) -> Any:
    """Sends every array of a pytree to the next device of the ring."""
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, ring), tree)


def source(axis_name: str, size: int, hops: int) -> jax.Array:
    """Index of the device on which the block that is here after ``hops`` hops started."""
    return lax.rem(lax.axis_index(axis_name) - hops + size, size)


def forward_bytes(
    size: int, kv_length: int, kv_heads: int, head_dim: int, itemsize: int, batch: int = 1
) -> int:
    """Bytes that one device sends in forward: K and V, n - 1 hops.

    Args:
      size: n, devices on the ring.
      kv_length: key tokens per device.
      kv_heads: K, on this device.
      head_dim: H.
      itemsize: bytes per element of K and V.
      batch: batch rows on this device.
    """
    return (size - 1) * 2 * batch * kv_length * kv_heads * head_dim * itemsize


def backward_bytes(
    rotation: str,
    size: int,
    q_length: int,
    kv_length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    gradient_itemsize: int = 4,
    batch: int = 1,
) -> int:
    """Bytes that one device sends in backward. Data makes n - 1 hops, gradients n: the last, home.

    ``rotate_kv`` moves K, V and float32 dK, dV; ``rotate_query`` moves Q, dO, float32 lse and
    delta, and float32 dQ (BurstAttention, arXiv 2403.09347, section 3.1, on today's ring).

    Args:
      rotation: "rotate_kv" or "rotate_query".
      size: n, devices on the ring; one device sends nothing.
      q_length: query tokens per device.
      kv_length: key tokens per device.
      heads: N, on this device.
      kv_heads: K, on this device.
      head_dim: H.
      itemsize: bytes per element of the activations.
      gradient_itemsize: bytes per element of the travelling gradients.
      batch: batch rows on this device.
    """
    if size == 1:
        return 0
    if rotation == "rotate_kv":
        elements = 2 * batch * kv_length * kv_heads * head_dim
        return elements * ((size - 1) * itemsize + size * gradient_itemsize)
    rows = batch * q_length * heads
    data = (size - 1) * rows * 2 * (head_dim * itemsize + 4)
    return data + size * rows * head_dim * gradient_itemsize


def choose_rotation(backward: str, **shape: int) -> str:
    """``backward`` itself, or for "auto" the rotation that moves fewer bytes.

    With float32 gradients and 16-bit activations that is ``rotate_query`` for N = K, and
    ``rotate_kv`` once two or more query heads share a key head.
    """
    if backward != "auto":
        return backward
    kv, query = (backward_bytes(name, **shape) for name in ("rotate_kv", "rotate_query"))
    return "rotate_kv" if kv <= query else "rotate_query"
