"""From the public functions' arguments to a :class:`burst_jax.ring.request.Request`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from burst_jax.attention.score_mod import MaskMod, ScoreMod, check_functions
from burst_jax.attention.validation import (
    WindowSize,
    check_bool,
    check_rotation,
    check_seq_axes,
    make_spec,
)
from burst_jax.layouts.permutation import Layout, check_layout
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels import Implementation, find
from pallas_kernels.mask import Mask


def parse_request(
    axis_argument: str,
    axes: AxisNames,
    ulysses_axis: str | None,
    size_of: Callable[[str, str], int],
    *,
    head_dim: int,
    layout: Layout = "contiguous",
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: WindowSize = None,
    lifts_causality: bool = False,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    implementation: str | Implementation | None = None,
    deterministic: bool = False,
    backward: RotationChoice = "auto",
    query_offset: int | None = 0,
    positions_by_row: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Request:
    """The request of a call's arguments.

    An argument that is not described here has the name, the default and the meaning that it has
    in :func:`burst_jax.burst_attention`.

    Args:
      axis_argument: what the caller's argument with the ring's axes is called.
      axes: its value.
      ulysses_axis: the mesh axis of the exchange of heads, or None.
      size_of: ``(argument, axis) -> devices along it``; raises for an axis that is not there.
      head_dim: H, for the default scale.
      lifts_causality: whether there are keys that causality does not hide. Then, and where a
        side of the window is traced, ranges of keys (:mod:`burst_jax.attention.kv_bounds`) say
        what the static mask does not.
      query_offset: the attribute.
      positions_by_row: whether each row has queries at other positions. Then ranges of keys are
        all that there is of the mask.

    Raises:
      ValueError: an argument is wrong.
    """
    check_layout(layout)
    check_rotation(backward)
    check_bool("deterministic", deterministic)
    ring_axes = check_seq_axes(axis_argument, axes, ulysses_axis)
    ulysses_size = 1
    if ulysses_axis is not None:
        ulysses_size = size_of("ulysses_axis", ulysses_axis)
    spec = make_spec(
        head_dim,
        is_causal,
        scale,
        local_window_size,
        logits_soft_cap,
        lifts_causality,
        dropout_rate,
    )
    check_functions(score_mod, mask_mod)
    mask = Mask() if positions_by_row else spec.mask
    return Request(
        spec=dataclasses.replace(
            spec,
            mask=dataclasses.replace(mask, mask_mod=mask_mod),
            score=dataclasses.replace(spec.score, score_mod=score_mod),
        ),
        layout=layout,
        ring_axes=ring_axes,
        ring_sizes=tuple(size_of(axis_argument, axis) for axis in ring_axes),
        ulysses_axis=ulysses_axis,
        ulysses_size=ulysses_size,
        implementation=find(implementation),
        rotation=backward,
        deterministic=bool(deterministic),
        query_offset=query_offset,
    )
