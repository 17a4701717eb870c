"""Attention of a few queries over a cache that is sharded over devices, inside a ``shard_map``."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.serving.cache import SlotMetadata
from pallas_kernels.device import current_target
from pallas_kernels.mosaic.sm80.decode import partial_attention, unsupported

# The most splits that are merged term by term.
_TERMS = 64


class PartialAttention(NamedTuple):
    """Partial results over splits of the keys, not yet normalized (split-K decoding).

    Attributes:
      out: float32 ``[splits, B, T, N, Hv]``, the sum of ``exp(logit - most) value``.
      most: float32 ``[splits, B, T, N]``, the largest logit.
      total: float32 ``[splits, B, T, N]``, the sum of ``exp(logit - most)``; 0 for a fully masked
        split.
    """

    out: jax.Array
    most: jax.Array
    total: jax.Array

    def merged(self) -> PartialAttention:
        """One split instead of all."""
        most = jnp.where(self.total == 0, -jnp.inf, self.most)
        highest = _over_splits(jnp.maximum, most)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)
        factor = jnp.exp(most - highest)
        total = _over_splits(jnp.add, factor * self.total)
        return PartialAttention(_over_splits(jnp.add, factor[..., None] * self.out), highest, total)

    def gathered(self, axes: tuple[str, ...]) -> PartialAttention:
        """One split per device, by one all-gather."""
        if not axes:
            return self
        out, most, total = self if len(self.out) == 1 else self.merged()
        packed = jnp.concatenate([out, jnp.stack([most, total], -1)], -1)
        packed = lax.all_gather(packed, axes, tiled=True)
        return PartialAttention(packed[..., :-2], packed[..., -2], packed[..., -1])

    def attention(self, sink_logits: jax.Array | None) -> jax.Array:
        """The normalized output, float32 ``[B, T, N, Hv]``; 0 for a fully masked query."""
        merged = self if len(self.out) == 1 else self.merged()
        out, most, total = (x[0] for x in merged)
        if sink_logits is not None:
            sinks = sink_logits.astype(jnp.float32)
            highest = jnp.maximum(most, sinks)
            factor = jnp.exp(most - highest)
            out, total = factor[..., None] * out, factor * total + jnp.exp(sinks - highest)
        return out / jnp.where(total == 0, 1, total)[..., None]


def _over_splits(combine: Any, x: jax.Array) -> jax.Array:
    """``[splits, ...]`` to ``[1, ...]``, term by term unless there are many splits.

    XLA makes one kernel of the terms, and one of each reduction.
    """
    if len(x) > _TERMS:
        return combine.reduce(x, 0, keepdims=True)
    return functools.reduce(combine, jnp.split(x, len(x)))


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

    On Ampere and newer GPUs a Pallas kernel splits the keys over the SMs; elsewhere, for float32
    and head dims that it does not support, and with the implementation "xla", it is two matmuls.

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
    scores: Any = {"scale": scale, "logits_soft_cap": logits_soft_cap, "window": window}
    if (
        getattr(implementation, "name", implementation) in ("xla", "reference")
        or unsupported(query, keys, values, *current_target()) is not None
    ):
        partial = attend_by_matmuls(query, keys, values, slots, last, **scores)
    else:
        slot_arrays = slots.cache_positions, slots.present

        def merge(*parts: jax.Array) -> PartialAttention:
            return PartialAttention(*parts).merged()

        found = partial_attention(
            query, keys, values, *slot_arrays, last, used, merge=merge, **scores
        )
        partial = PartialAttention(*found)
    return partial.gathered(axes).attention(sink_logits).astype(dtype)


def attend_by_matmuls(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: SlotMetadata,
    last: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    window: int | None = None,
) -> PartialAttention:
    """One split of all keys of this device, by two matmuls; see :func:`decode_attention`."""
    batch, length, heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("btkgh,bckh->btkgc", grouped, keys, preferred_element_type=jnp.float32)
    logits *= scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    positions = (last - length + 1 + jnp.arange(length, dtype=jnp.int32))[:, None]
    mask = slots.cache_positions <= positions
    if window is not None:
        mask &= slots.cache_positions > positions - window
    mask = mask & (slots.present[:, None] > 0)
    logits = jnp.where(mask[:, :, None, None], logits, -jnp.inf)
    most = logits.max(-1)
    most = jnp.where(jnp.isfinite(most), most, 0)
    weights = jnp.exp(logits - most[..., None])
    factors = weights.astype(values.dtype), values
    out = jnp.einsum("btkgc,bckh->btkgh", *factors, preferred_element_type=jnp.float32)
    shape, total = (1, batch, length, heads), weights.sum(-1)
    return PartialAttention(out.reshape(*shape, -1), most.reshape(shape), total.reshape(shape))
