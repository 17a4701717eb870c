"""A layer's projections inside a ``shard_map``: one device's features, adapters, biases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from burst_jax.layers.lora import add_adapter, slice_outputs
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames


def project(
    linear: nnx.LinearGeneral | nnx.Linear, x: jax.Array, summed_over: AxisNames = None
) -> jax.Array:
    """``linear(x)`` inside a ``shard_map``, with this device's features of the weights.

    A LoRA adapter is included. The bias is added separately: nnx expects the bias of all features,
    and if products are summed over mesh axes it must be added once.
    """
    kernel = linear
    if linear.bias is not None:
        kernel = nnx.merge(*nnx.split(linear))
        kernel.bias, kernel.use_bias = None, False
    out = psum_manual(add_adapter(linear, x, kernel(x)), summed_over)
    return out if linear.bias is None else add_bias(out, linear.bias[...])


def add_bias(out: jax.Array, bias: jax.Array) -> jax.Array:
    """``out + bias`` in the dtype of ``out``, added in float32.

    The gradient of a bias is a sum over all tokens in the dtype of this addition, and a sum in
    bfloat16 stops growing after some hundred terms.
    """
    return (out.astype(jnp.float32) + bias.astype(jnp.float32)).astype(out.dtype)


def local_heads(linear: nnx.LinearGeneral, first: jax.Array, count: int) -> nnx.LinearGeneral:
    """A projection to ``count`` of its heads, from ``first`` on, with their part of an adapter."""
    if linear.kernel.shape[-2] == count:
        return linear
    features = linear.out_features[1]
    graphdef, adapter, state = nnx.split(linear, nnx.LoRAParam, ...)
    local = jax.tree.map(
        lambda w: lax.dynamic_slice_in_dim(w, first, count, axis=w.ndim - 2), state
    )
    adapter = slice_outputs(adapter, first * features, count * features)
    return nnx.merge(graphdef, adapter, local)
