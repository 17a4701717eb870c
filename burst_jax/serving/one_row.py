"""The output projection of a decoding step with one token.

XLA computes a product of one row with less than 10 million weights as a multiplication, whose
result is as large as the weights, and a sum: three times the bytes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from burst_jax.layers.gated_delta_net import GatedDeltaNet
from burst_jax.layers.nnx_layer import BurstAttention
from pallas_kernels.grouped import few_rows_product, supports_few_rows
from pallas_kernels.grouped_products import Slots

# XLA keeps the products of larger matrices.
_LARGE = 10_000_000


def with_one_row_output[Layer: (BurstAttention, GatedDeltaNet)](mixer: Layer) -> Layer:
    """A layer with another output projection, if its kernel is better for one token."""
    kernel = mixer.out.kernel[...]
    matrix = kernel.reshape(1, -1, kernel.shape[-1])
    if kernel.size < _LARGE and supports_few_rows(1, matrix):
        return mixer.with_projections(out=_Outputs(mixer.out))
    return mixer


class _Outputs(nnx.Module):
    """The projection by a kernel that reads the weights once."""

    def __init__(self, linear: nnx.LinearGeneral) -> None:
        self.kernel, self.bias = linear.kernel, linear.bias
        self.out_features, self.dtype = linear.out_features, linear.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[1, 1, N, H]`` to ``[1, 1, D]``; without the bias."""
        matrix = self.kernel[...].reshape(1, math.prod(x.shape[2:]), -1)
        row = x.astype(self.dtype).reshape(1, 1, -1)
        slots = Slots(jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32))
        out = few_rows_product(row, (matrix,), slots, summed=True)[0].sum(0)
        return out[None].astype(self.dtype)
