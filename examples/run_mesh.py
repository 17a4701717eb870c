"""The mesh of an example: ``--mesh`` as text, and what it shards."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh

from burst_jax import ShardingRules

Weights = Literal["sharded", "replicated"]

# Axes of a mesh for inference; training also has two-level rings and Ulysses.
AXES = ("data", "fsdp", "stage", "seq", "tensor")
TRAINING_AXES = ("data", "fsdp", "stage", "outer", "inner", "seq", "heads", "tensor")
BATCH_AXES = ("data", "fsdp")


def make_mesh(text: str | None, axes: tuple[str, ...] = AXES) -> Mesh:
    """The mesh of ``--mesh``, over the first devices, with all of ``axes``; raises ValueError."""
    devices = jax.devices()
    sizes = dict.fromkeys(axes, 1)
    if text is None:
        sizes["seq"] = len(devices)
    else:
        try:
            pairs = [
                (name, int(size)) for name, size in (axis.split("=") for axis in text.split(","))
            ]
        except ValueError:
            raise ValueError(f"--mesh is {text!r}: write it like fsdp=2,seq=4") from None
        given = dict(pairs)
        if len(given) != len(pairs):
            raise ValueError(f"--mesh is {text!r}: it names an axis twice; give each one size")
        if not set(given) <= set(sizes) or min(given.values()) < 1:
            raise ValueError(
                f"--mesh is {text!r}: its axes are {', '.join(axes)}, of size 1 or more"
            )
        if "seq" in given and {"outer", "inner"} & set(given):
            raise ValueError(
                f"--mesh is {text!r}: the ring is seq, or outer and inner (two levels), not both"
            )
        sizes |= given
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"--mesh is {text!r}: it needs {count} devices, there are {len(devices)}; "
            f"use for example seq={len(devices)}"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"--mesh is {text!r}: {count} devices, but the processes have {len(devices)}: several "
            "processes must use all (on CPUs each has JAX_NUM_CPU_DEVICES, 8 by default)"
        )
    return _mesh(sizes, devices[:count])


def one_device(mesh: Mesh) -> Mesh:
    """A mesh of the first device, with the same axes."""
    return _mesh(dict.fromkeys(mesh.axis_names, 1), [mesh.devices.flat[0]])


def _mesh(sizes: dict[str, int], devices: list[jax.Device]) -> Mesh:
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def ring_axes(mesh: Mesh) -> str | tuple[str, str]:
    """``seq_axis`` of a training mesh."""
    return ("outer", "inner") if mesh.shape["outer"] * mesh.shape["inner"] > 1 else "seq"


def ring_size(mesh: Mesh) -> int:
    """Number of shards of the layout, on a training mesh."""
    return math.prod(mesh.shape[axis] for axis in ("outer", "inner", "seq"))


def token_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a training mesh that shard the tokens of a sequence."""
    ring = ring_axes(mesh)
    return (*([ring] if isinstance(ring, str) else ring), "heads")


def decoder_axes(mesh: Mesh, weights: Weights) -> dict[str, Any]:
    """Arguments of ``init_train_state`` and of the decoder for a training mesh."""
    options: dict[str, Any] = {}
    if mesh.shape["heads"] > 1:
        options["ulysses_axis"] = "heads"
    if weights == "replicated":
        for axis in ("fsdp", "stage"):
            if mesh.shape[axis] > 1:
                raise ValueError(
                    f"--weights is replicated, and --mesh has {axis}={mesh.shape[axis]}, which "
                    "shards weights: use data and tensor, or leave --weights out"
                )
        return options | {
            "batch_axis": "data", "seq_axis": ring_axes(mesh), "tensor_axis": "tensor"
        }  # fmt: skip
    rules = ShardingRules(
        data="data", fsdp="fsdp", seq=ring_axes(mesh), tensor="tensor", stage="stage"
    )
    return options | {"rules": rules}
