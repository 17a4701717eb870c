"""The arrays of one local attention: the query side, the KV side, and what both share.

A ring sends either side unchanged, and kernels read both without conversion.

Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim of
queries and keys, Hv head dim of values. Lengths are one device's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_mask import BlockMask
from pallas_kernels.dropout import row_hashes
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.mask import Mask, end_of_keys_in_window, first_key_in_window

# (o, lse) of attention over some keys: o float32 [B, T, N, Hv], and lse float32 [B, N, T].
Carry = tuple[jax.Array, jax.Array]
# Float32 arrays [N], one value per query head, by the public argument's name.
PerHead = dict[str, jax.Array]


class QuerySide(NamedTuple):
    """The queries of one device, with everything that is indexed by query.

    Attributes:
      q: ``[B, T, N, H]``.
      positions: int32 ``[T]``, the position of each query in the whole sequence; None where the
        ring's layout defines them, and where only shapes and dtypes are read. Ascending positions
        give the tightest tile bounds, but any order is correct.
      segment_ids: int32 ``[B, T]``, or None. A query attends to keys of its own segment only.
        Segment 0 is padding: it attends to nothing, and nothing attends to it.
      kv_starts: int32 ``[B or 1, T]``, or None: per-query lower bound, inclusive, on key positions.
      kv_ends: int32 ``[B or 1, T]``, or None: per-query upper bound, exclusive, on key positions.
      do: gradient of o, ``[B, T, N, Hv]``; None in the forward pass.
      stats: float32 ``[2, B, N, T]``: lse over the keys of the whole sequence, and delta, which is
        ``rowsum(do * o)`` minus the gradient of lse. One array, so that a ring sends both with one
        permute. None in the forward pass.
    """

    q: jax.Array
    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None
    kv_starts: jax.Array | None = None
    kv_ends: jax.Array | None = None
    do: jax.Array | None = None
    stats: jax.Array | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.q.shape[1]

    @property
    def kv_bounds(self) -> dict[str, jax.Array]:
        """``kv_starts`` and ``kv_ends`` by name, without those that are None."""
        given = {"kv_starts": self.kv_starts, "kv_ends": self.kv_ends}
        return {name: x for name, x in given.items() if x is not None}

    @property
    def token_arrays(self) -> dict[str, jax.Array]:
        """The arrays of this side that masks read, by name, without those that are None."""
        given = {"positions": self.positions, "segment_ids": self.segment_ids}
        return {name: x for name, x in given.items() if x is not None} | self.kv_bounds


class KVSide(NamedTuple):
    """The keys and values of one device, with everything that is indexed by key.

    Attributes:
      k: ``[B, S, K, H]``. Query head h uses key/value head ``h // (N // K)``.
      v: ``[B, S, K, Hv]``.
      positions: int32 ``[S]``, as :attr:`QuerySide.positions`.
      segment_ids: int32 ``[B, S]``, or None.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None

    @property
    def length(self) -> int:
        """S."""
        return self.k.shape[1]

    @property
    def token_arrays(self) -> dict[str, jax.Array]:
        """The arrays of this side that masks read, by name, without those that are None."""
        given = {"positions": self.positions, "segment_ids": self.segment_ids}
        return {name: x for name, x in given.items() if x is not None}


# What a ring rotates: either side of the attention.
Side = QuerySide | KVSide


class GlobalIndices(NamedTuple):
    """The global indices of a device's batch and heads, which ``score_mod`` and ``mask_mod`` read.

    Attributes:
      batch: int32 ``[B]``, the index of each sequence in the whole batch.
      head: int32 ``[N]``, the index of each query head among all heads.
    """

    batch: Any
    head: Any

    @classmethod
    def of(cls, query: jax.Array) -> GlobalIndices:
        """The indices on a device with the whole batch and all heads of ``query``."""
        return cls(*(jnp.arange(query.shape[axis], dtype=jnp.int32) for axis in (0, 2)))


