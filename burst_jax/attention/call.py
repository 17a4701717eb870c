"""A call of a public attention function, checked: its static request and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.attention.arguments import (
    KEY_POSITION_READERS,
    POSITION_READERS,
    LocalArguments,
    RingArguments,
)
from burst_jax.attention.block_mask import with_block_mask
from burst_jax.attention.document_tables import table_arrays
from burst_jax.attention.score_mod import check_functions
from burst_jax.attention.validation import (
    POSITIONS,
    WINDOW_SIDES,
    check_arrays,
    check_dropout_key,
    check_dropout_rate,
    check_number,
    check_prefix,
    check_query_offset,
    check_readers_of_positions,
    check_ring_axes,
    check_rotation,
    check_scale,
    check_window,
    positions_per_sequence,
    to_int32,
    window_sides,
)
from burst_jax.attention.watch import watch_call
from burst_jax.errors import check_bool, check_integer
from burst_jax.layouts.body_order import check_order
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.request import Request
from pallas_kernels import AttentionSpec, Dropout, find
from pallas_kernels.inputs import GlobalIndices
from pallas_kernels.mask import Mask
from pallas_kernels.score import Score


class Call(NamedTuple):
    """A parsed call: its static request and its arrays.

    Attributes:
      request: everything static.
      arrays: the caller's arrays by the arguments' names, integers as int32; a window's traced
        sides by the names :data:`burst_jax.attention.validation.WINDOW_SIDES`.
      derived: arrays that are derived from the arguments: "dropout_seeds" int32 ``[B, N]``, and for
        user functions "batch_indices" int32 ``[B]`` and "head_indices" int32 ``[N]``.
    """

    request: Request
    arrays: dict[str, Any]
    derived: dict[str, jax.Array]


def parse_call(
    arguments: LocalArguments,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_argument: str = "axis_name",
    axes: AxisNames = None,
    size_of: Callable[[str, str], int],
    local: bool,
    watched: bool = True,
) -> Call:
    """Checks everything about a call that does not depend on how global arrays are sharded.

    Args:
      arguments: the keyword arguments.
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, Hv]``.
      axis_argument: the name of the argument with the ring's axes.
      axes: its value.
      size_of: ``(argument, axis) -> devices along it``; raises for an unknown axis.
      local: whether the arrays are one device's shards of the sequences.
      watched: whether :mod:`burst_jax.verify` sees the call, as one of attention.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: a combination that the kernels do not support.
    """
    if watched:
        watch_call(arguments, query, axes, local)
    arrays = check_arrays(arguments, query, key, value)
    request = make_request(
        arguments,
        axis_argument=axis_argument,
        axes=axes,
        size_of=size_of,
        head_dim=query.shape[3],
        arrays=arrays,
    )
    devices = request.token_devices if local else 1
    lengths = (query.shape[1] * devices, key.shape[1] * devices)
    _check_order(arguments, request, lengths, axis_argument)
    check_prefix(arguments)
    check_readers_of_positions(arguments, arrays)
    dropout_key = check_dropout_key(arguments.dropout_rate, arguments.dropout_key)
    per_sequence = positions_per_sequence(arguments, arrays) is not None
    arrays |= _window_arrays(arguments, per_sequence=per_sequence)
    if isinstance(arguments, RingArguments):
        arrays |= table_arrays(request, arguments.document_tables, query.shape[:2])
    request = with_block_mask(request, query, key, arguments.block_mask, devices)
    if arguments.block_mask is not None:
        arrays["block_mask"] = arguments.block_mask
    derived: dict[str, Any] = {}
    if request.spec.dropout is not None and dropout_key is not None:
        bits = jax.random.bits(dropout_key, (query.shape[0], query.shape[2]), jnp.uint32)
        derived["dropout_seeds"] = lax.bitcast_convert_type(bits, jnp.int32)
    if request.spec.calls_functions:
        names = ("batch_indices", "head_indices")
        derived |= dict(zip(names, GlobalIndices.of(query), strict=True))
    return Call(request, arrays, derived)


def _check_order(
    arguments: LocalArguments, request: Request, lengths: tuple[int, int], axis_argument: str
) -> None:
    """Raises ValueError if tokens of :func:`burst_jax.in_layout` are in another order.

    ``lengths`` are T and S of whole sequences. Explicit positions replace the layout's, and where
    nothing reads positions the order does not matter.
    """
    values = {name: getattr(arguments, name) for name in POSITION_READERS}
    readers = {name for name, x in values.items() if x is not None and x is not False}
    given = (arguments.query_positions, arguments.key_value_positions)
    read = (not readers.issubset(KEY_POSITION_READERS), bool(readers))
    own = [n for n, at, reads in zip(lengths, given, read, strict=True) if reads and at is None]
    check_order(request.layout, request.ring_size, own, axis_argument, request.ring_axes)


def make_request(
    arguments: LocalArguments,
    *,
    axis_argument: str,
    axes: AxisNames,
    size_of: Callable[[str, str], int],
    head_dim: int,
    arrays: dict[str, Any] | None = None,
) -> Request:
    """The static request of a call, whose arguments are those of :func:`parse_call`.

    Args:
      head_dim: H, for the default scale.
      arrays: the call's checked arrays by name; None is no arrays.
    """
    arrays = {} if arrays is None else arrays
    ring = arguments if isinstance(arguments, RingArguments) else RingArguments()
    layout = ring.parsed_layout
    check_rotation(ring.backward)
    ring_axes = check_ring_axes(axis_argument, axes, ring.ulysses_axis)
    ulysses_size = 1
    if ring.ulysses_axis is not None:
        ulysses_size = size_of("ulysses_axis", ring.ulysses_axis)
    spec = make_spec(arguments, head_dim)
    if positions_per_sequence(arguments, arrays) is not None:
        # Per-query KV bounds then include the window and causality.
        spec = dataclasses.replace(spec, mask=Mask(mask_mod=spec.mask.mask_mod))
    chunk_size = arguments.attention_chunk_size
    if isinstance(chunk_size, jax.Array):
        raise ValueError(
            f"attention_chunk_size is {chunk_size!r}, a JAX array: it must be a Python integer, "
            "known while the call is traced; pass it as a static argument of jax.jit"
        )
    if chunk_size is not None:
        # At most 2^30, so that the end of every chunk fits int32: positions are below 2^30.
        chunk_size = min(check_integer("attention_chunk_size", chunk_size, 1), 2**30)
    # The values of position arrays are unknown when a route is computed.
    own_positions = any(name in arrays for name in POSITIONS)
    return Request(
        spec=spec,
        layout=layout,
        ring_axes=ring_axes,
        ring_sizes=tuple(size_of(axis_argument, axis) for axis in ring_axes),
        ulysses_axis=ring.ulysses_axis,
        ulysses_size=ulysses_size,
        implementation=find(arguments.implementation),
        rotation=ring.backward,
        chunk_size=chunk_size,
        deterministic=check_bool("deterministic", arguments.deterministic),
        query_offset=None if own_positions else check_query_offset(arguments.query_offset),
    )


def make_spec(arguments: LocalArguments, head_dim: int) -> AttentionSpec:
    """The static mask, score and dropout of a call.

    Traced sides of a window, and causality if there are prefixes, are not part of the mask: they
    become per-query KV bounds (:mod:`burst_jax.attention.inputs`).
    """
    check_window(arguments.local_window_size)
    left, right = (
        None if side is None or isinstance(side, jax.Array) else int(side)
        for side in window_sides(arguments.local_window_size)
    )
    if check_bool("is_causal", arguments.is_causal):
        right = None if arguments.prefix_lengths is not None else 0
    cap = arguments.logits_soft_cap
    score = Score(
        check_scale(arguments.scale, head_dim),
        None if cap is None else check_number("logits_soft_cap", cap),
        score_mod=arguments.score_mod,
    )
    check_functions(arguments.score_mod, arguments.mask_mod)
    rate = check_dropout_rate(arguments.dropout_rate)
    mask = Mask(left, right, mask_mod=arguments.mask_mod)
    return AttentionSpec(mask, score, Dropout(rate) if rate else None)


def _window_arrays(arguments: LocalArguments, *, per_sequence: bool) -> dict[str, Any]:
    """The sides of a window that become per-query KV bounds, as int32 scalars by name.

    Args:
      arguments: the keyword arguments, whose window has been checked.
      per_sequence: whether query positions differ between the sequences of the batch. Then static
        windows and causality become bounds, too.
    """
    left, right = window_sides(arguments.local_window_size)
    if arguments.is_causal:
        # With prefixes, the KV ends derived from them already include causality.
        right = 0 if per_sequence and arguments.prefix_lengths is None else None
    sides = {}
    for name, side in zip(WINDOW_SIDES, (left, right), strict=True):
        if isinstance(side, jax.Array):
            sides[name] = to_int32("local_window_size", side, "bound")
        elif per_sequence and side is not None:
            sides[name] = np.asarray(side, np.int32)
    return sides
