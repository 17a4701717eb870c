"""What functions of ``pallas_kernels.linear`` compute that exist on a GPU alone."""

from __future__ import annotations

from typing import Any

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


def products(x, y, acc):
    """Instead of :func:`warp_blocks.products`."""
    x, y = (each.astype(jnp.float32).reshape(4, 16, -1) for each in (x, y))
    return acc + jnp.einsum("brc,bic->bri", x, y).reshape(64, 16)


def sums(*terms):
    """Instead of :func:`warp_blocks.sums`."""
    result = jnp.zeros((64, 64), jnp.float32)
    for weights, values in terms:
        values = values[...].astype(jnp.float32).reshape(4, 16, -1)
        weights = weights.astype(jnp.float32).reshape(4, 16, 16)
        result += jnp.einsum("bri,bic->brc", weights, values).reshape(64, -1)
    return result


def own(x):
    """Instead of :func:`warp_blocks.own`."""
    return jnp.concatenate([x[i : i + 16, i : i + 16] for i in range(0, 64, 16)])


def spread(x):
    """Instead of :func:`warp_blocks.spread`."""
    block = jnp.arange(64, dtype=jnp.int32) // 16
    return jnp.where(block[:, None] == block, jnp.tile(x, (1, 4)), 0)


def with_blocks(own, full, value):
    """Instead of :func:`warp_blocks.with_blocks`."""
    result, block = spread(own.astype(jnp.float32)), jnp.arange(64, dtype=jnp.int32) // 16
    for row, column in full:
        result = jnp.where((block[:, None] == row) & (block == column), value, result)
    return result.astype(own.dtype)


def pairs(x, size, other=None):
    """Instead of :func:`warp_blocks.pairs`."""
    apart = jnp.arange(64, dtype=jnp.int32)[:, None] ^ jnp.arange(64, dtype=jnp.int32)
    return jnp.where((apart >= size) & (apart < 2 * size), x, 0 if other is None else other)


def later_rows(x, first, *, earlier=False):
    """Instead of :func:`warp_blocks.later_rows`."""
    is_later = jnp.arange(64, dtype=jnp.int32)[:, None] >= first
    return jnp.where(is_later != earlier, x, jnp.zeros_like(x))


def store_last_row(target, x):
    """Instead of :func:`warp_blocks.store_last_row`."""
    target[...] = x[-1]


# By name in the module.
WARP_BLOCKS: dict[str, Any] = {
    function.__name__: function
    for function in (
        products, sums, own, spread, with_blocks, pairs, later_rows, store_last_row
    )
}  # fmt: skip


def _rounded(x):
    return x.astype(jnp.float16).astype(jnp.float32)
