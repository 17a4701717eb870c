"""One device's attention and its gradient: ring forward and backward, as a ``custom_vjp``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.jax_compat import instantiated, primal_values
from burst_jax.layouts.layout import AttentionPass
from burst_jax.ring import backward, forward, gathered
from burst_jax.ring.derivatives import kernel_inputs, loop_results, reverse_mode_only
from burst_jax.ring.local import local_implementation, with_block_runs
from burst_jax.ring.padding import with_zeros, without_padding
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation, ShardShape, choose_rotation
from burst_jax.ring.schedule import count_hops
from burst_jax.ring.ulysses import all_tokens, gradient_to_tokens, own_heads, to_heads, to_tokens
from pallas_kernels import (
    AttentionInputs,
    Implementation,
    KVSide,
    QuerySide,
    SharedInputs,
    vary,
    varying_axes,
)
from pallas_kernels.arrays import row_major
from pallas_kernels.device import Target, current_target
from pallas_kernels.inputs import Carry, PerHead
from pallas_kernels.score import sink_gradient

# The names under which a remat policy can save a ring's results, so that no ring runs twice:
# jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES).
CHECKPOINT_NAMES = ("burst_out", "burst_lse")


class _Pass(NamedTuple):
    """How attention runs over the shards of a layout.

    Attributes:
      forward: as :func:`burst_jax.ring.forward.forward`.
      backward: as :func:`burst_jax.ring.backward.backward`.
      zeroes_padding: ``(request, implementation, inputs, *, backward) -> bool``, where tokens have
        segment ids: whether the pass replaces what the arrays hold in padding by zeros.
    """

    forward: Callable[..., Carry]
    backward: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array], PerHead]]
    zeroes_padding: Callable[..., bool]


def _ring_zeroes_padding(
    request: Request, implementation: Implementation, inputs: AttentionInputs, *, backward: bool
) -> bool:
    """The kernels do: all get the segment ids."""
    return implementation.zeroes_padding(request.spec, inputs, backward=backward)


_PASSES: dict[AttentionPass, _Pass] = {
    "ring": _Pass(forward.forward, backward.backward, _ring_zeroes_padding),
    "gathered": _Pass(gathered.forward, gathered.backward, gathered.zeroes_padding),
}


def attend_shard(
    request: Request, inputs: AttentionInputs, target: Target | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention on one device's arrays; inside a ``shard_map`` if there is a ring.

    Args:
      request: the static part of the call.
      inputs: this device's arrays, checked.
      target: the platform to compile for; None is that of the code being traced.

    Returns:
      ``(out, lse)``: out ``[B, T, N, Hv]`` in the query's dtype, lse float32 ``[B, T, N]``.
    """
    inputs = prepared(request, inputs)
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


