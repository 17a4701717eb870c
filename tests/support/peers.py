"""Cases of other projects' tests, and their dense reference."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import compare
import dense
import jax
import jax.numpy as jnp
import numpy as np
from cases import slotted_segments
from rings import forward_and_gradients

import burst_jax
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import axes_size


@dataclasses.dataclass(frozen=True)
class PeerCase:
    """Random arrays and a mask.

    Attributes:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      masks: arguments of ``burst_attention``, with their values.
      packed: whether every slot of a sequence is a document that ends with padding.
      dtype: of the arrays.
    """

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    masks: tuple[tuple[str, Any], ...]
    packed: bool
    dtype: str

    def __str__(self):
        sizes = "x".join(map(str, self.query))
        packed = "-packed" if self.packed else ""
        return f"{sizes}-group{self.query[2] // self.key[2]}-{self.dtype}{packed}"


# Consecutive tests have the same case, and its reference takes up to a minute.
@functools.lru_cache(maxsize=1)
def solved(problem: PeerCase):
    """``(arrays, cotangents, segment ids, truth, one device's results)``."""
    rng = np.random.default_rng(0)
    kind = jnp.dtype(problem.dtype)
    shapes = problem.query, problem.key, problem.key, problem.query
    # Rounded one by one: the large ones take a gigabyte in float64.
    q, k, v, do = (rng.normal(size=shape).astype(kind) for shape in shapes)
    dlse = rng.normal(size=q.shape[:3]).astype(np.float32)
    ids = slotted_segments(rng, *q.shape[:2]) if problem.packed else None
    segments: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    keep = dense.kept(q.shape[1], k.shape[1], **dict(problem.masks), **segments)
    given = q, k, v, keep, do, dlse
    truth, one = (
        dense.by_row_and_key_head(results, *given) for results in (dense.truth, dense.one_device)
    )
    return (q, k, v), (do, dlse), ids, truth, one


def assert_as_good_as_dense(mesh, problem: PeerCase, layout: Layout, **options: Any):
    """Asserts that out, lse and gradients are as exact as dense attention in the same dtype.

    Padding gets exactly zero out and gradients. ``options``: further arguments of
    ``burst_attention``, which override the case's mask.
    """
    arrays, cotangents, ids, truth, one = solved(problem)
    n = axes_size(mesh, options.get("seq_axis", "seq"))
    segments: dict[str, Any] = {"query_segment_ids": ids, "key_value_segment_ids": ids}

    def run(*arrays):
        given, permuted = burst_jax.to_layout((arrays, segments), layout, n)
        results = burst_jax.burst_attention(
            *given,
            mesh=mesh,
            layout=layout,
            return_residual=True,
            **permuted,
            **(dict(problem.masks) | options),
        )
        return burst_jax.from_layout(results, layout, n)

    got = jax.device_get(forward_and_gradients(run)(arrays, cotangents))
    compare.assert_as_good_as(got, one, truth, problem.dtype)
    if ids is not None:
        out, _, dq, dk, dv = got
        padding = ids == 0
        assert padding.any()
        assert not any(x[padding].any() for x in (out, dq, dk, dv))
