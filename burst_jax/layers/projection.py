"""A layer's projections inside a ``shard_map``: one device's features, adapters, biases."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from burst_jax.layers.lora import add_adapter, slice_outputs
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames, flat_names


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


def check_local_heads(
    tensor_axis: AxisNames, heads: str, local: int, total: int, weights: str
) -> None:
    """Raises ValueError unless devices along ``tensor_axis`` have different heads.

    Inside a ``shard_map``. ``heads`` and ``weights`` are names for the message: of the heads, of
    which a device has the weights of ``local`` of ``total``, and of the weights to shard.
    """
    axes = flat_names(tensor_axis)
    devices = math.prod(lax.axis_size(axis) for axis in axes)
    if local * devices != total:
        raise ValueError(
            f"tensor_axis is {axes}, {devices} devices, and each has the weights of {local} of "
            f"{total} {heads} heads: inside a shard_map shard the heads of {weights} over it, or "
            "leave tensor_axis out"
        )


def check_explicit_heads(
    tensor_axis: AxisNames, mesh: Mesh | AbstractMesh | None, layer: str
) -> None:
    """Raises NotImplementedError if the heads of a layer are sharded over an Explicit axis.

    Weights are gathered over Explicit axes, so the projections would not be sharded. ``layer`` is
    the name of its class.
    """
    if mesh is not None and set(mesh.explicit_axes).intersection(flat_names(tensor_axis)):
        raise NotImplementedError(
            f"tensor_axis is {tensor_axis!r}, an Explicit mesh axis: {layer} gathers its weights "
            "over Explicit axes; make the axis Auto (axis_types=jax.sharding.AxisType.Auto), or "
            "leave tensor_axis out"
        )
