"""Attention of a few queries over a cache that is sharded over devices, inside a ``shard_map``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.serving.cache import SlotMetadata
from pallas_kernels.decode import PartialAttention, partial_attention


def decode_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: SlotMetadata,
    last: jax.Array,
    used: jax.Array,
    axes: tuple[str, ...],
    *,
    window: int | None = None,
    scale: float | jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    implementation: Any = None,
) -> jax.Array:
    r"""Attention over the keys of all devices: a local pass and an all-gather of partial results.

    .. math::
        m = \max_i m_i    out = \sum_i exp(m_i - m) \cdot out_i / \sum_i exp(m_i - m) \cdot total_i

    over the devices i: ``out_i`` is not normalized, ``m_i`` is the largest logit, and ``total_i``
    the sum of weights. A device sends these ``N (Hv + 2)`` float32 values per query, for any number
    of keys (Tree Attention, arXiv 2408.04093; Helix, arXiv 2507.07120).

    The local pass is :func:`pallas_kernels.decode.partial_attention`.

    Args:
      query: ``[B, T, N, H]``, replicated, the last of them at cache position ``last``; T is small.
      keys: ``[B, C, K, H]``, this device's slots.
      values: ``[B, C, K, Hv]``.
      slots: metadata of the slots.
      last: int32 scalar, the last cache position.
      used: int32 scalar: slots from this index on are empty.
      axes: the mesh axes that shard the cache.
      window: number of tokens that a query attends to, its own included; None is all.
      scale: multiplies logits; None is ``H^-1/2``.
      logits_soft_cap: ``cap tanh(logit / cap)``, or None.
      sink_logits: float32 ``[N]``: one more logit of each head's softmax, or None.
      implementation: the option of the model's attention.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of ``query``; 0 for a fully masked query.
    """
    dtype = query.dtype
    if isinstance(scale, jax.Array):
        query, scale = (query * scale).astype(dtype), 1.0
    elif scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    partial = partial_attention(
        query, keys, values, slots.cache_positions, slots.present, last, used, scale=scale,
        logits_soft_cap=logits_soft_cap, window=window, implementation=implementation,
    )  # fmt: skip
    return _gathered(partial, axes).attention(sink_logits).astype(dtype)


def _gathered(partial: PartialAttention, axes: tuple[str, ...]) -> PartialAttention:
    """One split per device, by one all-gather."""
    if not axes:
        return partial
    out, most, total = partial if len(partial.out) == 1 else partial.merged()
    packed = jnp.concatenate([out, jnp.stack([most, total], -1)], -1)
    packed = lax.all_gather(packed, axes, tiled=True)
    return PartialAttention(packed[..., :-2], packed[..., -2], packed[..., -1])
