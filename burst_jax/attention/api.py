"""``burst_attention``: the public function for global arrays."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from burst_jax.attention.arguments import (
    AttentionOptions,
    refuse_other_arguments,
    without_catch_all,
)
from burst_jax.attention.block_mask import by_heads, with_block_mask
from burst_jax.attention.kv_bounds import check_key_ranges, sides_of
from burst_jax.attention.padding import check_pad, cut, padded
from burst_jax.attention.parsing import parse_request
from burst_jax.attention.positions import check_positions, refuse_by_row
from burst_jax.attention.score_mod import MaskMod, ScoreMod
from burst_jax.attention.shapes import check_global_shapes
from burst_jax.attention.shardings import AttentionShardings
from burst_jax.attention.validation import (
    WindowSize,
    check_arrays,
    check_bool,
    check_devices,
    check_outside_shard_map,
    check_per_head,
    check_segment_ids,
    dropout_seeds,
)
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames, resolve_mesh, size_on_mesh
from burst_jax.ring.local import Shard
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.vjp import attend_shard
from pallas_kernels import Implementation
from pallas_kernels.elementwise import Numbering
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
    ulysses_axis: str | None = None,
    batch_axis: AxisNames = None,
    tensor_axis: AxisNames = None,
    layout: Layout = "contiguous",
    pad: bool = False,
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
    r"""Exact attention over sequences sharded across a device mesh.

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

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
        (:mod:`burst_jax.ring.route`); None: no ring. Then ``ulysses_axis`` alone splits T and
        S (Ulysses), or, if that is None too, no axis does, and each device has whole rows.
      ulysses_axis: a further mesh axis that T and S are split over. Before the ring its
        devices exchange their tokens for parts of the heads by all-to-all, and after the ring they
        exchange them back (:mod:`burst_jax.ring.ulysses`). It is meant for the devices of one
        node, with a ring between nodes. On each device N must be a multiple of the axis' size, and
        K a multiple or a divisor (then key heads are copied). The axis does not count in the
        layout: a shard of the ring is split over it in the order it is in.
      batch_axis: the mesh axis or axes that B is split over; None: not split.
      tensor_axis: the mesh axis or axes that N and K are split over; None: not split.
      layout: the order the tokens are already in: "contiguous", "zigzag", "striped", or "striped:k"
        with stripes of k tokens, like "striped:64"; see :func:`burst_jax.to_layout`. Under a causal
        mask zigzag and striped balance the work.
      pad: whether lengths T and S that the mesh does not divide are padded: with zeros, up to the
        next length that it divides. Segment 0 masks the padding, and out and lse are cut to T, so
        results and gradients are exact. It is for the contiguous layout only, because in other
        layouts the padding must come before the permutation. It moves tokens between devices at
        every call; where the model allows, pad once, with :func:`burst_jax.pad_to_layout`.
      query_offset: what comes onto the positions of the queries; without it both sides count from
        0. A chunk of queries starts at some place of its sequence, and S - T aligns causal queries
        to the last key. An integer of either sign, an array of one, or an array ``[B]``, one for
        each row. A Python integer is compiled in, and a ring leaves out hops by it. An array serves
        all chunks by one program, but leaves out no hop.
      query_positions: integers ``[T]``, or ``[B, T]``, in the layout's order: where each query is,
        in any order, in place of the layout's positions and an offset.
      key_value_positions: integers ``[S]``: the same of the keys. Positions lie between -2^30 and
        2^30. ``alibi_slopes`` and dropout need some that are the same in all rows.
      is_causal: a query sees keys at its own and at earlier positions only. With T != S, too, both
        count from 0, unless ``query_offset`` says otherwise.
      scale: factor on the logits, a Python number; None is ``1 / sqrt(H)``. One that a program
        computes is a factor on the query, with ``scale=1.0``.
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
        below 2^24. Over ``tensor_axis`` both arrays are split as the heads are.
      score_mod: ``f(score, batch, head, q_position, kv_position) -> score``, what becomes of each
        logit, after the scale and the soft cap and before ``alibi_slopes``. It is written with
        jax.numpy for one float32 score; the others are int32: the row of the batch, the query head,
        and positions in the whole row, in its natural order. JAX differentiates it with respect to
        the score. Arrays that it captures have no gradient, and only "xla" takes them. It is
        compiled in, and known by its identity: a new lambda at each call compiles anew.
      mask_mod: ``f(batch, head, q_position, kv_position) -> bool``, True where a query sees a key
        that the other masks leave it. All tiles are tested that the other masks do not hide: a
        ``block_mask`` of it (:func:`burst_jax.block_mask_of`) lets tiles be skipped.
      dropout_rate: the probability, below 1, with which a weight of the softmax is dropped. The
        others are divided by ``1 - dropout_rate``. lse does not know of it. 0.0 drops nothing.
      dropout_key: a ``jax.random.key``, another one at each call; needed where weights are dropped.
        Which ones are dropped depends on key, row, head and
        positions, not on devices, layout or implementation.
      implementation: the local attention: "triton", "xla", "mosaic_sm90", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
      deterministic: whether gradients, too, have the same bits at every run of a program. They have
        them with all implementations but Hopper's own kernels ("mosaic_sm90"), whose backward adds
        up dQ in the order in which parts of it come. True: None takes the next implementation for
        the gradient, and "mosaic_sm90" is refused there. out and lse always have the same bits.
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
    check_pad(pad, layout)
    check_arrays(query, key, value)
    hidden_by = check_segment_ids(query, key, query_segment_ids, key_value_segment_ids)
    positions = check_positions(query, key, query_offset, query_positions, key_value_positions)
    hidden_by |= positions.arrays
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
        by_row=positions.by_row is not None,
    )
    per_head = check_per_head(
        query.shape[2], {"sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    )
    check_outside_shard_map()
    mesh = resolve_mesh(mesh)
    request = parse_request(
        "seq_axis",
        seq_axis,
        ulysses_axis,
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
        deterministic=deterministic,
        backward=backward,
        query_offset=positions.query_offset,
        positions_by_row=positions.by_row is not None,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    refuse_by_row(positions, per_head, dropout_rate, request.spec)
    seeds = dropout_seeds(query, dropout_rate, dropout_key)
    shardings = AttentionShardings.parse(mesh, request, batch_axis, tensor_axis)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value} | hidden_by
    if pad:
        arrays = padded(request, shardings, arrays, block_mask)
    check_global_shapes(request, shardings, arrays["query"], arrays["key"])
    request = with_block_mask(request, query, key, block_mask)
    if block_mask is not None:
        arrays["block_mask"] = block_mask
    check_devices(mesh, arrays | per_head)
    arrays, per_head = shardings.shard_arguments(arrays), shardings.shard_arguments(per_head)
    if seeds is not None:
        arrays["dropout_seeds"] = shardings.shard("dropout_seeds", seeds)
    if request.spec.calls_functions:
        numbers = zip(("batch_numbers", "head_numbers"), Numbering.of(query), strict=True)
        arrays |= {name: shardings.shard(name, x) for name, x in numbers}
    out, lse = _on_mesh(request, shardings, arrays, per_head)
    if pad:
        out, lse = (cut(x, shardings, query) for x in (out, lse))
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(
    request: Request,
    shardings: AttentionShardings,
    arrays: dict[str, jax.Array],
    per_head: PerHead,
) -> tuple[jax.Array, jax.Array]:
    """Global out ``[B, T, N, Hv]`` and lse ``[B, T, N]``."""

    def on_device(arrays: dict[str, jax.Array], per_head: PerHead) -> tuple[jax.Array, jax.Array]:
        sides = sides_of(request, arrays)
        table, numbering = by_heads(arrays.get("block_mask")), None
        if "batch_numbers" in arrays:
            numbering = Numbering(arrays["batch_numbers"], arrays["head_numbers"])
        seeds = arrays.get("dropout_seeds")
        return attend_shard(request, Shard(*sides, per_head, seeds, table, numbering))

    in_specs = tuple(
        {name: shardings.spec(name, x.ndim) for name, x in of.items()} for of in (arrays, per_head)
    )
    return jax.shard_map(
        on_device,
        mesh=shardings.mesh,
        in_specs=in_specs,
        out_specs=(shardings.spec("out"), shardings.spec("lse")),
        check_vma=shardings.check_vma,
    )(arrays, per_head)
