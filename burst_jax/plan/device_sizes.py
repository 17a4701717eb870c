"""One device's share of a decoder and its batch: numbers of weights, tokens and features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from burst_jax.models.config import DecoderConfig, Mixer, Norms
from burst_jax.models.experts import MixtureOfExperts
from burst_jax.models.experts.exchange import round_sizes, slots
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.models.weights import logical_axes, name_of, weight_specs
from burst_jax.parallel.mesh import flat_names
from burst_jax.plan.delta_net import DeltaNetSizes
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.ring.ulysses import check_heads


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Number of weights in one or several matrices.

    Attributes:
      whole: gathered, as a device uses them: only the tensor axis shards them.
      part: the shard that a device stores.
    """

    whole: int
    part: int


@dataclasses.dataclass(frozen=True)
class DeviceSizes:
    """One device's share of a training step.

    Attributes:
      mixers: the mixer of each layer.
      tokens: number of tokens, over all of its sequences.
      rows: number of these sequences.
      width: features of the residual stream.
      query: features of the device's query heads together.
      attended: features of attention's output, of all of the device's heads.
      kv: features of its key and value heads together.
      gate: features of the output gate of attention; 0 without one.
      attended_kv: the same during attention, per token of the device: more than ``kv`` if Ulysses
        replicates key heads.
      inputs: weights of the input projections of a layer with each mixer.
      heads: number of its query heads.
      hidden: its hidden features of the feed-forward that a token uses: with experts those of k
        experts and of the shared one.
      expert_hidden: those of one expert.
      copies: number of experts that a token is sent to, k; 0 without experts.
      assigned: rows of the experts' arrays per token: k, or those of a round of exchange.
      sent: rows that a round sends per token, empty ones included; 0 without an exchange.
      delta_net: of a layer with Gated DeltaNet; None without such layers.
      norms: the norms of the layers with each mixer.
      head_normed: features that the norms of queries and keys read, or that of a latent vector.
      dense: number of layers without experts next to others with experts; elsewhere they count as
        the others.
      dense_hidden: their hidden features on the device.
      vocab: its shard of the vocabulary.
      itemsize: bytes of an activation.
      param: bytes of a weight.
      mlp: the matrices of one layer's feed-forward, of all experts.
      layer: all weights of one layer; in a hybrid of one of each kind, which are gathered together.
      all_layers: all weights of all layers.
      embedding: the embedding.
      head: the output projection; the embedding again if they are tied.
      parts: all weights that the device stores.
    """

    mixers: tuple[Mixer, ...]
    tokens: int
    rows: int
    width: int
    query: int
    attended: int
    kv: int
    gate: int
    attended_kv: int
    inputs: Mapping[Mixer, int]
    heads: int
    hidden: int
    expert_hidden: int
    copies: int
    assigned: float
    sent: float
    delta_net: DeltaNetSizes | None
    norms: Mapping[Mixer, Norms]
    head_normed: int
    dense: int
    dense_hidden: int
    vocab: int
    itemsize: int
    param: int
    mlp: Matrix
    layer: Matrix
    all_layers: Matrix
    embedding: Matrix
    head: Matrix
    parts: int

    @property
    def held_hidden(self) -> float:
        """Hidden features in memory, per token."""
        return self.hidden + (self.assigned - self.copies) * self.expert_hidden

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mixers)

    def out(self, mixer: Mixer) -> int:
        """Features of the input of the mixer's output projection."""
        return self.attended if mixer == "attention" else self._of_delta_net.out

    def normed(self, mixer: Mixer) -> int:
        """Features that a layer's norms read, in total; not those of Gated DeltaNet's results."""
        both = self.norms[mixer] == "both"
        of_heads = self.head_normed if mixer == "attention" else 0
        return (4 if both else 2) * self.width + of_heads

    def post_normed(self, mixer: Mixer) -> int:
        """Those of them that norms after attention and feed-forward read."""
        return 0 if self.norms[mixer] == "before" else 2 * self.width

    def products(self, mixer: Mixer) -> int:
        """Weights of one layer that are multiplied with each of the device's tokens."""
        of_mixer = self.inputs[mixer] + self.width * self.out(mixer)
        return of_mixer + 3 * self.width * self.hidden

    @property
    def all_products(self) -> int:
        """The same of all layers."""
        of_dense = 3 * self.width * (self.dense_hidden - self.hidden)
        return sum(map(self.products, self.mixers)) + self.dense * of_dense

    @property
    def _of_delta_net(self) -> DeltaNetSizes:
        assert self.delta_net is not None
        return self.delta_net


