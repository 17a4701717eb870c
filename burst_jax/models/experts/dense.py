"""The gated MLP of a layer without experts, in a decoder whose other layers have some."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from burst_jax.models.experts.config import dense_config
from burst_jax.models.experts.mixture import Sums
from burst_jax.models.feed_forward import DecoderConfig, GatedMLP
from burst_jax.parallel.mesh import AxisNames
from pallas_kernels.arrays import vary, varying_axes


class DenseMLP(GatedMLP):
    """:class:`GatedMLP` of ``config.dense_dim`` hidden features, for the kinds that are ``dense``.

    Like the experts of the other layers it has no low-rank adapters. The arguments are those of
    :class:`FeedForward`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        out_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        dense = dense_config(config, config.dense_dim)
        super().__init__(dense, out_init=out_init, hidden_axis=hidden_axis, rngs=rngs)
        self.experts = config.experts

    @classmethod
    def projections(cls, config: DecoderConfig) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of gate, up and down; none that adapters of the decoder extend."""
        return {} if config.experts is not None else super().projections(config)

    @classmethod
    def num_matmul_params(cls, config: DecoderConfig) -> int:
        """Number of weights that multiply each token."""
        return 3 * config.embed_dim * config.dense_dim

    def with_sums(
        self, x: jax.Array, present: jax.Array | None, *, keeps_products: bool
    ) -> tuple[jax.Array, Sums]:
        """See :class:`FeedForward`. The sums are those of a mixture without tokens."""
        out, _ = super().with_sums(x, present, keeps_products=keeps_products)
        zeros = jnp.zeros((self.experts.count,), jnp.float32)
        rounds = jnp.array([0, 1], jnp.float32) if self.expert_axis else None
        sums = Sums(counts=zeros, scores=zeros, z=jnp.float32(0), rounds=rounds)
        return out, vary(sums, varying_axes(x))
