"""Attention of a few queries over a long KV cache, as partial results over splits of the keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation, runs_anywhere
from pallas_kernels.choice import choose
from pallas_kernels.device import target_of

# The most splits that are merged term by term.
_TERMS = 64

# implementation='xla' would take prefill's kernels away, too.
_ADVICE = (
    "XLA is slower; prefill has kernels of its own. If that is right here, ignore "
    "pallas_kernels.SlowerKernelsWarning by a warnings filter"
)


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


@dataclasses.dataclass(frozen=True)
class DecodeAttention:
    """An implementation of :func:`partial_attention`.

    Attributes:
      name: the public name.
      attend: the function, with its arrays and scores.
      unavailable: ``(platform, compute_capability) -> reason``: why it cannot run there, or None if
        it can.
      unsupported: ``(query, keys, values, compute_capability) -> reason``: the same of arrays.
    """

    name: str
    attend: Callable[..., PartialAttention]
    unavailable: Callable[[str, float | None], str | None] = runs_anywhere
    unsupported: Callable[..., str | None] = lambda *_: None


def partial_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    present: jax.Array,
    last: jax.Array,
    used: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    window: int | None = None,
    implementation: str | Implementation | None = None,
) -> PartialAttention:
    """Attention of a few queries over one device's part of a KV cache.

    On Ampere and newer GPUs a Pallas kernel splits the keys over the SMs. Elsewhere, and for dtypes
    and head dims that it does not support, it is two matmuls.

    Args:
      query: ``[B, T, N, H]``, at positions ``last - T + 1`` to ``last``; T is small.
      keys: ``[B, C, K, H]``.
      values: ``[B, C, K, Hv]``.
      positions: int32 ``[C]``, of the keys; attention is causal.
      present: int32 ``[B, C]``, 0 for keys that a sequence does not have.
      last: int32 scalar, position of the last query.
      used: int32 scalar: keys from this index on are absent (``present`` is 0).
      scale: factor on the logits.
      logits_soft_cap: ``cap tanh(logit / cap)``, or None.
      window: number of positions that a query attends to, including its own; None: unlimited.
      implementation: that of the other passes' attention. "xla" takes the matmuls. All others take
        the one kernel that decodes, where it can; elsewhere the matmuls, with the reason in a
        :class:`pallas_kernels.SlowerKernelsWarning`.
    """
    option: Any = getattr(implementation, "name", implementation)
    target = target_of(query)

    def obstacle(candidate: DecodeAttention) -> str | None:
        reason = candidate.unavailable(*target)
        return reason or candidate.unsupported(query, keys, values, target.compute_capability)

    chosen = choose(
        "xla" if option in ("xla", "reference") else None, _by_name, target, obstacle,
        names=("mosaic_sm80", "xla"), subject="decoding", advice=_ADVICE,
    )  # fmt: skip
    arrays = query, keys, values, positions, present, last, used
    scores: Any = {"scale": scale, "logits_soft_cap": logits_soft_cap, "window": window}
    return chosen.attend(*arrays, **scores)


def attend_by_kernel(*arrays: jax.Array, **options: Any) -> PartialAttention:
    """One split of all keys, by the kernel; see :func:`partial_attention`.

    ``options``: those of the scores, ``config`` and ``splits`` of the kernel.
    """
    from pallas_kernels.mosaic.sm80 import decode

    def merge(*parts: jax.Array) -> PartialAttention:
        return PartialAttention(*parts).merged()

    return PartialAttention(*decode.partial_attention(*arrays, merge=merge, **options))


def attend_by_matmuls(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    present: jax.Array,
    last: jax.Array,
    used: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    window: int | None = None,
) -> PartialAttention:
    """One split of all keys, by two matmuls; see :func:`partial_attention`."""
    del used
    batch, length, heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("btkgh,bckh->btkgc", grouped, keys, preferred_element_type=jnp.float32)
    logits *= scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    of_queries = (last - length + 1 + jnp.arange(length, dtype=jnp.int32))[:, None]
    mask = positions <= of_queries
    if window is not None:
        mask &= positions > of_queries - window
    mask = mask & (present[:, None] > 0)
    logits = jnp.where(mask[:, :, None, None], logits, -jnp.inf)
    most = logits.max(-1)
    most = jnp.where(jnp.isfinite(most), most, 0)
    weights = jnp.exp(logits - most[..., None])
    factors = weights.astype(values.dtype), values
    out = jnp.einsum("btkgc,bckh->btkgh", *factors, preferred_element_type=jnp.float32)
    shape, total = (1, batch, length, heads), weights.sum(-1)
    return PartialAttention(out.reshape(*shape, -1), most.reshape(shape), total.reshape(shape))


def _by_name(name: str) -> DecodeAttention:
    """An implementation by its name. Importing kernels takes most of a second, so it is late."""
    if name in ("xla", "reference"):
        return DecodeAttention("xla", attend_by_matmuls)
    from pallas_kernels.mosaic.sm80 import decode

    return DecodeAttention(name, attend_by_kernel, decode.unavailable, decode.unsupported)
