"""The public functions: ``burst_attention`` for global arrays, ``ring_attention`` for a shard's."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from burst_jax.attention_options import RANGE_ARRAYS, AttentionOptions, RingOptions
from burst_jax.block_mask import by_heads, with_block_mask
from burst_jax.checks import (
    WindowSize,
    check_arrays,
    check_bool,
    check_devices,
    check_inside_shard_map,
    check_outside_shard_map,
    check_per_head,
    check_segment_ids,
    dropout_seeds,
)
from burst_jax.key_ranges import check_key_ranges, sides_of
from burst_jax.layout import Layout
from burst_jax.placement import Placement
from burst_jax.refusals import refuse_other_arguments, without_catch_all
from burst_jax.request import Request
from burst_jax.ring.local import Shard
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.vjp import attend_shard
from burst_jax.shape_checks import check_global_shapes, check_local_shapes
from burst_jax.sharding import AxisNames, resolve_mesh, size_in_shard_map, size_on_mesh
from pallas_kernels import Implementation
from pallas_kernels.operands import PerHead


@overload
def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_residual: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@without_catch_all
def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *positional: Any,
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: AxisNames = "seq",
    head_parallel_axis: str | None = None,
    batch_axis: AxisNames = None,
    head_axis: AxisNames = None,
    layout: Layout = "contiguous",
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
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    backward: RotationChoice = "auto",
    return_residual: bool = False,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention over sequences sharded across a device mesh.

    .. math::
        out = softmax(mask(cap(scale \cdot query \cdot key^T) - slope |p_q - p_k|)) \cdot value

    This is ``jax.nn.dot_product_attention`` for sequences that are too long for one device. It has
    the same arguments and defaults, but the sequence axis of every array is split over
    ``seq_axis``, and no device ever holds a tensor of global length. How it works:
    :func:`burst_jax.ring_attention`.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32, in ``layout``'s order.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H, as in multi-head latent attention.
      mesh: the device mesh; None is the one of ``jax.set_mesh``.
      seq_axis: the mesh axis that T and S are split over; ``(outer, inner)``: a two-level ring,
        which sends one block over the links of the outer axis for each turn of the inner ring
        (:mod:`burst_jax.ring.route`); None: no ring. Then ``head_parallel_axis`` alone splits T and
        S (Ulysses), or, if that is None too, no axis does, and each device has whole rows.
      head_parallel_axis: a further mesh axis that T and S are split over. Before the ring its
        devices exchange their tokens for parts of the heads by all-to-all, and after the ring they
        exchange them back (:mod:`burst_jax.ring.exchange`). It is meant for the devices of one
        node, with a ring between nodes. On each device N must be a multiple of the axis' size, and
        K a multiple or a divisor (then key heads are copied). The axis does not count in the
        layout: a shard of the ring is split over it in the order it is in.
      batch_axis: the mesh axis or axes that B is split over; None: not split.
      head_axis: the mesh axis or axes that N and K are split over; None: not split.
      layout: the order the tokens are already in: "contiguous", "zigzag" or "striped"; see
        :func:`burst_jax.to_layout`. Under a causal mask zigzag and striped balance the work.
      is_causal: a query sees keys at its own and at earlier positions only; with T != S too.
      scale: factor on the logits; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``; one number stands for both. A side that is None has no limit, and
        None alone is no window. Under ``is_causal`` the right side is 0. A side may also be a JAX
        array, an integer scalar, so that one ``lax.scan`` runs layers of different windows. Its
        value is not checked; one below 0 moves the window away from its query: left = -2 hides
        every key before position p + 2. It lets a ring leave out no hop, so a window that is known
        should be Python numbers.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: ``[B, T]`` in the layout's order, of any integer dtype, whose values int32
        can hold; a query sees keys of its own segment only, and 0 is padding, which sees nothing
        and is seen by nothing. Give both or neither.
      key_value_segment_ids: ``[B, S]``, the same for keys and values.
      query_seq_lengths: integers ``[B]``: queries at their row's length and behind it are padding,
        which sees nothing, as in segment 0. None is no padding.
      key_value_seq_lengths: integers ``[B]``: keys at their row's length and behind it are seen by
        nothing. Lengths, prefixes, starts and ends count positions in the whole row, in its natural
        order.
      prefix_lengths: integers ``[B]``: keys at positions below their row's number are seen by every
        query of the row, also by earlier ones (a prefix LM). It needs ``is_causal``. The left side
        of a window and all other masks still hide keys of the prefix.
      key_starts: integers ``[B, T]``, or ``[T]`` for all rows, in the layout's order: each query
        sees only keys at this position or behind it, of those that the other masks leave it.
      key_ends: the same: each query sees only keys at positions before this one.
      block_mask: bool ``[T / bq, S / bk]``, or ``[N, T / bq, S / bk]`` with a table for each query
        head, in the sequence's natural order, whatever the layout is: queries at positions ``bq r
        .. bq (r + 1) - 1`` may see keys at ``bk c .. bk (c + 1) - 1`` only where entry ``[r, c]``
        is True, and where all other masks let them. Any bq and bk that divide T and S. Tiles in
        which nothing is left are skipped. A NumPy array is static: hops of the ring that no device
        needs are left out, too. Every device has the whole table of its heads.
      sink_logits: float32 ``[N]``, one number for each query head: one more logit in the
        denominator of every row's softmax, whose value is 0. The ring counts it once. lse counts
        it, too. It has a gradient. A row that sees no key has lse equal to its head's sink. None is
        no sink.
      alibi_slopes: float32 ``[N]``, of either sign: ``-slope * |p_q - p_k|`` is added to the logits
        of a query head, after the scale and the soft cap (ALiBi, arXiv 2108.12409). p are positions
        in the whole row, in its natural order. It has a gradient. Distances are exact for positions
        below 2^24. Over ``head_axis`` both arrays are split as the heads are.
      dropout_rate: the probability, below 1, with which a weight of the softmax is dropped. The
        others are divided by ``1 - dropout_rate``. lse does not know of it. 0.0 drops nothing.
      dropout_key: a ``jax.random.key``, another one at each call; needed where weights are dropped.
        Which ones are dropped depends on key, row, head and
        positions, not on devices, layout or implementation.
      implementation: the local attention: "triton", "xla", "mosaic_gpu", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
      backward: what travels for the gradients: "rotate_kv" (K, V, dK, dV), "rotate_query"
        (Q, dO, lse, delta, dQ), or "auto" for fewer bytes.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, sharded like the query; with ``return_residual``
      ``(out, lse)``, where lse is float32 ``[B, T, N]``, the natural log of the softmax's
      denominator. Both have gradients. A row that may see nothing has out 0, lse -inf or its head's
      sink, and passes exactly zero gradients to query, key and value.

    Raises:
      ValueError: the arguments are wrong; the message names argument, value and remedy.
      TypeError: more than query, key and value by position, or a keyword that is none of these.
      NotImplementedError: the chosen implementation cannot do this, or it is a derivative that a
        ring does not have, or a size is symbolic (``jax.export``).
    """
    refuse_other_arguments(burst_attention, positional, others)
    check_bool("return_residual", return_residual)
    check_arrays(query, key, value)
    hidden_by = check_segment_ids(query, key, query_segment_ids, key_value_segment_ids)
    hidden_by |= check_key_ranges(
        query,
        is_causal,
        local_window_size,
        {
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
            "prefix_lengths": prefix_lengths,
            "key_starts": key_starts,
            "key_ends": key_ends,
        },
    )
    per_head = check_per_head(
        query.shape[2], {"sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    )
    check_outside_shard_map()
    mesh = resolve_mesh(mesh)
    request = Request.parse(
        "seq_axis",
        seq_axis,
        head_parallel_axis,
        functools.partial(size_on_mesh, mesh),
        head_dim=query.shape[3],
        layout=layout,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        lifts_causality=prefix_lengths is not None,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        implementation=implementation,
        backward=backward,
    )
    seeds = dropout_seeds(query, dropout_rate, dropout_key)
    placement = Placement.parse(mesh, request, batch_axis, head_axis)
    check_global_shapes(request, placement, query, key)
    request = with_block_mask(request, query, key, block_mask)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value} | hidden_by
    if block_mask is not None:
        arrays["block_mask"] = block_mask
    check_devices(mesh, arrays | per_head)
    arrays, per_head = placement.placed(arrays), placement.placed(per_head)
    if seeds is not None:
        arrays["dropout_seeds"] = placement.split("dropout_seeds", seeds)
    out, lse = _on_mesh(request, placement, arrays, per_head)
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(
    request: Request,
    placement: Placement,
    arrays: dict[str, jax.Array],
    per_head: PerHead,
) -> tuple[jax.Array, jax.Array]:
    """Global out ``[B, T, N, Hv]`` and lse ``[B, T, N]``."""

    def on_device(arrays: dict[str, jax.Array], per_head: PerHead) -> tuple[jax.Array, jax.Array]:
        sides = sides_of(request, arrays)
        table = by_heads(arrays.get("block_mask"))
        return attend_shard(request, Shard(*sides, per_head, arrays.get("dropout_seeds"), table))

    in_specs = tuple(
        {name: placement.spec(name, x.ndim) for name, x in of.items()} for of in (arrays, per_head)
    )
    return jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=(placement.spec("out"), placement.spec("lse")),
        check_vma=placement.check_vma,
    )(arrays, per_head)


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
    head_parallel_axis: str | None = None,
    layout: Layout = "contiguous",
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
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    backward: RotationChoice = "auto",
    return_residual: bool = False,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention over sequences sharded along a mesh axis, inside the caller's ``shard_map``.

    .. math::
        out = softmax(mask(cap(scale \cdot query \cdot key^T) - slope |p_q - p_k|)) \cdot value

    over the keys of all devices on ``axis_name``. K and V travel around the ring by ``ppermute``
    while each device attends to the block it holds; partial results are merged by log-sum-exp in
    float32 (Ring Attention, arXiv 2310.01889; BurstAttention, arXiv 2403.09347). Every shape below
    is one device's. :func:`burst_jax.burst_attention` computes the same on global arrays.

    Letters: B batch, T query tokens here, S key tokens here, N query heads, K key/value heads,
    H head dim of queries and keys, Hv head dim of values, n devices on the axis.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H, as in multi-head latent attention.
      axis_name: the ring's mesh axis, manual in the enclosing ``shard_map``; ``(outer, inner)``: a
        two-level ring (:mod:`burst_jax.ring.route`), with the fast links along ``inner``; None: no
        ring, but ``head_parallel_axis`` or this device's arrays alone.
      head_parallel_axis: a mesh axis that each shard of the ring is split over, in its order, whose
        devices exchange their tokens for parts of the heads (:mod:`burst_jax.ring.exchange`). N
        must be a multiple of the axis' size, K a multiple or a divisor.
      layout: the order the tokens are in: "contiguous", "zigzag" or "striped"
        (:mod:`burst_jax.layout`). Zigzag needs an even number in a ring's shard.
      is_causal: a query sees keys at its own and at earlier positions only; with T != S too.
      scale: factor on the logits; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``; one number stands for both. See :func:`burst_jax.burst_attention`
        for what a side may be.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: ``[B, T]`` of any integer dtype, whose values int32 can hold; a query sees
        keys of its own segment only, and 0 is padding. Give both or neither.
      key_value_segment_ids: ``[B, S]``, the same for keys and values.
      query_seq_lengths: integers ``[B]``: queries at their row's length and behind it are padding,
        which sees nothing, as in segment 0. None is no padding.
      key_value_seq_lengths: integers ``[B]``: keys there and behind are seen by nothing. Lengths,
        prefixes, starts and ends count positions in the whole row, in its natural order.
      prefix_lengths: integers ``[B]``: keys at positions below their row's number are seen by every
        query of the row, also by earlier ones. It needs ``is_causal``. Other masks still hide them.
      key_starts: integers ``[B, T]``, or ``[T]`` for all rows, in the layout's order: each query
        sees only keys at this position or behind it, of those that the other masks leave it.
      key_ends: the same: each query sees only keys at positions before this one.
      block_mask: bool ``[T / bq, S / bk]`` or ``[N, T / bq, S / bk]``, T and S being those of the
        whole sequences: see :func:`burst_jax.burst_attention`. In the ``shard_map`` it enters with
        ``P()``, a table for each head split as the heads are.
      sink_logits: float32 ``[N]``, one number for each query head here: one more logit in the
        denominator of every row's softmax, whose value is 0. The ring counts it once. lse counts
        it, too. It has a gradient. A row that sees no key has lse equal to its head's sink.
      alibi_slopes: float32 ``[N]``, of either sign: ``-slope * |p_q - p_k|`` is added to the logits
        of a query head, after the scale and the soft cap (ALiBi, arXiv 2108.12409), p being
        positions in the whole row. It has a gradient. Distances are exact for positions below 2^24.
        In the ``shard_map`` both arrays enter with ``P()``, or split as the heads are.
      dropout_rate: the probability, below 1, with which a weight of the softmax is dropped.
      dropout_key: a ``jax.random.key``, another one at each call; needed where weights are dropped.
        Devices with other rows or heads must pass another key:
        fold the index of their mesh axis into it. Those along ``axis_name`` must pass the same one.
      implementation: the local attention: "triton", "xla", "mosaic_gpu", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
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
        head_parallel_axis=head_parallel_axis,
        layout=layout,
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
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
        backward=backward,
    )
    out, lse = attend_shard(request, shard)
    return (out, lse) if return_residual else out


