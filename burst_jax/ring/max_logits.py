"""The largest logit of each head, from the log-sum-exp of each query.

A query's largest logit is at most its lse, and the lse of the query with the largest logit of all
is at least that logit. So it is looked for among queries with large lse: the query with the largest
lse in each of R blocks of consecutive tokens. Their logits are computed again, exactly, against all
keys::

    lower = the largest logit of the chosen queries
    upper = max(lower, the largest lse of the other queries)

If ``lower == upper``, it is the largest logit of all queries. The query with the largest lse of all
is among the chosen ones: without sinks ``lower`` is smaller by the logarithm of its number of keys
at most. Large logits make a softmax with one dominant key, whose lse is close to its logit, so for
large logits the bounds agree or are close.

The R queries with the largest lse would make ``upper`` tighter, but a search for them takes XLA
longer than all the rest (a sort, or its TopK kernel; EXPERIMENTS.md). A block's largest is one
reduction.

On a ring every device chooses among its own queries and attends to its own keys with those of all
devices, which one all-gather sends: R rows per head, whatever the length. Nothing rotates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.ring.request import Request
from pallas_kernels import AttentionInputs, vary, varying_axes
from pallas_kernels.logits import in_groups, masked_logits, products

# Queries per sequence and head whose logits are computed again: a block has one.
ROWS = 8
# Logits at a time: 64 MiB.
_LOGITS = 2**24


class MaxLogits(NamedTuple):
    """Bounds of the largest logit of each head, over all queries and the keys that they attend to.

    Attributes:
      lower: float32 ``[N]``, the largest logit that was computed; -inf if there is none.
      upper: float32 ``[N]``, no logit is larger, but for the rounding of lse. Where it equals
        ``lower``, both are the largest logit.
    """

    lower: jax.Array
    upper: jax.Array


class _Rows(NamedTuple):
    """The chosen queries of every sequence and head.

    Attributes:
      q: ``[B, K, G, R, H]``.
      arrays: int32 ``[B, K, G, R, 1]`` by name: positions, segment ids and KV bounds.
      rest: float32 ``[B, N]``, the largest lse of this device's other queries.
    """

    q: jax.Array
    arrays: dict[str, jax.Array]
    rest: jax.Array


def shard_max_logits(
    request: Request, inputs: AttentionInputs, lse: jax.Array, rows: int = ROWS
) -> MaxLogits:
    """The bounds over this device's sequences and heads; inside a ``shard_map`` if there is a ring.

    Args:
      request: the static part of the call of attention.
      inputs: this device's arrays, those of :func:`burst_jax.ring.vjp.attend_shard`.
      lse: its result, float32 ``[B, T, N]``.
      rows: R, or some more: blocks of all devices have the same size.

    Returns:
      The bounds of this device's heads, equal on all devices that share its sequences. They have no
      gradient.
    """
    inputs, lse = lax.stop_gradient((inputs, lse))
    axes = frozenset(request.token_axes)
    inputs, lse = vary((inputs, lse), varying_axes(inputs, lse) | axes)
    chosen = _chosen(request, inputs, lse.swapaxes(1, 2), rows)
    lower = _largest(request, inputs, chosen)
    upper = jnp.maximum(lower, chosen.rest)
    if request.token_axes:
        lower, upper = lax.pmax((lower, upper), request.token_axes)
    return MaxLogits(lower.max(0), upper.max(0))


def _chosen(request: Request, inputs: AttentionInputs, lse: jax.Array, rows: int) -> _Rows:
    """The query with the largest lse, ``[B, N, T]``, of each block, those of all devices."""
    batch, heads, length = lse.shape
    axes, query = request.token_axes, inputs.query
    # Blocks of consecutive tokens of this device; the last one may be shorter.
    size = max(1, length * math.prod(map(lax.axis_size, axes)) // rows)
    count = -(-length // size)
    padded = jnp.pad(lse, ((0, 0), (0, 0), (0, count * size - length)), constant_values=-jnp.inf)
    blocks = padded.reshape(batch, heads, count, size)
    place = lax.argmax(blocks, 3, jnp.int32)
    is_chosen = lax.iota(jnp.int32, size) == place[..., None]
    rest = jnp.where(is_chosen, -jnp.inf, blocks).max((2, 3))
    token = size * lax.iota(jnp.int32, count) + place
    of_batch = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    of_head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]

    def of_token(x: jax.Array) -> jax.Array:
        x = jnp.atleast_2d(x)
        return x[of_batch if x.shape[0] == batch else jnp.zeros_like(of_batch), token]

    positions = query.positions
    arrays = query.token_arrays | {
        "positions": request.positions_here(length) if positions is None else positions
    }
    found: Any = query.q[of_batch, token, of_head], jax.tree.map(of_token, arrays)
    if axes:
        found = lax.all_gather(found, axes, axis=2, tiled=True)
    groups = inputs.groups
    q, arrays = jax.tree.map(
        lambda x: x.reshape(batch, heads // groups, groups, x.shape[2], -1), found
    )
    return _Rows(q, arrays, rest)


def _largest(request: Request, inputs: AttentionInputs, rows: _Rows) -> jax.Array:
    """The largest logit of each sequence and head on this device's keys, float32 ``[B, N]``."""
    kv, blocks, groups = inputs.kv, inputs.shared.block_mask, inputs.groups
    arrays = dict(rows.arrays)
    q_positions, q_ids = arrays.pop("positions"), arrays.pop("segment_ids", None)
    positions = request.positions_here(kv.length) if kv.positions is None else kv.positions
    per_head = {name: in_groups(x, groups) for name, x in inputs.shared.score_parameters.items()}
    length = min(kv.length, max(1, _LOGITS // rows.q[..., 0].size))

    def of_keys(x: jax.Array | None, first: jax.Array) -> jax.Array | None:
        if x is None:
            return None
        part = lax.dynamic_slice_in_dim(jnp.atleast_2d(x), first, length, 1)
        return part[:, None, None, None, :]

    def largest(first: jax.Array) -> jax.Array:
        k = lax.dynamic_slice_in_dim(kv.k, first, length, 1)
        kv_positions = of_keys(positions, first)
        assert kv_positions is not None
        further = []
        if blocks is not None:
            heads = in_groups(jnp.arange(blocks.heads, dtype=jnp.int32), min(groups, blocks.heads))
            further.append(blocks.at(heads, q_positions, kv_positions))
        logits = masked_logits(
            request.spec,
            request.spec.score.raw(products("bkgrh,bskh->bkgrs", rows.q, k)),
            q_positions,
            kv_positions,
            per_head=per_head,
            segment_ids=(q_ids, of_keys(kv.segment_ids, first)),
            kv_bounds=arrays,
            coordinates=inputs.coordinates(q_positions, kv_positions),
            further=further,
        )
        return logits.max((-1, -2))

    # The last keys overlap those before, which does not change a maximum.
    starts = np.minimum(np.arange(0, kv.length, length), kv.length - length).astype(np.int32)
    found = lax.map(largest, vary(jnp.asarray(starts), varying_axes(rows.q)))
    return found.max(0).reshape(found.shape[1], -1)
