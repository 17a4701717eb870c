"""Checks of the arrays' shapes against what a call asks for and against its mesh."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import jax

from burst_jax.attention.shardings import AttentionShardings
from burst_jax.layouts.permutation import check_length, shard_unit
from burst_jax.parallel.mesh import axes_size
from burst_jax.ring.request import Request
from burst_jax.ring.ulysses import check_heads


def check_global_shapes(
    request: Request, shardings: AttentionShardings, query: jax.Array, key: jax.Array
) -> None:
    """Checks whether global arrays can be split as they are to be.

    Raises:
      ValueError: a length, the batch size or a number of heads cannot be divided.
      NotImplementedError: the batch size is symbolic and several devices share a row.
    """
    _check_static_batch(request, query)
    axes = request.ring_axes
    seq_axis = axes[0] if len(axes) == 1 else axes or None
    check_lengths(
        request,
        {"the query's length T": query.shape[1], "the key's length S": key.shape[1]},
        f", the devices on seq_axis {seq_axis!r} and ulysses_axis {request.ulysses_axis!r}",
    )
    mesh, batch_axes, tensor_axes = shardings.mesh, shardings.batch_axes, shardings.tensor_axes
    for name, size, axes in (
        ("the batch size B", query.shape[0], batch_axes),
        ("the number of query heads N", query.shape[2], tensor_axes),
        ("the number of key/value heads K", key.shape[2], tensor_axes),
    ):
        shards = axes_size(mesh, axes)
        if size % shards:
            raise ValueError(
                f"{name} is {size}: it must be a multiple of {shards}, the size of mesh axes {axes}"
            )
    split = axes_size(mesh, tensor_axes)
    _check_exchange(request, query.shape[2] // split, key.shape[2] // split)


def check_lengths(request: Request, lengths: Mapping[str, int], devices: str = "") -> None:
    """Raises ValueError unless sequences of these lengths can be split over a request's devices.

    Args:
      request: the layout and the number of devices.
      lengths: tokens of whole sequences, by what messages call them.
      devices: what a message adds about the devices.
    """
    for name, length in lengths.items():
        check_length(request.layout, length, request.ring_size, name=name)
        if length % request.token_devices:
            raise ValueError(
                f"{name} is {length}: it must be a multiple of {request.token_devices}{devices}"
            )


def check_local_shapes(request: Request, query: jax.Array, key: jax.Array) -> None:
    """Checks whether one device's arrays can be its part of what is asked for.

    Raises:
      ValueError: a shard of the ring has a length that the layout cannot have, or heads cannot be
        exchanged.
      NotImplementedError: the batch size is symbolic and several devices share a row.
    """
    unit = shard_unit(request.layout)
    needs = "an even number" if unit == 2 else f"a multiple of {unit}"
    for name, length in (("query", query.shape[1]), ("key", key.shape[1])):
        tokens = length * request.ulysses_size
        if tokens % unit:
            raise ValueError(
                f"{name} holds {tokens} tokens per shard: the {request.layout} layout needs "
                f"{needs}; pad the sequence with pad_to_layout"
            )
    _check_static_batch(request, query)
    _check_exchange(request, query.shape[2], key.shape[2])


def _check_static_batch(request: Request, query: jax.Array) -> None:
    devices = request.token_devices
    if devices > 1 and not isinstance(query.shape[0], numbers.Integral):
        raise NotImplementedError(
            f"query has shape {query.shape}, whose B is symbolic, on a ring of {devices} devices: "
            "JAX crashes where such a program is called; export one program for each batch size, "
            "or for one device"
        )


def _check_exchange(request: Request, heads: int, kv_heads: int) -> None:
    """Checks whether the heads of one device can be dealt out to the devices of the exchange."""
    name = f"ulysses_axis {request.ulysses_axis!r}"
    check_heads(heads, kv_heads, request.ulysses_size, name)
