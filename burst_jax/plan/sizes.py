"""What one device has of a decoder and of its batch: numbers of weights, tokens and features."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from burst_jax.plan.way import Way

if TYPE_CHECKING:
    from burst_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Numbers of weights of a matrix, or of several.

    Attributes:
      whole: what a device uses: all but what the tensor axis splits.
      part: what a device keeps.
    """

    whole: int
    part: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One device's share of a training step.

    Attributes:
      layers: number of layers.
      tokens: of all rows that a device has.
      rows: number of these rows.
      width: features of the residual stream.
      query: features of the device's query heads together.
      kv: features of its key heads together, and of its value heads.
      heads: number of its query heads.
      hidden: its hidden features of the feed-forward.
      normed: features that one layer's norms take, all of them together.
      post_normed: those of them that attention and feed-forward return.
      vocab: its part of the vocabulary.
      itemsize: bytes of an activation.
      param: bytes of a weight.
      attention: the four projections of one layer, and norms of heads.
      mlp: the three matrices of one layer's feed-forward.
      layer: all weights of one layer.
      embedding: the embedding.
      head: the output projection; the embedding again if they are tied.
      parts: weights that the device keeps, all of them.
    """

    layers: int
    tokens: int
    rows: int
    width: int
    query: int
    kv: int
    heads: int
    hidden: int
    normed: int
    post_normed: int
    vocab: int
    itemsize: int
    param: int
    attention: Matrix
    mlp: Matrix
    layer: Matrix
    embedding: Matrix
    head: Matrix
    parts: int

    @property
    def products(self) -> int:
        """Weights of one layer that multiply each of the device's tokens."""
        return 2 * self.width * (self.query + self.kv) + 3 * self.width * self.hidden


def sizes_of(config: DecoderConfig, shapes: Any, way: Way, *, length: int, batch: int) -> Sizes:
    """The share of one device.

    Args:
      config: the decoder's sizes.
      shapes: its state as shapes.
      way: how it is split.
      length: tokens of a row.
      batch: rows.

    Raises:
      ValueError: a weight, or the rows, that the mesh does not divide.
    """
    from burst_jax.models.feed_forward import GatedMLP
    from burst_jax.models.weights import name_of, weight_specs

    if config.feed_forward is not GatedMLP:
        raise NotImplementedError(
            f"feed_forward is {config.feed_forward.__name__}: the planner knows GatedMLP only"
        )
    rules, mesh, tensor = way.weight_rules, way.abstract_mesh, way.tensor
    for name, size in (("num_heads", config.num_heads), ("mlp_dim", config.mlp_dim)):
        if size % tensor:
            raise ValueError(f"{name} is {size}: {tensor} devices do not divide it")
    specs = weight_specs(shapes, config, mesh, rules)
    whole: dict[str, int] = {}
    part: dict[str, int] = {}
    named = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, weight), spec in zip(named, jax.tree.leaves(specs), strict=True):
        name = name_of(path)
        kept = math.prod(NamedSharding(mesh, spec).shard_shape(weight.shape))
        part[name] = kept
        gathered = math.prod(mesh.shape[a] for a in ("fsdp", *way.scheme.mesh) if a in _axes(spec))
        whole[name] = kept * gathered

    def matrix(start: str) -> Matrix:
        names = [name for name in part if name.startswith(start)]
        layers = config.num_layers if start.startswith("layers") else 1
        return Matrix(*(sum(found[n] for n in names) // layers for found in (whole, part)))

    rows = batch // way.rows
    head_features = config.head_dim
    query = config.num_heads // tensor * head_features
    kv = max(1, config.num_kv_heads // tensor) * head_features
    post_normed = 2 * config.embed_dim if config.post_norms else 0
    return Sizes(
        layers=config.num_layers,
        tokens=rows * length // way.seq,
        rows=rows,
        width=config.embed_dim,
        query=query,
        kv=kv,
        heads=config.num_heads // tensor,
        hidden=config.mlp_dim // tensor,
        normed=2 * config.embed_dim + post_normed + (query + kv if config.qk_norm else 0),
        post_normed=post_normed,
        vocab=config.vocab_size // tensor,
        itemsize=jnp.dtype(config.dtype).itemsize,
        param=jnp.dtype(config.param_dtype).itemsize,
        attention=matrix("layers.attention."),
        mlp=matrix("layers.mlp."),
        layer=matrix("layers."),
        embedding=matrix("embedding"),
        head=matrix("embedding" if config.tie_embeddings else "head."),
        parts=sum(part.values()),
    )


def _axes(spec: Any) -> set[str]:
    from burst_jax.parallel.mesh import flat_names

    return set(flat_names(*spec))
