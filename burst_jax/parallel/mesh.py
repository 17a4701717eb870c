"""Meshes, their axes, and how arrays are sharded over them."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisNames = str | tuple[str, ...] | None


def resolve_mesh(mesh: Mesh | AbstractMesh | None = None) -> Mesh | AbstractMesh:
    """``mesh`` itself, or for None the mesh of ``jax.set_mesh``.

    Raises:
      ValueError: ``mesh`` is None and no mesh is set, or it is no mesh, or one without axes.
    """
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "mesh is None and no mesh is set: pass mesh=, or enter jax.set_mesh(mesh)"
            )
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh is a {type(mesh).__name__}: it must be a jax.sharding.Mesh")
    if mesh.empty:
        raise ValueError("mesh has no axes: pass one that jax.make_mesh made")
    return mesh


def flat_names(*axes: AxisNames) -> tuple[str, ...]:
    """The mesh axis names in the arguments, in order; an argument that is None has none."""
    names: list[str] = []
    for axis in axes:
        if axis is not None:
            names.extend((axis,) if isinstance(axis, str) else axis)
    return tuple(names)


def axes_size(mesh: Mesh | AbstractMesh, *axes: AxisNames) -> int:
    """Number of devices along all mesh axes that the arguments name together."""
    return math.prod(mesh.shape[axis] for axis in flat_names(*axes))


def axes_of(spec: PartitionSpec) -> dict[str, AxisNames]:
    """The axes of ``burst_attention`` for queries that are sharded by ``spec``.

    Frameworks hold the sharding of ``[B, T, N, H]`` as a PartitionSpec::

        burst_attention(query, key, value, mesh=mesh, **axes_of(P("data", "context", "tensor")))

    Args:
      spec: of the query ``[B, T, N, H]``; dimensions that it leaves out are not sharded.

    Returns:
      ``{"batch_axis": ..., "seq_axis": ..., "tensor_axis": ...}``: an axis's name, a tuple of
      names, or None.

    Raises:
      ValueError: it is no PartitionSpec, has more than four entries or one that names no axes, or
        shards the head dim.
    """
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"spec is a {type(spec).__name__}: it must be a jax.sharding.PartitionSpec, "
            "of a NamedSharding its .spec"
        )
    entries = [() if entry is None else entry for entry in spec]
    names = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    if len(names) > 4 or not all(isinstance(entry, tuple) for entry in names):
        raise ValueError(
            f"spec is {spec}: it needs up to four entries, of [B, T, N, H], each None, a mesh "
            "axis's name or a tuple of names"
        )
    batch, seq, heads, head_dim = [*names, (), (), (), ()][:4]
    if head_dim:
        raise ValueError(
            f"spec is {spec}, which shards the head dim over {head_dim}: attention needs whole "
            "heads; shard the number of heads instead, the third entry"
        )

    def axes(entry: tuple[str, ...]) -> AxisNames:
        return (entry[0] if len(entry) == 1 else entry) if entry else None

    return {"batch_axis": axes(batch), "seq_axis": axes(seq), "tensor_axis": axes(heads)}


def size_on_mesh(mesh: Mesh | AbstractMesh, argument: str, axis: str) -> int:
    """Number of devices along the mesh axis that an argument of ``burst_attention`` names."""
    if axis not in mesh.axis_names:
        where = " if no axis shards tokens" if argument == "seq_axis" else ""
        raise ValueError(
            f"{argument} is {axis!r}: the mesh's axes are {', '.join(map(repr, mesh.axis_names))}; "
            f"name one of them, or pass {argument}=None{where}"
        )
    return mesh.shape[axis]


def axis_names(argument: str, axes: AxisNames) -> tuple[str, ...]:
    """The mesh axes that an argument names, as a tuple; ValueError if it is anything else."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple) or not all(isinstance(axis, str) and axis for axis in names):
        raise ValueError(
            f"{argument} is {axes!r}: it must be a mesh axis, a tuple of them, or None"
        )
    return names


