"""Half-sequence remat: the backward pass recomputes the first half and saves the second.

Under a causal mask the queries of the first half attend to keys of the first half alone, a quarter
of the work. A backward pass that saves ``out`` and ``lse`` of the second half recomputes those of
the first half, by a ring over the first half of every shard. BurstEngine (arXiv 2509.19836) calls
this sequence-level selective checkpointing. 4 devices, 16 tokens::

              zigzag      saved     recomputed      striped      saved   recomputed
    shard 0   0 1 14 15   14 15     0 1             0 4 8  12    8  12   0 4
    shard 1   2 3 12 13   12 13     2 3             1 5 9  13    9  13   1 5
    shard 2   4 5 10 11   10 11     4 5             2 6 10 14    10 14   2 6
    shard 3   6 7 8  9    8  9      6 7             3 7 11 15    11 15   3 7

The first halves of striped shards are a striped layout of the sequence's first half. (Stripes of
several tokens are recomputed whole.) Those of zigzag shards are a contiguous layout, under which
the first devices have the least work and the last ones the most. So they are redistributed to
zigzag shards before the ring, and the results are redistributed back after it::

    first halves   0 1 | 2 3 | 4 5 | 6 7      redistributed   0 7 | 1 6 | 2 5 | 3 4
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.layout import FirstHalf, Layout
from burst_jax.ring.local import with_block_runs
from burst_jax.ring.request import Request
from burst_jax.ring.route import Route, scores_per_step
from burst_jax.ring.vjp import (
    Residuals,
    outputs_and_residuals,
    prepared,
    ring_backward,
    ring_forward,
    ring_inputs,
)
from pallas_kernels import AttentionInputs
from pallas_kernels.device import Target, current_target
from pallas_kernels.inputs import Carry


def attend_saving_half(
    request: Request, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array, Carry]:
    """:func:`burst_jax.ring.vjp.attend_shard`, and what :func:`attend_recomputing_half` needs.

    It is for the forward rule of a ``jax.custom_vjp``, and has no gradient of its own.

    Returns:
      ``(out, lse, saved)``; ``saved`` has out ``[B, T / 2, N, Hv]`` and lse ``[B, N, T / 2]`` of
      the second half, with this device's tokens and heads after the Ulysses all-to-all.

    Raises:
      ValueError: the mask is not causal, or the numbers of queries and keys differ.
      NotImplementedError: the layout is balanced, or contiguous over several devices.
    """
    inputs = prepared(request, inputs)
    of_ring = ring_inputs(request, inputs)
    _check(request, of_ring)
    out, lse = ring_forward(request, current_target(), of_ring)
    first, _ = _first_half(request, of_ring.q_length)
    saved = out[:, first:], lse[:, :, first:]
    (out, lse), _ = outputs_and_residuals(request, inputs, of_ring, (out, lse), {})
    return out, lse.swapaxes(1, 2), saved


def attend_recomputing_half(
    request: Request, inputs: AttentionInputs, saved: Carry
) -> tuple[jax.Array, jax.Array]:
    """:func:`burst_jax.ring.vjp.attend_shard`, computing the first half of the sequence only.

    ``request`` and ``inputs`` are those of :func:`attend_saving_half`, ``saved`` is what it saved.
    The gradients of ``inputs`` are those of the whole attention; ``saved`` has none.
    """
    inputs = prepared(request, inputs)
    out, lse = _recompute(request, current_target(), inputs.kv.k.shape[2], inputs, saved)
    return out, lse.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recompute(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs, saved: Carry
) -> tuple[jax.Array, jax.Array]:
    return _recompute_fwd(request, target, kv_heads, inputs, saved)[0]


def _recompute_fwd(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs, saved: Carry
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    del kv_heads
    of_ring = ring_inputs(request, inputs)
    out, lse = _attend_first_half(request, target, of_ring)
    whole = jnp.concatenate([out, saved[0]], 1), jnp.concatenate([lse, saved[1]], 2)
    # Without the barriers XLA gives the two halves to an all-to-all that splits the whole in the
    # middle. Their memory layouts differ, and its own verifier then rejects the program.
    out, lse = (lax.optimization_barrier(x) for x in whole)
    per_head = inputs.shared.per_head
    return outputs_and_residuals(request, inputs, of_ring, (out, lse), per_head)


def _recompute_bwd(
    request: Request, target: Target, kv_heads: int, residuals: Residuals, cotangents: Any
) -> tuple[AttentionInputs, None]:
    return *ring_backward(request, target, kv_heads, residuals, cotangents), None


_recompute.defvjp(_recompute_fwd, _recompute_bwd)


def _check(request: Request, inputs: AttentionInputs) -> None:
    """Raises unless queries of the first half attend to keys of the first half alone."""
    instead = 'save all of it (remat="attention")'
    if request.spec.mask.right != 0:
        raise ValueError(
            "is_causal is False, or prefix_lengths lifts it: queries of the first half of the "
            "sequence then attend to keys of the second half, and half of the attention cannot be "
            f"recomputed alone; {instead}"
        )
    reason = request.layout.lacks_first_half(request.ring_size)
    if reason is not None:
        raise NotImplementedError(f'{reason}; use layout="zigzag" or "striped", or {instead}')
    if request.query_offset != 0:
        raise ValueError(
            "query_offset, query_positions or key_value_positions are given: half-sequence remat "
            f"requires queries and keys at the layout's own positions; {instead}"
        )
    queries, keys = inputs.q_length, inputs.kv_length
    if queries != keys:
        raise ValueError(
            f"query has {queries} tokens per shard, key {keys}: half-sequence remat requires that "
            f"both are one sequence; {instead}"
        )


def _first_half(request: Request, shard_length: int) -> FirstHalf:
    return request.layout.first_half(shard_length, request.ring_size)


def first_half_request(request: Request, shard_length: int) -> Request:
    """The request for the first half of every shard, in the layout of the recomputing ring.

    Of the layouts that are possible for those tokens, it has the one whose busiest devices have the
    least work: under a causal mask zigzag instead of contiguous, with a short window contiguous.
    """
    tokens, layouts = _first_half(request, shard_length)
    fitting = [layout for layout in layouts if tokens % layout.unit == 0]
    if len(fitting) > 1:
        fitting.sort(key=lambda layout: _busiest(_in_layout(request, layout), tokens))
    return _in_layout(request, fitting[0])


def _in_layout(request: Request, layout: Layout) -> Request:
    return dataclasses.replace(request, layout=layout)


def _busiest(request: Request, tokens: int) -> float:
    """The scores of each step's busiest device, summed over a ring's steps."""
    scores = scores_per_step(request.route(tokens, tokens), request.ring_mask(tokens, tokens))
    return sum(most for most, _ in scores.values())


def _attend_first_half(request: Request, target: Target, inputs: AttentionInputs) -> Carry:
    """Out and lse of the first half of every shard, by a ring over these halves."""
    tokens, (held, *_) = _first_half(request, inputs.q_length)
    query, kv = jax.tree.map(lambda x: x[:, :tokens], (inputs.query, inputs.kv))
    request = first_half_request(request, inputs.q_length)
    route = request.route(tokens, tokens)
    redistributed = request.layout != held
    if redistributed:
        query, kv = redistribute(route, (query, kv))
    inputs = with_block_runs(request, AttentionInputs(query, kv, inputs.shared))
    out, lse = ring_forward(request, target, inputs)
    if redistributed:
        out, lse = redistribute_back(route, (out, lse.swapaxes(1, 2)))
        lse = lse.swapaxes(1, 2)
    return out, lse


def _targets(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The devices to which each of ``size`` devices sends its two blocks.

    Device r has blocks 2r and 2r+1 of 2n, and in zigzag blocks r and 2n-1-r. One of those is even
    and the other odd, so every device receives one even and one odd block.
    """
    blocks = np.arange(2 * size)
    targets = np.minimum(blocks, 2 * size - 1 - blocks)
    return targets[::2], targets[1::2]


