"""Which side rotates in the backward pass, and how many bytes that sends."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from burst_jax.ring.schedule import Hops

# K, V and their gradients rotate, or the queries and theirs do.
Rotation = Literal["rotate_kv", "rotate_query"]
ROTATIONS: tuple[Rotation, ...] = get_args(Rotation)
# The values of the argument ``backward``: a rotation, or the one that sends fewer bytes.
RotationChoice = Literal["auto", "rotate_kv", "rotate_query"]
ROTATION_CHOICES: tuple[RotationChoice, ...] = get_args(RotationChoice)


@dataclasses.dataclass(frozen=True)
class ShardShape:
    """The sizes of one device's queries, keys and values.

    Attributes:
      q_length: number of queries.
      kv_length: number of keys.
      heads: N, on this device.
      kv_heads: K, on this device.
      head_dim: H, of queries and keys.
      itemsize: bytes per element of the activations.
      batch: B, on this device.
      value_dim: Hv, of values; None is H.
    """

    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    batch: int = 1
    value_dim: int | None = None

    @property
    def key_and_value_dims(self) -> int:
        """H + Hv."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)


def hop_bytes(rotation: Rotation, shape: ShardShape) -> tuple[int, int]:
    """Bytes of a block and of a gradient sum, which the backward pass sends.

    A block is K and V for ``rotate_kv``; and Q, dO, float32 lse and delta for ``rotate_query``
    (BurstAttention, arXiv 2403.09347, section 3.1). The sum is of dK and dV, or of dQ, in float32.
    """
    if rotation == "rotate_kv":
        vectors = shape.batch * shape.kv_length * shape.kv_heads
        elements = vectors * shape.key_and_value_dims
        return elements * shape.itemsize, elements * 4
    vectors = shape.batch * shape.q_length * shape.heads
    # dO has the head dim of values. lse and delta have one float32 per query and head.
    block = vectors * (shape.key_and_value_dims * shape.itemsize + 2 * 4)
    return block, vectors * shape.head_dim * 4


def forward_bytes(hops: Hops, shape: ShardShape) -> int:
    """Bytes that one device sends in the forward pass: K and V at every hop of their route."""
    block, _ = hop_bytes("rotate_kv", shape)
    return hops.blocks * block


def backward_bytes(rotation: Rotation, hops: Hops, shape: ShardShape) -> int:
    """Bytes that one device sends in the backward pass: blocks and the sums of their gradients.

    ``hops`` are those of the rotating side's route.
    """
    block, gradient = hop_bytes(rotation, shape)
    return hops.blocks * block + hops.sums * gradient


def choose_rotation(
    choice: RotationChoice, shape: ShardShape, *, kv_hops: Hops, query_hops: Hops
) -> Rotation:
    """``choice`` itself, or for "auto" the rotation that sends fewer bytes.

    With 16-bit activations that is ``rotate_query`` for N = K, and ``rotate_kv`` if two or more
    query heads share a key head. With windows K and V may make other hops than the queries.
    """
    if choice != "auto":
        return choice
    kv = backward_bytes("rotate_kv", kv_hops, shape)
    query = backward_bytes("rotate_query", query_hops, shape)
    return "rotate_kv" if kv <= query else "rotate_query"
