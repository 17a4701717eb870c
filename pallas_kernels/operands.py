"""The arrays of one local attention, as one record."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_mask import BlockMask
from pallas_kernels.dropout import row_numbers
from pallas_kernels.elementwise import Numbering, Places
from pallas_kernels.mask import Mask, end_of_keys_in_window, first_key_in_window
from pallas_kernels.score import BIAS_NUMBERS, LOGITS_NUMBERS, START_NUMBER

# The softmax over some keys: o float32 [B, T, N, Hv], and lse float32 [B, N, T].
Carry = tuple[jax.Array, jax.Array]
# Float32 arrays [N], one number for each query head, by the public argument's name.
PerHead = dict[str, jax.Array]


class Tokens(NamedTuple):
    """Which tokens one side of a local attention holds, in index order.

    Attributes:
      positions: int32 ``[length]``, each token's place in the whole sequence. Ascending positions
        give the tightest tile bounds; any order is right.
      segment_ids: int32 ``[B, length]`` or None. A query sees keys of its own segment only, and
        segment 0 is padding: it sees nothing and is seen by nothing.
      key_starts: of queries only, int32 ``[B or 1, length]`` or None: each query sees keys at this
        position and behind it only.
      key_ends: of queries only, int32 ``[B or 1, length]`` or None: each query sees keys before
        this position only.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    key_starts: jax.Array | None = None
    key_ends: jax.Array | None = None

    @property
    def key_ranges(self) -> dict[str, jax.Array]:
        """``key_starts`` and ``key_ends`` by name, those that there are."""
        given = {"key_starts": self.key_starts, "key_ends": self.key_ends}
        return {name: x for name, x in given.items() if x is not None}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Everything that a local attention reads, forward and backward. A pytree.

    Letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dim of
    queries and keys, Hv head dim of values.

    Attributes:
      q: ``[B, T, N, H]``.
      k: ``[B, S, K, H]``. Query head h uses key/value head ``h // (N // K)``.
      v: ``[B, S, K, Hv]``.
      q_tokens: positions and segment ids of the queries, and where the keys that they see start
        and end.
      kv_tokens: positions and segment ids of the keys.
      per_head: "alibi_slopes" and "sink_logits" (:mod:`pallas_kernels.score`), float32 ``[N]``;
        each only if the call has it.
      dropout_seeds: int32 ``[B, N]``, where weights are dropped (:mod:`pallas_kernels.dropout`).
      block_mask: which blocks of queries see which blocks of keys; None if blocks hide nothing.
      numbering: which rows of the batch and which heads these are, where functions of the caller's
        read that (:mod:`pallas_kernels.elementwise`).
      bounds: which tiles to visit: what the implementation's ``forward_bounds`` or
        ``backward_bounds`` made of these operands.
      do: backward only: the gradient of o, ``[B, T, N, Hv]``.
      stats: backward only: float32 ``[2, B, N, T]``, lse over all keys of the whole sequence, and
        delta, which is ``rowsum(do * o)`` less the gradient of lse.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_tokens: Tokens
    kv_tokens: Tokens
    per_head: PerHead = dataclasses.field(default_factory=dict)
    dropout_seeds: jax.Array | None = None
    block_mask: BlockMask | None = None
    bounds: Any = None
    do: jax.Array | None = None
    stats: jax.Array | None = None
    numbering: Numbering | None = None

    @property
    def q_length(self) -> int:
        """T."""
        return self.q.shape[1]

    @property
    def kv_length(self) -> int:
        """S."""
        return self.k.shape[1]

    @property
    def groups(self) -> int:
        """N // K: how many query heads share a key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """H, of queries and keys."""
        return self.q.shape[3]

    @property
    def value_dim(self) -> int:
        """Hv, of values, of o and of its gradient."""
        return self.v.shape[3]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``[B, T, N, Hv]``, the shape of o."""
        return (*self.q.shape[:3], self.value_dim)

    @property
    def logits_per_head(self) -> PerHead:
        """The per-head arrays that logits are made with."""
        return {name: x for name, x in self.per_head.items() if name in LOGITS_NUMBERS}

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the logits because of where the tokens are."""
        return any(name in self.per_head for name in BIAS_NUMBERS)

    @property
    def sink(self) -> jax.Array | None:
        """The logit of each head, ``[N]``, that a softmax without a carry starts with."""
        return self.per_head.get(START_NUMBER)

    @property
    def has_segments(self) -> bool:
        """Whether tokens belong to segments."""
        return self.q_tokens.segment_ids is not None

    @property
    def has_key_ranges(self) -> bool:
        """Whether queries say themselves where the keys that they see start or end."""
        return bool(self.q_tokens.key_ranges)

    def tested(self, mask: Mask) -> tuple[Mask, dict[str, jax.Array]]:
        """``(mask, key ranges)`` that a kernel tests scores by, with few numbers of each query.

        Where queries have ranges of keys, the mask's window is made a part of them. So a test needs
        two numbers of a query at most, and not its position.
        """
        ranges = self.q_tokens.key_ranges
        if not ranges:
            return mask, ranges
        positions = self.q_tokens.positions
        if mask.left is not None:
            start = first_key_in_window(positions, mask.left)[None]
            ranges["key_starts"] = jnp.maximum(ranges.get("key_starts", start), start)
        if mask.right is not None:
            end = end_of_keys_in_window(positions, mask.right)[None]
            ranges["key_ends"] = jnp.minimum(ranges.get("key_ends", end), end)
        return dataclasses.replace(mask, left=None, right=None), ranges

    def places(self, q_positions: jax.Array, kv_positions: jax.Array) -> Places | None:
        """Where the scores ``[B, K, G, T, S]`` of some tokens are; None if no function reads that.

        The positions are shaped to broadcast against the scores.
        """
        if self.numbering is None:
            return None
        batch, head = self.numbering
        heads = head.reshape(1, -1, self.groups, 1, 1)
        return Places(batch.reshape(-1, 1, 1, 1, 1), heads, q_positions, kv_positions)

    @property
    def dropout_rows(self) -> jax.Array:
        """The number of every row of weights, ``[B, N, T]``; of operands with dropout."""
        assert self.dropout_seeds is not None
        return row_numbers(self.dropout_seeds[:, :, None], self.q_tokens.positions[None, None, :])

    def cotangents(self) -> tuple[jax.Array, jax.Array]:
        """``(do, stats)`` of the operands of a backward, which have both."""
        assert self.do is not None
        assert self.stats is not None
        return self.do, self.stats

    def replace(self, **changes: Any) -> Operands:
        """The same operands but for ``changes``."""
        return dataclasses.replace(self, **changes)
