"""Which mesh, which axes, and how to keep activations where their tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AxisNames = str | tuple[str, ...] | None


def resolve_mesh(mesh: Any = None) -> Any:
    """``mesh`` itself, or the mesh of ``jax.set_mesh``; ValueError if there is neither."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            "no mesh: pass mesh=jax.make_mesh(...) or call inside `with jax.set_mesh(mesh)`"
        )
    return mesh


def flat_names(*axes: AxisNames) -> tuple[str, ...]:
    """The mesh axes that the arguments name, in order, without None."""
    names: list[str] = []
    for axis in axes:
        if axis is not None:
            names.extend((axis,) if isinstance(axis, str) else axis)
    return tuple(names)


def sequence_axes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes that ``burst_attention`` with these options splits a sequence over."""
    return flat_names(options.get("seq_axis", "seq"), options.get("head_parallel_axis"))


def token_spec(batch_axis: AxisNames, seq_axis: AxisNames, ndim: int = 2) -> PartitionSpec:
    """How ``[B, T, ...]`` of ``ndim`` axes is sharded: B over batch_axis, T over seq_axis."""
    return PartitionSpec(batch_axis, seq_axis, *[None] * (ndim - 2))


def lookup(table: jax.Array, index: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """``table[index]``, the result sharded by ``spec`` over a mesh with Auto or Explicit axes.

    Without the pin the compiler may gather all tokens on its way into a model. An index beyond the
    table gives NaN.
    """
    mesh = resolve_mesh(mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto, explicit = (
        NamedSharding(mesh, _only(spec, {name for name in types if types[name] == kind}))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    if AxisType.Explicit in types.values():
        rows = table.at[index].get(mode="fill", out_sharding=explicit)
    else:
        rows = table.at[index].get(mode="fill")
    if AxisType.Auto in types.values():
        rows = jax.lax.with_sharding_constraint(rows, auto)
    return rows


def place_explicit(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """``x`` split by ``spec`` over the mesh's Explicit axes; Auto axes take any array."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in types if kind == AxisType.Explicit}
    if not explicit:
        return x
    return jax.reshard(x, NamedSharding(mesh, _only(spec, explicit)))


def gathered(weights: Any) -> Any:
    """The arrays of a pytree, or of an nnx module, whole on every device along Explicit mesh axes.

    A product of activations and weights that are both split over an Explicit axis has no sharding
    of its own, so JAX refuses it. Call this where a layer uses its weights, inside what is
    rematerialised: then one layer's weights are whole at a time, and each gradient is split again
    as its weight is (FSDP, Zhao et al. 2023). Auto axes stay the compiler's, which does the same
    where it needs to.
    """
    if isinstance(weights, nnx.Module):
        graphdef, state = nnx.split(weights)
        if not any(map(_is_split, jax.tree.leaves(state))):
            return weights  # Itself: what a copy's submodules write, like a counter, would be lost.
        return nnx.merge(graphdef, gathered(state))

    def whole(x: jax.Array) -> jax.Array:
        if not _is_split(x):
            return x
        return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))

    return jax.tree.map(whole, weights)


def _is_split(x: jax.Array) -> bool:
    """Whether an array is split over an Explicit mesh axis: its type says so of no other."""
    return bool(flat_names(*jax.typeof(x).sharding.spec))


def _only(spec: PartitionSpec, names: set[str]) -> PartitionSpec:
    kept = (tuple(name for name in flat_names(entry) if name in names) for entry in spec)
    return PartitionSpec(*(entry or None for entry in kept))
