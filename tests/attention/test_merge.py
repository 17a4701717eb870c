"""Merging partial attentions by their log-sum-exp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    merge,
)


def parts(*lses, dim=3, seed=0):
    """Partial attentions, one row each; rows without keys have o = 0."""
    rng = np.random.default_rng(seed)
    for lse in lses:
        lse = np.asarray(lse, np.float32)
        o = rng.normal(size=(*lse.shape, dim)).astype(np.float32)
        o = np.where(np.isfinite(lse)[..., None], o, np.float32(0))
        yield jnp.asarray(o), jnp.asarray(lse)


def test_merge_of_nothing():
    inf = np.float32(np.inf)
    (o_a, lse_a), (o_b, lse_b) = parts([-inf, 1.5, -inf], [2.5, -inf, -inf])
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    np.testing.assert_array_equal(o, [o_b[0], o_a[1], [0, 0, 0]])
    np.testing.assert_array_equal(lse, np.asarray([2.5, 1.5, -inf], np.float32))


def test_merge_weighs_by_the_number_of_equal_keys():
    (o_a, lse_a), (o_b, lse_b) = parts(np.log([3.0, 1.0]), np.log([1.0, 1.0]))
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    np.testing.assert_allclose(o, [0.75 * o_a[0] + 0.25 * o_b[0], (o_a[1] + o_b[1]) / 2], rtol=1e-6)
    np.testing.assert_allclose(lse, np.log([4.0, 2.0]), rtol=1e-6)


@pytest.mark.parametrize("base", [1e4, -1e4, 3e38, -3e38], ids=lambda base: f"{base:g}")
def test_merge_of_huge_lse(base):
    (o_a, lse_a), (o_b, lse_b) = parts([base, base, 0.0], [base, 0.0, base])
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    np.testing.assert_allclose(o[0], (o_a[0] + o_b[0]) / 2, rtol=1e-6)
    winners = (o_a[1], o_b[2]) if base > 0 else (o_b[1], o_a[2])
    np.testing.assert_array_equal(o[1:], winners)
    np.testing.assert_allclose(lse[0], base + np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(lse[1:], np.float32(max(base, 0)))


def test_merge_is_associative_and_commutative():
    rng = np.random.default_rng(1)
    lses = rng.normal(scale=5, size=(3, 50)).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    a, b, c = parts(*lses)
    left, right, turned = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*b, *a)
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(turned, merge(*a, *b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isneginf(left[1]).any()


def test_merge_has_finite_gradients_where_there_is_nothing():
    a, b = parts([-np.inf, 1.0, -np.inf], [-np.inf, -np.inf, 2.0])
    _, vjp = jax.vjp(lambda o_a, o_b: merge(o_a, a[1], o_b, b[1])[0], a[0], b[0])
    got = vjp(jnp.ones((3, 3), jnp.float32))
    np.testing.assert_array_equal(got[0], [[0] * 3, [1] * 3, [0] * 3])
    np.testing.assert_array_equal(got[1], [[0] * 3, [0] * 3, [1] * 3])
