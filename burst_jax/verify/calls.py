"""What the attention calls of a traced loss specify: layouts, mesh axes, masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from burst_jax.attention.watch import Place, WatchedCall
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import parse_layout
from burst_jax.parallel.mesh import flat_names
from burst_jax.verify.placement import CallAxes

# Arguments that may differ between one device and a mesh.
_OWN = (
    *("mesh", "layout", "implementation", "backward", "dropout_key", "deterministic"),
    # Those of the layout where there are none, and arrays in a balanced layout.
    *("query_positions", "key_value_positions"),
)


def where(call: WatchedCall, calls: Sequence[WatchedCall]) -> str:
    """A call in a sentence: "attention call 2 of 4 (model.py:57)"."""
    same = [other for other in calls if other.name == call.name]
    number = next(i for i, other in enumerate(same, 1) if other is call)
    place = "" if call.place is None else f" ({call.place})"
    return f"{call.name} call {number} of {len(same)}{place}"


def sequence_axes_of(call: WatchedCall) -> tuple[str, ...]:
    """The mesh axes over which a call shards the sequence."""
    ring = call.axes if call.local else _argument(call, "seq_axis")
    return flat_names(ring, _argument(call, "ulysses_axis"))


def wrong_layouts(calls: Sequence[WatchedCall], layout: Layout, axes: tuple[str, ...]) -> list[str]:
    """A sentence for each call whose layout is not the batch's."""
    found = []
    for call in calls:
        own = _argument(call, "layout")
        if own is None or not set(sequence_axes_of(call)) & set(axes):
            continue
        if parse_layout(own) != layout:
            found.append(
                f"{where(call, calls)} has layout={own!r}, but its tokens are in the {layout} "
                f"layout: pass layout={layout!r} there"
            )
    return found


def replicated_axes(
    calls: Sequence[WatchedCall], mesh: Mesh, traced: Mapping[Place, CallAxes]
) -> dict[str, list[WatchedCall]]:
    """Mesh axes along which devices compute the same attention, and the calls that do.

    ``traced`` has the axes that calls on global arrays use, by their line.
    """
    found: dict[str, list[WatchedCall]] = {}
    for call in calls:
        if call.local:
            if call.varying is None:
                continue  # Outside of a shard_map, or one that does not know.
            used = {*call.varying, *sequence_axes_of(call)}
            axes = [axis for axis in call.manual if axis not in used]
        else:
            names = ("batch_axis", "tensor_axis")
            used = {*sequence_axes_of(call), *call.manual}
            used |= set(flat_names(*(_argument(call, name) for name in names)))
            if call.place in traced:
                used |= traced[call.place].used
            axes = [axis for axis in mesh.axis_names if axis not in used]
        for axis in axes:
            if mesh.shape[axis] > 1:
                found.setdefault(axis, []).append(call)
    return found


def replicated_sentences(
    found: dict[str, list[WatchedCall]],
    calls: Sequence[WatchedCall],
    mesh: Mesh,
    ring: tuple[str, ...],
    traced: Mapping[Place, CallAxes],
) -> list[str]:
    """A sentence for each mesh axis of :func:`replicated_axes`."""
    sentences = []
    for axis, those in found.items():
        several = len(those) == len(calls) > 1
        names = {call.name for call in calls}
        what = "attention" if "attention" in names else "linear attention"
        if len(names) > 1 and what == "attention":
            what = "attention and linear attention"
        which = f"all {len(calls)} {what} calls" if several else where(those[0], calls)
        more = "" if several or len(those) == 1 else f" and {len(those) - 1} more"
        place = those[0].place
        if axis not in ring and place in traced and traced[place].vmapped:
            remedy = (
                f"it is under jax.vmap, which keeps all examples on each device: pass "
                f"spmd_axis_name={axis!r} to that jax.vmap"
            )
        elif axis in ring:
            remedy = f"pass seq_axis={axis!r}: there, each device has whole sequences"
        elif those[0].local:
            remedy = f"shard the batch over {axis!r} in the in_specs of the shard_map"
        else:
            remedy = f"pass batch_axis={axis!r}, if it shards the batch (tensor_axis for heads)"
        what = "the sequence" if axis in ring else "the batch"
        sentences.append(
            f"{what} is replicated over mesh axis {axis!r}: in {which}{more} all "
            f"{mesh.shape[axis]} devices along it compute the same; {remedy}"
        )
    return sentences


def segment_ids_of(call: WatchedCall) -> Any:
    """The segment ids of a call's queries, or None."""
    ids = _argument(call, "segment_ids")
    return _argument(call, "query_segment_ids") if ids is None else ids


def without_segments(calls: Sequence[WatchedCall]) -> list[str]:
    """A sentence about the calls without segment ids, if other calls have them."""
    have = [segment_ids_of(call) is not None for call in calls]
    if all(have) or not any(have):
        return []
    first = calls[have.index(False)]
    mixed = (
        "documents attend to each other"
        if first.name == "attention"
        else "a document continues the one before it"
    )
    return [
        f"{where(first, calls)} has no segment ids, other calls have: there, {mixed}; pass "
        "segment_ids to all"
    ]


def options_that_differ(mesh: WatchedCall, one: WatchedCall) -> list[str]:
    """Arguments of a call that differ from those of the same call on one device."""
    if type(mesh.arguments) is not type(one.arguments):
        return ["another attention function"]
    found = []
    for field in dataclasses.fields(mesh.arguments):
        ours, theirs = (getattr(call.arguments, field.name) for call in (mesh, one))
        if field.name not in _OWN and _shown(ours) != _shown(theirs):
            found.append(f"{field.name} is {_shown(ours)} on the mesh, {_shown(theirs)} on one")
    return found


def _argument(call: WatchedCall, name: str) -> Any:
    return getattr(call.arguments, name, None)


def _shown(value: Any) -> str:
    """An argument as text; an array by its shape, a function by its name."""
    if callable(value):
        return f"the function {getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"an array of rank {np.ndim(value)}"
