"""The public functions for one device's arrays: ``ring_attention`` and ``local_attention``."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from burst_jax.attention.arguments import (
    RANGE_ARRAYS,
    LocalOptions,
    RingOptions,
    refuse_other_arguments,
    without_catch_all,
)
from burst_jax.attention.block_mask import by_heads, with_block_mask
from burst_jax.attention.kv_bounds import check_key_ranges, sides_of
from burst_jax.attention.parsing import parse_request
from burst_jax.attention.positions import check_positions, refuse_by_row
from burst_jax.attention.score_mod import MaskMod, ScoreMod
from burst_jax.attention.shapes import check_local_shapes
from burst_jax.attention.validation import (
    WindowSize,
    check_arrays,
    check_bool,
    check_inside_shard_map,
    check_one_device,
    check_per_head,
    check_segment_ids,
    dropout_seeds,
)
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames, size_in_shard_map
from burst_jax.parallel.target import Target, target_of
from burst_jax.ring.local import Shard
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.vjp import attend_shard
from pallas_kernels import Implementation
from pallas_kernels.elementwise import Numbering
from pallas_kernels.operands import PerHead


@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> jax.Array: ...


@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    return_residual: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    return_residual: bool,
    **options: Unpack[RingOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@without_catch_all
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    ulysses_axis: str | None = None,
    layout: Layout = "contiguous",
    query_offset: int | jax.Array = 0,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: WindowSize = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    key_starts: jax.Array | None = None,
    key_ends: jax.Array | None = None,
    block_mask: jax.Array | np.ndarray | None = None,
    sink_logits: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    deterministic: bool = False,
    backward: RotationChoice = "auto",
    return_residual: bool = False,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention over sequences sharded along a mesh axis, inside the caller's ``shard_map``.

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

    over the keys of all devices on ``axis_name``. K and V travel around the ring by ``ppermute``
    while each device attends to the block it holds; partial results are merged by log-sum-exp in
    float32 (Ring Attention, arXiv 2310.01889, section 3; BurstAttention, arXiv 2403.09347,
    section 3.1). Every shape below is one device's. :func:`burst_jax.burst_attention` computes the
    same on global arrays.

    Letters: B batch, T query tokens here, S key tokens here, N query heads, K key/value heads,
    H head dim of queries and keys, Hv head dim of values, n devices on the axis.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H, as in multi-head latent attention.
      axis_name: the ring's mesh axis, manual in the enclosing ``shard_map``; ``(outer, inner)``: a
        two-level ring (:mod:`burst_jax.ring.route`), with the fast links along ``inner``; None: no
        ring, but ``ulysses_axis`` alone, or attention on this device's arrays alone.
      ulysses_axis: a mesh axis that each shard of the ring is split over, in the order it is
        in. Its devices exchange their tokens for parts of the heads by all-to-all
        (:mod:`burst_jax.ring.ulysses`). N must be a multiple of its size, K one or a divisor.
      layout: the order the tokens are in (:mod:`burst_jax.layouts.permutation`). A ring's shard
        must hold an even number of them for "zigzag", whole stripes for "striped:64".
      query_offset: what comes onto the positions of the queries; without it both sides count from
        0. An integer of either sign, an array of one, or an array ``[B]``, one for each row. A ring
        leaves out hops by a Python integer, not by an array.
      query_positions: integers ``[T]``, or ``[B, T]``, of this device's tokens: where each query
        is, in any order, in place of the layout's positions and an offset.
      key_value_positions: integers ``[S]``: the same of the keys. Positions lie between -2^30 and
        2^30. ``alibi_slopes`` and dropout need some that are the same in all rows.
      is_causal: a query sees keys at its own and at earlier positions only.
      scale: factor on the logits, a Python number; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``, as in :func:`burst_jax.burst_attention`. A side that is an array
        lets a ring leave out no hop, so a window that is known should be Python numbers.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: ``[B, T]`` of any integer dtype, whose values int32 can hold; a query sees
        keys of its own segment only, and 0 is padding, which sees nothing and is seen by nothing.
        Give both or neither.
      key_value_segment_ids: ``[B, S]``, the same for keys and values.
      query_seq_lengths: integers ``[B]``: queries at their row's length and behind it are padding,
        which sees nothing, as in segment 0. None is no padding.
      key_value_seq_lengths: integers ``[B]``: keys at their row's length and behind it are seen by
        nothing. Lengths, prefixes, starts and ends count positions in the whole row.
      prefix_lengths: integers ``[B]``: keys at positions below their row's number are seen by every
        query of the row, also by earlier ones (a prefix LM). It needs ``is_causal``.
      key_starts: integers ``[B, T]``, or ``[T]`` for all rows, in the layout's order: each query
        sees only keys at this position or behind it, of those that the other masks leave it.
      key_ends: the same: each query sees only keys at positions before this one.
      block_mask: bool ``[T / bq, S / bk]`` or ``[N, T / bq, S / bk]``, T and S being those of the
        whole sequences: see :func:`burst_jax.burst_attention`. In the ``shard_map`` it enters with
        ``P()``, a table for each head split as the heads are.
      sink_logits: float32 ``[N]``, one number for each query head here: one more logit in the
        denominator of every row's softmax, as in :func:`burst_jax.burst_attention`.
      alibi_slopes: float32 ``[N]``, of either sign: ``-slope * |p_q - p_k|`` is added to the logits
        of a query head (ALiBi, arXiv 2108.12409), by positions in the whole row. In the
        ``shard_map`` both arrays enter with ``P()``, or split as the heads are.
      score_mod: ``f(score, batch, head, q_position, kv_position) -> score``, as in
        :func:`burst_jax.burst_attention`. Rows and heads are counted here, from 0, or with
        ``ulysses_axis`` over the heads of its devices.
      mask_mod: ``f(batch, head, q_position, kv_position) -> bool``, counted likewise.
      dropout_rate: the probability, below 1, with which a weight of the softmax is dropped. The
        others are divided by ``1 - dropout_rate``. lse does not know of it. 0.0 drops nothing.
      dropout_key: a ``jax.random.key``, another one at each call; needed where weights are dropped.
        Devices with other rows or heads must pass another key: fold the index of their mesh axis
        into it. Those along ``axis_name`` must pass the same one.
      implementation: the local attention: "triton", "xla", "mosaic_sm90", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
      deterministic: whether gradients, too, have the same bits at every run of a program: not those
        of "mosaic_sm90". See :func:`burst_jax.burst_attention`.
      backward: what travels for the gradients: "rotate_kv" (K, V, dK, dV), "rotate_query"
        (Q, dO, lse, delta, dQ), or "auto" for fewer bytes.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` ``(out, lse)``, where lse
      is float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both have gradients. A
      row that may see nothing has out 0, lse -inf or its head's sink, and passes exactly zero
      gradients to query, key and value.

    Raises:
      ValueError: the arguments are wrong; the message names argument, value and remedy.
      TypeError: a keyword that is none of these.
      NotImplementedError: the chosen implementation cannot do this, or it is a derivative that a
        ring does not have, or a size is symbolic (``jax.export``).
    """
    refuse_other_arguments(ring_attention, (), others)
    check_bool("return_residual", return_residual)
    request, shard = ring_call(
        query,
        key,
        value,
        axis_name,
        ulysses_axis=ulysses_axis,
        layout=layout,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        prefix_lengths=prefix_lengths,
        key_starts=key_starts,
        key_ends=key_ends,
        block_mask=block_mask,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
        deterministic=deterministic,
        backward=backward,
    )
    out, lse = attend_shard(request, shard)
    return (out, lse) if return_residual else out


