"""The ring itself: one device's view, forward and both backwards, as one ``custom_vjp``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.checks import check_local_arguments, make_spec
from burst_jax.layout import Layout, shard_positions
from burst_jax.platform import compute_capability, current_platform
from burst_jax.rotation import Backward, choose_rotation, shift, source
from pallas_kernels import AttentionSpec, Implementation, Tokens, resolve, vary, varying_axes
from pallas_kernels.arrays import half_shape

# The names under which a remat policy can keep a ring's results, so that it never runs twice:
# jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES).
CHECKPOINT_NAMES = ("burst_out", "burst_lse")


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """Everything static about one ring."""

    axis_name: str
    size: int
    layout: str
    spec: AttentionSpec
    implementation: str | Implementation | None
    backward: str
    platform: str
    compute_capability: float | None

    def resolve(self, q: Any, kv: Any, *, backward: bool = False) -> Implementation:
        """The local attention for these arrays."""
        return resolve(
            self.implementation,
            platform=self.platform,
            compute_capability=self.compute_capability,
            q=q,
            kv=kv,
            backward=backward,
        )

    def tokens(self, length: int, hops: int, segment_ids: jax.Array | None) -> Tokens:
        """The tokens of the block that is here after ``hops`` hops."""
        shard = source(self.axis_name, self.size, hops)
        return Tokens(shard_positions(self.layout, length, self.size, shard), segment_ids)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str,
    *,
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
      axis_name: the ring's mesh axis, manual in the enclosing ``shard_map``.
      layout: the order the tokens are in: "contiguous", "zigzag" or "striped"
        (:mod:`burst_jax.layout`). T and S must be even for zigzag.
      is_causal: a query sees keys at its own and at earlier positions only; with T != S too.
      scale: factor on the logits; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``; an int is both. None is no window.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: int32 ``[B, T]``; a query sees keys of its own segment only, and 0 is
        padding, which sees nothing and is seen by nothing. Give both or neither.
      key_value_segment_ids: int32 ``[B, S]``.
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
      NotImplementedError: the chosen implementation cannot do this; None never raises it.
    """
    spec = make_spec(query, is_causal, scale, local_window_size, logits_soft_cap)
    size = _axis_size(axis_name)
    check_local_arguments(
        query, key, value, query_segment_ids, key_value_segment_ids, layout, backward
    )
    config = RingConfig(
        axis_name=axis_name,
        size=size,
        layout=layout,
        spec=spec,
        implementation=implementation,
        backward=backward,
        platform=current_platform(),
        compute_capability=compute_capability(),
    )
    arrays = (query, key, value, query_segment_ids, key_value_segment_ids)
    # All of them vary over the ring, and over whatever other manual axis one of them varies over:
    # the transpose of this cast sums the gradient of an array that was replicated there.
    axes = varying_axes(arrays, lax.axis_index(axis_name))
    out, lse = _ring(config, *vary(arrays, axes))
    return (out, lse.swapaxes(1, 2)) if return_residual else out


def _axis_size(axis_name: str) -> int:
    if not isinstance(axis_name, str):
        raise NotImplementedError(
            f"axis_name is {axis_name!r}: a ring over more than one mesh axis is not there yet; "
            "pass one axis name"
        )
    try:
        return lax.axis_size(axis_name)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"axis_name is {axis_name!r}, the manual mesh axes here are {manual}: call "
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
    local = config.resolve(query, (key, value))
    return _forward(config, local, query, key, value, q_segment_ids, kv_segment_ids)


