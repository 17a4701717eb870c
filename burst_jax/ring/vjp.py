"""One device's attention with its gradient: the ring forward and backward, as a ``custom_vjp``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from burst_jax.parallel.target import Target, current_target
from burst_jax.ring.backward import backward
from burst_jax.ring.derivatives import into_kernels, out_of_loops, reverse_mode_only
from burst_jax.ring.forward import forward
from burst_jax.ring.local import local_implementation, with_block_runs
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import ShardShape, choose_rotation
from burst_jax.ring.schedule import count_hops
from burst_jax.ring.ulysses import all_tokens, gradient_to_tokens, own_heads, to_heads, to_tokens
from pallas_kernels import AttentionInputs, KVSide, QuerySide, SharedInputs, vary, varying_axes
from pallas_kernels.arrays import row_major
from pallas_kernels.inputs import Carry, PerHead
from pallas_kernels.score import sink_gradient

# The names under which a remat policy can keep a ring's results, so that no ring runs twice:
# jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES).
CHECKPOINT_NAMES = ("burst_out", "burst_lse")


def attend_shard(
    request: Request, inputs: AttentionInputs, target: Target | None = None
) -> tuple[jax.Array, jax.Array]:
    """What a request asks for, on one device's arrays; inside a ``shard_map`` if there is a ring.

    Args:
      request: checked, as the arrays are.
      inputs: the arrays.
      target: what it will run on; None is what the code being traced will run on.

    Returns:
      ``(out, lse)``: out ``[B, T, N, Hv]`` in the query's dtype, lse float32 ``[B, T, N]``.
    """
    inputs = for_ring(request, inputs)
    per_head = inputs.shared.per_head
    q, k, v, *values = reverse_mode_only(
        inputs.query.q, inputs.kv.k, inputs.kv.v, *per_head.values()
    )
    inputs = AttentionInputs(
        inputs.query._replace(q=q),
        inputs.kv._replace(k=k, v=v),
        inputs.shared.with_per_head(dict(zip(per_head, values, strict=True))),
    )
    ring = _ring_with_parameters if per_head else _ring
    out, lse = ring(request, target or current_target(), k.shape[2], inputs)
    return out, lse.swapaxes(1, 2)


def for_ring(request: Request, inputs: AttentionInputs) -> AttentionInputs:
    """The arrays of a call as the ring takes them: of what has heads, this device's heads alone.

    Every array is marked as varying over the ring's axes, and over each further manual axis that
    one of them varies over. The mark's transpose sums the gradient of an array that was the same on
    all devices of such an axis.
    """
    manual = [lax.axis_index(axis) for axis in request.token_axes]
    inputs = vary(inputs, varying_axes(inputs, manual))
    own = functools.partial(own_heads, axis_name=request.ulysses_axis)
    sinks, slopes, seeds, blocks, indices = inputs.shared
    sinks, slopes, seeds = jax.tree.map(own, (sinks, slopes, seeds))
    if blocks is not None and blocks.heads > 1:
        blocks = dataclasses.replace(blocks, table=own(blocks.table, heads=0))
    if indices is not None:
        indices = indices._replace(head=own(indices.head))
    return inputs._replace(shared=SharedInputs(sinks, slopes, seeds, blocks, indices))


def _run_ring(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array]:
    """:func:`attend_shard` on marked arrays, with lse ``[B, N, T]``.

    ``kv_heads`` is K, which the gradient has to know. Per-head parameters are those of the heads
    that this device has after the exchange.
    """
    return _ring_fwd(request, target, kv_heads, inputs)[0]


def exchanged(request: Request, inputs: AttentionInputs) -> AttentionInputs:
    """What the ring runs on: the tokens and heads that this device has after the exchange."""
    axis, (query, kv, shared) = request.ulysses_axis, inputs
    q = _without_padding(query.q, query.segment_ids)
    k, v = (_without_padding(x, kv.segment_ids) for x in (kv.k, kv.v))
    q, k, v = (to_heads(x, axis, tokens=1, heads=2) for x in (q, k, v))
    q_arrays, kv_arrays = (
        {name: all_tokens(x, axis) for name, x in side.token_arrays.items()} for side in (query, kv)
    )
    sides = query._replace(q=q, **q_arrays), kv._replace(k=k, v=v, **kv_arrays)
    inputs = AttentionInputs(*sides, shared)
    return with_block_runs(request, inputs)


def attend_exchanged(request: Request, target: Target, inputs: AttentionInputs) -> Carry:
    """The ring's forward: out and lse ``[B, N, T]`` of the tokens and heads of these inputs."""
    implementation = local_implementation(request, target, inputs)
    results = forward(request, implementation, into_kernels(implementation, inputs))
    return out_of_loops(implementation, results)


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


