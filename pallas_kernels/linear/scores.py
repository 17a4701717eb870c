"""Products of a chunk's rows with its keys, weighted by the decays between their tokens.

    scores_ri = sum_c rows_rc exp(G_rc - G_ic) k_ic        i <= r, else 0

G are the log decays from the chunk's start. A decay per head is a factor on the product of a row
and a key. Of a decay per key channel each row and each key has a factor of its own, and exp(-G_i)
may overflow. So a chunk is halved, and halved again: between a row in the later half of a block and
a key in the earlier half both have the decay to or from the boundary, which is at most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.linear.chunks import CHUNK, LogDecays

# ``(spec of an einsum, x, y)``.
Product = Callable[[str, jax.Array, jax.Array], jax.Array]


def scores(
    rows: Sequence[jax.Array], k: jax.Array, logs: LogDecays, product: Product
) -> list[jax.Array]:
    """The scores of several rows, float32 ``[..., N, 64, 64]`` each.

    Args:
      rows: ``[..., K, 64, H]`` each; value head h has those of key head ``h // (N // K)``.
      k: the same.
      logs: ``[..., N, 64, C]``; C is 1 for a decay per head, H for one per key channel.
      product: of matrices.
    """
    heads, channels = logs.coarse.shape[-3::2]
    groups = heads // k.shape[-3]
    if channels == 1:
        products = [product("...rk,...ik->...ri", x, k) for x in rows]
        difference = logs.since(LogDecays(*(x.swapaxes(-1, -2) for x in logs)))
        lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
        decay = jnp.where(lower, jnp.exp(jnp.where(lower, difference, 0)), 0)
        return [decay * jnp.repeat(x, groups, axis=-3) for x in products]
    *rows, k = (jnp.repeat(x.astype(jnp.float32), groups, axis=-3) for x in (*rows, k))
    # Blocks of one token, which has no decay to itself: in the third dimension from the last.
    found, size = [(x * k).sum(-1)[..., None, None] for x in rows], 1
    while size < CHUNK:
        found = _of_two_halves(found, rows, k, logs, size, product)
        size *= 2
    return [x[..., 0, :, :] for x in found]


def _of_two_halves(
    found: list[jax.Array],
    rows: Sequence[jax.Array],
    k: jax.Array,
    logs: LogDecays,
    size: int,
    product: Product,
) -> list[jax.Array]:
    """The scores of blocks of two halves of ``size`` tokens, from those within the halves."""

    def cut(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
        return x[..., 0, :, :], x[..., 1, :, :]

    earlier, later = (LogDecays(*x) for x in zip(*map(cut, logs), strict=True))
    boundary = earlier.at(..., slice(-1, None), slice(None))
    keys = cut(k)[0] * jnp.exp(boundary.since(earlier))
    decay = jnp.exp(later.since(boundary))

    def block(within: jax.Array, x: jax.Array) -> jax.Array:
        first, second = within[..., ::2, :, :], within[..., 1::2, :, :]
        across = product("...rk,...ik->...ri", cut(x)[1] * decay, keys)
        upper = jnp.concatenate([first, jnp.zeros_like(across)], -1)
        return jnp.concatenate([upper, jnp.concatenate([across, second], -1)], -2)

    return [block(within, x) for within, x in zip(found, rows, strict=True)]
