"""Local attention in plain JAX, tile by tile: any platform, memory linear in the length.

Query tiles one after the other; for each, the key tiles inside its bounds. The matmuls take the
inputs' dtype and accumulate in float32, as the GPU kernels do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import Pair, half_shape, halves, pad_axis, vary, varying_axes
from pallas_kernels.bounds import over_batch
from pallas_kernels.merge import merge
from pallas_kernels.scores import allowed, both, products_gradient, scaled_logits
from pallas_kernels.spec import AttentionSpec, Tiles, Tokens

# Empirical, on CPU: large enough that the matmuls dominate, small enough that a causal diagonal
# wastes little. Even tiles instead of a ragged last one keep the padding below one row per tile.
_BLOCK_Q, _BLOCK_KV = 256, 512


def tiles(q_length: int, kv_length: int) -> Tiles:
    """Tiles for the given lengths: at most 256 x 512, all of one size but for a few tokens."""

    def even(length, most):
        count = -(-length // most)
        return -(-length // count)

    return Tiles(even(q_length, _BLOCK_Q), even(kv_length, _BLOCK_KV))


def forward(
    q: jax.Array,
    kv: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    carry: tuple[jax.Array, jax.Array] | None = None,
    *,
    spec: AttentionSpec,
    tiles: Tiles,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Forward`."""
    keys = _KeyTiles(spec, kv, kv_tokens, tiles)
    groups = q.shape[2] // keys.k.shape[1]
    rows = {"q": _split_rows(q, groups, tiles.block_q), **_split_tokens(q_tokens, tiles.block_q)}
    rows["bounds"] = over_batch(bounds)
    if carry is not None:
        rows["o"] = _split_rows(carry[0], groups, tiles.block_q)
        rows["lse"] = _split_stats(carry[1], groups, tiles.block_q)
    axes = varying_axes(q, kv, q_tokens, kv_tokens, bounds, carry)

    def query_tile(row):
        def key_tile(j, state):
            # Invariant: acc and total are sums over the tiles before j of exp(logits - m).
            acc, total, m = state
            k, v = keys.slice(j)
            logits = keys.logits(row, k, j)
            m_next = jnp.maximum(m, logits.max(-1))
            shift = jnp.where(m_next == -jnp.inf, 0, m_next)  # -inf: nothing allowed so far
            p = jnp.exp(logits - shift[..., None])
            shrink = jnp.exp(m - shift)
            total = total * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + _matmul("bkgqs,bksh->bkgqh", p.astype(v.dtype), v)
            return acc, total, m_next

        shape = row["q"].shape
        start = (
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape[:-1], jnp.float32),
            jnp.full(shape[:-1], -jnp.inf, jnp.float32),
        )
        first, end = row["bounds"][0], row["bounds"][3]
        acc, total, m = lax.fori_loop(first, end, key_tile, vary(start, axes))
        empty = total == 0
        total = jnp.where(empty, 1, total)
        o = acc / total[..., None]
        lse = jnp.where(empty, -jnp.inf, m + jnp.log(total))
        if carry is not None:
            o, lse = merge(row["o"], row["lse"], o, lse)
        return o if out_dtype is None else o.astype(out_dtype), lse

    o, lse = lax.map(query_tile, vary(rows, axes))
    return _join_rows(o, q.shape), _join_stats(lse, q.shape)


