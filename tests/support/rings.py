"""Small causal rings on meshes of three axes, and dense attention on the same arrays."""

from __future__ import annotations

from typing import Any

import dense
import jax
import numpy as np
from implementations import quick_jit
from meshes import assert_close as assert_close
from meshes import make_mesh as make_mesh

import burst_jax

B, T, N, K, H = 2, 32, 4, 2, 8


def make_inputs(
    seed=0, batch=B, kv_batch=None, length=T, heads=N, dim=H
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any]]:
    """``((query, key, value), (cotangents of out and lse))``, float32, in natural order."""
    rng = np.random.default_rng(seed)
    kv = (kv_batch or batch, length, K, dim)
    q = (batch, length, heads, dim)
    q, k, v, do, dlse = (
        rng.normal(size=shape).astype(np.float32) for shape in (q, kv, kv, q, q[:3])
    )
    return (q, k, v), (do, dlse)


def one_device(arrays, cotangents, **options):
    """``(out, lse, dq, dk, dv)`` of dense causal attention in float64."""
    query, key, value = arrays
    options = {"query": query, "key": key, "value": value, "is_causal": True} | options
    return dense.reference(*cotangents, **options).truth


def attend(mesh, layout: str = "zigzag", **options: Any):
    """``(query, key, value) -> (out, lse)``, tokens in natural order outside, permuted inside."""
    n = mesh.shape["seq"]
    options = {"is_causal": True, **options}

    def run(*arrays):
        arrays = burst_jax.to_layout(arrays, layout, n)
        results = burst_jax.burst_attention(
            *arrays,
            mesh=mesh,
            layout=layout,
            return_residual=True,
            **options,
        )
        return burst_jax.from_layout(results, layout, n)

    return run


def forward_and_gradients(run, jit=True):
    """``(arrays, cotangents) -> (out, lse, dq, dk, dv)``."""

    def both(arrays, cotangents):
        results, vjp = jax.vjp(run, *arrays)
        return *results, *vjp(cotangents)

    return quick_jit(both) if jit else both


def ring_of(n, **options):
    return attend(make_mesh(1, n, 1), **options)