def prepared(request: Request, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs, marked as varying, with shared inputs sliced to this device's Ulysses heads.

    Every array is marked as varying over the token axes, and over each further manual axis that one
    of them varies over. The transpose of the marking sums the gradient of an array that was
    replicated over such an axis.
    """
    manual = [lax.axis_index(axis) for axis in request.token_axes]
    inputs = vary(inputs, varying_axes(inputs, manual))
    own = functools.partial(own_heads, axis_name=request.ulysses_axis)
    sinks, slopes, seeds, blocks, indices, tables = inputs.shared
    sinks, slopes, seeds = jax.tree.map(own, (sinks, slopes, seeds))
    if blocks is not None and blocks.heads > 1:
        blocks = dataclasses.replace(blocks, table=own(blocks.table, heads=0))
    if indices is not None:
        indices = indices._replace(head=own(indices.head))
    return inputs._replace(shared=SharedInputs(sinks, slopes, seeds, blocks, indices, tables))


def ring_inputs(
    request: Request, inputs: AttentionInputs, target: Target | None = None
) -> AttentionInputs:
    """The inputs after the Ulysses all-to-all, with zeros in padding.

    With a ``target``, padding is zeroed only if the forward pass on it needs that.
    """
    axis, (query, kv, shared) = request.ulysses_axis, inputs
    q, k, v = (to_heads(x, axis, tokens=1, heads=2) for x in (query.q, kv.k, kv.v))
    q_arrays, kv_arrays = (
        {name: all_tokens(x, axis) for name, x in side.token_arrays.items()} for side in (query, kv)
    )
    sides = query._replace(q=q, **q_arrays), kv._replace(k=k, v=v, **kv_arrays)
    if shared.caller is not None:
        tables = shared.caller.with_tokens(functools.partial(all_tokens, axis_name=axis))
        shared = shared._replace(caller=tables)
    inputs = with_block_runs(request, AttentionInputs(*sides, shared))
    if target is None or not _zeroes_padding(request, target, inputs, backward=False):
        inputs = with_zeros(inputs)
    return inputs


def ring_forward(request: Request, target: Target, inputs: AttentionInputs) -> Carry:
    """The forward ring on :func:`ring_inputs`: out, and lse ``[B, N, T]``."""
    implementation = local_implementation(request, target, inputs)
    run = _PASSES[request.layout.attention_pass].forward
    results = run(request, implementation, kernel_inputs(implementation, inputs))
    return loop_results(implementation, results)


def _zeroes_padding(
    request: Request, target: Target, inputs: AttentionInputs, *, backward: bool
) -> bool:
    """Whether the forward or backward pass replaces what arrays hold in padding by zeros."""
    if not inputs.has_segments:
        return True
    implementation = local_implementation(request, target, inputs, backward=backward)
    run = _PASSES[request.layout.attention_pass]
    return run.zeroes_padding(request, implementation, inputs, backward=backward)


class Residuals(NamedTuple):
    """What the backward pass reads from the forward pass, for every implementation.

    Attributes:
      inputs: :func:`ring_inputs`; their padding holds zeros only if the forward pass needs them.
      out: ``[B, T, N, Hv]``, with this device's tokens and heads before the Ulysses all-to-all.
      lse: float32 ``[B, N, T]``, with its tokens and heads after the all-to-all.
      q_segment_ids: int32 ``[B, T]`` of its tokens before the all-to-all, or None.
      differentiated: the per-head parameters that need a gradient, and arrays ``[0]`` for the
        others: JAX requires one tree structure of residuals for all traces of a ``custom_vjp``,
        whatever is differentiated.
    """

    inputs: AttentionInputs
    out: jax.Array
    lse: jax.Array
    q_segment_ids: jax.Array | None
    differentiated: PerHead


def outputs_and_residuals(
    request: Request,
    inputs: AttentionInputs,
    of_ring: AttentionInputs,
    carry: Carry,
    differentiated: PerHead,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """Results and residuals of a ring's forward rule.

    ``of_ring`` are the :func:`ring_inputs` of ``inputs``, ``carry`` is their :func:`ring_forward`.
    """
    axis, (out, lse) = request.ulysses_axis, carry
    out = checkpoint_name(to_tokens(out, axis, tokens=1, heads=2), CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    lse_here = to_tokens(lse, axis, tokens=2, heads=1)
    ids = inputs.query.segment_ids
    return (out, lse_here), Residuals(of_ring, out, lse, ids, differentiated)


def _attend(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array]:
    """:func:`attend_shard` on prepared inputs, with lse ``[B, N, T]``; ``kv_heads`` is K."""
    return _attend_fwd(request, target, kv_heads, inputs)[0]


def _attend_fwd(
    request: Request,
    target: Target,
    kv_heads: int,
    inputs: AttentionInputs,
    differentiated: PerHead | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    del kv_heads
    of_ring = ring_inputs(request, inputs, target)
    carry = ring_forward(request, target, of_ring)
    return outputs_and_residuals(request, inputs, of_ring, carry, differentiated or {})


def _attend_with_parameters_fwd(
    request: Request, target: Target, kv_heads: int, primals: Any
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """:func:`_attend_fwd` on primals of ``symbolic_zeros``, which flag what is differentiated."""
    differentiated = {
        name: x.value if x.perturbed else x.value[:0] for name, x in primals.shared.per_head.items()
    }
    return _attend_fwd(request, target, kv_heads, primal_values(primals), differentiated)


def _rotation(request: Request, inputs: AttentionInputs) -> Rotation:
    """The side that rotates in the backward pass."""
    lengths, (q, k, v) = (inputs.q_length, inputs.kv_length), (inputs.query.q, *inputs.kv[:2])
    shape = ShardShape(
        *lengths, q.shape[2], k.shape[2], q.shape[3], q.dtype.itemsize, value_dim=v.shape[3]
    )
    return choose_rotation(
        request.rotation,
        shape,
        kv_hops=count_hops(request.route(*lengths)),
        query_hops=count_hops(request.route(*lengths, rotates_query=True)),
    )


def ring_backward(
    request: Request,
    target: Target,
    kv_heads: int,
    residuals: Residuals,
    cotangents: tuple[Any, Any],
) -> tuple[AttentionInputs]:
    """The backward rule of a ring: the gradients of its inputs."""
    (query, kv, shared), out, lse, segment_ids_here, parameters = residuals
    axis = request.ulysses_axis

    def zeros(aval: Any) -> jax.Array:
        return vary(jnp.zeros(aval.shape, aval.dtype), varying_axes(out))

    differentiated = [name for name, x in parameters.items() if x.shape[0]]
    request = request.differentiating(differentiated)
    do, dlse = (instantiated(x, zeros) for x in cotangents)
    zeroes_padding = _zeroes_padding(request, target, residuals.inputs, backward=True)
    if not zeroes_padding:
        do = without_padding(do, segment_ids_here)
        if _zeroes_padding(request, target, residuals.inputs, backward=False):
            query, kv, _ = with_zeros(residuals.inputs)
    # d logits = p (dO v - rowsum(dO O) + dlse): lse's gradient is one more term of delta.
    # XLA would give out and dO the layout of delta, heads first. In a scan over layers out is a
    # slice of a stack, which would be copied whole.
    products = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # XLA must not swap the axes within the reduction either: that kernel is six times slower.
    products = lax.optimization_barrier(row_major(products)).swapaxes(1, 2)
    if zeroes_padding:
        # After the reduction: XLA does not fuse this select into the reduction's kernel.
        products = without_padding(products, segment_ids_here, tokens=2)
    delta = products - without_padding(dlse, segment_ids_here, tokens=2)
    do = to_heads(do, axis, tokens=1, heads=2)
    delta = to_heads(delta, axis, tokens=2, heads=1)
    # A query that attends to nothing has no weights, and 0 times NaN is NaN.
    delta = jnp.where(lse == -jnp.inf, 0, delta)
    # The backward ring starts when all of its inputs are ready. Otherwise XLA would hoist one of
    # its permutes into the forward ring, where it would delay one that the forward pass waits for.
    # One device sends nothing, and without a barrier XLA computes all of delta in one kernel.
    arrays = query.q, do, (kv.k, kv.v), lse, delta
    q, do, (k, v), lse, delta = (
        lax.optimization_barrier(arrays) if request.ring_size > 1 else arrays
    )
    inputs = AttentionInputs(
        query._replace(q=q, do=do, stats=jnp.stack([lse, delta])), kv._replace(k=k, v=v), shared
    )
    implementation = local_implementation(request, target, inputs, backward=True)
    run = _PASSES[request.layout.attention_pass].backward
    results = run(
        request, implementation, kernel_inputs(implementation, inputs), _rotation(request, inputs)
    )
    dq, dkv, gradients = loop_results(implementation, results)
    dq, dkv = vary(dq, varying_axes(q)), vary(dkv, varying_axes(k, v))
    dq = gradient_to_tokens(dq, q.dtype, axis, heads_before=out.shape[2], tokens=1, heads=2)
    dk, dv = (
        gradient_to_tokens(x, q.dtype, axis, heads_before=kv_heads, tokens=1, heads=2) for x in dkv
    )
    if shared.sink_logits is not None:
        # The lse of padding is its head's sink, so lse's gradient there is part of the sink's.
        of_all = to_heads(products - dlse, axis, tokens=2, heads=1)
        gradients["sink_logits"] = sink_gradient(shared.sink_logits, lse, of_all)
    per_head = shared.per_head
    wanted = {name: vary(gradients[name], varying_axes(per_head[name])) for name in differentiated}
    return (AttentionInputs(QuerySide(dq), KVSide(dk, dv), SharedInputs().with_per_head(wanted)),)


_plain = jax.custom_vjp(_attend, nondiff_argnums=(0, 1, 2))
_plain.defvjp(_attend_fwd, ring_backward)

# Gradients of per-head parameters take time, so only those that are needed are computed; symbolic
# zeros show the forward rule which.
_differentiated = jax.custom_vjp(_attend, nondiff_argnums=(0, 1, 2))
_differentiated.defvjp(_attend_with_parameters_fwd, ring_backward, symbolic_zeros=True)

# A shard_map outside of any jax.jit runs operations one by one. JAX 0.11.2 crashes in the vmap of
# _Steps there, and no version can call a custom_vjp with symbolic zeros, but all can call a
# jax.jit around one.
_ring, _ring_with_parameters = (
    jax.jit(of_ring, static_argnums=(0, 1, 2), inline=True) for of_ring in (_plain, _differentiated)
)
