"""Runs kernels on padded arrays where they do not support a head dim or a length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import pad_axis
from pallas_kernels.backend import Dkv, Implementation
from pallas_kernels.inputs import AttentionInputs, Carry, PerHead

# ``(H, Hv) -> (H, Hv)`` of the arrays that a kernel runs on.
HeadDims = Callable[[int, int], tuple[int, int]]


def with_padding(
    implementation: Implementation,
    forward_dims: HeadDims,
    backward_dims: HeadDims,
    tokens: int = 1,
) -> Implementation:
    """``implementation``, run on arrays that are padded with zeros.

    Padded lanes change no result. Padded tokens have no position: kernels mask keys past the last
    position (:class:`pallas_kernels.mosaic.static.KernelStatic`).

    Args:
      implementation: supports the padded arrays.
      forward_dims: the padded head dims of the forward kernel.
      backward_dims: those of the backward kernel.
      tokens: padded lengths are multiples of it.
    """
    backward_kernel = implementation.backward
    assert backward_kernel is not None

    def padded(x: jax.Array, lanes: int) -> jax.Array:
        """``[B, T, N, H]``, with so many lanes."""
        return pad_axis(pad_axis(x, 1, -(-x.shape[1] // tokens) * tokens), -1, lanes)

    def padded_inputs(inputs: AttentionInputs, dims_of: HeadDims) -> AttentionInputs:
        head_dim, value_dim = dims_of(inputs.head_dim, inputs.value_dim)
        query, kv = inputs.query._replace(q=padded(inputs.query.q, head_dim)), inputs.kv
        if query.do is not None:
            query = query._replace(do=padded(query.do, value_dim))
        length = query.q.shape[1]
        if query.stats is not None and length != inputs.q_length:
            lse, delta = query.stats
            # The weights of a query without keys are 0.
            stats = pad_axis(lse, 2, length, -jnp.inf), pad_axis(delta, 2, length)
            query = query._replace(stats=jnp.stack(stats))
        kv = kv._replace(k=padded(kv.k, head_dim), v=padded(kv.v, value_dim))
        return inputs._replace(query=query, kv=kv)

    def forward(
        inputs: AttentionInputs, bounds: Any, carry: Carry | None = None, **options: Any
    ) -> Carry:
        given = padded_inputs(inputs, forward_dims)
        if carry is not None:
            carry = padded(carry[0], given.value_dim), carry[1]
        o, lse = implementation.forward(given, bounds, carry, **options)
        return _cut(o, inputs.q_length, inputs.value_dim), lse

    def backward(
        inputs: AttentionInputs,
        bounds: Any,
        dq: jax.Array | None = None,
        dkv: Dkv | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Dkv, PerHead]:
        given = padded_inputs(inputs, backward_dims)
        if dq is not None:
            dq = padded(dq, given.head_dim)
        if dkv is not None:
            dkv = padded(dkv[0], given.head_dim), padded(dkv[1], given.value_dim)
        dq, (dk, dv), per_head = backward_kernel(given, bounds, dq, dkv, **options)
        dk, dv = _cut(dk, *inputs.kv.k.shape[1::2]), _cut(dv, *inputs.kv.v.shape[1::2])
        return _cut(dq, inputs.q_length, inputs.head_dim), (dk, dv), per_head

    def forward_bounds(inputs: AttentionInputs, **options: Any) -> Any:
        return implementation.forward_bounds(padded_inputs(inputs, forward_dims), **options)

    def backward_bounds(inputs: AttentionInputs, **options: Any) -> Any:
        return implementation.backward_bounds(padded_inputs(inputs, backward_dims), **options)

    return dataclasses.replace(
        implementation,
        forward=forward,
        backward=backward,
        forward_bounds=forward_bounds,
        backward_bounds=backward_bounds,
    )


def _cut(x: jax.Array, length: int, lanes: int) -> jax.Array:
    """The part of ``[B, T, N, H]`` that is not padding."""
    return x[:, :length, :, :lanes]
