"""Local attention in plain JAX, tile by tile: any platform, memory linear in the length.

Query tiles run one after the other, and each loops over the KV tiles within its bounds. Matmuls
have operands in the inputs' dtype and accumulate in float32, like the GPU kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import softmax
from pallas_kernels.arrays import pad_axis, vary, varying_axes
from pallas_kernels.backend import Dkv, Implementation, supports_all_inputs
from pallas_kernels.bounds import lists_for_all, over_batch, query_bounds, split_backward
from pallas_kernels.dropout import column_hashes
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.inputs import AttentionInputs, Carry, PerHead
from pallas_kernels.logits import in_groups, masked_logits, products
from pallas_kernels.merge import merge
from pallas_kernels.spec import AttentionSpec, Tiles

# Measured on CPU: large enough that the matmuls dominate, small enough that little is computed
# above a causal diagonal.
_BLOCK_Q, _BLOCK_KV = 256, 512


def even_tiles(inputs: AttentionInputs) -> Tiles:
    """Tiles of equal size, at most 256 x 512: fewer padded tokens than there are tiles."""

    def even(length, most):
        count = -(-length // most)
        return -(-length // count)

    return Tiles(even(inputs.q_length, _BLOCK_Q), even(inputs.kv_length, _BLOCK_KV))


# In profiles it has the name of the GPU kernels.
@jax.named_scope("burst_forward")
def forward(
    inputs: AttentionInputs,
    bounds: jax.Array,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    tiles: Tiles | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`.

    ``tiles``: None is :func:`even_tiles`.
    """
    tiles = tiles or even_tiles(inputs)
    keys, groups, q = _KeyTiles(spec, inputs, tiles, bounds), inputs.groups, inputs.query.q
    query_tiles = _query_tiles(inputs, bounds, tiles)
    if carry is not None:
        query_tiles["o"] = _split_queries(carry[0], groups, tiles.block_q)
        query_tiles["lse"] = _split_stats(carry[1], groups, tiles.block_q)
    axes = varying_axes(inputs, bounds, carry)
    sink = None
    if carry is None and inputs.shared.sink_logits is not None:
        sink = inputs.shared.sink_logits.reshape(1, -1, groups, 1)

    def query_tile(queries):
        rows = queries["q"].shape[:-1]
        m, total = softmax.start(rows, sink, base="e")
        start = jnp.zeros((*rows, inputs.value_dim), jnp.float32), total, m
        first, end, visit = _kv_loop(queries, functools.partial(_visit_keys, keys, queries))
        acc, total, m = lax.fori_loop(first, end, visit, vary(start, axes))
        divisor, lse = softmax.finish(m, total, base="e")
        o = acc / divisor[..., None]
        if carry is not None:
            o, lse = merge(queries["o"].astype(o.dtype), queries["lse"], o, lse)
        return o if out_dtype is None else o.astype(out_dtype), lse

    o, lse = lax.map(query_tile, vary(query_tiles, axes))
    return _join_queries(o, q.shape), _join_stats(lse, q.shape)


