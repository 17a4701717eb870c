"""Splits of the cache, merged term by term or by reductions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import decode


def test_many_splits_are_merged_as_few_are(monkeypatch):
    """One of them without a key."""
    rng = np.random.default_rng(0)
    out, most, total = (rng.standard_normal((5, 2, 1, 3, *dims)) for dims in ((4,), (), ()))
    total[2] = 0
    arrays = (jnp.asarray(x, jnp.float32) for x in (out, most, np.abs(total)))
    splits = decode.PartialAttention(*arrays)
    few = splits.merged()
    monkeypatch.setattr(decode, "_TERMS", 4)
    for x, y in zip(splits.merged(), few, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
