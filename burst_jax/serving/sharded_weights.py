"""Weights that stay sharded over the sequence axes while tokens are generated (Helix).

In a decoding step all devices of the sequence axes have the same tokens, and would each read all
weights. With sharded weights each device reads its shard, and activations are sent instead (Helix,
arXiv 2507.07120). D features, N query heads, M hidden features, n devices::

    weight              shard               its product         communication
    query, key, value   [D/n, heads, H]     partial sum         all-reduce of [B, T, heads, H]
    gates, decays       [D/n, ...]          partial sum         all-reduce of [B, T, ...]
    out                 [N, H, D/n]         D/n features        all-gather of [B, T, D]
    gate, up            [D, M/n]            M/n features        none
    down                [M/n, D]            partial sum         all-reduce of [B, T, D]

The features of the residual stream are sharded, not heads, so any number of heads works. The rules
shard them like this for training, and check that n divides D. M is padded with zeros, which add
nothing.

The tokens of a prompt differ between devices, so prefill gathers the weights of one layer at a
time.

Experts that an expert axis shards stay where they are in any case. In a decoding step the devices
of the sequence axes have the same tokens: each computes those of its experts, and they all-reduce.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from burst_jax.layers.gated_delta_net import GatedDeltaNet
from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.models.shardings import DecoderShardings
from burst_jax.models.weights import logical_axes
from burst_jax.parallel.mesh import axes_size, restrict_spec
from burst_jax.parallel.rules import LogicalAxes


def serving_spec(path: tuple[Any, ...], spec: P, shardings: DecoderShardings, shard: bool) -> P:
    """The spec of a decoder's weight in serving.

    Args:
      path: of the weight in the decoder's state.
      spec: its spec in the decoder.
      shardings: of the decoder.
      shard: whether weights are sharded over the sequence axes, too.
    """
    axes = logical_axes(path, shardings.config)
    entries: dict[str | None, Any] = {"mlp": shardings.tensor_axes}
    if shard:
        entries["mlp"] = hidden_axes(shardings, axes)
    if "expert" in axes:
        entries["expert"] = shardings.expert_axes
    elif not shard or "mlp" not in axes:
        kept = shardings.token_axes if shard else ()
        return restrict_spec(spec, (*shardings.tensor_axes, *kept))
    return P(*(entries.get(name) or None for name in axes))


def hidden_padding(
    path: tuple[Any, ...], shape: tuple[int, ...], shardings: DecoderShardings
) -> tuple[tuple[int, int], ...] | None:
    """The widths of ``jnp.pad`` that make hidden features a multiple of their devices; or None."""
    axes = logical_axes(path, shardings.config)
    devices = axes_size(shardings.mesh, hidden_axes(shardings, axes))
    widths = tuple(
        (0, -size % devices if name == "mlp" else 0) for name, size in zip(axes, shape, strict=True)
    )
    return widths if any(after for _, after in widths) else None


def hidden_axes(shardings: DecoderShardings, axes: LogicalAxes = ()) -> tuple[str, ...]:
    """The mesh axes that shard hidden features, the tensor axes outermost.

    ``axes`` are the logical axes of a weight, whose experts other axes may shard.
    """
    found = (*shardings.tensor_axes, *shardings.token_axes)
    return tuple(n for n in found if "expert" not in axes or n not in shardings.expert_axes)


def with_sharded_projections[Layer: (BurstAttention, GatedDeltaNet)](
    mixer: Layer, axes: tuple[str, ...]
) -> Layer:
    """A layer that computes with its device's shard of the weights, inside a ``shard_map``.

    ``axes`` are those of the tokens, which shard the features of the residual stream.
    """
    projections: Any = {
        name: (_ShardedOutputs if name == "out" else _ShardedInputs)(linear, axes)
        for name, linear in vars(mixer).items()
        if isinstance(linear, nnx.LinearGeneral) and (name == "out" or _has_shard(linear))
    }
    return mixer.with_projections(**projections)


def _has_shard(linear: nnx.LinearGeneral) -> bool:
    """Whether this device has some of a projection's inputs, and not those of low rank, all."""
    return linear.kernel.shape[0] < linear.in_features[0]


class _ShardedProjection(nnx.Module):
    """A projection that computes with a shard of its kernel."""

    def __init__(self, linear: nnx.LinearGeneral, axes: tuple[str, ...]) -> None:
        self.kernel, self.bias = linear.kernel, linear.bias
        self.out_features, self.dtype = linear.out_features, linear.dtype
        self.axes = axes


class _ShardedInputs(_ShardedProjection):
    """``x W`` with ``W [D/n, ...]``, all-reduced."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, ...]``; without the bias."""
        x = local_shard(x, self.axes).astype(self.dtype)
        kernel = self.kernel[...].astype(self.dtype)
        terms = jnp.einsum("btd,d...->bt...", x, kernel, preferred_element_type=jnp.float32)
        return lax.psum(terms, self.axes).astype(self.dtype)


class _ShardedOutputs(_ShardedProjection):
    """``x W`` with ``W [N, H, D/n]``, all-gathered."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, N, H]`` to ``[B, T, D]``; without the bias."""
        kernel = self.kernel[...].astype(self.dtype)
        out = jnp.einsum("btnh,nhd->btd", x.astype(self.dtype), kernel)
        return lax.all_gather(out, self.axes, axis=2, tiled=True)


def local_shard(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This device's shard of the last dimension."""
    size = x.shape[-1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, x.ndim - 1)
