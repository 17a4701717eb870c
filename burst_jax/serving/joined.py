"""Query's, key's and value's weights as one matrix.

A step of decoding has one token a row. XLA makes a product of one row with less than 10 million
weights as a multiplication and a sum, in kernels that reach a third of the memory's rate, and keys'
and values' weights are few where heads are grouped. One matrix of all three has enough, so
its product stays one.

On each device of the tensor axes a joined matrix has that device's query heads, then its key heads,
then its value heads::

    [D, N, H], [D, K, H], [D, K, H]   ->   [D, N + 2 K, H]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.models.decoder_layer import DecoderLayer

NAMES = ("query", "key", "value")


def join(kernels: tuple[jax.Array, ...], mesh: Mesh, spec: P) -> tuple[jax.Array, ...]:
    """One layer's kernels, of which the first has all heads and the others none.

    Args:
      kernels: query's, key's and value's, ``[D, heads, H]``.
      mesh: the devices.
      spec: how each of them is split, and how the results are.
    """
    return _joined(mesh, spec)(*kernels)


@functools.cache
def _joined(mesh: Mesh, spec: P) -> Any:
    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.concatenate([query, key, value], 1), key[:, :0], value[:, :0]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3))


def use_joined(layer: DecoderLayer, query_heads: int) -> None:
    """Lets a layer compute with a joined matrix, inside a ``shard_map``.

    Args:
      layer: whose query's kernel is the joined matrix.
      query_heads: of this device.
    """
    attention, first = layer.attention, 0
    whole = attention.query.kernel[...]
    kv_heads = (whole.shape[1] - query_heads) // 2
    for name, heads in zip(NAMES, (query_heads, kv_heads, kv_heads), strict=True):
        setattr(attention, name, _Heads(getattr(attention, name), whole, first, heads))
        first += heads


class _Heads(nnx.Module):
    """A projection that takes its heads from the product with the joined matrix.

    Each of the three asks for that product; XLA makes equal operations once.
    """

    def __init__(self, linear: nnx.LinearGeneral, whole: jax.Array, first: int, heads: int) -> None:
        self.whole, self.first, self.heads = nnx.Param(whole), first, heads
        self.kernel, self.bias = nnx.Param(whole[:, first : first + heads]), linear.bias
        self.out_features, self.dtype = linear.out_features, linear.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, heads, H]``; the bias is left out."""
        product = jnp.einsum("btd,dnh->btnh", x.astype(self.dtype), self.whole[...])
        return product[:, :, self.first : self.first + self.heads]