@jax.named_scope("burst_backward")
def backward(
    inputs: AttentionInputs,
    bounds: jax.Array,
    dq: jax.Array | None = None,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, Dkv, PerHead]:
    """See :class:`pallas_kernels.backend.BackwardFunction`.

    ``tiles``: None is :func:`even_tiles`. One pass with five matmuls per tile: dQ is complete after
    each query tile, dK and dV are accumulated in place. All are float32, for any ``out_dtype``.
    """
    del out_dtype
    tiles = tiles or even_tiles(inputs)
    keys, groups, q = _KeyTiles(spec, inputs, tiles, bounds), inputs.groups, inputs.query.q
    do, (lse, delta) = inputs.cotangents()
    query_tiles = _query_tiles(inputs, bounds, tiles) | {
        "do": _split_queries(do, groups, tiles.block_q),
        # Makes the weights past the last query 0. With a bias they could overflow.
        "lse": _split_stats(lse, groups, tiles.block_q, beyond=jnp.inf),
        "delta": _split_stats(delta, groups, tiles.block_q),
    }
    axes = varying_axes(inputs, bounds, dq, dkv)

    def query_tile(dkv_sum, queries):
        queries["lse"] = jnp.where(queries["lse"] == -jnp.inf, 0, queries["lse"])
        zero = vary(jnp.zeros(queries["q"].shape, jnp.float32), axes)
        per_head_sums = dict.fromkeys(spec.score.differentiated, zero[..., 0])
        first, end, visit = _kv_loop(queries, functools.partial(_add_gradients, keys, queries))
        start = zero, dkv_sum, per_head_sums
        tile_dq, dkv_sum, per_head_sums = lax.fori_loop(first, end, visit, start)
        return dkv_sum, (tile_dq * spec.score.scale, per_head_sums)

    # With equal head dims, dK and dV start from the same zeros.
    shapes = keys.k.shape, keys.v.shape
    zeros = {shape: vary(jnp.zeros(shape, jnp.float32), axes) for shape in dict.fromkeys(shapes)}
    start = _mapped_like(bounds, tuple(zeros[shape] for shape in shapes))
    (dk, dv), (new_dq, per_head_sums) = lax.scan(query_tile, start, vary(query_tiles, axes))
    new_dq = _join_queries(new_dq, q.shape)
    dk, dv = keys.join(dk * spec.score.scale), keys.join(dv)
    if dkv is not None:
        dk, dv = dkv[0] + dk, dkv[1] + dv
    # The sums are [tiles, B, K, G, block].
    per_head = {name: x.sum((0, 1, 4)).reshape(-1) for name, x in per_head_sums.items()}
    return new_dq if dq is None else dq + new_dq, (dk, dv), per_head


def _kv_loop(
    queries: dict[str, jax.Array], visit: Callable[[jax.Array, Any], Any]
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array, Any], Any]]:
    """``(first, end, body)`` of a loop that calls ``visit(j, state)`` for each KV tile to visit."""
    if "tile_list" not in queries:
        return queries["bounds"][0], queries["bounds"][1], visit
    listed = queries["tile_list"]

    def visit_listed(t: jax.Array, state: Any) -> Any:
        return visit(listed[2 + t], state)

    return jnp.int32(0), listed[1], visit_listed


def _visit_keys(keys: _KeyTiles, queries: dict[str, jax.Array], j: jax.Array, state: Any) -> Any:
    """Adds KV tile j to a query tile's online softmax.

    Invariant: ``state`` is ``(acc, total, m)``. m is the largest logit so far, of the sink and of
    the tiles before j; total is the sum of exp(logit - m) over these logits, acc that of
    exp(logit - m) v.
    """
    acc, total, m = state
    k, v = keys.slice(j)
    logits = keys.logits(queries, keys.raw(queries, k), j)
    m_next = jnp.maximum(m, logits.max(-1))
    p = jnp.exp(logits - m_next[..., None])
    shrink = jnp.exp(m - m_next)
    total = total * shrink + p.sum(-1)
    kept = keys.dropped(queries, p, j).astype(v.dtype)
    acc = acc * shrink[..., None] + products("bkgqs,bksh->bkgqh", kept, v)
    return acc, total, m_next


def _add_gradients(keys: _KeyTiles, queries: dict[str, jax.Array], j: jax.Array, state: Any) -> Any:
    """Adds the gradients of a query tile and KV tile j to ``state``.

    ``state`` is ``(dq, (dk, dv), per_head_sums)``; the last one has a value per query.
    """
    dq, (dk, dv), per_head_sums = state
    score, (k, v) = keys.spec.score, keys.slice(j)
    raw = keys.raw(queries, k)
    p = jnp.exp(keys.logits(queries, raw, j) - queries["lse"][..., None])
    dp = keys.dropped(queries, products("bkgqh,bksh->bkgqs", queries["do"], v), j)
    ds = p * (dp - queries["delta"][..., None])
    parts = score.per_head_gradients(ds, *keys.positions_of(queries, j))
    per_head_sums = {name: per_head_sums[name] + x.sum(-1) for name, x in parts.items()}
    ds = score.to_products(raw, p, ds, keys.coordinates(queries, j)).astype(k.dtype)
    dq += products("bkgqs,bksh->bkgqh", ds, k)
    new_dk = products("bkgqs,bkgqh->bksh", ds, queries["q"])
    kept = keys.dropped(queries, p, j).astype(v.dtype)
    new_dv = products("bkgqs,bkgqh->bksh", kept, queries["do"])
    return dq, (keys.add(dk, new_dk, j), keys.add(dv, new_dv, j)), per_head_sums


