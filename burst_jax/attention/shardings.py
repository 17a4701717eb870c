"""How a call's global arrays are sharded over a mesh, and checks of their sharding and shapes."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.attention.arguments import AttentionArguments
from burst_jax.attention.document_tables import TABLE_DIMENSIONS
from burst_jax.attention.validation import ARRAYS, WINDOW_SIDES
from burst_jax.jax_compat import vmapped_over_mesh_axes
from burst_jax.parallel.mesh import (
    axes_size,
    axis_names,
    flat_names,
    reshard_explicit,
    size_on_mesh,
    split_explicit,
)
from burst_jax.ring.request import Request
from burst_jax.ring.ulysses import check_heads

# The dimensions of arrays that are derived from a call's arguments, and of its results, in the
# letters of burst_jax.attention.validation.ARRAYS.
_DERIVED = {
    **dict.fromkeys(WINDOW_SIDES, ""),
    "dropout_seeds": "B N",
    "batch_indices": "B",
    "head_indices": "N",
    "out": "B T N Hv",
    "lse": "B T N",
    **TABLE_DIMENSIONS,
}
# The argument of burst_attention that shards a dimension.
_ARGUMENTS = (
    {"B": "batch_axis"} | dict.fromkeys("TS", "seq_axis") | dict.fromkeys("NK", "tensor_axis")
)


@dataclasses.dataclass(frozen=True)
class ArrayShardings:
    """How global arrays are sharded over a mesh.

    Hashable: an eager call's compiled program is cached by this and its
    :class:`burst_jax.ring.request.Request`.

    Attributes:
      mesh: the devices.
      token_axes: the mesh axes that sequences are sharded over, outermost first.
      batch_axes: the mesh axes of the batch dimension.
      tensor_axes: the mesh axes that the heads are sharded over (tensor parallelism). The Ulysses
        axis is one of ``token_axes``.
      check_vma: whether JAX checks which values vary over which mesh axes.
    """

    mesh: Mesh | AbstractMesh
    token_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    check_vma: bool

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh, request: Request, arguments: AttentionArguments
    ) -> ArrayShardings:
        """The shardings of a request's arrays, from ``burst_attention``'s arguments.

        Raises:
          ValueError: an axis is not one of the mesh's, or is used twice.
        """
        axes_of = {
            name: axis_names(name, getattr(arguments, name))
            for name in ("batch_axis", "tensor_axis")
        }
        used = dict.fromkeys(request.ring_axes, "seq_axis")
        if request.ulysses_axis is not None:
            used[request.ulysses_axis] = "ulysses_axis"
        for name, axes in axes_of.items():
            for axis in axes:
                size_on_mesh(mesh, name, axis)
                if axis in used:
                    raise ValueError(
                        f"{name} is {axis!r}, and so is {used[axis]}: use different mesh axes"
                    )
                used[axis] = name
        return cls(
            mesh=mesh,
            token_axes=request.token_axes,
            batch_axes=axes_of["batch_axis"],
            tensor_axes=axes_of["tensor_axis"],
            # The check fails under jax.vmap with spmd_axis_name, which also marks the ring's tile
            # tables, batched by a vmap of their own, as varying over that axis.
            check_vma=request.checks_vma and not vmapped_over_mesh_axes(),
        )

    def spec(self, name: str, ndim: int | None = None) -> P:
        """The PartitionSpec of an argument or result; ``ndim`` if it may have several shapes."""
        axes: dict[str, tuple[str, ...] | None] = {"B": self.batch_axes or None}
        axes |= dict.fromkeys(("T", "S"), self.token_axes or None)
        axes |= dict.fromkeys(("N", "K"), self.tensor_axes or None)
        return P(*(axes.get(letter) for letter in _dimensions(name, ndim)))

    def tokens_axis(self, name: str, ndim: int) -> int | None:
        """Index of an argument's token axis; None without one."""
        letters = _dimensions(name, ndim)
        return next((i for i, letter in enumerate(letters) if letter in ("T", "S")), None)

    def reshard(self, name: str, array: jax.Array) -> jax.Array:
        """A derived array, sharded over the mesh's Explicit axes as :meth:`spec` requires."""
        return reshard_explicit(array, self.mesh, self.spec(name, array.ndim))

    def check(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The caller's arrays, sharded over Explicit mesh axes as :meth:`spec` requires.

        Raises:
          ValueError: an array is sharded otherwise (:func:`split_explicit`).
        """
        checked = {}
        for name, array in arrays.items():
            arguments = [_ARGUMENTS.get(letter) for letter in _dimensions(name, array.ndim)]
            spec = self.spec(name, array.ndim)
            checked[name] = split_explicit(name, array, self.mesh, spec, arguments)
        return checked


def _dimensions(name: str, ndim: int | None) -> list[str]:
    """The letters of an array's dimensions."""
    shapes = (_DERIVED[name],) if name in _DERIVED else ARRAYS[name].shapes
    of_ndim = [shape.split() for shape in shapes if ndim in (None, len(shape.split()))]
    return of_ndim[0]


def check_global_shapes(
    request: Request, shardings: ArrayShardings, query: jax.Array, key: jax.Array
) -> None:
    """Checks that the mesh divides lengths, batch size and heads.

    Raises:
      ValueError: it does not divide one of them.
      NotImplementedError: the batch size is symbolic and several devices share a sequence.
    """
    _check_static_batch(request, query)
    axes = request.ring_axes
    seq_axis = axes[0] if len(axes) == 1 else axes or None
    check_lengths(
        request,
        {"the query's length T": query.shape[1], "the key's length S": key.shape[1]},
        f", the devices on seq_axis {seq_axis!r} and ulysses_axis {request.ulysses_axis!r}",
    )
    for name, size, axes in (
        ("the batch size B", query.shape[0], shardings.batch_axes),
        ("the number of query heads N", query.shape[2], shardings.tensor_axes),
        ("the number of key/value heads K", key.shape[2], shardings.tensor_axes),
    ):
        shards = axes_size(shardings.mesh, axes)
        if size % shards:
            raise ValueError(
                f"{name} is {size}: it must be a multiple of {shards}, the size of mesh axes {axes}"
            )
    split = axes_size(shardings.mesh, shardings.tensor_axes)
    _check_ulysses(request, query.shape[2] // split, key.shape[2] // split)


def check_lengths(request: Request, lengths: Mapping[str, int], devices: str = "") -> None:
    """Raises ValueError unless the request's devices divide sequences of these lengths.

    Args:
      request: the layout and the number of devices.
      lengths: tokens of whole sequences, by their name in messages.
      devices: what a message adds about the devices.
    """
    for name, length in lengths.items():
        request.layout.check_length(length, request.ring_size, name)
        if length % request.token_devices:
            raise ValueError(
                f"{name} is {length}: it must be a multiple of {request.token_devices}{devices}"
            )


def check_local_shapes(request: Request, query: jax.Array, key: jax.Array) -> None:
    """Checks that one device's arrays can be its shard of the request.

    Raises:
      ValueError: a length that the layout's shards cannot have, or heads that do not divide.
      NotImplementedError: the batch size is symbolic and several devices share a sequence.
    """
    for name, length in (("query", query.shape[1]), ("key", key.shape[1])):
        request.layout.check_shard(length * request.ulysses_size, name)
    _check_static_batch(request, query)
    _check_ulysses(request, query.shape[2], key.shape[2])


def _check_static_batch(request: Request, query: jax.Array) -> None:
    devices = request.token_devices
    if devices > 1 and not isinstance(query.shape[0], numbers.Integral):
        raise NotImplementedError(
            f"query has shape {query.shape}, whose B is symbolic, on a ring of {devices} devices: "
            "JAX crashes when such a program is called; export one program per batch size, or for "
            "one device"
        )


def _check_ulysses(request: Request, heads: int, kv_heads: int) -> None:
    name = f"ulysses_axis {request.ulysses_axis!r}"
    check_heads(heads, kv_heads, request.ulysses_size, name)


def check_outside_shard_map(arguments: AttentionArguments) -> None:
    """Raises ValueError if ``burst_attention`` is called inside a ``shard_map``.

    Inside one over other axes than the sequence's it would be a nested one, whose gradient JAX
    cannot lower.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return
    names = axis_names("seq_axis", arguments.seq_axis) + flat_names(arguments.ulysses_axis)
    missing = tuple(axis for axis in names if axis not in manual)
    others = tuple(axis for axis in manual if axis not in names)
    over = f"make it one over {missing} too, and call ring_attention" if missing else ""
    split = f", with {others} as batch_axis or tensor_axis" if others else ""
    raise ValueError(
        f"burst_attention is called inside a shard_map over {manual}: "
        f"{over or 'call ring_attention'} there, on one device's arrays; or call burst_attention "
        f"outside of it{split}"
    )


def check_inside_shard_map() -> None:
    """Raises ValueError if ``ring_attention`` without mesh axes is called outside a ``shard_map``.

    With a named axis the lookup of its size raises instead.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "axis_name is None outside of a shard_map, where arrays may be those of all devices: "
            "call burst_attention with seq_axis=None there, local_attention if they are one "
            "device's, or ring_attention inside a shard_map"
        )


def check_devices(mesh: Mesh | AbstractMesh, arrays: dict[str, jax.Array]) -> None:
    """Raises ValueError if an array is on other devices than the mesh, or no devices are known.

    Inside ``jax.jit`` arrays have no devices yet, so nothing is checked.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return
    placed = {
        name: array.sharding.device_set
        for name, array in arrays.items()
        if getattr(array, "committed", False)
    }
    if not isinstance(mesh, Mesh):
        # The abstract mesh of jax.set_mesh has no devices. jax.sharding.get_mesh has those, but
        # raises inside a jax.jit.
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:
            return
        if mesh.empty and not placed:
            raise ValueError(
                "mesh is an AbstractMesh, and neither it nor an array names devices: pass a "
                "jax.sharding.Mesh, or enter jax.set_mesh(mesh)"
            )
    if not placed or mesh.empty:
        return
    of_mesh = set(mesh.devices.flat)
    for name, devices in placed.items():
        if devices != of_mesh:
            raise ValueError(
                f"{name} is on {_ids(devices)}, the mesh on {_ids(of_mesh)}: put it onto the mesh, "
                f"jax.device_put({name}, jax.NamedSharding(mesh, jax.P(...)))"
            )


def check_one_device(arrays: Mapping[str, jax.Array]) -> None:
    """Raises ValueError if an array of ``local_attention`` is known to be sharded."""
    for name, array in arrays.items():
        sharding = jax.typeof(array).sharding
        split = axes_size(sharding.mesh, *getattr(sharding, "spec", ())) > 1
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            split = not array.is_fully_replicated
        if split:
            raise ValueError(
                f"{name} is split over several devices, {jax.typeof(array)}, and local_attention "
                "is for one device's arrays: call burst_attention, with seq_axis=None if no axis "
                "splits the tokens, or local_attention inside a shard_map"
            )


def _ids(devices: set[jax.Device]) -> str:
    ids = sorted(device.id for device in devices)
    return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"
