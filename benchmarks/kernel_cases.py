"""The shapes and masks of attention that benchmarks time, their arrays and their FLOPs.

Counted FLOPs: ``4 H`` forward per unmasked score, sequence and head, with T^2 / 2 scores under
causal masks; forward and backward together 3.5 times as many, if keys and values have the same head
dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.arguments import LocalArguments
from burst_jax.attention.call import make_request
from burst_jax.ring.request import Request


class MaskOptions(TypedDict):
    """A mask as keyword arguments of burst_attention and of dot_product_attention."""

    is_causal: bool
    local_window_size: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape and mask of one attention.

    Attributes:
      name: name in the table.
      batch: batch size, B.
      length: number of queries, and of keys, T.
      heads: number of query heads, N.
      kv_heads: number of key/value heads.
      head_dim: head dim, H.
      value_dim: head dim of values, Hv; None is H.
      is_causal: whether the mask is causal.
      window: number of keys that a query attends to, its own included; None is all.
      documents: number of packed documents per sequence.
      equal_documents: whether they have the same length, or half to one and a half of it.
      sinks: whether query heads have sink logits.
      slopes: whether query heads have ALiBi slopes.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: int | None = None
    documents: int = 1
    sinks: bool = False
    slopes: bool = False
    value_dim: int | None = None
    equal_documents: bool = False

    @property
    def options(self) -> MaskOptions:
        """The mask as keyword arguments."""
        window = None if self.window is None else (self.window - 1, 0)
        return {"is_causal": self.is_causal, "local_window_size": window}

    def arguments(self) -> dict[str, Any]:
        """Mask, segment ids and per-head parameters as keyword arguments of burst_attention."""
        ids = self.segment_ids()
        segments = {} if ids is None else {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return {**self.options, **segments, **self.per_head()}

    def request(self) -> Request:
        """The request of burst_attention on one device."""
        return make_request(
            LocalArguments(**self.options),
            axis_argument="seq_axis",
            axes="seq",
            size_of=lambda *_: 1,
            head_dim=self.head_dim,
        )

    def per_head(self) -> dict[str, jax.Array]:
        """Per-head parameters as arguments of burst_attention, float32 ``[N]`` each."""
        heads = np.arange(self.heads)
        parameters = {}
        if self.sinks:
            parameters["sink_logits"] = jnp.asarray(np.cos(heads), jnp.float32)
        if self.slopes:
            # 2^(-8 / N) and its powers (arXiv 2108.12409, section 3).
            slopes = 2.0 ** (-8 * (heads + 1) / self.heads)
            parameters["alibi_slopes"] = jnp.asarray(slopes, jnp.float32)
        return parameters

    def segment_ids(self) -> np.ndarray | None:
        """Segment ids of the documents, int32 ``[B, T]``; None for one document."""
        if self.documents == 1:
            return None
        weights = np.random.default_rng(0).uniform(0.5, 1.5, self.documents)
        weights = np.ones_like(weights) if self.equal_documents else weights
        ends = np.round(np.cumsum(weights) / weights.sum() * self.length)
        row = 1 + np.searchsorted(ends, np.arange(self.length), side="right")
        return np.tile(row.astype(np.int32), (self.batch, 1))

    def scores(self) -> float:
        """Number of unmasked scores, of one sequence and head."""
        ids = self.segment_ids()
        sizes = [self.length] if ids is None else np.bincount(ids[0])[1:].tolist()
        total = 0.0
        for size in sizes:
            reach = min(self.window or size, size)
            if self.window is not None:
                total += size * reach - reach * (reach - 1) / 2
            else:
                total += size * size / (2 if self.is_causal else 1)
        return total

    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return self._products(1, 1)

    def flops_with_gradients(self) -> float:
        """FLOPs of the forward and the backward pass.

        The backward pass multiplies scores with vectors of head dim H three times (S, dQ, dK), and
        with vectors of head dim Hv twice (dP, dV).
        """
        return self._products(4, 3)

    def _products(self, of_keys: int, of_values: int) -> float:
        dims = of_keys * self.head_dim + of_values * (self.value_dim or self.head_dim)
        return 2 * self.batch * self.heads * dims * self.scores()


CASES = (
    Case("full", 1, 16384, 32, 32, 128),
    Case("causal", 1, 16384, 32, 32, 128, is_causal=True),
    Case("causal, 32/8 heads", 1, 16384, 32, 8, 128, is_causal=True),
    Case("causal, 32K, 32/8 heads", 1, 32768, 32, 8, 128, is_causal=True),
    Case("full, head dim 64", 4, 4096, 32, 32, 64),
    Case("causal, head dim 64", 4, 4096, 32, 32, 64, is_causal=True),
    Case("window 4096 of 64K, 32/8 heads", 1, 65536, 32, 8, 128, is_causal=True, window=4096),
    Case("8 documents, causal", 1, 16384, 32, 32, 128, is_causal=True, documents=8),
    Case("causal, sinks", 1, 16384, 32, 32, 128, is_causal=True, sinks=True),
    Case("causal, ALiBi", 1, 16384, 32, 32, 128, is_causal=True, slopes=True),
)


def arrays_of(case: Case) -> tuple[jax.Array, ...]:
    """Random q, k, v and dO of a case, bfloat16."""
    value_dim = case.value_dim or case.head_dim
    shapes = (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, value_dim),
        (case.heads, value_dim),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(key, (case.batch, case.length, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
