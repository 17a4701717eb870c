"""A ring whose backward pass has its results of the second half of the sequence only.

Under a causal mask the queries of the first half see keys of the first half alone, so their
attention is a quarter of the work. A backward pass that keeps ``out`` and ``lse`` of the second
half makes those of the first half again, by a ring over the first half of every shard. BurstEngine
(arXiv 2509.19836) calls that sequence-level selective checkpointing. 4 devices, 16 tokens::

              zigzag      kept      made again      striped      kept    made again
    shard 0   0 1 14 15   14 15     0 1             0 4 8  12    8  12   0 4
    shard 1   2 3 12 13   12 13     2 3             1 5 9  13    9  13   1 5
    shard 2   4 5 10 11   10 11     4 5             2 6 10 14    10 14   2 6
    shard 3   6 7 8  9    8  9      6 7             3 7 11 15    11 15   3 7

The first halves of striped shards are a striped layout of the sequence's first half. (Of stripes of
several tokens only whole ones are made again.) Those of zigzag shards are a contiguous one, under
which the first devices have little to do and the last ones most. So they are dealt out as zigzag
before the ring, and its results come back after it::

    first halves   0 1 | 2 3 | 4 5 | 6 7      dealt   0 7 | 1 6 | 2 5 | 3 4
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.permutation import stripe_size
from burst_jax.parallel.target import Target, current_target
from burst_jax.ring.local import with_block_runs
from burst_jax.ring.request import Request
from burst_jax.ring.route import Route
from burst_jax.ring.vjp import (
    Residuals,
    attend_exchanged,
    exchanged,
    for_ring,
    given_back,
    marked_numbers,
    ring_gradient,
)
from burst_jax.ring.work import scores_by_stop
from pallas_kernels import AttentionInputs
from pallas_kernels.inputs import Carry


class SecondHalf(NamedTuple):
    """A ring's results for the queries of the second half of the sequence.

    Attributes:
      out: ``[B, T / 2, N, Hv]``, with the tokens and heads that this device has in the ring.
      lse: float32 ``[B, N, T / 2]``, likewise.
    """

    out: jax.Array
    lse: jax.Array


def attend_keeping_half(
    request: Request, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array, SecondHalf]:
    """:func:`burst_jax.ring.vjp.attend_shard`, and what :func:`attend_again` needs of it.

    It is for the forward rule of a ``jax.custom_vjp``, and has no gradient of its own.

    Returns:
      ``(out, lse, second half)``.

    Raises:
      ValueError: the mask is not causal, or there are more keys than queries or fewer.
      NotImplementedError: the layout is contiguous, over several devices.
    """
    inputs = for_ring(request, inputs)
    ran_on = exchanged(request, inputs)
    _check(request, ran_on)
    out, lse = attend_exchanged(request, current_target(), ran_on)
    first = _first_tokens(request, ran_on)
    kept = SecondHalf(out[:, first:], lse[:, :, first:])
    (out, lse), _ = given_back(request, inputs, ran_on, (out, lse), None)
    return out, lse.swapaxes(1, 2), kept


def attend_again(
    request: Request, inputs: AttentionInputs, kept: SecondHalf
) -> tuple[jax.Array, jax.Array]:
    """:func:`burst_jax.ring.vjp.attend_shard`, which computes the first half of the sequence only.

    Args:
      request: the one of :func:`attend_keeping_half`.
      inputs: the same arrays again. They have gradients, those of the whole attention.
      kept: what :func:`attend_keeping_half` kept. It has no gradient.

    Returns:
      ``(out, lse)``.
    """
    inputs = for_ring(request, inputs)
    out, lse = _again(request, current_target(), inputs.kv.k.shape[2], inputs, kept)
    return out, lse.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _again(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs, kept: SecondHalf
) -> tuple[jax.Array, jax.Array]:
    return _again_fwd(request, target, kv_heads, inputs, kept)[0]


def _again_fwd(
    request: Request, target: Target, kv_heads: int, inputs: AttentionInputs, kept: SecondHalf
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    del kv_heads
    ran_on = exchanged(request, inputs)
    out, lse = _attend_first(request, target, ran_on)
    whole = jnp.concatenate([out, kept.out], 1), jnp.concatenate([lse, kept.lse], 2)
    # Without the barriers XLA gives the two halves to an all-to-all that splits the whole in the
    # middle. They lie in memory in different ways, and its own verifier then refuses the program.
    out, lse = (lax.optimization_barrier(x) for x in whole)
    numbers = inputs.shared.per_head
    differentiated = marked_numbers(numbers, numbers) if numbers else None
    return given_back(request, inputs, ran_on, (out, lse), differentiated)


def _again_bwd(
    request: Request, target: Target, kv_heads: int, residuals: Residuals, cotangents: Any
) -> tuple[AttentionInputs, None]:
    return *ring_gradient(request, target, kv_heads, residuals, cotangents), None


_again.defvjp(_again_fwd, _again_bwd)


def _check(request: Request, inputs: AttentionInputs) -> None:
    """Raises unless the first half of the queries sees the first half of the keys alone."""
    instead = 'keep all of it (remat="attention")'
    if request.spec.mask.right != 0:
        raise ValueError(
            "is_causal is False, or prefix_lengths lifts it: queries of the first half of the "
            "sequence then see keys of the second half, and a half of the attention cannot be made "
            f"again alone; {instead}"
        )
    if request.query_offset != 0:
        raise ValueError(
            "query_offset, query_positions or key_value_positions are given: half of an attention "
            f"can be kept where queries and keys are at the layout's own positions; {instead}"
        )
    queries, keys = inputs.q_length, inputs.kv_length
    if queries != keys:
        raise ValueError(
            f"query has {queries} tokens per shard, key {keys}: half of an attention can be kept "
            f"where both are one sequence; {instead}"
        )
    if request.layout == "contiguous" and request.ring_size > 1:
        raise NotImplementedError(
            f"layout is 'contiguous' over {request.ring_size} devices, and half of them hold the "
            "first half of the sequence: no device would keep half of the attention's results; "
            f'use layout="zigzag" or "striped", or {instead}'
        )


def _first_tokens(request: Request, inputs: AttentionInputs) -> int:
    """How many tokens of a shard are made again: half of them, or half a stripe more."""
    stripe = stripe_size(request.layout) or 1
    return -(-inputs.q_length // (2 * stripe)) * stripe


def first_half(request: Request, tokens: int) -> Request:
    """The request for the first ``tokens`` of every shard, in the order in which its ring runs.

    Of the orders that those tokens can have it is the one whose busiest devices have least to do.
    Under a causal mask that is zigzag instead of contiguous. With a short window it is contiguous.
    """
    if stripe_size(request.layout) is not None:
        return request
    contiguous, zigzag = (
        dataclasses.replace(request, layout=layout) for layout in ("contiguous", "zigzag")
    )
    if tokens % 2 or _busiest(contiguous, tokens) <= _busiest(zigzag, tokens):
        return contiguous
    return zigzag


def _busiest(request: Request, tokens: int) -> float:
    """Scores of the busiest device of each step, summed over a ring's steps."""
    scores = scores_by_stop(request.route(tokens, tokens), request.ring_mask(tokens, tokens))
    return sum(most for most, _ in scores.values())