class Residuals(NamedTuple):
    """What the gradient needs of the forward, whichever implementation made it.

    Attributes:
      exchanged: what the ring ran on, after the exchange.
      out: ``[B, T, N, Hv]``, this device's tokens before the exchange.
      lse: ``[B, N, T]``, with the ring's tokens and heads.
      q_segment_ids: of this device's tokens before the exchange.
      differentiated: which numbers of each head need a gradient, said by an array's length
        (:func:`marked_numbers`). JAX keeps one tree structure of residuals for all traces of a
        custom_vjp, so a structure may not say what differs from trace to trace. None without
        numbers.
    """

    exchanged: AttentionInputs
    out: jax.Array
    lse: jax.Array
    q_segment_ids: jax.Array | None
    differentiated: jax.Array | None


def _ring_fwd(
    request: Request,
    target: Target,
    kv_heads: int,
    inputs: AttentionInputs,
    differentiated: jax.Array | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    del kv_heads
    ran_on = exchanged(request, inputs)
    carry = attend_exchanged(request, target, ran_on)
    return given_back(request, inputs, ran_on, carry, differentiated)


def given_back(
    request: Request,
    inputs: AttentionInputs,
    ran_on: AttentionInputs,
    carry: Carry,
    differentiated: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """What a ring gives back, and what its gradient needs.

    Args:
      request: the call.
      inputs: its arrays.
      ran_on: :func:`exchanged` of them.
      carry: :func:`attend_exchanged` of that.
      differentiated: see :class:`Residuals`.
    """
    axis, (out, lse) = request.ulysses_axis, carry
    out = checkpoint_name(to_tokens(out, axis, tokens=1, heads=2), CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    lse_here = to_tokens(lse, axis, tokens=2, heads=1)
    ids = inputs.query.segment_ids
    return (out, lse_here), Residuals(ran_on, out, lse, ids, differentiated)


def _ring_with_parameters_fwd(
    request: Request, target: Target, kv_heads: int, primals: Any
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """:func:`_ring_fwd` on primals that know which of them are differentiated."""
    differentiated = [name for name, x in primals.shared.per_head.items() if x.perturbed]
    inputs = custom_vjp_primal_tree_values(primals)
    marked = marked_numbers(differentiated, inputs.shared.per_head)
    return _ring_fwd(request, target, kv_heads, inputs, marked)


def marked_numbers(differentiated: Iterable[str], per_head: PerHead) -> jax.Array:
    """An array whose length says which numbers are differentiated: 1, and 2^i for the i-th name."""
    names = sorted(per_head)
    return jnp.zeros((1 + sum(2 ** names.index(name) for name in differentiated),), bool)


def _names_of(marked: jax.Array | None, per_head: PerHead) -> list[str]:
    """The inverse of :func:`marked_numbers`."""
    bits = 0 if marked is None else marked.shape[0] - 1
    return [name for i, name in enumerate(sorted(per_head)) if bits >> i & 1]


def _instantiated(cotangent: jax.Array | SymbolicZero, like: jax.Array) -> jax.Array:
    """A cotangent as an array, which varies from device to device as ``like`` does."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return vary(jnp.zeros(aval.shape, aval.dtype), varying_axes(like))


def ring_gradient(
    request: Request,
    target: Target,
    kv_heads: int,
    residuals: Residuals,
    cotangents: tuple[jax.Array | SymbolicZero, jax.Array | SymbolicZero],
) -> tuple[AttentionInputs]:
    """The gradients of a ring's arrays, by the backward ring."""
    ran_on, out, lse, segment_ids_here, marked = residuals
    query, kv, shared = ran_on
    per_head = shared.per_head
    differentiated = _names_of(marked, per_head)
    do, dlse = (_instantiated(x, out) for x in cotangents)
    do = _without_padding(do, segment_ids_here)
    axis = request.ulysses_axis
    # d logits = p (dO v - rowsum(dO O) + dlse): lse's gradient is one more term of delta.
    # XLA would lay out and dO out by heads, as delta is. In a scan over layers out is a slice of
    # what all of them have kept, and the whole stack would be copied.
    products = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Nor may XLA swap the axes where it sums: that kernel takes six times as long as the sums.
    products = lax.optimization_barrier(row_major(products)).swapaxes(1, 2)
    delta = products - _without_padding(dlse, segment_ids_here, tokens=2)
    do = to_heads(do, axis, tokens=1, heads=2)
    delta = to_heads(delta, axis, tokens=2, heads=1)
    # A row that sees no key has no weights, and 0 times what is not a number is not a number.
    delta = jnp.where(lse == -jnp.inf, 0, delta)
    # The backward ring starts when all of its inputs are there. XLA would otherwise hoist a permute
    # of it into the forward ring, where it takes the link from one that the forward waits for.
    q, do, (k, v), lse, delta = lax.optimization_barrier((query.q, do, (kv.k, kv.v), lse, delta))
    lengths = query.length, kv.length
    rotation = choose_rotation(
        request.rotation,
        ShardShape(
            *lengths,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            itemsize=q.dtype.itemsize,
            value_dim=v.shape[3],
        ),
        kv_hops=count_hops(request.route(*lengths)),
        query_hops=count_hops(request.route(*lengths, queries_travel=True)),
    )
    request = request.differentiating(differentiated)
    inputs = AttentionInputs(
        query._replace(q=q, do=do, stats=jnp.stack([lse, delta])), kv._replace(k=k, v=v), shared
    )
    implementation = local_implementation(request, target, inputs, backward=True)
    results = backward(request, implementation, into_kernels(implementation, inputs), rotation)
    dq, dkv, gradients = out_of_loops(implementation, results)
    dq, dkv = vary(dq, varying_axes(q)), vary(dkv, varying_axes(k, v))
    dq = gradient_to_tokens(dq, q.dtype, axis, heads_before=out.shape[2], tokens=1, heads=2)
    dk, dv = (
        gradient_to_tokens(x, q.dtype, axis, heads_before=kv_heads, tokens=1, heads=2) for x in dkv
    )
    if shared.sink_logits is not None:
        # The lse of padding is its head's sink, so its gradient is a part of the sink's.
        of_all = to_heads(products - dlse, axis, tokens=2, heads=1)
        gradients["sink_logits"] = sink_gradient(shared.sink_logits, lse, of_all)
    wanted = {name: vary(gradients[name], varying_axes(per_head[name])) for name in differentiated}
    return (AttentionInputs(QuerySide(dq), KVSide(dk, dv), SharedInputs().with_per_head(wanted)),)


_ring = jax.custom_vjp(_run_ring, nondiff_argnums=(0, 1, 2))
_ring.defvjp(_ring_fwd, ring_gradient)

# The gradients of per-head parameters cost time, so they are made only if somebody takes them.
# Symbolic zeros tell. In a shard_map outside of any jax.jit, JAX cannot call a custom_vjp that has
# them, but it can call a jax.jit around one.
_differentiated = jax.custom_vjp(_run_ring, nondiff_argnums=(0, 1, 2))
_differentiated.defvjp(_ring_with_parameters_fwd, ring_gradient, symbolic_zeros=True)
_ring_with_parameters = jax.jit(_differentiated, static_argnums=(0, 1, 2), inline=True)
