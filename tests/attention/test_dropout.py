"""Dropout: which weights are dropped, and when layers drop them.

test_functions.py has dropout on a ring, test_errors.py its mistakes.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import mesh_of

import burst_jax
from burst_jax import LinenBurstAttention
from pallas_kernels.dropout import Dropout, column_hashes, row_hashes


def kept(rate, seeds, length):
    """Which weights of rows of this length are kept, ``[seeds, length, length]``."""
    positions = jnp.arange(length, dtype=jnp.int32)
    rows = row_hashes(seeds[:, None], positions[None])[..., None]
    return np.asarray(Dropout(rate).kept(rows, column_hashes(positions)))


@pytest.mark.parametrize("rate", [0.02, 0.9])
def test_weights_are_dropped_as_if_independently(rate):
    """Each sum below is normal around 0 with deviation 1 if all weights are independent."""
    seeds = jax.random.bits(jax.random.key(1), (4,), jnp.uint32).view(jnp.int32)
    z = (kept(rate, seeds, 512) - (1 - rate)) / np.sqrt(rate * (1 - rate))
    products = {"mean": z, "heads": z[1:] * z[:-1]}
    for lag in (1, 2, 8, 64):
        products[f"keys {lag} apart"] = z[:, :, lag:] * z[:, :, :-lag]
        products[f"queries {lag} apart"] = z[:, lag:] * z[:, :-lag]
    products["three keys"] = z[:, :, 2:] * z[:, :, 1:-1] * z[:, :, :-2]
    products["rectangles"] = z[:, 1:, 1:] * z[:, :-1, :-1] * z[:, 1:, :-1] * z[:, :-1, 1:]
    for name, product in products.items():
        assert abs(product.mean()) * np.sqrt(product.size) < 4.5, name
    # Neither rows, nor columns, nor tiles hold more or fewer kept weights than chance would have.
    for counts in (z.sum(2), z.sum(1), z.reshape(4, 16, 32, 16, 32).sum((2, 4))):
        spread = counts.var() / (z.size / counts.size)
        assert abs(spread - 1) < 5 * np.sqrt(2 / counts.size)
    # No structure: the largest singular value is that of random numbers, near 2 sqrt(n).
    assert np.linalg.norm(z[0], 2) < 2.15 * np.sqrt(512)


def test_layers_drop_weights_unless_deterministic():
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)
    sizes = {"num_heads": 2, "rope_theta": None, "mesh": mesh}
    x = jax.random.normal(jax.random.key(0), (1, 16, 8))
    layer = burst_jax.BurstAttention(8, **sizes, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("dropout_rate is 0.5 and rngs is None: call")):
        layer(x)
    dropped = [layer(x, rngs=nnx.Rngs(dropout=1)) for _ in range(2)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    without = burst_jax.BurstAttention(8, **sizes, rngs=nnx.Rngs(0))(x)
    np.testing.assert_array_equal(layer(x, deterministic=True), without)
    assert np.abs(dropped[0] - without).mean() > 0.01
    layer.eval()
    np.testing.assert_array_equal(layer(x), without)
    twin = LinenBurstAttention(**sizes, dropout_rate=0.5)
    params = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    np.testing.assert_array_equal(twin.apply(params, x, deterministic=True), without)
    outs: list[Any] = [
        twin.apply(params, x, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1)
    ]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.abs(outs[2] - outs[0]).mean() > 0.01
