"""``burst_attention`` of arrays as Flax's layers have them, with any batch dimensions."""

from __future__ import annotations

import math

import jax

from burst_jax.attention.api import burst_attention
from burst_jax.attention.arguments import AttentionOptions
from burst_jax.parallel.mesh import axes_size, resolve_mesh, sequence_axes


def attend_any_shape(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """``burst_attention`` with any number of batch dimensions.

    Args:
      query: ``[*batch, T, N, H]``.
      key: ``[*batch, S, K, H]``.
      value: ``[*batch, S, K, Hv]``.
      options: keyword arguments of :func:`burst_jax.burst_attention`.

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
    pad = options.get("pad", False)
    if undivided and not pad and options.get("layout", "contiguous") == "contiguous":
        raise ValueError(
            f"{' and '.join(undivided)}: a length must be a multiple of {shards}, the mesh's "
            "devices on the sequence; make the attention_fn with pad=True, or pad outside of the "
            "layer, with pad_to_layout"
        )
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
