"""Experts for the few tokens of a decoding step, which read each selected expert once.

An expert is selected if the router sends any of the tokens to it. All tokens go through every
selected expert, with a weight of 0 where they were not sent to it, so nothing is sorted or
gathered::

    tokens [n, D] -> gate, up [U, n, M], of the U selected experts -> hidden -> tokens [n, D]

The multiplications that this wastes take no time: for up to 64 tokens the products are bound by
reading the experts' weights. A shared expert of the same size is one more of the selected ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped import few_rows_product, supports_few_rows
from pallas_kernels.grouped_products import Slots


class SharedExpert(NamedTuple):
    """An expert of all tokens, with matrices like the others'.

    Attributes:
      gate: ``[D, M]``.
      up: ``[D, M]``.
      down: ``[M, D]``.
      weights: float32 ``[n, 1]``.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    weights: jax.Array


def can_decode(tokens: int, parameters: Any) -> bool:
    """Whether :func:`run_decoding` supports so many tokens, these weights and the device."""
    return supports_few_rows(tokens, parameters.gate, parameters.down)


def largest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` of float32 ``[n, E]``, by comparing each logit with all others.

    Two reductions, which XLA launches as two kernels. Its sort is one, and what reads the sorted
    rows are two more. Indices are valid for NaN, too: kernels read matrices by them.
    """
    index = lax.iota(jnp.int32, logits.shape[-1])
    this, other = logits[:, :, None], logits[:, None]
    before = (other > this) | ((other == this) & (index < index[:, None]))
    rank = jnp.sum(before, -1, dtype=jnp.int32)
    here = rank[:, None] == lax.iota(jnp.int32, count)[:, None]
    values = jnp.sum(jnp.where(here, logits[:, None], 0), -1)
    return values, jnp.max(jnp.where(here, index, 0), -1)


def run_decoding(
    hidden: Callable[[jax.Array, jax.Array], jax.Array],
    arrays: tuple[Any, jax.Array, jax.Array],
    ids: jax.Array,
    distinct: bool,
    shared: SharedExpert | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts, float32 ``[n, D]``, without the bias of down.

    Args:
      hidden: hidden features of the outputs of gate and up, float32.
      arrays: the experts' matrices and biases, tokens ``[n, D]``, and their experts' weights,
        float32 ``[n, k]``.
      ids: int32 ``[n, k]``; E is an expert of another device.
      distinct: whether there is one token, all of whose experts are on this device.
      shared: an expert that is added, without biases; or None.
    """
    parameters, tokens, weights = arrays
    count = parameters.gate.shape[0]
    if distinct:
        slots = Slots(ids.reshape(-1), jnp.full((1,), ids.size, jnp.int32))
        of_slots = weights.reshape(-1, 1)
    else:
        slots = _hit(ids, count)
        # A token is sent to an expert at most once.
        sent = ids[None] == slots.matrices[:, None, None]
        of_slots = jnp.where(sent, weights[None], 0).sum(-1)
    of_shared = () if shared is None else (shared.gate, shared.up)
    gate, up = few_rows_product(
        tokens[None], (parameters.gate, parameters.up), slots, summed=False, first=of_shared
    )
    for_slots = slots.matrices[:, None]
    if parameters.gate_bias is not None:
        gate = gate + parameters.gate_bias[for_slots]
        up = up + parameters.up_bias[for_slots]
    if shared is not None:
        of_slots = jnp.concatenate([shared.weights.T, of_slots])
    rows = (hidden(gate, up) * of_slots[..., None]).astype(tokens.dtype)
    of_shared = () if shared is None else (shared.down,)
    return few_rows_product(rows, (parameters.down,), slots, summed=True, first=of_shared)[0].sum(0)


def _hit(ids: jax.Array, count: int) -> Slots:
    """The experts, of ``count``, that any token was sent to, in ascending order."""
    expert = lax.iota(jnp.int32, count)
    hit = (ids.reshape(-1, 1) == expert).any(0)
    rank = jnp.where(hit & (expert <= expert[:, None]), 1, 0).sum(1, dtype=jnp.int32) - 1
    slot = lax.iota(jnp.int32, min(ids.size, count))
    here = hit & (rank == slot[:, None])
    matrices = jnp.where(here, expert, 0).sum(1, dtype=jnp.int32)
    return Slots(matrices, hit.sum(dtype=jnp.int32, keepdims=True))