class _KeyTiles:
    """K and V, heads before tokens, sliced into tiles."""

    def __init__(
        self, spec: AttentionSpec, inputs: AttentionInputs, tiles: Tiles, bounds: jax.Array
    ):
        self.spec, self.block = spec, tiles.block_kv
        self.length = inputs.kv_length
        self.padded = -(-self.length // self.block) * self.block
        k, v = (pad_axis(x.swapaxes(1, 2), 2, self.padded) for x in (inputs.kv.k, inputs.kv.v))
        positions, ids = pad_axis(inputs.kv_positions, 0, self.padded), inputs.kv.segment_ids
        ids = None if ids is None else pad_axis(ids, 1, self.padded)
        read = _mapped_like(bounds, (k, v, positions, ids))
        self.k, self.v, self.positions, self.segment_ids = read
        self.block_mask, self.groups = inputs.shared.block_mask, inputs.groups
        self._coordinates = inputs.coordinates
        self.per_head = {
            name: in_groups(x, inputs.groups) for name, x in inputs.shared.score_parameters.items()
        }

    def _tile(self, x: jax.Array, j: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self.block, self.block, axis)

    def slice(self, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile j of K ``[B, K, block, H]`` and of V ``[B, K, block, Hv]``."""
        return self._tile(self.k, j, 2), self._tile(self.v, j, 2)

    def add(self, total: jax.Array, tile: jax.Array, j: jax.Array) -> jax.Array:
        """Adds ``tile`` to tile j of ``total``, a gradient of K or V."""
        tile += self._tile(total, j, 2)
        return lax.dynamic_update_slice_in_dim(total, tile, j * self.block, 2)

    def join(self, x: jax.Array) -> jax.Array:
        """Back to the shape of K or of V: tokens before heads, without padding."""
        return x[:, :, : self.length].swapaxes(1, 2)

    def raw(self, queries: dict[str, jax.Array], k: jax.Array) -> jax.Array:
        """Raw scores of a query tile and a KV tile, ``[B, K, G, q, s]``."""
        return self.spec.score.raw(products("bkgqh,bksh->bkgqs", queries["q"], k))

    def positions_of(
        self, queries: dict[str, jax.Array], j: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Positions of the queries and of KV tile j, shaped to broadcast against their scores."""
        kv_positions = self._tile(self.positions, j, 0)
        return (
            queries["positions"][None, None, None, :, None],
            kv_positions[None, None, None, None, :],
        )

    def coordinates(self, queries: dict[str, jax.Array], j: jax.Array) -> ScoreCoordinates | None:
        """Coordinates of the scores of a query tile and KV tile j; None without user functions."""
        return self._coordinates(*self.positions_of(queries, j))

    def dropped(self, queries: dict[str, jax.Array], x: jax.Array, j: jax.Array) -> jax.Array:
        """Dropout of ``x``, which has a value per score of a tile."""
        dropout = self.spec.dropout
        if dropout is None:
            return x
        columns = column_hashes(self._tile(self.positions, j, 0))
        kept = dropout.kept(queries["dropout_rows"][..., None], columns[None, None, None, None, :])
        return jnp.where(kept, x * dropout.unit, 0)

    def logits(self, queries: dict[str, jax.Array], raw: jax.Array, j: jax.Array) -> jax.Array:
        """Logits of a query tile and KV tile j, -inf where masked."""
        further, blocks, ids = [], self.block_mask, self.segment_ids
        if blocks is not None:
            at = queries["positions"], self._tile(self.positions, j, 0)
            further.append(blocks.allowed(*at, self.groups))
        if self.padded != self.length:
            further.append(j * self.block + jnp.arange(self.block, dtype=jnp.int32) < self.length)
        own_ids = None, None
        if ids is not None:
            of_keys = self._tile(ids, j, 1)[:, None, None, None, :]
            own_ids = queries["segment_ids"][:, None, None, :, None], of_keys
        return masked_logits(
            self.spec,
            raw,
            *self.positions_of(queries, j),
            per_head=self.per_head,
            segment_ids=own_ids,
            kv_bounds={
                name: queries[name][:, None, None, :, None]
                for name in ("kv_starts", "kv_ends")
                if name in queries
            },
            coordinates=self.coordinates(queries, j),
            further=further,
        )


def _mapped_like[Arrays](bounds: jax.Array, arrays: Arrays) -> Arrays:
    """Arrays, mapped by each ``jax.vmap`` that maps the bounds, by which they will be indexed.

    With Explicit axes JAX does not know how to shard what examples share, at an index of each.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return arrays
    # XLA removes a choice between an array and itself.
    either = bounds.sum(dtype=jnp.int32) == 0
    return jax.tree.map(lambda x: jnp.where(either, x, x), arrays)


def _split_queries(x: jax.Array, groups: int, block: int) -> jax.Array:
    """``[B, T, N, H]`` to query tiles ``[tiles, B, K, G, block, H]``."""
    batch, length, heads, dim = x.shape
    count = -(-length // block)
    x = pad_axis(x, 1, count * block).reshape(batch, count, block, heads // groups, groups, dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _join_queries(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count, batch, kv_heads, groups, block, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, kv_heads * groups, dim)
    return x[:, : shape[1]]


def _split_stats(x: jax.Array, groups: int, block: int, beyond: float = 0) -> jax.Array:
    """``[B, N, T]`` to query tiles ``[tiles, B, K, G, block]``; ``beyond`` pads past T."""
    batch, heads, length = x.shape
    count = -(-length // block)
    x = pad_axis(x, 2, count * block, beyond).reshape(batch, heads // groups, groups, count, block)
    return jnp.moveaxis(x, 3, 0)


def _join_stats(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(shape[0], shape[2], -1)[:, :, : shape[1]]


def _query_tiles(inputs: AttentionInputs, bounds: jax.Array, tiles: Tiles) -> dict[str, jax.Array]:
    """Inputs of each query tile, stacked along a new first axis."""
    query, block = inputs.query, tiles.block_q
    count = -(-inputs.q_length // block)
    positions = pad_axis(inputs.q_positions, 0, count * block).reshape(count, block)
    stacked = {
        "q": _split_queries(inputs.query.q, inputs.groups, block),
        "positions": positions,
    }
    if inputs.shared.block_mask is None:
        stacked["bounds"] = over_batch(bounds)
    else:
        stacked["tile_list"] = bounds[0, 0]
    if inputs.shared.dropout_seeds is not None:
        stacked["dropout_rows"] = _split_stats(inputs.dropout_rows, inputs.groups, block)
    by_row = query.kv_bounds
    if query.segment_ids is not None:
        by_row["segment_ids"] = query.segment_ids
    for name, x in by_row.items():
        x = pad_axis(x, 1, count * block)
        stacked[name] = x.reshape(x.shape[0], count, block).swapaxes(0, 1)
    return stacked


def _bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, tiles: Tiles | None = None
) -> jax.Array:
    sides, blocks = (inputs.query, inputs.kv), inputs.shared.block_mask
    tiles = tiles or even_tiles(inputs)
    if blocks is not None:
        return lists_for_all(spec.mask, *sides, tiles, blocks)
    return query_bounds(spec.mask, *sides, tiles)


def in_tiles(tiles: Tiles | None = None) -> Implementation:
    """Plain JAX, on any platform.

    Args:
      tiles: None is :func:`even_tiles`.
    """
    return Implementation(
        name="xla",
        forward=functools.partial(forward, tiles=tiles),
        backward=functools.partial(backward, tiles=tiles),
        forward_bounds=functools.partial(_bounds, tiles=tiles),
        backward_bounds=functools.partial(_bounds, tiles=tiles),
        split_backward=split_backward,
        unsupported=supports_all_inputs,
        second_derivatives="forward",
    )


XLA = in_tiles()
