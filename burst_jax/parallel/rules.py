"""``ShardingRules``: which mesh axes split batches, sequences, weights and layers.

Every dimension of a weight or of an activation has a logical name, and the rules say which mesh
axes split the dimensions of that name::

    logical name                    split over
    batch                           data and fsdp
    tokens                          seq
    heads, kv_heads, mlp, vocab     tensor
    embed (of a weight)             fsdp and seq
    layers                          stage

Weights are split over ``fsdp`` and ``seq`` together (ZeRO-3, Rajbhandari et al. 2020): each device
keeps ``1 / (fsdp * seq)`` of every matrix and of its optimizer state, and the devices gather one
layer's weights at a time. ``data`` splits batches alone, so its devices keep copies of each other's
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names, resolve_mesh

# For each dimension of an array its logical name; None is a dimension that is never split.
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The mesh axis, or axes, of each kind of parallelism; None where there is none.

    Attributes:
      data: splits the rows of a batch; weights are whole over it.
      fsdp: splits the rows of a batch and the weights.
      seq: splits the tokens of a row and the weights. ``(outer, inner)`` is a two-level ring.
      tensor: splits heads, hidden features of the MLP and the vocabulary.
      stage: splits the layers into the stages of a pipeline; one mesh axis.

    Raises:
      ValueError: an axis that is no name, or one that two fields name.
    """

    data: AxisNames = "data"
    fsdp: AxisNames = "fsdp"
    seq: AxisNames = "seq"
    tensor: AxisNames = "tensor"
    stage: str | None = None

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for field, axes in self._fields().items():
            names = (axes,) if isinstance(axes, str) else axes
            strings = isinstance(names, tuple) and all(
                isinstance(name, str) and name for name in names
            )
            if axes is not None and not strings:
                raise ValueError(
                    f"ShardingRules' {field} is {axes!r}: it must be a mesh axis, a tuple of them, "
                    "or None"
                )
            for name in flat_names(axes):
                if name in owner:
                    raise ValueError(
                        f"ShardingRules' {field} is {axes!r}, and {owner[name]} names {name!r} "
                        "too: use different mesh axes"
                    )
                owner[name] = field
        if self.stage is not None and not isinstance(self.stage, str):
            raise ValueError(f"ShardingRules' stage is {self.stage!r}: it must be one mesh axis")

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> ShardingRules:
        """The rules of a mesh whose axes are named as the fields are, all or some of them.

        Raises:
          ValueError: it is no mesh, or has an axis of another name.
        """
        mesh = resolve_mesh(mesh)
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in mesh.axis_names:
            if name not in fields:
                raise ValueError(
                    f"the mesh has an axis {name!r}: ShardingRules.of knows {', '.join(fields)}; "
                    f"for other names write them out, like ShardingRules(data={name!r}, ...)"
                )
        return cls(**{name: name if name in mesh.axis_names else None for name in fields})

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch."""
        return flat_names(self.data, self.fsdp)

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises ValueError if the mesh lacks an axis that the rules name."""
        for field, axes in self._fields().items():
            for name in flat_names(axes):
                if name not in mesh.axis_names:
                    raise ValueError(
                        f"ShardingRules' {field} is {axes!r}: the mesh's axes are "
                        f"{', '.join(map(repr, mesh.axis_names))}; name one of them, pass "
                        f"{field}=None, or take ShardingRules.of(mesh)"
                    )

    def spec(self, axes: LogicalAxes, *, more_weight_axes: AxisNames = None) -> PartitionSpec:
        """How an array with these logical dimensions is split.

        Args:
          axes: a logical name for each dimension.
          more_weight_axes: mesh axes that split ``embed`` beside fsdp and seq, like the one on
            which devices exchange heads.

        Raises:
          ValueError: an unknown name.
        """
        weight_axes = flat_names(self.fsdp, self.seq, more_weight_axes)
        # A weight outside the layers is split over the stages, too, where its features are.
        if "layers" not in axes:
            weight_axes = (*weight_axes, *flat_names(self.stage))
        table: Mapping[str | None, tuple[str, ...]] = {
            None: (),
            "batch": self.batch_axes,
            "tokens": flat_names(self.seq),
            "embed": weight_axes,
            "layers": flat_names(self.stage),
            **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), flat_names(self.tensor)),
        }
        for name in axes:
            if name not in table:
                known = ", ".join(name for name in table if name is not None)
                raise ValueError(f"{name!r} is no logical name of a dimension: use {known}")
        return PartitionSpec(*(table[name] or None for name in axes))

    def _fields(self) -> dict[str, AxisNames]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def check_rules(rules: Any) -> ShardingRules:
    """``rules`` itself.

    Raises:
      ValueError: it is no :class:`ShardingRules`.
    """
    if not isinstance(rules, ShardingRules):
        raise ValueError(f"rules is a {type(rules).__name__}: it must be a ShardingRules")
    return rules


def check_divides(
    what: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raises ValueError if a split dimension is no multiple of the devices that it is split over.

    Args:
      what: what the array is called, for the message.
      shape: its shape.
      spec: how it is split.
      mesh: the devices.
    """
    for dimension, entry in enumerate(spec):
        names = flat_names(entry)
        count = axes_size(mesh, names)
        if shape[dimension] % count:
            sizes = " x ".join(f"{name} {mesh.shape[name]}" for name in names)
            raise ValueError(
                f"{what} has shape {shape}: dimension {dimension}, {shape[dimension]}, is split "
                f"over {count} devices ({sizes}), which do not divide it; use a size that is a "
                f"multiple of {count}, or other mesh axes"
            )