def check_axes(
    mesh: Mesh | AbstractMesh,
    arguments: Mapping[str, AxisNames],
    used: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError if an argument names an axis that the mesh lacks or that is already in use.

    ``used`` has the argument that already uses each axis.
    """
    owner = dict(used or {})
    for argument, axes in arguments.items():
        for axis in axis_names(argument, axes):
            size_on_mesh(mesh, argument, axis)
            if axis in owner:
                raise ValueError(
                    f"{argument} is {axis!r}, and so is one of {owner[axis]}: use different mesh "
                    "axes"
                )
            owner[axis] = argument


class SavedMesh(NamedTuple):
    """A mesh for pickle, which has no form for devices: they are named by platform and id."""

    shape: dict[str, int]
    axis_types: tuple[AxisType, ...]
    platform: str
    ids: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Any) -> Any:
        """The mesh, saved; anything else as it is."""
        if not isinstance(mesh, Mesh) or mesh.empty:
            return mesh
        devices = list(mesh.devices.flat)
        ids = tuple(device.id for device in devices)
        return cls(dict(mesh.shape), mesh.axis_types, devices[0].platform, ids)

    def restored(self) -> Mesh:
        """The mesh of this process' devices; ValueError if some of them do not exist here."""
        devices = {device.id: device for device in jax.devices(self.platform)}
        if missing := set(self.ids) - devices.keys():
            raise ValueError(
                f"mesh was pickled with {self.platform} devices {sorted(missing)}, which do not "
                "exist here: pickle with mesh=None, and enter jax.set_mesh(mesh) where it is used"
            )
        array = np.array([devices[i] for i in self.ids]).reshape(*self.shape.values())
        return Mesh(array, tuple(self.shape), axis_types=self.axis_types)


def without_devices(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``burst_attention`` for pickle; the inverse of :func:`with_devices`."""
    return {name: SavedMesh.of(value) for name, value in options.items()}


def with_devices(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``burst_attention`` with the mesh that :func:`without_devices` saved."""
    return {
        name: value.restored() if isinstance(value, SavedMesh) else value
        for name, value in options.items()
    }


def check_has_devices(mesh: Any) -> Mesh:
    """``mesh`` itself; ValueError unless it has devices that arrays can be placed on."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}: it must be a jax.sharding.Mesh, which has devices"
        )
    return mesh


def mesh_with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    """``mesh`` itself, or the concrete mesh of ``jax.set_mesh`` for an ``AbstractMesh``.

    Raises:
      ValueError: it is an ``AbstractMesh`` and no mesh of the same shape is set, or the call is
        inside ``jax.jit``, where the concrete mesh is unknown.
    """
    if isinstance(mesh, Mesh):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:  # jax.sharding.get_mesh raises inside jax.jit.
        raise ValueError(
            "mesh is an AbstractMesh inside jax.jit, which has no devices to put arrays on: call "
            "this function outside of jax.jit, or pass mesh= a jax.sharding.Mesh"
        ) from None
    if found.abstract_mesh != mesh:
        raise ValueError(
            f"mesh is {mesh}, which has no devices to put arrays on, and "
            + (f"jax.set_mesh has {found.abstract_mesh}" if found.axis_names else "no mesh is set")
            + ": pass mesh= a jax.sharding.Mesh, or enter jax.set_mesh(mesh) with one"
        )
    return found


_RING_REMEDY = (
    "call ring_attention inside a shard_map over that axis (an axis of jax.vmap is not one), or "
    "burst_attention outside of one"
)


def size_in_shard_map(argument: str, axis: str, remedy: str = _RING_REMEDY) -> int:
    """Number of devices along the manual mesh axis that an argument names.

    ``remedy`` ends the message of the ValueError for any other axis; default: ring_attention's.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # An axis_name of jax.vmap has a size too, but no devices that a ring could send to.
    if axis not in mesh.manual_axes:
        raise ValueError(
            f"{argument} is {axis!r}, the manual mesh axes here are {mesh.manual_axes}: {remedy}"
        )
    return mesh.shape[axis]


def sequence_axes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes that ``burst_attention`` shards the sequence over with these options."""
    return flat_names(options.get("seq_axis", "seq"), options.get("ulysses_axis"))


def inside_shard_map(axes: AxisNames) -> bool:
    """Whether any of the mesh axes is manual here, so that arrays are per-device shards.

    Without axes: whether any mesh axis at all is manual.
    """
    manual, names = jax.sharding.get_abstract_mesh().manual_axes, flat_names(axes)
    return bool(set(manual).intersection(names) if names else manual)


def token_spec(batch_axis: AxisNames, seq_axis: AxisNames, ndim: int = 2) -> PartitionSpec:
    """The spec of ``[B, T, ...]`` with ``ndim`` dimensions: B over batch_axis, T over seq_axis."""
    return PartitionSpec(batch_axis, seq_axis, *[None] * (ndim - 2))


def restrict_spec(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """``spec`` without the mesh axes that are not in ``axes``."""
    kept = (tuple(name for name in flat_names(entry) if name in axes) for entry in spec)
    return PartitionSpec(*(entry or None for entry in kept))


def explicit_spec(x: jax.Array, default: PartitionSpec) -> PartitionSpec:
    """How ``x`` is sharded over Explicit mesh axes by its type, or ``default`` if over none."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not flat_names(*sharding.spec):
        return default
    return PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))