def ring_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    head_parallel_axis: str | None = None,
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
) -> tuple[Request, Shard]:
    """A call of :func:`ring_attention`, checked: what it asks for, and its arrays.

    The arguments and errors are those of :func:`ring_attention`.
    """
    check_arrays(query, key, value)
    hidden_by = check_segment_ids(query, key, query_segment_ids, key_value_segment_ids)
    masks = {name: options.pop(name, None) for name in RANGE_ARRAYS}
    hidden_by |= check_key_ranges(query, is_causal, local_window_size, masks)
    per_head = check_per_head(
        query.shape[2], {"sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    )
    request = Request.parse(
        "axis_name",
        axis_name,
        head_parallel_axis,
        size_in_shard_map,
        head_dim=query.shape[3],
        is_causal=is_causal,
        local_window_size=local_window_size,
        lifts_causality=masks["prefix_lengths"] is not None,
        dropout_rate=dropout_rate,
        **options,
    )
    seeds = dropout_seeds(query, dropout_rate, dropout_key)
    if not request.token_axes:
        check_inside_shard_map()
    check_local_shapes(request, query, key)
    request = with_block_mask(request, query, key, block_mask, request.token_devices)
    sides = sides_of(request, {"query": query, "key": key, "value": value} | hidden_by)
    return request, Shard(*sides, per_head, seeds, by_heads(block_mask))
