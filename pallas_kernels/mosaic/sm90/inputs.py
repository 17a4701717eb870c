"""Records of what the sm90 kernels read and write: arrays on the host, references in the kernel.

Inputs that a call does not have are None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.mosaic.score_inputs import ScoreInputs
from pallas_kernels.mosaic.sm90.padding import PaddedTiles
from pallas_kernels.mosaic.sm90.shared_memory import (
    BackwardBarriers,
    BackwardMemory,
    ForwardMemory,
)


class ForwardResults(NamedTuple):
    """What the forward kernel returns, and the carry that it merges with.

    Attributes:
      o: ``[B, T, N, Hv]``.
      lse: float32 ``[B, N, T]``, T padded to whole tiles.
    """

    o: Any
    lse: Any


class ForwardInputs(NamedTuple):
    """What the forward kernel reads.

    Attributes:
      bounds: int32 ``[1 or B, query tiles, 4]``, or tile lists (:mod:`pallas_kernels.bounds`), or
        :class:`pallas_kernels.document_bounds.DocumentBounds`.
      q: ``[B, T, N, H]``.
      k: ``[B, S, K, H]``.
      v: ``[B, S, K, Hv]``.
      scores: the other inputs of scores.
      k_positions: float32 ``[S]``, S padded to whole tiles, positions of the keys; None unless the
        accumulator of ``q k^T`` starts from the bias.
      sink: float32 ``[N]``, sink logits; None without, and with a carry.
      carry: to merge with; None without, and where the results overwrite it.
      padded: tiles with padding; None unless :attr:`Sm90Static.zeroes_padding`.
    """

    bounds: Any
    q: Any
    k: Any
    v: Any
    scores: ScoreInputs
    k_positions: Any
    sink: Any
    carry: ForwardResults | None
    padded: PaddedTiles | None


class ForwardRefs(NamedTuple):
    """All references of the forward kernel."""

    inputs: ForwardInputs
    results: ForwardResults
    memory: ForwardMemory


class BackwardInputs(NamedTuple):
    """What the backward kernel reads.

    Attributes:
      bounds: int32 ``[1 or B, KV tiles, 4]``, or tile lists (:mod:`pallas_kernels.bounds`), or
        :class:`pallas_kernels.document_bounds.DocumentBounds` of the keys.
      q: ``[B, T, N, H]``.
      do: ``[B, T, N, Hv]``.
      k: ``[B, S, K, H]``.
      v: ``[B, S, K, Hv]``.
      lse: float32 ``[B, N, T]``, in base 2. With ``q_bases``: ``[2, B, N, T]``, first the same, for
        tiles that need a mask, then lse minus the affine bias's intercept, for all other tiles.
      delta: float32 ``[B, N, T]``, times the scale if :attr:`BackwardStatic.scale_in_ds`.
      scores: the other inputs of scores.
      q_bases: int32 ``[query tiles]``, smallest position of each query tile; None unless
        :attr:`BackwardStatic.bias_is_affine`.
      dq_factors: float32 ``[B, N, T]``, T padded to whole tiles, of each query's dQ in fixed point
        (:mod:`pallas_kernels.mosaic.fixed_point`); None if dQ is float32.
      padded: tiles with padding; None unless :attr:`BackwardStatic.zeroes_padding`.
    """

    bounds: Any
    q: Any
    do: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    scores: ScoreInputs
    q_bases: Any
    dq_factors: Any
    padded: PaddedTiles | None


class BackwardResults(NamedTuple):
    """What the backward kernel writes.

    Attributes:
      dq: values of a :class:`pallas_kernels.mosaic.dq.DqSum`; added to.
      dk: ``[B, S, K, H]``, of :attr:`BackwardStatic.written_dkv_dtype`.
      dv: ``[B, S, K, Hv]``, the same.
      per_head_sums: float32 ``[B, N, S]`` each, by name, S padded to whole tiles; added to. Summed
        over B and S they are the gradients of the per-head parameters.
    """

    dq: Any
    dk: Any
    dv: Any
    per_head_sums: dict[str, Any]


class BackwardRefs(NamedTuple):
    """All references of the backward kernel."""

    inputs: BackwardInputs
    results: BackwardResults
    memory: BackwardMemory
    barriers: BackwardBarriers
