"""Shardings of the global arrays of a ``burst_attention`` call."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.jax_compat import vmapped_over_mesh_axes
from burst_jax.parallel.mesh import (
    AxisNames,
    axis_names,
    flat_names,
    restrict_spec,
    size_on_mesh,
)
from burst_jax.ring.request import Request

# The logical dimensions of each array of a call; None is a dimension that is not sharded.
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
class AttentionShardings:
    """How the global arrays of a call are sharded over a mesh.

    Hashable: an eager call finds its compiled program by it and its
    :class:`burst_jax.ring.request.Request`.

    Attributes:
      mesh: the devices.
      token_axes: the mesh axes that shard the sequence, outermost first, the Ulysses axis included.
      batch_axes: the mesh axes that shard the batch.
      tensor_axes: the mesh axes that shard heads outside the ring: each device keeps its heads.
      check_vma: whether ``shard_map`` checks which values vary over which mesh axes.
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
    ) -> AttentionShardings:
        """The shardings of a request's arrays, from ``burst_attention``'s arguments.

        Raises:
          ValueError: an axis is not one of the mesh's, or is used twice.
        """
        batch_axes = axis_names("batch_axis", batch_axis)
        tensor_axes = axis_names("tensor_axis", tensor_axis)
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
            # Under a jax.vmap with spmd_axis_name the check fails: the vmap marks the ring's small
            # tables, which are batched, as varying over that axis.
            check_vma=request.checks_vma and not vmapped_over_mesh_axes(),
        )

    def spec(self, name: str, ndim: int | None = None) -> P:
        """The spec of the argument or result of this name.

        ``ndim`` is needed for arrays whose leading dimensions are optional.
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
        """Index of the sequence dimension of the argument of this name, or None without one."""
        dimensions = _DIMENSIONS[name]
        dimensions = dimensions[len(dimensions) - ndim :]
        return dimensions.index("tokens") if "tokens" in dimensions else None

    def shard(self, name: str, array: jax.Array) -> jax.Array:
        """An array made by the library, sharded as needed over the mesh's Explicit axes."""
        explicit = self.mesh.explicit_axes
        if not explicit:
            return array
        needed = restrict_spec(self.spec(name, array.ndim), explicit)
        return jax.reshard(array, jax.NamedSharding(self.mesh, needed))

    def shard_arguments(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The caller's arrays, sharded as needed over Explicit axes; Auto axes accept any sharding.

        An array that is on no mesh yet is sharded here. One that is on the mesh with another
        sharding is left to the caller to reshard, because that costs communication.

        Raises:
          ValueError: an array has another sharding over Explicit axes.
        """
        explicit = self.mesh.explicit_axes
        if not explicit:
            return arrays
        sharded = {}
        for name, array in arrays.items():
            needed = self.spec(name, array.ndim)
            sharding = getattr(jax.typeof(array), "sharding", None)
            if sharding is None or sharding.mesh.empty:
                sharded[name] = self.shard(name, array)
                continue
            if _entries(sharding.spec, explicit, len(needed)) != _entries(needed, explicit):
                raise ValueError(
                    f"{name} is sharded as {sharding.spec} over Explicit mesh axes, the ring "
                    f"needs {needed}: set seq_axis, batch_axis and tensor_axis to how it is "
                    f"sharded, or reshard it: jax.reshard({name}, {needed})"
                )
            sharded[name] = array
        return sharded


def _entries(spec: P, axes: tuple[str, ...], length: int = 0) -> list[tuple[str, ...]]:
    """For each dimension those of ``axes`` that shard it; at least ``length`` dimensions."""
    entries = [flat_names(entry) for entry in restrict_spec(spec, axes)]
    return entries + [()] * (length - len(entries))
