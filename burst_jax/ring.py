"""The ring itself: one device's view, forward and both backwards, as one ``custom_vjp``."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.checks import (
    check_local_arguments,
    check_seq_axes,
    check_static_batch,
    make_spec,
)
from burst_jax.derivatives import into_kernels, out_of_loops, reverse_mode_only
from burst_jax.heads import all_tokens, check_heads, gradient_to_tokens, to_heads, to_tokens
from burst_jax.layout import Layout
from burst_jax.platform import compute_capability, current_platform
from burst_jax.ring_backward import Block, backward
from burst_jax.ring_config import RingConfig
from burst_jax.ring_forward import forward
from burst_jax.rotation import Backward, choose_rotation
from burst_jax.sharding import flat_names
from pallas_kernels import Implementation, vary, varying_axes
from pallas_kernels.arrays import half_shape

# The names under which a remat policy can keep a ring's results, so that it never runs twice:
# jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES).
CHECKPOINT_NAMES = ("burst_out", "burst_lse")


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | tuple[str, ...] | None,
    *,
    head_parallel_axis: str | None = None,
    layout: Layout = "contiguous",
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    backward: Backward = "auto",
    return_residual: bool = False,
) -> Any:
    r"""Exact attention over sequences sharded along a mesh axis, inside the caller's ``shard_map``.

    .. math:: out = softmax(mask(cap(scale \cdot query \cdot key^T))) \cdot value

    over the keys of all devices on ``axis_name``. K and V travel around the ring by ``ppermute``
    while each device attends to the block it holds; partial results are merged by log-sum-exp in
    float32 (Ring Attention, arXiv 2310.01889, section 3; BurstAttention, arXiv 2403.09347,
    section 3.1). Every shape below is one device's. :func:`burst_jax.burst_attention` is the same
    for global arrays.

    Letters: B batch, T query tokens here, S key tokens here, N query heads, K key/value heads,
    H head dim, n devices on the axis.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, H]``, same dtype.
      axis_name: the ring's mesh axis, manual in the enclosing ``shard_map``; ``(outer, inner)``: a
        ring of rings (:mod:`burst_jax.route`), with the fast links along ``inner``; None: no ring,
        with ``head_parallel_axis`` alone.
      head_parallel_axis: a mesh axis whose devices hold further parts of the sequence, next to each
        other inside each shard of the ring, and exchange them for parts of the heads by all-to-all
        (:mod:`burst_jax.heads`). N must be a multiple of its size, K a multiple or a divisor.
      layout: the order the tokens are in: "contiguous", "zigzag" or "striped"
        (:mod:`burst_jax.layout`). A ring's shard must hold an even number of them for zigzag.
      is_causal: a query sees keys at its own and at earlier positions only; with T != S too.
      scale: factor on the logits; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``; an int is both. None is no window.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: ``[B, T]`` of any integer dtype, whose values int32 can hold; a query sees
        keys of its own segment only, and 0 is padding, which sees nothing and is seen by nothing.
        Give both or neither.
      key_value_segment_ids: ``[B, S]``, alike.
      implementation: the local attention: "triton", "xla", "mosaic_gpu", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
      backward: what travels for the gradients: "rotate_kv" (K, V, dK, dV), "rotate_query"
        (Q, dO, dQ), or "auto" for fewer bytes.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, H]`` in the query's dtype; with ``return_residual`` ``(out, lse)``, where lse
      is float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both have gradients. A
      row that may see nothing has out 0, lse -inf, and passes exactly zero gradients.

    Raises:
      ValueError: the arguments are wrong; the message names argument, value and remedy.
      NotImplementedError: the chosen implementation cannot do this, or it is a derivative that a
        ring does not have, or a size is symbolic (``jax.export``).
    """
    spec = make_spec(query, is_causal, scale, local_window_size, logits_soft_cap)
    axes = check_seq_axes("axis_name", axis_name, head_parallel_axis)
    sizes = tuple(_axis_size("axis_name", axis) for axis in axes)
    shards = 1
    if head_parallel_axis is not None:
        shards = _axis_size("head_parallel_axis", head_parallel_axis)
    segment_ids = check_local_arguments(
        query, key, value, query_segment_ids, key_value_segment_ids, layout, backward, shards
    )
    check_static_batch(query, math.prod(sizes) * shards)
    if head_parallel_axis is not None:
        name = f"head_parallel_axis {head_parallel_axis!r}"
        check_heads(query.shape[2], key.shape[2], shards, name)
    config = RingConfig(
        axes=axes,
        sizes=sizes,
        head_axis=head_parallel_axis,
        kv_heads=key.shape[2],
        layout=layout,
        spec=spec,
        implementation=implementation,
        backward=backward,
        platform=current_platform(),
        compute_capability=compute_capability(),
    )
    arrays = (query, key, value, *segment_ids)
    # All of them vary over the ring, and over whatever other manual axis one of them varies over:
    # the transpose of this cast sums the gradient of an array that was replicated there.
    manual = [lax.axis_index(axis) for axis in flat_names(axes, head_parallel_axis)]
    varying = varying_axes(arrays, manual)
    query, key, value, *segment_ids = vary(arrays, varying)
    out, lse = _ring(config, *reverse_mode_only(query, key, value), *segment_ids)
    return (out, lse.swapaxes(1, 2)) if return_residual else out


def _axis_size(argument: str, axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"{argument} is {axis_name!r}, the manual mesh axes here are {manual}: call "
            "ring_attention inside a shard_map over that axis, or burst_attention outside of one"
        ) from None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    config: RingConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    out, lse, _ = _attend(config, query, key, value, q_segment_ids, kv_segment_ids)
    return out, to_tokens(lse, config.head_axis, tokens=2, heads=1)


def _attend(config, query, key, value, q_segment_ids, kv_segment_ids):
    """``(out, lse, what the ring ran on)``, lse ``[B, N, T]`` with the ring's tokens and heads."""
    axis = config.head_axis
    query = _without_padding(query, q_segment_ids)
    key, value = (_without_padding(x, kv_segment_ids) for x in (key, value))
    query = to_heads(query, axis, tokens=1, heads=2)
    kv = to_heads(key, axis, tokens=1, heads=2), to_heads(value, axis, tokens=1, heads=2)
    ids = tuple(all_tokens(ids, axis) for ids in (q_segment_ids, kv_segment_ids))
    local = config.resolve(query, kv)
    out, lse = forward(config, local, *into_kernels(local, (query, kv)), *ids)
    out, lse = out_of_loops(local, (out, lse))
    return to_tokens(out, axis, tokens=1, heads=2), lse, (query, kv, *ids)


