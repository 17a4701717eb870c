"""Fused QKV: the projections of queries, keys, values and output gates, if any, as one matrix.

A decoding step has one token per sequence. XLA computes a product of one row with less than 10
million weights as a multiplication and a sum, in kernels that reach a third of the memory
bandwidth, and the key and value projections are that small with grouped heads. The fused matrix is
large enough to stay a matmul.

On each device of the tensor axes the fused matrix has that device's query heads, then its key
heads, then its value heads, then its output gates::

    [D, N, H], [D, K, H], [D, K, H], [D, N, H]   ->   [D, N + 2 K + N, H]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layers.norm import JointRMSNorm, RMSNorm, mean_square

NAMES = ("query", "key", "value", "output_gate")


def fuse(kernels: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[P, ...]) -> tuple[jax.Array, ...]:
    """One layer's kernels with all heads in the first, and no heads in the others.

    Args:
      kernels: query, key, value and perhaps output gate, ``[D, heads, H]``.
      mesh: the devices.
      specs: the spec of each of them, and of the results.
    """
    return _fuse(mesh, specs)(*kernels)


@functools.cache
def _fuse(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    def local(*kernels: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.concatenate(kernels, 1), *(x[:, :0] for x in kernels[1:])

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))


def with_fused_qkv(
    attention: BurstAttention, query_heads: int, at_once: bool = False
) -> BurstAttention:
    """Attention whose projections are views of the fused matrix, inside a ``shard_map``.

    Args:
      attention: its query kernel is the fused matrix.
      query_heads: number of query heads of this device.
      at_once: whether the mean squares of queries and keys are one reduction, for a step of few
        tokens: XLA launches a kernel for each, and more for what comes after. And whether the
        output gate is a slice of the same product: of a prompt it would keep the whole.
    """
    whole, gate = attention.query.kernel[...], attention.output_gate
    kv_heads = (whole.shape[1] - query_heads * (1 if gate is None else 2)) // 2
    # The norms come after the biases, and the mean of a joint norm is that of all heads.
    biased = attention.query.bias is not None or attention.key.bias is not None
    joint = isinstance(attention.query_norm, JointRMSNorm)
    fuse_norms = at_once and not biased and not joint
    norms: Any = {}
    if fuse_norms:
        norms = {"query": attention.query_norm, "key": attention.key_norm}
    projections, first = {}, 0
    for name, heads in zip(NAMES, (query_heads, kv_heads, kv_heads, query_heads), strict=True):
        if (linear := getattr(attention, name)) is None:
            continue
        alone = name == "output_gate" and not at_once
        projections[name] = _Heads(linear, whole, first, heads, norms.get(name), alone)
        first += heads
    return attention.with_projections(**projections, normalized=fuse_norms)


class _Heads(nnx.Module):
    """A projection that slices its heads from the product with the fused matrix, and a norm.

    Each of them computes that product, and mean squares of all heads; XLA deduplicates them.
    """

    def __init__(
        self,
        linear: nnx.LinearGeneral,
        whole: jax.Array,
        first: int,
        heads: int,
        norm: RMSNorm | None,
        alone: bool,
    ) -> None:
        self.whole, self.first, self.heads = nnx.Param(whole), first, heads
        self.norm = nnx.data(norm)
        self.kernel, self.bias = nnx.Param(whole[:, first : first + heads]), linear.bias
        self.out_features, self.dtype = linear.out_features, linear.dtype
        # Whether it is a product with its own heads.
        self.alone = alone

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, heads, H]``; without the bias."""
        if self.alone:
            return jnp.einsum("btd,dnh->btnh", x.astype(self.dtype), self.kernel[...])
        product = jnp.einsum("btd,dnh->btnh", x.astype(self.dtype), self.whole[...])
        own = slice(self.first, self.first + self.heads)
        if self.norm is None:
            return product[:, :, own]
        return self.norm.with_mean(
            product[:, :, own], mean_square(product, self.norm.epsilon)[:, :, own]
        )
