"""Logits that float32 holds, and whose differences it holds: exact, or NaN, never a silent zero."""

from __future__ import annotations

import interpreted
import interpreted_callbacks
import interpreted_sm80
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest

from pallas_kernels import REFERENCE, XLA, AttentionSpec, mosaic_sm90, softmax
from pallas_kernels.decode import PartialAttention
from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm80.implementation import mosaic_sm80
from pallas_kernels.mosaic.sm90 import online_softmax
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

LENGTH, DIM = 128, 32
SM80 = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64), deterministic=True)
SM90 = mosaic_sm90(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2))


def problem(size, dtype):
    """q and k are as large as ``size``; v and dO are not."""
    rng = np.random.default_rng(5)
    q, k, v, do = (rng.normal(size=(1, LENGTH, 1, DIM)) for _ in range(4))
    return [jnp.asarray(x, dtype) for x in (q * size, k * size, v, do)]


def program(implementation):
    """``(q, k, v, do) -> (out, lse, dq, dk, dv)`` of full attention."""
    spec = AttentionSpec.of(DIM**-0.5)
    tokens = local.tokens(np.arange(LENGTH, dtype=np.int32))

    @jax.jit
    def both(q, k, v, do):
        o, lse = local.forward(implementation, q, (k, v), tokens, tokens, spec=spec)
        delta = (o * do.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        pair, stats = (q, do), (lse, delta)
        dq, dkv = local.backward(implementation, pair, (k, v), stats, tokens, tokens, spec=spec)
        return o, lse[..., None].swapaxes(1, 2), dq, *dkv

    return lambda *arrays: [np.asarray(x, np.float64)[0, :, 0] for x in both(*arrays)]


def truth(q, k, v, do):
    """The same in float64."""
    q, k, v, do = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, do))
    logits = q @ k.T * DIM**-0.5
    m = logits.max(1, keepdims=True)
    p = np.exp(logits - m)
    total = p.sum(1, keepdims=True)
    p /= total
    o = p @ v
    ds = p * (do @ v.T - (o * do).sum(1, keepdims=True)) * DIM**-0.5
    return o, m + np.log(total), ds @ k, ds.T @ q, p.T @ do


def interpreter_of(implementation):
    return (interpreted_sm80 if implementation is SM80 else interpreted).interpreted


@pytest.mark.parametrize("implementation", [XLA, REFERENCE], ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_xla_is_exact(implementation, dtype):
    run = program(implementation)
    for size in (3e4, 3e5, 1e18):
        arrays = problem(size, dtype)
        got, want = run(*arrays), truth(*arrays)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            # dS of one key with weight 1 is the rounding error of dP - delta.
            error = 2e-5 * size if name in ("dq", "dk") else 1e-5 * np.abs(b).max()
            assert np.abs(a - b).max() < error, (name, size)


@pytest.mark.slow
@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("implementation", [SM80, SM90], ids=lambda x: x.name)
def test_kernels_are_right_or_nan(implementation):
    """Too large a logit makes all of a query's results NaN; gradients have a lower limit."""
    # 4e3: out is NaN for a fifth of the queries, gradients for all.
    sizes = 3e2, 4e3, 1e18
    with interpreter_of(implementation)():
        run = program(implementation)
        found = [run(*problem(size, "bfloat16")) for size in sizes]
    for size, (o, lse, *gradients) in zip(sizes, found, strict=True):
        want_o, want_lse, *want_gradients = truth(*problem(size, "bfloat16"))
        too_large = np.abs(want_lse[:, 0]) * np.log2(np.e) > softmax.LARGEST
        assert too_large.any() == (size > 3e2)
        np.testing.assert_array_equal(np.isnan(o).all(1), too_large)
        np.testing.assert_array_equal(np.isnan(lse[:, 0]), too_large)
        right = ~too_large
        np.testing.assert_allclose(o[right], want_o[right], atol=0.02)
        np.testing.assert_allclose(lse[right], want_lse[right], rtol=1e-6)
        for name, got, want in zip(("dq", "dk", "dv"), gradients, want_gradients, strict=True):
            if size > 3e2:
                assert np.isnan(got).all(), name
            else:
                # dS of one key with weight 1 is the rounding error of dP - delta.
                error = 0.03 * size if name != "dv" else 0.05 * np.abs(want).max()
                assert np.abs(got - want).max() < error, name


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("implementation", [SM80, SM90], ids=lambda x: x.name)
def test_the_largest_logit_may_rise_with_every_tile(implementation):
    """By less than the margin, by more, and by more than float32 holds as a power of two."""
    q, k, v, _ = problem(1, "bfloat16")
    # The first tile's keys have numbers up to -0.25 there, so some queries' logits are below 0.
    firsts = jnp.linspace(-260, 260, LENGTH) * DIM**0.5, jnp.linspace(-1, 0.5, LENGTH)
    q, k = (
        x.at[..., 0].set(first[:, None].astype(x.dtype))
        for x, first in zip((q, k), firsts, strict=True)
    )
    spec = AttentionSpec.of(DIM**-0.5)
    tokens = local.tokens(np.arange(LENGTH, dtype=np.int32))
    with interpreter_of(implementation)():
        got = interpreted_callbacks.run(
            lambda q, k, v: local.forward(implementation, q, (k, v), tokens, tokens, spec=spec),
            *(q, k, v),
        )
    o, lse = np.asarray(got[0][0, :, 0]), np.asarray(got[1][0, 0])
    want_o, want_lse = truth(q, k, v, v)[:2]
    np.testing.assert_allclose(o, want_o, atol=0.02)
    np.testing.assert_allclose(lse, want_lse[:, 0], rtol=1e-6, atol=1e-5)


def test_decoding_is_nan_where_a_split_is():
    """Also where another split has keys, or a sink."""
    most, total = jnp.asarray([3e9, 1.0]), jnp.asarray([jnp.nan, 2.0])
    most, total = (jnp.stack([x, x[::-1], x], -1)[:, None, None] for x in (most, total))
    partial = PartialAttention(jnp.ones((2, 1, 1, 3, 4)), most, total.at[..., 2].set(0))
    for sinks in (None, jnp.zeros(3)):
        out = np.asarray(partial.attention(sinks))[0, 0]
        assert np.isnan(out[:2]).all()
        np.testing.assert_array_equal(out[2], 0)


@pytest.mark.parametrize("tanh", [fragments.tanh, online_softmax.tanh])
def test_tanh_of_kernels(tanh):
    """Also where elements that share a reciprocal are as far apart as they can be."""
    far = np.array([-np.inf, -300, -20, -9, -1, 1e-30, 0.5, 3, 15, 60, 3e38, np.inf], np.float32)
    near = np.linspace(-10, 10, 4096 - far.size, dtype=np.float32)
    x = np.random.default_rng(0).permutation(np.concatenate([far, near])).reshape(-1, 128)
    for factor in (1.0, 0.02, -1.0):
        error = np.asarray(tanh(jnp.asarray(x), factor)) - np.tanh(factor * np.float64(x))
        assert np.abs(error).max() < 5e-7
    for factor in (2.0**127, -(2.0**127)):
        assert (tanh(jnp.full((1, 48), 1e-30), factor) == np.sign(factor)).all()
        assert (tanh(jnp.zeros((1, 48)), factor) == 0).all()
    x[0, 0] = np.nan
    assert np.isnan(tanh(jnp.asarray(x), 1.0)[0, 0])
