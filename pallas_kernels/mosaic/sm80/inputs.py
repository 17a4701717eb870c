"""Converts a call's inputs to the arrays and static parameters of the sm80 kernels.

Kernels read arrays ``[B, length, heads * lanes]``, padded to whole tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import pad_axis
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.score_inputs import ScoreInputs, masks_by_tokens
from pallas_kernels.mosaic.scores import ScoreStatic
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.score import LOG2_E
from pallas_kernels.spec import AttentionSpec

# Replaces the lse -inf of a query that attends to no key, so that all of its weights are 0.
_NO_KEYS = 1e30


@dataclasses.dataclass(frozen=True)
class Static[Config: (ForwardConfig, BackwardConfig)]:
    """Static parameters of a call of a kernel.

    Attributes:
      spec: mask, score and dropout.
      config: tile sizes.
      scores: static parameters of the scores.
      batch: B.
      q_length: T.
      kv_length: S.
      heads: N, query heads.
      kv_heads: K, key/value heads.
      dim: H, of queries and keys.
      value_dim: Hv, of values, of o and of dO.
      dtype: of queries, keys and values.
      hides_some: whether some tiles may need a mask.
    """

    spec: AttentionSpec
    config: Config
    scores: ScoreStatic
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: np.dtype
    hides_some: bool

    @classmethod
    def of(cls, inputs: AttentionInputs, spec: AttentionSpec, config: Config) -> Static[Config]:
        """From the inputs' shapes and dtypes."""
        batch, q_length, heads, dim = inputs.query.q.shape
        mask, _ = inputs.folded(spec.mask)
        kv_length = inputs.kv_length
        padded = kv_length % config.block_kv != 0
        by_tokens = masks_by_tokens(inputs, spec)
        return cls(
            spec=spec,
            config=config,
            scores=ScoreStatic(spec, mask, kv_length, padded, inputs.has_bias),
            batch=batch,
            q_length=q_length,
            kv_length=kv_length,
            heads=heads,
            kv_heads=inputs.kv.k.shape[2],
            dim=dim,
            value_dim=inputs.value_dim,
            dtype=jnp.dtype(inputs.query.q.dtype),
            hides_some=by_tokens or padded or inputs.shared.block_mask is not None,
        )

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        """Number of query tiles."""
        return -(-self.q_length // self.config.block_q)

    @property
    def kv_tiles(self) -> int:
        """Number of KV tiles."""
        return -(-self.kv_length // self.config.block_kv)

    @property
    def padded_q_length(self) -> int:
        """T, rounded up to whole tiles."""
        return self.q_tiles * self.config.block_q

    @property
    def padded_kv_length(self) -> int:
        """S, rounded up to whole tiles."""
        return self.kv_tiles * self.config.block_kv

    @property
    def has_bias(self) -> bool:
        """Whether a bias that depends on positions is added to the logits."""
        return self.scores.has_bias


class AttentionArrays(NamedTuple):
    """What both kernels read; references inside a kernel.

    Attributes:
      bounds: tile bounds (:mod:`pallas_kernels.bounds`).
      q: ``[B, T, N * H]``; T and S are padded to whole tiles.
      k: ``[B, S, K * H]``.
      v: ``[B, S, K * Hv]``.
      scores: the inputs of scores, apart from queries and keys.
    """

    bounds: Any
    q: Any
    k: Any
    v: Any
    scores: ScoreInputs


def attention_arrays(static: Static, inputs: AttentionInputs, bounds: Any) -> AttentionArrays:
    """The arrays of a call."""
    return AttentionArrays(
        bounds,
        rows_of_heads(inputs.query.q, static.padded_q_length),
        rows_of_heads(inputs.kv.k, static.padded_kv_length),
        rows_of_heads(inputs.kv.v, static.padded_kv_length),
        ScoreInputs.of(inputs, static.spec, static.config.tiles),
    )


def rows_of_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B, T, N, H]`` as ``[B, length, N * H]``, padded with zeros."""
    return pad_axis(x.reshape(*x.shape[:2], -1), 1, length)


def stats_by_tile(static: Static[BackwardConfig], inputs: AttentionInputs) -> jax.Array:
    """lse in base 2 and delta, adjacent for each query tile, so that one copy fetches both.

    Returns:
      float32 ``[B, N, query tiles, 2 * block_q]``.
    """
    _, stats = inputs.cotangents()
    lse, delta = stats
    length = static.padded_q_length
    lse = jnp.where(lse == -jnp.inf, _NO_KEYS, lse * LOG2_E)
    # Padding gets _NO_KEYS, too: with a bias or a user function its weights could overflow.
    parts = pad_axis(lse, 2, length, _NO_KEYS), pad_axis(delta, 2, length)
    by_tile = static.batch, static.heads, static.q_tiles, static.config.block_q
    return jnp.concatenate([x.reshape(by_tile) for x in parts], axis=-1)
