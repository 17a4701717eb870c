"""The keyword arguments of the public attention functions, as types for whoever passes them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from burst_jax.attention.score_mod import MaskMod, ScoreMod
from burst_jax.attention.validation import WindowSize
from burst_jax.errors import did_you_mean
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.rotation import RotationChoice
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

    ulysses_axis: str | None
    layout: Layout
    backward: RotationChoice


class AttentionOptions(RingOptions, total=False):
    """Keyword arguments of ``burst_attention``, all but ``return_residual``."""

    mesh: Mesh | AbstractMesh | None
    seq_axis: AxisNames
    batch_axis: AxisNames
    tensor_axis: AxisNames
    pad: bool


_NO_DENSE_MASK = (
    "there are no dense bias and mask, the fourth and fifth argument of "
    "jax.nn.dot_product_attention; say a mask by is_causal, local_window_size or "
    "query_segment_ids and key_value_segment_ids or key_starts and key_ends or block_mask or "
    "mask_mod, a bias by alibi_slopes or score_mod, and leave them out if they are None"
)
# What to use instead of arguments of jax.nn.dot_product_attention that are not taken.
_REMEDIES = {
    "bias": _NO_DENSE_MASK,
    "mask": _NO_DENSE_MASK,
}


def without_catch_all[F: Callable[..., Any]](function: F) -> F:
    """The function itself, whose signature is shown without ``*args`` and ``**kwargs``.

    Those take arguments that the function does not have, so that it can refuse them with a remedy.
    """
    signature = inspect.signature(function)
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    shown = [each for each in signature.parameters.values() if each.kind not in kinds]
    setattr(function, "__signature__", signature.replace(parameters=shown))  # noqa: B010
    return function


def refuse_other_arguments(
    function: Callable[..., object], positional: tuple[object, ...], others: Mapping[str, object]
) -> None:
    """Raises TypeError if a call has arguments that the function does not have.

    For those of ``jax.nn.dot_product_attention`` the message says what to use instead.

    Args:
      function: the public function, :func:`without_catch_all`.
      positional: the arguments by position that came beside those it has.
      others: the arguments by keyword that came beside those it has.
    """
    called = function.__name__
    if positional:
        raise TypeError(
            f"{called} takes query, key and value by position, and {len(positional)} more "
            f"came: {_REMEDIES['mask']}"
        )
    for name in others:
        if name in _REMEDIES:
            raise TypeError(f"{called} has no argument {name!r}: {_REMEDIES[name]}")
        hint = did_you_mean(name, inspect.signature(function).parameters)
        raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")
