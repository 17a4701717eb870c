"""Weights that stay split over the sequence axes while tokens are generated (Helix).

In a step of decoding all devices of the sequence axes have the same few tokens, and each would read
all weights for them. With split weights each reads its part, and what travels is activations
(Helix, arXiv 2507.07120), D features, N query heads and M hidden features, n devices::

    weight              part of a device    its product         then
    query, key, value   [D/n, heads, H]     a term of a sum     sum of [B, T, heads, H]
    out                 [N, H, D/n]         D/n features        gather of [B, T, D]
    gate, up            [D, M/n]            M/n features        nothing
    down                [M/n, D]            a term of a sum     sum of [B, T, D]

The features of the residual stream are split, not heads, so that any number of heads will do. The
rules split them so for training, and have checked that n divides D. M is padded with zeros, which
add nothing.

A prompt's tokens differ from device to device, so there one layer's weights are gathered at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from burst_jax.models.decoder_layer import DecoderLayer
from burst_jax.models.shardings import DecoderShardings
from burst_jax.models.weights import logical_axes
from burst_jax.parallel.mesh import axes_size, only


def spec_of(path: tuple[Any, ...], spec: P, parts: DecoderShardings, split: bool) -> P:
    """How serving splits a weight of a decoder.

    Args:
      path: the weight's, in the decoder's state.
      spec: how the decoder splits it.
      parts: of the decoder.
      split: whether weights are split over the sequence axes, too.
    """
    if not split:
        return only(spec, parts.tensor_axes)
    axes = logical_axes(path, parts.config)
    if "mlp" not in axes:
        return only(spec, (*parts.tensor_axes, *parts.token_axes))
    return P(*(_hidden_axes(parts) if name == "mlp" else None for name in axes))


def padded(path: tuple[Any, ...], weight: jax.Array, parts: DecoderShardings) -> jax.Array:
    """A weight whose hidden features are a multiple of the devices that they are split over."""
    devices = axes_size(parts.mesh, _hidden_axes(parts))
    widths = [
        (0, -size % devices if name == "mlp" else 0)
        for name, size in zip(logical_axes(path, parts.config), weight.shape, strict=True)
    ]
    return jnp.pad(weight, widths) if any(after for _, after in widths) else weight


def _hidden_axes(parts: DecoderShardings) -> tuple[str, ...]:
    """The mesh axes that split the hidden features; the tensor axes' blocks are the larger ones."""
    return (*parts.tensor_axes, *parts.token_axes)


def use_parts(layer: DecoderLayer, parts: DecoderShardings) -> None:
    """Lets a layer compute with a device's part of its weights, inside a ``shard_map``."""
    attention, axes = layer.attention, parts.token_axes
    for name in ("query", "key", "value", "out"):
        kind = SplitOutputs if name == "out" else SplitInputs
        setattr(attention, name, kind(getattr(attention, name), axes))
    layer.mlp.hidden_axis = _hidden_axes(parts)


class _Split(nnx.Module):
    """A projection in whose place another computes with a part of its kernel."""

    def __init__(self, linear: nnx.LinearGeneral, axes: tuple[str, ...]) -> None:
        self.kernel, self.bias = linear.kernel, linear.bias
        self.out_features, self.dtype = linear.out_features, linear.dtype
        self.axes = axes


class SplitInputs(_Split):
    """``x W`` of a device's inputs, ``W [D/n, heads, H]``, summed over the devices."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, heads, H]``; the bias is left out."""
        x = my_part(x, self.axes).astype(self.dtype)
        kernel = self.kernel[...].astype(self.dtype)
        terms = jnp.einsum("btd,dnh->btnh", x, kernel, preferred_element_type=jnp.float32)
        return lax.psum(terms, self.axes).astype(self.dtype)


class SplitOutputs(_Split):
    """``x W`` with a device's outputs, ``W [N, H, D/n]``, gathered from the devices."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, N, H]`` to ``[B, T, D]``; the bias is left out."""
        kernel = self.kernel[...].astype(self.dtype)
        out = jnp.einsum("btnh,nhd->btd", x.astype(self.dtype), kernel)
        return lax.all_gather(out, self.axes, axis=2, tiled=True)


def my_part(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This device's part of the last axis."""
    size = x.shape[-1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, x.ndim - 1)
