"""Meshes and their axes, and how arrays are split over them."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
    """The mesh axes that the arguments name, in order; an argument that is None names none."""
    names: list[str] = []
    for axis in axes:
        if axis is not None:
            names.extend((axis,) if isinstance(axis, str) else axis)
    return tuple(names)


def axes_size(mesh: Mesh | AbstractMesh, *axes: AxisNames) -> int:
    """How many devices lie along the mesh axes that the arguments name, all together."""
    return math.prod(mesh.shape[axis] for axis in flat_names(*axes))


def size_on_mesh(mesh: Mesh | AbstractMesh, argument: str, axis: str) -> int:
    """How many devices lie along the mesh axis that an argument of ``burst_attention`` names.

    Raises:
      ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{argument} is {axis!r}: the mesh's axes are "
            f"{', '.join(map(repr, mesh.axis_names))}; name one of them, or pass {argument}=None"
        )
    return mesh.shape[axis]


def names_of(argument: str, axes: AxisNames) -> tuple[str, ...]:
    """The mesh axes that an argument names.

    Raises:
      ValueError: it is neither a name, nor a tuple of names, nor None.
    """
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
        raise ValueError(
            f"{argument} is {axes!r}: it must be a mesh axis, a tuple of them, or None"
        )
    return names


def check_axes(
    mesh: Mesh | AbstractMesh,
    arguments: Mapping[str, AxisNames],
    used: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError for an argument that names no axis of the mesh, or one that is in use.

    Args:
      mesh: the mesh.
      arguments: the mesh axes that each argument names.
      used: for mesh axes that are in use already, what uses them.
    """
    owner = dict(used or {})
    for argument, axes in arguments.items():
        for axis in names_of(argument, axes):
            size_on_mesh(mesh, argument, axis)
            if axis in owner:
                raise ValueError(
                    f"{argument} is {axis!r}, and so is one of {owner[axis]}: use different mesh "
                    "axes"
                )
            owner[axis] = argument


def check_has_devices(mesh: Any) -> Mesh:
    """``mesh`` itself, onto which arrays are to be put.

    Raises:
      ValueError: it is no ``jax.sharding.Mesh``.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}: it must be a jax.sharding.Mesh, which has devices"
        )
    return mesh


def mesh_with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    """``mesh`` itself, or the mesh of ``jax.set_mesh`` that an ``AbstractMesh`` is the shape of.

    Raises:
      ValueError: it is an ``AbstractMesh``, and no mesh of this shape is set, or that cannot be
        known because the call is inside ``jax.jit``.
    """
    if isinstance(mesh, Mesh):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:  # JAX does not say it inside jax.jit.
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


def size_in_shard_map(argument: str, axis: str) -> int:
    """How many devices lie along the manual mesh axis that an argument of ``ring_attention`` names.

    Raises:
      ValueError: the call is not made inside a ``shard_map`` over that axis.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"{argument} is {axis!r}, the manual mesh axes here are {manual}: call "
            "ring_attention inside a shard_map over that axis, or burst_attention outside of one"
        ) from None


def sequence_axes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes that ``burst_attention`` with these options splits a sequence over."""
    return flat_names(options.get("seq_axis", "seq"), options.get("ulysses_axis"))


def inside_shard_map(axes: AxisNames) -> bool:
    """Whether one of the mesh axes is manual here, so that arrays are one device's.

    Without axes it is whether any mesh axis is manual.
    """
    manual, names = jax.sharding.get_abstract_mesh().manual_axes, flat_names(axes)
    return bool(set(manual).intersection(names) if names else manual)


def token_spec(batch_axis: AxisNames, seq_axis: AxisNames, ndim: int = 2) -> PartitionSpec:
    """How ``[B, T, ...]`` of ``ndim`` axes is sharded: B over batch_axis, T over seq_axis."""
    return PartitionSpec(batch_axis, seq_axis, *[None] * (ndim - 2))


def only(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """``spec`` without the mesh axes that are not among ``axes``."""
    kept = (tuple(name for name in flat_names(entry) if name in axes) for entry in spec)
    return PartitionSpec(*(entry or None for entry in kept))


def split_as_it_is(x: jax.Array, otherwise: PartitionSpec) -> PartitionSpec:
    """How ``x`` is split over Explicit mesh axes, which its type tells.

    Args:
      x: an array, or a ``jax.ShapeDtypeStruct``.
      otherwise: the answer if its type names no mesh axis.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not flat_names(*sharding.spec):
        return otherwise
    return PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))


def pinned(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """``x`` split by ``spec`` over a mesh with Auto or Explicit axes."""
    x = place_explicit(x, mesh, spec)
    if mesh.auto_axes:
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, only(spec, mesh.auto_axes)))
    return x


def place_explicit(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """``x`` split by ``spec`` over the mesh's Explicit axes.

    Over Auto axes nothing is done: the compiler moves an array to where ``shard_map`` needs it.
    """
    if not mesh.explicit_axes:
        return x
    return jax.reshard(x, NamedSharding(mesh, only(spec, mesh.explicit_axes)))


def gathered[Weights](weights: Weights) -> Weights:
    """The arrays of a pytree, or of an nnx module, whole on every device along Explicit mesh axes.

    JAX refuses a product of activations and weights that are both split over an Explicit axis,
    because the product's own sharding would be ambiguous. Call this function where a layer uses its
    weights, inside what ``jax.checkpoint`` recomputes: then one layer's weights are whole at a
    time, and each gradient is split again as its weight is (FSDP, Zhao et al. 2023). Over Auto axes
    nothing is done, because the compiler gathers weights there where it needs to.
    """
    if isinstance(weights, nnx.Module):
        graphdef, state = nnx.split(weights)
        if not any(map(_is_split, jax.tree.leaves(state))):
            # No copy: what a submodule of a copy writes, like a counter, would be lost.
            return weights
        return nnx.merge(graphdef, gathered(state))

    def whole(x: jax.Array) -> jax.Array:
        if not _is_split(x):
            return x
        return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))

    return jax.tree.map(whole, weights)


def _is_split(x: jax.Array) -> bool:
    """Whether an array is split over an Explicit mesh axis; its type names no Auto axis."""
    return bool(flat_names(*jax.typeof(x).sharding.spec))