def constrain(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """``x`` sharded by ``spec`` over a mesh with Auto or Explicit axes."""
    x = reshard_explicit(x, mesh, spec)
    if mesh.auto_axes:
        auto = restrict_spec(spec, mesh.auto_axes)
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, auto))
    return x


def reshard_explicit(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """``x`` sharded by ``spec`` over the mesh's Explicit axes.

    Auto axes are left to the compiler, which moves an array to where ``shard_map`` needs it.
    """
    if not mesh.explicit_axes:
        return x
    return jax.reshard(x, NamedSharding(mesh, restrict_spec(spec, mesh.explicit_axes)))


def split_explicit(
    name: str,
    x: jax.Array,
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
    arguments: Sequence[str | None],
) -> jax.Array:
    """``x`` sharded by ``spec`` over the mesh's Explicit axes, if that only splits dimensions.

    Under ``jax.set_mesh`` the result of every operation is on the mesh, and replicated unless an
    operand was sharded. So an array that the caller has not placed is on no mesh, or replicated:
    each device then keeps its own part, without communication. Any other resharding communicates,
    so it is left to the caller.

    Args:
      name: the array's name in messages.
      x: the array.
      mesh: the mesh of the call.
      spec: how the call needs the array.
      arguments: for each dimension the argument that shards it, or None.

    Raises:
      ValueError: a dimension is sharded over other Explicit axes, or over another mesh.
    """
    if not mesh.explicit_axes:
        return x
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return reshard_explicit(x, mesh, spec)
    given = sharding.spec
    if flat_names(*given) and sharding.mesh.shape != mesh.shape:
        raise ValueError(
            f"{name} is sharded as {given} over a mesh of {dict(sharding.mesh.shape)}, the call's "
            f"mesh has {dict(mesh.shape)}: use one mesh, or outside of jax.jit put it onto the "
            f"call's, jax.device_put({name}, jax.NamedSharding(mesh, {spec}))"
        )
    has, needs = (
        [flat_names(entry) for entry in restrict_spec(each, mesh.explicit_axes)]
        for each in (given, spec)
    )
    has += [()] * (x.ndim - len(has))
    needs += [()] * (x.ndim - len(needs))
    wrong = [dim for dim, axes in enumerate(has) if axes not in ((), needs[dim])]
    if wrong:
        options = [f"{arguments[dim]}={given[dim]!r}" for dim in wrong if arguments[dim]]
        remedy = f"pass {', '.join(options)} (layers have these options, too), or " * bool(options)
        raise ValueError(
            f"{name} is sharded as {given} over Explicit mesh axes, the call needs {spec}: "
            f"{remedy}reshard it, or the input of the layer: jax.reshard({name}, {spec})"
        )
    return x if has == needs else reshard_explicit(x, mesh, spec)


def gather_explicit[Weights](weights: Weights) -> Weights:
    """All-gathers a pytree of arrays, or an nnx module, over Explicit mesh axes.

    JAX rejects a product of activations and weights that are both sharded over an Explicit axis,
    because the sharding of the result would be ambiguous. Call this where a layer uses its weights,
    inside what ``jax.checkpoint`` recomputes: then only one layer's weights are gathered at a time,
    and each gradient is reduce-scattered to the sharding of its weight (FSDP, Zhao et al. 2023).
    Over Auto axes it is a no-op, because the compiler inserts the gathers.
    """
    if isinstance(weights, nnx.Module):
        graphdef, state = nnx.split(weights)
        if not any(map(_is_sharded, jax.tree.leaves(state))):
            # Return the module itself: state that a submodule of a copy writes would be lost.
            return weights
        return nnx.merge(graphdef, gather_explicit(state))

    def gather(x: jax.Array) -> jax.Array:
        if not _is_sharded(x):
            return x
        return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))

    return jax.tree.map(gather, weights)


def _is_sharded(x: jax.Array) -> bool:
    """Whether an array is sharded over an Explicit mesh axis; its type has no Auto axes."""
    return bool(flat_names(*jax.typeof(x).sharding.spec))
