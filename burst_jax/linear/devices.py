"""Where a call runs: over a mesh, inside the caller's ``shard_map``, or on one device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.attention.shardings import check_devices
from burst_jax.attention.watch import attention_program, watch_call
from burst_jax.jax_compat import vmapped_over_mesh_axes
from burst_jax.layouts.body_order import check_order
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.linear.arrays import dimensions_of
from burst_jax.linear.runs import DeviceRuns, DocumentRuns, device_runs
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    axis_names,
    check_axes,
    flat_names,
    resolve_mesh,
    size_in_shard_map,
    split_explicit,
)
from pallas_kernels.device import Target, target_of

# ``body(request, arrays, target) -> results`` on one device's arrays; ``target`` may be None.
Body = Callable[[Any, Mapping[str, jax.Array], Target | None], tuple[jax.Array, ...]]
# The argument that shards a dimension.
_ARGUMENTS = {"B": "batch_axis", "T": "seq_axis"} | dict.fromkeys("NKF", "tensor_axis")


@dataclasses.dataclass(frozen=True)
class Watched:
    """The arguments of a call that :mod:`burst_jax.verify` compares."""

    mesh: Mesh | AbstractMesh | None
    seq_axis: AxisNames
    batch_axis: AxisNames
    tensor_axis: AxisNames
    layout: LayoutLike
    segment_ids: Any
    padding_id: int
    scale: float | None = None
    implementation: str | None = None

    def watch(self, function: str, x: Any, axis_name: AxisNames) -> None:
        """Records a call with the first array ``x``."""
        local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        watch_call(self, x, axis_name, local, function)


@dataclasses.dataclass(frozen=True)
class Devices:
    """How arrays are sharded. Hashable.

    Attributes:
      function: name of the public function, for messages.
      mesh: None inside the caller's ``shard_map``, and on one device.
      seq: the mesh axes of the sequences, outermost first.
      batch: those of the batch dimension.
      tensor: those of heads and features.
      size: number of devices along ``seq``.
      layout: order of the tokens on them.
    """

    function: str
    mesh: Mesh | AbstractMesh | None
    seq: tuple[str, ...]
    batch: tuple[str, ...]
    tensor: tuple[str, ...]
    size: int
    layout: Layout

    @classmethod
    def of(
        cls,
        function: str,
        *,
        mesh: Mesh | AbstractMesh | None,
        axis_name: AxisNames,
        seq_axis: AxisNames,
        batch_axis: AxisNames,
        tensor_axis: AxisNames,
        layout: LayoutLike,
    ) -> Devices:
        """From the arguments of the public functions; raises ValueError if one is wrong."""
        order = parse_layout(layout)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        names = {"seq_axis": seq_axis, "batch_axis": batch_axis, "tensor_axis": tensor_axis}
        seq, batch, tensor = (axis_names(argument, axes) for argument, axes in names.items())
        if axis_name is not None:
            if mesh is not None:
                raise ValueError(
                    f"axis_name is {axis_name!r} and mesh is given: pass axis_name for one "
                    "device's arrays inside a shard_map, mesh for global arrays"
                )
            axes = axis_names("axis_name", axis_name)
            if len(set(axes)) < len(axes):
                raise ValueError(f"axis_name is {axis_name!r}: it names an axis twice")
            _check_unused(names)
            remedy = (
                f"call {function} inside a shard_map over that axis, or outside of one with mesh= "
                "and seq_axis="
            )
            size = math.prod(size_in_shard_map("axis_name", axis, remedy) for axis in axes)
            return cls(function, None, axes, (), (), size, order)
        if manual and mesh is None:
            _check_forgotten_axes(seq, order)
            _check_unused(names)
            return cls(function, None, (), (), (), 1, order)
        if manual:
            raise ValueError(
                f"mesh is given inside a shard_map over {manual}: pass axis_name= there, the mesh "
                "axis of the sequence, with one device's arrays"
            )
        if mesh is None and jax.sharding.get_abstract_mesh().empty:
            _check_unused(names)
            return cls(function, None, (), (), (), 1, order)
        mesh = resolve_mesh(mesh)
        check_axes(mesh, names)
        return cls(function, mesh, seq, batch, tensor, axes_size(mesh, seq), order)

    def runs(self) -> DeviceRuns | DocumentRuns:
        """The runs of tokens of each device."""
        return device_runs(self.layout, self.seq, self.size, self.function)

    def check_length(self, length: int, name: str) -> None:
        """Raises ValueError if devices cannot share sequences of this length.

        The same holds if :func:`burst_jax.in_layout` permuted them to another order.
        """
        whole = length * (self.size if self.mesh is None else 1)
        argument = "axis_name" if self.mesh is None else "seq_axis"
        check_order(self.layout, self.size, (whole,), argument, self.seq)
        if self.size == 1:
            return
        if self.mesh is not None:
            self.layout.check_length(length, self.size, f"the length T of {name}")
        else:
            self.layout.check_shard(length, name)

    def spec(self, dimensions: str) -> P:
        """The spec of an array with dimensions in the letters of :mod:`burst_jax.linear.arrays`."""
        axes = {"B": self.batch, "T": self.seq} | dict.fromkeys("NKF", self.tensor)
        return P(*(axes.get(letter) or None for letter in dimensions.split()))

    def run(
        self, body: Body, request: Any, arrays: Mapping[str, Any], results: tuple[str, ...]
    ) -> tuple[jax.Array, ...]:
        """The first results of ``body(request, arrays)``.

        Args:
          body: on one device's arrays.
          request: static, hashable.
          arrays: checked, by the names of the arguments.
          results: the dimensions of each result.
        """
        arrays = dict(arrays)
        if self.mesh is None and (self.seq or jax.sharding.get_abstract_mesh().manual_axes):
            return body(request, arrays, None)[: len(results)]
        if self.mesh is None:
            _check_one_device(self.function, arrays)
            target = target_of(next(iter(arrays.values())))
            return _on_device(body, request, target, len(results), arrays)
        check_devices(self.mesh, arrays)
        for name, array in arrays.items():
            arrays[name] = self._checked(name, array)
        return _on_mesh(body, request, self, results, arrays)

    def _checked(self, name: str, array: jax.Array) -> jax.Array:
        """A global array, split over Explicit mesh axes."""
        assert self.mesh is not None
        dimensions = dimensions_of(name, array)
        letters = dimensions.split()
        for letter, size in zip(letters, array.shape, strict=True):
            axes = {"B": self.batch}.get(letter, self.tensor if letter in "NKF" else ())
            shards = axes_size(self.mesh, axes)
            if size % shards:
                raise ValueError(
                    f"{name} has shape {array.shape}: its {letter} must be a multiple of {shards}, "
                    f"the size of {_ARGUMENTS[letter]} {axes}"
                )
        arguments = [_ARGUMENTS.get(letter) for letter in letters]
        return split_explicit(name, array, self.mesh, self.spec(dimensions), arguments)


def _check_forgotten_axes(seq: tuple[str, ...], layout: Layout) -> None:
    """Raises ValueError if a call in a ``shard_map`` seems to lack the sequence's axes."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    inside = f"axis_name is None inside a shard_map over {manual}"
    split = tuple(axis for axis in seq if axis in mesh.axis_names and mesh.shape[axis] > 1)
    if outer := [axis for axis in split if axis not in manual]:
        raise ValueError(
            f"{inside}, and seq_axis {outer[0]!r} is not manual there: make it a shard_map over "
            "that axis, too, and pass axis_name=, or seq_axis=None if each device has whole "
            "sequences"
        )
    if missed := tuple(axis for axis in seq if axis in manual):
        named = missed if len(missed) > 1 else missed[0]
        raise ValueError(
            f"{inside}: pass axis_name={named!r}, or seq_axis=None if each device has whole "
            "sequences"
        )
    if seq and not layout.in_natural_order:
        raise ValueError(
            f"{inside}, and layout is {layout!r}: pass axis_name=, the mesh axes of the sequence, "
            "or seq_axis=None if each device has whole sequences"
        )


