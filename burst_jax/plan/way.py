"""A way to train a decoder on a cluster: its mesh, and what is kept, recomputed and moved."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from jax.sharding import AbstractMesh, AxisType

from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.rules import ShardingRules
from burst_jax.plan.model import Cluster, Scheme

if TYPE_CHECKING:
    from burst_jax.models.remat import Remat
    from burst_jax.training.adam import Moments

Weights = Literal["split", "whole"]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a training step is split over a cluster, and what its layers keep.

    Attributes:
      weights: "split" over the rows' and the tokens' devices, or "whole" on each of them.
      rows: number of devices, or groups of them, that have rows of their own.
      ring: sizes of the ring's mesh axes, the outer one first: ``(seq,)`` or ``(outer, inner)``.
      tensor: number of devices that split heads, hidden features and vocabulary.
      layout: the order of the tokens.
      remat: what layers keep for the backward pass.
      remat_layers: how many layers are "selective" if some are, see
        :class:`burst_jax.models.DecoderConfig`.
      mlp_chunks: in how many chunks of tokens the feed-forward runs.
      moments: the memory that the optimizer's moments are in.
    """

    weights: Weights
    rows: int
    ring: tuple[int, ...]
    tensor: int
    layout: Layout
    remat: Remat
    mlp_chunks: int = 1
    moments: Moments = "device"
    remat_layers: int | None = None

    @property
    def seq(self) -> int:
        """Number of devices of a ring."""
        return math.prod(self.ring)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh's axes and their sizes, outermost first."""
        rows = {"fsdp" if self.weights == "split" else "data": self.rows}
        ring = dict(zip(self._ring_axes, self.ring, strict=True))
        axes = rows | ring | {"tensor": self.tensor}
        return {name: size for name, size in axes.items() if size > 1 or name in ring}

    @property
    def _ring_axes(self) -> tuple[str, ...]:
        return ("outer", "inner") if len(self.ring) == 2 else ("seq",)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``init_train_state`` that say it, but for the mesh: plain values.

        Weights that are split have ``rules``, the arguments of
        :class:`burst_jax.ShardingRules`.
        """
        axes = self._ring_axes
        seq = axes if len(axes) == 2 else axes[0]
        names = {name: name if name in self.mesh else None for name in ("fsdp", "data", "tensor")}
        if self.weights == "split":
            rules = {"data": None, "fsdp": names["fsdp"], "seq": seq, "tensor": names["tensor"]}
            return {"rules": rules, "layout": self.layout}
        given = {"batch_axis": names["data"], "seq_axis": seq, "tensor_axis": names["tensor"]}
        return {**{k: v for k, v in given.items() if v is not None}, "layout": self.layout}

    @property
    def weight_rules(self) -> ShardingRules:
        """The mesh axes that split weights and batches, whether rules say it or arguments."""
        if self.weights == "split":
            return ShardingRules(**self.arguments["rules"])
        names = {name: name if name in self.mesh else None for name in ("data", "tensor")}
        return ShardingRules(fsdp=None, seq=None, **names)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        mesh = self.mesh
        return AbstractMesh(
            tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh)
        )

    @property
    def scheme(self) -> Scheme:
        """How one attention is split along the sequence."""
        name = "one device" if self.seq == 1 else "ring"
        return Scheme("two-level ring" if len(self.ring) == 2 else name, self.ring, 1)

    def ring_cluster(self, cluster: Cluster) -> Cluster:
        """The devices of one ring, and the links between them.

        Devices along the tensor axis are neighbours, then those along the ring. Hosts that are
        more than one run several processes, whose permutes copy engines cannot make.
        """
        gpu = cluster.gpu
        if cluster.hosts > 1:
            gpu = dataclasses.replace(gpu, peer_link=None)
        inside = min(self.seq, cluster.gpus // self.tensor)
        return Cluster(gpu, self.seq // inside, inside, cluster.host_link)

    def remats(self, layers: int) -> dict[Remat, int]:
        """How many of the layers keep what, the first layers first."""
        from burst_jax.models.remat import remat_of_layers

        return dict(Counter(remat_of_layers(self.remat, self.remat_layers, layers)))

    @property
    def flags(self) -> list[str] | None:
        """The flags of ``examples/train_lm.py`` that say it; None if none do."""
        copies = self.weights == "whole" and self.rows * self.seq > 1
        if copies or len(self.ring) == 2:
            return None
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        flags = ["--mesh", mesh, "--layout", self.layout, "--remat", self.remat]
        if self.remat_layers is not None:
            flags += ["--remat-layers", str(self.remat_layers)]
        flags += ["--mlp-chunks", str(self.mlp_chunks)]
        return flags + (["--moments", self.moments] if self.moments == "host" else [])
