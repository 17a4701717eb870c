"""``ShardingRules``: which mesh axes shard batches, sequences, weights and layers.

Every dimension of a weight or an activation has a logical name, and the rules map logical names to
mesh axes::

    logical name                    sharded over
    batch                           data and fsdp
    tokens                          seq
    heads, kv_heads, mlp, vocab     tensor
    embed (of a weight)             fsdp and seq
    expert (of a weight)            expert
    layers                          stage

Weights are sharded over ``fsdp`` and ``seq`` together (ZeRO-3, Rajbhandari et al. 2020): each
device stores ``1 / (fsdp * seq)`` of every matrix and of its optimizer state, and the devices
gather the weights of one layer at a time. ``data`` shards batches only, so weights are replicated
over it.

Expert parallelism keeps experts where they are, and the devices exchange tokens. ``expert`` may
name axes of ``data``, ``fsdp`` or ``seq``, whose devices then have different experts, or an axis of
its own, which shards everything else like ``fsdp``. The other axes shard each expert's matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.parallel.mesh import AxisNames, axes_size, axis_names, flat_names, resolve_mesh

# The logical name of each dimension of an array; None is a dimension that is never sharded.
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The mesh axis, or axes, of each kind of parallelism; None for unused ones.

    Attributes:
      data: shards the batch; weights are replicated over it.
      fsdp: shards the batch and the weights.
      seq: shards the sequence and the weights. ``(outer, inner)`` is a two-level ring.
      tensor: shards heads, hidden features of the MLP and the vocabulary.
      stage: shards the layers into pipeline stages; one mesh axis.
      expert: shards the experts of a mixture of experts, and tokens are exchanged over it
        (:class:`burst_jax.models.MixtureOfExperts`). None gathers experts like all weights.

    Raises:
      ValueError: an axis that is not a name, or that two fields name, except for ``expert``.
      NotImplementedError: ``expert`` names an axis of ``tensor`` or ``stage``.
    """

    data: AxisNames = "data"
    fsdp: AxisNames = "fsdp"
    seq: AxisNames = "seq"
    tensor: AxisNames = "tensor"
    stage: str | None = None
    expert: AxisNames = None

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for field, axes in self._fields().items():
            for name in axis_names(f"ShardingRules' {field}", axes):
                if field == "expert" and name in owner:
                    if owner[name] in ("tensor", "stage"):
                        raise NotImplementedError(
                            f"ShardingRules' expert is {axes!r}, and {owner[name]} names {name!r} "
                            "too: experts can share devices with data, fsdp and seq; name axes of "
                            "these, or an axis of its own"
                        )
                elif name in owner:
                    raise ValueError(
                        f"ShardingRules' {field} is {axes!r}, and {owner[name]} names {name!r} "
                        "too: use different mesh axes"
                    )
                else:
                    owner[name] = field
        if self.stage is not None and not isinstance(self.stage, str):
            raise ValueError(f"ShardingRules' stage is {self.stage!r}: it must be one mesh axis")

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> ShardingRules:
        """The rules of a mesh whose axes are named like the fields; missing axes become None.

        Raises:
          ValueError: it is not a mesh, or has an axis of another name.
        """
        mesh = resolve_mesh(mesh)
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in mesh.axis_names:
            if name not in fields:
                raise ValueError(
                    f"the mesh has an axis {name!r}: ShardingRules.of accepts "
                    f"{', '.join(fields)}; set other names explicitly, like "
                    f"ShardingRules(data={name!r}, ...)"
                )
        return cls(**{name: name if name in mesh.axis_names else None for name in fields})

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the batch."""
        return flat_names(self.data, self.fsdp, self._own_expert_axes)

    @property
    def _own_expert_axes(self) -> tuple[str, ...]:
        """Those of ``expert`` that no other field names."""
        others = flat_names(self.data, self.fsdp, self.seq)
        return tuple(name for name in flat_names(self.expert) if name not in others)

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises ValueError if the mesh lacks an axis that the rules name."""
        for field, axes in self._fields().items():
            for name in flat_names(axes):
                if name not in mesh.axis_names:
                    raise ValueError(
                        f"ShardingRules' {field} is {axes!r}: the mesh's axes are "
                        f"{', '.join(map(repr, mesh.axis_names))}; name one of them, pass "
                        f"{field}=None, or use ShardingRules.of(mesh)"
                    )

    def spec(self, axes: LogicalAxes, *, extra_weight_axes: AxisNames = None) -> PartitionSpec:
        """The spec of an array with these logical dimensions.

        Args:
          axes: the logical name of each dimension.
          extra_weight_axes: mesh axes that shard ``embed`` in addition to fsdp and seq, like the
            Ulysses axis.

        Raises:
          ValueError: an unknown name.
        """
        weight_axes = flat_names(self.fsdp, self._own_expert_axes, self.seq, extra_weight_axes)
        expert_axes = flat_names(self.expert)
        if "expert" in axes:
            weight_axes = tuple(name for name in weight_axes if name not in expert_axes)
        # Weights outside the layers are also sharded over the stages, in their features.
        if "layers" not in axes:
            weight_axes = (*weight_axes, *flat_names(self.stage))
        table: Mapping[str | None, tuple[str, ...]] = {
            None: (),
            "batch": self.batch_axes,
            "tokens": flat_names(self.seq),
            "embed": weight_axes,
            "expert": expert_axes,
            "layers": flat_names(self.stage),
            **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), flat_names(self.tensor)),
        }
        for name in axes:
            if name not in table:
                known = ", ".join(name for name in table if name is not None)
                raise ValueError(f"{name!r} is not a logical dimension name: use {known}")
        return PartitionSpec(*(table[name] or None for name in axes))

    def _fields(self) -> dict[str, AxisNames]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def check_rules(rules: Any) -> ShardingRules:
    """``rules`` itself; ValueError unless it is a :class:`ShardingRules`."""
    if not isinstance(rules, ShardingRules):
        raise ValueError(f"rules is a {type(rules).__name__}: it must be a ShardingRules")
    return rules


def check_divides(
    what: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raises ValueError if a sharded dimension is not divisible by its number of devices."""
    for dimension, entry in enumerate(spec):
        names = flat_names(entry)
        count = axes_size(mesh, names)
        if shape[dimension] % count:
            sizes = " x ".join(f"{name} {mesh.shape[name]}" for name in names)
            raise ValueError(
                f"{what} has shape {shape}: dimension {dimension}, {shape[dimension]}, is sharded "
                f"over {count} devices ({sizes}), which do not divide it; use a size that is a "
                f"multiple of {count}, or other mesh axes"
            )
