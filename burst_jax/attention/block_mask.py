"""The argument ``block_mask``, a block-sparse mask, and its computation from a ``mask_mod``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.attention.score_mod import MaskMod, check_function
from burst_jax.attention.validation import check_is_array
from burst_jax.errors import check_integer
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.request import Request
from pallas_kernels.elementwise import in_plain_jax


def with_block_mask(
    request: Request, query: jax.Array, key: jax.Array, block_mask: Any, devices: int = 1
) -> Request:
    """The request of a call with this ``block_mask``.

    Args:
      request: the call's request without it.
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      block_mask: the argument of this name, or None.
      devices: how many devices hold shards of this length of each sequence.

    Raises:
      ValueError: another dtype or shape, or block counts that do not divide the lengths.
      NotImplementedError: positions other than the layout's.
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
            "block_mask with query_offset, query_positions or key_value_positions: its table is "
            "indexed by the layout's positions, which begin at 0; leave them out, or express the "
            "mask by key_starts and key_ends"
        )
    blocks = Blocks(q_length // shape[-2], kv_length // shape[-1], shape[-2:])
    if isinstance(block_mask, np.ndarray):
        of_some_head = block_mask.reshape(-1, *shape[-2:]).any(0)
        blocks = dataclasses.replace(blocks, bits=np.packbits(of_some_head).tobytes())
    return dataclasses.replace(request, blocks=blocks)


def block_mask_of(
    mask_mod: MaskMod,
    q_length: int,
    kv_length: int,
    block_q: int,
    block_kv: int,
    *,
    num_heads: int | None = None,
    batch: int | None = None,
) -> np.ndarray:
    """The ``block_mask`` of a ``mask_mod``: which blocks contain an allowed score.

    Pass both to :func:`burst_jax.burst_attention`. Kernels skip tiles, and a ring skips steps, in
    which the table has no True block. In the other blocks ``mask_mod`` masks single scores::

        table = burst_jax.block_mask_of(mask_mod, length, length, 128, 128)
        burst_attention(query, key, value, mask_mod=mask_mod, block_mask=table)

    It evaluates ``mask_mod`` for all T S scores, on the CPU, one row of blocks at a time: call it
    once, outside of the training step. No ``[T, S]`` array is made.

    Args:
      mask_mod: ``f(batch, head, q_position, kv_position) -> bool``, as in
        :func:`burst_jax.burst_attention`.
      q_length: T, of whole sequences.
      kv_length: S.
      block_q: queries per block, a divisor of T. The Mosaic kernels (A100, H100) need blocks in
        which a device has a multiple of 64 neighboring queries and of 64 neighboring keys; others
        run by XLA.
      block_kv: keys per block, a divisor of S.
      num_heads: N, for one table per query head; required if the function reads the head.
      batch: B, required if the function reads the batch index. All sequences share the table: a
        block is True if it contains an allowed score in any sequence.

    Returns:
      bool ``[T / block_q, S / block_kv]``, with ``num_heads`` ``[N, T / block_q, S / block_kv]``.

    Raises:
      ValueError: a size is wrong or missing, or the function is not a mask.
    """
    lengths = {"q_length": q_length, "kv_length": kv_length}
    blocks = {"block_q": block_q, "block_kv": block_kv}
    for (of_length, length), (of_block, block) in zip(lengths.items(), blocks.items(), strict=True):
        if check_integer(of_length, length, 1) % check_integer(of_block, block, 1):
            raise ValueError(
                f"{of_block} is {block}, {of_length} {length}: blocks must divide the length"
            )
    traced = check_function("mask_mod", mask_mod)
    counts = {"batch": batch, "num_heads": num_heads}
    for argument, (name, count) in enumerate(counts.items()):
        if count is not None:
            check_integer(name, count, 1)
        elif traced.reads(argument):
            raise ValueError(f"{name} is None, and mask_mod reads it: pass the size, {name}=...")

    @jax.jit
    def of_head(head: jax.Array, rows: jax.Array) -> jax.Array:
        """bool ``[T / block_q, S / block_kv]``."""
        keys = jnp.arange(kv_length, dtype=jnp.int32)[None, :]

        def of_row(row: jax.Array) -> jax.Array:
            queries = row * block_q + jnp.arange(block_q, dtype=jnp.int32)[:, None]
            seen = in_plain_jax(mask_mod, rows[:, None, None], head, queries[None], keys[None])
            return seen.reshape(-1, kv_length // block_kv, block_kv).any((0, 2))

        return lax.map(of_row, jnp.arange(q_length // block_q, dtype=jnp.int32))

    cpu = jax.local_devices(backend="cpu")[0]
    with jax.ensure_compile_time_eval(), jax.default_device(cpu):
        rows = jnp.arange(batch or 1, dtype=jnp.int32)
        heads = jnp.arange(num_heads or 1, dtype=jnp.int32)
        tables = np.stack([np.asarray(of_head(head, rows)) for head in heads])
    return tables[0] if num_heads is None else tables