def ring_call(
    query: jax.Array, key: jax.Array, value: jax.Array, axis_name: AxisNames, **options: Any
) -> tuple[Request, Shard]:
    """A call of :func:`ring_attention`, checked: what it asks for, and its arrays.

    The arguments and errors are those of :func:`ring_attention`.
    """
    request, arrays, per_head, seeds = _parsed(query, key, value, axis_name, **options)
    if not request.token_axes:
        check_inside_shard_map()
    table = by_heads(arrays.get("block_mask"))
    numbering = Numbering.of(query) if request.spec.calls_functions else None
    return request, Shard(*sides_of(request, arrays), per_head, seeds, table, numbering)


def _parsed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    ulysses_axis: str | None = None,
    query_offset: int | jax.Array = 0,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: WindowSize = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    block_mask: jax.Array | np.ndarray | None = None,
    sink_logits: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    **options: Any,
) -> tuple[Request, dict[str, jax.Array], PerHead, jax.Array | None]:
    """A call on one device's arrays, checked.

    Returns:
      What it asks for, its arrays by name (as :func:`sides_of` takes them), the numbers of each
      head, and the seeds of dropout.
    """
    check_arrays(query, key, value)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    arrays |= check_segment_ids(query, key, query_segment_ids, key_value_segment_ids)
    positions = check_positions(query, key, query_offset, query_positions, key_value_positions)
    arrays |= positions.arrays
    by_row = positions.by_row is not None
    masks = {name: options.pop(name, None) for name in RANGE_ARRAYS}
    arrays |= check_key_ranges(query, is_causal, local_window_size, masks, by_row=by_row)
    per_head = check_per_head(
        query.shape[2], {"sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    )
    request = parse_request(
        "axis_name",
        axis_name,
        ulysses_axis,
        size_in_shard_map,
        head_dim=query.shape[3],
        is_causal=is_causal,
        local_window_size=local_window_size,
        lifts_causality=masks["prefix_lengths"] is not None,
        dropout_rate=dropout_rate,
        query_offset=positions.query_offset,
        positions_by_row=by_row,
        **options,
    )
    refuse_by_row(positions, per_head, dropout_rate, request.spec)
    seeds = dropout_seeds(query, dropout_rate, dropout_key)
    check_local_shapes(request, query, key)
    request = with_block_mask(request, query, key, block_mask, request.token_devices)
    if block_mask is not None:
        arrays["block_mask"] = block_mask
    return request, arrays, per_head, seeds


@overload
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[LocalOptions],
) -> jax.Array: ...


@overload
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: Literal[True],
    **options: Unpack[LocalOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: bool,
    **options: Unpack[LocalOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@without_catch_all
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *positional: Any,
    query_offset: int | jax.Array = 0,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: WindowSize = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    key_starts: jax.Array | None = None,
    key_ends: jax.Array | None = None,
    block_mask: jax.Array | np.ndarray | None = None,
    sink_logits: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention on the arrays of one device: what a ring computes at each of its steps.

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

    There is no mesh and no ring: call it on one device, or inside a ``shard_map`` on what each
    device has. With :func:`burst_jax.merge` it makes schemes of your own, like decoding with keys
    split over devices, or long prompts in chunks: attend to each part of the keys, and merge the
    parts' ``(out, lse)``.

    Inside a ``jax.jit`` it is not known how arrays are split over Auto mesh axes. There XLA would
    collect an array that is; ``burst_attention(seq_axis=None)`` leaves its rows and heads where
    they are.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype.
      query_offset: what comes onto the positions of the queries; without it both sides count from
        0. S - T aligns causal queries to the last key. An integer, an array of one, or an array
        ``[B]``. A Python integer is compiled in; an array serves all chunks by one program.
      query_positions: integers ``[T]``, or ``[B, T]``: where each query is, in place of an offset.
        In any order; tiles whose positions lie close together are skipped best.
      key_value_positions: integers ``[S]``: the same of the keys. Positions lie between -2^30 and
        2^30. ``alibi_slopes`` and dropout need some that are the same in all rows.
      is_causal: a query sees keys at its own and at earlier positions only.
      scale: factor on the logits, a Python number; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``, as in :func:`burst_jax.burst_attention`.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: integers ``[B, T]``; a query sees keys of its own segment only, and 0 is
        padding. Give both or neither.
      key_value_segment_ids: integers ``[B, S]``.
      query_seq_lengths: integers ``[B]``: queries at this position and behind it are padding.
      key_value_seq_lengths: integers ``[B]``: keys at this position and behind it are not seen.
      prefix_lengths: integers ``[B]``: keys at positions below it are seen by every query of the
        row (a prefix LM). It needs ``is_causal``.
      key_starts: integers ``[B, T]`` or ``[T]``: each query sees keys from this position on only.
      key_ends: the same: each query sees only keys at positions before this one.
      block_mask: bool ``[T / bq, S / bk]`` or ``[N, T / bq, S / bk]``: queries of a row's block see
        keys only of the blocks whose entries are True, as in :func:`burst_jax.burst_attention`.
      sink_logits: float32 ``[N]``: one more logit in the denominator of every row's softmax. It is
        in lse. If parts are to be merged, pass it to one of them alone.
      alibi_slopes: float32 ``[N]``: ``-slope * |p_q - p_k|`` is added to the logits.
      score_mod: ``f(score, batch, head, q_position, kv_position) -> score``, made of each logit.
      mask_mod: ``f(batch, head, q_position, kv_position) -> bool``, True where a query sees a key.
      dropout_rate: the probability, below 1, with which a weight is dropped; lse does not know it.
      dropout_key: a ``jax.random.key``; needed where weights are dropped.
      implementation: "triton", "xla", "mosaic_sm90", an :class:`pallas_kernels.Implementation`, or
        None for the fastest that can run.
      deterministic: whether gradients, too, have the same bits at every run of a program.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` ``(out, lse)``, where lse
      is float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both have gradients. A
      row that may see nothing has out 0, lse -inf or its head's sink, and passes exactly zero
      gradients to query, key and value.

    Raises:
      ValueError: the arguments are wrong, or an array is split over several devices; the message
        names argument, value and remedy.
      TypeError: more than query, key and value by position, or a keyword that is none of these.
      NotImplementedError: the chosen implementation cannot do this, or it is a derivative that it
        does not have, or a size is symbolic (``jax.export``).
    """
    refuse_other_arguments(local_attention, positional, others)
    check_bool("return_residual", return_residual)
    request, arrays, per_head, seeds = _parsed(
        query,
        key,
        value,
        None,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        prefix_lengths=prefix_lengths,
        key_starts=key_starts,
        key_ends=key_ends,
        block_mask=block_mask,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
        deterministic=deterministic,
    )
    check_one_device(arrays | per_head)
    out, lse = _on_device(request, target_of(query), arrays, per_head, seeds)
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_device(
    request: Request,
    target: Target,
    arrays: dict[str, jax.Array],
    per_head: PerHead,
    seeds: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of :func:`local_attention`."""
    table = by_heads(arrays.get("block_mask"))
    numbering = Numbering.of(arrays["query"]) if request.spec.calls_functions else None
    shard = Shard(*sides_of(request, arrays), per_head, seeds, table, numbering)
    return attend_shard(request, shard, target)
