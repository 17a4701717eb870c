"""Detects RoPE positions that contradict the layout, a mistake that changes every score.

RoPE takes positions from the caller; the ring's masks and ALiBi slopes take them from the layout.
If a caller permutes the tokens and passes an ``arange``, or does not permute them at all, the loss
still falls, but the model is trained on text in the wrong order.
:mod:`burst_jax.attention.order_rules` has the rules that detect this, on known positions and in a
traced call.

One more rule needs the values of whole sequences, so it applies outside of ``jit`` only: positions
that are exactly those of another layout, or of another number of shards, belong to a batch that was
made for another mesh.

Without a mask that depends on positions (causal, window) and without ALiBi slopes the order of the
tokens does not change the result, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.attention.arguments import (
    POSITION_READERS,
    AttentionArguments,
    AttentionOptions,
)
from burst_jax.attention.order_rules import (
    LastSegment,
    Samples,
    contradict,
    contradict_across,
    goes_back,
    is_permuted,
    text_here,
)
from burst_jax.attention.segment_ids import check_padding_id
from burst_jax.attention.validation import check_array, check_is_array
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import layout_of, layout_option, parse_layout
from burst_jax.parallel.mesh import (
    axes_size,
    flat_names,
    inside_shard_map,
    reshard_explicit,
    resolve_mesh,
    sequence_axes,
    token_spec,
)
from pallas_kernels.arrays import as_int32

Array = jax.Array | np.ndarray


def check_positions(
    x: jax.Array, positions: Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
    """``x``, with NaN in the sequences whose positions contradict the layout.

    RoPE takes positions from the model, and masks take them from the layout. With an ``arange`` for
    tokens in the zigzag layout the loss still falls, but the model learns text in the wrong order.
    :class:`burst_jax.BurstAttention` and :class:`burst_jax.models.Decoder` check this. A model that
    calls :func:`burst_jax.burst_attention` itself can check it once, where it makes its RoPE::

        options = dict(mesh=mesh, layout="zigzag", is_causal=True)
        x = burst_jax.check_positions(x, positions, **options)
        ...
        out = burst_jax.burst_attention(query, key, value, **options)

    Outside of ``jit``, and for NumPy arrays, wrong positions raise. In a traced call only the
    devices know the values: the sequence becomes NaN, and its loss at the first step. That takes
    one all-reduce of a few integers per sequence. Positions may restart with a document, start
    anywhere, repeat or skip values. A balanced layout is checked only outside of ``jit``, and only
    for the positions of a fixed one, because the attention takes the same positions. Nothing is
    checked without a mask or slopes that read positions.

    Args:
      x: ``[B, T, ...]``, anything that the loss depends on: hidden states, or the query.
      positions: integers ``[B, T]`` or ``[T]``, those that RoPE gets, in the layout's order.
      **options: the keyword arguments of the :func:`burst_jax.burst_attention` call, its segment
        ids included. Inside a ``shard_map`` ``seq_axis`` is the ``axis_name`` of
        :func:`burst_jax.ring_attention`, and arrays are one device's.

    Returns:
      ``x``, of the same shape and dtype.

    Raises:
      ValueError: known positions contradict the layout, or arrays have other shapes or dtypes.
      TypeError: an unknown keyword.
    """
    arguments = AttentionArguments.of(check_positions, options)
    parse_layout(arguments.layout)
    check_is_array("x", x, "an array [B, T, ...]")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}: it must be [B, T, ...]")
    check_is_array("positions", positions, "an int32 array")
    if tuple(positions.shape) not in (tuple(x.shape[:2]), tuple(x.shape[1:2])):
        raise ValueError(
            f"positions has shape {positions.shape}, x {x.shape}: it must be [B, T] or [T]"
        )
    positions = as_int32("positions", positions)
    name = "query_segment_ids" if arguments.segment_ids is None else "segment_ids"
    ids = getattr(arguments, name)
    if ids is not None:
        sizes = {"B": x.shape[0], "T": x.shape[1]}
        ids = check_array(name, ids, sizes, check_padding_id(arguments.padding_id))
    return reject_wrong_order(x, positions, ids, options)


def reject_wrong_order(
    x: jax.Array, positions: Array, segment_ids: Array | None, options: Mapping[str, Any]
) -> jax.Array:
    """``x``, with NaN in the sequences whose positions contradict the layout.

    If the values of positions and segment ids are known (NumPy arrays, or JAX arrays outside of
    ``jit``), such positions raise instead. In a traced call only the devices know the values, and a
    device cannot raise: the NaN makes the loss NaN at the first step. A traced call applies the
    second rule to a few tokens: those at the ends of each device's shard and of each block of the
    layout, and the third to the last segment of each device's shard. It costs one all-reduce over
    the sequence axes, of up to 30 integers per sequence and device; on one device nothing is
    checked.

    Inside a ``shard_map`` over the sequence axes all arrays are one device's, and none is known.

    Args:
      x: ``[B, T, ...]``, computed with the positions.
      positions: integers ``[B, T]`` or ``[T]``, in the layout's order.
      segment_ids: integers ``[B, T]``, 0 for padding, or None.
      options: keyword arguments of ``burst_attention``, which has checked them.

    Returns:
      The same shape in the dtype of ``x``.

    Raises:
      ValueError: known positions contradict the layout.
    """
    layout = layout_option(options)
    given = (options.get(name) for name in POSITION_READERS)
    if all(value is None or value is False for value in given):
        return x
    if not layout.is_fixed:  # The attention takes the same positions.
        reject_other_layout(positions, options)
        return x
    mesh = resolve_mesh(options.get("mesh"))
    ring, tokens = flat_names(options.get("seq_axis", "seq")), sequence_axes(options)
    n, shards = axes_size(mesh, ring), axes_size(mesh, tokens)
    inside = inside_shard_map(tokens)
    length = x.shape[1] * (shards if inside else 1)
    in_layout = layout.fixed_positions(length, n)
    if not inside and _known(positions) and (segment_ids is None or _known(segment_ids)):
        _reject_counted_along_array(np.atleast_2d(positions), segment_ids, layout, n)
        reject_other_layout(positions, options, segment_ids)
        return x
    if shards == 1:
        return x
    falls = np.diff(in_layout) < 0
    between = falls[length // shards - 1 :: length // shards]
    samples = None
    if segment_ids is not None and falls.any():
        samples = Samples(in_layout.reshape(shards, -1))
    positions = jnp.atleast_2d(as_int32("positions", positions))
    segments = jnp.ones((1, x.shape[1]), jnp.int32)
    if segment_ids is not None:
        segments = as_int32("segment_ids", segment_ids)

    def on_device(positions: jax.Array, segments: jax.Array) -> jax.Array:
        text = text_here(layout, positions.shape[1], n, ring, options.get("ulysses_axis"))
        last = LastSegment.of(positions, segments, text)
        of_whole = segment_ids is None
        return contradict_across(positions, segments, between, tokens, samples, last, of_whole)

    if inside:
        return _marked(x, on_device(positions, segments))
    # A single row of positions or segment ids is shared by all sequences and not sharded.
    arrays, batch = (positions, segments), options.get("batch_axis")
    specs = [
        token_spec(batch if array.shape[0] == x.shape[0] else None, tokens) for array in arrays
    ]
    split = (reshard_explicit(a, mesh, spec) for a, spec in zip(arrays, specs, strict=True))
    rows = batch if any(array.shape[0] == x.shape[0] for array in arrays) else None

    check = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=jax.P(rows))
    return _marked(x, check(*split))


def reject_other_layout(
    positions: Array, options: Mapping[str, Any], segment_ids: Array | None = None
) -> None:
    """Raises if positions are those of another layout, or of another number of shards.

    In a fixed layout the third rule also applies, which detects the batch of a balanced layout.

    Values that this process cannot read, as under ``jit``, are not checked.

    Args:
      positions: integers ``[B, T]`` or ``[T]``.
      options: keyword arguments of ``burst_attention``, which has checked them.
      segment_ids: integers ``[B, T]``, 0 for padding, or None.

    Raises:
      ValueError: the positions of a sequence are those of another order.
    """
    if inside_shard_map(sequence_axes(options)) or not _known(positions):
        return
    layout = layout_option(options)
    mesh = resolve_mesh(options.get("mesh"))
    n = axes_size(mesh, flat_names(options.get("seq_axis", "seq")))
    given = np.atleast_2d(np.asarray(positions))
    length = given.shape[1]
    if layout.padded_length(length, n) != length:
        return  # The attention raises.
    in_layout = layout.positions(length, n)
    if in_layout is None:
        return  # The attention takes these positions.
    others = (given != in_layout).any(1)
    count = np.arange(length)
    for row in np.flatnonzero(others):
        if (np.sort(given[row]) != count).any():
            continue
        found = layout_of(given[row])
        if found is not None:
            raise ValueError(
                f"positions of row {row} are those of the {found[0]} layout over {found[1]} "
                f"shards, and the tokens are in the {layout} layout over {n}: make the batch and "
                "the model with the same layout and number of shards"
            )
    if layout.is_fixed and (segment_ids is None or _known(segment_ids)):
        shards = axes_size(mesh, sequence_axes(options))
        _reject_permuted(given, segment_ids, layout, n, shards)


def _reject_counted_along_array(
    positions: np.ndarray, segment_ids: Array | None, layout: Layout, n: int
) -> None:
    """Raises if known positions ``[B or 1, T]`` break the first or the second rule."""
    length = positions.shape[1]
    in_layout = layout.fixed_positions(length, n)
    falls = np.diff(in_layout) < 0
    if not falls.any():
        return
    segments = np.ones((1, length), np.int32) if segment_ids is None else np.asarray(segment_ids)
    wrong = contradict(positions, segments, falls)
    if segment_ids is not None:
        everything = Samples(in_layout[None], all_of_them=True)
        wrong = wrong | goes_back(positions, segments, everything)
    if wrong.any():
        raise ValueError(
            f"positions of row {int(wrong.argmax())} are in another order than its tokens, "
            f"which are in the {layout} layout over {n} shards (an arange?): pass "
            f"burst_jax.positions({layout!r}, {length}, {n}), or permute what you have with "
            f"to_layout(..., {layout!r}, {n}), as make_batch does; tokens too"
        )


def _reject_permuted(
    positions: np.ndarray, segment_ids: Array | None, layout: Layout, n: int, shards: int
) -> None:
    """Raises if known positions ``[B or 1, T]`` break the third rule.

    ``n`` is the number of shards of the layout, ``shards`` that of devices.
    """
    length = positions.shape[1]
    text = layout.fixed_positions(length, n)
    segments = np.ones((1, length), np.int32) if segment_ids is None else np.asarray(segment_ids)
    wrong = is_permuted(positions, segments, text)
    if segment_ids is None:
        ascends = positions[:, 1:] > positions[:, :-1]
        ascends[:, length // shards - 1 :: length // shards] = True
        wrong &= ascends.all(1)
    if wrong.any():
        raise ValueError(
            f"positions of row {int(wrong.argmax())} are in another order than its tokens, "
            f"which are in the {layout} layout over {n} shards: a document's positions go back, "
            "as in a batch of another layout, like a balanced one that splits the document; make "
            "the batch and the model with the same layout and number of shards"
        )


def _marked(x: jax.Array, wrong: jax.Array) -> jax.Array:
    """``x`` ``[B, T, ...]``, NaN in the sequences that are ``wrong``, bool ``[B]`` or ``[1]``."""
    wrong = lax.expand_dims(wrong, range(1, x.ndim))
    return jnp.where(wrong, jnp.asarray(jnp.nan, x.dtype), x)


def _known(array: Array) -> bool:
    """Whether this process can read the array's values."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable
