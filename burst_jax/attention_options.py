"""The keyword arguments of the public attention functions, as types for whoever passes them on."""

from __future__ import annotations

from typing import TypedDict

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from burst_jax.checks import WindowSize
from burst_jax.functions import MaskMod, ScoreMod
from burst_jax.layout import Layout
from burst_jax.ring.rotation import RotationChoice
from burst_jax.sharding import AxisNames
from pallas_kernels import Implementation


class MaskArrays(TypedDict, total=False):
    """Keyword arguments of all functions that say masks by arrays, beside the segment ids."""

    query_seq_lengths: jax.Array | None
    key_value_seq_lengths: jax.Array | None
    prefix_lengths: jax.Array | None
    key_starts: jax.Array | None
    key_ends: jax.Array | None
    block_mask: jax.Array | np.ndarray | None


MASK_ARRAYS: tuple[str, ...] = tuple(MaskArrays.__annotations__)
# Those that say positions of keys: all that are not a mask by blocks.
RANGE_ARRAYS: tuple[str, ...] = tuple(name for name in MASK_ARRAYS if name != "block_mask")


class LocalOptions(MaskArrays, total=False):
    """Keyword arguments of ``local_attention``, all but ``return_residual``."""

    query_offset: int | jax.Array
    query_positions: jax.Array | None
    key_value_positions: jax.Array | None
    is_causal: bool
    scale: float | None
    local_window_size: WindowSize
    logits_soft_cap: float | None
    query_segment_ids: jax.Array | None
    key_value_segment_ids: jax.Array | None
    sink_logits: jax.Array | None
    alibi_slopes: jax.Array | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    dropout_rate: float
    dropout_key: jax.Array | None
    implementation: str | Implementation | None
    deterministic: bool


class RingOptions(LocalOptions, total=False):
    """Keyword arguments of ``ring_attention``, all but ``return_residual``."""

    head_parallel_axis: str | None
    layout: Layout
    backward: RotationChoice


class AttentionOptions(RingOptions, total=False):
    """Keyword arguments of ``burst_attention``, all but ``return_residual``."""

    mesh: Mesh | AbstractMesh | None
    seq_axis: AxisNames
    batch_axis: AxisNames
    head_axis: AxisNames
    pad: bool
