"""Meshes and comparisons for all tests."""

from __future__ import annotations

import math

import compare
import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh over the first devices, with an axis of each name and size."""
    devices = jax.devices()[: math.prod(sizes.values())]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def make_mesh(
    data: int = 1, seq: int = 1, model: int = 1, *, kind: AxisType = AxisType.Auto
) -> Mesh:
    """A mesh ("data", "seq", "model") over the first devices."""
    return mesh_of(kind, data=data, seq=seq, model=model)


def relative_rms(got, want) -> float:
    """Root mean square of the difference, relative to that of ``want``; a zero ``want`` raises."""
    assert np.any(np.where(np.isfinite(want), want, 0)), "nothing to compare with"
    return float(compare.errors(got, want)[1])


def assert_close(got, want, limit: float = 1e-6) -> None:
    """Asserts that the arrays of two pytrees differ by a relative RMS of at most ``limit``.

    The default is float32 rounding. Five arrays are out, lse, dq, dk and dv: messages name them.
    """
    if isinstance(want, (list, tuple)) and len(want) == len(compare.NAMES):
        got, want = (dict(zip(compare.NAMES, tree, strict=True)) for tree in (got, want))
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    assert want, "nothing to compare with"
    for path, expected in want.items():
        error = relative_rms(got[path], expected)
        assert error <= limit, f"{jax.tree_util.keystr(path)}: relative RMS {error:.2e} > {limit}"


def random_like(tree, seed: int, scale: float = 1.0):
    """Normal random numbers, times ``scale``, of a tree's shapes and dtypes."""
    rng = np.random.default_rng(seed)

    def drawn(x):
        # JAX 0.12 compiles a program for each shape of jnp.asarray.
        return jax.device_put(np.asarray(scale * rng.standard_normal(x.shape)).astype(x.dtype))

    return jax.tree.map(drawn, tree)
