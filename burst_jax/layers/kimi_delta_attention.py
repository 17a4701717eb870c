"""An nnx layer of Kimi Delta Attention, Gated DeltaNet with a decay per key channel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from burst_jax.layers.gated_delta_net import GatedDeltaNet
from burst_jax.layers.projection import project


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention over a mesh, the linear-attention layer of Kimi Linear.

    ::

        q, k, v = (silu(conv(x W)) for W in (Wq, Wk, Wv))     # [B,T,K,H] [B,T,K,H] [B,T,N,Hv]
        beta = sigmoid(x Wb)                                  # [B,T,N]
        g = -exp(A_log) softplus((x Wfa) Wfb + dt_bias)       # [B,T,N,H]
        o = gated_delta_rule(q / |q|, k / |k|, v, g, beta)    # [B,T,N,Hv]
        out = (norm(o) sigmoid((x Wga) Wgb)) Wo               # [B,T,D]

    Letters, arguments and methods are those of :class:`burst_jax.GatedDeltaNet`. The decay is one
    per key channel (arXiv 2510.26692), the output gate a sigmoid, and the projections of both have
    rank Hv: ``decay_a``, ``decay_b``, ``output_gate_a`` and ``output_gate_b``. ``A_log`` is ``[N]``
    and ``dt_bias`` ``[N, H]``.

    Kimi Linear has as many key heads as value heads, H = Hv = 128, and ``norm_epsilon`` 1e-5.
    """

    def _add_gates(
        self, linear: Any, in_features: int, head_dim: int, value_heads: tuple[int, int]
    ) -> tuple[int, ...]:
        heads, rank = value_heads
        self.output_gate_a = linear(in_features, rank)
        self.output_gate_b = linear(rank, value_heads)
        self.beta = linear(in_features, heads)
        self.decay_a = linear(in_features, rank)
        self.decay_b = linear(rank, (heads, head_dim))
        return heads, head_dim

    def _time_step(self, x: jax.Array) -> jax.Array:
        return project(self.decay_b, project(self.decay_a, x))

    def _output_gate(self, x: jax.Array) -> jax.Array:
        gate = project(self.output_gate_b, project(self.output_gate_a, x))
        return jax.nn.sigmoid(gate.astype(jnp.float32))