def _forward(
    config: RingConfig,
    local: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of this device's queries over all keys: out in the query's dtype, lse [B, N, T]."""
    n, spec = config.size, config.spec
    q_tokens = config.tokens(query.shape[1], 0, q_segment_ids)
    # K and V travel as one array: two permutes in one step would wait for each other.
    kv = (key, value) if n == 1 else jnp.stack([key, value])
    travelling: Any = (kv, kv_segment_ids)
    carry: tuple[jax.Array, jax.Array] | None = None
    bounds_at = _bounds_by_step(
        n,
        kv_segment_ids,
        lambda hops, segment_ids: local.forward_bounds(
            spec, query, kv, q_tokens, config.tokens(key.shape[1], hops, segment_ids)
        ),
    )
    for step in range(n):
        # Invariant: `travelling` started `step` devices back; `carry` is the attention over all
        # blocks that were here before it.
        last = step == n - 1
        arriving = None if last else shift(travelling, config.axis_name, n)
        kv, segment_ids = travelling
        kv_tokens = config.tokens(key.shape[1], step, segment_ids)
        bounds = bounds_at(step, segment_ids)
        out_dtype = query.dtype if last else None
        carry = local.forward(
            query, kv, q_tokens, kv_tokens, bounds, carry, spec=spec, out_dtype=out_dtype
        )
        if not last:
            # Without it XLA hoists every permute to the front, ahead of all compute, and keeps
            # every block alive. With it each permute lies beside one kernel.
            travelling, carry = lax.optimization_barrier((arriving, carry))
    assert carry is not None
    # Mosaic kernels' results are not marked as varying from device to device, nor may what they
    # change in place be: so they are marked here. Without it the transpose of whatever reads out
    # would sum its gradient over the ring.
    return vary(carry, varying_axes(query, key, value))


def _bounds_by_step(
    size: int, segment_ids: jax.Array | None, bounds_of: Callable[[Any, Any], Any]
) -> Callable[[int, jax.Array | None], Any]:
    """``at(step, segment_ids) -> bounds`` from ``bounds_of(hops, segment_ids) -> bounds``.

    Tables that depend on positions alone are made for all steps at once: one small kernel instead
    of several per step, and in an 8 x A100 program no table comes to lie where the next step's
    block could (with it, memory grew by a block from 12 devices on). Segment ids arrive with their
    block, so their tables are made as they land.
    """
    if segment_ids is not None or size == 1:
        return lambda step, ids: bounds_of(step, ids)
    tables = jax.vmap(lambda hops: bounds_of(hops, None))(jnp.arange(size, dtype=jnp.int32))
    return lambda step, ids: jax.tree.map(lambda table: table[step], tables)


def _ring_fwd(config, query, key, value, q_segment_ids, kv_segment_ids):
    # The gradient needs only (out, lse) from the forward, whichever implementation made them.
    out, lse = _ring(config, query, key, value, q_segment_ids, kv_segment_ids)
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    return (out, lse), (query, key, value, q_segment_ids, kv_segment_ids, out, lse)


def _ring_bwd(config, residuals, cotangents):
    query, key, value, q_segment_ids, kv_segment_ids, out, lse = residuals
    do, dlse = cotangents
    # d logits = p (dO v - rowsum(dO O) + dlse): lse's gradient is one more term of delta.
    wide = (x.astype(jnp.float32) for x in (do, out))
    delta = jnp.einsum("btnh,btnh->bnt", *wide, precision=lax.Precision.HIGHEST) - dlse
    # Nothing of the backward ring starts before its inputs are all there: a permute hoisted into
    # the forward ring would take the link from the permute that forward waits for.
    query, do, key, value, lse, delta = lax.optimization_barrier(
        (query, do, key, value, lse, delta)
    )
    queries = _Block((query, do), (lse, delta), q_segment_ids)
    keys = _Block((key, value), None, kv_segment_ids)
    rotation = choose_rotation(
        config.backward,
        size=config.size,
        q_length=query.shape[1],
        kv_length=key.shape[1],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        itemsize=query.dtype.itemsize,
    )
    local = config.resolve(query, (key, value), backward=True)
    dq, dkv = _backward(config, local, queries, keys, rotation)
    dq, dkv = vary(dq, varying_axes(query)), vary(dkv, varying_axes(key))
    dk, dv = dkv
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, None


class _Block(NamedTuple):
    """What backward needs of one side: (q, dO) and (lse, delta), or (k, v) and nothing."""

    arrays: Any
    stats: Any
    segment_ids: jax.Array | None

    def packed(self) -> _Block:
        """The same, each pair in one array, to travel by one permute."""
        stats = None if self.stats is None else jnp.stack(self.stats)
        return _Block(jnp.stack(self.arrays), stats, self.segment_ids)


def _backward(
    config: RingConfig, local: Implementation, queries: _Block, keys: _Block, rotation: str
) -> tuple[jax.Array, jax.Array]:
    """Float32 dq ``[B, T, N, H]`` and dkv ``[2, B, S, K, H]``.

    One side stays, the other travels with its gradient behind it, which arrives late: step i
    computes while the sum that left after step i - 1 is on its way, and adds to it when it lands.

        step 0            step 1                          step 2
        stay              stay       | gradient travels   stay       | gradient travels
        travel | data     travel     | data travels       travel
    """
    n, spec, turn_kv = config.size, config.spec, rotation == "rotate_kv"
    staying, travelling = (queries, keys) if turn_kv else (keys, queries)
    travelling = travelling.packed() if n > 1 else travelling
    stay_tokens = config.tokens(half_shape(staying.arrays)[1], 0, staying.segment_ids)
    moved_length = half_shape(travelling.arrays)[1]

    def tokens(hops, segment_ids):
        moved = config.tokens(moved_length, hops, segment_ids)
        return (stay_tokens, moved) if turn_kv else (moved, stay_tokens)

    bounds_at = _bounds_by_step(
        n,
        travelling.segment_ids,
        lambda hops, segment_ids: local.backward_bounds(
            spec, queries.arrays[0], keys.arrays, *tokens(hops, segment_ids)
        ),
    )
    step_gradients = _apart if local.backward_dq is not None else _together
    send = functools.partial(shift, axis_name=config.axis_name, size=n)
    stay_sum: Any = None
    travel_sum: Any = None
    for step in range(n):
        # Invariant: `travelling` started `step` devices back; `travel_sum` is its gradient from
        # those devices, not yet shifted; `stay_sum` is the gradient here from all blocks before it.
        tables = bounds_at(step, travelling.segment_ids)

        def arguments(block, step=step, tables=tables):
            q, kv = (queries, block) if turn_kv else (block, keys)
            return (q.arrays, kv.arrays, q.stats, *tokens(step, block.segment_ids), tables)

        stay_sum, travel_sum, travelling = step_gradients(
            functools.partial(_gradients, local, spec, turn_kv),
            arguments,
            travelling,
            stay_sum,
            None if step == 0 else send(travel_sum),
            None if step == n - 1 else send,
        )
        if step < n - 1:
            travelling, stay_sum, travel_sum = lax.optimization_barrier(
                (travelling, stay_sum, travel_sum)
            )
    # The gradient comes home in float32: XLA would move the caller's cast to before the last hop.
    home = travel_sum if n == 1 else shift(travel_sum, config.axis_name, n)
    home = lax.optimization_barrier(home)
    return (stay_sum, home) if turn_kv else (home, stay_sum)


def _gradients(
    local: Implementation,
    spec: AttentionSpec,
    turn_kv: bool,
    which: str,
    arguments: tuple,
    *sums: Any,
) -> Any:
    """The local backward by sides: of the one that "stays", that "travels", or of "both"."""
    if which == "both":
        assert local.backward is not None  # resolve(backward=True) sees to it
        stay_sum, travel_sum = sums
        dq, dkv = (stay_sum, travel_sum) if turn_kv else (travel_sum, stay_sum)
        dq, dkv = local.backward(*arguments, dq=dq, dkv=dkv, spec=spec)
        return (dq, dkv) if turn_kv else (dkv, dq)
    half = local.backward_dq if (which == "stays") == turn_kv else local.backward_dkv
    assert half is not None
    return half(*arguments, *sums, spec=spec)


def _apart(gradients, arguments, block, stay_sum, arriving_sum, send):
    """One step with two kernels: each has one permute beside it, and adds in place.

    The gradient travels beside the kernel of the side that stays. The kernel of the side that
    travels waits for it to land; beside that one the next block travels.
    """
    stay_sum = gradients("stays", arguments(block), stay_sum)
    if arriving_sum is not None:
        # The block too: free to go earlier, its permute would be merged with the gradient's.
        stay_sum, arriving_sum, block = lax.optimization_barrier((stay_sum, arriving_sum, block))
    next_block = None if send is None else send(block)
    travel_sum = gradients("travels", arguments(block), arriving_sum)
    return stay_sum, travel_sum, next_block


def _together(gradients, arguments, block, stay_sum, arriving_sum, send):
    """One step with one kernel for both gradients, and both permutes beside it.

    The kernel cannot wait for the sum to land, so it makes a fresh one and the two are added.
    """
    next_block = None if send is None else send(block)
    stay_sum, new = gradients("both", arguments(block), stay_sum, None)
    travel_sum = new if arriving_sum is None else arriving_sum + new
    return stay_sum, travel_sum, next_block


_ring.defvjp(_ring_fwd, _ring_bwd)
