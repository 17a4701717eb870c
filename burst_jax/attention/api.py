"""The public functions: ``burst_attention``, ``ring_attention``, ``local_attention``."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import jax

from burst_jax.attention.arguments import (
    AttentionArguments,
    AttentionOptions,
    LocalArguments,
    LocalOptions,
    RingArguments,
    RingOptions,
    no_more_positional,
    takes,
)
from burst_jax.attention.call import parse_call
from burst_jax.attention.inputs import shard_inputs
from burst_jax.attention.padding import check_pad, cut, padded
from burst_jax.attention.shardings import (
    ArrayShardings,
    check_devices,
    check_global_shapes,
    check_inside_shard_map,
    check_local_shapes,
    check_one_device,
    check_outside_shard_map,
)
from burst_jax.attention.watch import attention_program
from burst_jax.errors import check_bool
from burst_jax.parallel.mesh import (
    AxisNames,
    reshard_explicit,
    resolve_mesh,
    size_in_shard_map,
    size_on_mesh,
)
from burst_jax.ring.request import Request
from burst_jax.ring.vjp import attend_shard
from pallas_kernels import AttentionInputs
from pallas_kernels.device import Target, target_of

Attention = jax.Array | tuple[jax.Array, jax.Array]


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
) -> Attention: ...


@takes(AttentionArguments)
def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *positional: Any,
    return_residual: bool = False,
    **options: Any,
) -> Attention:
    r"""Exact attention over sequences that are sharded over a device mesh (context parallelism).

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

    An extended ``jax.nn.dot_product_attention``, with its argument names and defaults but without
    ``bias`` and ``mask``, for global arrays whose sequence dimension is sharded over ``seq_axis``.
    No device holds a tensor of global length. :func:`burst_jax.ring_attention` describes the
    algorithm.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values; sizes of the global arrays. Arrays with a T or S
    dimension are in the order of ``layout``.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H (multi-head latent attention).
      {arguments}
      return_residual: whether to return lse too. Default False.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, sharded like the query; with ``return_residual``
      ``(out, lse)``, lse float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both
      are differentiable. A query that attends to no key has out 0, lse -inf (or its head's sink),
      and exactly zero gradients.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      TypeError: more than query, key and value by position, or an unknown keyword.
      NotImplementedError: a combination that the chosen implementation does not support,
        forward-mode differentiation, or in ``jax.export`` a symbolic length, or a symbolic batch
        size on several devices.
    """
    no_more_positional(burst_attention, positional)
    arguments = AttentionArguments.of(burst_attention, options)
    check_bool("return_residual", return_residual)
    request, shardings, arrays = checked_call(arguments, query, key, value)
    results: Any = _on_mesh(request, shardings, _results(return_residual), arrays)
    if arguments.pad:
        results = tuple(cut(x, shardings, query) for x in results)
    return results if return_residual else results[0]


def checked_call(
    arguments: AttentionArguments,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    watched: bool = True,
) -> tuple[Request, ArrayShardings, dict[str, jax.Array]]:
    """A checked call on global arrays: its static request, how its arrays are sharded, and these.

    Errors are those of :func:`burst_attention`; ``watched`` is that of :func:`parse_call`.
    """
    check_pad(arguments.pad, arguments.layout)
    check_outside_shard_map(arguments)
    mesh = resolve_mesh(arguments.mesh)
    request, arrays, derived = parse_call(
        arguments,
        query,
        key,
        value,
        axis_argument="seq_axis",
        axes=arguments.seq_axis,
        size_of=functools.partial(size_on_mesh, mesh),
        local=False,
        watched=watched,
    )
    shardings = ArrayShardings.of(mesh, request, arguments)
    if arguments.pad:
        arrays = padded(request, shardings, arrays)
    check_global_shapes(request, shardings, arrays["query"], arrays["key"])
    check_devices(mesh, arrays)
    arrays = shardings.check(arrays)
    arrays |= {name: shardings.reshard(name, x) for name, x in derived.items()}
    return request, shardings, arrays


def _results(return_residual: bool) -> tuple[str, ...]:
    """The names of the results that a call returns.

    A program returns no lse that the caller does not get: lse may be -inf, which
    ``jax_debug_infs`` rejects in what an eager call returns.
    """
    return ("out", "lse") if return_residual else ("out",)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@attention_program
def _on_mesh(
    request: Request,
    shardings: ArrayShardings,
    names: tuple[str, ...],
    arrays: dict[str, jax.Array],
) -> tuple[jax.Array, ...]:
    """The global results that ``names`` lists: out ``[B, T, N, Hv]`` and lse ``[B, T, N]``."""
    return jax.shard_map(
        lambda arrays: attend_shard(request, shard_inputs(request, arrays))[: len(names)],
        mesh=shardings.mesh,
        in_specs=({name: shardings.spec(name, x.ndim) for name, x in arrays.items()},),
        out_specs=tuple(shardings.spec(name) for name in names),
        check_vma=shardings.check_vma,
    )(arrays)


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
) -> Attention: ...


@takes(RingArguments)
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    return_residual: bool = False,
    **options: Any,
) -> Attention:
    r"""Exact attention over sequences sharded along a mesh axis, inside the caller's ``shard_map``.

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

    over the keys of all devices on ``axis_name``. K and V rotate around the ring by ``ppermute``
    while each device attends to the block it holds; partial results are merged by log-sum-exp in
    float32 (Ring Attention, arXiv 2310.01889, section 3; BurstAttention, arXiv 2403.09347,
    section 3.1). :func:`burst_jax.burst_attention` computes the same on global arrays.

    Letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values; sizes of this device's arrays. A ``block_mask`` covers
    the whole sequences. It and per-head arrays enter the ``shard_map`` with ``P()``, or sharded
    over the mesh axes of the heads.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H (multi-head latent attention).
      axis_name: the ring's mesh axis, manual in the enclosing ``shard_map``. ``(outer, inner)``: a
        two-level ring (:mod:`burst_jax.ring.route`) with the fast interconnect along ``inner``.
        None: no ring; ``ulysses_axis`` alone shards the sequence, or nothing does.
      {arguments}
      return_residual: whether to return lse too. Default False.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` ``(out, lse)``, lse
      float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both are differentiable.
      A query that attends to no key has out 0, lse -inf (or its head's sink), and exactly zero
      gradients.

    Raises:
      ValueError: an argument is wrong; the message names argument, value and remedy.
      TypeError: an unknown keyword.
      NotImplementedError: as in :func:`burst_jax.burst_attention`.
    """
    check_bool("return_residual", return_residual)
    out, lse = attend_shard(*ring_call(query, key, value, axis_name, **options))
    return (out, lse) if return_residual else out


def ring_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: AxisNames,
    *,
    watched: bool = True,
    **options: Any,
) -> tuple[Request, AttentionInputs]:
    """A checked call of :func:`ring_attention`: its static request and its inputs.

    Arguments and errors are those of :func:`ring_attention`; ``watched`` is that of
    :func:`parse_call`.
    """
    request, arrays, derived = parse_call(
        RingArguments.of(ring_attention, options),
        query,
        key,
        value,
        axes=axis_name,
        size_of=size_in_shard_map,
        local=True,
        watched=watched,
    )
    check_local_shapes(request, query, key)
    if not request.token_axes:
        check_inside_shard_map()
    return request, shard_inputs(request, arrays | derived)


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
) -> Attention: ...


@takes(LocalArguments)
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *positional: Any,
    return_residual: bool = False,
    **options: Any,
) -> Attention:
    r"""Exact attention on one device's arrays, with every mask of this library.

    .. math::
        out = softmax(mask(f(cap(scale \cdot query \cdot key^T)) - slope |p_q - p_k|)) \cdot value

    It runs the ring's kernels without a ring: it needs no mesh and does not communicate. Inside a
    ``shard_map`` it attends to this device's keys only. :func:`burst_jax.merge` combines partial
    results, so other forms of context parallelism can be built from these two functions.

    Letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values; sizes of this device's arrays.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, Hv]``, same dtype. Hv may differ from H (multi-head latent attention).
      {arguments}
      return_residual: whether to return lse too. Default False.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` ``(out, lse)``, lse
      float32 ``[B, T, N]``, the natural log of the softmax's denominator. Both are differentiable.
      A query that attends to no key has out 0, lse -inf (or its head's sink), and exactly zero
      gradients. If partial results are to be merged, pass ``sink_logits`` to one of the calls.

    Raises:
      ValueError: an argument is wrong, or an array is sharded over several devices; the message
        names argument, value and remedy.
      TypeError: more than query, key and value by position, or an unknown keyword.
      NotImplementedError: as in :func:`burst_jax.burst_attention`.
    """
    no_more_positional(local_attention, positional)
    check_bool("return_residual", return_residual)
    arguments = LocalArguments.of(local_attention, options)
    call = parse_call(arguments, query, key, value, size_of=size_in_shard_map, local=True)
    check_one_device(call.arrays)
    names = _results(return_residual)
    results: Any = _on_device(call.request, target_of(query), names, call.arrays | call.derived)
    return results if return_residual else results[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@attention_program
def _on_device(
    request: Request, target: Target, names: tuple[str, ...], arrays: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The results of :func:`local_attention` that ``names`` lists, "out" and "lse"."""

    def attend(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return attend_shard(request, shard_inputs(request, arrays), target)[: len(names)]

    of_query = jax.typeof(arrays["query"]).sharding
    mesh = of_query.mesh
    if not mesh.explicit_axes or mesh.manual_axes:
        return attend(arrays)
    # Kernels have no sharding rule, which Explicit axes need. No array is split over several
    # devices (its type may name axes of size 1), so every device computes everything.
    replicated = jax.P()
    arrays = {name: reshard_explicit(x, mesh, replicated) for name, x in arrays.items()}
    run = jax.shard_map(attend, mesh=mesh, in_specs=replicated, out_specs=replicated)
    tokens = jax.P(*of_query.spec[:3])
    return tuple(reshard_explicit(x, mesh, tokens) for x in run(arrays))
