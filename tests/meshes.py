"""Meshes and comparisons that the tests of layers, models and training share."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(data: int = 1, seq: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh ("data", "seq") over the first devices."""
    devices = jax.devices()[: data * seq]
    return jax.make_mesh((data, seq), ("data", "seq"), axis_types=(kind,) * 2, devices=devices)


def relative_rms(got, want) -> float:
    """Root mean square of the difference, relative to that of ``want``; a zero ``want`` raises."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    size = np.sqrt(np.mean(want**2))
    assert size > 0, "nothing to compare with"
    return float(np.sqrt(np.mean((got - want) ** 2)) / size)


def assert_close(got, want, limit: float) -> None:
    """Every array of the tree ``got`` is as near to ``want`` as ``limit``, by relative RMS."""
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    for path, expected in want.items():
        error = relative_rms(got[path], expected)
        assert error <= limit, f"{jax.tree_util.keystr(path)}: relative RMS {error:.2e} > {limit}"


def random_like(tree, seed: int):
    """Standard normal cotangents of a tree's shapes and dtypes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype), tree)
