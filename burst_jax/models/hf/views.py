"""Tensors that files may store in another form: cut elsewhere, or fused into one.

A family has one form of its tensors, in which checkpoints are saved. Where a file has another one,
views of its tensors take the place of those of the family::

    mlp.experts.gate_up_proj [E, 2 M, D]    ->    mlp.experts.0.gate_proj.weight [M, D], ...
    linear_attn.conv1d.weight [C, 1, W]     ->    linear_attn.q_conv1d.weight [K H, 1, W], ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from burst_jax.errors import first_of
from burst_jax.models.hf.files import TensorFiles


class OtherForm(NamedTuple):
    """Tensors of a layer whose rows, one after the other, are those of the family's tensors.

    Attributes:
      stored: their names.
      names: those of the family's tensors. If they have an {expert}, the stored ones have a first
        dimension for the experts.
    """

    stored: tuple[str, ...]
    names: tuple[str, ...]


def add_views(
    files: TensorFiles,
    forms: Sequence[OtherForm],
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
    experts: int,
) -> None:
    """Replaces tensors in another form by views of them, where the numbers of rows agree.

    Args:
      files: the checkpoint.
      forms: the other forms that it may have.
      shapes: of the family's tensors, by name.
      layers: number of layers.
      experts: number of experts.

    Raises:
      ValueError: there are tensors of both forms.
    """
    present = set(files.names)
    for form in forms:
        per_expert = "{expert}" in form.names[0]
        for layer in range(layers):
            stored = [name.format(layer=layer) for name in form.stored]
            first = form.names[0].format(layer=layer, expert=0)
            if first not in shapes or not present.issuperset(stored):
                continue
            views = {}
            for expert in range(experts) if per_expert else (None,):
                names = [name.format(layer=layer, expert=expert) for name in form.names]
                wanted = {name: shapes[name] for name in names}
                views |= _views(files, stored, wanted, expert, experts)
            if views:
                if twice := sorted(present.intersection(views).difference(stored)):
                    raise ValueError(
                        f"the checkpoint has {first_of(stored)} and {first_of(twice)}, which are "
                        "the same weights in two forms: save it again with those of one form"
                    )
                files.replace(stored, views)


def _views(
    files: TensorFiles,
    stored: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    expert: int | None,
    experts: int,
) -> dict[str, RowsView]:
    """Views with these shapes of stored tensors; none if the shapes do not fit, or are the same."""
    lead = 0 if expert is None else 1
    found = [files.shape(name) for name in stored]
    wanted = list(shapes.values())
    same_rest = {shape[lead + 1 :] for shape in found} == {shape[1:] for shape in wanted}
    ranks = {len(shape) - lead for shape in found} == {len(shape) for shape in wanted}
    if found == wanted or not ranks or not same_rest:
        return {}
    rows = sum(shape[lead] for shape in found)
    if rows != sum(shape[0] for shape in wanted) or (lead and found[0][0] != experts):
        return {}
    slices, first, views = [files.slice_of(name) for name in stored], 0, {}
    for name, shape in shapes.items():
        views[name] = RowsView(slices, first, shape, expert)
        first += shape[0]
    return views


class RowsView:
    """Some of the rows of tensors one after the other, with the methods of a safetensors slice.

    Args:
      slices: slices of the tensors, ``[rows, ...]``, or ``[experts, rows, ...]``.
      first: index of the first row.
      shape: of the view.
      expert: which of the experts; None if the tensors have no dimension for them.
    """

    def __init__(
        self, slices: Sequence[Any], first: int, shape: tuple[int, ...], expert: int | None
    ) -> None:
        self._slices, self._first, self._shape, self._expert = slices, first, shape, expert

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype of the tensors, as in safetensors."""
        return self._slices[0].get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        lead = () if self._expert is None else (slice(self._expert, self._expert + 1),)
        start, stop = (self._first + edge for edge in (index[0].start, index[0].stop))
        parts, before = [], 0
        for each in self._slices:
            rows = each.get_shape()[len(lead)]
            own = slice(max(start - before, 0), min(stop - before, rows))
            if own.start < own.stop:
                parts.append(np.asarray(each[(*lead, own, *index[1:])]))
            before += rows
        found = np.concatenate(parts, axis=len(lead))
        return found[0] if lead else found
