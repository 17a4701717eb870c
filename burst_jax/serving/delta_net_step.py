"""A decoding step of linear attention: by one kernel after the input projections, where it can run.

XLA launches some ten kernels for what is between the projections of Gated DeltaNet, each of which
takes as long as megabytes of weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.layers.gated_delta_net import NORM_EPSILON, DeltaNetState, GatedDeltaNet
from burst_jax.layers.projection import project
from burst_jax.serving.fused_delta_net import fused_product
from pallas_kernels.linear.choice import supports_step


def delta_net_step(
    layer: GatedDeltaNet, x: jax.Array, before: DeltaNetState, present: jax.Array
) -> tuple[jax.Array, DeltaNetState]:
    """One token of each sequence, ``[B, D]``, inside a ``shard_map``.

    Args:
      layer: with this device's weights.
      x: the layer's input.
      before: the state before the token.
      present: int32 ``[B]``; sequences with 0 keep their state.

    Returns:
      ``(out, state)``, as of :meth:`GatedDeltaNet.step`.
    """
    product, options = fused_product(layer, x), dict(layer.options)
    if product is None or options["implementation"] == "xla" or not supports_step(product, before):
        out, after = layer.step(x, before)

        def stored(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(lax.expand_dims(present > 0, range(1, new.ndim)), new, old)

        return out, jax.tree.map(stored, after, before)
    from pallas_kernels.linear.sm80 import step

    parts = layer.query_conv, layer.key_conv, layer.value_conv, layer.A_log, layer.dt_bias
    weights = step.StepWeights(*(part[...] for part in (*parts, layer.norm.scale)))
    heads, after = step.step(
        product, weights, step.StepState(*before), present, unit_epsilon=NORM_EPSILON,
        norm_epsilon=layer.norm.epsilon, most_beta=2.0 if layer.negative_eigenvalues else 1.0,
    )  # fmt: skip
    out = project(layer.out, heads[:, None], summed_over=options["tensor_axis"])
    return out[:, 0], DeltaNetState(*after)