def backward(
    qdo: Pair,
    kv: Pair,
    stats: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Implementation`.

    One pass, five matmuls a tile: dQ is finished per query tile, dK and dV grow in place.
    """
    keys = _KeyTiles(spec, kv, kv_tokens, tiles)
    (q, do), (lse, delta) = halves(qdo), halves(stats)
    groups = q.shape[2] // keys.k.shape[1]
    rows = {
        "q": _split_rows(q, groups, tiles.block_q),
        "do": _split_rows(do, groups, tiles.block_q),
        "lse": _split_stats(lse, groups, tiles.block_q),
        "delta": _split_stats(delta, groups, tiles.block_q),
        **_split_tokens(q_tokens, tiles.block_q),
        "bounds": over_batch(bounds),
    }
    axes = varying_axes(qdo, kv, stats, q_tokens, kv_tokens, bounds, dq, dkv)

    def query_tile(dkv_sum, row):
        lse = jnp.where(row["lse"] == -jnp.inf, 0, row["lse"])[..., None]

        def key_tile(j, state):
            dq, (dk, dv) = state
            k, v = keys.slice(j)
            logits = keys.logits(row, k, j)
            p = jnp.exp(logits - lse)
            dp = _matmul("bkgqh,bksh->bkgqs", row["do"], v)
            ds = products_gradient(spec, logits, p * (dp - row["delta"][..., None]))
            # Where nothing is allowed logits are -inf, and the soft cap's slope is not a number.
            ds = jnp.where(logits == -jnp.inf, 0, ds).astype(k.dtype)
            dq += _matmul("bkgqs,bksh->bkgqh", ds, k)
            new_dk = _matmul("bkgqs,bkgqh->bksh", ds, row["q"])
            new_dv = _matmul("bkgqs,bkgqh->bksh", p.astype(v.dtype), row["do"])
            return dq, (keys.add(dk, new_dk, j), keys.add(dv, new_dv, j))

        zero = vary(jnp.zeros(row["q"].shape, jnp.float32), axes)
        first, end = row["bounds"][0], row["bounds"][3]
        tile_dq, dkv_sum = lax.fori_loop(first, end, key_tile, (zero, dkv_sum))
        return dkv_sum, tile_dq * spec.scale

    zeros = vary(jnp.zeros(keys.k.shape, jnp.float32), axes)
    (dk, dv), new_dq = lax.scan(query_tile, (zeros, zeros), vary(rows, axes))
    new_dq = _join_rows(new_dq, q.shape)
    new_dkv = jnp.stack([keys.join(dk * spec.scale), keys.join(dv)])
    return new_dq if dq is None else dq + new_dq, new_dkv if dkv is None else dkv + new_dkv


class _KeyTiles:
    """K and V, heads before tokens, cut into tiles on demand."""

    def __init__(self, spec: AttentionSpec, kv: Pair, kv_tokens: Tokens, tiles: Tiles):
        self.spec, self.block = spec, tiles.block_kv
        self.length = half_shape(kv)[1]
        self.padded = -(-self.length // self.block) * self.block
        self.k, self.v = (pad_axis(x.swapaxes(1, 2), 2, self.padded) for x in halves(kv))
        self.positions = pad_axis(kv_tokens.positions, 0, self.padded)
        seg = kv_tokens.segment_ids
        self.segment_ids = None if seg is None else pad_axis(seg, 1, self.padded)

    def _at(self, x: jax.Array, j: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self.block, self.block, axis)

    def slice(self, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile j of K and of V, ``[B, K, block, H]``."""
        return self._at(self.k, j, 2), self._at(self.v, j, 2)

    def add(self, total: jax.Array, tile: jax.Array, j: jax.Array) -> jax.Array:
        """Adds ``tile`` to tile j of ``total``, ``[B, K, padded, H]``."""
        tile += self._at(total, j, 2)
        return lax.dynamic_update_slice_in_dim(total, tile, j * self.block, 2)

    def join(self, x: jax.Array) -> jax.Array:
        """Back to ``[B, S, K, H]``."""
        return x[:, :, : self.length].swapaxes(1, 2)

    def logits(self, row: dict[str, jax.Array], k: jax.Array, j: jax.Array) -> jax.Array:
        """Scores of a query tile against key tile j, -inf where masked: ``[B, K, G, q, s]``."""
        logits = scaled_logits(self.spec, _matmul("bkgqh,bksh->bkgqs", row["q"], k))
        seg = self.segment_ids
        mask = allowed(
            self.spec,
            row["positions"][:, None],
            self._at(self.positions, j, 0)[None, :],
            None if seg is None else row["segment_ids"][:, None, None, :, None],
            None if seg is None else self._at(seg, j, 1)[:, None, None, None, :],
        )
        if self.padded != self.length:
            inside = j * self.block + jnp.arange(self.block, dtype=jnp.int32) < self.length
            mask = inside if mask is None else both(mask, inside)
        return logits if mask is None else jnp.where(mask, logits, -jnp.inf)


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # HIGHEST: float32 stays float32 where the hardware would take TF32; nothing changes for bf16.
    return jnp.einsum(
        subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _split_rows(x: jax.Array, groups: int, block: int) -> jax.Array:
    """``[B, T, N, H]`` to query tiles ``[tiles, B, K, G, block, H]``."""
    batch, length, heads, dim = x.shape
    count = -(-length // block)
    x = pad_axis(x, 1, count * block).reshape(batch, count, block, heads // groups, groups, dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _join_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count, batch, kv_heads, groups, block, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, kv_heads * groups, dim)
    return x[:, : shape[1]]


def _split_stats(x: jax.Array, groups: int, block: int) -> jax.Array:
    """``[B, N, T]`` to query tiles ``[tiles, B, K, G, block]``."""
    batch, heads, length = x.shape
    count = -(-length // block)
    x = pad_axis(x, 2, count * block).reshape(batch, heads // groups, groups, count, block)
    return jnp.moveaxis(x, 3, 0)


def _join_stats(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(shape[0], shape[2], -1)[:, :, : shape[1]]


def _split_tokens(tokens: Tokens, block: int) -> dict[str, jax.Array]:
    """Positions ``[tiles, block]`` and, if there are any, segment ids ``[tiles, B, block]``."""
    count = -(-tokens.positions.shape[0] // block)
    rows = {"positions": pad_axis(tokens.positions, 0, count * block).reshape(count, block)}
    if tokens.segment_ids is not None:
        seg = pad_axis(tokens.segment_ids, 1, count * block)
        rows["segment_ids"] = seg.reshape(seg.shape[0], count, block).swapaxes(0, 1)
    return rows
