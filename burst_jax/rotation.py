"""What travels around the ring, and how many bytes that is."""

from __future__ import annotations

from typing import Literal, get_args

from burst_jax.route import Hops

Backward = Literal["auto", "rotate_kv", "rotate_query"]
BACKWARDS: tuple[str, ...] = get_args(Backward)


def forward_bytes(
    hops: Hops, kv_length: int, kv_heads: int, head_dim: int, itemsize: int, batch: int = 1
) -> int:
    """Bytes that one device sends in forward: K and V, on every hop of a block.

    Args:
      hops: of the route, :func:`burst_jax.route.count_hops`: n - 1 for a ring of n devices.
      kv_length: key tokens per device.
      kv_heads: K, on this device.
      head_dim: H.
      itemsize: bytes per element of K and V.
      batch: batch rows on this device.
    """
    return hops.data * 2 * batch * kv_length * kv_heads * head_dim * itemsize


def backward_bytes(
    rotation: str,
    hops: Hops,
    q_length: int,
    kv_length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    gradient_itemsize: int = 4,
    batch: int = 1,
) -> int:
    """Bytes that one device sends in backward. Blocks make n - 1 hops and so do their gradients.

    What a block gets at home stays there, so its gradient starts at the second stop; its last hop
    goes home.

    ``rotate_kv`` moves K, V and float32 dK, dV; ``rotate_query`` moves Q, dO, float32 lse and
    delta, and float32 dQ (BurstAttention, arXiv 2403.09347, section 3.1, on today's ring).

    Args:
      rotation: "rotate_kv" or "rotate_query".
      hops: of this rotation's route, :func:`burst_jax.route.count_hops`.
      q_length: query tokens per device.
      kv_length: key tokens per device.
      heads: N, on this device.
      kv_heads: K, on this device.
      head_dim: H.
      itemsize: bytes per element of the activations.
      gradient_itemsize: bytes per element of the travelling gradients.
      batch: batch rows on this device.
    """
    if rotation == "rotate_kv":
        elements = 2 * batch * kv_length * kv_heads * head_dim
        return elements * (hops.data * itemsize + hops.gradient * gradient_itemsize)
    rows = batch * q_length * heads
    data = hops.data * rows * 2 * (head_dim * itemsize + 4)
    return data + hops.gradient * rows * head_dim * gradient_itemsize


def choose_rotation(backward: str, *, kv_hops: Hops, query_hops: Hops, **shape: int) -> str:
    """``backward`` itself, or for "auto" the rotation that moves fewer bytes.

    With float32 gradients and 16-bit activations that is ``rotate_query`` for N = K, and
    ``rotate_kv`` once two or more query heads share a key head.

    Args:
      backward: "auto", "rotate_kv" or "rotate_query".
      kv_hops: those of K and V; with windows the two rotations' may differ.
      query_hops: those of the queries.
      **shape: the other arguments of :func:`backward_bytes`.
    """
    if backward != "auto":
        return backward
    kv = backward_bytes("rotate_kv", kv_hops, **shape)
    query = backward_bytes("rotate_query", query_hops, **shape)
    return "rotate_kv" if kv <= query else "rotate_query"
