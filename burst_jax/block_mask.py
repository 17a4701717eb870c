"""The argument ``block_mask``: a table of which blocks of queries see which blocks of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from burst_jax.checks import check_is_array
from burst_jax.request import Request
from burst_jax.ring.blocks import Blocks


def with_block_mask(
    request: Request, query: jax.Array, key: jax.Array, block_mask: Any, devices: int = 1
) -> Request:
    """The request of a call with this ``block_mask``.

    Args:
      request: what the call asks for beside it.
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      block_mask: the argument of this name, or None.
      devices: how many devices hold as many tokens of each sequence as query and key have.

    Raises:
      ValueError: another dtype or shape, or numbers of blocks that do not divide the lengths.
      NotImplementedError: positions are not those of the layout.
    """
    if block_mask is None:
        return request
    q_length, kv_length = (x.shape[1] * devices for x in (query, key))
    heads = query.shape[2]
    check_is_array("block_mask", block_mask, "a bool array")
    shape = tuple(block_mask.shape)
    if block_mask.dtype != bool:
        raise ValueError(
            f"block_mask has dtype {block_mask.dtype}: convert it to bool, True where queries may "
            "see keys"
        )
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"block_mask has shape {shape}: it must be [T / bq, S / bk] or [N, T / bq, S / bk], "
            "for blocks of bq queries and bk keys"
        )
    if len(shape) == 3 and shape[0] != heads:
        raise ValueError(
            f"block_mask has shape {shape}, query {heads} heads: its first axis must be N, {heads} "
            "(in ring_attention the heads on one device), or leave it out for one table"
        )
    for what, side, count, length in (
        ("rows", "query", shape[-2], q_length),
        ("columns", "key", shape[-1], kv_length),
    ):
        if length % count:
            raise ValueError(
                f"block_mask has shape {shape}, {count} {what}, the whole {side} {length} tokens: "
                f"the {what} must divide the length; use blocks of a size that divides {length}, "
                "or pad the sequence to whole blocks (pad_to_layout)"
            )
    if request.query_offset != 0:
        raise NotImplementedError(
            "block_mask with query_offset, query_positions or key_value_positions: its table is by "
            "the layout's positions, which begin at 0; leave them out, or say what the table says "
            "by key_starts and key_ends"
        )
    blocks = Blocks(q_length // shape[-2], kv_length // shape[-1], shape[-2:])
    if isinstance(block_mask, np.ndarray):
        of_some_head = block_mask.reshape(-1, *shape[-2:]).any(0)
        blocks = dataclasses.replace(blocks, bits=np.packbits(of_some_head).tobytes())
    return dataclasses.replace(request, blocks=blocks)


def by_heads(block_mask: Any) -> jax.Array | None:
    """The table as bool ``[N or 1, rows, columns]``.

    A table of numpy's is a constant of the program. XLA computes ahead what follows from constants,
    and takes seconds for the sums over a large table. Behind the barrier it leaves them to the
    device, which makes them in microseconds.
    """
    if block_mask is None:
        return None
    return lax.optimization_barrier(block_mask if block_mask.ndim == 3 else block_mask[None])
