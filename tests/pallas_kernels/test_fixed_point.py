"""dQ in fixed point: its bound, its integers, and what a sum of rounded parts is worth."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import local
import numpy as np
import pytest
from implementations import quick_jit

from pallas_kernels import REFERENCE, AttentionInputs, AttentionSpec, Dropout, KVSide, QuerySide
from pallas_kernels.mosaic import fixed_point

BOUND = jnp.asarray([3.0, 1e-20, 1e6, jnp.inf, jnp.nan])


def test_64_bits_hold_small_and_negative_sums():
    """To float32's accuracy; a bound that is not finite leaves no finite sum."""
    # -(2^-14) is the integer -(2^32), whose low half is 0.
    parts = np.asarray([1.0, -(2.0**-14), 3e-8, -2.5e-9, 0.0, 9.0])
    integers = np.broadcast_to(np.rint(parts * 2.0**46).astype(np.int64), (5, 6)).copy()
    halves = integers.view(np.int32).reshape(*integers.shape, 2)
    got = fixed_point.from_64(jnp.asarray(halves), BOUND[:, None])
    np.testing.assert_allclose(got[:3], BOUND[:3, None] * parts, rtol=1e-5)
    np.testing.assert_allclose(fixed_point.factor_64(BOUND)[:3] * BOUND[:3], 2.0**46)
    assert not np.isfinite(got[3:]).any()


def test_32_bits_hold_sums_of_parts_that_wrap():
    parts = np.asarray([[1.0, 1.0, 0.5, -1.75], [1.9, -1.0, 0.0, -1e-8], [-0.3, 0.1, 0.0, 0.0]])
    factors = fixed_point.factor_32(BOUND)[:, None, None]
    np.testing.assert_allclose(factors[:3] * BOUND[:3, None, None], 2.0**30)
    with np.errstate(over="ignore"):
        integers = np.rint(parts * 2.0**30).astype(np.int32).sum(1, dtype=np.int32)
    got = fixed_point.from_32(jnp.broadcast_to(integers, (5, 3)), BOUND[:, None])
    np.testing.assert_allclose(got[:3], BOUND[:3, None] * parts.sum(1), rtol=1e-6)
    assert not np.isfinite(got[3:]).any()


@pytest.mark.parametrize("rate", [None, 0.5])
def test_the_bound_of_dq_is_attained(rate):
    """By one key whose weight is 1, and vectors of equal elements: ``(dO V - delta) K``."""
    heads, value_dim = jnp.arange(1.0, 5.0), 32
    of_keys = jnp.asarray([10.0, -20.0])
    do = jnp.broadcast_to(heads[:, None], (1, 3, 4, value_dim))
    k = jnp.broadcast_to(of_keys[:, None], (1, 1, 2, 16))
    v = jnp.broadcast_to(of_keys[:, None], (1, 1, 2, value_dim))
    delta = -100 * heads[None, :, None] * jnp.asarray([0.5, 1.0, 0.1])
    query = QuerySide(jnp.zeros((1, 3, 4, 16)), do=do, stats=jnp.stack([delta, delta]))
    spec = AttentionSpec.of(1.0)
    spec = dataclasses.replace(spec, dropout=None if rate is None else Dropout(rate))
    bound = fixed_point.dq_bound(AttentionInputs(query, KVSide(k, v)), spec)
    largest = np.repeat(np.abs(of_keys), 2)[:, None]
    dp = value_dim * np.asarray(heads)[:, None] * largest * (1 if rate is None else 2)
    np.testing.assert_allclose(bound[0], (dp + np.abs(delta[0])) * largest, rtol=1e-6)
    # The keys of other calls have products with their values four times as large, or have NaN.
    factors = jnp.asarray([4.0, 1.0])[:, None, None]
    inputs = AttentionInputs(query, KVSide(k, v))
    further = fixed_point.dq_bound(inputs, spec, lambda x: x * factors)
    np.testing.assert_allclose(further[0], (4 * dp + np.abs(delta[0])) * largest, rtol=1e-6)
    kv = KVSide(k.at[0, 0, 0].set(jnp.nan), v)
    ignoring_nan = functools.partial(jnp.fmax, 1.0)  # As a maximum over devices may.
    bound = fixed_point.dq_bound(AttentionInputs(query, kv), spec, ignoring_nan)
    np.testing.assert_array_equal(np.isfinite(bound[0, :, 0]), [False, False, True, True])


@quick_jit
def dq_and_bound(q, k, v, do):
    tokens, spec = local.tokens(jnp.arange(40, dtype=jnp.int32)), AttentionSpec.of(1.0, right=0)
    o, lse = local.forward(REFERENCE, q, (k, v), tokens, tokens, spec=spec)
    stats = lse, jnp.einsum("btnh,btnh->bnt", do, o)
    dq, _ = local.backward(REFERENCE, (q, do), (k, v), stats, tokens, tokens, spec=spec)
    inputs = local.inputs_of(q, k, v, tokens, tokens)
    return dq, fixed_point.dq_bound(local.with_cotangents(inputs, do, jnp.stack(stats)), spec)


@pytest.mark.parametrize("scale_of_do", [1.0, 1e-22, 1e25])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_no_dq_exceeds_the_bound(outlier, scale_of_do):
    """Also where float32 cannot square dO. An outlier of K and one of V at different keys."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=(2, 40, n, 16)).astype(np.float32) for n in (4, 2, 2, 4))
    k[:, 3] *= outlier
    v[:, 9] *= outlier
    do = (do * scale_of_do).astype(np.float32)
    dq, bound = map(np.asarray, dq_and_bound(q, k, v, do))
    ratios = np.abs(dq).max(3) / bound.swapaxes(1, 2)
    assert 0.02 < ratios.max() < 1
    # Tighter than the largest K and the largest V at one key.
    largest = np.linalg.norm(do[0, 0, 0] / scale_of_do) * np.abs(k[0, :, 0]).max()
    largest *= np.linalg.norm(v[0, :, 0], axis=1).max() * scale_of_do
    assert outlier == 1 or bound[0, 0, 0] < largest / 4
