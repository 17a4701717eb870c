"""Gated DeltaNet's input projections as one matrix.

A decoding step of one sequence computes six products with the layer's input. XLA computes a product
of one row with less than 10 million weights as a multiplication and a sum, which reach a third of
the memory bandwidth (:mod:`burst_jax.serving.fused_qkv`), and all six are that small in Qwen3-Next.

On each device of the tensor axes the fused matrix has the columns of that device's heads, with
zeros up to a multiple of H::

    query [D, K, H], key [D, K, H], value [D, N, Hv], output_gate [D, N, Hv], beta [D, N],
    decay [D, N]   ->   [D, ceil((2 K H + 2 N Hv + 2 N) / H), H]
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.layers.gated_delta_net import GatedDeltaNet
from pallas_kernels.arrays import pad_axis

NAMES = ("query", "key", "value", "output_gate", "beta", "decay")


def fuse(kernels: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[P, ...]) -> tuple[jax.Array, ...]:
    """One layer's kernels with all columns in the first, and no heads in the others.

    Args:
      kernels: those of ``NAMES``.
      mesh: the devices.
      specs: the spec of each of them, and of the results.
    """
    return _fuse(mesh, specs)(*kernels)


@functools.cache
def _fuse(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    def local(*kernels: jax.Array) -> tuple[jax.Array, ...]:
        features, _, head_dim = kernels[0].shape
        columns = jnp.concatenate([x.reshape(features, -1) for x in kernels], 1)
        padded = pad_axis(columns, 1, -(-columns.shape[1] // head_dim) * head_dim)
        whole = padded.reshape(features, -1, head_dim)
        return whole, *(x[:, :0] for x in kernels[1:])

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))


def with_fused_projections(layer: GatedDeltaNet, *, at_once: bool) -> GatedDeltaNet:
    """A layer whose projections are views of the fused matrix, inside a ``shard_map``.

    Args:
      layer: its query kernel is the fused matrix.
      at_once: whether they are slices of one product, for a step of few tokens. For a prompt each
        is a product with its own columns: of one product for all, the gate would keep the whole.
    """
    keys, values = layer.query_conv.shape[1:], layer.value_conv.shape[1:]
    shapes = keys, keys, values, values, values[:1], values[:1]
    projections, first = {}, 0
    for name, shape in zip(NAMES, shapes, strict=True):
        projections[name] = _Columns(layer.query, first, shape, at_once)
        first += math.prod(shape)
    return layer.with_projections(**projections)


def fused_product(layer: GatedDeltaNet, x: jax.Array) -> jax.Array | None:
    """All projections of ``[B, D]``, as ``[B, columns]`` in the order of ``NAMES``, then zeros.

    None of a layer without the fused matrix.
    """
    if not isinstance(layer.query, _Columns):
        return None
    return layer.query.product(x)


class _Columns(nnx.Module):
    """A projection by some columns of the fused matrix.

    Each of the six computes the product with all, and XLA deduplicates them.
    """

    def __init__(
        self, fused: nnx.LinearGeneral, first: int, shape: tuple[int, ...], at_once: bool
    ) -> None:
        whole = fused.kernel[...]
        columns = whole.reshape(len(whole), -1)
        self.own, self.shape, self.at_once = (first, first + math.prod(shape)), shape, at_once
        self.columns = nnx.Param(columns)
        self.kernel = nnx.Param(columns[:, slice(*self.own)].reshape(len(whole), *shape))
        self.bias, self.dtype = None, fused.dtype

    def product(self, x: jax.Array) -> jax.Array:
        """The product with the whole matrix."""
        return x.astype(self.dtype) @ self.columns[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, *shape]``."""
        if self.at_once:
            out = self.product(x)[..., slice(*self.own)]
        else:
            x = x.astype(self.dtype)
            out = x @ self.kernel[...].reshape(x.shape[-1], -1)
        return out.reshape(*x.shape[:2], *self.shape)
