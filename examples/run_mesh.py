"""What the mesh of a training run shards."""

from __future__ import annotations

import math
from typing import Any, Literal

from jax.sharding import Mesh

from burst_jax import ShardingRules

Weights = Literal["sharded", "replicated"]

TRAINING_AXES = ("data", "fsdp", "stage", "outer", "inner", "seq", "heads", "tensor")
BATCH_AXES = ("data", "fsdp")


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


def decoder_axes(mesh: Mesh, weights: Weights, expert_axes: str | None = None) -> dict[str, Any]:
    """Arguments of ``init_train_state`` and of the decoder for a training mesh."""
    expert = None if expert_axes is None else tuple(expert_axes.split(","))
    if expert is not None and (weights == "replicated" or not {*expert} <= {*mesh.axis_names}):
        raise ValueError(
            f"--expert-axes is {expert_axes}: write axes of --mesh, like fsdp,seq, and leave "
            "--weights out"
        )
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
        data="data", fsdp="fsdp", seq=ring_axes(mesh), tensor="tensor", stage="stage",
        expert=expert,
    )  # fmt: skip
    return options | {"rules": rules}
