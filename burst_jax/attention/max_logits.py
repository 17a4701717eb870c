"""``max_logits`` and ``ring_max_logits``: the largest logit of each head, for QK-clip."""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from burst_jax.attention.api import checked_call, ring_call
from burst_jax.attention.arguments import (
    AttentionArguments,
    AttentionOptions,
    RingArguments,
    RingOptions,
    takes,
)
from burst_jax.attention.inputs import shard_inputs
from burst_jax.attention.shardings import ArrayShardings
from burst_jax.attention.validation import check_is_array
from burst_jax.errors import check_integer
from burst_jax.parallel.mesh import AxisNames, reshard_explicit
from burst_jax.ring.max_logits import ROWS, MaxLogits, shard_max_logits
from burst_jax.ring.request import Request
from burst_jax.ring.vjp import attend_shard


@takes(AttentionArguments)
def max_logits(
    query: jax.Array,
    key: jax.Array,
    lse: jax.Array,
    *,
    rows: int = ROWS,
    **options: Unpack[AttentionOptions],
) -> MaxLogits:
    r"""Bounds of the largest logit of each head, from the lse of :func:`burst_jax.burst_attention`.

    .. math::
        max over b, q, k of mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)

    What QK-clip needs (MuonClip, Kimi K2, arXiv 2507.20534, section 2.1). Kernels return no row
    maxima, but a query's largest logit is at most its lse, so the largest of all is looked for
    among queries with large lse: the largest of each of ``rows`` blocks of a sequence, for each
    head. Their logits are computed again: ``2 B N rows S H`` operations, ``rows / T`` of the causal
    forward pass's. Over several devices one all-gather sends the rows, at least one of each.

    Args:
      query: ``[B, T, N, H]``, as in the call of :func:`burst_jax.burst_attention`.
      key: ``[B, S, K, H]``, as there.
      lse: float32 ``[B, T, N]``, what that call returned with ``return_residual=True``.
      {arguments}
      rows: number of queries of each sequence and head, 1 or more. More make the bounds tighter.
        Default 8.

    Pass the arguments of that call; those that do not change the logits have no effect here.

    Returns:
      ``(lower, upper)``, float32 ``[N]``, a :class:`burst_jax.MaxLogits`: the largest logit that
      was computed, and what no logit exceeds, but for the rounding of lse. If they are equal, they
      are the largest logit. Without sinks ``lower`` is smaller than that by the logarithm of a
      query's number of keys at most. With a soft cap the logits are the capped ones. ``lower`` is
      -inf where no query attends to a key; lse includes a head's sink, so ``upper`` is at least the
      sink if queries are left out. They have no gradient.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      TypeError: an unknown keyword.
      NotImplementedError: as in :func:`burst_jax.burst_attention`.
    """
    rows = check_integer("rows", rows, 1)
    _check_lse(lse, query)
    arguments = AttentionArguments.of(max_logits, options)
    request, shardings, arrays = checked_call(arguments, query, key, key, watched=False)
    missing = arrays["query"].shape[1] - lse.shape[1]
    if missing:  # pad=True
        lse = jnp.pad(lse, ((0, 0), (0, missing), (0, 0)), constant_values=-jnp.inf)
    lse = reshard_explicit(lse, shardings.mesh, shardings.spec("lse"))
    return MaxLogits(*_on_mesh(request, shardings, rows, arrays, lse))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(
    request: Request,
    shardings: ArrayShardings,
    rows: int,
    arrays: dict[str, jax.Array],
    lse: jax.Array,
) -> MaxLogits:
    def local(arrays: dict[str, jax.Array], lse: jax.Array) -> MaxLogits:
        found = shard_max_logits(request, shard_inputs(request, arrays), lse, rows)
        return lax.pmax(found, shardings.batch_axes) if shardings.batch_axes else found

    return jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=(
            {name: shardings.spec(name, x.ndim) for name, x in arrays.items()},
            shardings.spec("lse"),
        ),
        out_specs=P(shardings.tensor_axes or None),
        check_vma=shardings.check_vma,
    )(arrays, lse)


@takes(RingArguments)
def ring_max_logits(
    query: jax.Array,
    key: jax.Array,
    lse: jax.Array,
    axis_name: AxisNames,
    *,
    rows: int = ROWS,
    **options: Unpack[RingOptions],
) -> MaxLogits:
    """:func:`burst_jax.max_logits` inside the caller's ``shard_map``.

    Args:
      query: ``[B, T, N, H]``, as in the call of :func:`burst_jax.ring_attention`.
      key: ``[B, S, K, H]``, as there.
      lse: float32 ``[B, T, N]``, what that call returned with ``return_residual=True``.
      axis_name: the ring's mesh axis, as there.
      {arguments}
      rows: number of queries of each sequence and head, 1 or more. Default 8.

    Returns:
      ``(lower, upper)``, float32 ``[N]``, over this device's sequences and heads, the same on all
      devices of the ring. If other devices have other sequences, take ``jax.lax.pmax`` over their
      mesh axis.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      TypeError: an unknown keyword.
      NotImplementedError: as in :func:`burst_jax.burst_attention`.
    """
    rows = check_integer("rows", rows, 1)
    _check_lse(lse, query)
    call = ring_call(query, key, key, axis_name, watched=False, **options)
    return shard_max_logits(*call, lse, rows)


def attention_with_max_logits(
    query: jax.Array, key: jax.Array, value: jax.Array, axis_name: AxisNames, **options: Any
) -> tuple[jax.Array, MaxLogits]:
    """:func:`burst_jax.ring_attention` and the bounds of its logits, from one checked call."""
    request, inputs = ring_call(query, key, value, axis_name, **options)
    out, lse = attend_shard(request, inputs)
    return out, shard_max_logits(request, inputs, lse)


def _check_lse(lse: Any, query: Any) -> None:
    """Raises ValueError unless ``lse`` can be that of the query."""
    check_is_array("query", query, "an array")
    check_is_array("lse", lse, "a float32 array")
    if lse.dtype != jnp.float32 or lse.shape != query.shape[:3]:
        raise ValueError(
            f"lse is {lse.dtype} {list(lse.shape)}: for a query {list(query.shape)} it must be "
            f"float32 {list(query.shape[:3])}, what the call of attention returns with "
            "return_residual=True"
        )