def _without_padding(x: jax.Array, segment_ids: jax.Array | None, *, tokens: int = 1) -> jax.Array:
    """``x`` with zeros where its tokens, along the axis ``tokens``, are padding.

    The masks give padding the weight 0, and 0 times infinity or NaN is NaN. So whatever a caller
    left in the padding is taken out before it is multiplied with anything.
    """
    if segment_ids is None:
        return x
    others = [axis for axis in range(1, x.ndim) if axis != tokens]
    live = lax.expand_dims(segment_ids != 0, others)
    return jnp.where(live, x, jnp.zeros((), x.dtype))


def _ring_fwd(config, query, key, value, q_segment_ids, kv_segment_ids):
    # The gradient needs only (out, lse) from the forward, whichever implementation made them.
    out, lse, ran_on = _attend(config, query, key, value, q_segment_ids, kv_segment_ids)
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    lse_here = to_tokens(lse, config.head_axis, tokens=2, heads=1)
    return (out, lse_here), (ran_on, out, lse, q_segment_ids)


def _ring_bwd(config, residuals, cotangents):
    (query, kv, q_segment_ids, kv_segment_ids), out, lse, segment_ids_here = residuals
    do, dlse = cotangents
    do = _without_padding(do, segment_ids_here)
    dlse = _without_padding(dlse, segment_ids_here, tokens=2)
    axis = config.head_axis
    # d logits = p (dO v - rowsum(dO O) + dlse): lse's gradient is one more term of delta.
    wide = (x.astype(jnp.float32) for x in (do, out))
    delta = jnp.einsum("btnh,btnh->bnt", *wide, precision=lax.Precision.HIGHEST) - dlse
    do = to_heads(do, axis, tokens=1, heads=2)
    delta = to_heads(delta, axis, tokens=2, heads=1)
    # Nothing of the backward ring starts before its inputs are all there: a permute hoisted into
    # the forward ring would take the link from the permute that forward waits for.
    query, do, kv, lse, delta = lax.optimization_barrier((query, do, kv, lse, delta))
    lengths = query.shape[1], half_shape(kv)[1]
    rotation = choose_rotation(
        config.backward,
        kv_hops=config.route(*lengths).hops,
        query_hops=config.route(*lengths, queries_travel=True).hops,
        q_length=lengths[0],
        kv_length=lengths[1],
        heads=query.shape[2],
        kv_heads=half_shape(kv)[2],
        head_dim=query.shape[3],
        itemsize=query.dtype.itemsize,
    )
    local = config.resolve(query, kv, backward=True)
    arrays, stats, kv = into_kernels(local, ((query, do), (lse, delta), kv))
    queries = Block(arrays, stats, q_segment_ids)
    keys = Block(kv, None, kv_segment_ids)
    dq, dkv = out_of_loops(local, backward(config, local, queries, keys, rotation))
    dq, dkv = vary(dq, varying_axes(query)), vary(dkv, varying_axes(kv))
    dq = gradient_to_tokens(dq, query.dtype, axis, heads_before=out.shape[2], tokens=1, heads=2)
    dk, dv = gradient_to_tokens(
        dkv, query.dtype, axis, heads_before=config.kv_heads, tokens=2, heads=3
    )
    return dq, dk, dv, None, None


_ring.defvjp(_ring_fwd, _ring_bwd)