def _attend_first(request: Request, target: Target, inputs: AttentionInputs) -> Carry:
    """Out and lse of the first half of every shard, by a ring over these halves."""
    tokens = _first_tokens(request, inputs)
    query, kv = jax.tree.map(lambda x: x[:, :tokens], (inputs.query, inputs.kv))
    ring = first_half(request, tokens)
    route = ring.route(tokens, tokens)
    dealt = ring.layout == "zigzag"
    if dealt:
        query, kv = deal(route, (query, kv))
    inputs = with_block_runs(ring, AttentionInputs(query, kv, inputs.shared))
    out, lse = attend_exchanged(ring, target, inputs)
    if dealt:
        out, lse = deal_back(route, (out, lse.swapaxes(1, 2)))
        lse = lse.swapaxes(1, 2)
    return out, lse


def _owners(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The devices to which each of ``size`` devices deals its two blocks.

    Device r has blocks 2r and 2r+1 of 2n, and of zigzag's blocks r and 2n-1-r. One of those has an
    even number and the other an odd one, so every device gets one even and one odd block.
    """
    blocks = np.arange(2 * size)
    owners = np.minimum(blocks, 2 * size - 1 - blocks)
    return owners[::2], owners[1::2]


def deal[Tree](route: Route, tree: Tree) -> Tree:
    """Arrays ``[B, tokens, ...]`` of contiguous shards as those of zigzag shards."""
    even, odd = (route.send(x, to) for x, to in zip(_cut(tree), _owners(route.size), strict=True))
    return _paste(*_swapped(route, even, odd))


def deal_back[Tree](route: Route, tree: Tree) -> Tree:
    """The inverse of :func:`deal`."""
    blocks = _swapped(route, *_cut(tree))
    homes = (np.argsort(to) for to in _owners(route.size))
    return _paste(*(route.send(x, to) for x, to in zip(blocks, homes, strict=True)))


def _swapped[Tree](route: Route, one: Tree, other: Tree) -> tuple[Tree, Tree]:
    """The pair on devices of even number, turned round on the others, whose first block is odd."""
    even = lax.rem(jnp.asarray(route.source(route.home), jnp.int32), np.int32(2)) == 0

    def pick(x: Tree, y: Tree) -> Tree:
        return jax.tree.map(functools.partial(jnp.where, even), x, y)

    return pick(one, other), pick(other, one)


def _cut[Tree](tree: Tree) -> tuple[Tree, Tree]:
    """Arrays ``[B, tokens, ...]`` as those of the first and of the second half of the tokens."""

    def half(index: int) -> Tree:
        return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[index], tree)

    return half(0), half(1)


def _paste[Tree](first: Tree, second: Tree) -> Tree:
    """The inverse of :func:`_cut`."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), first, second)