def device_sizes(
    config: DecoderConfig, shapes: Any, strategy: TrainingStrategy, *, length: int, batch: int
) -> DeviceSizes:
    """The share of one device.

    ``shapes`` is the decoder's state as shapes.

    Raises:
      ValueError: a weight or the batch is not divisible by the mesh.
      NotImplementedError: a feed-forward other than GatedMLP and MixtureOfExperts; head dims of
        Gated DeltaNet without kernels.
    """
    if config.feed_forward not in (GatedMLP, MixtureOfExperts):
        raise NotImplementedError(
            f"feed_forward is {config.feed_forward.__name__}: the planner supports GatedMLP and "
            "MixtureOfExperts only"
        )
    experts = config.experts
    rules, mesh, tensor = strategy.weight_rules, strategy.abstract_mesh, strategy.tensor
    shared = experts.shared_dim if experts else 0
    copies = experts.per_token if experts else 0
    sizes = {"mlp_dim": config.mlp_dim, "shared_dim": shared, "dense_dim": config.dense_dim or 0}
    if has_attention := "attention" in config.mixers:
        sizes["num_heads"] = config.num_heads
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(f"{name} is {size}: {tensor} devices do not divide it")
    of_delta_net = None
    if config.delta_net is not None:
        of_delta_net = DeltaNetSizes.of(config.delta_net, strategy)
    ulysses = strategy.ulysses
    kv_heads = max(1, config.num_kv_heads // tensor)
    if has_attention:
        check_heads(config.num_heads // tensor, kv_heads, ulysses, "the Ulysses axis")
    more_axes = strategy.arguments.get("ulysses_axis") if strategy.weights == "sharded" else None
    specs = weight_specs(shapes, config, mesh, rules, more_axes=more_axes)
    whole: dict[str, int] = {}
    part: dict[str, int] = {}
    named = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, weight), spec in zip(named, jax.tree.leaves(specs), strict=True):
        name = name_of(path)
        saved = math.prod(NamedSharding(mesh, spec).shard_shape(weight.shape))
        part[name] = saved
        axes, names = {"fsdp", *strategy.attention.mesh}, flat_names(*spec)
        if "expert" in logical_axes(path, config):
            axes -= {*strategy.expert}
        gathered = math.prod(mesh.shape[axis] for axis in axes if axis in names)
        whole[name] = saved * gathered

    def matrix(start: str, count: int = 1) -> Matrix:
        names = [name for name in part if name.startswith(start)]
        return Matrix(*(sum(found[n] for n in names) // count for found in (whole, part)))

    stacks = {stack.name: count for stack, count in config.stacks.items()}
    of_layers = [matrix(f"{stack}.", count) for stack, count in stacks.items()]
    stack, count = next(iter(stacks.items()))
    rows = batch // strategy.rows
    heads, head_features = config.num_heads // tensor, config.head_dim + config.value_head_dim
    query, kv = heads * config.head_dim, kv_heads * head_features
    head_normed = query + kv_heads * config.head_dim if config.qk_norm else 0
    if config.latent is not None:
        head_normed = config.latent.dim
    tokens = rows * length // strategy.token_devices
    assigned, sent = float(copies), 0.0
    if experts and strategy.expert:
        devices = strategy.expert_devices
        first, _ = round_sizes(tokens * copies, devices, experts.capacity_factor)
        assigned, sent = (devices * x / tokens for x in (first, slots(tokens, first)))
    return DeviceSizes(
        mixers=tuple(kind.mixer for kind in config.layer_kinds),
        tokens=tokens,
        rows=rows,
        width=config.embed_dim,
        query=query,
        attended=heads * config.value_head_dim,
        kv=kv,
        gate=heads * config.value_head_dim if config.attention_gate else 0,
        attended_kv=max(kv, ulysses * head_features),
        inputs={mixer: _input_weights(config, mixer, tensor) for mixer in config.mixers},
        heads=heads,
        hidden=((copies or 1) * config.mlp_dim + shared) // tensor,
        copies=copies,
        assigned=assigned,
        sent=sent,
        delta_net=of_delta_net,
        expert_hidden=config.mlp_dim // tensor,
        norms={mixer: config.norms_of(mixer) for mixer in config.mixers},
        head_normed=head_normed,
        dense=sum(kind.dense for kind in config.layer_kinds),
        dense_hidden=(config.dense_dim or 0) // tensor,
        vocab=config.vocab_size // tensor,
        itemsize=jnp.dtype(config.dtype).itemsize,
        param=jnp.dtype(config.param_dtype).itemsize,
        mlp=matrix(f"{stack}.mlp.", count),
        layer=_sum(of_layers, [1] * len(of_layers)),
        all_layers=_sum(of_layers, list(stacks.values())),
        embedding=matrix("embedding"),
        head=matrix("embedding" if config.tie_embeddings else "head."),
        parts=sum(part.values()),
    )


def _input_weights(config: DecoderConfig, mixer: Mixer, tensor: int) -> int:
    """Weights that a device multiplies each token with, in the input projections of a layer."""
    own = config.delta_net if mixer == "delta_net" else config.latent
    whole = () if own is None else own.weight_axes.items()
    replicated = {path[0] for path, axes in whole if path[-1] == "kernel" and "heads" not in axes}
    total = 0
    for name, (inputs, outputs) in config.mixer_sizes(mixer).items():
        devices = 1 if name in replicated else tensor
        if mixer == "attention" and own is None and name in ("key", "value"):
            devices = min(tensor, config.num_kv_heads)  # Each has one head, or more.
        total += inputs * outputs // devices if name != "out" else 0
    return total


def _sum(matrices: list[Matrix], counts: list[int]) -> Matrix:
    pairs = list(zip(matrices, counts, strict=True))
    return Matrix(sum(n * x.whole for x, n in pairs), sum(n * x.part for x, n in pairs))
