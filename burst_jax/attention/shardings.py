"""``Placement``: how a call's global arrays are split over a mesh."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.parallel.mesh import AxisNames, flat_names, names_of, only, size_on_mesh
from burst_jax.parallel.platform import mapped_over_mesh_axes
from burst_jax.ring.request import Request

# What the dimensions of each array of a call are split over. A dimension that is None is whole on
# every device.
_DIMENSIONS: dict[str, tuple[str | None, ...]] = {
    "query": ("batch", "tokens", "heads", None),
    "key": ("batch", "tokens", "heads", None),
    "value": ("batch", "tokens", "heads", None),
    "query_segment_ids": ("batch", "tokens"),
    "key_value_segment_ids": ("batch", "tokens"),
    "query_seq_lengths": ("batch",),
    "key_value_seq_lengths": ("batch",),
    "prefix_lengths": ("batch",),
    "key_starts": ("batch", "tokens"),
    "key_ends": ("batch", "tokens"),
    "query_offset": ("batch",),
    "query_positions": ("batch", "tokens"),
    "key_value_positions": ("batch", "tokens"),
    "local_window_size[0]": (),
    "local_window_size[1]": (),
    "block_mask": ("heads", None, None),
    "sink_logits": ("heads",),
    "alibi_slopes": ("heads",),
    "dropout_seeds": ("batch", "heads"),
    "batch_numbers": ("batch",),
    "head_numbers": ("heads",),
    "out": ("batch", "tokens", "heads", None),
    "lse": ("batch", "tokens", "heads"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """How global arrays are split over a mesh.

    It is hashable, so that an eager call finds its compiled program by it and its
    :class:`burst_jax.ring.request.Request`.

    Attributes:
      mesh: the devices.
      token_axes: the mesh axes that sequences are split over, outermost first.
      batch_axes: the mesh axes that rows are split over.
      tensor_axes: the mesh axes that heads are split over, outside the ring: each device keeps its
        heads. The axis whose devices exchange heads is one of ``token_axes``.
      check_vma: whether JAX checks which values vary from device to device.
    """

    mesh: Mesh | AbstractMesh
    token_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    check_vma: bool

    @classmethod
    def parse(
        cls,
        mesh: Mesh | AbstractMesh,
        request: Request,
        batch_axis: AxisNames,
        tensor_axis: AxisNames,
    ) -> Placement:
        """The placement of a request's arrays, from ``burst_attention``'s arguments.

        Raises:
          ValueError: an axis is not one of the mesh's, or is used twice.
        """
        batch_axes = names_of("batch_axis", batch_axis)
        tensor_axes = names_of("tensor_axis", tensor_axis)
        used = dict.fromkeys(request.ring_axes, "seq_axis")
        if request.ulysses_axis is not None:
            used[request.ulysses_axis] = "ulysses_axis"
        for name, axes in (("batch_axis", batch_axes), ("tensor_axis", tensor_axes)):
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
            batch_axes=batch_axes,
            tensor_axes=tensor_axes,
            # A jax.vmap with spmd_axis_name makes the check fail: it marks its own batches of the
            # ring's small tables as split over that axis, too.
            check_vma=request.checks_vma and not mapped_over_mesh_axes(),
        )

    def spec(self, name: str, ndim: int | None = None) -> P:
        """How the argument or result of this name is split.

        One that may be without its first dimensions has ``ndim``.
        """
        dimensions = _DIMENSIONS[name]
        if ndim is not None:
            dimensions = dimensions[len(dimensions) - ndim :]
        axes = {
            "batch": self.batch_axes or None,
            "tokens": self.token_axes or None,
            "heads": self.tensor_axes or None,
            None: None,
        }
        return P(*(axes[dimension] for dimension in dimensions))

    def tokens_axis(self, name: str, ndim: int) -> int | None:
        """Which of its ``ndim`` axes counts the tokens of the argument of this name; None: none."""
        dimensions = _DIMENSIONS[name]
        dimensions = dimensions[len(dimensions) - ndim :]
        return dimensions.index("tokens") if "tokens" in dimensions else None

    def split(self, name: str, array: jax.Array) -> jax.Array:
        """An array that the library made, split as the mesh's Explicit axes need it."""
        explicit = self.mesh.explicit_axes
        if not explicit:
            return array
        needed = only(self.spec(name, array.ndim), explicit)
        return jax.reshard(array, jax.NamedSharding(self.mesh, needed))

    def placed(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays as the mesh's Explicit axes need them; Auto axes take any array.

        An array's type says how it is split over Explicit axes. An array that is on no mesh yet is
        split here. One that is on the mesh but split otherwise is the caller's to move, since that
        costs communication.

        Raises:
          ValueError: an array is split otherwise over Explicit axes.
        """
        explicit = self.mesh.explicit_axes
        if not explicit:
            return arrays
        placed = {}
        for name, array in arrays.items():
            needed = self.spec(name, array.ndim)
            sharding = getattr(jax.typeof(array), "sharding", None)
            if sharding is None or sharding.mesh.empty:
                placed[name] = self.split(name, array)
                continue
            if _entries(sharding.spec, explicit, len(needed)) != _entries(needed, explicit):
                raise ValueError(
                    f"{name} is split as {sharding.spec} over Explicit mesh axes, the ring "
                    f"needs {needed}: set seq_axis, batch_axis and tensor_axis to how it is "
                    f"split, or split it so: jax.reshard({name}, {needed})"
                )
            placed[name] = array
        return placed


def _entries(spec: P, axes: tuple[str, ...], length: int = 0) -> list[tuple[str, ...]]:
    """Of each dimension the given axes that it is split over; at least ``length`` dimensions."""
    entries = [flat_names(entry) for entry in only(spec, axes)]
    return entries + [()] * (length - len(entries))
