"""Calls of local attention as tests write them: bounds made, all gradients in one call."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels import AttentionInputs, GlobalIndices, KVSide, QuerySide, SharedInputs


def tokens(positions, segment_ids=None, **kv_bounds) -> Any:
    """What masks read of one side, as a side without q, k and v."""
    nothing: Any = None
    return QuerySide(nothing, positions, segment_ids, **kv_bounds)


def inputs_of(q, k, v, q_tokens, kv_tokens, numbers=None, seeds=None, blocks=None, functions=False):
    """The inputs of these arrays; ``functions``: whether global indices are read."""
    indices = GlobalIndices.of(q) if functions else None
    shared = SharedInputs(dropout_seeds=seeds, block_mask=blocks, indices=indices)
    return AttentionInputs(
        q_tokens._replace(q=q),
        KVSide(k, v, kv_tokens.positions, kv_tokens.segment_ids),
        shared.with_per_head(numbers or {}),
    )


def with_cotangents(inputs, do, stats):
    """The inputs of a backward pass; ``stats`` are lse and delta."""
    return inputs._replace(query=inputs.query._replace(do=do, stats=stats))


def forward(
    implementation,
    q,
    kv,
    q_tokens,
    kv_tokens,
    carry=None,
    *,
    spec,
    numbers=None,
    seeds=None,
    blocks=None,
    **options,
):
    """``(o, lse)``; ``kv`` is K and V, ``numbers`` are per-head parameters, ``seeds`` dropout's.

    ``blocks``: the block-sparse mask.
    """
    functions = spec.calls_functions
    inputs = inputs_of(q, kv[0], kv[1], q_tokens, kv_tokens, numbers, seeds, blocks, functions)
    bounds = implementation.forward_bounds(inputs, spec=spec)
    return implementation.forward(inputs, bounds, carry, spec=spec, **options)


def gradients(
    implementation, qdo, kv, stats, q_tokens, kv_tokens, dq=None, dkv=None, *, spec, part=None,
    numbers=None, seeds=None, blocks=None, out_dtype=None,
):  # fmt: skip
    """``(dq, (dk, dv), those of the numbers)``; dK and dV may be given stacked.

    ``part`` of the work is 0 or 1, None for all of it; ``out_dtype`` is the implementation's.
    """
    inputs = gradient_inputs(
        qdo, kv, stats, q_tokens, kv_tokens, spec=spec, numbers=numbers, seeds=seeds, blocks=blocks
    )
    bounds = implementation.backward_bounds(inputs, spec=spec)
    if part is not None:
        bounds = implementation.split_backward(bounds, inputs, spec=spec)[part]
    dkv = dkv if dkv is None or isinstance(dkv, tuple) else tuple(dkv)
    return implementation.backward(inputs, bounds, dq, dkv, spec=spec, out_dtype=out_dtype)


def gradient_inputs(
    qdo, kv, stats, q_tokens, kv_tokens, *, spec, numbers=None, seeds=None, blocks=None
):
    """The inputs of :func:`gradients`."""
    functions = spec.calls_functions
    inputs = inputs_of(qdo[0], kv[0], kv[1], q_tokens, kv_tokens, numbers, seeds, blocks, functions)
    return with_cotangents(inputs, qdo[1], jnp.stack(stats))


def dq_zeros(implementation, calls, *, spec, **of_heads):
    """The accumulator before these calls of :func:`gradients`, in each of which keys differ."""
    zeros, maxima = implementation.dq_accumulator.zeros, []
    for call in calls:
        inputs = gradient_inputs(*call, spec=spec, **of_heads)
        bounds = implementation.backward_bounds(inputs, spec=spec)
        zeros(inputs, bounds, spec=spec, maximum=lambda x: maxima.append(x) or x)
    return zeros(inputs, bounds, spec=spec, maximum=lambda _: functools.reduce(jnp.maximum, maxima))


def backward(*args, **options):
    """``(dq, dkv)`` of :func:`gradients`, dK and dV stacked, without per-head parameters."""
    dq, dkv, of_numbers = gradients(*args, **options)
    assert of_numbers == {}
    return dq, jnp.stack(dkv)
