"""Attention of a few queries over a cache that is split over devices, inside a ``shard_map``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def decode_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    axes: tuple[str, ...],
    *,
    scale: float | jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    r"""Attention over the keys of all devices: one local pass and one exchange of (out, lse).

    .. math::
        lse = log \sum_i exp(lse_i)    out = \sum_i exp(lse_i - lse) \cdot out_i

    over the devices i. What travels is ``N (Hv + 1)`` float32 numbers for each query and device,
    whatever the number of keys is (Tree Attention, arXiv 2408.04093; Helix, arXiv 2507.07120).

    Args:
      query: ``[B, T, N, H]``, the same on all devices; T is small.
      keys: ``[B, C, K, H]``, this device's slots.
      values: ``[B, C, K, Hv]``.
      seen: bool ``[B, T, C]``, which slots each query sees.
      axes: the mesh axes that the cache is split over.
      scale: multiplies logits; None is ``H^-1/2``.
      logits_soft_cap: ``cap tanh(logit / cap)``, or None.
      sink_logits: float32 ``[N]``: one more logit of each head's softmax, or None.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of ``query``; 0 where nothing is seen.
    """
    batch, length, heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("btkgh,bckh->bkgtc", grouped, keys, preferred_element_type=jnp.float32)
    logits *= 1 / math.sqrt(dim) if scale is None else scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    most = logits.max(-1)
    shift = jnp.where(jnp.isfinite(most), most, 0)
    weights = jnp.exp(logits - shift[..., None])
    total = weights.sum(-1)
    out = jnp.einsum(
        "bkgtc,bckh->bkgth",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    # One exchange: the sums with their shift and their total.
    parts = jnp.concatenate([out, total[..., None], shift[..., None]], -1)
    parts = lax.all_gather(parts, axes) if axes else parts[None]
    out, total, shift = parts[..., :-2], parts[..., -2], parts[..., -1]
    shift = jnp.where(total > 0, shift, -jnp.inf)
    most = shift.max(0)
    sinks = None
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1)
        most = jnp.maximum(most, sinks)
    most = jnp.where(jnp.isfinite(most), most, 0)
    factor = jnp.exp(shift - most)
    total = (factor * total).sum(0)
    if sinks is not None:
        total += jnp.exp(sinks - most)
    out = (factor[..., None] * out).sum(0) / jnp.where(total > 0, total, 1)[..., None]
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1)
    return out.astype(query.dtype)
