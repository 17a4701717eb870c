"""The mesh of a ``--mesh`` option, written like ``fsdp=2,seq=4``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from burst_jax.errors import shown

# Axes of a mesh for inference; training also has two-level rings and Ulysses.
AXES = ("data", "fsdp", "stage", "seq", "tensor")


def mesh_of_option(text: str | None, axes: Sequence[str] = AXES) -> Mesh:
    """The mesh of ``--mesh``, over the first devices, with all of ``axes`` as Auto axes.

    Args:
      text: sizes of some of the axes, like ``"fsdp=2,seq=4"``; all others have size 1. None is
        "seq" over all devices.
      axes: the axes that the program knows.

    Raises:
      ValueError: the text has another form, an unknown axis or one twice, a size below 1, two kinds
        of rings, or more devices than there are; or, with several processes, not all devices.
    """
    devices = jax.devices()
    sizes = dict.fromkeys(axes, 1)
    start = f"--mesh is {shown(text)}"
    if text is None:
        sizes["seq"] = len(devices)
    else:
        try:
            pairs = [
                (name, int(size)) for name, size in (axis.split("=") for axis in text.split(","))
            ]
        except ValueError:
            raise ValueError(f"{start}: write it like fsdp=2,seq=4") from None
        given = dict(pairs)
        if len(given) != len(pairs):
            raise ValueError(f"{start}: it names an axis twice; give each one size")
        if not set(given) <= set(sizes) or min(given.values()) < 1:
            raise ValueError(f"{start}: its axes are {', '.join(axes)}, of size 1 or more")
        if "seq" in given and {"outer", "inner"} & set(given):
            raise ValueError(f"{start}: the ring is seq, or outer and inner (two levels), not both")
        sizes |= given
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"{start}: it needs {shown(count)} devices, there are {len(devices)}; use for example "
            f"seq={len(devices)}"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"{start}: {count} devices, but the processes have {len(devices)}: several "
            "processes must use all (on CPUs each has JAX_NUM_CPU_DEVICES, 8 by default)"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices[:count]
    )


def one_device(mesh: Mesh) -> Mesh:
    """A mesh of the first device, with the same axes."""
    device = np.asarray(mesh.devices.flat[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)


def batch_shards(mesh: Mesh) -> int:
    """The number of devices that shard the batch, on a mesh with :data:`AXES`."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["stage"]


def batch_of_option(batch: int | None, mesh: Mesh) -> int:
    """The value of ``--batch`` on a mesh with :data:`AXES`; None is one sequence per shard.

    Raises:
      ValueError: the devices that shard the batch do not divide it.
    """
    shards = batch_shards(mesh)
    batch = shards if batch is None else batch
    if batch < 1 or batch % shards:
        raise ValueError(f"--batch is {shown(batch)}: use a multiple of {shards}, like {shards}")
    return batch
