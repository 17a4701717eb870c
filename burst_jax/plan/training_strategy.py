"""A strategy to train a decoder on a cluster: mesh, layout, rematerialization and offload."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh, AxisType

from burst_jax.models.config import Mixer
from burst_jax.models.remat import Remat, remat_of_layers
from burst_jax.parallel.rules import ShardingRules
from burst_jax.plan.cost_model import Strategy
from burst_jax.plan.hardware import Cluster
from burst_jax.training.adam import Moments

Weights = Literal["sharded", "replicated"]


@dataclasses.dataclass(frozen=True)
class TrainingStrategy:
    """How a training step is sharded over a cluster, and what its layers save.

    Attributes:
      weights: "sharded" over the devices of batch and sequence, or "replicated" on each of them.
      rows: number of devices, or groups of them, that the batch is sharded over.
      ring: sizes of the ring's mesh axes, the outer one first: ``(seq,)`` or ``(outer, inner)``.
      tensor: number of devices that shard heads, hidden features and vocabulary.
      layout: the layout.
      remat: what layers save for the backward pass.
      remat_layers: number of layers that are "selective" if only some are, see
        :class:`burst_jax.models.DecoderConfig`.
      mlp_chunks: number of token chunks that the feed-forward runs in.
      moments: the memory that the optimizer's moments are in.
      ulysses: size of the Ulysses axis, which shards the tokens of each ring shard; 1 without one.
      expert: the mesh axes over which a mixture of experts exchanges tokens; empty if it gathers
        experts, or has none.
    """

    weights: Weights
    rows: int
    ring: tuple[int, ...]
    tensor: int
    layout: str
    remat: Remat
    mlp_chunks: int = 1
    moments: Moments = "device"
    remat_layers: int | None = None
    ulysses: int = 1
    expert: tuple[str, ...] = ()

    @property
    def seq(self) -> int:
        """Number of devices of a ring."""
        return math.prod(self.ring)

    @property
    def token_devices(self) -> int:
        """Number of devices that shard the tokens of a sequence."""
        return self.seq * self.ulysses

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes and their sizes, outermost first."""
        rows = {"fsdp" if self.weights == "sharded" else "data": self.rows}
        ring = self.attention.mesh
        axes = rows | ring | {"tensor": self.tensor}
        return {name: size for name, size in axes.items() if size > 1 or name in ring}

    @property
    def name(self) -> str:
        """Mesh and weights, as text."""
        mesh = " ".join(f"{name}={size}" for name, size in self.mesh.items())
        return f"{mesh} with {self.weights} weights{self.experts}"

    @property
    def experts(self) -> str:
        """The axes over which tokens are exchanged, as text; empty without any."""
        return f", experts over {' '.join(self.expert)}" if self.expert else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``init_train_state``, with ``rules`` if the weights are sharded."""
        attention = self.attention.arguments
        seq = attention["seq_axis"]
        options = {"ulysses_axis": attention.get("ulysses_axis"), "layout": self.layout}
        options = {name: value for name, value in options.items() if value is not None}
        names = {name: name if name in self.mesh else None for name in ("fsdp", "data", "tensor")}
        if self.weights == "sharded":
            rules = ShardingRules(
                data=None, fsdp=names["fsdp"], seq=seq, tensor=names["tensor"],
                expert=self.expert or None,
            )  # fmt: skip
            return {"rules": rules, **options}
        given = {"batch_axis": names["data"], "seq_axis": seq, "tensor_axis": names["tensor"]}
        return {name: axis for name, axis in given.items() if axis is not None} | options

    @property
    def weight_rules(self) -> ShardingRules:
        """The rules that shard weights and batches, also where ``arguments`` has none."""
        if self.weights == "sharded":
            return self.arguments["rules"]
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
    def attention(self) -> Strategy:
        """How the sequence of one attention is sharded."""
        name = "one device" if self.seq == 1 else "ring"
        name = "two-level ring" if len(self.ring) == 2 else name
        if self.ulysses > 1:
            name = f"{name} and ulysses"
        return Strategy(name, self.ring, self.ulysses)

    @property
    def expert_devices(self) -> int:
        """Number of devices that exchange tokens."""
        return math.prod(self.mesh[name] for name in self.expert)

    def ring_cluster(self, cluster: Cluster) -> Cluster:
        """The devices that share a sequence.

        Devices along the tensor axis are adjacent, then those along the Ulysses axis, then those
        along the ring. Several hosts run several processes, between which copy engines cannot do
        permutes.
        """
        gpu = cluster.gpu
        if cluster.hosts > 1:
            gpu = dataclasses.replace(gpu, peer_link=None)
        inside = min(self.token_devices, cluster.gpus // self.tensor)
        return Cluster(gpu, self.token_devices // inside, inside, cluster.host_link)

    def remats(self, mixers: Sequence[Mixer]) -> dict[tuple[Remat, Mixer], int]:
        """The number of layers with each remat and mixer, in the order of the layers.

        ``mixers`` are those of all layers.
        """
        of_layers = remat_of_layers(self.remat, self.remat_layers, len(mixers))
        return dict(Counter(zip(of_layers, mixers, strict=True)))