def _check_unused(names: Mapping[str, AxisNames]) -> None:
    """Raises ValueError if a mesh axis is named that one device's arrays have no use for."""
    for argument in ("batch_axis", "tensor_axis"):
        if names[argument] is not None:
            raise ValueError(
                f"{argument} is {names[argument]!r}, and mesh is None: it is an axis of mesh=, for "
                "global arrays; leave it out for one device's arrays"
            )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
@attention_program
def _on_mesh(
    body: Body,
    request: Any,
    devices: Devices,
    results: tuple[str, ...],
    arrays: dict[str, jax.Array],
) -> tuple[jax.Array, ...]:
    """Global results from global arrays."""
    assert devices.mesh is not None
    return jax.shard_map(
        lambda arrays: body(request, arrays, None)[: len(results)],
        mesh=devices.mesh,
        in_specs=({name: devices.spec(dimensions_of(name, x)) for name, x in arrays.items()},),
        out_specs=tuple(devices.spec(dimensions) for dimensions in results),
        # The check fails under jax.vmap with spmd_axis_name.
        check_vma=not vmapped_over_mesh_axes(),
    )(arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
@attention_program
def _on_device(
    body: Body, request: Any, target: Target, count: int, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The first ``count`` results, on one device."""
    return body(request, arrays, target)[:count]


def _check_one_device(function: str, arrays: Mapping[str, Any]) -> None:
    """Raises ValueError if an array is known to be sharded."""
    for name, array in arrays.items():
        sharding = jax.typeof(array).sharding
        split = bool(flat_names(*getattr(sharding, "spec", ())))
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            split = not array.is_fully_replicated
        if split:
            raise ValueError(
                f"{name} is split over several devices, {jax.typeof(array)}, and mesh is None: "
                f"pass mesh= to {function}, with seq_axis=None if no axis splits the tokens"
            )