def redistribute[Tree](route: Route, tree: Tree) -> Tree:
    """Arrays ``[B, tokens, ...]`` of contiguous shards as those of zigzag shards."""
    halves = zip(_split(tree), _targets(route.size), strict=True)
    even, odd = (route.permute(x, to) for x, to in halves)
    return _join(*_ordered(route, even, odd))


def redistribute_back[Tree](route: Route, tree: Tree) -> Tree:
    """The inverse of :func:`redistribute`."""
    blocks = _ordered(route, *_split(tree))
    sources = (np.argsort(to) for to in _targets(route.size))
    return _join(*(route.permute(x, to) for x, to in zip(blocks, sources, strict=True)))


def _ordered[Tree](route: Route, one: Tree, other: Tree) -> tuple[Tree, Tree]:
    """The pair on even devices, swapped on odd devices, whose first block is odd."""
    even = lax.rem(jnp.asarray(route.source(route.local), jnp.int32), np.int32(2)) == 0

    def pick(x: Tree, y: Tree) -> Tree:
        return jax.tree.map(functools.partial(jnp.where, even), x, y)

    return pick(one, other), pick(other, one)


def _split[Tree](tree: Tree) -> tuple[Tree, Tree]:
    """Arrays ``[B, tokens, ...]`` as those of the first and of the second half of the tokens."""

    def half(index: int) -> Tree:
        return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[index], tree)

    return half(0), half(1)


def _join[Tree](first: Tree, second: Tree) -> Tree:
    """The inverse of :func:`_split`."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), first, second)
