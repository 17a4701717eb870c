"""Static parameters of a call of a kernel: sizes, mask, score, tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import numpy as np

from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mask import Mask
from pallas_kernels.mosaic.score_inputs import masks_by_tokens
from pallas_kernels.spec import AttentionSpec


class TileConfig(Protocol):
    """The tile sizes that every kernel's config has."""

    @property
    def block_q(self) -> int:
        """Queries per query tile."""
        ...

    @property
    def block_kv(self) -> int:
        """Keys per KV tile."""
        ...


@dataclasses.dataclass(frozen=True)
class KernelStatic[Config: TileConfig]:
    """Static parameters that all kernels have.

    Attributes:
      spec: mask, score and dropout.
      mask: the mask that scores are tested by; per-query KV bounds include the window.
      config: tile sizes.
      batch: B.
      q_length: T, number of positions; arrays may have padding after it.
      kv_length: S, the same.
      heads: N, query heads.
      kv_heads: K, key/value heads.
      head_dim: H, of queries and keys.
      value_dim: Hv, of values, of o and of dO.
      dtype: of queries, keys, values and dO.
      has_segments: whether tokens have segment ids.
      has_kv_bounds: whether there are per-query KV bounds.
      has_bias: whether an ALiBi bias is added to the logits.
      has_block_mask: whether there is a block-sparse mask.
      masks_by_tokens: whether positions, segment ids, KV bounds or a mask_mod may mask scores.
    """

    spec: AttentionSpec
    mask: Mask
    config: Config
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    has_segments: bool
    has_kv_bounds: bool
    has_bias: bool
    has_block_mask: bool
    masks_by_tokens: bool

    @classmethod
    def of(cls, inputs: AttentionInputs, spec: AttentionSpec, config: Config, **own: Any) -> Self:
        """From a call's inputs; ``own`` are the fields of one of the kernels."""
        batch, _, heads, head_dim = inputs.query.q.shape
        mask, _ = inputs.folded(spec.mask)
        return cls(
            spec=spec,
            mask=mask,
            config=config,
            batch=batch,
            q_length=inputs.q_positions.shape[0],
            kv_length=inputs.kv_positions.shape[0],
            heads=heads,
            kv_heads=inputs.kv.k.shape[2],
            head_dim=head_dim,
            value_dim=inputs.value_dim,
            dtype=inputs.query.q.dtype,
            has_segments=inputs.has_segments,
            has_kv_bounds=inputs.has_kv_bounds,
            has_bias=inputs.has_bias,
            has_block_mask=inputs.shared.block_mask is not None,
            masks_by_tokens=masks_by_tokens(inputs, spec),
            **own,
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
    def keys_are_padded(self) -> bool:
        """Whether the last KV tile extends past the last key."""
        return self.kv_length % self.config.block_kv != 0

    @property
    def needs_mask(self) -> bool:
        """Whether any score may be masked, apart from padding."""
        return self.masks_by_tokens or self.has_block_mask

    @property
    def skips_masks(self) -> bool:
        """Whether a step on a tile without masked scores is other code than one on any tile.

        It says nothing about which tiles need a mask: tile bounds alone do. They count the tiles of
        a partial query tile among those, so there are some in a call that masks no score at all.
        """
        return self.needs_mask or self.keys_are_padded

    @property
    def has_few_terms(self) -> bool:
        """Whether the only options are windows, and dropout or user functions that only add."""
        score, dropout = self.spec.score, self.spec.dropout
        arrays = self.has_segments or self.has_kv_bounds or self.has_block_mask or self.has_bias
        nonlinear = score.has_derivative or score.logits_soft_cap is not None
        both = dropout is not None and self.spec.calls_functions
        return not (arrays or nonlinear or both)

    @property
    def bias_is_affine(self) -> bool:
        """Whether the bias is computed as an affine function of key positions.

        It is if no unmasked key is after its query.
        """
        return self.has_bias and self.spec.mask.hides_later_keys

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added to the scores after ``q k^T``."""
        return self.has_bias

    @property
    def base_2_factor(self) -> float:
        """Factor that takes a tile's scores to logits in base 2; with a bias they are already."""
        return 1.0 if self.has_bias else self.spec.score.base_2_factor
