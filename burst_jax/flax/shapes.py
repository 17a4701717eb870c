"""``burst_attention`` of arrays as Flax's layers have them: any batch dimensions, any lengths."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax.api import burst_attention
from burst_jax.attention_options import RANGE_ARRAYS, AttentionOptions
from burst_jax.checks import check_arrays, check_segment_ids
from burst_jax.key_ranges import check_key_ranges
from burst_jax.sharding import axes_size, flat_names, place_explicit, resolve_mesh, sequence_axes
from burst_jax.token_positions import check_positions


def attend_any_shape(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions, *, pad: bool
) -> jax.Array:
    """``burst_attention`` with any number of batch dimensions, and of any lengths with ``pad``.

    Args:
      query: ``[*batch, T, N, H]``.
      key: ``[*batch, S, K, H]``.
      value: ``[*batch, S, K, Hv]``.
      options: keyword arguments of :func:`burst_jax.burst_attention`.
      pad: whether lengths that the mesh does not divide are padded instead of refused.

    Returns:
      ``[*batch, T, N, Hv]``.

    Raises:
      ValueError: arrays of other shapes; without ``pad``, lengths that the mesh does not divide.
    """
    _check_batch(query=query, key=key, value=value)
    batch = query.shape[:-3]
    query, key, value = (_one_batch_dim(x) for x in (query, key, value))
    shards = _count_shards(options)
    undivided = [
        f"{name} is {length}"
        for name, length in (("T", query.shape[1]), ("S", key.shape[1]))
        if length % shards
    ]
    if undivided and not pad and options.get("layout", "contiguous") == "contiguous":
        raise ValueError(
            f"{' and '.join(undivided)}: a length must be a multiple of {shards}, the mesh's "
            "devices on the sequence; make the attention_fn with pad=True, or pad outside of the "
            "layer, with pad_to_layout"
        )
    if undivided and pad:
        out = _attend_padded(query, key, value, options, shards)
    else:
        out = burst_attention(query, key, value, **options)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _check_batch(**arrays: jax.Array) -> None:
    """Raises unless all arrays have the batch dimensions of the first, the query."""
    query = arrays["query"]
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}: it needs [*batch, length, heads, dim]")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} has batch dimensions {x.shape[:-3]}, query {query.shape[:-3]}: they must "
                "be equal"
            )


def _one_batch_dim(x: jax.Array) -> jax.Array:
    """``[*batch, length, heads, dim]`` to ``[B, length, heads, dim]``, B the product of batch."""
    return x if x.ndim == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _count_shards(options: AttentionOptions) -> int:
    """Number of devices that the sequence is split over.

    It is 1 where the options name no mesh or axes of another one: ``burst_attention``, called next,
    says what is wrong.
    """
    try:
        mesh = resolve_mesh(options.get("mesh"))
        return axes_size(mesh, *sequence_axes(options))
    except (ValueError, TypeError, KeyError):
        return 1


def _attend_padded(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions, shards: int
) -> jax.Array:
    """``burst_attention`` of lengths that are no multiples of ``shards``.

    Zeros fill each length up to the next multiple. They lie in segment 0, so no token attends to
    them, and the result is cut to T.
    """
    check_arrays(query, key, value)
    if options.get("block_mask") is not None:
        raise ValueError(
            f"block_mask is given, and lengths {query.shape[1]} and {key.shape[1]} are padded to "
            f"multiples of {shards}: its blocks would have another size then; pad outside of the "
            "layer, with pad_to_layout, and make the table for the padded lengths"
        )
    length, sharding = query.shape[1], jax.typeof(query).sharding
    query_ids, kv_ids = options.get("query_segment_ids"), options.get("key_value_segment_ids")
    check_segment_ids(query, key, query_ids, kv_ids)
    check_key_ranges(query, True, None, {name: options.get(name) for name in RANGE_ARRAYS})
    mesh = resolve_mesh(options.get("mesh"))
    batch, tokens = options.get("batch_axis"), sequence_axes(options)

    def padded(x: jax.Array, *rest: Any) -> jax.Array:
        """``x`` ``[B, length, ...]`` padded, and split over the Explicit axes of ``mesh``.

        ``rest`` names the mesh axes of the dimensions behind the length.
        """
        widths = [(0, 0), (0, -x.shape[1] % shards), *[(0, 0)] * (x.ndim - 2)]
        return place_explicit(jnp.pad(x, widths), mesh, PartitionSpec(batch, tokens, *rest))

    own = [options.get(name) for name in ("query_positions", "key_value_positions")]
    check_positions(query, key, options.get("query_offset", 0), *own)
    padded_options = options.copy()
    padded_options["query_segment_ids"] = padded(_ids_or_ones(query_ids, query))
    padded_options["key_value_segment_ids"] = padded(_ids_or_ones(kv_ids, key))
    for name in ("key_starts", "key_ends"):
        of_tokens: Any = options.get(name)
        if of_tokens is not None:
            padded_options[name] = padded(jnp.broadcast_to(of_tokens, query.shape[:2]))
    for name in ("query_positions", "key_value_positions"):
        at: Any = options.get(name)
        if at is not None:
            at = jnp.pad(jnp.asarray(at), [(0, 0)] * (at.ndim - 1) + [(0, -at.shape[-1] % shards)])
            spec = PartitionSpec(*(batch, tokens)[-at.ndim :])
            padded_options[name] = place_explicit(at, mesh, spec)
    arrays = (padded(x, options.get("head_axis"), None) for x in (query, key, value))
    out = burst_attention(*arrays, **padded_options)
    if out.shape[1] == length:
        return out
    # The result is split as the query was: over those Explicit axes that divide its length.
    if flat_names(*jax.typeof(out).sharding.spec):
        out = jax.reshard(out, NamedSharding(mesh, sharding.spec))
    return out[:, :length]


def _ids_or_ones(segment_ids: jax.Array | None, x: jax.Array) -> jax.Array:
    """``segment_ids`` ``[B, length]``, or one segment for all tokens of ``x`` if it is None."""
    return jnp.asarray(jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids)
