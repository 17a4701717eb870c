"""The inverse of a chunk's matrix, thread by thread, against NumPy's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import warpgroup_threads

from pallas_kernels.linear import inverse


def strictly_lower(kind):
    """A_ri = beta_r k_r k_i below the diagonal."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((64, 128))
    if kind == "nearly equal keys":
        k = k[:1] + 0.05 * k
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    beta = rng.uniform(0, 2 if kind == "beta up to 2" else 1, (64, 1))
    return np.tril(beta * (k @ k.T), -1).astype(np.float16)


@pytest.mark.parametrize("kind", ["random keys", "nearly equal keys", "beta up to 2"])
def test_inverse_of_a_chunk(kind):
    a = strictly_lower(kind)
    # What is not written is NaN.
    unwritten = np.full(64 * 64, np.nan, np.float16).view(np.uint8)
    memory = np.concatenate([warpgroup_threads.swizzled(a), unwritten])
    threads = warpgroup_threads.Warpgroup(memory)
    places = np.zeros(128, np.int64), np.full(128, 8192, np.int64)
    modules: dict[str, Any] = threads.modules()
    with mock.patch.multiple(inverse, **modules):
        inverse._invert(None, *places)
    got = warpgroup_threads.unswizzled(memory[8192:], np.float16).astype(np.float64)
    want = np.linalg.inv(np.eye(64) + a.astype(np.float64))
    assert np.abs(want).max() <= 2
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3)
    assert not np.triu(got, 1).any()
    np.testing.assert_array_equal(np.diag(got), 1)
