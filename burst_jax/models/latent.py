"""``Latent``: sizes of a decoder's layers of multi-head latent attention."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from burst_jax.errors import check_integer, check_positive, shown
from burst_jax.layers.latent_attention import check_latent_sizes
from burst_jax.parallel.rules import LogicalAxes


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of a decoder's latent attention (:class:`burst_jax.LatentAttention`).

    ``DecoderConfig(latent=Latent(...))`` makes the layers with the mixer "attention" such layers.
    Their heads are ``num_heads`` of ``head_dim`` features; ``num_kv_heads`` is the same number.

    Attributes:
      dim: number of features of the latent vector, R.
      shared_dim: number of features of a key that all heads share, S, among its ``head_dim``.
      value_head_dim: number of features of a value head, Hv.
      norm_epsilon: epsilon of the latent vector's norm.

    Raises:
      ValueError: a size below 1, or a shared_dim below 0; an epsilon that is not positive.
    """

    # The logical axes of the weights that other softmax attention does not have, by their paths.
    weight_axes: ClassVar[dict[tuple[str, ...], LogicalAxes]] = {
        ("latent", "kernel"): ("embed", None),
        ("latent_norm", "scale"): (None,),
        ("key", "kernel"): (None, "heads", None),
        ("value", "kernel"): (None, "heads", None),
    }

    dim: int
    shared_dim: int
    value_head_dim: int
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("shared_dim", 0), ("value_head_dim", 1)):
            check_integer(name, getattr(self, name), least, 2**31 - 1)
        check_positive("norm_epsilon", self.norm_epsilon)

    def projections(self, embed_dim: int, heads: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the projections by name."""
        values = heads * self.value_head_dim
        return {
            "query": (embed_dim, heads * head_dim),
            "latent": (embed_dim, self.dim + self.shared_dim),
            "key": (self.dim, heads * (head_dim - self.shared_dim)),
            "value": (self.dim, values),
            "out": (values, embed_dim),
        }


def check_latent(config: Any) -> None:
    """Raises for fields of a ``DecoderConfig`` that do not fit its latent attention.

    Raises:
      ValueError: a ``latent`` of another type, sizes that do not fit together, or layers of linear
        attention alone.
      NotImplementedError: RoPE, norms of queries and keys, or biases of their projections.
    """
    latent = config.latent
    if latent is None:
        return
    if not isinstance(latent, Latent):
        raise ValueError(f"latent is {shown(latent)}: use a Latent, or None")
    if "attention" not in config.mixers:
        raise ValueError(
            f"latent is {latent}, and no layer has softmax attention: leave it out, or add "
            "LayerKind() to layer_pattern"
        )
    check_latent_sizes(config.head_dim, latent.value_head_dim, latent.dim, latent.shared_dim)
    if config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"num_kv_heads is {config.num_kv_heads}, num_heads {config.num_heads}, and latent is "
            "given: latent attention has a key and a value for each query head; use equal numbers"
        )
    for name, none in (("qk_norm", False), ("qkv_bias", False)):
        if (given := getattr(config, name)) != none:
            raise NotImplementedError(
                f"{name} is {shown(given)}, and latent is given, whose attention has none here: "
                f"use {name}={none}"
            )
    for rope in config.layer_ropes:
        if rope.fraction:
            raise NotImplementedError(
                f"rope is {rope}, and latent is given, whose attention has no RoPE here: leave it "
                "out, or use Rope(fraction=0.0)"
            )
