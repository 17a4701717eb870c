"""Converts a call's inputs to the arrays and static parameters of the sm80 kernels.

Kernels read arrays ``[B, length, heads * lanes]``, padded to whole tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.arrays import pad_axis
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.score_inputs import ScoreInputs
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.static import KernelStatic


class Sm80Static[Config: (ForwardConfig, BackwardConfig)](KernelStatic[Config]):
    """Static parameters of a call of a kernel; arrays are padded to whole tiles."""

    @property
    def padded_q_length(self) -> int:
        """T, rounded up to whole tiles."""
        return self.q_tiles * self.config.block_q

    @property
    def padded_kv_length(self) -> int:
        """S, rounded up to whole tiles."""
        return self.kv_tiles * self.config.block_kv


class AttentionArrays(NamedTuple):
    """What both kernels read: arrays, or references inside a kernel.

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


class BackwardArrays(NamedTuple):
    """What the kernel reads.

    Attributes:
      attention: queries, keys, values, and the inputs of scores.
      do: ``[B, T, N * Hv]``, T padded to whole tiles.
      stats: float32 ``[B, N, query tiles, 2 * block_q]``: lse in base 2, then delta.
      dq_scale: float32 ``[B, N]``, scale of dQ in fixed point; None if dQ is float32.
    """

    attention: AttentionArrays
    do: Any
    stats: Any
    dq_scale: Any


class BackwardResults(NamedTuple):
    """What the kernel writes.

    Attributes:
      dq: float32 ``[B, N, query tiles, warpgroups, registers, 128]``, accumulated by atomics; in
        fixed point int32 ``[..., 2]``, the low and the high half of each integer.
      dk: ``[B, S, K * H]``, S padded to whole tiles; a given dK is float32 and is added to.
      dv: ``[B, S, K * Hv]``, the same.
      per_head: float32 ``[B, N, KV tiles, warpgroups, warps]`` each, by name; each warp of a CTA
        has its own element.
    """

    dq: Any
    dk: Any
    dv: Any
    per_head: dict[str, Any]


def attention_arrays(static: Sm80Static, inputs: AttentionInputs, bounds: Any) -> AttentionArrays:
    """The arrays of a call."""
    scores = ScoreInputs.of(inputs, static.spec, static.config.tiles)
    return AttentionArrays(
        bounds,
        rows_of_heads(inputs.query.q, static.padded_q_length),
        rows_of_heads(inputs.kv.k, static.padded_kv_length),
        rows_of_heads(inputs.kv.v, static.padded_kv_length),
        scores.with_line() if static.bias_is_affine else scores,
    )


def rows_of_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B, T, N, H]`` as ``[B, length, N * H]``, padded with zeros."""
    return pad_axis(x.reshape(*x.shape[:2], -1), 1, length)


def stats_by_tile(static: Sm80Static[BackwardConfig], inputs: AttentionInputs) -> jax.Array:
    """lse in base 2 and delta, adjacent for each query tile, so that one copy fetches both.

    Returns:
      float32 ``[B, N, query tiles, 2 * block_q]``.
    """
    _, stats = inputs.cotangents()
    lse, delta = softmax.stats_in_base_2(*stats)
    length = static.padded_q_length
    # The weights of padding are 0: with a bias or a user function they could overflow.
    parts = pad_axis(lse, 2, length, softmax.NO_KEYS), pad_axis(delta, 2, length)
    by_tile = static.batch, static.heads, static.q_tiles, static.config.block_q
    return jnp.concatenate([x.reshape(by_tile) for x in parts], axis=-1)