class SharedInputs(NamedTuple):
    """Inputs that a ring never sends: each device reads its own.

    Attributes:
      sink_logits: float32 ``[N]``, one more logit per head in the softmax; None without.
      alibi_slopes: float32 ``[N]``, ALiBi slopes (:mod:`pallas_kernels.score`); None without.
      dropout_seeds: int32 ``[B, N]`` (:mod:`pallas_kernels.dropout`); None without dropout.
      block_mask: the block-sparse mask (:mod:`pallas_kernels.block_mask`); None without.
      indices: global batch and head indices; None unless ``score_mod`` or ``mask_mod`` is given.
      caller: a pytree of arrays for whoever calls local attention, which does not read it.
    """

    sink_logits: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    dropout_seeds: jax.Array | None = None
    block_mask: BlockMask | None = None
    indices: GlobalIndices | None = None
    caller: Any = None

    @property
    def per_head(self) -> PerHead:
        """The per-head parameters by name, without those that are None."""
        given = {"sink_logits": self.sink_logits, "alibi_slopes": self.alibi_slopes}
        return {name: x for name, x in given.items() if x is not None}

    def with_per_head(self, per_head: PerHead) -> SharedInputs:
        """These inputs with other per-head parameters; those not in ``per_head`` are None."""
        sinks, slopes = per_head.get("sink_logits"), per_head.get("alibi_slopes")
        return self._replace(sink_logits=sinks, alibi_slopes=slopes)

    @property
    def score_parameters(self) -> PerHead:
        """The per-head parameters that scores are computed from, by name."""
        return {} if self.alibi_slopes is None else {"alibi_slopes": self.alibi_slopes}


class AttentionInputs(NamedTuple):
    """Everything that local attention reads, forward and backward, apart from its tile bounds.

    A pytree. :func:`pallas_kernels.resolve` and the ``unsupported`` checks read shapes and dtypes
    only, so they accept ``jax.ShapeDtypeStruct`` leaves.

    Attributes:
      query: the query side.
      kv: the KV side.
      shared: per-head parameters, dropout seeds, block-sparse mask, global indices.
    """

    query: QuerySide
    kv: KVSide
    shared: SharedInputs = SharedInputs()

    @property
    def q_length(self) -> int:
        """T."""
        return self.query.length

    @property
    def kv_length(self) -> int:
        """S."""
        return self.kv.length

    @property
    def groups(self) -> int:
        """N // K: the number of query heads that share a key/value head."""
        return self.query.q.shape[2] // self.kv.k.shape[2]

    @property
    def head_dim(self) -> int:
        """H, of queries and keys."""
        return self.query.q.shape[3]

    @property
    def value_dim(self) -> int:
        """Hv, of values, of o and of its gradient."""
        return self.kv.v.shape[3]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``[B, T, N, Hv]``, the shape of o."""
        return (*self.query.q.shape[:3], self.value_dim)

    @property
    def q_positions(self) -> jax.Array:
        """int32 ``[T]``."""
        assert self.query.positions is not None
        return self.query.positions

    @property
    def kv_positions(self) -> jax.Array:
        """int32 ``[S]``."""
        assert self.kv.positions is not None
        return self.kv.positions

    @property
    def has_bias(self) -> bool:
        """Whether a bias that depends on positions is added to the logits."""
        return self.shared.alibi_slopes is not None

    @property
    def has_segments(self) -> bool:
        """Whether tokens have segment ids."""
        return self.query.segment_ids is not None

    @property
    def has_kv_bounds(self) -> bool:
        """Whether there are per-query KV bounds."""
        return bool(self.query.kv_bounds)

    def folded(self, mask: Mask) -> tuple[Mask, dict[str, jax.Array]]:
        """``(mask, KV bounds)`` that kernels apply to scores.

        Where there are per-query KV bounds, the mask's window is folded into them. Then the
        mask reads at most two values per query, and no position of the query.
        """
        bounds = self.query.kv_bounds
        if not bounds:
            return mask, bounds
        if mask.left is not None:
            start = first_key_in_window(self.q_positions, mask.left)[None]
            bounds["kv_starts"] = jnp.maximum(bounds.get("kv_starts", start), start)
        if mask.right is not None:
            end = end_of_keys_in_window(self.q_positions, mask.right)[None]
            bounds["kv_ends"] = jnp.minimum(bounds.get("kv_ends", end), end)
        return dataclasses.replace(mask, left=None, right=None), bounds

    def coordinates(
        self, q_positions: jax.Array, kv_positions: jax.Array
    ) -> ScoreCoordinates | None:
        """Coordinates of the scores ``[B, K, G, T, S]``; None without user functions.

        The positions are shaped to broadcast against the scores.
        """
        if self.shared.indices is None:
            return None
        batch, head = self.shared.indices
        heads = head.reshape(1, -1, self.groups, 1, 1)
        return ScoreCoordinates(batch.reshape(-1, 1, 1, 1, 1), heads, q_positions, kv_positions)

    @property
    def dropout_rows(self) -> jax.Array:
        """Dropout's hash of every query, ``[B, N, T]``; only with dropout."""
        seeds = self.shared.dropout_seeds
        assert seeds is not None
        return row_hashes(seeds[:, :, None], self.q_positions[None, None, :])

    def cotangents(self) -> tuple[jax.Array, jax.Array]:
        """``(do, stats)``, which a backward pass requires."""
        assert self.query.do is not None
        assert self.query.stats is not None
        return self.query.do, self.query.stats
