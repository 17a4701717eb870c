"""Logits of scores in plain JAX: scale, soft cap, user functions, bias and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_kernels.arrays import rounded
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.inputs import PerHead
from pallas_kernels.mask import both
from pallas_kernels.spec import AttentionSpec


def products(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product that accumulates in float32."""
    # HIGHEST: float32 operands are not rounded to TF32; nothing changes for bf16.
    return jnp.einsum(
        subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def masked_logits(
    spec: AttentionSpec,
    raw: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    *,
    per_head: PerHead,
    segment_ids: tuple[jax.Array | None, jax.Array | None] = (None, None),
    kv_bounds: Mapping[str, jax.Array],
    coordinates: ScoreCoordinates | None,
    further: Sequence[jax.Array] = (),
) -> jax.Array:
    """The logits of raw scores, -inf where masked.

    Args:
      spec: mask and score.
      raw: raw scores ``[B, K, G, q, s]`` (:meth:`pallas_kernels.score.Score.raw`). All other arrays
        broadcast against them.
      q_positions: int32, of the queries.
      kv_positions: int32, of the keys.
      per_head: the parameters that scores are computed from.
      segment_ids: of queries and keys.
      kv_bounds: ``kv_starts`` and ``kv_ends`` of the queries.
      coordinates: of the scores, for user functions.
      further: masks, True where a score counts; leading axes may be missing.
    """
    logits = spec.score.modified(raw, coordinates)
    bias = spec.score.bias(q_positions, kv_positions, per_head)
    logits = rounded(logits if bias is None else logits + bias)
    mask = spec.mask.allowed(
        q_positions, kv_positions, *segment_ids, **kv_bounds, coordinates=coordinates
    )
    for other in further:
        mask = other if mask is None else both(mask, other)
    return logits if mask is None else jnp.where(mask, logits, -jnp.inf)


def in_groups(x: ArrayLike, groups: int) -> jax.Array:
    """An array of query heads, ``[N]``, shaped to broadcast against the scores of G groups."""
    return jnp.asarray(x).reshape(1, -1, groups, 1, 1)
