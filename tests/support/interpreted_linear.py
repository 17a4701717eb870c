"""What functions of ``pallas_kernels.linear`` compute that exist on a GPU alone."""

from __future__ import annotations

import jax.numpy as jnp


def invert(a, x):
    """Instead of :func:`inverse.invert`, with its roundings: float16 operands, float32 sums."""
    given = a[...].astype(jnp.float32)
    size = given.shape[0]
    row = jnp.arange(size, dtype=jnp.int32)[:, None]
    apart = row ^ row.T
    found = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -given, 0.0))
    blocks = 2
    while blocks < size:
        own = jnp.where(row // blocks == row.T // blocks, found, 0.0)
        product = _rounded(_rounded(own) @ _rounded(given)) @ _rounded(own)
        pairs = (apart >= blocks) & (apart < 2 * blocks) & (row > row.T)
        found, blocks = jnp.where(pairs, found - product, found), 2 * blocks
    x[...] = found.astype(jnp.float16)


def _rounded(x):
    return x.astype(jnp.float16).astype(jnp.float32)
