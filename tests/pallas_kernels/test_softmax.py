"""The end of an online softmax, which all kernels share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import softmax


@pytest.mark.parametrize("base", ["2", "e"])
def test_the_end_is_the_log_sum_exp_of_what_was_seen(base):
    scores = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 30
    scaled = scores * np.float32(np.log2(np.e) if base == "2" else 1)
    m = scaled.max(1)
    total = (np.exp2 if base == "2" else np.exp)(scaled - m[:, None]).sum(1)
    divisor, lse = softmax.finish(jnp.asarray(m), jnp.asarray(total), base)
    np.testing.assert_array_equal(np.asarray(divisor), total)
    want = np.logaddexp.reduce(scores.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.asarray(lse), want, rtol=1e-6)


def test_a_row_without_keys_has_no_weight_and_no_nan():
    m, total = softmax.start((3,), None)
    divisor, lse = softmax.finish(m, total)
    np.testing.assert_array_equal(np.asarray(divisor), 1)
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)
    divisor, lse = softmax.finish(jnp.full((3,), -jnp.inf), total, "e")
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)
    # A masked score weighs nothing beside the first m.
    assert float(jnp.exp2(-jnp.inf - m[0])) == 0
